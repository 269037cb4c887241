# SPDX-License-Identifier: Apache-2.0
"""Tree LM: a Transformer over linearized trees, and Transformer Grammars (Sartran et al. 2022).

    (S (NP the blue bird) (VP sings))  ->  <s> (S (NP the blue bird NP) (VP sings VP) S)

One softmax predicts words, opening labels and closing labels. Under `structure_attention="stack_compose"` a closing
label composes its constituent (see `models/tree_lm/linearization.py`). Words are read and written with one table,
labels with another, so that the vocabulary of words is that of the tokenizer.

The slow and obvious version is in `tests/reference/tree_lm.py`.

Shapes: B sentences, T tokens, A actions, P positions, N predicted tokens of all sentences, D width, V vocabulary, Y
labels. Log-probabilities and losses in nats.

Source: the authors' program (google-deepmind/transformer_grammars), whose numbers this gives. It counts illegal labels
and clips gradients as described in docs/models/tree-lm.md.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_synlm.core.backbone_adapter import AdapterLoading
from hf_synlm.core.hidden_states import kept_states
from hf_synlm.core.losses import linear_cross_entropy, widened
from hf_synlm.core.module_tools import evaluation_mode, unwrapped, weight_of
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.core.rows import at_places, check_rows, tokens_first
from hf_synlm.core.token_batch import attended_tokens
from hf_synlm.generation.given_trees import GivenTrees
from hf_synlm.generation.labeled.classification import TreeClassifierMixin, TreeReading
from hf_synlm.generation.labeled.mixin import FastTrackGenerationMixin, LabeledTrees
from hf_synlm.generation.tree_states import TreeStates
from hf_synlm.models.tree_lm.adapter import BackboneAdapterMixin
from hf_synlm.models.tree_lm.attention_entropy import entropy_of_positions, output_products
from hf_synlm.models.tree_lm.backbone import make_backbone, run_backbone
from hf_synlm.models.tree_lm.bottom_up import BinaryTreeLMStackMachine
from hf_synlm.models.tree_lm.configuration_tree_lm import TreeLMConfig
from hf_synlm.models.tree_lm.layers import TreeLMAttention, TreeLMLayer, position_vectors
from hf_synlm.models.tree_lm.linearization import Linearization, check_derivations, linearize, share_prefixes
from hf_synlm.models.tree_lm.stack_machine import TreeLMStackMachine, action_logits, split_words
from hf_synlm.search.outputs import SyntacticModelOutput
from hf_synlm.search.token_head import rows_at_once
from hf_synlm.trees.given import check_actions, counted_words
from hf_synlm.trees.prefixes import distinct_prefixes
from hf_synlm.trees.transitions import SHIFT


class TreeLMPreTrainedModel(LabeledTrees, AdapterLoading):
    """Loading, saving and initialization shared by the Tree LMs."""

    config: TreeLMConfig
    stack_machine_class = TreeLMStackMachine

    def __init__(self, config: TreeLMConfig):
        super().__init__(config)
        self.supports_gradient_checkpointing = config.backbone_config is not None
        self.stack_machine_class = BinaryTreeLMStackMachine if config.is_bottom_up else TreeLMStackMachine

    def _add_heads(self) -> None:
        config = self.config
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.label_head = nn.Linear(config.hidden_size, config.num_label_tokens)

    def label_table(self) -> Tensor:
        """Weights [Y, D] of the head of the labels.

        A head that is tied reads the embeddings, of which PEFT may train a copy (`modules_to_save`), unless PEFT wraps
        the head itself.
        """
        tied = self.config.tie_word_embeddings and type(self.label_head) is nn.Linear
        return weight_of(self.base_model.embed_labels if tied else self.label_head)

    def label_logits(self, states: Tensor) -> Tensor:
        """Logits [.., Y] of the labels from the states [.., D] that predict them."""
        return F.linear(states, self.label_table(), unwrapped(self.label_head).bias)

    def tie_weights(self, missing_keys: set[str] | None = None, **kwargs: Any) -> None:
        """Tie as transformers does, and tie the labels if the words are untied and a file holds one table of labels."""
        super().tie_weights(missing_keys, **kwargs)
        head, source = "label_head.weight", self._tied_weights_keys.get("label_head.weight")
        if missing_keys and head in missing_keys and not missing_keys & {"lm_head.weight", source}:
            self.label_head.weight = self.base_model.embed_labels.weight
            missing_keys.discard(head)

    @classmethod
    def adapted_class(cls) -> Any:
        """The class of model from which an adapter was saved."""
        return TreeLMForCausalLM

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the authors do: variance 2 / L over the inputs of a layer; embeddings uniform, 1 over D."""
        if isinstance(module, nn.Embedding):
            bound = (3 / module.embedding_dim) ** 0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.Linear):
            deviation = (2 / self.config.num_hidden_layers / module.in_features) ** 0.5
            init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, TreeLMAttention):
            deviation = len(module.content_bias) ** -0.5
            for bias in (module.content_bias, module.position_bias):
                init.trunc_normal_(bias, std=deviation, a=-2 * deviation, b=2 * deviation)
        elif isinstance(module, TreeLMModel) and self.config.subwords:
            init.ones_(module.word_final)


