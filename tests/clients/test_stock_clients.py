"""What clients of transformers pass to GPST and RNNG, and what they do with their outputs."""

import copy
import functools
import types
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments, pipeline

from tests.clients.test_peft import TARGETS
from tests.helpers.architectures import ARCHITECTURES, batch, build, labeled, without_dropout
from tests.helpers.refusals import raised, refused
from tests.helpers.scoring_models import model_and_tokenizer

searching = pytest.mark.parametrize("name", ["gpst", "rnng"])
TEXTS = ["the state of our union", "peace"]


@searching
@pytest.mark.parametrize(("kind", "task"), [("Model", "FEATURE_EXTRACTION"), ("ForSequenceClassification", "SEQ_CLS")])
def test_peft_of_every_task(name: str, kind: str, task: str) -> None:
    """PEFT passes `inputs_embeds=None`; vectors instead of ids are an error that says what to do."""
    targets = {key: value for key, value in TARGETS[name].items() if key != "target_parameters"}
    targets["target_modules"] = [layer for layer in targets["target_modules"] if layer != "action_head"]
    model = get_peft_model(build(name, kind), LoraConfig(task_type=task, r=2, **targets)).eval()
    inputs = {key: value for key, value in batch(name).items() if key != "actions"}
    output = model(**inputs, position_ids=None)
    if kind == "Model":
        assert output.last_hidden_state.shape[:2] == inputs["input_ids"].shape
    else:
        model(**inputs, labels=torch.zeros(len(output.logits), dtype=torch.long)).loss.backward()
        assert any(p.grad is not None and p.grad.any() for key, p in model.named_parameters() if "lora_B" in key)
    refused("input_ids, not inputs_embeds.*LoRA", model, inputs_embeds=torch.zeros(1, 2, 8))


@pytest.mark.parametrize("name", ["gpst", "rnng", "urnng"])
def test_feature_extraction_pipeline(name: str, tmp_path: Any) -> None:
    """Batches give what single texts give. RNNG and URNNG find the derivations themselves, as `parse` does."""
    model, tokenizer = map(copy.deepcopy, model_and_tokenizer(name))
    model.save_pretrained(tmp_path)
    extractor = pipeline("feature-extraction", model=AutoModel.from_pretrained(tmp_path), tokenizer=tokenizer)
    for text, found in zip(TEXTS, extractor(TEXTS, batch_size=2), strict=True):
        ids = tokenizer([text], return_tensors="pt")["input_ids"]
        given = {} if name == "gpst" else {"actions": model.parse(ids).actions[:, 0]}
        expected = model.model(ids, **given).last_hidden_state[0]
        torch.testing.assert_close(torch.tensor(found[0])[-len(expected) :], expected)  # padding stands before it


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bare_models_load_from_language_models_in_silence(name: str, tmp_path: Any) -> None:
    """With `AutoModel`, no tensor is called missing or unexpected."""
    model, inputs = build(name), batch(name)
    model.save_pretrained(tmp_path)
    bare, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(bare(**inputs)[0], model.model(**inputs)[0])


# --------------------------------------------------------------------------------------------------------- Trainer
def trainer_of(name: str, path: Any, fields: Any = None, compute_metrics: Any = None, **options: Any) -> Trainer:
    """A Trainer without `label_names`, on a sentence that is given four times."""
    sentence = {key: value[0] for key, value in labeled(name).items() if key != "attention_mask"}
    rows = [{key: value for key, value in sentence.items() if key != "labels" or "actions" not in sentence}] * 4
    arguments = {"output_dir": str(path), "report_to": "none", "use_cpu": True, "disable_tqdm": True, "max_steps": 2}
    arguments = TrainingArguments(**arguments, save_strategy="no", per_device_eval_batch_size=2, **options)
    model = build(name, **without_dropout(name), **(fields or {}))
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=compute_metrics)


