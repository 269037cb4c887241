"""The authors' trained Pushdown model: the state of a training, and a pickled vocabulary of GPT-2's pieces."""

import os
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from hf_synlm import parse_sentences
from hf_synlm.cli import main
from hf_synlm.conversion.files import convert_files
from hf_synlm.conversion.pushdown import read_vocabulary
from hf_synlm.data.samples import sample_path
from hf_synlm.data.tokenizers import check_vocabulary, num_model_tokens, train_bpe_tokenizer
from hf_synlm.evaluation.text.words import encode_sentences
from tests.helpers.commands import fail
from tests.helpers.goldens import read_case
from tests.helpers.refusals import refused

LINES = Path(sample_path("raw.train.txt")).read_text(encoding="utf-8").splitlines()
KNOWN = ["We the people ask what the States did.", "Did the economy grow?", "It grows, and we ask"]


def pickled(pieces: list[str], module: str = "vocabulary", name: str = "WordVocabulary") -> bytes:
    """A vocabulary as the authors' program pickles it."""
    code = types.ModuleType(module)
    setattr(code, name, type(name, (), {"__module__": module}))
    vocabulary = getattr(code, name)()
    vocabulary.words = {piece: number for number, piece in enumerate(pieces)}
    vocabulary.inv_words = dict(enumerate(pieces))
    vocabulary.to_save, vocabulary._unk_index = ["words", "inv_words", "_unk_index"], None
    vocabulary.allow_any_word, vocabulary.initialized, vocabulary.split_punctuation = False, True, False
    sys.modules[module] = code
    try:
        return pickle.dumps(vocabulary)
    finally:
        del sys.modules[module]


@pytest.fixture(scope="module")
def gpt2() -> PreTrainedTokenizerBase:
    """Stands for GPT-2's tokenizer, of which the vocabulary has a part."""
    return train_bpe_tokenizer(LINES, 900)


