"""Conversion of the authors' checkpoints: every tensor accounted for, foreign files read safely."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_synlm import GPSTForCausalLM
from hf_synlm.conversion import convert_state_dict
from hf_synlm.conversion.__main__ import main, read_state_dict
from hf_synlm.conversion.rename import rename_state_dict

CASE = Path(__file__).parent / "goldens" / "gpst" / "02_packed"


@pytest.fixture
def checkpoint():
    return load_file(CASE / "state.safetensors"), json.loads((CASE / "meta.json").read_text())


def test_every_tensor_arrives(checkpoint):
    state, config = checkpoint
    model = convert_state_dict("gpst", state, config)
    mine = {tensor.data_ptr() for tensor in model.state_dict().values()}
    total = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(t.numel() for key, t in state.items() if key != "classifier.weight")
    assert total == stored and len(mine) == len(state) - 1
    assert not model.training and model.config.height_loss == "shipped"


def test_prefix_of_distributed_training_is_stripped(checkpoint):
    state, config = checkpoint
    model = convert_state_dict("gpst", {f"module.{key}": value for key, value in state.items()}, config)
    assert torch.equal(model.model.embed_tokens.weight, state["embeddings.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("bos_embedding"), "bos_embedding"),
        (lambda s: s.update(surprise=torch.zeros(1)), "surprise"),
        (lambda s: s.pop("up_scale.weight"), "up_scale.bias"),
        (lambda s: s["bos_embedding"].fill_(float("nan")), "bos_embedding"),
        (lambda s: s.update(bos_embedding=torch.zeros(3)), r"bos_embedding \(3,\) instead of"),
        (lambda s: s.update({5: torch.zeros(1)}), "names"),
        (lambda s: s.update({"classifier.weight": s["classifier.weight"] + 1}), "classifier.weight"),
    ],
)
def test_checkpoints_that_do_not_fit(checkpoint, change, message):
    state, config = checkpoint
    change(state)
    with pytest.raises(ValueError, match=message):
        convert_state_dict("gpst", state, config)


def test_configurations_that_do_not_fit(checkpoint):
    state, config = checkpoint
    with pytest.raises(ValueError, match="gpt_config"):
        convert_state_dict("gpst", state, {"r2d2_config": config["r2d2_config"]})
    with pytest.raises(ValueError, match="n_embd"):
        convert_state_dict("gpst", state, {**config, "gpt_config": {"vocab_size": 97}})
    with pytest.raises(ValueError, match="ldr_detach"):
        convert_state_dict("gpst", state, {**config, "r2d2_config": {**config["r2d2_config"], "ldr_detach": True}})
    config["r2d2_config"]["ext_vocab_size"] = 5
    with pytest.raises(ValueError, match="ext_vocab_size 5"):
        convert_state_dict("gpst", state, config)
    with pytest.raises(ValueError, match="lstm"):
        convert_state_dict("lstm", state, config)


def test_renaming_refuses_collisions():
    with pytest.raises(ValueError, match="Two tensors"):
        rename_state_dict({"a": torch.zeros(1), "b": torch.zeros(1)}, {"a|b": "c"})
    assert list(rename_state_dict({"x.3": torch.zeros(1)}, {r"x\.(\d)": r"y.\1"})) == ["y.3"]


def test_command_line(checkpoint, tmp_path, capsys):
    state, config = checkpoint
    torch.save({f"module.{key}": value for key, value in state.items()}, tmp_path / "model.bin")
    for section in ("r2d2_config", "gpt_config"):
        (tmp_path / f"{section}.json").write_text(json.dumps(config[section]))
    arguments = ["gpst", "--weights", str(tmp_path / "model.bin"), "--output", str(tmp_path / "out"), "--config"]
    arguments += [str(tmp_path / "r2d2_config.json"), str(tmp_path / "gpt_config.json")]
    assert main(arguments) == 0
    loaded = GPSTForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.model.root_embedding, state["r2d2.outside_root_embedding"])
    with pytest.raises(SystemExit):
        main(arguments)
    assert "exists" in capsys.readouterr().err


def test_pickles_with_other_objects_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps({"weights": Path("somewhere")}))
    with pytest.raises(ValueError, match="refused"):
        read_state_dict(path)
    for content in (b"no checkpoint", b"hello" * 100, b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            read_state_dict(path)
    torch.save([torch.zeros(1)], path)
    with pytest.raises(ValueError, match="no state dict"):
        read_state_dict(path)
    (tmp_path / "x.safetensors").write_bytes(b"123")
    with pytest.raises(ValueError, match="no safetensors"):
        read_state_dict(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="no file"):
        read_state_dict(tmp_path / "missing.bin")
