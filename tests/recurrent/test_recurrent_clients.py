"""Recurrent language models as stock clients call them: PEFT, Trainer, pipelines, `generate`, lm-eval, minicons."""

import json
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_synlm.generation.base import word_ends_of
from tests.helpers.recurrent_models import (
    ARCHITECTURES,
    BOUNDARY,
    SENTENCES,
    WITH_TREES,
    ids_of,
    make_model,
    model_class,
    words_tokenizer,
)
from tests.helpers.refusals import raised, refused
from tests.reference.trees import keeps_words_together

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
with_trees = pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in WITH_TREES])
KINDS = ("Model", "ForCausalLM", "ForSequenceClassification")


def kinds_of(name: str) -> tuple[str, ...]:
    return KINDS[:2] if name == "lstm" else KINDS


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return words_tokenizer()


def rows_of(tokenizer: Any) -> list[dict[str, list[int]]]:
    return [{"input_ids": [BOUNDARY, *tokenizer(sentence)["input_ids"], BOUNDARY]} for sentence in SENTENCES]


# ------------------------------------------------------------------------------------- embeddings instead of ids
@every_architecture
@pytest.mark.parametrize("left", [False, True])
def test_embeddings_instead_of_ids(name, left):
    model = make_model(name, rates=0.0)
    ids, mask = ids_of(7, 4, left=left)
    given = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask}
    labels = ids.masked_fill(mask == 0, -100)
    expected, found = model(ids, mask, labels=labels), model(**given, labels=labels)
    assert found.keys() == expected.keys()
    for field in ("logits", "loss", "joint_log_prob"):
        torch.testing.assert_close(found[field], expected[field])
    first = model(inputs_embeds=given["inputs_embeds"][:, :3], attention_mask=mask[:, :3], use_cache=True)
    second = model(ids[:, 3:], mask, past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1)[mask == 1], expected.logits[mask == 1])
    model.train()(**given, labels=labels).loss.backward()
    if left:
        options = {"attention_mask": mask, "max_new_tokens": 3, "eos_token_id": None, "num_beams": 2}
        new = model.eval().generate(inputs_embeds=given["inputs_embeds"], **options)
        assert torch.equal(new, model.generate(ids, **options)[:, 7:])


@every_architecture
def test_what_wrappers_pass_on(name):
    ids, _ = ids_of(5, 5)
    for kind in kinds_of(name):
        model = make_model(name, kind)
        expected = model(ids)[0]
        assert torch.equal(model(input_ids=ids, inputs_embeds=None, position_ids=None)[0], expected)
        torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids))[0], expected)
        raised(TypeError, "position_ids", model, ids, position_ids=ids)
        for wrong in ({}, {"input_ids": ids, "inputs_embeds": torch.zeros(2, 5, 8)}):
            refused("input_ids or inputs_embeds", model, **wrong)
        refused("inputs_embeds", model, inputs_embeds=torch.zeros(0, 3, 8))


def test_trees_need_ids():
    model = make_model("on_lstm, shared")
    vectors = torch.zeros(1, 3, 8)
    with pytest.raises(ValueError, match="distances need input_ids"):
        model(inputs_embeds=vectors, labels=torch.ones(1, 3, dtype=torch.long), distances=torch.ones(1, 3))
    with pytest.raises(ValueError, match="gives trees, which need input_ids"):
        model.generate(inputs_embeds=vectors, max_new_tokens=1, return_dict_in_generate=True)


@every_architecture
@pytest.mark.parametrize("task", ["FEATURE_EXTRACTION", "CAUSAL_LM", "SEQ_CLS"])
def test_prompt_tuning(name, task):
    kind = dict(zip(("FEATURE_EXTRACTION", "CAUSAL_LM", "SEQ_CLS"), KINDS, strict=True))[task]
    if kind not in kinds_of(name):
        return
    ids, mask = ids_of(6, 3, left=True)
    labels = {"SEQ_CLS": {"labels": torch.tensor([0, 1])}, "CAUSAL_LM": {"labels": ids}}.get(task, {})
    own = make_model(name, kind, rates=0.0)
    sizes = {"num_virtual_tokens": 2, "num_attention_heads": 1, "token_dim": own.config.embedding_size}
    model = get_peft_model(own, PromptTuningConfig(task_type=task, **sizes))
    output = model.train()(input_ids=ids, attention_mask=mask, **labels)
    (output.loss if labels else output.last_hidden_state.square().sum()).backward()
    assert any("prompt" in key and p.grad is not None and p.grad.any() for key, p in model.named_parameters())
    if task == "CAUSAL_LM":
        options = {"attention_mask": mask, "max_new_tokens": 3, "eos_token_id": None, "return_dict_in_generate": True}
        model.eval()
        with torch.no_grad():
            model.prompt_encoder.default.embedding.weight.mul_(30)
        output = model.generate(input_ids=ids, **options)
        assert output.sequences.shape == (2, 9)
        first = model(input_ids=ids, attention_mask=mask).logits[:, -1].argmax(-1)
        assert torch.equal(output.sequences[:, 6], first)


