"""Conversion of the authors' PCFGs: every tensor and every option accounted for."""

from typing import Any

import pytest
import torch

from hf_synlm.conversion import convert_state_dict
from tests.helpers.goldens import read_case

CASES = {
    "01_neural": "dense",
    "02_compound": "dense",
    "03_neural_mixed": "dense",
    "04_compound_mixed": "dense",
    "05_tensor": "tensor",
    "06_tensor_fast": "tensor_shared",
    "07_simple": "simple",
    "08_simple_compound": "simple",
}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_arrives(case: str) -> None:
    state, _, meta = read_case(f"pcfg/{case}")
    model = convert_state_dict("pcfg", state, meta["config"])
    assert model.config.grammar == CASES[case] and not model.config.mask_special_tokens
    assert not model.training and model.config.bos_token_id is model.config.pad_token_id is None
    assert sum(tensor.numel() for tensor in state.values()) == model.num_parameters()
    ours = sorted(tuple(sorted(tensor.flatten().tolist())) for tensor in model.state_dict().values())
    assert ours == sorted(tuple(sorted(tensor.flatten().tolist())) for tensor in state.values())
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    found = convert_state_dict("pcfg", state, {**meta["config"], **special}).config
    assert {name: getattr(found, name) for name in special} == special


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_that_do_not_fit(case: str) -> None:
    """Each tensor is missed, by its name or as a size, and a strange one is named."""
    state, _, meta = read_case(f"pcfg/{case}")
    for key in state:
        with pytest.raises(ValueError, match="is missing in|lacks|in the configuration and 0 in|should be None"):
            convert_state_dict("pcfg", {k: v for k, v in state.items() if k != key}, meta["config"])
    with pytest.raises(ValueError, match="1 unknown tensors: .'surprise'"):
        convert_state_dict("pcfg", {**state, "surprise": torch.zeros(1)}, meta["config"])
    wrong = {**state, "root_emb": state["root_emb"][:, 1:]}
    with pytest.raises(ValueError, match="dim is .* in the configuration and .* in the tensors|should be"):
        convert_state_dict("pcfg", wrong, meta["config"])


SIZES: list[tuple[str, str]] = [
    ("01_neural", "vocab state_dim t_states nt_states z_dim"),
    ("02_compound", "vocab state_dim t_states nt_states z_dim w_dim h_dim"),
    ("04_compound_mixed", "NT T V s_dim z_dim w_dim h_dim"),
    ("05_tensor", "NT T V s_dim r_dim"),
    ("06_tensor_fast", "NT T V s_dim r_dim"),
    ("07_simple", "T V s_dim"),
]


@pytest.mark.parametrize(("case", "options"), SIZES)
def test_wrong_sizes_are_named(case: str, options: str) -> None:
    state, _, meta = read_case(f"pcfg/{case}")
    for option in options.split():
        value = meta["config"].get(option, 0)
        with pytest.raises(
            ValueError, match=f"{option} is {value + 1} in the configuration and {value} in the tensors"
        ):
            convert_state_dict("pcfg", state, {**meta["config"], option: value + 1})


def test_a_simple_pcfg_needs_its_number_of_nonterminals() -> None:
    state, _, meta = read_case("pcfg/07_simple")
    options: dict[str, Any] = {key: value for key, value in meta["config"].items() if key != "NT"}
    with pytest.raises(ValueError, match=r"lacks \['NT'\]. The tensors of a simple PCFG do not tell NT and T apart"):
        convert_state_dict("pcfg", state, options)
    with pytest.raises(ValueError, match="T is 6 in the configuration and 5 in the tensors"):
        convert_state_dict("pcfg", state, {**options, "NT": 5})
    assert convert_state_dict("pcfg", state, {"NT": 4}).config.num_preterminals == 6