# ---------------------------------------------------------------------------------------------- base model
class TreeLMModel(TreeStates, TreeLMPreTrainedModel):
    """The Transformer over linearized derivations, from whose states heads predict words and labels.

    Args:
        config: sizes.
        add_heads: also create the heads, which are needed to search for a derivation when none is given. Models with
            heads of their own leave them out.
    """

    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight", "label_head.weight": "embed_labels.weight"}

    def __init__(self, config: TreeLMConfig, add_heads: bool = True):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_labels = nn.Embedding(config.num_label_tokens, config.hidden_size)
        if config.backbone_config is None:
            self.layers = nn.ModuleList([TreeLMLayer(config, number) for number in range(config.num_hidden_layers)])
            self.dropout = nn.Dropout(config.dropout)
        else:
            self.backbone = make_backbone(config.backbone_config)
        if config.subwords:
            self.word_final = nn.Buffer(torch.ones(config.vocab_size, dtype=torch.bool))
        self.add_own_heads(add_heads)
        self.post_init()

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [.., D] of words and labels [..]; labels count from V on, openings first."""
        is_word = tokens < self.config.vocab_size
        words = self.embed_tokens(tokens.masked_fill(~is_word, 0))
        labels = self.embed_labels((tokens - self.config.vocab_size).clamp(min=0))
        return torch.where(is_word[..., None], words, labels)

    def decode(
        self, embedded: Tensor, mask: Tensor, index: Tensor, cache: Any = None, is_causal: bool = True
    ) -> list[Tensor]:
        """Run the layers on `embedded` [B, P, D]: the embeddings and the states after each layer.

        `mask` [B, P, S] is True where the row sees the column; the last P columns are the rows. `index` [B, P, S] are
        relative positions, counted from the smallest. A backbone with a cache returns the last states only. Without
        one, it ignores the mask if `is_causal`.
        """
        if self.config.backbone_config is not None:
            return run_backbone(self.backbone, embedded, mask, index, cache, is_causal)
        states, positions = [self.dropout(embedded)], self.position_table(mask, embedded)
        for layer in self.layers:
            states.append(layer(states[-1], mask, index, positions, cache))
        states[-1] = self.dropout(states[-1])
        return states

    def position_table(self, mask: Tensor, like: Tensor) -> Tensor:
        """Vectors [R, D] of the relative positions under a mask [B, P, S]."""
        config, lowest, highest = self.config, 0, mask.shape[2] - 1
        if config.structure_attention == "stack_compose":
            lowest, highest = config.min_relative_position, config.max_relative_position
        return self.dropout(position_vectors(lowest, highest, config.hidden_size, like))

    def lay_out(self, input_ids: Tensor, actions: Tensor, mask: Tensor, word_ends: Tensor | None) -> Linearization:
        """Check derivations [B, A] and linearize them; `word_ends` = None: every token is a word."""
        check_actions(actions, mask, word_ends)
        check_rows(mask)
        ends = None if word_ends is None else tokens_first(word_ends, mask)
        check_derivations(actions, mask.sum(1), ends, self.config)
        return linearize(actions, tokens_first(input_ids.long().masked_fill(~mask, 0), mask), self.config)

    def states_of(self, given: GivenTrees) -> SyntacticModelOutput:
        """States [.., D] of given derivations; see `TreeStates`."""
        plan = self.lay_out(given.input_ids, given.trees, given.mask, given.word_ends)
        states = self.decode(self.embed(plan.tokens), plan.mask, plan.relative)
        before = _rows(states[-1], plan.last[:, :-1]) * (given.trees != 0)[..., None]
        return SyntacticModelOutput(
            last_hidden_state=_after_words(states[-1], plan, given.trees, given.mask),
            action_hidden_state=before,
            sentence_state=_rows(states[-1], plan.last[:, -1:])[:, 0],
            hidden_states=self.hidden_states(given, states, plan),
        )

    @property
    def num_states(self) -> int:
        """See `TreeStates`."""
        return self.config.num_hidden_layers + 1

    def hidden_states(
        self, given: GivenTrees, states: list[Tensor], plan: Linearization
    ) -> tuple[Tensor | None, ...] | None:
        """Hidden states [B, T, D] at each token, 0 at padding, and None at places that are not wanted.

        `states` are the embeddings and the states of all layers [B, P, D].
        """
        if not given.wanted:
            return None
        return kept_states([_after_words(state, plan, given.trees, given.mask) for state in states], given.wanted)


def _rows(states: Tensor, places: Tensor) -> Tensor:
    """States [B, X, D] at positions [B, X]."""
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))


def _after_words(states: Tensor, plan: Linearization, actions: Tensor, mask: Tensor) -> Tensor:
    """States [B, T, D] at the positions of tokens, 0 at padding."""
    return at_places(_rows(states, plan.last[:, 1:])[actions == SHIFT], mask, mask.shape)


# ---------------------------------------------------------------------------------------------- language model
def _softmax_weights(model: Any) -> tuple[Tensor, Tensor]:
    """Weights [V + Y, D] and biases of words and labels, which share a softmax."""
    table = torch.cat([weight_of(model.lm_head), model.label_table()])
    return table, torch.cat([unwrapped(model.lm_head).bias, unwrapped(model.label_head).bias])


def _score_derivations(
    model: Any, given: GivenTrees, hidden: Tensor, plan: Linearization, **fields: Any
) -> SyntacticLMOutput:
    """Predict every token of linearized trees from the states [B, P, D]."""
    actions, mask = given.trees, given.mask
    taken, shifts = actions != 0, actions == SHIFT
    weights = torch.full_like(actions, given.weights["action"], dtype=torch.float32)
    weights[shifts] = counted_words(given.input_ids, given.labels, mask)[mask].float() * given.weights["word"]
    before, (table, bias) = _rows(hidden, plan.last[:, :-1])[taken], _softmax_weights(model)
    total, loss = linear_cross_entropy(before, table, plan.targets[taken], weights[taken], bias)
    word = (loss * weights[taken])[shifts[taken]].sum()
    joint = loss.new_zeros(len(actions)).index_add(0, taken.nonzero()[:, 0], -loss)
    losses = {"action": total.detach() - word, "word": word}
    output = SyntacticLMOutput(loss=total, losses=losses, joint_log_prob=joint, **fields)
    if given.output_logits:
        words = model.lm_head(before).float()
        sums = split_words(words, model.config)
        found = action_logits(*sums, model.label_logits(before), plan.open_label[taken], model.config)
        output.action_logits = at_places(found, taken, actions.shape)
        output.token_logits_given_tree = at_places(words[shifts[taken]], mask, mask.shape)
    return output


class TreeLMForCausalLM(BackboneAdapterMixin, FastTrackGenerationMixin, TreeLMPreTrainedModel):
    """Tree LM with its heads: training objective (`score_trees`), marginal next-token distribution, search.

    `generate` takes `fast_track_size` besides the options of `SyntacticGenerationMixin.generate`; `num_beams` is the
    word beam and `action_beam_size` the beam inside a word. A generated sentence ends when its tree is closed, which
    `eos_token_id` stands for. With `eos_token_id=None` it goes on until a stopping criterion, which closes its tree.

    Loss: - sum_j log p(y_j | y_<j) over the tokens y of the linearized trees; "action" is the part of the labels. The
    transition system of `actions` is `config.linearization`. Cost: O(L P (P D + D^2)) for P positions, all at once.
    """

    bare_class = TreeLMModel
    _tied_weights_keys = {
        "lm_head.weight": "model.embed_tokens.weight",
        "label_head.weight": "model.embed_labels.weight",
    }

    def score_prefixes(self, given: GivenTrees) -> Tensor | None:
        """Log-probabilities of trees of one text; see `TreeScoringMixin`."""
        model, actions, taken = self.model, given.trees, given.trees != 0
        plan = model.lay_out(given.input_ids, actions, given.mask, given.word_ends)
        prefixes = distinct_prefixes(plan.tokens, plan.last[:, -1:])
        if not prefixes.pay(1):  # the masks are larger
            return None
        row, place = share_prefixes(plan, prefixes), prefixes.place
        hidden = model.decode(model.embed(row.tokens), row.mask, row.relative, is_causal=False)[-1][0]
        before, own = place.gather(1, plan.last[:, :-1])[taken].unique(return_inverse=True)
        states, (table, bias), targets = hidden[before], _softmax_weights(self), plan.targets[taken]
        parts = states.split(rows_at_once(states, len(bias)))
        sums = [widened(F.linear(part, table, bias)).logsumexp(1) for part in parts]
        logits = widened((states[own] * table[targets]).sum(1)) + bias[targets]
        log_probs = logits - torch.cat(sums)[own]
        return log_probs.new_zeros(len(actions)).index_add(0, taken.nonzero()[:, 0], log_probs)

    @torch.no_grad()
    def attention_entropy(
        self,
        input_ids: Tensor,
        actions: Tensor,
        attention_mask: Tensor | None = None,
        word_ends: Tensor | None = None,
        kind: str = "projected",
    ) -> Tensor:
        """Normalized attention entropy of given derivations where each token is read, summed over heads.

        Args:
            input_ids: [B, T] token ids.
            actions: [B, A] complete derivations, 0 = padding.
            attention_mask: [B, T], 1 = token; padding left or right.
            word_ends: [B, T] as in `forward`.
            kind: "projected" (weights count by the length of what they add to the output of attention) or "raw".

        Returns:
            [B, T] between 0 and the number of heads, 0 at padding; see `models/tree_lm/attention_entropy.py`.

        Raises:
            ValueError: for an unknown kind, and as `forward`.

        Cost: that of `forward` without its heads, and of the last attention once more.
        """
        mask, base = attended_tokens(self.config, input_ids, attention_mask), self.model
        word_ends = self.word_ends_of(input_ids) if word_ends is None else word_ends
        with evaluation_mode(self):
            plan = base.lay_out(input_ids, actions, mask, word_ends)
            embedded, products = base.embed(plan.tokens), output_products(base, kind)
            found = entropy_of_positions(base, embedded, plan.mask, plan.relative, products)
        return _after_words(found[..., None], plan, actions, mask)[..., 0]

    def score_trees(self, given: GivenTrees) -> SyntacticLMOutput:
        """Loss and probability of given derivations; see `TreeScoringMixin`."""
        actions, mask = given.trees, given.mask
        plan = self.model.lay_out(given.input_ids, actions, mask, given.word_ends)
        states = self.model.decode(self.model.embed(plan.tokens), plan.mask, plan.relative)
        given.weights = self.loss_weights(given)
        hidden_states = self.model.hidden_states(given, states, plan)
        return _score_derivations(self, given, states[-1], plan, hidden_states=hidden_states)


# ---------------------------------------------------------------------------------------------- classification
class TreeLMForSequenceClassification(TreeClassifierMixin, TreeLMPreTrainedModel):
    """Tree LM with a classifier on its state when the tree of the sentence is closed.

    Its weights are those of `TreeLMForCausalLM`, so that it starts from a language model, and the classifier's.
    """

    bare_class = TreeLMModel
    _tied_weights_keys = {
        "lm_head.weight": "model.embed_tokens.weight",
        "label_head.weight": "model.embed_labels.weight",
    }

    def read_trees(self, given: GivenTrees) -> TreeReading:
        """The state when the tree is closed; see `TreeClassifierMixin`."""
        plan = self.model.lay_out(given.input_ids, given.trees, given.mask, given.word_ends)
        states = self.model.decode(self.model.embed(plan.tokens), plan.mask, plan.relative)
        return TreeReading(
            _rows(states[-1], plan.last[:, -1:])[:, 0],
            self.model.hidden_states(given, states, plan),
            int((given.trees != 0).sum()),
            lambda: _score_derivations(self, given, states[-1], plan),
        )
