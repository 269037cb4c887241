# SPDX-License-Identifier: Apache-2.0
"""The leaderboard: every model on the same words of the same trees, by one command for each row.

    python training/leaderboard.py              all rows and seeds of `docs/leaderboard/rows.yaml` that have no result
    python training/leaderboard.py rnng prpn    some rows
    python training/leaderboard.py --table      write the table of `docs/leaderboard.md` from the results only
    python training/leaderboard.py gpst-table-4 --trees train.txt valid.txt test.txt --folder runs/table_4

All rows share the corpus (the trees as `to_ptb_concat` makes them: lower case, N for numbers, no punctuation), the
tokenizer (words that occur twice, one unknown word), and the number of epochs. Each seed of a row is a line of
`docs/leaderboard/results.jsonl`; models stay in `runs/leaderboard/`. With `--trees`, the corpus is yours, and results,
models and table go to `--folder`. `gpst-table-4` and `syd-table-2` stand for the rows of tables in papers, and add the
figures of the papers to the table.
"""

import argparse
import itertools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import yaml
from release.make_checkpoints import LAUNCH, run
from release.model_table import write_between

from hf_synlm.data.files import folder_writer, read_json, write_text
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank, sentence_to_brackets, to_ptb_concat
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.evaluation.results import describe_hardware, library_versions
from hf_synlm.hub.checkpoint import num_parameters, stored_tensors
from hf_synlm.training.engine.output_folder import RESULTS_FILE

ROOT = Path(__file__).resolve().parents[2]
ROWS_FILE, PAGE = Path("docs/leaderboard/rows.yaml"), Path("docs/leaderboard.md")
FOUND = yaml.safe_load((ROOT / ROWS_FILE).read_text(encoding="utf-8"))
SEEDS, ROWS, TABLES, DATA = (FOUND[name] for name in ("seeds", "rows", "tables", "data"))
# Programs that use `Trainer`: they write the model alone, and refuse a folder that holds anything.
OF_TRAINER = ("train_treereg.py", "train_tree_planting.py")
COMMAND = "python training/leaderboard.py --table"


class Board(NamedTuple):
    """Where the trees come from and results go to; relative paths start at the checkout."""

    trees: dict[str, Path]  # file of each split
    runs: Path  # for corpus, tokenizer and models
    results: Path  # JSON lines, one per row and seed
    page: Path  # for the table

    @property
    def corpus(self) -> Path:
        """Folder of the trees as the models read them, and of the tokenizer."""
        return self.runs / "corpus"


SPLITS = ("train", "valid", "test")
EMBEDDED = Board(
    {split: sample_path(f"trees.{split}.txt") for split in SPLITS},
    Path("runs/leaderboard"),
    Path("docs/leaderboard/results.jsonl"),
    PAGE,
)


def commands(board: Board, name: str, row: dict[str, Any], seed: int) -> dict[str, str]:
    """The commands of a row in their order, by what they make: "train", "perplexity", "parsing", "parsing search".

    If a row trains twice, the second run ("train again") goes on from the model of the first.
    """
    output, found = board.runs / f"{name}.{seed}", {}
    programs = row["train"] if isinstance(row["train"], list) else [row["train"]]
    for number, words in enumerate(programs):
        folder = output if number == len(programs) - 1 else Path(f"{output}.first")
        folder = folder / "model" if words.split()[0] in OF_TRAINER else folder
        data = DATA[words.split()[0]].format(corpus=board.corpus)
        before = f" --model-name-or-path {output}.first/model" if number else ""
        task = "train again" if number else "train"
        found[task] = f"{LAUNCH} training/{words}{before} {data} --seed {seed} --output-dir {folder}"
    for task, options in row["evaluations"].items():
        kind = task.split()[0]
        data = "--treebank {0} --convention gpst" if kind == "parsing" else "{0} --format treebank"
        test = data.format(board.corpus / "test.txt")
        found[task] = f"synlm evaluate {kind} {test} --model {output}/model {options}".strip()
    return found


# ------------------------------------------------------------------------------------------------------- corpus
def make_corpus(board: Board) -> None:
    """Write the trees and the tokenizer that all rows share."""
    with folder_writer(ROOT / board.corpus) as folder:
        trees = {split: [*filter(None, map(to_ptb_concat, read_treebank(file)))] for split, file in board.trees.items()}
        for split, found in trees.items():
            write_text(folder / f"{split}.txt", "".join(f"{sentence_to_brackets(tree)}\n" for tree in found))
        words = (tree.words for tree in trees["train"])
        word_tokenizer(words, min_count=2, end_token=True).save_pretrained(folder / "tokenizer")


