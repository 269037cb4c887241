# SPDX-License-Identifier: Apache-2.0
"""Output classes of all models: every field with its shape and unit.

Shapes: B sentences or contexts, T tokens, A actions, N hypotheses, V vocabulary, D hidden. Log-probabilities and
losses are in nats; spans are half-open `(i, j)` in token positions of the input row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from hf_synlm.core.cache import CACHE, CACHE_NAMES
from hf_synlm.trees.spans import fold_tokens, labeled_spans_to_brackets, spans_to_brackets


class InFieldOrder:
    """Mixin of outputs that keeps the declared order of the fields, even if a field is set later.

    `ModelOutput` would put such a field at the end. But `output[0]`, and the tuple of `return_dict=False`, must begin
    with the loss, or with the logits if there is no loss. An output with a cache has it under both of its names.
    """

    def __setattr__(self: Any, name: str, value: Any) -> None:
        """Set a field."""
        name = CACHE if name in CACHE_NAMES else name
        is_new = name not in self
        super().__setattr__(name, value)
        if is_new and name in self:
            names = [field.name for field in fields(self)]
            for later in names[names.index(name) + 1 :]:
                if later in self:
                    self.move_to_end(later)

    def __getattr__(self: Any, name: str) -> Any:
        """The cache under its other name."""
        if name in CACHE_NAMES and name != CACHE:
            return getattr(self, CACHE)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


@dataclass
class SyntacticLMOutput(InFieldOrder, CausalLMOutputWithPast):
    """Output of `forward` of the causal language models.

    Fields, those of transformers' output first:
        loss: scalar training objective (with `labels`); one `backward()` trains everything.
        logits: [B, T, V] natural-log probability of the next token given the prefix only, trees summed out over the
            beam. They come from a search and carry no gradient. With `labels` or `actions`, they need
            `output_marginal_logits`.
        past_key_values (`cache` from transformers 5.24 on; both names are read): search state after the last token
            (with `use_cache`).
        hidden_states, attentions: of the bare model (with `output_hidden_states`, `output_attentions`). Models whose
            next-token logits come from a search have them for given or induced trees only.
        losses: the named parts of `loss`, detached scalars.
        spans: per row the inner nodes `(i, j)` of the trees, in post-order, leaves left out (with `output_spans`).
        joint_log_prob: [B] log p(text, tree) of induced or given trees.
        action_logits: [B, A, Y] at each slot of the action sequence of the trees; Y = 2 (GEN and COMP) for GPST.
        token_logits_given_tree: [B, T, V]; position t predicts token t given the actions before it.
        chart: dict of chart tensors (with `output_chart`).
    """

    losses: dict[str, Tensor] | None = None
    spans: list[list[tuple[int, int]]] | None = None
    joint_log_prob: Tensor | None = None
    action_logits: Tensor | None = None
    token_logits_given_tree: Tensor | None = None
    chart: dict[str, Any] | None = None

    def __getitem__(self, key: Any) -> Any:
        """A field by its name, or by its place among those that are there."""
        if key == "logits" and self.logits is None:
            raise KeyError(
                "With given trees, the output holds a loss and no logits. Pass output_marginal_logits=True if the "
                "model has this argument. With Trainer, leave label_smoothing_factor at 0."
            )
        return super().__getitem__(key)


@dataclass
class SyntacticClassifierOutput(InFieldOrder, ModelOutput):
    """Output of the sequence classifiers.

    Fields:
        loss: scalar: classification loss plus the weighted language-modeling objective (with `labels`).
        logits: [B, num_labels] scores of the classes.
        losses: named parts of `loss`, detached scalars; "classification" is the classifier's own.
        spans: per row the inner nodes `(i, j)` of the induced trees (with `output_spans`).
        hidden_states, attentions: of the bare model (with `output_hidden_states`, `output_attentions`).
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    losses: dict[str, Tensor] | None = None
    spans: list[list[tuple[int, int]]] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class ParseOutput(ModelOutput):
    """Output of `parse`: trees of given text with their probabilities, best first.

    Fields:
        spans: per sentence, per hypothesis the inner nodes `(i, j)` in token positions of the input row, post-order;
            only as many hypotheses as the beam holds.
        actions: [B, N, A] action ids (GEN 0, COMP 1, padding -1; labeled trees: see `TransitionSystem`, padding 0).
        log_probs: [B, N] log p(text, tree), with the end of the text (for GPST, that its tree is complete); -inf if a
            beam holds fewer hypotheses. `None` for methods without probabilities. Under normalization "search" (RNNG,
            Tree LM) they may be out of order: the search ranks trees of a text whose length it knows.
        token_log_probs: [B, T] prefix marginal ratios log p(x_1..t) - log p(x_1..t-1), each marginal summed over the
            beam. Their sum is the log-probability of all texts that begin with this one (under normalization "search",
            RNNG and Tree LM, of those that do not end sooner), before the trees are closed. 0 at padding.
        stepwise_log_probs: [B, T] log of the normalized next-token distribution at the observed token, as in
            `forward(...).logits` (on request).
        lexical_log_probs: [B, T] the part of `token_log_probs` that comes from the words: log of the mass of the
            beam's derivations after the token minus that of the same derivations just before it. The rest comes from
            the structural actions (on request).
        text_log_probs: [B] log p(text), log sum exp of `log_probs` over the whole beam.
        beam_entropy: [B, T] entropy in nats of the beam's posterior after each token.
        num_actions: [B, T] expected number of structural actions between the previous token and this one.
        stack_depth: [B, T] expected number of trees on the stack after each token.
        attention_entropy: [B, T] expected normalized attention entropy where each token is read (on request; Tree LM).
        belief_update: [B, T] at the last token of each word, Renyi divergence in nats of the weights of derivations
            after the word from those before it (on request; defined in `search/beliefs.py`). Elsewhere it is 0.
        belief_cut: [B, T] likewise, the share of the weight after the word that the beam has dropped.
        labels: labels of `spans` (models with labeled trees).
        offsets: per sentence the position of its first token in the input row (left padding, begin token).
        lengths: per sentence its number of tokens.
        word_ends: per sentence the end (exclusive token position) of each word, if words were given.
        input_ids: [B, T] the text, as it was given.
    """

    spans: list[list[list[tuple[int, int]]]] | None = None
    actions: Tensor | None = None
    log_probs: Tensor | None = None
    token_log_probs: Tensor | None = None
    stepwise_log_probs: Tensor | None = None
    lexical_log_probs: Tensor | None = None
    text_log_probs: Tensor | None = None
    beam_entropy: Tensor | None = None
    num_actions: Tensor | None = None
    stack_depth: Tensor | None = None
    attention_entropy: Tensor | None = None
    belief_update: Tensor | None = None
    belief_cut: Tensor | None = None
    labels: list[list[list[str]]] | None = None
    offsets: list[int] | None = None
    lengths: list[int] | None = None
    word_ends: list[list[int]] | None = None
    input_ids: Tensor | None = None

    def brackets(self, words: Any, sentence: int = 0, hypothesis: int = 0) -> str:
        """Bracketed tree of one hypothesis over tokens or the caller's words.

        Args:
            words: the tokenizer; or one string per token, or per word if `word_ends` were given to `parse`.
            sentence: row of the batch.
            hypothesis: rank in the n-best list.

        Returns:
            For example `((fruit flies) (like (a banana)))`, or with labels `(S (NP the cat) (VP sleeps))`.

        Raises:
            ValueError: the number of words does not fit.
        """
        offset, length = self.offsets[sentence], self.lengths[sentence]
        spans = [(i - offset, j - offset) for i, j in self.spans[sentence][hypothesis]]
        words = _names_of(words, self.input_ids, sentence, offset, offset + length)
        ends = None if self.word_ends is None else self.word_ends[sentence]
        folds = ends is not None and len(words) == len(ends)
        if len(words) != length and not folds:
            expected = f"{length} tokens" + (f" or {len(ends)} words" if ends is not None else "")
            raise ValueError(
                f"Sentence {sentence} has {expected}, but {len(words)} words were given. Pass one word per token, or "
                "the tokenizer. For trees over words, call hf_synlm.parse_sentences(model, tokenizer, [words])."
            )
        labels = None if self.labels is None else self.labels[sentence][hypothesis]
        if folds:
            last = {end - offset - 1 for end in ends}
            is_last = [position in last for position in range(length)]
            spans = fold_tokens(spans, is_last, keep_words=labels is not None)
        return _write_tree(spans, labels, words)

    def _repr_html_(self) -> str:
        """A table of all trees for notebooks; tokens are column numbers, because the output does not contain words."""
        rows = []
        for sentence, hypotheses in enumerate(self.spans or []):
            offset = self.offsets[sentence]
            columns = [str(column) for column in range(offset, offset + self.lengths[sentence])]
            for rank in range(len(hypotheses)):
                value = "" if self.log_probs is None else f"{float(self.log_probs[sentence, rank]):.3f}"
                tree = escape(self.brackets(columns, sentence, rank))
                rows.append(f"<tr><td>{sentence}</td><td>{rank}</td><td>{value}</td><td><code>{tree}</code></td></tr>")
            if not hypotheses:
                rows.append(
                    f"<tr><td>{sentence}</td><td/><td/><td>no complete tree: a wider beam may find one</td></tr>"
                )
        names = ("sentence", "hypothesis", "log-probability (nats)", "tree over columns")
        head = "".join(f"<th>{name}</th>" for name in names)
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


