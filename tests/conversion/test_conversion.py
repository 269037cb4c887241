"""Conversion of the authors' checkpoints: every tensor accounted for, foreign files read safely."""

import argparse
import json
import pickle
import re
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_synlm.conversion import TOKENIZERS, convert_state_dict
from hf_synlm.conversion.files import _REMEDIES as EXTRACTIONS, convert_files, read_state_dict
from tests.helpers.goldens import read_case
from tests.helpers.refusals import refused


@pytest.fixture
def checkpoint():
    state, _, meta = read_case("gpst/02_packed")
    return state, meta


UNFIT = [
    (lambda s: s.pop("bos_embedding"), "bos_embedding"),
    (lambda s: s.update(surprise=torch.zeros(1)), "surprise"),
    (lambda s: s.pop("up_scale.weight"), "up_scale.bias"),
    (lambda s: s["bos_embedding"].fill_(float("nan")), "bos_embedding"),
    (lambda s: s.update(bos_embedding=torch.zeros(3)), r"bos_embedding is \(3,\)"),
    (lambda s: s.update({"classifier.weight": s["classifier.weight"] + 1}), "ties them"),
]


@pytest.mark.parametrize(("change", "message"), UNFIT)
def test_checkpoints_that_do_not_fit(checkpoint, change, message):
    state, config = checkpoint
    change(state)
    refused(message, convert_state_dict, "gpst", state, config)


def test_configurations_that_do_not_fit(checkpoint):
    state, config = checkpoint
    refused("gpt_config", convert_state_dict, "gpst", state, {"r2d2_config": config["r2d2_config"]})
    refused("n_embd", convert_state_dict, "gpst", state, {**config, "gpt_config": {"vocab_size": 97}})
    with pytest.raises(ValueError, match="ldr_detach"):
        convert_state_dict("gpst", state, {**config, "r2d2_config": {**config["r2d2_config"], "ldr_detach": True}})
    config["r2d2_config"]["ext_vocab_size"] = 5
    refused("ext_vocab_size is 5", convert_state_dict, "gpst", state, config)


def test_the_gpst_of_silm_is_refused_as_ours_and_converted(checkpoint, tmp_path):
    """davidarps/silm has this `model_type`, other names of sections and narrower layers, and marks REDUCE by any id."""
    state, config = checkpoint
    expected = convert_state_dict("gpst", state, config).parse(torch.tensor([[5, 6, 7, 8]]))
    chart, gpt = {**config["r2d2_config"], "reduce_token_id": 50257}, dict(config["gpt_config"])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpst", "gptconfig": gpt, "r2d2config": chart}))
    refused("silm.*synlm convert gpst --weights FILE --config config.json", AutoConfig.from_pretrained, tmp_path)
    prefixed = {f"model.{name}": tensor for name, tensor in state.items()}
    torch.save(prefixed, tmp_path / "pytorch_model.bin")
    convert_files("gpst", tmp_path / "pytorch_model.bin", [tmp_path / "config.json"], tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").parse(torch.tensor([[5, 6, 7, 8]]))
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    assert found.spans == expected.spans

    for name, size in (("dense", gpt["n_embd"]), ("insideoutside_dense", chart["hidden_size"])):
        for end in ("0.weight", "0.bias"):
            prefixed[f"model.{name}.{end}"] = prefixed[f"model.{name}.{end}"][:size]
        prefixed[f"model.{name}.3.weight"] = prefixed[f"model.{name}.3.weight"][:, :size]
    for name in [name for name in prefixed if ".mlp." in name and not name.endswith("c_proj.bias")]:
        prefixed[name] = prefixed[name][:7] if "c_proj" in name else prefixed[name][..., :7]
    narrow = {"r2d2": chart, "gpt": {**gpt, "n_inner": 7, "dense_hidden_factor": 1}}
    model = convert_state_dict("gpst", prefixed, narrow)
    assert model.config.intermediate_size == 7 and model.config.head_expansion == 1
    assert torch.equal(model.heads.token[0].weight, state["dense.0.weight"][: gpt["n_embd"]])
    assert model.parse(torch.tensor([[5, 6, 7, 8]])).log_probs.isfinite().all()


def test_pickles_with_other_objects_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps({"weights": Path("somewhere")}))
    refused("refused", read_state_dict, path)
    for content in (b"no checkpoint", b"hello" * 100, b""):
        path.write_bytes(content)
        refused("cannot be read", read_state_dict, path)
    torch.save([torch.zeros(1)], path)
    refused("not a state dict", read_state_dict, path)
    (tmp_path / "x.safetensors").write_bytes(b"123")
    refused("not a safetensors", read_state_dict, tmp_path / "x.safetensors")


