"""LoRA on a backbone: what is trained, what is saved, and how it is loaded."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from hf_synlm import TreeLMForCausalLM
from hf_synlm.core.backbone_adapter import linear_layers
from tests.helpers.refusals import refused

LABELS = ["NP", "S", "VP"]
SIZES = {
    "vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# (S (NP 5 6) (VP 7))
INPUTS = {"input_ids": torch.tensor([[5, 6, 7]]), "word_ends": torch.ones(1, 3, dtype=torch.bool)}
INPUTS["actions"] = torch.tensor([[4, 3, 1, 1, 2, 5, 1, 2, 2]])


def decoder(folder, **more) -> str:
    """The folder of a small Llama with random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **more})).save_pretrained(folder)
    return str(folder)


def train(model, steps=4):
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.05)
    for _ in range(steps):
        model(**INPUTS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


HEAD_TOO = {"target_modules": ["q_proj"], "modules_to_save": ["label_head"]}
# Of the backbone, and of the model: a tied head, an untied one, and words that are tied in the backbone only.
KINDS = {"tied": (True, {}), "untied": (False, {}), "untied by the user": (True, {"tie_word_embeddings": False})}


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """A trained model, the folder of its backbone, and its own."""
    folder = tmp_path_factory.mktemp("adapter")
    tied, fields = KINDS[request.param]
    base = decoder(folder / "base", tie_word_embeddings=tied)
    model = TreeLMForCausalLM.from_backbone(base, LABELS, pad_token_id=0, subwords=True, **fields)
    model.model.word_final[20:] = False
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.backbone_source["name"] = "owner/small"
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, use_rslora=True, target_modules=linear_layers(model)))
    train(model)
    after = model.state_dict()
    changed = {name for name in before if name in after and not torch.equal(after[name], before[name])}
    assert changed == {"model.embed_labels.weight", "label_head.bias", "label_head.weight"}
    model.save_pretrained(folder / "model")
    return model.eval(), base, folder / "model"


def test_an_adapter_loads_as_an_ordinary_model(trained, tmp_path):
    model, base, folder = trained
    expected = model(**INPUTS).loss
    assert not list(folder.glob("*.safetensors"))
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "owner/small"
    assert base not in (folder / "config.json").read_text() + json.dumps(settings)
    random_state = torch.get_rng_state()
    plain = AutoModelForCausalLM.from_pretrained(folder, backbone=base)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert type(plain) is TreeLMForCausalLM and set(plain.state_dict()) == set(
        TreeLMForCausalLM(plain.config).state_dict()
    )
    torch.testing.assert_close(plain(**INPUTS).loss, expected)
    assert not plain.model.word_final[20:].any()
    found, wanted = plain.parse(INPUTS["input_ids"]), model.parse(INPUTS["input_ids"])
    assert found.spans == wanted.spans and found.labels == wanted.labels
    torch.testing.assert_close(found.log_probs, wanted.log_probs, atol=1e-4, rtol=1e-4)
    plain.save_pretrained(tmp_path)
    again, report = TreeLMForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and torch.equal(again(**INPUTS).loss, plain(**INPUTS).loss)
    half = TreeLMForCausalLM.from_pretrained(folder, backbone=base, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    states = AutoModel.from_pretrained(folder, backbone=base)(**INPUTS).sentence_state
    torch.testing.assert_close(states, model.model(**INPUTS).sentence_state, atol=1e-5, rtol=1e-5)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, backbone=base, num_labels=5)
    torch.testing.assert_close(classifier.label_head.bias, model.label_head.bias)
    assert classifier.score.out_features == 5
    narrow = TreeLMForCausalLM.from_pretrained(folder, backbone=base, scoring_num_beams=3, config=str(folder))
    assert narrow.config.scoring_num_beams == 3


def test_peft_loads_the_same_adapter(trained):
    model, base, folder = trained
    tied = model.config.tie_word_embeddings
    fresh = TreeLMForCausalLM.from_backbone(base, LABELS, pad_token_id=0, subwords=True, tie_word_embeddings=tied)
    loaded = PeftModel.from_pretrained(fresh, folder / "adapter")
    torch.testing.assert_close(loaded(**INPUTS).loss, model(**INPUTS).loss)
    torch.testing.assert_close(loaded.merge_and_unload()(**INPUTS).loss, model(**INPUTS).loss)


def test_an_adapter_that_is_not_merged_is_trained_on_and_saved_again(trained, tmp_path):
    model, base, folder = trained
    loaded = TreeLMForCausalLM.from_pretrained(folder, backbone=base, merge=False)
    torch.testing.assert_close(loaded(**INPUTS).loss, model(**INPUTS).loss)
    train(loaded, 2)
    loaded.save_pretrained(tmp_path / "again")
    again = TreeLMForCausalLM.from_pretrained(tmp_path / "again", backbone=base)
    torch.testing.assert_close(again(**INPUTS).loss, loaded.eval()(**INPUTS).loss)
    assert again(**INPUTS).loss != model(**INPUTS).loss
    half = TreeLMForCausalLM.from_pretrained(folder, backbone=base, merge=False, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    saved = load_file(tmp_path / "half/adapter/adapter_model.safetensors")
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.bfloat16}
    again = TreeLMForCausalLM.from_pretrained(tmp_path / "half", backbone=base, dtype=torch.float32)
    torch.testing.assert_close(again(**INPUTS).loss, model(**INPUTS).loss, atol=0.02, rtol=0.02)


