"""The weight of a model's own objective beside the loss of its classifier."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer

from hf_synlm import GPSTConfig, RNNGConfig, TreeLMConfig
from tests.helpers.architectures import batch, build, without_dropout
from tests.helpers.finetuning import trainer_arguments
from tests.helpers.recurrent_models import gradients
from tests.helpers.refusals import refused

LABELS = torch.tensor([0, 2, 1])
with_objective = pytest.mark.parametrize("name", ["gpst", "rnng", "tree_lm"])


def classifier(name: str, weight: float) -> Any:
    fields = {"num_labels": 3, "objective_weight": weight, **without_dropout(name)}
    return build(name, "ForSequenceClassification", **fields)


@with_objective
def test_loss_and_gradient_are_linear_in_the_weight(name: str) -> None:
    """With 0 they are those of the classifier alone, and the objective is not computed."""
    losses, slopes = {}, {}
    for weight in (0, 0.5, 1):
        model = classifier(name, weight)
        output = model(**batch(name), labels=LABELS)
        losses[weight], slopes[weight] = output.loss, gradients(model, output.loss)
        assert list(output.losses)[0] == "classification" and (len(output.losses) == 1) == (weight == 0)
    torch.testing.assert_close(losses[0.5], (losses[0] + losses[1]) / 2)
    model = classifier(name, 0)
    alone = gradients(model, torch.nn.functional.cross_entropy(model(**batch(name)).logits, LABELS))
    for key, slope in slopes[0].items():
        assert (slope is None) == (alone[key] is None) and slopes[1][key] is not None, key
        slope = torch.zeros_like(slopes[1][key]) if slope is None else slope
        torch.testing.assert_close(slope, torch.zeros_like(slope) if alone[key] is None else alone[key])
        torch.testing.assert_close(slopes[0.5][key], (slope + slopes[1][key]) / 2, rtol=1e-4, atol=1e-6)
    assert any(slope is None for slope in slopes[0].values())


def test_shares_of_the_classifier_alone() -> None:
    """Each part of a batch that is read in parts counts by its rows."""
    model, inputs = classifier("gpst", 0), batch("gpst")
    assert model.count_loss_items(**inputs) == {"classification": 3}
    half = model(**inputs, labels=LABELS, loss_shares={"classification": 0.5}).loss
    torch.testing.assert_close(half, model(**inputs, labels=LABELS).loss / 2)


@with_objective
def test_trainer_takes_the_weight_of_the_configuration(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "language_model")
    options = {"num_labels": 3, "objective_weight": 0, **without_dropout(name)}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "language_model", **options)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    inputs = batch(name, 5, 5, 5)
    inputs.pop("attention_mask")
    rows = [{key: value[row] for key, value in inputs.items()} | {"labels": LABELS[row]} for row in range(3)]
    trainer = Trainer(model, trainer_arguments(tmp_path, learning_rate=1e-3), train_dataset=rows)
    trainer.train()
    moved = {key.partition(".")[0] for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert {"model", "score"} <= moved and not moved & {"heads", "action_head"}
    trainer.save_model(tmp_path / "classifier")
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert saved.config.objective_weight == 0


@pytest.mark.parametrize("config", [GPSTConfig, RNNGConfig, TreeLMConfig])
def test_default_and_bad_weights(config: Any) -> None:
    assert config().objective_weight == 0
    for weight in (-1.0, float("inf")):
        refused(f"objective_weight must be a finite .* not negative, and is {weight}", config, objective_weight=weight)
