# SPDX-License-Identifier: Apache-2.0
"""Pushdown Layers: a causal Transformer with a stack tape (Murty et al., EMNLP 2023).

    (S (NP the blue bird) (VP sings)), binarized   ->   words, and one attachment for each of them

The model generates a word and then attaches it to a constituent on its stack (see `models/pushdown/tape.py`). A tape
records how many constituents contain each position so far, and attention sees the tape. So the tree costs no positions.

Shapes: B sentences, T columns, P positions (the begin token and the tokens), D width, V vocabulary. Log-probabilities
and losses in nats.

Source: Murty et al. 2023 and the authors' program, whose numbers this gives; see docs/models/pushdown.md.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_synlm.core.hidden_states import kept_states
from hf_synlm.core.losses import widened
from hf_synlm.core.module_tools import SyntacticPreTrainedModel, also_takes
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.core.rows import after_columns, check_rows, tokens_first
from hf_synlm.core.token_batch import attended_tokens
from hf_synlm.generation.given_trees import GivenTrees
from hf_synlm.generation.mixin import SyntacticGenerationMixin
from hf_synlm.generation.tree_states import TreeStates, score_parts
from hf_synlm.models.pushdown.configuration_pushdown import PushdownConfig
from hf_synlm.models.pushdown.layers import AttachmentHead, DepthEmbedding, FeedForwardLinear, PushdownLayer
from hf_synlm.models.pushdown.search import PushdownMachine, PushdownSearch
from hf_synlm.models.pushdown.tape import stack_tape
from hf_synlm.search.outputs import SyntacticModelOutput
from hf_synlm.trees.given import counted_words
from hf_synlm.trees.prefixes import PATH_COST, distinct_prefixes

IGNORED = -100


class PushdownPreTrainedModel(SyntacticPreTrainedModel):
    """Loading, saving and initialization."""

    config: PushdownConfig

    def word_search(
        self, num_beams: int | None = None, eos_token_ids: Tensor | None = None, renormalize: bool = False
    ) -> PushdownSearch:
        """Word-synchronous search with this model; `renormalize` is not used."""
        width = self.config.scoring_num_beams if num_beams is None else num_beams
        return PushdownSearch(PushdownMachine(self), width, eos_token_ids)

    def _add_heads(self) -> None:
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size)
        self.attachment_head = AttachmentHead(self.config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the authors do: embeddings and feed-forward layers by Xavier, depths from N(0, 1).

        Only modules with parameters of their own come here: transformers skips others of custom code.
        """
        if isinstance(module, DepthEmbedding):
            init.normal_(module.weight)
        elif isinstance(module, nn.Embedding):
            init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            if isinstance(module, FeedForwardLinear):
                init.xavier_uniform_(module.weight, gain=module.gain)
            else:
                init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)


