# SPDX-License-Identifier: Apache-2.0
"""GPST's side of the word-synchronous search: what GEN and COMP do to nodes, caches and probabilities.

GEN pushes a token: its composition vector is down_scale(embedding), its input to the type layers the embedding.
COMP puts the composition of the two top vectors in their place, x = f_alpha(left, right), and feeds up_scale(x) (or
the embedding of the reduce token in the ablation without surrogates). The type layers read every action and decide
between GEN and COMP; the token layers read only the slots before a GEN, plus the current one, and predict the token.

Source: Hu et al. 2024, sections 3.2 and 3.5; `R2D2GenFastBeamSearcher` of the authors' code. As there, illegal actions
are dropped after the softmax, so the probabilities of a derivation are not renormalized at forced steps.

Shapes: B sentences, R rows, C levels of nodes that follow one another, P nodes of these levels, L nodes before them,
S = L + C, D hidden, d composition, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.core.losses import linear_cross_entropy
from hf_synlm.core.module_tools import weight_of
from hf_synlm.search.level_machine import LevelMachine
from hf_synlm.search.stack import Levels, NodePool, Nodes
from hf_synlm.trees.actions import GEN
from hf_synlm.trees.prefixes import Prefixes

# Numbers that one call of a layer gathers at most: its memory does not grow with the beam.
_GATHERED_ELEMENTS = 1 << 22


class GPSTStackMachine(LevelMachine):
    """Runs the generative part of a GPST language model on node pools."""

    def __init__(self, model: Any) -> None:
        self.config, self.dtype = model.config, model.dtype
        self.model, self.heads, self.lm_head = model.model, model.heads, model.lm_head
        self.compose = self.model.composition.composer()
        self._type_names = [f"type_layer_{number}" for number in range(self.config.num_type_layers)]
        self._token_names = [f"token_layer_{number}" for number in range(self.config.num_token_layers)]
        self.max_tokens = self.config.max_position_embeddings

    # ---------------------------------------------------------------------------------------------------- nodes
    def begin(
        self,
        batch_size: int,
        device: torch.device,
        input_ids: Tensor | None = None,
        context_sentence_ids: Tensor | None = None,
    ) -> tuple[NodePool, Tensor]:
        """The pool, and the state before the first action [B, 1]: after the begin slot and the context.

        `context_sentence_ids` [B, T] are 1, 2, ... at the tokens of complete sentences before the text, 0 elsewhere;
        only with them `input_ids` are read.
        """
        if context_sentence_ids is None:
            positions = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
            inputs = self.model.bos_embedding + self.model.position_embedding(positions)
            valid = before_gen = positions == 0
        else:
            inputs, positions, valid, before_gen = self._encode_context(input_ids, context_sentence_ids)
        count = inputs.shape[1]
        pool = self._empty_pool(batch_size, device, max(64, count))
        pool.num_context = positions.amax(1)
        slots = torch.arange(count, device=device).expand(batch_size, -1)
        none = torch.full_like(slots, -1)
        # The tree structure of the context is over: its nodes only say which slots the token layers may read.
        made_by_gen = torch.cat([torch.zeros_like(before_gen[:, :1]), before_gen[:, :-1]], 1)
        action = torch.where(made_by_gen & valid, GEN, none)
        pool.append(Nodes(slots - 1, none, torch.zeros_like(slots), action, none, none), inputs=inputs)
        self.read(pool, slots[:, None, :0], slots, Levels([1] * count, device))
        return pool, torch.where(valid, slots, 0).amax(1, keepdim=True)

    def _empty_pool(
        self, batch_size: int, device: torch.device, capacity: int, scores: torch.dtype = torch.float32
    ) -> NodePool:
        width = self.config.hidden_size
        features = {
            "vector": (self.config.composition_size, self.dtype),
            "inputs": (width, self.dtype),
            "hidden": (width, self.dtype),
            "actions": (2, scores),
            **dict.fromkeys((*self._type_names, *self._token_names), (2 * width, self.dtype)),
        }
        return NodePool(batch_size, features, device, capacity=capacity)

    def log_probs_of_trees(self, tokens: Tensor, inputs: Tensor, actions: Tensor, prefixes: Prefixes) -> Tensor:
        """Log p(text, tree) [K] in nats of trees of one text [T], each distinct beginning read once.

        `inputs` [K, A, D] are those of `NodeSequence`, `actions` [K, 2 T - 1] GEN and COMP.
        """
        row, position, place = prefixes
        taken = F.pad(actions[:, :-1], (1, 0), value=-1)  # before each slot
        number, steps = (torch.arange(count, device=row.device) for count in (len(row), actions.shape[1] - 1))
        before = position[:, None] - 1 - steps.flip(0)  # the newest last, as `read` wants paths
        path = place[row].gather(1, before.clamp(min=0)).masked_fill(before < 0, -1)[None]
        pool = self._empty_pool(1, row.device, len(row), torch.promote_types(self.dtype, torch.float32))
        none = torch.full_like(number[None], -1)
        nodes = Nodes(none, none, none, taken[row, position][None], none, none)
        pool.append(nodes, inputs=inputs[row, position])
        self.read(pool, path, number[None], Levels([len(row)], row.device))
        log_probs = pool.features["actions"][0, place].gather(2, actions[..., None])[..., 0]
        is_gen = actions == GEN
        states, own = place[is_gen].unique(return_inverse=True)
        words = tokens[(taken == GEN).cumsum(1)[row, position][states]]
        features = self.token_features(pool, states[None])[0]
        _, loss = linear_cross_entropy(features, weight_of(self.lm_head), words, torch.ones_like(words))
        log_probs[is_gen] -= loss[own].to(log_probs.dtype)
        return log_probs.sum(1)

    def _encode_context(self, input_ids: Tensor, sentence_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slots of complete sentences, encoded with their induced trees and soft vectors; slot 0 is the begin slot.

        Returns inputs of the type layers with positions [B, A, D]; tokens generated before or at each slot [B, A];
        which slots are real and which of them stand before a GEN [B, A].
        """
        empty = (sentence_ids == 0).all(1)
        first_column = torch.arange(input_ids.shape[1], device=input_ids.device) == 0
        # The encoder needs a token in every row: rows without context get one, whose slots are masked out.
        filler = empty[:, None] & first_column
        ids = input_ids.masked_fill(filler, self.config.reduce_token_id)
        numbers = torch.where(filler, 1, sentence_ids)
        encoded = self.model(ids, sentence_ids=numbers, output_structure=True, return_dict=True)
        sequence = encoded.structure.sequence
        valid = sequence.action_targets >= 0
        valid[:, 1:] &= ~empty[:, None]
        positions = sequence.position_ids.masked_fill(~valid, 0)
        return sequence.inputs, positions, valid, sequence.action_targets == GEN

    def generated(self, tokens: Tensor) -> list[Tensor]:
        """Composition vectors and inputs of the type layers; see `LevelMachine`."""
        inputs = self.model.embed_tokens(tokens)
        return [self.model.down_scale(inputs), inputs]

    def composed(self, pool: NodePool, parents: Tensor, left: Tensor, levels: Levels) -> list[Tensor]:
        """The same of COMP actions in a row."""
        vector = self.compose(pool.feature("vector", left), pool.feature("vector", parents), levels.sizes)
        if self.config.surrogate:
            return [vector, self.model.up_scale(vector)]
        return [vector, self.model.embed_tokens(torch.full_like(left, self.config.reduce_token_id))]

    def append(
        self,
        pool: NodePool,
        nodes: Nodes,
        length: Tensor | None,
        vectors: list[Tensor],
        num_tokens: Tensor,
        levels: Levels | None,
    ) -> Tensor:
        """Write nodes with their vectors, inputs with positions; see `LevelMachine`."""
        # Rows that no hypothesis needs (finished sentences, padding) may count one token too many.
        positions = (num_tokens + pool.num_context[:, None]).clamp(max=self.max_tokens)
        position = self.model.position_embedding(positions)
        if levels is not None and positions.shape[1] > 1:
            position = position.index_select(1, levels.line)
        vector, inputs = vectors
        return pool.append(nodes, length=length, vector=vector, inputs=inputs + position)

    def read(self, pool: NodePool, path: Tensor, nodes: Tensor, levels: Levels, predict: bool = True) -> None:
        """Run the layers; with `words` the token layers, too. See `LevelMachine`."""
        length = path.shape[2] + len(levels.sizes)
        width = max(1, _GATHERED_ELEMENTS // (2 * self.config.hidden_size * length * len(path)))
        for lines, rows, part in levels.split(width):
            self._read(pool, path[:, lines], nodes[:, rows], part, predict)

    def _read(self, pool: NodePool, path: Tensor, nodes: Tensor, levels: Levels, predict: bool) -> None:
        ids = torch.cat([path, levels.lines(nodes, -1)], 2)
        places, own = pool.places(ids).flatten(0, 1), pool.places(nodes).flatten()
        step = torch.arange(ids.shape[2], device=ids.device)
        query = step[path.shape[2] :, None]
        # What a node may read: itself, and earlier nodes; the token layers of these only the ones before a GEN.
        exists, itself = ids.flatten(0, 1)[:, None, None] >= 0, step == query
        earlier = _additive(step <= query, self.dtype)
        type_mask = torch.minimum(earlier, _additive(exists, self.dtype))
        hidden = pool.feature("inputs", nodes)
        hidden = self._run(self.model.type_layers, pool, self._type_names, hidden, own, places, type_mask, levels)
        log_probs = self.heads.action(hidden).to(pool.features["actions"].dtype).log_softmax(-1)
        pool.features["actions"].flatten(0, 1).index_copy_(0, own, log_probs.flatten(0, 1))
        if predict:
            made_by_gen = pool.fields[..., pool.names.index("action")].take(places) == GEN
            before_gen = F.pad(made_by_gen[:, 1:], (0, 1))[:, None, None]
            token_mask = torch.minimum(earlier, _additive(exists & before_gen, self.dtype)).masked_fill(itself, 0)
            hidden = self._run(
                self.model.token_layers, pool, self._token_names, hidden, own, places, token_mask, levels
            )
            pool.features["hidden"].flatten(0, 1).index_copy_(0, own, hidden.flatten(0, 1).to(self.dtype))

    def _run(
        self,
        decoder: Any,
        pool: NodePool,
        names: list[str],
        hidden: Tensor,
        own: Tensor,
        places: Tensor,
        mask: Tensor,
        levels: Levels,
    ) -> Tensor:
        """Run GPT-2 layers on nodes [B, P, D] that attend to the nodes on their paths.

        The layers are called here and not by their own model, whose loop costs as much as its arithmetic in a narrow
        beam. What a node costs does not depend on how many other derivations the pool holds. Only attention runs on
        full lines, some of which end before the last level. The pool keeps keys and values [2 D] of each layer under
        `names`; `own` [B P] and `places` [B R, S] are flat places of these nodes and of their paths, `mask` [B R, 1, C,
        S] is additive.
        """
        heads = (self.config.num_attention_heads, self.config.hidden_size // self.config.num_attention_heads)
        mask, rows = mask.to(hidden.dtype), levels.row.clamp(min=0)
        for layer, name in zip(decoder.h, names, strict=True):
            store = pool.features[name].flatten(0, 1)
            query, new = layer.attn.c_attn(layer.ln_1(hidden)).split([hidden.shape[2], 2 * hidden.shape[2]], 2)
            store.index_copy_(0, own, new.flatten(0, 1).to(store.dtype))
            query = query.index_select(1, rows).view(len(places), -1, *heads).transpose(1, 2)
            keys_values = store.index_select(0, places.flatten()).to(query.dtype).view(*places.shape, 2, *heads)
            keys, values = keys_values.transpose(1, 3).unbind(2)
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            lines = mixed.transpose(1, 2).reshape(len(hidden), -1, hidden.shape[2])
            hidden = hidden + layer.attn.c_proj(lines.index_select(1, levels.place))
            hidden = hidden + layer.mlp(layer.ln_2(hidden))
        return decoder.ln_f(hidden)

    def token_features(self, pool: NodePool, nodes: Tensor) -> Tensor:
        """Inputs [B, R, D] of the word head, in states that the token layers have read."""
        return self.heads.token(pool.feature("hidden", nodes))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive attention mask from a boolean one; works with every attention back end."""
    # Large but finite: block-wise kernels must not compute inf - inf.
    lowest = max(torch.finfo(dtype).min, -1e30)
    return torch.where(mask, 0.0, lowest).to(dtype)