def follow(extraction, **names):
    """Run the indented lines of a text that says how to take the tensors out of a pickle."""
    exec(textwrap.dedent("\n".join(line for line in extraction.splitlines() if line.startswith(" "))), names)


class Module:
    """Stands for a model of the authors that is pickled as a whole."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors


PICKLED = {"palm": "palm/u_small_m", "pcfg": "pcfg/02_compound", "prpn": "prpn/lm_word_hard_tied_res0"}
PICKLED["on_lstm"] = "onlstm/lm_2layer_nowdrop_untied"


@pytest.mark.parametrize("name", [name for name in EXTRACTIONS if name != "rnng"])  # its pickle is not whole: see below
def test_the_recipes_for_pickled_models_work(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state, _, meta = read_case(PICKLED[name])
    module = Module(state)
    whole = {"prpn": module, "pcfg": {"args": meta["config"], "model": module}}
    torch.save(whole.get(name, (module, None, None)), "model.pt")
    Path("config.json").write_text(json.dumps(meta["config"]))
    with pytest.raises(ValueError, match=r"(?s)refused; in a copy of .*--weights weights.pt\s--config"):
        convert_files(name, Path("model.pt"), [Path("config.json")], Path("out"))
    follow(EXTRACTIONS[name], args=argparse.Namespace(**meta["config"]))
    convert_files(name, Path("weights.pt"), [Path("config.json")], Path("out"))
    found = AutoModelForCausalLM.from_pretrained("out").state_dict()
    expected = convert_state_dict(name, state, meta["config"]).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


# ------------------------------------------------------------------------------------------------------------- RNNG
RNNG_CASE = "rnng/io_attn_random_L2"


@pytest.fixture
def rnng_checkpoint():
    state, _, meta = read_case(RNNG_CASE)
    return state, meta


def test_every_tensor_of_rnng_arrives(rnng_checkpoint):
    state, meta = rnng_checkpoint
    model = convert_state_dict("rnng", state, meta["config"])
    unread_rows = 2 * model.config.embedding_size * 2  # the in-order tables of labels have one row too many
    total = sum(tensor.numel() for name, tensor in state.items() if name != "vocab_mlp.weight")
    assert sum(parameter.numel() for parameter in model.parameters()) == total - unread_rows
    assert not model.training and model.config.max_consecutive_nonterminals is None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with_sections = convert_state_dict("rnng", {f"module.{name}": tensor for name, tensor in state.items()}, meta)
    assert with_sections.config.max_consecutive_nonterminals == meta["max_cons_nts"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(with_sections.state_dict()[name], tensor)
    assert convert_state_dict("rnng", {k: v.double() for k, v in state.items()}, meta).dtype == torch.float64


UNFIT_RNNGS = [
    (lambda s, c: s.update({"stack_rnn.linears.0.weight": torch.zeros(1)}), "without --fixed_stack"),
    (lambda s, c: s.pop("emb.0.weight"), "model.embed_tokens.weight"),
    (lambda s, c: s.pop("vocab_mlp.bias"), "lm_head.bias is missing"),
    (lambda s, c: s["emb.0.weight"].add_(1), "ties them"),
    (lambda s, c: c.pop("strategy"), "strategy"),
    (lambda s, c: c.update(strategy="left_corner"), "left_corner"),
    (lambda s, c: c.update(h_dim=7), "h_dim is 7"),
    (lambda s, c: c.update(subword=True, vocabulary=["<pad>"] * 5), "vocabulary holds 5 tokens"),
    (lambda s, c: c.update(subword=False, vocabulary=["<pad>"] * 5), "vocabulary holds 5 tokens"),
]


@pytest.mark.parametrize(("change", "message"), UNFIT_RNNGS)
def test_rnng_checkpoints_that_do_not_fit(rnng_checkpoint, change, message):
    state, meta = rnng_checkpoint
    change(state, meta["config"])
    refused(message, convert_state_dict, "rnng", state, meta["config"])


def test_rnng_learns_which_tokens_end_words():
    state, _, meta = read_case("rnng/td_lstm_subword_trained")
    size = meta["config"]["vocab_size"]
    pieces = ["<pad>", "<unk>", "<s>", "</s>", *(f"w{x}" + "\u2581" * (x % 3 == 0) for x in range(4, size))]
    model = convert_state_dict("rnng", state, {**meta["config"], "vocabulary": pieces})
    assert model.config.subwords
    assert model.model.word_final.tolist() == [True, False, True, True, *(x % 3 == 0 for x in range(4, size))]
    with pytest.warns(UserWarning, match="no vocabulary"):
        assert convert_state_dict("rnng", state, meta).model.word_final.all()
    assert TOKENIZERS["rnng"]({**meta, "vocabulary": pieces}) is None  # its tokenizer is a sentencepiece model


def test_the_vocabulary_of_rnng_becomes_a_tokenizer():
    tokens = ["<pad>", "<unk>", "<unkn>", "<cunks>", "the", "N", "dog"]
    config = {"vocabulary": tokens, "unkmethod": "berkeleyrule"}
    tokenizer = TOKENIZERS["rnng"](config)
    assert tokenizer.get_vocab() == {token: x for x, token in enumerate(tokens)}
    assert tokenizer("the Dogs 1,200 dog undone")["input_ids"] == [4, 3, 2, 6, 1]
    assert tokenizer.pad_token_id == tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    changed = TOKENIZERS["rnng"]({**config, "unkmethod": "unk", "lowercase": True, "replace_num": True})
    assert changed("The Dogs 1,200 DOG N")["input_ids"] == [4, 1, 5, 6, 1]
    refused("unkmethod is 'odd'", TOKENIZERS["rnng"], {**config, "unkmethod": "odd"})
    for bad in (["<unk>", "<pad>"], ["<pad>", "a"], ["<pad>", "<unk>", "a", "a"]):
        refused("tokens must differ, begin with <pad>", TOKENIZERS["rnng"], {"vocabulary": bad})


class ActionDictionary:
    """Stands for the authors' class: what the recipe reads of it."""

    def __init__(self, nonterminals):
        self.nonterminals = nonterminals


