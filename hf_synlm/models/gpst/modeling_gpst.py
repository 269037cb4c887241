# SPDX-License-Identifier: Apache-2.0
"""GPST: a syntactic language model trained on raw text (Hu et al., ACL 2024).

A Transformer parser orders merges. A pruned inside-outside chart induces a tree and composes span vectors. A generative
model reads the tree's nodes in post-order (type layers), decides between GEN and COMP, and predicts the tokens (token
layers). The span vectors stand in for what left-to-right composition would give ("representation surrogate"). So
everything trains in one pass over whole contexts.

Shapes: B contexts, T tokens, S sentences, N chart cells, A slots of the node sequence (slot 0 the beginning, slot
t + 1 node t), R rows, D hidden size, d composition size, V vocabulary. Spans are half-open; losses are in nats.

Source: the authors' `model/generative_r2d2_fast.py`, `r2d2_insideoutside.py`, `fast_parser.py`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2Model, initialization as init
from transformers.utils import can_return_tuple

from hf_synlm.core.hidden_states import (
    asked_of_layers,
    kept_states,
    wanted_states,
    wants_attentions,
)
from hf_synlm.core.losses import widened
from hf_synlm.core.module_tools import SyntacticPreTrainedModel, also_takes, evaluation_mode, weight_of
from hf_synlm.core.outputs import ParseOutput, SyntacticLMOutput
from hf_synlm.core.token_batch import attended_tokens, check_labels
from hf_synlm.generation.action_decoder import ActionDecoder
from hf_synlm.generation.given_trees import GivenTrees
from hf_synlm.generation.mixin import SyntacticGenerationMixin
from hf_synlm.models.gpst.cast_weights import call_with_weights_cast_together
from hf_synlm.models.gpst.classification import GPSTClassifierMixin
from hf_synlm.models.gpst.composition import GPSTComposition, GPSTDecomposition, GPSTParser
from hf_synlm.models.gpst.configuration_gpst import GPSTConfig
from hf_synlm.models.gpst.inside_outside import outside
from hf_synlm.models.gpst.objective import LOSS_PARTS, GPSTHeads, NodeSequence, TreeStructure, count_items
from hf_synlm.models.gpst.stack_machine import GPSTStackMachine
from hf_synlm.models.gpst.tokens import ContextBatch
from hf_synlm.models.gpst.trees import WHOLE_SENTENCE_METHODS, TreeInduction, chart_tensors
from hf_synlm.search.action_beam import read_by_actions
from hf_synlm.search.outputs import SyntacticModelOutput
from hf_synlm.search.parsing import only_token_ids, parse_with_search
from hf_synlm.trees.actions import PAD_ACTION, spans_to_actions
from hf_synlm.trees.prefixes import PATH_COST, distinct_prefixes


# ---------------------------------------------------------------------------------------------- base model
class _NoPositions(nn.Module):
    """Replaces a position embedding where positions are added elsewhere or not at all."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class GPSTDecoder(GPT2Model):
    """The GPT-2 layers of transformers, whose inputs are vectors: without token and position embeddings."""

    def __init__(self, config: GPSTConfig, num_layers: int):
        super().__init__(
            GPT2Config(
                vocab_size=1,
                n_positions=1,
                n_embd=config.hidden_size,
                n_layer=num_layers,
                n_head=config.num_attention_heads,
                n_inner=config.intermediate_size,
                activation_function=config.activation_function,
                layer_norm_epsilon=config.layer_norm_epsilon,
                initializer_range=config.initializer_range,
                embd_pdrop=config.embedding_dropout,
                resid_pdrop=config.residual_dropout,
                attn_pdrop=config.attention_dropout,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
                attn_implementation=config._attn_implementation,
            )
        )
        self.wte, self.wpe = None, _NoPositions()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as GPT-2: weights that write to the residual stream are drawn smaller."""
        super()._init_weights(module)
        # GPT-2 does this when it visits attention and MLP, but transformers does not visit containers without own
        # parameters in code from outside.
        if any(module is part.c_proj for block in self.h for part in (block.attn, block.mlp)):
            init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(2 * self.config.n_layer))


class GPSTPreTrainedModel(SyntacticPreTrainedModel):
    """Loading, saving and initialization shared by the GPST models."""

    config: GPSTConfig
    supports_gradient_checkpointing = True
    # Without the pair layers: the chart reads their weights without calling them, so they must stay with the root.
    _no_split_modules = ["GPSTParserLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the authors do: GPT-2 style in the decoders, PyTorch defaults in composition and parser."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            if module.bias is not None:
                bound = module.in_features**-0.5
                init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, GPSTModel):
            # transformers does not visit containers without own parameters in code from outside, so the pair encoders
            # are finished here, after all their parts.
            for encoder in (module.composition, module.decomposition):
                self._init_pair_layers(encoder.layers)
            init.normal_(module.embed_tokens.weight, std=std)
            init.normal_(module.position_embedding.weight, std=std)
            init.normal_(module.bos_embedding, std=std)
            init.uniform_(module.root_embedding)

    @staticmethod
    def _init_pair_layers(layers: nn.ModuleList) -> None:
        """Attention as in `nn.MultiheadAttention`; all layers of an encoder start as copies of the first."""
        init.xavier_uniform_(layers[0].in_proj.weight)
        init.zeros_(layers[0].in_proj.bias)
        init.zeros_(layers[0].out_proj.bias)
        for layer in layers[1:]:
            for target, source in zip(layer.parameters(), layers[0].parameters(), strict=True):
                init.copy_(target, source)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the vocabulary of the model, its tied head and the parser's own embedding.

        Args:
            new_num_tokens: new number of ids; `None` leaves it.
            pad_to_multiple_of: round the number up.
            mean_resizing: draw new rows around the mean of the old ones.

        Returns:
            The resized input embedding.

        Raises:
            ValueError: when a special token id would fall out of the vocabulary.
        """
        used = [self.config.reduce_token_id, self.config.bos_token_id, self.config.eos_token_id]
        largest = max(token_id for token_id in used if token_id is not None)
        if new_num_tokens is not None and new_num_tokens <= largest:
            raise ValueError(
                f"A vocabulary of {new_num_tokens} ids has no place for the special token id {largest}. "
                "Set the special token ids of the configuration first, or keep more ids."
            )
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        parser = self.base_model.parser
        parser.embed_tokens = self._get_resized_embeddings(
            parser.embed_tokens, embedding.weight.shape[0], mean_resizing=mean_resizing
        )
        return embedding