# --------------------------------------------------------------------------------------------- batches and sizes
@every_architecture
def test_hidden_size_is_the_width_of_the_states(name, tmp_path):
    model = make_model(name, "Model")
    config = model.config
    assert config.hidden_size == config.to_dict()["hidden_size"] == model(ids_of(3)[0]).last_hidden_state.shape[-1]
    if name in ("lstm", "ordered_memory"):
        return
    # In files of earlier versions `hidden_size` is the width of the layers.
    make_model(name).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["hidden_size"] == fields["embedding_size"]
    fields["hidden_size"] = fields.pop("layer_size")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.layer_size, loaded.hidden_size) == (config.layer_size, config.embedding_size)
    ids, _ = ids_of(4)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, make_model(name)(ids).logits)
    config_class = model_class(name).config_class
    assert config_class(hidden_size=40).layer_size == 40 and config_class().layer_size > 1000
    config = config_class.from_preset(next(iter(config_class.presets)), hidden_size=40)
    assert (config.layer_size, config.hidden_size) == (40, config.embedding_size)
    refused("hidden_size is null", config_class, hidden_size=None)
    refused("hidden_size is null", config_class.from_preset, next(iter(config_class.presets)), hidden_size=None)
    refused("hidden_size is 12, embedding_size .* layer_size 40", config_class, hidden_size=12, layer_size=40)
    assert config_class.from_dict(config.to_dict()).to_dict() == config.to_dict()


# ------------------------------------------------------------------------------------------------------ generate
@every_architecture
def test_beam_search_tells_its_scores(name):
    model = make_model(name)
    ids, mask = ids_of(5, 2, left=True)
    options = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4}
    found = model.generate(ids, **options, return_dict_in_generate=True)
    stock = model.generate(ids, **options, return_dict_in_generate=True, output_scores=True)
    assert found.scores is None and len(stock.scores) == stock.sequences.shape[1] - 5
    assert torch.equal(found.sequences_scores, stock.sequences_scores) and found.sequences_scores.shape == (4,)
    assert (found.spans is not None) == (found.actions is not None) == (name in WITH_TREES)


@with_trees
def test_a_beam_changes_no_tree(name):
    model, (ids, _) = make_model(name), ids_of(6, 6)
    assert model.parse(ids, num_beams=5).spans == model.parse(ids).spans


@every_architecture
def test_stop_strings_of_a_vocabulary_of_words(name, tokenizer):
    model = make_model(name)
    ids = torch.tensor([rows_of(tokenizer)[0]["input_ids"][:4]])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "suppress_tokens": [0, 1, *range(15, 30)]}
    written = model.generate(ids, **options)[0, 4:].tolist()
    words = tokenizer.convert_ids_to_tokens(written)
    end = words.index(words[2])
    found = model.generate(ids, **options, stop_strings=[words[2]], tokenizer=tokenizer)[0, 4:]
    assert found.tolist() == written[: end + 1]
    prompt, two = tokenizer.convert_ids_to_tokens(ids[0]), " ".join(words[1:3])
    found = model.generate(ids, **options, stop_strings=[two], tokenizer=tokenizer)[0, 4:]
    assert " ".join([*prompt, *words[: len(found)]]).endswith(two) and len(found) <= 3
    refused("tokenizer", model.generate, ids, **options, stop_strings=["the"])


def pieces() -> PreTrainedTokenizerFast:
    """Pieces of words: "##a" to "##m" continue the words "a" to "m"."""
    letters = "abcdefghijklm"
    vocabulary = {text: n for n, text in enumerate(["[UNK]", *letters, *(f"##{x}" for x in letters)])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_ends_of_words():
    ids = torch.tensor([[1, 14, 15, 2, 3, 16], [4, 5, 17, 6, 18, 7]])
    assert word_ends_of(pieces(), ids).int().tolist() == [[0, 0, 1, 1, 0, 1], [1, 0, 1, 0, 1, 1]]
    letters = "abcdefgh "
    for text, tokens in (("ab cd", "Ġ"), ("ab cd", "▁")):
        vocabulary = {x: n for n, x in enumerate(letters.replace(" ", tokens))} | {f"{tokens}c": 9}
        backend = Tokenizer(models.BPE(vocabulary, [(tokens, "c")]))
        backend.pre_tokenizer = (
            pre_tokenizers.ByteLevel(add_prefix_space=False) if tokens == "Ġ" else pre_tokenizers.Metaspace(tokens)
        )
        backend.decoder = decoders.ByteLevel() if tokens == "Ġ" else decoders.Metaspace(tokens)
        fast = PreTrainedTokenizerFast(tokenizer_object=backend)
        ids = torch.tensor([fast(text)["input_ids"]])
        assert word_ends_of(fast, ids).int().tolist()[0][-4:] == [0, 1, 0, 1]


@with_trees
def test_no_constituent_ends_inside_a_word(name):
    model, tokenizer = make_model(name), pieces()
    ids = torch.tensor([[1, 14, 2, 15, 16], [3, 4, 17, 18, 5]])
    output = model.generate(
        ids, max_new_tokens=8, do_sample=True, num_return_sequences=6, tokenizer=tokenizer, eos_token_id=None,
        suppress_tokens=[0, 27, 28, 29], return_dict_in_generate=True,
    )  # fmt: skip
    ends = word_ends_of(tokenizer, output.sequences)
    for row, spans in enumerate(output.spans):
        assert (0, 13) in spans and len(spans) == 12 and keeps_words_together(spans, ends[row].tolist())
        parsed = model.parse(output.sequences[row : row + 1], word_ends=ends[row : row + 1])
        assert parsed.spans[0][0] == spans