@dataclass
class GeneratedTrees:
    """Mixin of the outputs of `generate` with trees.

    Fields:
        sequences_scores: [B] scores of the sequences; see the outputs.
        actions: [B, A] action ids of the whole derivation (prompt and new words, end token left out); padding is -1,
            and 0 in systems of labeled trees.
        spans: per sequence the inner nodes `(i, j)` of its tree, in columns of `sequences` (left padding included) and
            the order of the actions. Begin token and end token belong to no node.
        labels: per sequence the labels of its spans (models with labeled trees).
        offsets, lengths: per sequence the column of the first token of the tree, and its number of tokens.
    """

    sequences_scores: Tensor | None = None
    actions: Tensor | None = None
    spans: list[list[tuple[int, int]]] | None = None
    labels: list[list[str]] | None = None
    offsets: list[int] | None = None
    lengths: list[int] | None = None

    def brackets(self: Any, words: Any, sentence: int = 0) -> str:
        """Bracketed tree of one generated sequence.

        Args:
            words: the tokenizer, or one string per column of `sequences`.
            sentence: row of `sequences`.

        Returns:
            As `ParseOutput.brackets`, over tokens.

        Raises:
            ValueError: for an unknown row, a row without a tree of all its tokens, and another number of words.
        """
        if not 0 <= sentence < len(self.spans) or not self.lengths[sentence]:
            trees = sum(length > 0 for length in self.lengths)
            raise ValueError(f"Sequence {sentence} has no tree. {trees} of {len(self.spans)} sequences have a tree.")
        words = _names_of(words, self.sequences, sentence)
        if len(words) != self.sequences.shape[1]:
            raise ValueError(
                f"sequences have {self.sequences.shape[1]} columns, but {len(words)} words were given. Pass one word "
                "per column."
            )
        offset, length = self.offsets[sentence], self.lengths[sentence]
        spans = [(i - offset, j - offset) for i, j in self.spans[sentence]]
        labels = self.get("labels")
        return _write_tree(spans, None if labels is None else labels[sentence], words[offset : offset + length])


def _names_of(words: Any, ids_BT: Any, row: int, start: int = 0, stop: int | None = None) -> Any:
    """Names of the tokens of a row, from `start` to `stop`, if `words` is a tokenizer; otherwise `words`."""
    if not hasattr(words, "convert_ids_to_tokens"):
        return words
    ids = ids_BT[row, start:stop].tolist()
    # The model's vocabulary may be padded beyond the tokenizer's: such an id is written as its number.
    return [token or str(i) for token, i in zip(words.convert_ids_to_tokens(ids), ids, strict=True)]


def _write_tree(spans: list[tuple[int, int]], labels: Sequence[str] | None, words: list[str]) -> str:
    """Brackets over `words`, with labels if there are any."""
    if labels is None:
        return spans_to_brackets(spans, words)
    return labeled_spans_to_brackets([(label, i, j) for label, (i, j) in zip(labels, spans, strict=True)], words)