# -------------------------------------------------------------------------------------------------------- rows
def make_row(board: Board, name: str, row: dict[str, Any], seed: int) -> None:
    """Train and measure a row with one seed, and add its result."""
    output = ROOT / board.runs / f"{name}.{seed}"
    listed, scores, cpu_seconds = commands(board, name, row, seed), {}, 0.0
    for task, command in listed.items():
        file = output / f"{task.replace(' ', '_')}.json"
        if not task.startswith("train"):
            run(command, "--out", str(file), "--overwrite")
            scores[task] = read_json(file)["scores"]
        elif any(program in command for program in OF_TRAINER):
            shutil.rmtree(output, ignore_errors=True)
            cpu_seconds += run(command)
        else:
            cpu_seconds += run(command, "--overwrite-output-dir")
    if "train_urnng.py" in listed["train"]:
        scores["parsing network"] = {"f1": read_json(output / RESULTS_FILE)["test"]["trees"]["sentence_f1"]}
    result = {
        "row": name,
        "seed": seed,
        "commands": listed,
        "parameters": num_parameters(stored_tensors(output / "model")),
        "cpu_seconds": round(cpu_seconds, 1),
        "scores": scores,
        "hardware": {**describe_hardware(), "num_threads": 1},
        "versions": library_versions(),
    }
    add_result(board, result)


def add_result(board: Board, result: dict[str, Any]) -> None:
    """Add a line to the results, which stay sorted by row and seed."""
    found = sorted([*read_results(board), result], key=lambda x: (x["row"], x["seed"]))
    write_text(ROOT / board.results, "".join(f"{json.dumps(x, sort_keys=True)}\n" for x in found))


def read_results(board: Board, name: str | None = None) -> list[dict[str, Any]]:
    """The results of a row, one for each seed that has run; without a name, those of all rows."""
    file = ROOT / board.results
    found = map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.is_file() else []
    return [result for result in found if name in (None, result["row"])]


# -------------------------------------------------------------------------------------------------------- table
def table(board: Board, paper: dict[str, float] | None = None) -> str:
    """The table of the results in Markdown: mean and standard deviation over the seeds, best perplexity first.

    With `paper`, only the rows of that table, and its figures in another column.
    """
    head = ["model", "trees in training", "parameters", "CPU minutes", "seeds", "word perplexity", "F1"]
    head += ["paper"] * bool(paper)
    lines: list[tuple[float, list[str]]] = []
    for name in paper or ROWS:
        results, row = read_results(board, name), ROWS[name]
        if not results:
            continue
        perplexities = [result["scores"]["perplexity"]["word_perplexity"] for result in results]
        minutes = mean(result["cpu_seconds"] for result in results) / 60
        bound = "≤ " * ("--num-beams" in row["evaluations"]["perplexity"])
        cells = [row["model"], row["trees"], f"{results[0]['parameters']:,}", f"{minutes:.1f}", str(len(results))]
        cells += [bound + _spread(perplexities), _f1(results), *([f"{paper[name]:.1f}"] if paper else [])]
        lines.append((mean(perplexities), cells))
    cells_of_lines = [head, ["---", "---", *["---:"] * (len(head) - 2)], *(cells for _, cells in sorted(lines))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in cells_of_lines)


def _f1(results: list[dict[str, Any]]) -> str:
    """F1 of a row by all ways to parse: the main one, and others with their names."""
    tasks = [task for task in results[0]["scores"] if "parsing" in task]
    spreads = [_spread([result["scores"][task]["f1"] for result in results]) for task in tasks]
    return "; ".join(f"{x.removeprefix('parsing')} {f1}".strip() for x, f1 in zip(tasks, spreads, strict=True))


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def write_table(board: Board, paper: dict[str, float] | None = None) -> None:
    """Write the table: into a page between its two marks, or as a file of its own."""
    text = table(board, paper)
    if board.page == PAGE:
        return write_between(ROOT / PAGE, COMMAND, text)
    write_text(ROOT / board.page, text)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    listed = ", ".join((*ROWS, *TABLES))
    parser.add_argument("names", nargs="*", metavar="ROW", help=f"rows, or one table of a paper: {listed}")
    parser.add_argument("--table", action="store_true", help="write the table from the results only")
    parser.add_argument("--trees", nargs=3, type=Path, metavar=("TRAIN", "VALID", "TEST"), help="other trees")
    parser.add_argument("--folder", type=Path, help="folder for the results of other trees", default="runs/other_trees")
    arguments = parser.parse_args(argv)
    paper = TABLES.get(arguments.names[0]) if len(arguments.names) == 1 else None
    board, names = EMBEDDED, paper or arguments.names or ROWS
    if unknown := sorted(set(names) - {*ROWS}):
        parser.error(f"there is no row {unknown[0]}: {ROWS_FILE} has {listed}; a table of a paper is named alone")
    if arguments.trees:
        files, folder = map(Path.resolve, arguments.trees), arguments.folder.resolve()
        board = Board(dict(zip(SPLITS, files, strict=True)), folder, folder / "results.jsonl", folder / "table.md")
    elif paper:
        parser.error(f"{arguments.names[0]} needs --trees and --folder: papers have other corpora")
    os.chdir(ROOT)
    if not arguments.table:
        make_corpus(board)
        for seed, name in itertools.product(SEEDS, names):
            if seed not in [result["seed"] for result in read_results(board, name)]:
                make_row(board, name, ROWS[name], seed)
                write_table(board, paper)
    write_table(board, paper)