class GPSTModel(TreeInduction, GPSTPreTrainedModel):
    """The parts of GPST below the heads: whole sentences in, trees and states out.

    The trees are induced from whole sentences, so the states are features; for next-token probabilities use
    `GPSTForCausalLM`.
    """

    _keys_to_ignore_on_load_unexpected = [r"^heads\.\w+\.\d\.(weight|bias)$"]  # the language model always has them

    def __init__(self, config: GPSTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.bos_embedding = nn.Parameter(torch.empty(config.hidden_size))
        self.parser = GPSTParser(config)
        self.down_scale = nn.Linear(config.hidden_size, config.composition_size)
        self.up_scale = nn.Linear(config.composition_size, config.hidden_size) if config.surrogate else None
        self.composition = GPSTComposition(config)
        self.decomposition = GPSTDecomposition(config)
        self.root_embedding = nn.Parameter(torch.empty(config.composition_size))
        self.position_embedding = nn.Embedding(config.max_position_embeddings + 1, config.hidden_size)
        self.type_layers = GPSTDecoder(config, config.num_type_layers)
        self.type_layers.ln_f = nn.Identity()
        self.token_layers = GPSTDecoder(config, config.num_token_layers)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        sentence_ids: Tensor | None = None,
        word_ends: Tensor | None = None,
        merge_order: Tensor | None = None,
        spans: list[list[tuple[int, int]]] | None = None,
        output_chart: bool = False,
        output_outside: bool = False,
        output_spans: bool = False,
        output_structure: bool = False,
        **kwargs: Any,
    ) -> SyntacticModelOutput:
        """Induce a tree for every sentence, compose its spans and run the type and token layers over the nodes.

        Args:
            input_ids: [B, T] token ids. A leading `bos_token_id` marks the start; it is not a token.
            attention_mask: [B, T], 1 = token. Padding may stand left or right. Without a mask, runs of `pad_token_id`
                at both ends are padding.
            sentence_ids: [B, T] 1, 2, ... for the sentences of a context, 0 = padding. Default: one sentence a row.
            word_ends: [B, T], True at the last piece of every word: words are not split across constituents.
            merge_order: [B, T - 1] merge order to replay instead of the parser's (see `plan_chart`).
            spans: given binary trees, per row the inner nodes; then nothing is induced, and vectors are composed as
                in left-to-right search.
            output_chart: also return the chart tensors.
            output_outside: also run the outside pass.
            output_spans: list the trees in `spans` (costs a host sync; DataParallel cannot gather lists).
            output_structure: also return `structure`, which heads and losses read.
            **kwargs: `output_hidden_states`: also return `hidden_states`, all or those at the places given: the inputs
                of the type layers, then the output of every type layer and of every token layer. `output_attentions`:
                also return `attentions`; needs `attn_implementation="eager"`.

        Returns:
            `SyntacticModelOutput`.

        Raises:
            ValueError: for empty rows, ids outside the vocabulary, masks with holes, contexts longer than
                the positions, spans that are not binary trees, tensors of the wrong shape, and attentions that the
                attention implementation does not give.
            TypeError: for other keyword arguments.
        """
        input_ids = only_token_ids(input_ids, kwargs.pop("inputs_embeds", None))
        asked_for = asked_of_layers(kwargs)
        wanted = wanted_states(self.config, asked_for["output_hidden_states"], self.num_states)
        attend = self._check_attentions(asked_for["output_attentions"])
        text = ContextBatch.read(self.config, input_ids, attention_mask, sentence_ids, word_ends)
        scores = call_with_weights_cast_together(self.parser, text.ids, text.sentence_ids)
        plan = self._plan(text, scores, merge_order, spans)
        trees = self.induce(text, plan, given=spans is not None)
        sequence = self.node_sequence(plan, trees)
        asked = {"output_hidden_states": bool(wanted), "output_attentions": attend} if wanted or attend else {}
        types = call_with_weights_cast_together(self.type_layers, inputs_embeds=sequence.inputs, **asked)
        type_hidden = types.last_hidden_state
        token_inputs = type_hidden.flatten(0, 1)[sequence.token_slots]
        tokens = call_with_weights_cast_together(self.token_layers, inputs_embeds=token_inputs, **asked)
        token_hidden = tokens.last_hidden_state
        outside_vectors: Tensor | None = None
        notes: dict[str, Any] = {}
        if output_outside or output_chart:
            outside_vectors, notes = outside(
                plan,
                trees.chart,
                self.root_embedding,
                self.decomposition,
                accumulate_scores=self.config.accumulate_scores,
                return_all=output_chart,
            )
        return SyntacticModelOutput(
            last_hidden_state=text.restore(token_hidden[:, 1:]),
            token_hidden_state=token_hidden,
            type_hidden_state=type_hidden,
            outside_vectors=outside_vectors,
            spans=text.list_spans(trees.nodes) if output_spans else None,
            parser_scores=scores,
            structure=TreeStructure(text, plan, trees.nodes, trees.leaf_ids, trees.chart.height_N, sequence)
            if output_structure
            else None,
            chart=chart_tensors(plan, trees.chart, notes) if output_chart else None,
            hidden_states=self._hidden_states(types, tokens, sequence, text, wanted) if wanted else None,
            attentions=(*types.attentions, *tokens.attentions) if attend else None,
        )

    @property
    def num_states(self) -> int:
        """Number of hidden states."""
        return self.config.num_hidden_layers + 1

    def _check_attentions(self, output_attentions: bool | None) -> bool:
        """Whether the caller wants attention weights, which only the eager implementation computes."""
        attend = wants_attentions(self.config, output_attentions)
        kind = self.type_layers.config._attn_implementation
        if attend and kind != "eager":
            raise ValueError(
                f"output_attentions=True: attention implementation {kind!r} computes no weights. Call "
                'model.set_attn_implementation("eager") first.'
            )
        return attend

    @staticmethod
    def _hidden_states(
        types: Any, tokens: Any, sequence: NodeSequence, text: ContextBatch, wanted: frozenset[int]
    ) -> tuple[Tensor | None, ...]:
        """Hidden states after each token [B, T, D]: at the slot that predicts the next one."""
        slots = sequence.token_slots[:, 1:]
        count = len(types.hidden_states)
        states = [
            text.restore(state.flatten(0, 1)[slots] if place < count else state[:, 1:]) if place in wanted else state
            # The token layers read what the type layers wrote.
            for place, state in enumerate((*types.hidden_states, *tokens.hidden_states[1:]))
        ]
        return kept_states(states, wanted)


