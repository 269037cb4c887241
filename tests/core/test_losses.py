"""Losses of several means, computed piece by piece: shares of the items make the pieces add up to the whole batch."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_synlm import GPSTForSequenceClassification
from hf_synlm.core import losses
from hf_synlm.core.losses import linear_cross_entropy
from hf_synlm.training.engine.steps import to_shares
from tests.models.gpst.test_modeling_gpst import NO_DROPOUT, ids_of, tiny
from tests.models.rnng import test_modeling_rnng as rnng

SIZES = {"vocab_size": 40, "embedding_size": 8, "hidden_size": 12}
NO_AWD_DROPOUT = {f"{name}_dropout": 0.0 for name in ("embedding", "input", "hidden", "output", "weight")}
NO_PRPN_DROPOUT = {"dropout": 0.0, "input_dropout": 0.0, "recurrent_dropout": 0.0}
RNNG_LENGTHS = [6, 9, 1, 4, 12, 2, 1]
PIECES = (slice(0, 1), slice(1, 4), slice(4, 7))


def text() -> dict[str, Any]:
    """Rows of unequal length; the second one has labels left out, the last one has none at all."""
    ids, mask = ids_of(9, 4, 6, 1, 12, 3, 2)
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :3] = -100
    labels[6] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gpst(**config: Any) -> tuple:
    batch = text()
    column = torch.arange(batch["input_ids"].shape[1])
    batch["sentence_ids"] = (column // 5 + 1) * batch["attention_mask"]
    return tiny(**{**NO_DROPOUT, "merge_noise": 0.0, **config}).train(), batch


def gpst_classifier() -> tuple:
    model, batch = gpst()
    classifier = GPSTForSequenceClassification(model.config).train()
    return classifier, {**batch, "labels": torch.arange(7) % 2}


def grammar(**config: Any) -> tuple:
    batch = rnng.batch(lengths=RNNG_LENGTHS)
    return rnng.tiny(dropout=0.0, **config).train(), batch


def new_model(model_type: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).train()


def pushdown() -> tuple:
    """Trees that branch to the right."""
    batch, sizes = text(), {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    places = torch.arange(batch["input_ids"].shape[1]) + 1
    batch["attachments"] = torch.where(batch["attention_mask"] > 0, places, -100)
    return new_model("pushdown", vocab_size=40, dropout=0.0, **sizes), batch


def recurrent(model_type: str, **fields: Any) -> tuple:
    torch.manual_seed(0)
    batch = text()
    if model_type in ("on_lstm", "prpn"):
        distances = torch.randint(1, 5, batch["input_ids"].shape).float()
        distances[2, 1:4] = torch.nan
        batch["distances"] = distances
    elif model_type == "palm":
        batch["spans"] = [[(0, 2), (1, 4)], [(0, 3)], [], [], [(2, 5), (0, 2)], [(0, 2)], []]
    return new_model(model_type, **SIZES, **fields), batch


def on_lstm(**fields: Any) -> tuple:
    return recurrent("on_lstm", **NO_AWD_DROPOUT, chunk_size=2, supervised_layers=[1], **fields)


def prpn() -> tuple:
    return recurrent("prpn", **NO_PRPN_DROPOUT, num_slots=4, parsing_network="recurrent")


MODELS = {
    "gpst": gpst,
    "gpst-paper-height": lambda: gpst(height_loss="paper", height_threshold=2, token_loss_weight=0.3),
    "gpst-classifier": gpst_classifier,
    **{
        f"rnng-{kind}": lambda kind=kind: grammar(loss_normalization=kind)
        for kind in ("batch", "token", "action", "sum")
    },
    "pushdown": pushdown,
    "lstm": lambda: recurrent("lstm_lm", dropout=0.0),
    "on_lstm": lambda: on_lstm(language_model_weight=0.7),
    "on_lstm-sum": lambda: on_lstm(syntactic_distance_reduction="sum"),
    "palm": lambda: recurrent("palm", **NO_AWD_DROPOUT, num_spans=4, rrnn_size=6, attention_size=5),
}


def take(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: value[rows] for name, value in batch.items()}


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", list(MODELS))
def test_pieces_add_up_to_the_whole_batch(name: str) -> None:
    model, batch = MODELS[name]()
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
    model, batch = prpn()
    counts = model.count_loss_items(**batch)
    assert counts["language_model"] == int((batch["labels"][:, 1:] != -100).sum())
    other, _ = on_lstm()
    assert counts["syntactic_distance"] == other.count_loss_items(**batch)["syntactic_distance"] > 0
    halves = model(**batch, loss_shares=dict.fromkeys(counts, 0.5))
    torch.testing.assert_close(halves.loss, model(**batch).loss / 2)


def test_a_piece_may_hold_no_item_of_a_part() -> None:
    assert to_shares({"token": 0, "height": 2}, {"token": 0, "height": 4}) == {"token": 0.0, "height": 0.5}
    with pytest.raises(ValueError, match=r"counts has the parts \['token'\]"):
        to_shares({"token": 1}, {"word": 1})


@pytest.mark.parametrize("name", ["gpst", "gpst-classifier", "rnng-batch", "lstm", "on_lstm", "palm"])
def test_unknown_parts_are_refused(name: str) -> None:
    model, batch = MODELS[name]()
    with pytest.raises(ValueError, match="the loss has no part 'words'"):
        model(**batch, loss_shares={"words": 0.5})


@pytest.mark.parametrize("rows_per_chunk", [3, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_cross_entropy(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int, with_bias: bool) -> None:
    """Values and gradients equal those of all logits at once, in one chunk and in several."""
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", 11 * rows_per_chunk)
    hidden, weight, bias = (torch.randn(*shape).double().requires_grad_() for shape in ((8, 5), (11, 5), (11,)))
    target, coefficient = torch.randint(11, (8,)), torch.rand(8).double()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    loss, loss_R = linear_cross_entropy(hidden, weight, target, coefficient, bias if with_bias else None)
    logits = torch.nn.functional.linear(*inputs)
    expected_R = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss_R, expected_R)
    torch.testing.assert_close(loss, (expected_R * coefficient).sum())
    expected = torch.autograd.grad((expected_R * coefficient).sum() * 0.5, inputs)
    torch.testing.assert_close(torch.autograd.grad(loss * 0.5, inputs), expected)