@pytest.mark.parametrize("name", ["gpst", "rnng", "pcfg", "prpn", "lstm"])
def test_trainer_trains_evaluates_and_predicts(name: str, tmp_path: Any) -> None:
    """Predictions are the logits of `forward`, of a search where the configuration asks for them."""
    seen: list[Any] = []
    fields = {"output_marginal_logits": True} if name in ("gpst", "rnng") else {}
    trainer = trainer_of(
        name, tmp_path, fields, lambda p: seen.append(p.predictions) or {"seen": 1.0}, learning_rate=1e-2,
        gradient_accumulation_steps=2, per_device_train_batch_size=2,
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert 0 < trainer.evaluate()["eval_loss"] < before
    row, model = {key: value[None] for key, value in trainer.eval_dataset[0].items()}, trainer.model.eval()
    torch.testing.assert_close(torch.tensor(seen[1][:1]), model(row["input_ids"]).logits)
    assert model.train()(**row).logits is None
    if fields:
        assert model(**row, output_marginal_logits=True).logits is not None
        plain = trainer_of(name, tmp_path).predict(trainer.eval_dataset)
        assert plain.metrics["test_loss"] > 0 and not isinstance(plain.predictions, torch.Tensor)


@pytest.mark.parametrize("name", ["gpst", "rnng", "urnng", "pcfg, compound", "prpn", "lstm"])
def test_trainer_adds_noise_to_embeddings(name: str, tmp_path: Any) -> None:
    """NEFTune: U(-a, a) / sqrt(T D) on the embeddings of every text."""
    losses = []
    for alpha in (None, 50.0):
        trainer = trainer_of(name, tmp_path, neftune_noise_alpha=alpha, learning_rate=1e-9, seed=3)
        losses.append(trainer.train().training_loss)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def test_a_grammar_has_no_embeddings_for_noise(tmp_path: Any) -> None:
    """Of words; those of symbols are no input."""
    raised(AttributeError, "neftune_noise_alpha", trainer_of("pcfg", tmp_path, neftune_noise_alpha=5.0).train)


@searching
def test_label_smoothing_is_an_error(name: str, tmp_path: Any) -> None:
    """Trainer takes the labels away; what is left are logits of a search, or none beside actions."""
    trainer = trainer_of(name, tmp_path, label_smoothing_factor=0.1, remove_unused_columns=False)
    for row in trainer.train_dataset:
        row["labels"] = row["input_ids"]
    raised(ValueError if name == "gpst" else KeyError, "label_smoothing_factor", trainer.train)


def test_label_smoothing_of_words_that_cannot_come_is_an_error(tmp_path: Any) -> None:
    """A grammar never writes special tokens: log p = -inf."""
    refused("leave label_smoothing_factor at 0", trainer_of("pcfg", tmp_path, label_smoothing_factor=0.1).train)


@pytest.mark.parametrize("name", ["on_lstm", "lstm"])
def test_smoothed_labels_are_shifted(name: str, tmp_path: Any) -> None:
    trainer, batch = trainer_of(name, tmp_path, label_smoothing_factor=0.1), labeled(name)
    log_probs = trainer.model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
    counts, targets = batch["labels"][:, 1:] != -100, batch["labels"][:, 1:].clamp_min(0)
    expected = -0.9 * log_probs.gather(2, targets[..., None])[..., 0] - 0.1 * log_probs.mean(-1)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, dict(batch)), expected[counts].mean())


# ------------------------------------------------------------------------------------------------------------- TRL
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_loss_in_the_place_of_the_own_is_an_error(name: str) -> None:
    """As TRL's trainers replace `forward`; other wrappers may."""

    def fused(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> None:
        raise AssertionError("never called")

    model = build(name)
    with pytest.raises(ValueError, match="TRL replaces the loss of .*ForCausalLM.* Use Trainer of transformers"):
        model.forward = types.MethodType(functools.wraps(type(model).forward)(fused), model)
    expected = model(**labeled(name)).loss
    model.forward = functools.partial(model.forward)
    torch.testing.assert_close(model(**labeled(name)).loss, expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_arguments_of_stock_models(name: str) -> None:
    """`use_cache=False` says what holds anyway; the others are refused by name, and for packed rows with a remedy."""
    model, inputs = build(name), labeled(name)
    bare = {key: value for key, value in inputs.items() if key != "labels"}
    torch.testing.assert_close(model.model(**bare, use_cache=False)[0], model.model(**bare)[0])
    torch.testing.assert_close(model(**inputs, use_cache=False).loss, model(**inputs).loss)
    places = torch.arange(inputs["input_ids"].shape[1])[None]
    packed = {"position_ids": places, "cu_seq_lens_q": places, "cu_seq_lens_k": places}
    for call, given in ((model, inputs), (model.model, bare)):
        raised(TypeError, "position_ids.*use packing=False", call, **given, **packed)
    raised(TypeError, "num_items_in_batch: .*loss_shares", model, **inputs, num_items_in_batch=3)


def test_number_of_layers_of_gpst(tmp_path: Any) -> None:
    """A sum of two numbers cannot be set, but to what it is."""
    build("gpst").config.save_pretrained(tmp_path)
    layers = AutoConfig.from_pretrained(tmp_path).num_hidden_layers
    assert AutoConfig.from_pretrained(tmp_path, num_hidden_layers=layers).num_hidden_layers == layers
    refused(
        "num_hidden_layers=9 is not the sum of num_type_layers",
        AutoConfig.from_pretrained,
        tmp_path,
        num_hidden_layers=9,
    )
