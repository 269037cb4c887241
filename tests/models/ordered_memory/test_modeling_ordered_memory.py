"""Ordered Memory: the numbers of the authors' program, the specification, and the language model."""

import pytest
import torch
from torch import Tensor

from hf_synlm.models.ordered_memory.layer import OrderedMemoryLayer
from tests.helpers.goldens import read_case, read_tensors
from tests.helpers.recurrent_models import make_model
from tests.reference import ordered_memory as reference

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


def test_layer_equals_the_specification() -> None:
    torch.manual_seed(1)
    layer = OrderedMemoryLayer(5, 6, 4, 0.3, 0.3).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    inputs = torch.randn(2, 9, 5)
    states = layer(inputs, layer.start(inputs))[1:]
    for row in range(2):
        output, probs = reference.read(layer, inputs[row])
        torch.testing.assert_close(torch.stack([s.candidate[row, -1] for s in states]), output, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack([s.probs[row] for s in states]), probs, atol=1e-5, rtol=1e-5)


def test_high_gaps_split_first() -> None:
    """The tree is that of the slots: the gap whose token joins at the highest slot is the root's."""
    model = make_model("ordered_memory")
    ids = torch.randint(1, 30, (1, 6))
    output = model.parse(ids)
    heights = model(torch.cat([ids.new_zeros(1, 1), ids], 1)).distances[0, 0, 2:]
    split = int(heights.argmax()) + 1
    halves = {(i, j) for i, j in ((0, split), (split, 6)) if j - i > 1}
    assert halves <= set(output.spans[0][0])
