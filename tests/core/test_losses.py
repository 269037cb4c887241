"""Losses of several means, computed piece by piece: shares of the items make the pieces add up to the whole batch."""

from typing import Any

import pytest
import torch

from hf_synlm.core.losses import linear_cross_entropy
from hf_synlm.training.engine.steps import to_shares
from tests.helpers.architectures import build, labeled, without_dropout
from tests.helpers.recurrent_models import gradients
from tests.helpers.refusals import refused

PIECES = (slice(0, 1), slice(1, 4), slice(4, 7))
# Name -> model of `build`, fields of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("gpst", "pushdown", "pcfg", "lstm", "palm")},
    "gpst-paper-height": ("gpst", {"height_loss": "paper", "height_threshold": 2, "token_loss_weight": 0.3}),
    "gpst-classifier": ("gpst", {"kind": "ForSequenceClassification", "objective_weight": 0.5}),
    **{f"rnng-{kind}": ("rnng", {"loss_normalization": kind}) for kind in ("batch", "token", "action", "sum")},
    "pcfg-compound": ("pcfg, compound", {}),
    "on_lstm": ("on_lstm, split head", {"language_model_weight": 0.7}),
    "on_lstm-sum": ("on_lstm, split head", {"syntactic_distance_reduction": "sum"}),
    # Their gradients in pieces are not compared here.
    "prpn": ("prpn, syd", {}),
    "rnng-attention": ("rnng, attention", {}),
}


def make(key: str) -> tuple[Any, dict[str, Any]]:
    """A model in training and rows of unequal length: one has labels left out, the last one has none at all."""
    name, fields = MODELS[key]
    batch: dict[str, Any] = labeled(name, 9, 4, 6, 1, 12, 3, 2)
    batch["labels"][1, :3] = batch["labels"][6] = -100
    if key.startswith("rnng"):
        batch = labeled(name, 6, 9, 1, 4, 12, 2, 1)
        del batch["labels"]
    elif key.startswith("gpst"):
        batch["sentence_ids"] = (torch.arange(12) // 5 + 1) * batch["attention_mask"]
    elif key.startswith(("on_lstm", "prpn")):
        batch["distances"] = torch.randint(1, 5, batch["input_ids"].shape).float()
        batch["distances"][2, 1:4] = torch.nan
    elif key.startswith("pcfg"):
        batch["labels"][1] = -100  # a sentence counts as a whole
    elif key == "palm":
        batch["spans"] = [[(0, 2), (1, 4)], [(0, 3)], [], [], [(2, 5), (0, 2)], [(0, 2)], []]
    if key == "gpst-classifier":
        batch["labels"] = torch.arange(7) % 2
    if key == "pcfg-compound":
        batch["latent_noise"] = torch.randn(7, 4)
    return build(name, **without_dropout(name), **fields).train(), batch


def take(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: value[rows] for name, value in batch.items()}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("prpn", "rnng-attention")])
def test_pieces_add_up_to_the_whole_batch(name: str) -> None:
    model, batch = make(name)
    whole = model(**batch)
    expected = gradients(model, whole.loss)
    pieces = [take(batch, rows) for rows in PIECES]
    counts = [model.count_loss_items(**piece) for piece in pieces]
    totals = {part: sum(count[part] for count in counts) for part in counts[0]}
    assert totals == model.count_loss_items(**batch)
    outputs = [
        model(**piece, loss_shares=to_shares(count, totals)) for piece, count in zip(pieces, counts, strict=True)
    ]
    total = sum(output.loss for output in outputs)
    torch.testing.assert_close(total, whole.loss, rtol=1e-5, atol=1e-6)
    for part, value in whole.losses.items():
        torch.testing.assert_close(sum(output.losses[part] for output in outputs), value, rtol=1e-5, atol=1e-6)
    for parameter, gradient in gradients(model, total).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-3, atol=2e-6, msg=f"{name} {parameter}")
    # What the shares are for: the means of the pieces are not the mean of the whole.
    naive = sum(model(**piece).loss for piece in pieces) / len(pieces)
    differ = [
        not torch.allclose(gradient, expected[parameter], rtol=1e-2, atol=1e-5)
        for parameter, gradient in gradients(model, naive).items()
    ]
    assert any(differ)


def test_counts_of_prpn() -> None:
    """Its batch normalization looks at whole batches, so that only the counts can be compared."""
    model, batch = make("prpn")
    counts = model.count_loss_items(**batch)
    assert counts["language_model"] == int((batch["labels"][:, 1:] != -100).sum())
    other, _ = make("on_lstm")
    assert counts["syntactic_distance"] == other.count_loss_items(**batch)["syntactic_distance"] > 0
    halves = model(**batch, loss_shares=dict.fromkeys(counts, 0.5))
    torch.testing.assert_close(halves.loss, model(**batch).loss / 2)


def test_a_piece_may_hold_no_item_of_a_part() -> None:
    assert to_shares({"token": 0, "height": 2}, {"token": 0, "height": 4}) == {"token": 0.0, "height": 0.5}


@pytest.mark.parametrize("name", ["gpst", "gpst-classifier", "rnng-batch", "pcfg", "lstm", "on_lstm", "palm"])
def test_unknown_parts_are_refused(name: str) -> None:
    model, batch = make(name)
    refused("names 'words', but the loss has only the parts", model, **batch, loss_shares={"words": 0.5})


@pytest.mark.parametrize(("rows", "words", "with_bias"), [(8, 11, True), (8, 11, False), (300, 60_000, True)])
def test_linear_cross_entropy(rows: int, words: int, with_bias: bool) -> None:
    """Values and gradients equal those of all logits at once, for few words and for so many that they are cut."""
    shapes = (rows, 5), (words, 5), (words,)
    hidden, weight, bias = (torch.randn(*shape).double().requires_grad_() for shape in shapes)
    target, coefficient = torch.randint(words, (rows,)), torch.rand(rows).double()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    loss, loss_R = linear_cross_entropy(hidden, weight, target, coefficient, bias if with_bias else None)
    logits = torch.nn.functional.linear(*inputs)
    expected_R = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss_R, expected_R)
    torch.testing.assert_close(loss, (expected_R * coefficient).sum())
    expected = torch.autograd.grad((expected_R * coefficient).sum() * 0.5, inputs)
    torch.testing.assert_close(torch.autograd.grad(loss * 0.5, inputs), expected)
