"""Conversion of the authors' PCFGs: every tensor and option accounted for, and pickles read without their code."""

import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_synlm.conversion import convert_state_dict
from hf_synlm.conversion.pcfg import pcfg_tokenizer, read_pickled_model
from tests.helpers.commands import fail, run
from tests.helpers.goldens import read_case
from tests.helpers.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Couldn't retrieve source code", "ignore:.*torch.jit")
CASES = {
    "01_neural": "dense", "02_compound": "dense", "03_neural_mixed": "dense", "04_compound_mixed": "dense",
    "05_tensor": "tensor", "06_tensor_fast": "tensor_shared", "07_simple": "simple", "08_simple_compound": "simple",
}  # fmt: skip


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
        with pytest.raises(ValueError, match="is missing in|lacks|in the configuration, but 0|should be None"):
            convert_state_dict("pcfg", {k: v for k, v in state.items() if k != key}, meta["config"])
    with pytest.raises(ValueError, match="1 unknown tensors: .'surprise'"):
        convert_state_dict("pcfg", {**state, "surprise": torch.zeros(1)}, meta["config"])
    wrong = {**state, "root_emb": state["root_emb"][:, 1:]}
    with pytest.raises(ValueError, match="dim is .* in the configuration, but .* in the|should be"):
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
        with pytest.raises(ValueError, match=f"{option} is {value + 1} in the configuration, but {value} in the"):
            convert_state_dict("pcfg", state, {**meta["config"], option: value + 1})


def test_a_simple_pcfg_needs_its_number_of_nonterminals() -> None:
    state, _, meta = read_case("pcfg/07_simple")
    options: dict[str, Any] = {key: value for key, value in meta["config"].items() if key != "NT"}
    refused("lacks .NT.. Add .NT., because the tensors do not show it", convert_state_dict, "pcfg", state, options)
    refused("T is 6 in the configuration, but 5 in", convert_state_dict, "pcfg", state, {**options, "NT": 5})
    assert convert_state_dict("pcfg", state, {"NT": 4}).config.num_preterminals == 6


# ---------------------------------------------------------------------------------------------------------- pickles
class ResidualLayer(nn.Module):
    """As in the authors' models.py."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)


def _get_thnn_function_backend() -> "Backend":
    return Backend()


class Backend:
    """What every module of PyTorch 1.0 has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_thnn_function_backend, ()


class PCFG(nn.Module):
    """As in the authors' PCFG.py: the numbers and charts of the last batch are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.nt_states, self.huge = 3, 1e9
        self.beta, self.spans = torch.zeros(2, 3, 3, 8), [[(0, 2, 1), (0, 1, 0)], []]
        self._backend = Backend()


class CompPCFG(nn.Module):
    """As in the authors' models.py."""

    def __init__(self, state: dict[str, Tensor]):
        super().__init__()
        (symbols, size), (words, width) = state["nt_emb"].shape, state["enc_emb.weight"].shape
        inputs, hidden = state["rule_mlp.weight"].shape[1], state["enc_rnn.weight_hh_l0"].shape[1]

        def mlp(outputs: int) -> nn.Sequential:
            layers = ResidualLayer(size, size), ResidualLayer(size, size)
            return nn.Sequential(nn.Linear(inputs, size), *layers, nn.Linear(size, outputs))

        for name in ("root_emb", "t_emb", "nt_emb"):
            setattr(self, name, nn.Parameter(torch.empty_like(state[name])))
        self.rule_mlp = nn.Linear(inputs, len(state["rule_mlp.weight"]))
        self.root_mlp, self.vocab_mlp = mlp(symbols), mlp(words)
        self.enc_emb = nn.Embedding(words, width)
        self.enc_rnn = nn.LSTM(width, hidden, bidirectional=True, num_layers=1, batch_first=True)
        self.enc_params = nn.Linear(2 * hidden, len(state["enc_params.weight"]))
        self.pcfg = PCFG()
        self.load_state_dict(state)


WORDS = ["<pad>", "<unk>", "<s>", "</s>", "N", *"the a cat dog sees sings of and to".split()]


@pytest.fixture
def authors_code() -> Iterator[None]:
    """The modules that a pickle of the authors names; they are gone when it is read."""
    old = "torch.nn.backends.thnn"
    code = {"models": (CompPCFG, ResidualLayer), "PCFG": (PCFG,), old: (_get_thnn_function_backend,)}
    with pytest.MonkeyPatch.context() as patch:
        for module, classes in code.items():
            patch.setitem(sys.modules, module, types.ModuleType(module))
            for one in classes:
                patch.setattr(one, "__module__", module)
                setattr(sys.modules[module], one.__name__, one)
        yield


def save(path: Path, model: Any, legacy: bool = False, **more: Any) -> Path:
    """A checkpoint as the authors' program writes it."""
    ids = {word: number for number, word in enumerate(WORDS)}
    args = {"z_dim": 4, "state_dim": 9, "lr": 0.1}
    content = {"args": args, "model": model, "word2idx": ids, "idx2word": dict(enumerate(WORDS)), **more}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.fixture(params=["zip", "legacy"])