# ---------------------------------------------------------------------------------------------- language model
class GPSTForCausalLM(SyntacticGenerationMixin, GPSTPreTrainedModel):
    """GPST with its language-modeling heads: training objective, marginal next-token distribution, search."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    stack_machine_class = GPSTStackMachine
    action_decoder_class = ActionDecoder
    tree_field, loss_parts = "spans", LOSS_PARTS

    def __init__(self, config: GPSTConfig):
        GPSTPreTrainedModel.__init__(self, config)  # type: ignore[call-arg]  # its bare model has no heads
        self.model = GPSTModel(config)
        self.heads = GPSTHeads(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @also_takes(SyntacticGenerationMixin.forward_with_trees)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_ids: Tensor | None = None,
        merge_order: Tensor | None = None,
        spans: list[list[tuple[int, int]]] | None = None,
        output_chart: bool = False,
        output_spans: bool = False,
        **options: Any,
    ) -> SyntacticLMOutput:
        """Training objective with `labels`, next-token log-probabilities without.

        With `labels` (or `shift_labels`), the paper's objective over the induced (or given) trees. With `spans`,
        `merge_order` or `output_chart` but without labels, probabilities of that tree: `joint_log_prob`,
        `action_logits`, `token_logits_given_tree`. Otherwise `logits`: log p(next token | prefix), trees summed out
            over a beam of `config.scoring_num_beams`. Nothing after a position changes its value, except that
            `word_ends` tells whether the next token begins a word.

        Args:
            input_ids: [B, T] token ids. A leading `bos_token_id` marks the start; it is not a token.
            attention_mask: [B, T], 1 = token; padding left or right.
            labels: [B, T] = `input_ids` with -100 where the token loss does not count.
            sentence_ids: [B, T] 1, 2, ... for the sentences of a context, 0 = padding; for the objective.
            merge_order: [B, T - 1] merge order to replay.
            spans: given binary trees, per row the inner nodes `(i, j)`.
            output_chart: return the chart tensors.
            output_spans: with labels or given trees, list the trees in `spans`.
            **options: see `TreeScoringMixin.forward_with_trees`; `word_ends` keep word pieces together. `shift_labels`
                [B, T], labels already shifted: position t holds the target of token t + 1 (so that the first token,
                which only the beginning predicts, does not count); they replace `labels`.

        Returns:
            `SyntacticLMOutput`.

        Raises:
            ValueError: see `GPSTModel.forward`; and for `sentence_ids` where only `logits` are asked for.
            TypeError: for other keyword arguments.

        Cost: objective: one pass over 2 T slots. Logits: T sequential steps, each a few passes over the beam.
        """
        # Not in the signature: Trainer takes every argument with "label" in its name for one that must be there.
        shift_labels = options.pop("shift_labels", None)
        if shift_labels is not None:
            labels = F.pad(shift_labels[:, :-1], (1, 0), value=-100)
        one_tree = output_chart or any(value is not None for value in (labels, merge_order, spans))
        marginal = not one_tree or self.wants_logits_beside(options.get("output_marginal_logits"))
        if sentence_ids is not None and marginal:
            raise ValueError(
                "Next-token logits need a row of one running text, without sentence_ids. Leave sentence_ids out, or "
                "replace output_marginal_logits by labels, spans, merge_order or output_chart."
            )
        trees = {"sentence_ids": sentence_ids, "merge_order": merge_order, "spans": spans}
        trees |= {"output_chart": output_chart, "output_spans": output_spans}
        return self.forward_with_trees(input_ids, attention_mask, trees if one_tree else None, labels=labels, **options)

    def score_trees(self, given: GivenTrees) -> SyntacticLMOutput:
        """One pass over induced or given trees: the training objective, or without labels their probabilities."""
        labels, counts = given.labels, given.labels is not None
        if counts:
            check_labels(self.config, labels, given.input_ids)
        output = self.model(
            given.input_ids,
            attention_mask=given.attention_mask,
            word_ends=given.word_ends,
            output_outside=counts,
            output_structure=True,
            output_hidden_states=sorted(given.wanted),
            output_attentions=given.output_attentions,
            return_dict=True,
            **given.trees,
        )
        result = SyntacticLMOutput(
            spans=output.spans, chart=output.chart, hidden_states=output.hidden_states, attentions=output.attentions
        )
        if given.output_logits or not counts:
            self._add_given_tree(result, output)
        if counts:
            result.loss, result.losses, result.joint_log_prob = self.heads.objective(
                self.config, weight_of(self.lm_head), output, labels, given.loss_shares
            )
        return result

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """Count the items over which each part of the objective is a mean: tokens, sentences, nodes, labels, slots.

        Two properties of a batch are not such means. The second factor of `config.height_loss` "shipped" is always that
        of the call. Every call draws its own noise. See `TreeScoringMixin`.
        """
        given = others.get("attention_mask"), others.get("sentence_ids")
        return count_items(ContextBatch.read(self.config, input_ids, *given, None), others["labels"])

    def _add_given_tree(self, result: SyntacticLMOutput, output: SyntacticModelOutput) -> None:
        """Set the probabilities of the text under the trees of one pass."""
        structure: TreeStructure = output.structure
        logits = self.lm_head(self.heads.token(output.token_hidden_state[:, :-1]))
        row, column = structure.sequence.leaf_row, structure.sequence.leaf_column
        log_prob = widened(logits[row, column]).log_softmax(-1).gather(-1, structure.leaf_ids[:, None]).squeeze(-1)
        _, action_BA = self.heads.action_loss(output)
        result.joint_log_prob = (-action_BA.sum(1)).index_add(0, row, log_prob.to(action_BA.dtype))
        result.action_logits = self.heads.action(output.type_hidden_state)
        result.token_logits_given_tree = structure.text.restore(logits)

    def score_prefixes(self, given: GivenTrees) -> Tensor | None:
        """Log-probabilities of trees of one text; see `TreeScoringMixin`."""
        spans, text = given.trees, ContextBatch.read(self.config, given.input_ids, given.mask, None, given.word_ends)
        plan = self.model.plan_given(text, spans)
        actions = torch.tensor([spans_to_actions(row, text.width) for row in spans], device=text.ids.device)
        prefixes = distinct_prefixes(F.pad(actions[:, :-1], (1, 0), value=-1))
        if not prefixes.pay(PATH_COST * prefixes.place.shape[1]):
            return None
        sequence = self.model.node_sequence(plan, self.model.induce(text, plan, given=True))
        return GPSTStackMachine(self).log_probs_of_trees(text.ids[0], sequence.inputs, actions, prefixes)

    @torch.no_grad()
    @also_takes(SyntacticGenerationMixin.parse)
    def parse(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        method: str = "search",
        context_sentence_ids: Tensor | None = None,
        synchronous: bool = True,
        num_beams: int | None = None,
        **options: Any,
    ) -> ParseOutput:
        """Parse given text.

        Args:
            input_ids: [B, T], one sentence per row. A leading `bos_token_id` is the beginning, not a token.
            attention_mask: [B, T], 1 = token; padding left or right.
            method: "search" parses left to right by word-synchronous search over the generative model; "inside" takes
                the tree of the inside pass over the whole sentence; "mbr" that with the largest expected number of
                correct spans in a chart of three times the window (minimum Bayes risk); "merge_order" the tree in
                which the parser's merges happen.
            context_sentence_ids: [B, T], 1, 2, ... at the tokens of complete sentences before the one to parse
                (search only).
            synchronous: `False` searches action by action instead of word by word (the paper's "w/o sync" rows).
            num_beams: width of the search; default `config.scoring_num_beams`.
            **options: see `SyntacticGenerationMixin.parse`; methods other than "search" take `word_ends` alone.

        Returns:
            `ParseOutput`; only "search" fills in probabilities.

        Raises:
            ValueError: for an unknown method, options that the method does not have, and bad input (see `forward`).

        Source: GPST section 3.3; `R2D2GenFastBeamSearcher` of the authors' code.
        """
        mask = attended_tokens(self.config, input_ids, attention_mask)
        if method == "search":
            with evaluation_mode(self):
                search = self.word_search(num_beams)
                read = None if synchronous else read_by_actions
                return parse_with_search(search, input_ids, mask, context_sentence_ids, read, None, **options)
        if method not in WHOLE_SENTENCE_METHODS:
            raise ValueError(f"method {method!r} is unknown. Choose one of {['search', *WHOLE_SENTENCE_METHODS]}.")
        if any(options.get(name) for name in ("stepwise", "lexical", "belief_update")):
            raise ValueError(f"method {method!r} does not search. Leave the options of the search out.")
        return self._parse_whole(input_ids, mask, options.get("word_ends"), method)

    def _parse_whole(self, input_ids: Tensor, mask: Tensor, word_ends: Tensor | None, method: str) -> ParseOutput:
        """Trees that need whole sentences: of the inside pass, or of the parser's merges alone."""
        with evaluation_mode(self):
            spans = self.model.whole_sentence_trees(input_ids, mask, word_ends, method=method)
        lengths, offsets = mask.sum(1).tolist(), mask.long().argmax(1).tolist()
        ends = None
        if word_ends is not None:
            last = mask & ~F.pad(mask[:, 1:], (0, 1))  # the end of the text ends a word
            ends = [(row.nonzero().squeeze(1) + 1).tolist() for row in (word_ends.bool() | last) & mask]
        actions = [
            torch.tensor(spans_to_actions([(i - offset, j - offset) for i, j in row], length))
            for row, offset, length in zip(spans, offsets, lengths, strict=True)
        ]
        return ParseOutput(
            spans=[[row] for row in spans],
            actions=pad_sequence(actions, True, PAD_ACTION)[:, None].to(input_ids.device),
            offsets=offsets,
            lengths=lengths,
            word_ends=ends,
            input_ids=input_ids,
        )


# ---------------------------------------------------------------------------------------------- classification
class GPSTForSequenceClassification(GPSTClassifierMixin, GPSTPreTrainedModel):
    """GPST with a classifier on the state after the CLS token; `config.objective_weight` > 0 keeps its own objective.

    Inputs are laid out as `a <CLS>` or `a <SEP> b <CLS>`; SEP and CLS are sentences of one token.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GPSTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = GPSTModel(config)
        self.heads = GPSTHeads(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = ["GPSTForCausalLM", "GPSTForSequenceClassification", "GPSTModel", "GPSTPreTrainedModel"]
