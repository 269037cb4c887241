# SPDX-License-Identifier: Apache-2.0
"""A small architecture that lies outside of the package: what `docs/adding-an-architecture.md` tells to write.

A stack holds vectors. A word is pushed; a constituent is composed of the two vectors on top and takes their place. The
two on top also make the state, which predicts whether a constituent is composed next, and if not, the next word:

    h = tanh(W [below; top])    p(COMP) = sigmoid(v . h)    p(word) = softmax(E h)

A tree is given by how many constituents end after each token, `closings`. Probabilities of COMP are lost where fewer
than two vectors are on the stack.

Shapes: B sentences, T tokens, A actions, R rows, P rows of several levels, D width, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from hf_synlm.core.configuration_base import SyntacticConfig
from hf_synlm.core.module_tools import SyntacticPreTrainedModel, also_takes
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.core.rows import at_places
from hf_synlm.core.token_batch import check_aligned
from hf_synlm.generation.given_trees import GivenTrees
from hf_synlm.generation.mixin import SyntacticGenerationMixin
from hf_synlm.generation.tree_states import score_parts
from hf_synlm.search.level_machine import LevelMachine
from hf_synlm.search.stack import Levels, NodePool, Nodes
from hf_synlm.trees.actions import COMP, GEN
from hf_synlm.trees.binary import actions_to_spans


@strict
class ToyConfig(SyntacticConfig):
    """Sizes, and what the model can do."""

    model_type = "toy"
    model_classes = ("ForCausalLM",)
    searches = True
    tree_codec = "closings"
    sentence_end = "none"

    vocab_size: int = 6
    hidden_size: int = 8
    scoring_num_beams: int = 4
    output_marginal_logits: bool = False

    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int = 0
    bos_token_id: int = 1
    eos_token_id: int | None = None

    def validate_architecture(self) -> None:
        """Check that the fields are in range."""
        self.check_least(1, "vocab_size", "hidden_size", "scoring_num_beams")


def derivation(closings: Sequence[int]) -> list[int]:
    """The actions of a tree that is given by how many constituents end after each token."""
    return [action for count in closings for action in (GEN, *[COMP] * count)]


class ToyMachine(LevelMachine):
    """Runs the model on node pools."""

    def __init__(self, model: Any) -> None:
        self.config, self.dtype, self.layers = model.config, model.dtype, model.base_model
        self.lm_head, self.predict_actions = model.lm_head, model.action_log_probs

    def begin(self, batch_size: int, device: torch.device) -> tuple[NodePool, Tensor]:
        """The pool and the empty stack [B, 1]."""
        size, none = self.config.hidden_size, torch.full((batch_size, 1), -1, device=device)
        features = {"top": (size, self.dtype), "state": (size, self.dtype), "actions": (2, torch.float32)}
        pool, empty = NodePool(batch_size, features, device), none.new_zeros(batch_size, 1, size, dtype=self.dtype)
        self.append(pool, Nodes(none, none, none + 1, none, none, none), None, [empty], none, None)
        return pool, none + 1

    def generated(self, tokens: Tensor) -> list[Tensor]:
        """Vectors of words."""
        return [self.layers.embed_tokens(tokens)]

    def composed(self, pool: NodePool, parents: Tensor, left: Tensor, levels: Levels) -> list[Tensor]:
        """Vectors of constituents, each of which has the one before it as its right part."""
        vectors = [pool.feature("top", parents)]
        for part in pool.feature("top", left).split(levels.sizes, 1):
            vectors.append(self.layers.compose(part, vectors[-1][:, : part.shape[1]]))
        return [torch.cat(vectors[1:], 1)]

    def append(
        self,
        pool: NodePool,
        nodes: Nodes,
        length: Tensor | None,
        vectors: list[Tensor],
        num_tokens: Tensor,
        levels: Levels | None,
    ) -> Tensor:
        """Write nodes with their states; under the first vector stands node 0, which is zero."""
        state = self.layers.state(pool.feature("top", nodes.below), vectors[0])
        return pool.append(nodes, length=length, top=vectors[0], state=state, actions=self.predict_actions(state))

    def token_features(self, pool: NodePool, nodes: Tensor) -> Tensor:
        """States [B, R, D], which predict words."""
        return pool.feature("state", nodes)


class ToyLayers(nn.Module):
    """The layers below the heads."""

    num_states = 0

    def __init__(self, config: ToyConfig, add_heads: bool = False) -> None:
        super().__init__()
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.composition, self.reader = nn.Linear(2 * size, size), nn.Linear(2 * size, size)

    def compose(self, left: Tensor, right: Tensor) -> Tensor:
        """The vector of a constituent."""
        return self.composition(torch.cat([left, right], -1)).tanh()

    def state(self, below: Tensor, top: Tensor) -> Tensor:
        """What predicts the next action and the next word."""
        return self.reader(torch.cat([below, top], -1)).tanh()

    def read(self, tokens: Tensor, actions: Sequence[int]) -> Tensor:
        """States [A, D] before the actions of a derivation."""
        words, states = self.embed_tokens(tokens), list[Tensor]()
        stack, following = [words.new_zeros(words.shape[1])] * 2, iter(words)
        for action in actions:
            states.append(self.state(*stack[-2:]))
            stack = [*stack, next(following)] if action == GEN else [*stack[:-2], self.compose(*stack[-2:])]
        return torch.stack(states)


class ToyForCausalLM(SyntacticGenerationMixin, SyntacticPreTrainedModel):
    """The model with its heads. `closings` [B, T] count the constituents that end after each token."""

    config: ToyConfig
    bare_class = ToyLayers
    stack_machine_class = ToyMachine
    tree_field = "closings"
    predicts_special_tokens = True

    def _add_heads(self) -> None:
        self.action_head = nn.Linear(self.config.hidden_size, 1)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size)

    def action_log_probs(self, states: Tensor) -> Tensor:
        """Log-probabilities [..., 2] of GEN and COMP."""
        logit = self.action_head(states).float()
        return F.logsigmoid(torch.cat([-logit, logit], -1))

    @also_takes(SyntacticGenerationMixin.forward_with_trees)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        closings: Tensor | None = None,
        **options: Any,
    ) -> SyntacticLMOutput:
        """Loss and probability of given trees, next-token log-probabilities without; see `forward_with_trees`."""
        return self.forward_with_trees(input_ids, attention_mask, closings, **options)

    def score_trees(self, given: GivenTrees) -> SyntacticLMOutput:
        """Loss and probability of given trees."""
        check_aligned(given.input_ids, closings=given.trees)
        rows = [own.nonzero()[:, 0] for own in given.mask]
        trees = [derivation(closings[own].tolist()) for closings, own in zip(given.trees, rows, strict=True)]
        for tree in trees:
            actions_to_spans(tree)  # or an error
        parts = zip(given.input_ids, rows, trees, strict=True)
        states = torch.cat([self.model.read(ids[own], tree) for ids, own, tree in parts])
        actions, sizes = torch.tensor(sum(trees, []), device=states.device), torch.tensor(list(map(len, trees)))
        log_probs, before = self.action_log_probs(states), states[actions == GEN]
        loss, place = -log_probs.gather(1, actions[:, None])[:, 0], given.mask.nonzero(as_tuple=True)
        given.weights = self.loss_weights(given)
        row = torch.arange(len(trees)).repeat_interleave(sizes).to(states.device)
        output = score_parts(self, given, loss, row, before, place)
        if given.output_logits:
            output.action_logits = pad_sequence(log_probs.split(sizes.tolist()), batch_first=True)
            output.token_logits_given_tree = at_places(self.lm_head(before), place, given.mask.shape)
        return output
