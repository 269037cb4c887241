# SPDX-License-Identifier: Apache-2.0
"""Span parser: constituents with labels and tags of sentences, by an encoder of transformers.

Between two words stands a fence post f_k: the states of the last piece of word k and of the first of word k + 1. A span
(i, j) has a score for each label and for "no constituent":

    scores(i, j) = W relu(norm(A f_i + B f_j)),   loss = sum of -log p(label(i, j)) over all spans / words

The tree is the one whose constituents have the largest sum of log p(label) - log p(no constituent), by CKY.

Shapes: B sentences, T tokens, N words of the longest, P spans, D width of the encoder, Y labels with "no constituent".

Source: fence posts and CKY over spans as in Kitaev and Klein, "Constituency Parsing with a Self-Attentive Encoder" (ACL
2018); the loss of single spans instead of a margin over trees is ours.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel, initialization as init
from transformers.utils import ModelOutput

from hf_synlm.core.backbone_adapter import AdapterMixin
from hf_synlm.core.binary_trees import BinaryTrees
from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.core.outputs import ParseOutput
from hf_synlm.core.rows import columns_of_tokens, tokens_first
from hf_synlm.core.token_batch import attended_tokens
from hf_synlm.models.span_parser.configuration_span_parser import SpanParserConfig

TAG_WEIGHT = 0.3
# What the bias of "no constituent" begins with: most spans are none.
NULL_BIAS = 3.0
# Spans whose scores of all labels are in memory at a time: more leave the cache of a CPU.
_SPANS_AT_ONCE = 2**13


@dataclass
class SpanParserOutput(ModelOutput):
    """Output of `forward`.

    Fields:
        loss: scalar, with `labels`.
        logits: [B, P, Y] of the spans in the order of `torch.triu_indices(N + 1, N + 1, 1)`; without `labels`.
        tag_logits: [B, N, number of tags]; without `labels`.
        losses: the parts `span` and `tag` of `loss`, detached, in nats per word.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    tag_logits: Tensor | None = None
    losses: dict[str, Tensor] | None = None


@dataclass
class SpanParseOutput(ParseOutput):
    """`ParseOutput` with one tree for each sentence.

    Fields:
        log_probs: [B, 1] log p(tree) if spans were independent; divided by the number of words, it is a confidence.
        tags: per sentence the tag of each word.
    """

    tags: list[list[str]] | None = None


class _Words(NamedTuple):
    """Sentences as the encoder read them: states of fence posts and words, and where the words end."""

    fences: Tensor  # [B, N + 1, 2 D]
    words: Tensor  # [B, N, 2 D]
    ends: Tensor  # [B, N + 1] tokens up to each fence post
    num_words: Tensor  # [B]
    offsets: Tensor  # [B] column of the first token in the input