@pytest.fixture(scope="module")
def pair(gpt2: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with model.pt, vocab.pkl and the tokenizer gpt2."""
    folder = tmp_path_factory.mktemp("bllip")
    spelled = {piece for text in LINES for piece in gpt2.tokenize(text)} - {"Ġhope", "Ġpeace", "Z"}
    pieces = ["<pad>", *sorted(spelled | {"<eos>"})]
    (folder / "vocab.pkl").write_bytes(pickled(pieces))
    state, _, _ = read_case("pushdown/01_random")
    torch.manual_seed(0)
    for name in ("input_embedding.weight", "output_map.weight", "output_map.bias"):
        if name in state:
            state[name] = torch.randn(len(pieces) + 2, *state[name].shape[1:]) / 4
    if "output_map.weight" in state:
        state["output_map.weight"] = state["input_embedding.weight"]
    training = {"step": 3, "state_dict": state, "optimizer": {"state": {}, "param_groups": [{"lr": 1e-4}]}}
    torch.save(training, folder / "model.pt")
    gpt2.save_pretrained(folder / "gpt2")
    return folder


@pytest.fixture(scope="module")
def converted(pair: Path) -> Path:
    words = ["convert", "pushdown", "--weights", pair / "model.pt", "--vocabulary", pair / "vocab.pkl"]
    assert main([str(word) for word in [*words, "--tokenizer", pair / "gpt2", "--out", pair / "out"]]) == 0
    return pair / "out"


def test_the_folder_reads_text(converted: Path, pair: Path, gpt2: PreTrainedTokenizerBase):
    pieces = read_vocabulary(pair / "vocab.pkl")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(converted), AutoTokenizer.from_pretrained(converted)
    config = model.config
    assert (config.vocab_size, config.pad_token_id) == (len(pieces) + 2, 0) and tokenizer.pad_token_id == 0
    assert (config.eos_token_id, config.bos_token_id) == (len(pieces), len(pieces) + 1)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("</s>", "<s>")
    assert pieces[config.end_token_id] == "<eos>" and config.attachment_key == "mlp"
    for text in KNOWN:
        # The authors' rule: a question mark at the end is a word of its own.
        authors = [pieces.index(piece) for piece in gpt2.tokenize(text.replace("?", " ?"))]
        assert tokenizer(text)["input_ids"] == tokenizer(text.replace("?", " ?"))["input_ids"] == authors
        assert tokenizer.decode(authors) == text.replace("?", " ?")
    # A piece that the data did not have is spelled with smaller ones.
    assert gpt2.tokenize("We ask hope") == ["We", "Ġask", "Ġhope"]
    assert tokenizer.decode(tokenizer("We ask hope")["input_ids"]) == "We ask hope"
    encoded = encode_sentences(tokenizer, [["Did", "the", "economy", "grow?"]])[0]
    assert encoded.word_of_token == sorted(encoded.word_of_token) and not encoded.unknown
    assert encoded.word_of_token[-2:] == [3, 3]  # `grow` and `?`, one word of the text
    # Pieces that the data did not have, and that lead to others, are refused with their names.
    (unknown,) = [token for token in tokenizer("We ask Z")["input_ids"] if token >= config.vocab_size]
    with pytest.raises(ValueError, match=f"Token id {unknown} is outside.*convert_ids_to_tokens.{unknown}.") as error:
        parse_sentences(model, tokenizer, ["We ask Z"])
    assert "Respell its word" in str(error.value) and tokenizer.convert_ids_to_tokens(unknown) == "Z"
    assert tokenizer.decode(tokenizer("Zürich, don’t")["input_ids"]) == "Zürich, don’t"  # no character is dropped
    for text, read in (("Did it?\nYes", "Did it?\nYes"), ("grow? ", "grow ? "), ("who?!", "who?!"), ("?", " ?")):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == read


def test_it_is_trained_with_its_own_tokenizer(converted: Path):
    """The ids that the model refuses are no reason to make it larger; those of added tokens are."""
    config, tokenizer = AutoConfig.from_pretrained(converted), AutoTokenizer.from_pretrained(converted)
    assert len(tokenizer) > num_model_tokens(tokenizer) == config.vocab_size
    check_vocabulary(tokenizer, config.vocab_size, "")
    tokenizer.add_tokens(["<new>"])
    refused(r"and the model .*\. Take another", check_vocabulary, tokenizer, config.vocab_size, "Take another")
    assert num_model_tokens(train_bpe_tokenizer(LINES, 300)) == 300


def test_commands_read_it(converted: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n".join(KNOWN) + "\n", encoding="utf-8")
    words = ["surprisal", tmp_path / "text.txt", "--model", converted, "--out", tmp_path / "s.tsv", "--device", "cpu"]
    assert main([str(word) for word in words]) == 0
    rows = (tmp_path / "s.tsv").read_text(encoding="utf-8").splitlines()
    assert len([row for row in rows if not row.startswith("#")]) == 1 + sum(len(text.split()) for text in KNOWN)
    assert main(["verify", str(converted)]) == 0


class Evil:
    """Would run a command."""

    def __reduce__(self):
        return os.system, ("true",)


OTHER_PICKLES = [
    (pickle.dumps(Evil()), "system is not allowed"),
    (pickled(["<pad>", "<eos>"], module="vocabulary", name="CharVocabulary"), "CharVocabulary is not allowed"),
    (pickle.dumps({"words": {}}), "no attribute 'words'"),
    (b"no pickle", "is not a vocab.pkl"),
    (pickled(["<eos>", "<pad>"]), "begin with <pad> .0."),
    (pickled(["<pad>", "a"]), "contain <eos>"),
    (pickled(["<pad>", "<eos>", "</s>"]), "another vocabulary"),
    (pickled(["<pad>", "<eos>", 3]), "another vocabulary"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("content", "message"), OTHER_PICKLES)
def test_other_pickles_are_refused(content: bytes, message: str, tmp_path: Path):
    (tmp_path / "vocab.pkl").write_bytes(content)
    refused(message, read_vocabulary, tmp_path / "vocab.pkl")


def test_what_does_not_fit_is_refused_before_anything_is_written(pair: Path, gpt2, tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text("{}")
    files = (pair / "model.pt", [], tmp_path / "out")
    for architecture, tokenizer in (("rnng", gpt2), ("pushdown", None)):
        with pytest.raises(ValueError, match="--vocabulary needs pushdown.*--tokenizer gpt2"):
            convert_files(architecture, *files, tokenizer, vocabulary=pair / "vocab.pkl")
    (tmp_path / "vocab.pkl").write_bytes(pickled(["<pad>", "<eos>", "a"]))
    refused("vocab_size", convert_files, "pushdown", *files, gpt2, vocabulary=tmp_path / "vocab.pkl")
    with pytest.raises(ValueError, match="compose_keys_and_stack_info"):
        convert_files("pushdown", files[0], [tmp_path / "config.json"], files[2], gpt2, vocabulary=pair / "vocab.pkl")
    assert "--vocabulary" in fail(capsys, "convert", "pushdown", "--weights", files[0], "--out", files[2])
    assert not files[2].exists()
    with pytest.raises(ValueError, match="which would be lost"):  # the vocabulary lies in the folder that is replaced
        convert_files("pushdown", files[0], [], tmp_path, gpt2, overwrite=True, vocabulary=tmp_path / "vocab.pkl")
