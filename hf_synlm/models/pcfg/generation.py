# SPDX-License-Identifier: Apache-2.0
"""`generate` of a PCFG: the loops of transformers on exact probabilities, or derivations drawn from the root."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_synlm.models.pcfg.inside import Grammar
from hf_synlm.models.pcfg.rules import draw
from hf_synlm.models.pcfg.trees import constituents
from hf_synlm.recurrent.generation import (
    RecurrentGenerateBeamOutput,
    RecurrentGenerateOutput,
    RecurrentGenerationMixin,
)  # fmt: skip
from hf_synlm.trees.actions import PAD_ACTION, spans_to_actions
from hf_synlm.trees.spans import Span

_JOINT_OPTIONS = {
    "do_sample", "max_length", "max_new_tokens", "num_return_sequences", "return_dict_in_generate", "attention_mask",
    "input_ids", "pad_token_id",
}  # fmt: skip
_OF_MODEL = {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "transformers_version", "_from_model_config"}


@dataclass
class PCFGGenerateOutput(RecurrentGenerateOutput):
    """Result of `structure_mode="joint"`: sequences with the derivations that wrote them.

    Fields, besides those of transformers' output and of `GeneratedTrees`:
        labels: per sequence the nonterminals of its spans, "NT0", "NT1", ...; where symbols have names, the labels of
            its constituents.
        complete: [B] whether the derivation ended. False: the text reached its longest length, and open constituents
            end with its last word.
    """

    complete: Tensor | None = None


class PCFGGenerationMixin(RecurrentGenerationMixin):
    """Generation by transformers from the probabilities of prefixes, and ancestral sampling of derivations."""

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        *,
        structure_mode: str = "marginal",
        **kwargs: Any,
    ) -> RecurrentGenerateOutput | RecurrentGenerateBeamOutput | Tensor:
        """Continue prompts by the decoding loops of transformers, or draw sentences with their derivations.

        Args:
            inputs: Prompts [B, L]; left padding. Without prompts the text begins with the begin token.
            generation_config: Options; keyword arguments win.
            logits_processor: Extra processors of word scores ("marginal" only).
            stopping_criteria: Extra criteria ("marginal" only).
            structure_mode: "marginal": words by their probabilities with all trees summed out; the output has the trees
                that `parse` finds. "joint": words and trees are drawn together, symbol by symbol, from the root. The
                prompt is empty or the begin token, do_sample must be True, and other options of sampling are refused.
            **kwargs: As for the other models whose next-word probabilities are exact (`RecurrentGenerationMixin`).

        Returns:
            Sequences [B * num_return_sequences, L'], or with `return_dict_in_generate=True` an output with `sequences`,
            `spans` and `actions`; "joint" gives a `PCFGGenerateOutput`.

        Raises:
            ValueError: for options that do not apply.

        Cost: "marginal" O(n^2 r) per word (Y for r), n steps; "joint" O(S^2) per constituent and O(V) per word.
        """
        if structure_mode != "joint":
            kwargs["structure_mode"] = structure_mode
            return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)
        config = copy.deepcopy(self.generation_config if generation_config is None else generation_config)
        unused = config.update(**kwargs)
        given = {name: value for name, value in config.to_diff_dict().items() if name not in _OF_MODEL}
        given |= {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, **unused}
        asked = [name for name, value in given.items() if value is not None and value is not False]
        unknown = [name for name in asked if name not in _JOINT_OPTIONS]
        unknown += ["eos_token_id"] * (config.eos_token_id not in (None, self.config.eos_token_id))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not supported with structure_mode='joint'. Try 'marginal'")
        prompt = unused.get("input_ids", inputs)
        if not config.do_sample:
            raise ValueError("structure_mode='joint' draws derivations. Pass do_sample=True, or --sample.")
        if prompt is not None and prompt.tolist() != [[self.config.bos_token_id]] * len(prompt):
            raise ValueError(
                "structure_mode='joint' begins at the root of a tree. Leave the prompt out, or use 'marginal'."
            )
        return self._draw_sentences(config, 1 if prompt is None else len(prompt))

    @torch.no_grad()
    def _draw_sentences(self, config: GenerationConfig, count: int) -> PCFGGenerateOutput | Tensor:
        count *= config.num_return_sequences or 1
        grammars = self._prior_grammars()
        which = torch.randint(len(grammars), (count,)).tolist()
        end, pad = self.config.eos_token_id, config.pad_token_id
        if pad is None and end is None:
            raise ValueError("structure_mode='joint' gives sentences of unequal length. Pass pad_token_id.")
        start = [] if self.config.bos_token_id is None else [self.config.bos_token_id]
        limit = config.max_new_tokens or (config.max_length or 20 + len(start)) - len(start)
        drawn = [_Derivation() for _ in range(count)]
        for number, grammar in enumerate(grammars):
            _derive(grammar, [one for one, own in zip(drawn, which, strict=True) if own == number], limit)
        complete = [not one.stack for one in drawn]
        rows = [
            [*start, *one.words, *([end] if done and end is not None and len(one.words) < limit else [])]
            for one, done in zip(drawn, complete, strict=True)
        ]
        sequences = _padded(rows, end if pad is None else pad).to(self.device)
        if not config.return_dict_in_generate:
            return sequences
        trees = [one.tree() for one in drawn]
        words = [len(one.words) for one in drawn]
        steps = [spans_to_actions([span for span, _ in tree], n) for tree, n in zip(trees, words, strict=True)]
        labeled = [constituents(self.config, tree, one.tags) for tree, one in zip(trees, drawn, strict=True)]
        return PCFGGenerateOutput(
            sequences=sequences,
            actions=_padded(steps, PAD_ACTION).to(self.device),
            spans=[[(i + len(start), j + len(start)) for (i, j), _ in tree] for tree in labeled],
            labels=[[label for _, label in tree] for tree in labeled],
            offsets=[len(start)] * count,
            lengths=words,
            complete=torch.tensor(complete, device=self.device),
        )


def _padded(rows: list[list[int]], filler: int) -> Tensor:
    """Rows of unequal length [B, longest], which may be empty."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], True, filler)


class _Derivation:
    """A leftmost derivation on its way."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.tags: list[int] = []
        self.stack: list[tuple[int, int | None]] = []
        """Symbols to expand, with None; and constituents to close, with the place where they began."""
        self.nodes: list[tuple[Span, int]] = []

    def close(self) -> None:
        """Close the constituents on top of the stack."""
        while self.stack and self.stack[-1][1] is not None:
            symbol, begin = self.stack.pop()
            self.nodes.append(((begin, len(self.words)), symbol))

    def tree(self) -> list[tuple[Span, int]]:
        """Spans in post-order with their nonterminals; open constituents end with the last word."""
        size = len(self.words)
        still_open = [((begin, size), symbol) for symbol, begin in reversed(self.stack) if begin is not None]
        # Of open constituents that lack their right child, the child is there already.
        found: dict[Span, int] = {}
        for span, symbol in [*self.nodes, *still_open]:
            if span[1] - span[0] > 1:
                found.setdefault(span, symbol)
        return sorted(found.items(), key=lambda node: (node[0][1], -node[0][0]))


def _derive(grammar: Grammar, drawn: list[_Derivation], limit: int) -> None:
    """Draw derivations from the root, of at most `limit` words each, in place; open ones keep their stack."""
    if not drawn:
        return
    size = grammar.rules.size
    for one, symbol in zip(drawn, draw(grammar.root.expand(len(drawn), -1)).tolist(), strict=True):
        one.stack.append((symbol, None))
    device = grammar.root.device
    while active := [one for one in drawn if one.stack and len(one.words) < limit]:
        parents = [one for one in active if one.stack[-1][0] < size]
        if parents:
            tops = [one.stack.pop()[0] for one in parents]
            first, second = grammar.rules.sample(torch.tensor(tops, device=device))
            for one, top, left, right in zip(parents, tops, first.tolist(), second.tolist(), strict=True):
                one.stack += [(top, len(one.words)), (right, None), (left, None)]
            continue
        tags = torch.tensor([one.stack.pop()[0] - size for one in active], device=device)
        drawn_words = draw(grammar.probabilities[tags])
        for one, tag, word in zip(active, tags.tolist(), drawn_words.tolist(), strict=True):
            one.tags.append(tag)
            one.words.append(word)
            one.close()
