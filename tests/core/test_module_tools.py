"""Loading by `device_map`: on one device; offloading is an error."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_model
from transformers import PreTrainedModel

from hf_synlm.core.module_tools import SyntacticPreTrainedModel, saved_whole
from tests.helpers.architectures import batch, build
from tests.helpers.refusals import refused

every_architecture = pytest.mark.parametrize("name", ["gpst", "rnng", "on_lstm", "prpn", "palm", "lstm"])


@every_architecture
def test_one_device(name, tmp_path):
    model, inputs = build(name, "Model"), batch(name)
    model.save_pretrained(tmp_path)
    expected = model(**inputs).last_hidden_state
    for device_map in ("auto", "cpu", {"": "cpu"}):
        loaded, report = type(model).from_pretrained(tmp_path, device_map=device_map, output_loading_info=True)
        assert not report["missing_keys"]
        if torch.cuda.is_available():
            loaded.to("cpu")
        assert torch.equal(loaded.eval()(**inputs).last_hidden_state, expected), device_map


@every_architecture
@pytest.mark.parametrize("kind", ["Model", "ForCausalLM"])
def test_offloading_is_an_error(name, kind, tmp_path):
    model = build(name, kind)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    model.save_pretrained(tmp_path / "model")
    options = {"device_map": "auto", "max_memory": {"cpu": size // 2}, "offload_folder": tmp_path / "offload"}
    with pytest.raises(ValueError, match=f"{type(model).__name__} on .*'disk'.*cannot be split.*one device"):
        type(model).from_pretrained(tmp_path / "model", **options)


@pytest.mark.parametrize(
    ("places", "is_refused"), [(["cpu", 0], True), (["disk"], True), (["cpu"], False), ([0, 1], True), ([0], False)]
)
def test_only_one_device_is_accepted(places, is_refused, monkeypatch):
    """Not the CPU beside a GPU, two GPUs, or the disk; without a GPU these maps cannot be loaded."""
    loaded = SimpleNamespace(hf_device_map=dict(enumerate(places)))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda: loaded)
    if is_refused:
        refused("cannot be split", SyntacticPreTrainedModel.from_pretrained)
    else:
        assert SyntacticPreTrainedModel.from_pretrained() is loaded


def test_an_lstm_on_a_gpu_is_saved_whole(tmp_path):
    """On CUDA the weights of an LSTM are views of one block; safetensors and accelerate would drop or refuse them."""
    torch.manual_seed(0)
    lstm = saved_whole(torch.nn.LSTM(3, 4, bidirectional=True))
    expected = {name: weight.clone() for name, weight in lstm.state_dict().items()}
    block = torch.cat([weight.detach().flatten() for weight in lstm.parameters()])
    parts = block.split([weight.numel() for weight in lstm.parameters()])
    for weight, part in zip(lstm.parameters(), parts, strict=True):
        weight.data = part.view_as(weight)
    assert lstm.state_dict(keep_vars=True)["weight_hh_l0"] is lstm.weight_hh_l0
    save_model(lstm, str(tmp_path / "lstm.safetensors"))
    Accelerator(cpu=True).save_model(lstm, str(tmp_path))
    for file in ("lstm.safetensors", "model.safetensors"):
        found = load_file(tmp_path / file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
