"""The leaderboard in docs/: its table is what the results say, and its rows can be made by their commands."""

import shlex
from pathlib import Path

import pytest
from release import leaderboard
from transformers import AutoTokenizer

from hf_synlm.data.treebank import read_treebank
from hf_synlm.training.arguments import parse_arguments
from tests.documentation import check_options
from tests.test_training_configs import RECIPES

SEEDS, ROWS = leaderboard.read_rows()
CORPUS = str(leaderboard.CORPUS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaderboard, "CORPUS", tmp_path_factory.mktemp("board") / "corpus")
        leaderboard.make_corpus()
        return leaderboard.CORPUS


def test_corpus_is_what_the_page_says(corpus: Path) -> None:
    sentences = {split: list(read_treebank(corpus / f"{split}.txt")) for split in ("train", "valid", "test")}
    words = {split: sum(len(sentence.words) for sentence in found) for split, found in sentences.items()}
    size = len(AutoTokenizer.from_pretrained(corpus / "tokenizer"))
    page = " ".join((leaderboard.ROOT / leaderboard.PAGE).read_text(encoding="utf-8").split())
    assert f"{len(sentences['train']):,} sentences of {words['train']:,} words for training" in page
    assert f"{len(sentences['test'])} of {words['test']:,} words for the test" in page
    assert f"{size:,} entries" in page


@pytest.mark.parametrize("name", ROWS)
def test_commands_of_a_row(name: str, corpus: Path) -> None:
    listed = leaderboard.commands(name, ROWS[name], SEEDS[0])
    for task, command in listed.items():
        words = shlex.split(command.replace(CORPUS, str(corpus)))
        if task == "train":
            program = next(word for word in words if word.endswith(".py"))
            recipe = RECIPES[Path(program).stem]
            parse_arguments(recipe.argument_types(), words[words.index(program) + 1 :], recipe.mappings)
        else:
            check_options(words[1:])


def test_table_is_what_the_results_say() -> None:
    text = (leaderboard.ROOT / leaderboard.PAGE).read_text(encoding="utf-8")
    assert f"{leaderboard.BEGIN}\n{leaderboard.table()}\n{leaderboard.END}" in text
    for name, row in ROWS.items():
        for result in leaderboard.read_results(name):
            assert result["commands"] == leaderboard.commands(name, row, result["seed"])
