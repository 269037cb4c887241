"""LoRA by PEFT on every layer of every architecture: training, saving, loading, merging, search; and what is refused.

Charts, stacks and recurrences read weights without calling the layers that hold them (see `module_tools`), so every
single adapter is shown to have its effect.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, IA3Config, LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_synlm.core.module_tools import weight_of
from tests.helpers.architectures import PCFGS, TREE_LMS, batch, build, labeled, without_dropout
from tests.helpers.refusals import refused

# What docs/what-works.md recommends: names of layers, and of parameters of recurrent layers that are no `nn.Linear`.
TARGETS: dict[str, dict[str, Any]] = {
    "gpst": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "rnng": {"target_modules": ["output", "action_head"]},
    "on_lstm": {"target_modules": ["ih", "hh"]},
    # Statistics of batch normalization are no weights: what trains them has to be saved as a whole.
    "prpn": {"target_modules": ["key", "input", "recurrent"], "modules_to_save": ["norm", "output_norm"]},
    "palm": {"target_modules": ["projection", "residual_gate"]},
    "pcfg": {"target_modules": ["rule_head", "first", "second"]},
    "lstm": {"target_modules": ["projection.1"]},
}
for name, weight, layers in (("rnng", "cells.{}.weight_{}", 2), ("palm", "layers.{}.weight_{}_l0", 3),
                             ("lstm", "lstm.weight_{1}_l{0}", 2)):  # fmt: skip
    TARGETS[name]["target_parameters"] = [weight.format(n, kind) for n in range(layers) for kind in ("ih", "hh")]
NEWER = ("tree_lm", "tree_lm, binary", "tree_lm, gpt2", "urnng", "pushdown", "ordered_memory")
GRAMMARS = tuple(name for name in PCFGS if name != "pcfg")
MORE = ("rnng, attention", "on_lstm, split head", "on_lstm, hidden", "prpn, syd", "awd_lstm")
HEADS = {"pcfg": "emission_head.3"}
every_architecture = pytest.mark.parametrize("name", TARGETS)


def model_of(name: str, **fields: Any) -> Any:
    """A model without dropout, so that a forward pass in training is the same twice."""
    return build(name, **without_dropout(name), **fields)


def scores(model: Any, name: str) -> torch.Tensor:
    """What the model gives for texts: next-token log-probabilities at tokens."""
    inputs = {key: value for key, value in batch(name).items() if key not in ("actions", "attachments")}
    return model(**inputs).logits[inputs["attention_mask"].bool()]


def every_target(model: nn.Module, skip: list[str]) -> dict[str, list[str]]:
    """All layers and all matrices of recurrent layers that LoRA knows."""
    modules, parameters = [], []
    for name, module in model.named_modules():
        if name in skip:
            continue
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Embedding, Conv1D)):
            modules.append(name)
        elif isinstance(module, (nn.LSTM, nn.LSTMCell)):
            parameters += [f"{name}.{key}" for key, value in module.named_parameters() if value.dim() == 2]
    return {"target_modules": modules, "target_parameters": parameters}


def adapted(model: nn.Module, **targets: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied weights, and that GPT-2's layers are transposed
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=8, **targets))


@every_architecture
def test_lora_trains_saves_loads_and_merges(name: str, tmp_path: Any) -> None:
    base, inputs = model_of(name), labeled(name)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    before = {key: value.clone() for key, value in base.state_dict().items()}
    plain = scores(base, name)
    model = adapted(base, **TARGETS[name])
    torch.testing.assert_close(scores(model, name), plain, atol=1e-5, rtol=1e-5)  # a new adapter changes nothing
    model.train()
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    tuned = scores(model.eval(), name)
    assert not torch.allclose(tuned, plain, atol=1e-3)
    model.save_pretrained(tmp_path / "adapter")
    fresh = type(base).from_pretrained(tmp_path / "base")
    module = type(base).__module__
    for loaded in (
        PeftModel.from_pretrained(fresh, tmp_path / "adapter"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", import_allowlist=[module]),
    ):
        # The inverse of a grammar's matrix of left corners enlarges rounding.
        tolerance = 1e-5 if name == "pcfg" else 1e-6
        torch.testing.assert_close(scores(loaded.eval(), name), tuned, atol=tolerance, rtol=tolerance)
    ids = inputs["input_ids"][:1, :4]
    written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    merged = copy.deepcopy(model).merge_and_unload()
    assert type(merged) is type(base) and set(merged.state_dict()) == set(before)
    torch.testing.assert_close(scores(merged, name), tuned, atol=1e-4, rtol=1e-4)
    again = merged.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert torch.equal(again, written)
    with model.disable_adapter():
        torch.testing.assert_close(scores(model, name), plain, atol=1e-5, rtol=1e-5)


def merged_after_gradients(model, inputs):
    """The model with random adapters merged: every adapter has a gradient, and the loss stays."""
    torch.manual_seed(1)
    for key, value in model.named_parameters():
        if "lora_" in key:
            value.data.normal_(0, 0.1)
    output = model(**inputs)
    output.loss.backward()
    found = {key: value.grad for key, value in model.named_parameters() if "lora_B" in key}
    assert found and not [key for key, grad in found.items() if grad is None or not grad.any()]
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(merged(**inputs).loss, output.loss, atol=1e-4, rtol=1e-4)
    return merged


def check_equal_parses(first, second, **inputs) -> None:
    parses = [each.parse(**inputs) for each in (first, second)]
    assert parses[0].spans == parses[1].spans
    torch.testing.assert_close(parses[0].token_log_probs, parses[1].token_log_probs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*TARGETS, *MORE, *NEWER, *GRAMMARS])
def test_no_adapter_is_without_effect(name: str) -> None:
    """Every layer with random adapters: the same as with merged weights, and every adapter gets a gradient."""
    # These always tie their heads to embeddings; adapters of tied layers cannot be merged.
    tied = name.startswith("rnng") or name in NEWER
    base = model_of(name, **({} if tied else {"tie_word_embeddings": False}))
    refused = ["model.parser.word_lstm", "model.parser.distance_lstm"]
    refused += ["lm_head", "label_head", "model.embed_tokens", "model.embed_labels"] if tied else []
    refused += ["model.parser.score"] if name == "prpn" else []
    model, inputs = adapted(base, **every_target(base, refused)).eval(), labeled(name)
    if name in TREE_LMS or name == "urnng":
        del inputs["labels"]
    if name in ("on_lstm, split head", "on_lstm, hidden", "prpn, syd"):
        inputs["distances"] = torch.rand(inputs["input_ids"].shape)
    merged = merged_after_gradients(model, inputs)
    torch.testing.assert_close(scores(merged, name), scores(model, name), atol=1e-4, rtol=1e-4)
    if name not in ("awd_lstm", "lstm"):
        check_equal_parses(model.base_model, merged, input_ids=inputs["input_ids"][:1, :4])


def test_adapter_of_the_tied_head_is_seen_by_loss_and_logits() -> None:
    model = adapted(model_of("rnng"), target_modules=["lm_head"]).eval()
    head, inputs = model.base_model.model.lm_head, labeled("rnng")
    before = model(**inputs).loss
    head.lora_B["default"].weight.data.normal_(0, 0.3)
    after = model(**inputs).loss
    assert (after - before).abs() > 1e-3
    untied = model_of("rnng")
    untied.lm_head.weight = nn.Parameter(weight_of(head).detach())
    torch.testing.assert_close(untied(**inputs).loss, after, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores(untied, "rnng"), scores(model, "rnng"), atol=1e-4, rtol=1e-4)


@every_architecture
def test_saved_modules_are_seen(name: str) -> None:
    """What PEFT puts in the place of a whole head is read as well."""
    head_name = HEADS.get(name, "lm_head")
    model = adapted(model_of(name), target_modules=[head_name]).merge_and_unload()
    model = adapted(model, **{**TARGETS[name], "modules_to_save": [head_name]}).eval()
    head = model.base_model.model.get_output_embeddings().modules_to_save["default"]
    loss = model(**labeled(name)).loss
    loss.backward()
    assert head.weight.grad.any()
    head.weight.data.add_(torch.randn_like(head.weight))
    assert (model(**labeled(name)).loss - loss).abs() > 1e-3


@pytest.mark.parametrize("name", ["tree_lm", "tree_lm, binary", "tree_lm, gpt2", "pushdown"])
@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
def test_untied_words_leave_the_labels_tied(name: str, saved: str, tmp_path: Any) -> None:
    """PEFT merges what it trained of the words, and unties them; the file holds one table of labels."""
    model = adapted(model_of(name), target_modules=["c_attn" if "gpt2" in name else "q_proj"], modules_to_save=[saved])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    merged = model.merge_and_unload().eval()
    assert not merged.config.tie_word_embeddings
    for number in range(2):  # saved twice
        merged.save_pretrained(tmp_path / str(number))
        loaded, report = type(merged).from_pretrained(tmp_path / str(number), output_loading_info=True)
        assert not any(report.values())
        torch.testing.assert_close(scores(loaded, name), scores(merged, name), atol=1e-5, rtol=0)
        merged = loaded


@pytest.mark.parametrize("name", ["rnng", "urnng"])
@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
def test_words_that_cannot_be_untied_are_refused_in_training(name: str, saved: str) -> None:
    """Before the first step, and not when the result is saved."""
    target, inputs = {"rnng": "output", "urnng": "gates"}[name], labeled(name)
    model = adapted(model_of(name), target_modules=[target], modules_to_save=[saved])
    refused("Leave embed_tokens and lm_head out of modules_to_save", model.train(), **inputs)
    adapted(model_of(name), target_modules=[target]).train()(**inputs).loss.backward()


DIRECT = {"gpst": "linear1", "on_lstm": "hh", "prpn": "recurrent", "rnng, attention": "key"}


@pytest.mark.parametrize("name", DIRECT)
def test_what_is_no_sum_of_weights_is_refused(name: str) -> None:
    """Where a weight is read directly."""
    inputs, target = labeled(name), [DIRECT[name]]
    model = adapted(model_of(name), target_modules=target, lora_dropout=0.1)
    model.eval()(**inputs)
    refused("has lora_dropout=0.1, but this layer's weight is read directly", model.train(), **inputs)
    for option, message in (({"use_dora": True}, "DoraLinear"), ({"lora_bias": True}, "lora_bias=True")):
        refused(message, adapted(model_of(name), target_modules=target, **option), **inputs)
    other = get_peft_model(model_of(name), IA3Config(target_modules=target, feedforward_modules=[]))
    refused("which only LoRA allows", other, **inputs)
    # PEFT hands the names of adapters by text to layers that are called.
    inputs = {key: value for key, value in batch(name).items() if key not in ("actions", "attachments")}
    model, names = adapted(model_of(name), target_modules=target).eval(), ["__base__"] * len(inputs["input_ids"])
    model(**inputs)
    refused("adapter_names was given, but a layer", model, **inputs, adapter_names=names)


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "pcfg"])
def test_trainable_tokens_of_a_tied_head_are_refused(name: str) -> None:
    tokens = TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="TrainableTokensLayer. The model reads this layer's weight directly"):
        get_peft_model(model_of(name, tie_word_embeddings=True), tokens)(**labeled(name))


def test_search_with_adapters_of_the_head() -> None:
    """What the head is wrapped in is called: trainable tokens, DoRA and IA3 are seen by every score of a search."""
    ids = batch("gpst")["input_ids"][:1, :4]
    for config in (
        LoraConfig(r=2, target_modules=["lm_head"], use_dora=True),
        IA3Config(target_modules=["lm_head"], feedforward_modules=["lm_head"]),
        TrainableTokensConfig(token_indices=[int(ids[0, 1])], target_modules=["lm_head"]),
    ):
        base = model_of("gpst", tie_word_embeddings=False)
        plain = base.parse(ids, num_beams=20).log_probs
        model = get_peft_model(base, config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3)
        found = base.parse(ids, num_beams=20).log_probs
        assert not torch.allclose(found, plain, atol=1e-3)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged.parse(ids, num_beams=20).log_probs, found, atol=1e-4, rtol=1e-4)


def test_layers_that_no_adapter_reaches() -> None:
    with pytest.raises(ValueError, match="adapter of a grouped layer .Conv1d."):
        adapted(model_of("prpn"), target_modules=["parser.score"])(**labeled("prpn"))
    with pytest.raises(ValueError, match="word_lstm has an adapter, but LSTM reads the weights"):
        adapted(model_of("prpn, syd"), target_parameters=["word_lstm.weight_hh_l0"])(**labeled("prpn, syd"))
    for name, target in (("rnng", "cells.0"), ("palm", "layers.0"), ("lstm", "lstm")):
        refused("not supported", adapted, model_of(name), target_modules=[target])