class RNNGVocabulary:
    """Stands for the authors' vocabularies: that of words keeps a list `i2w`, that of pieces asks sentencepiece."""

    def __init__(self, unkmethod, size):
        self.unkmethod, is_words = unkmethod, unkmethod != "subword"
        first = ["<pad>", "UNK", "UNK-LC-s", "w3"] if is_words else ["<pad>", "<unk>", "<s>", "</s>"]
        self.tokens = [*first, *(f"w{x}" + "\u2581" * (x % 2 and not is_words) for x in range(4, size))]
        if is_words:
            self.i2w = self.tokens

    def size(self):
        return len(self.tokens)

    def id_to_word(self, number):
        return self.tokens[number]


@pytest.mark.parametrize("unkmethod", ["berkeleyrule2", "subword"])
def test_the_recipe_for_pickled_rnngs_works(unkmethod, rnng_checkpoint, tmp_path, monkeypatch):
    state, meta = rnng_checkpoint
    monkeypatch.chdir(tmp_path)
    options = {name: meta["config"][name] for name in ("strategy", "composition")}
    words = RNNGVocabulary(unkmethod, meta["config"]["vocab_size"])
    saved = {"args": {**options, "dropout": 0.3, "sp_model": ""}, "model_state_dict": state, "vocab": words}
    saved |= {"prepro_args": {"lowercase": True}, "action_dict": ActionDictionary(meta["config"]["nonterminals"])}
    torch.save(saved, "rnng.pt")
    follow(EXTRACTIONS["rnng"])
    convert_files("rnng", Path("weights.pt"), [Path("config.json")], Path("out"))
    model = AutoModelForCausalLM.from_pretrained("out")
    if unkmethod == "subword":
        assert model.config.subwords and model.model.word_final[:8].tolist() == [1, 0, 1, 1, 0, 1, 0, 1]
    else:
        assert not model.config.subwords
        # A known word in capitals, a class that is a token, and one that is none.
        assert AutoTokenizer.from_pretrained("out")("W5 dogs 7th")["input_ids"] == [5, 2, 1]


class Vocabulary:
    """Stands for the authors' class of this name."""


def test_the_authors_pickles_are_refused_with_instructions(rnng_checkpoint, tmp_path):
    state, meta = rnng_checkpoint
    (tmp_path / "config.json").write_text(json.dumps(meta["config"]))
    (tmp_path / "list.json").write_text("[1]")
    weights, config, out = tmp_path / "rnng.pt", tmp_path / "config.json", tmp_path / "out"
    for checkpoint, found in (({"model_state_dict": state, "vocab": Vocabulary()}, "Vocabulary"), ([state], "mapping")):
        torch.save(checkpoint, weights)
        expected = f"{found}.*torch.save.checkpoint..model_state_dict.., .weights.pt"
        refused(re.compile(expected, re.DOTALL), convert_files, "rnng", weights, [config], out)
    # The state of a training that holds plain values only is unwrapped.
    for key in ("state_dict", "model_state_dict"):
        torch.save({"step": 3, key: state, "optimizer": {"lr": 1e-3}}, weights)
        assert read_state_dict(weights).keys() == state.keys()
    refused("which would be lost", convert_files, "rnng", weights, [config], tmp_path, overwrite=True)
    for configs, expected in (([config] * 2, "takes one"), ([tmp_path / "list.json"], "not a JSON object")):
        refused(expected, convert_files, "rnng", weights, configs, out)
    assert not out.exists()
