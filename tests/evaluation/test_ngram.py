"""N-gram models: probabilities by the definition, saved models in every command, and what is refused."""

import contextlib
import io
import json
import math
import random
from pathlib import Path

import pytest
import torch

from hf_synlm.cli import main as synlm
from hf_synlm.data.samples import sample_path
from hf_synlm.data.text import read_lines
from hf_synlm.data.vocabulary import subword_tokenizer, word_tokenizer
from hf_synlm.evaluation.text.ngram import NGramForCausalLM, discounts
from hf_synlm.evaluation.text.perplexity import evaluate_perplexity
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.text_items import TextItem
from hf_synlm.training.programs import train_ngram
from tests.helpers.commands import fail
from tests.helpers.refusals import refused
from tests.reference.ngram import KneserNey

VOCAB_SIZE = 12
PAD, BEGIN, END = range(3)


def sentences(count: int, seed: int = 0) -> list[list[int]]:
    """Texts in which some tokens follow others often; token 11 never occurs."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        text = [draw.randrange(3, 11)]
        while draw.random() < 0.8:
            text.append(3 + (text[-1] * 2 + draw.choice((0, 0, 0, 1, 4))) % 8)
        found.append(text)
    return found


def model_of(texts: list[list[int]], order: int, begin: int = BEGIN) -> NGramForCausalLM:
    flat = torch.tensor([token for text in texts for token in (begin, *text, END)])
    places = torch.tensor([place for text in texts for place in range(len(text) + 2)])
    return NGramForCausalLM.from_tokens(flat, places, order, vocab_size=VOCAB_SIZE, special_token_ids=special_of(begin))


def special_of(begin: int) -> list[int]:
    """What is never predicted; the end token may begin texts, too, as GPT-2's does."""
    return [PAD] if begin == END else [PAD, begin]


@pytest.mark.parametrize("begin", [BEGIN, END])
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_probabilities_are_those_of_the_definition(order: int, begin: int) -> None:
    texts = sentences(400)
    model = model_of(texts, order, begin)
    slow = KneserNey(texts, order, begin, END, [k for k in range(VOCAB_SIZE) if k not in special_of(begin)])
    held_out = [[begin, *text] for text in [*sentences(6, seed=1), [11, 3, 11, 11, 4]]]
    rows = torch.tensor([[*text, *[PAD] * (20 - len(text))][:20] for text in held_out])
    logits = model(rows).logits
    assert logits.dtype == torch.float64
    for row, text in zip(logits, held_out, strict=True):
        for place in range(min(len(text), 20)):
            history = tuple(text[max(0, place - order + 2) : place + 1])
            expected = [slow.prob(token, history) for token in range(VOCAB_SIZE)]
            assert row[place].exp().tolist() == pytest.approx(expected, rel=1e-9)
            assert sum(expected) == pytest.approx(1, abs=1e-12)


def test_discounts_of_few_counts_are_fixed() -> None:
    assert discounts(torch.tensor([1, 1, 2, 7])).tolist() == [0, 0.5, 1, 1.5]
    t_1, t_2, t_3, t_4 = 40, 20, 10, 5
    counts = torch.tensor([1] * t_1 + [2] * t_2 + [3] * t_3 + [4] * t_4)
    y = t_1 / (t_1 + 2 * t_2)
    expected = [0, 1 - 2 * y * t_2 / t_1, 2 - 3 * y * t_3 / t_2, 3 - 4 * y * t_4 / t_3]
    assert discounts(counts).tolist() == pytest.approx(expected)


@pytest.fixture(scope="module", params=["words", "pieces"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trigram of a text with a tokenizer of words or of pieces."""
    folder = tmp_path_factory.mktemp(request.param)
    names = ("the", "a", "old", "dog", "cat", "man", "saw", "liked", "slept", "here", ".")
    lines = [" ".join(names[token % len(names)] for token in text) for text in sentences(300)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    make = subword_tokenizer if request.param == "pieces" else word_tokenizer
    options = {"vocab_size": 40} if request.param == "pieces" else {"end_token": True}
    make([line.split() for line in lines], **options).save_pretrained(folder / "tokenizer")
    flags = f"--train-files {folder}/text.txt --validation-files {folder}/text.txt --one-sentence-per-line true "
    flags += f"--tokenizer-name {folder}/tokenizer --order 3 --output-dir {folder}/model"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_ngram.main(flags.split())
    written = json.loads((folder / "model/all_results.json").read_text())
    assert f"perplexity of a token {written['validation']['perplexity']:.2f}, ends" in said.getvalue()
    assert said.getvalue().endswith(
        f"The model is in {folder}/model. Next: synlm surprisal FILE --model {folder}/model\n"
    )
    return folder


def test_a_saved_model_scores_texts_in_the_commands(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scorer = TextScorer.from_pretrained(str(trained / "model"))
    tokenizer, model = scorer.tokenizer, scorer.model
    assert (scorer.estimator, scorer.end_of_text, scorer.begin_id) == ("exact", "end token", tokenizer.bos_token_id)
    texts = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in read_lines(trained / "text.txt")]
    slow = KneserNey(
        texts, 3, tokenizer.bos_token_id, tokenizer.eos_token_id,
        sorted(set(range(len(tokenizer))) - set(model.config.special_token_ids)),
    )  # fmt: skip
    (trained / "few.txt").write_text("the old dog slept .\nthe dog", encoding="utf-8")
    nats, words = 0.0, 7
    for line in read_lines(trained / "few.txt"):
        ids = [tokenizer.bos_token_id, *tokenizer(line, add_special_tokens=False)["input_ids"]]
        nats -= sum(math.log(slow.prob(ids[k], tuple(ids[max(0, k - 2) : k]))) for k in range(1, len(ids)))
    items = [TextItem(str(place), line) for place, line in enumerate(read_lines(trained / "few.txt"))]
    found = evaluate_perplexity(scorer, items).scores["word_perplexity"]
    assert found == pytest.approx(math.exp(nats / words), rel=1e-5)
    assert synlm(["surprisal", str(trained / "few.txt"), "--model", str(trained / "model")]) == 0
    names, *rows = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    values = [float(row[names.index("surprisal_bits")]) for row in rows]
    assert sum(values) == pytest.approx(nats / math.log(2), rel=1e-4) and len(values) == words


def test_a_saved_model_needs_the_package(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synlm(["info", str(trained / "model")]) == 0
    assert "so the folder loads only with hf_synlm, as all n-gram models do" in capsys.readouterr().out
    error = fail(capsys, "export", trained / "model", "--out", trained / "out")
    assert "If it is an n-gram model, copy its folder, which loads only with hf_synlm" in error


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    refused("order must be from 2 to 5 and is 6", train_ngram.main, ["--order", "6", "--output-dir", str(tmp_path)])
    refused("max-sentence-tokens 1", train_ngram.main, ["--max-sentence-tokens", "1", "--output-dir", str(tmp_path)])
    other = ["--tokenizer-type", "wordpiece", "--output-dir", str(tmp_path)]
    refused(f"{tmp_path}/text holds text that was prepared in another way: tokenizer_type was", train_ngram.main, other)
    trees = ["--train-trees", str(sample_path("trees.test.txt")), "--output-dir", str(tmp_path / "new")]
    refused("No validation text is named. Pass --validation-words", train_ngram.main, trees)
    (tmp_path / "config.json").write_text('{"model_type": "pcfg"}')
    taken = f"'{tmp_path}' holds another model. Choose another --output-dir"
    refused(taken, train_ngram.main, ["--output-dir", str(tmp_path)])
