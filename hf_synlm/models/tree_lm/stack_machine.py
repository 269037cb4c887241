# SPDX-License-Identifier: Apache-2.0
"""The stack machine of Tree LM for the search: actions as for all labeled trees, states come from a Transformer.

A state is a node of the pool. Under "causal" it attends to all nodes of its derivation, under "stack_compose" to those
on its stack. Their keys and values are gathered, so that hypotheses share them: once for all states of a call that have
most of them in common, which see their own by a mask. REDUCE under "stack_compose" is one call of two rows: the first
composes, and its keys and values stay; the second reads, and nobody sees it again.

Words, openings and closings share one softmax. For the search it is cut in two: log p(SHIFT) is that of all words
together, log p(word | SHIFT) the rest; REDUCE is the closing of the innermost open label. The closings of other labels,
which are never legal, hold the place of padding among the actions. The vocabulary is multiplied once for every node:
beside the state that predicts, the pool keeps the log-sum-exp of its word logits, and a word is one scalar product.

Shapes: B sentences, R rows, M rows of a call, L columns before them, C positions of a row, S = L + C, D width,
V vocabulary, Y labels, A action ids.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_synlm.core.cache import CACHE
from hf_synlm.core.rows import Rows
from hf_synlm.models.tree_lm.attention_entropy import entropy_of_positions, output_products
from hf_synlm.models.tree_lm.backbone import PackedProducts, cache_width, max_positions, rows_to_add
from hf_synlm.models.tree_lm.linearization import relative_depths
from hf_synlm.search.labeled.machine import COUNTS, LINKS, LabeledStackMachine, Seen, first_true
from hf_synlm.search.stack import NodePool, Nodes
from hf_synlm.search.state import NEG_INF, WordEdges, in_full_precision
from hf_synlm.search.token_head import PackedTokenHead, rows_at_once
from hf_synlm.search.tree_attention import PathCache, visible_columns
from hf_synlm.trees.transitions import REDUCE

# Numbers that are gathered for one call of a layer: memory does not grow with the beam.
_GATHERED_ELEMENTS = 1 << 24
_NUM_SUMS = 2  # of `_sum_words`


class _Sizes(NamedTuple):
    """Numbers of states that one call executes."""

    rows: int
    """Most of one sentence."""
    longest: int
    """Most nodes that one of them sees besides its parent."""
    plain: int
    composing: int


def action_logits(
    shift: Tensor, finish: Tensor, label_logits: Tensor, open_label: Tensor, config: PreTrainedConfig
) -> Tensor:
    """Logits [M, A] of actions, float32, whose softmax is that of the tokens they write.

    The columns are: other closings, any word, the legal closing, openings. Bottom-up: nothing, any word, nothing, the
    end token, labels. `shift` [M] and `finish` [M] are those of `split_words`; `label_logits` [M, 2 Y] are of openings,
    then closings, bottom-up [M, Y]; `open_label` [M] is that of the innermost open constituent, -1 = none is open.
    """
    if config.is_bottom_up:
        nothing = torch.full_like(finish, NEG_INF)
        return torch.cat([torch.stack([nothing, shift, nothing, finish], 1), label_logits.float()], 1)
    opening, closing = label_logits.float().chunk(2, -1)
    own = torch.arange(closing.shape[1], device=closing.device) == open_label[:, None]
    reduce = closing.masked_fill(~own, NEG_INF).logsumexp(1)
    others = closing.masked_fill(own, NEG_INF).logsumexp(1)
    return torch.cat([torch.stack([others, shift, reduce], 1), opening], 1)


def split_words(logits: Tensor, config: PreTrainedConfig) -> tuple[Tensor, Tensor]:
    """Log-sum-exp [M] of the logits of all words [M, V], float32, and the logit of the end token [M].

    Bottom-up the end token is no word, and its place in `logits` is set to -inf.
    """
    finish = logits[:, config.eos_token_id or 0].clone()  # top-down nobody reads it
    if config.is_bottom_up:
        logits[:, config.eos_token_id] = NEG_INF
    return logits.logsumexp(1), finish


class TreeLMStackMachine(LabeledStackMachine):
    """Runs a Tree LM with heads on node pools; arguments as for `LabeledStackMachine`."""

    def _prepare(self, model: Any) -> None:
        self.label_logits, self.composes = model.label_logits, self.config.structure_attention == "stack_compose"
        self._watches = False
        self._products: Tensor | None = None
        # On a CPU a call with few rows costs nearly as much as one with many.
        self.shifts_ahead = self.device_type == "cpu"

    def watch_attention(self, kind: str) -> None:
        """Note the attention entropy of every word, "projected" or "raw"."""
        self._watches, self._products, self.shifts_ahead = True, output_products(self.model, kind), False

    @property
    def max_with_context(self) -> float:
        """Tokens of a sentence and the text before it: half of the positions, of which a tree takes several a token."""
        return max_positions(self.config.backbone_config) / 2

    # ---------------------------------------------------------------------------------------------------- nodes
    @in_full_precision
    def begin(
        self,
        batch_size: int,
        device: torch.device,
        input_ids: Tensor | None = None,
        context_sentence_ids: Tensor | None = None,
    ) -> tuple[NodePool, Tensor]:
        """The pool and the state before the first action [B, 1], behind the tokens where the context ids are not 0."""
        width = self.config.hidden_size
        kept = 2 * width if self.config.backbone_config is None else cache_width(self.config.backbone_config)
        features = {f"layer_{number}": (kept, self.dtype) for number in range(self.config.num_hidden_layers)}
        features["predictor"] = width + _NUM_SUMS, torch.float32
        if self._watches:
            features["attention_entropy"] = 1, torch.float32
        pool = NodePool(batch_size, features, device, links=LINKS, counts=COUNTS)
        if self.config.backbone_config is not None:
            pool.products = PackedProducts(self.model.backbone)
        none, zero = (torch.full((batch_size, 1), value, device=device) for value in (-1, 0))
        pool.append(Nodes(none, none, zero, none, none, none), *[none] * len(LINKS), *[zero] * len(COUNTS))
        if context_sentence_ids is not None:
            self._read_context(pool, Rows.of(input_ids, context_sentence_ids > 0))
        tokens = torch.full_like(none, self.config.bos_token_id)
        self._read(pool, pool.places(zero)[:, 0], none[:, :0], tokens[:, 0], composes=False)
        return pool, zero

    def _read_context(self, pool: NodePool, text: Rows) -> None:
        """Read plain text before the begin token; keep its keys and values."""
        if text.ids.shape[1] > self.max_with_context:
            raise ValueError(
                f"A context of {text.ids.shape[1]} tokens leaves too few positions for a tree. The limit is "
                f"{self.max_with_context:.0f}, half of the backbone's positions."
            )
        embedded = self.model.embed(text.ids)
        cache = self.model.backbone(inputs_embeds=embedded, use_cache=True)[CACHE]
        for number, layer in enumerate(cache.layers):
            both = torch.stack([layer.keys, layer.values], 1)  # [B, 2, H, C, d]
            pool.context[f"layer_{number}"] = both.permute(0, 3, 1, 2, 4).flatten(2).to(self.dtype)
        pool.num_context = text.count

    @in_full_precision
    def push(self, pool: NodePool, seen: Seen, actions: Tensor, num_tokens: Tensor, live: Tensor) -> Tensor:
        """Take one structural action from each of R states; see `LabeledStackMachine.push`."""
        reduces = (actions == REDUCE) & live
        sizes = self._sizes(pool, seen.nodes, live, reduces)
        rows = sizes.rows
        first = pool.reserve(rows)
        own = torch.arange(first, first + rows, device=actions.device).expand(len(actions), -1)
        if not rows:
            return own
        seen, actions, live = seen.rows(slice(rows)), actions[:, :rows], live[:, :rows]
        pool.fields[:, first : first + rows] = self._structural(seen, own, actions, num_tokens)
        opened = len(self.config.nonterminals) + seen.state(1).action
        labels = torch.where(actions == REDUCE, opened, actions) - self.first
        states = [seen.nodes, live, reduces[:, :rows], own, self.config.vocab_size + labels]
        if pool.waiting:
            states = [torch.cat(both, 1) for both in zip(states, pool.waiting, strict=True)]
            sizes, pool.waiting = self._sizes(pool, *states[:3]), []
        self._execute(pool, *states, sizes=sizes)
        return own

    @in_full_precision
    def shift(
        self,
        pool: NodePool,
        nodes: Tensor,
        tokens: Tensor,
        num_tokens: Tensor,
        edges: WordEdges | None,
        live: Tensor,
        waits: bool = False,
    ) -> Tensor:
        """Generate a word from each of R states; see `LabeledStackMachine.shift`."""
        own, reduces = self._append_words(pool, nodes, tokens, num_tokens, edges), torch.zeros_like(live)
        if waits:
            pool.waiting = [nodes, live, reduces, own, tokens]
            return own
        self._execute(pool, nodes, live, reduces, own, tokens, self._sizes(pool, nodes, live, reduces), are_words=True)
        return own

    def _sizes(self, pool: NodePool, parents: Tensor, live: Tensor, reduces: Tensor) -> _Sizes:
        """What the host has to know of the states [B, R] that are executed, in one wait."""
        composing = reduces & self.composes
        longest = self._lengths(pool, parents, live).amax()
        return _Sizes(*torch.stack([live.sum(1).amax(), longest, (live & ~composing).sum(), composing.sum()]).tolist())

    def _execute(
        self,
        pool: NodePool,
        parents: Tensor,
        live: Tensor,
        reduces: Tensor,
        own: Tensor,
        tokens: Tensor,
        sizes: _Sizes,
        are_words: bool = False,
    ) -> None:
        """Run the layers on the new nodes `own` [B, R] that are `live`, which write `tokens` after `parents`."""
        paths, places = self._paths(pool, parents, live, sizes.longest), pool.places(own)
        before = paths.shape[2] + (pool.context["layer_0"].shape[1] if pool.context else 0)
        size = max(1, _GATHERED_ELEMENTS // (8 * self.config.hidden_size * (before + 2))) * 4  # see `rows_to_add`
        for composes, count in ((False, sizes.plain), (True, sizes.composing)):
            if not count:  # a backbone may not take empty batches
                continue
            wanted = live & ((reduces & self.composes) == composes)
            chosen = first_true(wanted.flatten(), count)
            # The rows of a sentence share its context, which is too much to copy for each of them.
            counts = wanted.sum(1).tolist() if pool.context and wanted.device.type == "cpu" else [count]
            for rows in chosen.split([number for number in counts if number]):
                if rows.device.type == "cpu":  # the first one again
                    rows = torch.cat([rows, rows[:1].expand(rows_to_add(len(rows)))])
                parts = (value.flatten(0, 1).index_select(0, rows).split(size) for value in (places, paths, tokens))
                for part in zip(*parts, strict=True):
                    self._read(pool, *part, composes=composes, are_words=are_words)

    def _lengths(self, pool: NodePool, parents: Tensor, live: Tensor) -> Tensor:
        """How many nodes besides `parents` [B, R] the states after them may see."""
        return pool.field("depth" if self.composes else "length", parents).masked_fill(~live, 0)

    def _paths(self, pool: NodePool, parents: Tensor, live: Tensor, longest: int) -> Tensor:
        """Flat places [B, R, L] of the nodes that the states `parents` [B, R] may see; -1 = none."""
        length = self._lengths(pool, parents, live)
        path = pool.follow("below" if self.composes else "predecessor", parents, longest + 1)
        exists = torch.arange(path.shape[2], device=path.device) <= length[..., None]
        return torch.where(exists, pool.places(path), -1)

    def _read(
        self, pool: NodePool, own: Tensor, path: Tensor, tokens: Tensor, composes: bool, are_words: bool = False
    ) -> None:
        """Run the layers on new nodes at the flat places `own` [M], which write `tokens` [M] after `path` [M, L]."""
        fields = pool.fields.flatten(0, 1)
        names = {name: fields[:, pool.names.index(name)] for name in ("action", "depth", "length", "num_open")}
        count = 1 + composes
        # Two rows of one node have columns of their own; so have sentences, or a NaN of one would reach the others, and
        # nodes on a GPU, where counting them would wait. After a context, `_execute` calls for one sentence at a time.
        is_apart = composes or (pool.batch_size > 1 and not (pool.context and path.numel())) or not path.is_cpu
        most, context = 2 * self.max_with_context, pool.context["layer_0"].shape[1] if pool.context else 0
        before, seen = (path.clamp(min=0), path >= 0) if is_apart else visible_columns(path, context, most)
        columns = torch.cat([before, own.view(len(before), -1).repeat(1, count)], 1)
        alone = F.pad(seen, (0, count), value=True)
        mask = (torch.cat([seen, seen.new_ones(len(own)).diag()], 1) if len(before) < len(own) else alone)[:, None]
        if composes:
            # Children and opening stand at least as high on the stack as what replaces them.
            inside = F.pad(names["depth"][before] >= names["depth"][own][:, None], (0, 1), value=True)
            mask = mask & torch.stack([F.pad(inside, (0, 1)), F.pad(~inside[:, :-1], (0, 2), value=True)], 1)
        if self.composes:
            depth = names["num_open"] + ((names["action"] < self.first) & (names["action"] >= 0))
            index = relative_depths(depth[own][:, None] - depth[columns], self.config)
        else:
            index = (names["length"][own][:, None] - names["length"][columns]).clamp(min=0)
        if pool.context:
            known = pool.num_context[own // pool.fields.shape[1], None]
            place = torch.arange(context, device=own.device)
            index = torch.cat([names["length"][own][:, None] + known - place, index], 1)
            mask = torch.cat([(place < known)[:, None], mask], 2)
        index = index[:, None].expand(-1, count, -1)
        embedded = self.model.embed(tokens)[:, None].expand(-1, count, -1)
        # For the layers, nodes with columns of their own are sentences, others are positions of one sentence.
        mask, index, embedded = (value.reshape(len(before), -1, value.shape[2]) for value in (mask, index, embedded))
        with pool.products:
            hidden = self.model.decode(embedded, mask, index, PathCache(pool, before, own))[-1].to(self.dtype)
        hidden = hidden.reshape(len(own), count, -1)[:, -1]
        if self._watches and are_words:
            cache = PathCache(pool, before, own, writes=False)
            found = entropy_of_positions(self.model, embedded, mask, index, self._products, cache)
            pool.features["attention_entropy"].flatten(0, 1)[own] = found.view(-1, 1)
        parts = hidden.split(rows_at_once(hidden, self.config.vocab_size))
        sums = torch.cat([self._sum_words(part) for part in parts])
        pool.features["predictor"].flatten(0, 1)[own] = torch.cat([hidden.float(), sums], 1)

    def _sum_words(self, hidden: Tensor) -> Tensor:
        """Log-sum-exp of the words that may be generated, and logit of the end token [M, 2]."""
        logits = self._head.logits(hidden)
        finish = logits[:, self.config.eos_token_id or 0].clone()  # top-down nobody reads it
        if self.special_ids is not None:
            logits.index_fill_(1, self.special_ids, NEG_INF)
        return torch.stack([logits.logsumexp(1), finish], 1)

    @functools.cached_property
    def special_ids(self) -> Tensor | None:
        """Words that may not be generated [E]: under "search" padding, begin and end tokens; None = all may."""
        special, config = super().special_ids, self.config
        if special is None:
            return None
        known = [token for token in (config.bos_token_id, config.eos_token_id) if token is not None]
        return torch.cat([special, torch.tensor(known).to(special)])

    @functools.cached_property
    @in_full_precision
    def _head(self) -> PackedTokenHead:
        return PackedTokenHead(self.lm_head)

    # --------------------------------------------------------------------------------------------- probabilities
    def action_logits(self, seen: Seen) -> Tensor:
        """Logits [B, R, A] of the next action, float32."""
        hidden, (shift, finish) = self._known(seen.predictor.flatten(0, 1))
        labels = torch.where(seen.state(0).open >= 0, seen.state(1).action - self.first, -1).flatten()
        logits = action_logits(shift, finish, self.label_logits(hidden), labels, self.config)
        return logits.view(*seen.nodes.shape, -1)

    def _known(self, predictor: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """States [..., D] and sums of `_sum_words`, each [...], from what the pool keeps of nodes."""
        hidden, sums = predictor.split([predictor.shape[-1] - _NUM_SUMS, _NUM_SUMS], -1)
        return hidden.to(self.dtype), sums.unbind(-1)

    def word_logits(self, predictor: Tensor) -> Tensor:
        """Logits [..., V] of the next word, float32; under "search" -inf at padding, begin and end tokens."""
        return super().word_logits(self._known(predictor)[0])

    @in_full_precision
    def log_probs_of(self, predictor: Tensor, tokens: Tensor, wanted: Tensor, bound: bool = False) -> Tensor:
        """Log-probability [B, R] of one token per sentence [B] in the states that are `wanted`, elsewhere -inf.

        Halves are rounded in the product with the vocabulary: there one number of another product does not fit its sum.
        """
        hidden, (allowed, _) = self._known(predictor)
        if self.dtype != torch.float32:
            return super().log_probs_of(hidden, tokens, wanted, bound)
        logits = torch.bmm(hidden, self._head.weight[tokens, :, None]).squeeze(2).float()
        if self._head.bias is not None:
            logits = logits + self._head.bias[tokens, None].float()
        if self.special_ids is not None:
            logits = logits.masked_fill(torch.isin(tokens, self.special_ids)[:, None], NEG_INF)
        return (logits - allowed).clamp(max=0.0).masked_fill(~wanted, NEG_INF)  # the sum is rounded, too
