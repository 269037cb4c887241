"""Ordered Memory: the numbers of the authors' program, and the language model."""

import pytest
import torch
from torch import Tensor

from hf_synlm.models.ordered_memory.layer import OrderedMemoryLayer
from tests.helpers.goldens import read_case, read_tensors
from tests.helpers.recurrent_models import make_model

CASES = ("01_full", "02_right_padded", "03_bidirectional")
AUTHORS_NAMES = {
    "input_projection": "input_projection.0", "norm": "activation", "query": "distribution.query.1",
    "query_norm": "distribution.query.2", "key": "distribution.key.1", "key_norm": "distribution.key.2",
    "slot_score": "distribution.beta.2", "cell_in": "cell.input_t.1", "cell_out": "cell.input_t.4",
}  # fmt: skip


def test_dropout_of_attention_and_cell() -> None:
    """On the inputs of queries (all steps at once) and keys and before the scores; on both inputs of the cell."""
    model, ids, places = make_model("ordered_memory"), torch.tensor([[3, 4, 5]]), []
    for name in ("attention_dropout", "cell_dropout"):
        getattr(model.model.layer, name).register_forward_hook(lambda _, given, out, name=name: places.append(name))
    model(ids)
    assert places[0] == "attention_dropout" and places.count("attention_dropout") % 2 == 1
    assert places.count("cell_dropout") == 2 * ids.shape[1]


def authors_layer(case: str) -> tuple[OrderedMemoryLayer, dict[str, Tensor], dict[str, Tensor]]:
    """The forward layer of a case, its tensors, and the gradients of its loss under our names."""
    state, io, meta = read_case(f"ordered_memory/{case}")
    layer = OrderedMemoryLayer(meta["input_size"], meta["slot_size"], meta["nslot"], 0.0, 0.0)
    grads = read_tensors(f"ordered_memory/{case}", "grads")
    names = [
        (f"{ours}.{kind}", f"{name}.{kind}") for ours, name in AUTHORS_NAMES.items() for kind in ("weight", "bias")
    ]
    theirs = {ours: f"OM_forward.{name}" for ours, name in names}
    layer.load_state_dict({ours: state[name] for ours, name in theirs.items()})
    unknown = {name for name in state if name.startswith("OM_forward")} - set(theirs.values())
    assert {name.rsplit(".", 1)[0] for name in unknown} == {
        "OM_forward.input_projection.1",
        "OM_forward.cell.activation",
    }
    gold = {ours: grads[f"forward/{name}"] for ours, name in theirs.items()}
    return layer, io, {**gold, "inputs": grads["forward/X"]}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_authors(case: str) -> None:
    layer, io, grads = authors_layer(case)
    inputs = io["X"].transpose(0, 1).requires_grad_()
    states = layer(inputs, layer.start(inputs))[1:]
    mask = io["mask"].bool()
    output, probs = torch.stack([state.candidate[:, -1] for state in states]), torch.stack([s.probs for s in states])
    for name, own in (("memory", "M"), ("candidate", "M_hat"), ("probs", "p")):
        values = torch.stack([getattr(state, name) for state in states])
        torch.testing.assert_close(values[mask], io[f"forward/step/{own}"][mask], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(output[mask], io["forward/output"][mask], atol=2e-5, rtol=2e-5)
    loss = (output * io["forward/weight_output"])[mask].sum() + (probs * io["forward/weight_probs"])[mask].sum()
    torch.testing.assert_close(loss, io["forward/loss"][0], atol=2e-5, rtol=2e-5)
    loss.backward()
    found = {**{name: value.grad for name, value in layer.named_parameters()}, "inputs": inputs.grad.transpose(0, 1)}
    for name, gold in grads.items():
        # The bias of a softmax's scores has no gradient but for rounding.
        if name != "slot_score.bias":
            torch.testing.assert_close(found[name], gold, atol=2e-5 * max(1.0, gold.abs().max().item()), rtol=2e-5)
