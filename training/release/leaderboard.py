"""The leaderboard: every model on the same words of the same trees, by one command for each row.

    python training/leaderboard.py              all rows and seeds of `docs/leaderboard/rows.yaml` that have no result
    python training/leaderboard.py rnng prpn    some rows
    python training/leaderboard.py --table      write the table of `docs/leaderboard.md` from the results only

All rows share the corpus (the embedded trees as `to_ptb_concat` makes them: lower case, N for numbers, no punctuation),
the tokenizer (words that occur twice, one unknown word), and the number of epochs. A row with a seed is one file in
`docs/leaderboard/results/`; models stay in `runs/leaderboard/`.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from release.make_checkpoints import LAUNCH, run

from hf_synlm.data.files import folder_writer, write_json, write_text
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import TreebankSentence, read_treebank, to_ptb_concat
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.evaluation.results import describe_hardware, library_versions
from hf_synlm.hub.checkpoint import stored_tensors
from hf_synlm.trees import labeled_spans_to_brackets

ROOT = Path(__file__).resolve().parents[2]
BOARD, RUNS = Path("docs/leaderboard"), Path("runs/leaderboard")
ROWS, PAGE = BOARD / "rows.yaml", Path("docs/leaderboard.md")
CORPUS = RUNS / "corpus"
EPOCHS = 12
# What is the same in all rows, by program.
SHARED = f"--tokenizer_name {CORPUS}/tokenizer --num_train_epochs {EPOCHS} --final_report false"
_TREES = f"--train_files {CORPUS}/train.txt --validation_files {CORPUS}/valid.txt"
DATA = {
    "pretrain_gpst.py": f"--train_trees {CORPUS}/train.txt --validation_words {CORPUS}/valid.txt --drop_punctuation "
    "false --max_sentence_tokens 127 --max_train_steps 100000",
    "train_rnng.py": f"{_TREES} --final_search_sentences 0",
    "train_tree_lm.py": f"{_TREES} --final_search_sentences 0",
    "train_recurrent.py": f"{_TREES} --preprocessing none --parse_sentences 0",
}
BEGIN, END = "<!-- begin of the table: python training/leaderboard.py --table -->\n", "<!-- end of the table -->\n"


def read_rows() -> tuple[list[int], dict[str, dict[str, Any]]]:
    """The seeds, and the rows by name, of `docs/leaderboard/rows.yaml`."""
    found = yaml.safe_load((ROOT / ROWS).read_text(encoding="utf-8"))
    return found["seeds"], found["rows"]


def commands(name: str, row: dict[str, Any], seed: int) -> dict[str, str]:
    """The commands of a row, by what they make: "train", "perplexity", "parsing".

    Args:
        name: of the row.
        row: its entry in `docs/leaderboard/rows.yaml`.
        seed: of the training.

    Returns:
        The commands in the order in which they run.
    """
    output = RUNS / f"{name}.{seed}"
    program = row["train"].split()[0]
    more = f"{DATA[program]} {SHARED} --seed {seed} --output_dir {output}"
    found = {"train": f"{LAUNCH} training/{row['train']} {more}"}
    for task, options in row["evaluations"].items():
        data = "--treebank {0} --convention gpst" if task == "parsing" else "{0} --format treebank"
        words = f"synlm evaluate {task} {data.format(CORPUS / 'test.txt')} --model {output}/model {options}"
        found[task] = words.strip()
    return found


# ------------------------------------------------------------------------------------------------------- corpus
def make_corpus() -> None:
    """Write the trees and the tokenizer that all rows share into `runs/leaderboard/corpus`."""
    with folder_writer(ROOT / CORPUS) as folder:
        for split in ("train", "valid", "test"):
            trees = (f"{_brackets(sentence)}\n" for sentence in _sentences(split))
            write_text(folder / f"{split}.txt", "".join(trees))
        words = (sentence.words for sentence in _sentences("train"))
        word_tokenizer(words, min_count=2, end_token=True).save_pretrained(folder / "tokenizer")


def _sentences(split: str) -> Iterator[TreebankSentence]:
    for sentence in read_treebank(sample_path(f"trees.{split}.txt")):
        prepared = to_ptb_concat(sentence)
        if prepared is not None:
            yield prepared


def _brackets(sentence: TreebankSentence) -> str:
    tags = [(tag, at, at + 1) for at, tag in enumerate(sentence.tags)]
    return labeled_spans_to_brackets([*tags, *sentence.labeled_spans], sentence.words)


# -------------------------------------------------------------------------------------------------------- rows
def make_row(name: str, row: dict[str, Any], seed: int) -> None:
    """Train and measure a row with one seed, and write its result.

    Args:
        name: of the row.
        row: its entry in `docs/leaderboard/rows.yaml`.
        seed: of the training.
    """
    output = ROOT / RUNS / f"{name}.{seed}"
    listed, scores = commands(name, row, seed), {}
    cpu_seconds = run(listed.pop("train"))
    for task, command in listed.items():
        run(command, "--out", str(output / f"{task}.json"), "--overwrite")
        found = json.loads((output / f"{task}.json").read_text(encoding="utf-8"))
        scores[task] = found["scores"]
    shapes = [tensor.shape for tensor in stored_tensors(output / "model").values()]
    result = {
        "row": name,
        "seed": seed,
        "commands": commands(name, row, seed),
        "parameters": sum(math.prod(shape) for shape in shapes),
        "cpu_seconds": round(cpu_seconds, 1),
        "scores": scores,
        "hardware": {**describe_hardware(), "num_threads": 1},
        "versions": library_versions(),
    }
    write_json(ROOT / BOARD / "results" / f"{name}.{seed}.json", result)


def read_results(name: str) -> list[dict[str, Any]]:
    """The results of a row, one for each seed that has run."""
    files = sorted((ROOT / BOARD / "results").glob(f"{name}.*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


# -------------------------------------------------------------------------------------------------------- table
def table() -> str:
    """The table of `docs/leaderboard.md`: mean and standard deviation over the seeds, best perplexity first."""
    head = ["model", "trees in training", "parameters", "CPU minutes", "seeds", "word perplexity", "F1"]
    _, rows = read_rows()
    lines: list[tuple[float, list[str]]] = []
    for name, row in rows.items():
        results = read_results(name)
        if not results:
            continue
        perplexities = [result["scores"]["perplexity"]["word_perplexity"] for result in results]
        f1 = [result["scores"]["parsing"]["f1"] for result in results if "parsing" in result["scores"]]
        minutes = mean(result["cpu_seconds"] for result in results) / 60
        bound = "≤ " if "--num-beams" in row["evaluations"]["perplexity"] else ""
        cells = [row["model"], row["trees"], f"{results[0]['parameters']:,}", f"{minutes:.1f}", str(len(results))]
        cells += [bound + _spread(perplexities), _spread(f1) if f1 else ""]
        lines.append((mean(perplexities), cells))
    cells_of_lines = [head, ["---", "---", *["---:"] * 5], *(cells for _, cells in sorted(lines))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in cells_of_lines)


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def write_table() -> None:
    """Put the table into `docs/leaderboard.md`, between its two marks."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(ROOT / PAGE, f"{before}{BEGIN}\n{table()}\n{END}{after}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    seeds, rows = read_rows()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="ROW", help=f"default: {', '.join(rows)}")
    parser.add_argument("--table", action="store_true", help="write the table from the results only")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.names) - set(rows)):
        parser.error(f"there is no row {unknown[0]}: {ROWS} has {', '.join(rows)}")
    os.chdir(ROOT)
    if not arguments.table:
        make_corpus()
        for seed in seeds:
            for name in arguments.names or rows:
                if not (BOARD / "results" / f"{name}.{seed}.json").exists():
                    make_row(name, rows[name], seed)
    write_table()


if __name__ == "__main__":
    main()
