"""The leaderboard in docs/: its table is what the results say, and its rows can be made by their commands."""

import shlex
from pathlib import Path

import pytest
from release import leaderboard
from release.model_table import BEGIN, END
from transformers import AutoTokenizer, TrainingArguments

from hf_synlm.data.treebank import read_treebank
from hf_synlm.training.arguments.base import parse_arguments
from hf_synlm.training.programs.train_treereg import ModelAndDataArguments
from hf_synlm.training.tasks.tree_planting import TreePlantingArguments
from hf_synlm.training.tasks.treereg import TreeRegArguments
from tests.helpers.documentation import check_options
from tests.training.test_training_configs import RECIPES

SEEDS, ROWS, TABLES = leaderboard.SEEDS, leaderboard.ROWS, leaderboard.TABLES
BOARD = leaderboard.EMBEDDED


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    board = BOARD._replace(runs=tmp_path_factory.mktemp("board"))
    leaderboard.make_corpus(board)
    return board.corpus


def test_corpus_is_what_the_page_says(corpus: Path) -> None:
    sentences = {split: list(read_treebank(corpus / f"{split}.txt")) for split in ("train", "valid", "test")}
    words = {split: sum(len(sentence.words) for sentence in found) for split, found in sentences.items()}
    size = len(AutoTokenizer.from_pretrained(corpus / "tokenizer"))
    page = " ".join((leaderboard.ROOT / leaderboard.PAGE).read_text(encoding="utf-8").split())
    assert f"{len(sentences['train']):,} sentences ({words['train']:,} words) are for training" in page
    assert f"{len(sentences['test'])} sentences ({words['test']:,} words) for the test" in page
    assert f"{size:,} entries" in page


OF_TRAINER = {"train_treereg": TreeRegArguments, "train_tree_planting": TreePlantingArguments}


@pytest.mark.parametrize("name", ROWS)
def test_commands_of_a_row(name: str, corpus: Path) -> None:
    listed = leaderboard.commands(BOARD, name, ROWS[name], SEEDS[0])
    for task, command in listed.items():
        before = f"{BOARD.runs}/{name}.{SEEDS[0]}.first/model"  # must exist
        command = command.replace(before, str(leaderboard.ROOT / "model_cards" / "rnng-tiny"))
        words = shlex.split(command.replace(str(BOARD.corpus), str(corpus)))
        if task.startswith("train"):
            program = next(word for word in words if word.endswith(".py"))
            own = words[words.index(program) + 1 :]
            if program.endswith(leaderboard.OF_TRAINER):
                types = [ModelAndDataArguments, OF_TRAINER[Path(program).stem], TrainingArguments]
                parse_arguments(types, [*own, "--use-cpu"])
            else:
                parse_arguments(RECIPES[Path(program).stem].parts.values(), own)
        else:
            check_options(words[1:])


def test_table_is_what_the_results_say() -> None:
    text = (leaderboard.ROOT / leaderboard.PAGE).read_text(encoding="utf-8")
    assert f"{BEGIN.format(leaderboard.COMMAND)}\n{leaderboard.table(BOARD)}\n{END}" in text
    for name, row in ROWS.items():
        for result in leaderboard.read_results(BOARD, name):
            now = leaderboard.commands(BOARD, name, row, result["seed"])
            for task, command in result["commands"].items():  # as it ran: programs take underscores, too
                assert command.replace("_", "-") == now.pop(task).replace("_", "-")
            assert not now


def test_table_of_a_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Rows of the paper only, on the user's trees, with the paper's figures; what has a result is not made again."""
    made: list[str] = []

    def make_row(board: leaderboard.Board, name: str, row: dict, seed: int) -> None:
        made.append(f"{name} {seed}")
        scores = {"perplexity": {"word_perplexity": 90.0 + seed}}
        scores |= {"parsing": {"f1": 40.0}, "parsing search": {"f1": 20.0}}
        result = {"row": name, "seed": seed, "scores": scores, "parameters": 1000, "cpu_seconds": 60.0}
        leaderboard.add_result(board, result)

    monkeypatch.setattr(leaderboard, "make_row", make_row)
    trees = tmp_path / "trees.txt"
    trees.write_text("(S (NP (DT The) (NN law)) (VP (VBZ works)))\n" * 2)
    command = ["gpst-table-4", "--trees", *[str(trees)] * 3, "--folder", str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    leaderboard.main(command)
    assert made == [f"{name} {seed}" for seed in SEEDS for name in TABLES["gpst-table-4"]]
    leaderboard.main(command)
    assert len(made) == len(SEEDS) * len(TABLES["gpst-table-4"])
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert len(lines) == 2 + len(TABLES["gpst-table-4"]) and lines[0].endswith("| F1 | paper |")
    assert any("≤ 91.0 ± 1.0 | 40.0 ± 0.0; search 20.0 ± 0.0 | 57.5 |" in line for line in lines)
    for names, message in (("syd-table-2", "needs --trees and --folder"), ("gpt2 syd-table-2", "named alone")):
        with pytest.raises(SystemExit):
            leaderboard.main(names.split())
        assert message in capsys.readouterr().err
