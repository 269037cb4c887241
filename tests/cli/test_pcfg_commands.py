"""`synlm` on a PCFG as a user types it: exact scores, labeled derivations, and sentences that it cannot have."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from hf_synlm import PCFGConfig, PCFGForCausalLM
from hf_synlm.cli import main
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.evaluation.generation import generate_texts
from hf_synlm.hub.loading import load_pretrained
from tests.helpers.commands import fail, run

SENTENCES = ["the cat sees a dog", "a bird sings"]
ONE_WORD = "sings"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random PCFG, and texts; that called `one` has a sentence of one word, too."""
    folder = tmp_path_factory.mktemp("pcfg")
    tokenizer = word_tokenizer([sentence.split() for sentence in SENTENCES], end_token=True)
    torch.manual_seed(0)
    config = PCFGConfig.from_tokenizer(tokenizer, num_nonterminals=3, num_preterminals=5, symbol_size=6)
    PCFGForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    texts = {"text": SENTENCES, "one": [SENTENCES[0], ONE_WORD, SENTENCES[1]], "word": [ONE_WORD]}
    for name, lines in texts.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def log_likelihood(files: Path, sentence: str) -> float:
    """By `log_likelihood` of the model, with the end."""
    model, tokenizer = load_pretrained(str(files / "model"))
    return model.eval().log_likelihood(tokenizer(sentence, return_tensors="pt")["input_ids"]).item()


# ---------------------------------------------------------------------------------------------------------- scores
def test_perplexity(files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def scores(text: str, infinite: bool) -> dict[str, float | None]:
        out = tmp_path / f"{text}.json"
        command = ("evaluate", "perplexity", files / f"{text}.txt", "--model", files / "model", "--out", out)
        assert main(list(map(str, command))) == 0
        captured = capsys.readouterr()
        assert ("| word_perplexity_with_end | inf |" in captured.out) == infinite
        assert ("a PCFG has no sentence of one word" in captured.err) == infinite
        assert "| word_perplexity | inf |" not in captured.out
        return json.loads(out.read_text())["scores"]

    found = scores("text", infinite=False)
    nats = -sum(log_likelihood(files, sentence) for sentence in SENTENCES)
    assert found["word_perplexity_with_end"] == pytest.approx(math.exp(nats / 10), rel=1e-5) and found["words"] == 8
    # An end after one word is impossible: only scores with ends are infinite (null in JSON), and that is said.
    one = scores("one", infinite=True)
    scores("word", infinite=True)
    ends = {name for name in found if name.endswith("_with_end")}
    assert {name for name, value in one.items() if value is None} == ends and one["words"] == 9


def test_surprisal_of_every_word_is_finite(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends have no row, so a sentence of one word is like others."""
    table = run(capsys, "surprisal", files / "one.txt", "--model", files / "model")
    head, *rows = [line.split("\t") for line in table.splitlines()]
    words = [dict(zip(head, row, strict=True)) for row in rows]
    assert [word["word"] for word in words] == f"{SENTENCES[0]} {ONE_WORD} {SENTENCES[1]}".split()
    model, tokenizer = load_pretrained(str(files / "model"))
    for number, sentence in enumerate((SENTENCES[0], ONE_WORD, SENTENCES[1]), 1):
        ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
        log_probs = model.eval().parse(ids).token_log_probs[0]
        own = [float(word["surprisal_bits"]) for word in words if word["sentence_id"] == str(number)]
        steps = [p for p, token in zip(log_probs.tolist(), ids[0].tolist(), strict=True)
                 if token != tokenizer.eos_token_id]  # fmt: skip
        assert own == pytest.approx([-p / math.log(2) for p in steps], rel=1e-5)


# ----------------------------------------------------------------------------------------------------------- trees
@pytest.mark.parametrize("method", ["mbr", "viterbi", "sample"])
def test_parse(method: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Derivations have labels; a sentence of one word is a leaf without probability, and JSON stays JSON."""
    command = ("parse", files / "one.txt", "--model", files / "model", "--method", method)
    first, word, last = run(capsys, *command).splitlines()
    assert word == ONE_WORD
    for tree, sentence in ((first, SENTENCES[0]), (last, SENTENCES[1])):
        assert re.sub(r"\(NT\d+ |[()]", "", tree) == sentence
        assert tree.startswith("(NT") == (method != "mbr")
    lines = run(capsys, *command, "--format", "json").splitlines()
    parsed = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [len(sentence["trees"]) for sentence in parsed] == [1, 1, 1]
    assert [sentence["trees"][0]["log_prob"] is None for sentence in parsed] == [False, True, False]
    named = [re.fullmatch(r"T\d+", tag) for tag in parsed[0].get("tags", ())]  # as `synlm grammar` names them
    assert len(named) == (0 if method == "mbr" else len(SENTENCES[0].split())) and all(named)
    drawn = run(capsys, *command, "--format", "latex").partition("end{forest}")[0]
    assert [f"[{{{tag}}}" in drawn for tag in parsed[0].get("tags", ())] == [True] * len(named)
    for style in ("text", "html"):
        assert ONE_WORD in run(capsys, *command, "--format", style)


# ------------------------------------------------------------------------------------------------------ generation
def test_joint_generation(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", "--model", files / "model", "--structure-mode", "joint", "--device", "cpu")
    options = ("--sample", "--num-sequences", 4, "--max-new-tokens", 6, "--seed", 1)
    found = [json.loads(line) for line in run(capsys, *command, *options, "--format", "json").splitlines()]
    assert len(found) == 4
    for text in found:
        assert 2 <= text["num_new_tokens"] <= 6 and text["text"].split() == text["leaves"]
        assert text["spans"][-1] == [0, text["num_new_tokens"]] and text["labels"][-1].startswith("NT")
        assert text["ended"] == (text["num_new_tokens"] < 6)
    brackets = run(capsys, *command, *options, "--format", "brackets").splitlines()
    assert brackets == [text["brackets"] for text in found]
    assert re.search("draws derivations.* or --sample", fail(capsys, *command))
    assert "Leave the prompt out" in fail(capsys, *command, "--sample", "--prompt", "the cat")
    assert "top_k: not supported" in fail(capsys, *command, "--sample", "--top-k", 3)


def test_joint_generation_is_that_of_the_model(files: Path) -> None:
    model, tokenizer = load_pretrained(str(files / "model"))
    options = {"structure_mode": "joint", "do_sample": True, "max_new_tokens": 6, "num_return_sequences": 3}
    torch.manual_seed(3)
    output = model.generate(**options, return_dict_in_generate=True)
    torch.manual_seed(3)
    texts = generate_texts(model, tokenizer, [""], **options)
    assert [text.num_new_tokens for text in texts] == output.lengths
    assert [list(text.tree.hypotheses[0].labels or ()) for text in texts] == output.labels
    # Padding is any id that the call names.
    torch.manual_seed(3)
    other = model.generate(**options, pad_token_id=4)
    assert other.shape == output.sequences.shape
    assert all(
        (row[1 + size :] == 4).sum() >= len(row) - size - 2 for row, size in zip(other, output.lengths, strict=True)
    )


def test_marginal_generation(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", "--model", files / "model", "--device", "cpu", "--prompt", "the cat", "--max-new-tokens", 4)
    for more in ((), ("--sample",), ("--num-beams", 3), ("--structure-mode", "marginal")):
        [text] = [json.loads(line) for line in run(capsys, *command, *more, "--format", "json").splitlines()]
        assert text["text"].startswith("the cat") and text["spans"][-1] == [0, len(text["leaves"])]
