"""Small models with a search, GPST and RNNG, and what the tests of their searches and of `generate` share."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_synlm import GPSTConfig, GPSTForCausalLM, RNNGConfig, RNNGForCausalLM

GPST_TINY: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_type_layers": 1, "num_token_layers": 1,
    "max_position_embeddings": 64, "composition_size": 8, "composition_num_heads": 2,
    "composition_intermediate_size": 16, "num_composition_layers": 1, "score_size": 4, "parser_size": 8,
    "parser_score_size": 8, "num_parser_layers": 1, "parser_num_heads": 2, "scoring_num_beams": 3, "bos_token_id": 1,
    "eos_token_id": 1, "pad_token_id": 0, "reduce_token_id": 2, "cls_token_id": 3, "sep_token_id": 4,
}  # fmt: skip
RNNG_TINY: dict[str, Any] = {
    "vocab_size": 12, "embedding_size": 8, "hidden_size": 8, "num_layers": 2, "nonterminals": ["S", "X"],
    "max_open_nonterminals": 4, "max_consecutive_nonterminals": 2,
}  # fmt: skip
INSIDE = (2, 5, 6)  # tokens that do not end a word in RNNGs of word pieces
NARROW = {"scoring_num_beams": 3, "action_beam_size": 8}


def varied(model: Any, scale: float) -> Any:
    """The model, after noise of this size is added to every parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def gpst(*, gen_bias: float = 0.0, seed: int = 0, **fields: Any) -> GPSTForCausalLM:
    """A tiny GPST whose parameters all differ; `gen_bias` makes deep stacks likely."""
    torch.manual_seed(seed)
    model = varied(GPSTForCausalLM(GPSTConfig(**{**GPST_TINY, **fields})).eval(), 0.3)
    with torch.no_grad():
        model.heads.action[-1].bias += torch.tensor([gen_bias, 0.0])
    return model


def rnng(system: str = "top_down", composition: str = "lstm", *, seed: int = 0, **fields: Any) -> RNNGForCausalLM:
    """A tiny RNNG of two labels."""
    torch.manual_seed(seed)
    fields = {**RNNG_TINY, "transition_system": system, "composition": composition, **fields}
    model = RNNGForCausalLM(RNNGConfig(**fields)).eval()
    if model.config.subwords:
        model.model.word_final[list(INSIDE)] = False
    return model


def search_model(name: str, **fields: Any) -> Any:
    """GPST ("gpst"), or RNNG by its transition system ("rnng", "rnng, in-order")."""
    system = "in_order" if "in-order" in name else "top_down"
    return gpst(**fields) if name == "gpst" else rnng(system, **{**NARROW, **fields})


def ending_model(name: str) -> Any:
    """A model that likes to end. GPST's begin token, 3, is none that ends; RNNG's vocabulary has one token for both."""
    if name != "gpst":
        return search_model(name, seed=2)
    model = gpst(bos_token_id=3)
    with torch.no_grad():
        direction = model.heads.token(torch.randn(200, 16)).mean(0)
        model.lm_head.weight[model.config.eos_token_id] += 1.5 * direction / direction.norm()
    return model


def parse(model: Any, ids: list[int] | Tensor, num_beams: int = 4, **options: Any) -> Any:
    """All trees of the beam."""
    ids = torch.tensor([ids]) if isinstance(ids, list) else ids
    return model.parse(ids, **{"num_beams": num_beams, "num_return_sequences": num_beams, **options})


def first_action(output: Any) -> int:
    """What reads a word: GEN is 0 in GPST, SHIFT 1 in RNNG, whose trees have labels; smaller numbers are padding."""
    return int(output.labels is not None)


def actions_of(output: Any, *place: int) -> tuple[int, ...]:
    """Actions of a sequence, or of a row and one of its trees, without padding."""
    return tuple(action for action in output.actions[place].tolist() if action >= first_action(output))


def count_words(output: Any, row: int) -> int:
    """Words of a generated derivation."""
    return actions_of(output, row).count(first_action(output))


def hypotheses(output: Any, row: int = 0) -> list[tuple[float, tuple[int, ...]]]:
    """Scores and actions of the trees that exist."""
    scores = enumerate(output.log_probs[row].tolist())
    return [(score, actions_of(output, row, rank)) for rank, score in scores if score > -math.inf]


def assert_same(found: list[tuple[float, Any]], expected: list[tuple[float, Any]], tolerance: float = 1e-4) -> None:
    """Equal derivations with equal scores, best first; those that tie may change places."""
    assert expected
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=tolerance)
    wanted = {actions: score for score, actions in expected}
    assert len({actions for _, actions in found}) == len(found)
    for score, actions in found:
        # The last place of a beam may be shared.
        assert actions in wanted or abs(score - expected[-1][0]) < tolerance
        assert actions not in wanted or score == pytest.approx(wanted[actions], abs=tolerance)


def padded(rows: Sequence[Sequence[int]], left: bool, fill: int = 7) -> tuple[Tensor, Tensor]:
    """Rows padded with a token that means something, and their mask."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.long)
    for row, values in enumerate(rows):
        place = slice(width - len(values), width) if left else slice(0, len(values))
        ids[row, place], mask[row, place] = torch.tensor(values), 1
    return ids, mask


def generate(model: Any, ids: Any, **options: Any) -> Any:
    """Generate with an output object; no end token unless one is given."""
    ids = torch.tensor(ids) if isinstance(ids, list) else ids
    return model.generate(
        ids, **{"eos_token_id": None, "max_new_tokens": 5, "return_dict_in_generate": True, **options}
    )


def assert_fits(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square test at about four standard deviations, rare outcomes taken together."""
    expected = counts.sum() * probabilities
    common = expected >= 5
    groups = [(counts[common], expected[common]), (counts[~common].sum()[None], expected[~common].sum()[None])]
    observed, wanted = (torch.cat([group[i].double() for group in groups]) for i in range(2))
    statistic = float(((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum())
    freedom = len(wanted) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * max(freedom, 1))
