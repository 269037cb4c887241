"""`torch.compile` and `torch.export` of what scores texts: the same numbers, or an error that says why not.

Searches, charts and recurrences with loops of their own run outside of compiled graphs. A loop over words is unrolled
when it is exported, so that what is exported reads texts of one shape.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.architectures import batch, build, labeled, without_dropout
from tests.helpers.recurrent_models import gradients

EXPORTED = ("on_lstm", "prpn", "palm", "awd_lstm", "lstm", "pcfg", "pcfg, simple")
UNROLLED = ("on_lstm", "prpn")  # operation by operation


class Scores(nn.Module):
    """A function of token ids alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids).logits


class Layers(nn.Module):
    """The Transformer layers of GPST as a function of their inputs."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs_embeds=inputs, use_cache=False).last_hidden_state


def ids_of(name: str) -> Tensor:
    return batch(name)["input_ids"][:1, :3]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["gpst", "rnng", "pcfg", "pcfg, tensor", "lstm"])
def test_compiled_scores_are_the_same(name: str) -> None:
    """Without gradients, as in scoring."""
    model, ids = build(name), ids_of(name)
    compiled = torch.compile(Scores(model), backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids), model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "on_lstm, split head",
        "prpn",
        "palm",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("rnng", "rnng, attention")),
    ],
)
def test_compiled_training_is_the_same(name: str) -> None:
    """The compiler sees every step of a recurrence."""
    small = {"palm": {"num_layers": 2, "num_spans": 2}, "prpn": {"num_layers": 2}}
    backend = "eager" if name.startswith("rnng") else "aot_eager"
    small["on_lstm, split head"] = {"num_layers": 2, "supervised_layers": [1, 0]}
    model, inputs = build(name, **without_dropout(name), **small.get(name, {})), labeled(name, 2, 1)
    expected, loss = model(**inputs).loss, torch.compile(model, backend=backend)(**inputs).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in UNROLLED else []) for name in EXPORTED]
)
def test_models_without_a_search_are_exported_for_one_shape(name: str, tmp_path: Any) -> None:
    model, ids = build(name).requires_grad_(False), ids_of(name)
    with torch.no_grad():  # or the graph has regions that cannot be saved
        exported = torch.export.export(Scores(model), (ids,), strict=False)
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for other in (ids, ids.flip(1)):
        torch.testing.assert_close(loaded(other), model(input_ids=other).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpst", "rnng"])
def test_a_search_cannot_be_exported(name: str) -> None:
    with pytest.raises(ValueError, match="come from a search.*depend on the text.*Export layers"):
        torch.export.export(Scores(build(name).requires_grad_(False)), (ids_of(name),), strict=False)


def test_layers_of_gpst_are_one_graph_of_any_length() -> None:
    """Those of types, of which there is one here, stand for those of tokens: they are of the same class."""
    model = build("gpst").requires_grad_(False)
    assert type(model.model.type_layers) is type(model.model.token_layers)
    layers = Layers(model.model.type_layers)
    width = model.config.hidden_size
    shapes = {"inputs": {1: torch.export.Dim("length", min=2, max=64)}}
    exported = torch.export.export(layers, (torch.randn(2, 6, width),), dynamic_shapes=shapes, strict=False).module()
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True, dynamic=True)
    for slots in (3, 11):
        inputs = torch.randn(2, slots, width)
        torch.testing.assert_close(exported(inputs), layers(inputs))
        torch.testing.assert_close(compiled(inputs), layers(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpst", "palm"])
def test_compiled_by_inductor(name: str) -> None:
    model, ids = build(name), ids_of(name)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(Scores(model))(ids), model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