class SpanParserForTokenClassification(AdapterMixin):
    """A constituency parser on an encoder; `parse` gives trees, `forward` with `labels` trains."""

    config_class = SpanParserConfig
    config: SpanParserConfig
    base_model_prefix = "encoder"
    backbone_prefix = "encoder."

    def __init__(self, config: SpanParserConfig):
        super().__init__(config)
        self.encoder = _without_pooler(AutoModel.from_config(config.encoder_config))
        width, hidden = 2 * config.encoder_config.hidden_size, config.span_hidden_size
        self.left, self.right = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)
        self.label_head = nn.Linear(hidden, 1 + len(config.nonterminals))
        self.tag_head = nn.Linear(width, len(config.tags))
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    @classmethod
    def from_encoder(
        cls, name: str, nonterminals: Sequence[str], tags: Sequence[str], tokenizer: Any, **fields: Any
    ) -> Self:
        """Make an untrained parser on an encoder of the Hub, with the weights of the encoder.

        Args:
            name: folder or Hub name of an encoder, such as BERT.
            nonterminals: labels, those of unary chains joined: "S VP".
            tags: parts of speech.
            tokenizer: that of the encoder, with special tokens for begin and end.
            **fields: of `SpanParserConfig`.

        Returns:
            The parser.

        Raises:
            ValueError: the tokenizer lacks a special token.
        """
        encoder = AutoModel.from_pretrained(name, dtype=torch.float32)
        special = {
            "bos_token_id": tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id,
            "eos_token_id": tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        sizes = {"encoder_config": encoder.config, "vocab_size": encoder.config.vocab_size}
        labels = {"nonterminals": list(nonterminals), "tags": list(tags)}
        model = cls(cls.config_class(**special, **sizes, **labels, **fields))
        model.encoder.load_state_dict(_without_pooler(encoder).state_dict())
        model.backbone_source = {"name": None if os.path.isdir(name) else str(name), "sha256": model.fingerprint()}
        return model.eval()

    def load_backbone(self, name: str, **access: Any) -> None:
        """Take over the weights of the encoder of this folder or Hub name."""
        encoder = AutoModel.from_pretrained(name, dtype=torch.float32, **access)
        self.encoder.load_state_dict(_without_pooler(encoder).state_dict())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.label_head:
            init.normal_(module.weight, std=0.004)
            init.zeros_(module.bias)
            module.bias[0] = NULL_BIAS

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the heads; the encoder never has dropout."""
        super().train(mode)
        self.encoder.eval()
        return self

    # ------------------------------------------------------------------------------------------ reading
    def _read(
        self, input_ids: Tensor, attention_mask: Tensor | None, word_ends: Tensor | None, most_words: int | None
    ) -> _Words:
        """Run the encoder on rows between begin and end token; `most_words` is N if it is known."""
        config = self.config
        tokens = attended_tokens(config, input_ids, attention_mask) & (input_ids != config.eos_token_id)
        ends = tokens_first(tokens if word_ends is None else tokens & word_ends.bool(), tokens)
        num_tokens, num_words = tokens.sum(1, keepdim=True), ends.sum(1)
        if most_words is None:
            most_words = int(num_words.max())
            self._check(num_words, ends.shape[1])
        place = torch.arange(input_ids.shape[1] + 2, device=input_ids.device)
        rows = F.pad(tokens_first(input_ids, tokens), (1, 1))
        rows = rows.masked_fill(place > num_tokens, config.pad_token_id).masked_fill(place == 0, config.bos_token_id)
        rows = rows.masked_fill(place == num_tokens + 1, config.eos_token_id)
        mask = (place <= num_tokens + 1).long()
        states = self.encoder(input_ids=rows, attention_mask=mask).last_hidden_state
        # Columns of the last pieces of words, in their order; what follows them is not a word.
        last = columns_of_tokens(ends)[:, :most_words] + 1
        at = F.pad(last, (1, 0))[:, :, None].expand(-1, -1, states.shape[2])
        before, after = states.gather(1, at), states.gather(1, at + 1)
        fences = self.dropout(torch.cat([before, after], 2))
        words = self.dropout(torch.cat([after[:, :-1], before[:, 1:]], 2))
        return _Words(fences, words, at[:, :, 0], num_words, tokens.long().argmax(1))

    def _check(self, num_words: Tensor, num_tokens: int) -> None:
        if int(num_words.min()) == 0:
            raise ValueError(f"row {int(num_words.argmin())} of the batch has no word. Leave this row out.")
        most = self.config.max_position_embeddings
        if num_tokens + 2 > most:
            raise ValueError(f"The encoder reads {most - 2} tokens, but a sentence has {num_tokens}. Shorten it.")

    def _label_logits(self, left: Tensor, right: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Scores [B, P, Y] of spans, given A f and B f of all fence posts."""
        return self.label_head(F.relu(self.norm(left[:, i] + right[:, j])))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        word_ends: Tensor | None = None,
        labels: Tensor | None = None,
        tag_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SpanParserOutput:
        """Score all spans of sentences, and their tags.

        Args:
            input_ids: [B, T] tokens; begin and end tokens are left out or skipped.
            attention_mask: [B, T].
            word_ends: [B, T] True at the last token of each word; default: every token is a word.
            labels: [B, N + 1, N + 1] label of each span (i, j), 0 = no constituent, -100 = not a span. With them, only
                losses are returned.
            tag_labels: [B, N], -100 at padding.
            **kwargs: ignored (of `Trainer`).

        Returns:
            Loss, or scores.

        Raises:
            ValueError: a row has no word, or too many tokens (without `labels`).
        """
        found = self._read(input_ids, attention_mask, word_ends, None if labels is None else labels.shape[1] - 1)
        left, right = self.left(found.fences), self.right(found.fences)
        i, j = torch.triu_indices(left.shape[1], left.shape[1], 1, device=left.device)
        logits, tag_logits = self._label_logits(left, right, i, j), self.tag_head(found.words)
        if labels is None:
            return SpanParserOutput(logits=logits, tag_logits=tag_logits)
        count = found.num_words.sum()
        losses = {"span": F.cross_entropy(logits.flatten(0, 1).float(), labels[:, i, j].flatten(), reduction="sum")}
        if tag_labels is not None:
            losses["tag"] = F.cross_entropy(tag_logits.flatten(0, 1).float(), tag_labels.flatten(), reduction="sum")
        losses = {name: value / count for name, value in losses.items()}
        loss = losses["span"] + TAG_WEIGHT * losses.get("tag", 0.0)
        return SpanParserOutput(loss=loss, losses={name: value.detach() for name, value in losses.items()})

    # ------------------------------------------------------------------------------------------ parsing
    @torch.no_grad()
    def parse(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, word_ends: Tensor | None = None
    ) -> SpanParseOutput:
        """The best tree of each sentence.

        Args:
            input_ids: [B, T] tokens; begin and end tokens are left out or skipped.
            attention_mask: [B, T].
            word_ends: [B, T] True at the last token of each word; default: every token is a word.

        Returns:
            Trees with labels, tags and log-probabilities.

        Raises:
            ValueError: a row has no word, or more tokens than the encoder has positions.
        """
        with evaluation_mode(self):
            found = self._read(input_ids, attention_mask, word_ends, None)
            gain, label, null = self._chart(self.left(found.fences), self.right(found.fences))
            tags = self.tag_head(found.words).argmax(2).tolist()
        row, count = torch.arange(len(gain), device=gain.device), found.num_words
        place = torch.arange(gain.shape[1], device=gain.device)
        # A span of a binary tree without a gain is no constituent: these trees stand for trees of any shape.
        best = BinaryTrees(gain.clamp(min=0)[:, :-1, 1:], count).argmax()
        chosen = F.pad(best, (1, 0, 0, 1)) & (gain > 0)
        chosen[row, 0, count] = True
        inside = (place[:, None] < place) & (place <= count[:, None, None])
        log_probs = (null * inside + gain * chosen).sum((1, 2))
        # Rows from the last on, so that the order is that of ends, the shorter first: post-order.
        sentence, end, back = chosen.flip(1).transpose(1, 2).nonzero().unbind(1)
        start = gain.shape[1] - 1 - back
        column = found.offsets[:, None] + found.ends
        parts = (sentence, column[sentence, start], column[sentence, end], label[sentence, start, end])
        return self._output(parts, log_probs, column, count, tags)

    def _chart(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each span its best label, the gain of its log-probability over no constituent, and the latter."""
        size, side = len(left), left.shape[1]
        i, j = torch.triu_indices(side, side, 1, device=left.device)
        gain, null = left.new_zeros(2, size, side, side, dtype=torch.float32)
        label = torch.zeros_like(gain, dtype=torch.long)
        for part in torch.arange(len(i), device=left.device).split(max(1, _SPANS_AT_ONCE // size)):
            a, b = i[part], j[part]
            scores = self._label_logits(left, right, a, b).float().log_softmax(2)
            best, which = scores[..., 1:].max(2)
            null[:, a, b], gain[:, a, b], label[:, a, b] = scores[..., 0], best - scores[..., 0], which + 1
        return gain, label, null

    def _output(
        self, parts: Sequence[Tensor], log_probs: Tensor, column: Tensor, count: Tensor, tags: list[list[int]]
    ) -> SpanParseOutput:
        """The trees as lists: of each constituent its sentence, first and last column, and label."""
        chains = [[], *(chain.split()[::-1] for chain in self.config.nonterminals)]
        spans: list[list[tuple[int, int]]] = [[] for _ in tags]
        labels: list[list[str]] = [[] for _ in tags]
        for sentence, start, end, label in zip(*(part.tolist() for part in parts), strict=True):
            spans[sentence] += [(start, end)] * len(chains[label])
            labels[sentence] += chains[label]
        counts, columns = count.tolist(), column.tolist()
        return SpanParseOutput(
            spans=[[tree] for tree in spans],
            labels=[[tree] for tree in labels],
            log_probs=log_probs[:, None],
            offsets=[row[0] for row in columns],
            lengths=[row[n] - row[0] for row, n in zip(columns, counts, strict=True)],
            word_ends=[row[1 : n + 1] for row, n in zip(columns, counts, strict=True)],
            tags=[[self.config.tags[tag] for tag in row[:n]] for row, n in zip(tags, counts, strict=True)],
        )


def _without_pooler(encoder: PreTrainedModel) -> PreTrainedModel:
    """An encoder without the layer that reads its first state only."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder


__all__ = ["SpanParserForTokenClassification"]