def test_adapters_that_cannot_be_loaded_say_why(trained, tmp_path):
    _, base, folder = trained
    refused(r"owner/small.*--backbone", TreeLMForCausalLM.from_pretrained, folder)
    with pytest.raises(ValueError, match="cannot be loaded together"):
        TreeLMForCausalLM.from_pretrained(folder, backbone=decoder(tmp_path / "wider", hidden_size=32))
    with pytest.raises(ValueError, match="not trained on the weights"):
        other = AutoModelForCausalLM.from_pretrained(base)
        other.lm_head.weight.data += 1
        other.save_pretrained(tmp_path / "other")
        TreeLMForCausalLM.from_pretrained(folder, backbone=tmp_path / "other")
    shutil.copytree(folder, tmp_path / "less")
    weights = tmp_path / "less/adapter/adapter_model.safetensors"
    saved = load_file(weights)
    save_file({name: value for name, value in saved.items() if "layers.1" not in name}, weights)
    refused(r"lacks weights.*layers\.1", TreeLMForCausalLM.from_pretrained, tmp_path / "less", backbone=base)
    weights.write_bytes(b"damaged")
    refused("cannot be loaded", TreeLMForCausalLM.from_pretrained, tmp_path / "less", backbone=base)


def test_one_folder_for_an_adapter_and_for_all_weights(trained, tmp_path):
    """What was saved last is loaded, whatever lies beside it."""
    model, base, folder = trained
    shutil.copytree(folder, tmp_path / "model")
    plain = TreeLMForCausalLM.from_pretrained(tmp_path / "model", backbone=base)
    plain.label_head.bias.data += 1
    plain.save_pretrained(tmp_path / "model")
    again = TreeLMForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again(**INPUTS).loss, plain(**INPUTS).loss)
    model.save_pretrained(tmp_path / "model")
    again = TreeLMForCausalLM.from_pretrained(tmp_path / "model", backbone=base)
    torch.testing.assert_close(again(**INPUTS).loss, model(**INPUTS).loss)


def test_what_an_adapter_cannot_hold_is_refused(tmp_path):
    def fresh():
        return TreeLMForCausalLM.from_backbone(decoder(tmp_path / "base"), LABELS, pad_token_id=0)

    for options in (
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "modules_to_save": ["label_head"]},
    ):
        refused(r"changes .*label_head", fresh().add_adapter, LoraConfig(r=2, **options))
    model = fresh()
    refused("w_proj", linear_layers, model, ["w_proj"])
    config = LoraConfig(r=2, target_modules=linear_layers(model, ["q_proj"]))
    model.add_adapter(config)
    refused("has an adapter", model.add_adapter, config, "second")
    refused("push_to_hub", model.save_pretrained, tmp_path / "model", push_to_hub=True)
    model.save_pretrained(tmp_path / "model")
    refused("names no backbone", TreeLMForCausalLM.from_pretrained, tmp_path / "model")
    files = [file for file in (tmp_path / "model").rglob("*") if file.is_file()]
    assert len(files) > 5 and not any(str(tmp_path).encode() in file.read_bytes() for file in files)


def test_on_other_weights_an_adapter_is_that_of_transformers_and_peft(tmp_path, monkeypatch):
    """Its base is the whole Tree LM, which has weights of its own. transformers 5.24 asks for a PEFT to come."""
    model = TreeLMForCausalLM.from_backbone(decoder(tmp_path / "base"), LABELS, pad_token_id=0)
    train(model, 1)
    model.save_pretrained(tmp_path / "whole")
    config, passed_on = LoraConfig(r=2, target_modules=["q_proj"]), []
    monkeypatch.setattr("transformers.PreTrainedModel.add_adapter", lambda *given: passed_on.append(given))
    model.add_adapter(config)
    assert passed_on == [(model, config, None)]
    get_peft_model(model, config).save_pretrained(tmp_path / "lora")
    assert sorted(file.name for file in (tmp_path / "lora").glob("adapter*")) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    loaded = PeftModel.from_pretrained(TreeLMForCausalLM.from_pretrained(tmp_path / "whole"), tmp_path / "lora")
    torch.testing.assert_close(loaded(**INPUTS).loss, model(**INPUTS).loss)


@pytest.mark.parametrize("options", [HEAD_TOO, {"target_modules": ["q_proj", "label_head"]}])
def test_what_peft_makes_of_the_head_of_the_labels_is_trained(options, tmp_path):
    model = TreeLMForCausalLM.from_backbone(
        decoder(tmp_path / "base", tie_word_embeddings=True), LABELS, pad_token_id=0
    )
    adapted = get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options}))
    adapted(**INPUTS).loss.backward()
    assert not [name for name, p in adapted.named_parameters() if p.requires_grad and p.grad is None]


def test_labels_learn_where_peft_trains_a_copy_of_their_table(tmp_path):
    """The head of the labels is tied to the table, of which `modules_to_save` makes a copy."""
    base = decoder(tmp_path / "base", tie_word_embeddings=True)
    model = TreeLMForCausalLM.from_backbone(base, [*LABELS, "X"], pad_token_id=0)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_labels"]))
    copied = adapted.base_model.model.model.embed_labels.modules_to_save["default"].weight
    (gradient,) = torch.autograd.grad(adapted(**INPUTS).loss, copied)
    assert gradient[3].any() and gradient[7].any()  # X is not in the tree: only the head reads its rows
    train(adapted, 6)
    adapted.eval()
    loss, trees = adapted(**INPUTS).loss, adapted.base_model.model.parse(INPUTS["input_ids"])
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(**INPUTS).loss, loss)
    merged.save_pretrained(tmp_path / "merged")
    again = TreeLMForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(**INPUTS).loss, loss)
    found = again.parse(INPUTS["input_ids"])
    assert found.spans == trees.spans
    torch.testing.assert_close(found.log_probs, trees.log_probs, atol=1e-4, rtol=1e-4)