def checkpoint(request: pytest.FixtureRequest, authors_code: None, tmp_path: Path) -> Path:
    """A compound PCFG, pickled by both formats of `torch.save`."""
    state, _, _ = read_case("pcfg/02_compound")
    return save(tmp_path / "compound-pcfg.pt", CompPCFG(state), legacy=request.param == "legacy")


def test_pickled_models_are_converted(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("models", "PCFG", "torch.nn.backends.thnn"):
        del sys.modules[name]
    if not (content := checkpoint.read_bytes()).startswith(b"PK"):  # charts are left on the GPU
        assert b"ctorch\nFloatStorage\n" in content
        checkpoint.write_bytes(content.replace(b"ctorch\nFloatStorage\n", b"ctorch.cuda\nFloatStorage\n"))
    state, _, meta = read_case("pcfg/02_compound")
    tensors, options = read_pickled_model(checkpoint) or ({}, {})
    assert tensors.keys() == state.keys() and all(torch.equal(tensors[name], state[name]) for name in state)
    ids = {"eos_token_id": 3, "pad_token_id": 0}
    assert options == {"z_dim": 4, "state_dim": 9, "lr": 0.1, "vocabulary": WORDS, **ids}
    run(capsys, "convert", "pcfg", "--weights", checkpoint, "--out", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = convert_state_dict("pcfg", state, {**meta["config"], **ids, "bos_token_id": 3})
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.state_dict().items())
    assert {name: getattr(model.config, name) for name in ids} == ids
    # Lower case, numbers, unknown words, and the ids of the checkpoint.
    assert tokenizer("A 12 strange Dog", add_special_tokens=False)["input_ids"] == [6, 4, 1, 8]
    assert tokenizer.eos_token_id == 3 and tokenizer.pad_token_id == 0 and len(tokenizer) == len(WORDS)


def test_options_beside_a_pickle(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.json").write_text('{"z_dim": 5}')
    wrong = ("convert", "pcfg", "--weights", checkpoint, "--config", tmp_path / "wrong.json", "--out", tmp_path / "out")
    assert "z_dim is 5 in the configuration, but 4 in the tensors" in fail(capsys, *wrong)
    assert not (tmp_path / "out").exists()
    assert pcfg_tokenizer({"z_dim": 4}) is None  # as of sustcsonglin/TN-PCFG


class Writes:
    """Unpickled by code of its own, it would write a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "this ran")


class Sneaks(nn.Module):
    """TorchScript that says when it is loaded."""

    @torch.jit.export
    def __getstate__(self) -> bool:
        return self.training

    @torch.jit.export
    def __setstate__(self, state: bool) -> None:
        print("this ran")
        self.training = state


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("place", ["model", "args", "word2idx", "other"])
def test_code_in_a_pickle_never_runs(place: str, legacy: bool, authors_code: None, tmp_path: Path, capsys) -> None:
    state, _, _ = read_case("pcfg/02_compound")
    made, weights = tmp_path / "made", tmp_path / "bad.pt"
    save(weights, **{"model": CompPCFG(state), "legacy": legacy, place: Writes(made)})
    if place == "other" and not legacy:
        torch.load(weights, weights_only=False)
        assert made.read_text() == "this ran"  # what the readers below must not do
        made.unlink()
    assert read_pickled_model(weights) is None
    message = fail(capsys, "convert", "pcfg", "--weights", weights, "--out", tmp_path / "out")
    assert re.search("bad.pt cannot be read as a file of tensors: .*tensors are refused", message)
    assert not made.exists() and not (tmp_path / "out").exists()


def test_torchscript_never_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.jit.save(torch.jit.script(Sneaks()), tmp_path / "script.pt")
    assert read_pickled_model(tmp_path / "script.pt") is None
    assert "this ran" not in capfd.readouterr().out
    torch.jit.load(tmp_path / "script.pt")
    assert "this ran" in capfd.readouterr().out


def test_other_files_are_left_to_their_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State dicts need a configuration, which a pickled model carries."""
    state, _, meta = read_case("pcfg/01_neural")
    torch.save(state, tmp_path / "plain.pt")
    (tmp_path / "text.pt").write_text("no tensors")
    for name, message in (("plain.pt", "authors' configuration by --config"), ("text.pt", "text.pt cannot be read")):
        assert read_pickled_model(tmp_path / name) is None
        assert message in fail(capsys, "convert", "pcfg", "--weights", tmp_path / name, "--out", tmp_path / "out")
    (tmp_path / "config.json").write_text(json.dumps(meta["config"]))
    command = ("convert", "pcfg", "--config", tmp_path / "config.json", "--out", tmp_path / "out")
    run(capsys, *command, "--weights", tmp_path / "plain.pt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not model.config.is_compound and model.num_parameters() == sum(value.numel() for value in state.values())