class PushdownModel(TreeStates, PushdownPreTrainedModel):
    """The Transformer with a stack tape.

    Args:
        config: sizes.
        add_heads: also create the heads, which are needed to search for trees when none are given.
    """

    tree_field = "attachments"
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: PushdownConfig, add_heads: bool = True):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([PushdownLayer(config, number) for number in range(config.num_hidden_layers)])
        self.dropout = nn.Dropout(config.dropout)
        self.add_own_heads(add_heads)
        self.post_init()

    def embed(self, tokens: Tensor) -> Tensor:
        """Scaled embeddings [.., D]."""
        return self.embed_tokens(tokens) * self.config.hidden_size**0.5

    def clip_tape(self, tape: Tensor) -> Tensor:
        """Rows of the depth tables for the numbers on a tape."""
        return tape.clamp(max=1 if self.config.stack_tape == "binary" else self.config.num_depths - 1)

    def decode(self, embedded: Tensor, mask: Tensor, distance: Tensor, tape: Tensor, cache: Any = None) -> list[Tensor]:
        """Run the layers on `embedded` [B, P, D]: the embeddings and the states after each layer.

        `mask` [B, P, S] is True where the row sees the column; the last P columns are the rows. `distance` [B, P, S]
        tells how far the column is before the row, `tape` [B, P, S] holds the numbers on the tape.
        """
        states, tape = [self.dropout(embedded)], self.clip_tape(tape)
        for layer in self.layers:
            states.append(layer(states[-1], mask, distance, tape, cache))
        return states

    def lay_out(self, input_ids: Tensor, mask: Tensor, attachments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put the begin token before the tokens of each row, and read the attachments [B, T] (negative = not attached).

        Returns ids and attachments [B, P], and the tape [B, P, P].
        """
        if attachments.shape != input_ids.shape or attachments.is_floating_point():
            raise ValueError(
                f"attachments are {attachments.dtype} {tuple(attachments.shape)}, input_ids {tuple(input_ids.shape)}. "
                "Give one position per input id."
            )
        check_rows(mask)
        ids = F.pad(tokens_first(input_ids.masked_fill(~mask, 0), mask), (1, 0), value=self.config.bos_token_id)
        decisions = F.pad(tokens_first(attachments.masked_fill(~mask, IGNORED), mask), (1, 0), value=IGNORED)
        place = torch.arange(ids.shape[1], device=ids.device)
        # The end word is not attached on the tape, as in the authors' training.
        given = decisions >= 0
        if self.config.end_token_id is not None:
            given = given & (ids != self.config.end_token_id)
        return ids, decisions, stack_tape(torch.where(given, decisions, place))

    def run(self, ids: Tensor, tape: Tensor) -> list[Tensor]:
        """`decode` of whole rows [B, P], padded on the right."""
        place = torch.arange(ids.shape[1], device=ids.device)
        distance = (place[:, None] - place).expand(len(ids), -1, -1)
        return self.decode(self.embed(ids), distance >= 0, distance.clamp(min=0), tape)

    @also_takes(TreeStates.states_with_trees)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attachments: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> SyntacticModelOutput:
        """States of sentences with their trees.

        Args:
            input_ids: [B, T] token ids, with or without the begin token.
            attachments: [B, T] see `PushdownForCausalLM.forward`; default: those of the best tree that `parse` finds.
            attention_mask: [B, T], 1 = token; padding left or right.
            **options: see `TreeStates.states_with_trees`.

        Returns:
            `SyntacticModelOutput` with `last_hidden_state` [B, T, D]; at padding that of the token before.

        Cost: O(L P (P D + D^2)).
        """
        return self.states_with_trees(input_ids, attention_mask, attachments, **options)

    @property
    def num_states(self) -> int:
        """See `TreeStates`: embeddings, and the states of every layer."""
        return len(self.layers) + 1

    def states_of(self, given: GivenTrees) -> SyntacticModelOutput:
        """States of given trees; see `TreeStates`."""
        ids, _, tape = self.lay_out(given.input_ids, given.mask, given.trees)
        states = [after_columns(state, given.mask) for state in self.run(ids, tape)]
        return SyntacticModelOutput(last_hidden_state=states[-1], hidden_states=kept_states(states, given.wanted))

    def best_trees(self, input_ids: Tensor, mask: Tensor, word_ends: Tensor | None) -> Tensor:
        """Attachments [B, T] of the best trees; -100 = not attached. See `TreeStates`."""
        actions = super().best_trees(input_ids, mask, word_ends)
        # A word is the action 0; its attachment follows, if it has one.
        words = (actions != 0).long().argsort(dim=1, stable=True)[:, : mask.shape[1]]
        follows = F.pad(actions, (0, 1))[:, 1:].gather(1, words)
        found, is_word = torch.full_like(input_ids, IGNORED), tokens_first(mask, mask)[:, : words.shape[1]]
        found[mask] = torch.where(follows > 0, follows - 1, IGNORED)[is_word]
        return found


class PushdownForCausalLM(SyntacticGenerationMixin, PushdownPreTrainedModel):
    """Pushdown Layers with their heads: training objective, marginal next-token distribution, search.

    A generated sentence ends with `eos_token_id`, after any word. The attachments make its tree, which is closed from
    the right. So several derivations may give the same tree. In the `actions` of `parse` 0 is a word, and 1 + a its
    attachment to position a.

    Loss = language_model + attachment, the means of - log p over the labels and over the attachments.
    """

    bare_class = PushdownModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    stack_machine_class = PushdownMachine
    word_search = PushdownPreTrainedModel.word_search  # and not that of the mixin
    tree_field, loss_parts = "attachments", ("attachment", "language_model")
    predicts_special_tokens = True

    @also_takes(SyntacticGenerationMixin.forward_with_trees)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        attachments: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> SyntacticLMOutput:
        """Loss and probability of given trees with `attachments`, next-token log-probabilities without.

        Args:
            input_ids: [B, T] token ids, one sentence per row, with or without the begin token.
            attention_mask: [B, T], 1 = token; padding left or right. By default everything but padding.
            attachments: [B, T] for every token the position that it is attached to, counted from 0 at the begin token
                (see models/pushdown/tape.py). -100 = not attached, as at end tokens. The search shifts these with
                probability 1 inside a text.
            labels: [B, T] = `input_ids` with -100 where the word loss does not count; default: all tokens.
            **options: see `TreeScoringMixin.forward_with_trees`.

        Returns:
            `SyntacticLMOutput`; with `output_logits` `action_logits` [B, P, P + 1] (row t attaches position t + 1; P
            positions) and `token_logits_given_tree` [B, P, V] (row t predicts position t + 1).

        Cost: objective: one pass over all positions. Logits: T words, each a pass over `scoring_num_beams` rows.
        """
        return self.forward_with_trees(input_ids, attention_mask, attachments, labels=labels, **options)

    def score_trees(self, given: GivenTrees) -> SyntacticLMOutput:
        """Loss and probability of given trees; see `TreeScoringMixin`."""
        mask = given.mask
        ids, decisions, tape = self.model.lay_out(given.input_ids, mask, given.trees)
        given.weights = self.loss_weights(given)
        states = self.model.run(ids, tape)
        hidden = states[-1]
        scores, attached = self._attachment_scores(hidden, ids, tape), decisions[:, 1:] >= 0
        loss = F.cross_entropy(widened(scores[attached]), decisions[:, 1:][attached], reduction="none")
        before, place = hidden[:, :-1][tokens_first(mask, mask)], mask.nonzero(as_tuple=True)
        output = score_parts(self, given, loss, attached.nonzero()[:, 0], before, place)
        if given.wanted:
            output.hidden_states = kept_states([after_columns(state, mask) for state in states], given.wanted)
        if given.output_logits:
            output.action_logits, output.token_logits_given_tree = scores, self.lm_head(hidden)
        return output

    def score_prefixes(self, given: GivenTrees) -> Tensor | None:
        """Log-probabilities of trees of one text; see `TreeScoringMixin`."""
        ids, decisions, tape = self.model.lay_out(given.input_ids, given.mask, given.trees.long())
        prefixes = distinct_prefixes(decisions)
        if not prefixes.pay(PATH_COST * prefixes.place.shape[1]):
            return None
        return PushdownMachine(self).log_probs_of_trees(ids, decisions, tape, prefixes)

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """Numbers of labels ("language_model") and of attachments ("attachment"); see `TreeScoringMixin`."""
        mask = attended_tokens(self.config, input_ids, others.get("attention_mask"))
        counted = counted_words(input_ids, others.get("labels"), mask)
        attached = (others["attachments"] >= 0) & mask
        return {"language_model": int(counted.sum()), "attachment": int(attached.sum())}

    def _attachment_scores(self, hidden: Tensor, ids: Tensor, tape: Tensor) -> Tensor:
        """Scores [B, P - 1, P] of attaching the positions from 1 on."""
        before = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
        return self.attachment_head(
            hidden[:, :-1],
            self.model.embed_tokens(ids[:, 1:]),
            self.attachment_head.keys(hidden[:, :-1]),
            self.model.clip_tape(tape[:, :-1, :-1]),
            before,
        )
