# SPDX-License-Identifier: Apache-2.0
"""The table of the minis in README.md, from the results in `model_cards/`; the site shows it, too.

`python training/make_checkpoints.py NAME` makes a row of it and writes it.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hf_synlm.data.files import write_text
from hf_synlm.evaluation.results import EvaluationResult, card_rows, load_result
from hf_synlm.hub.checkpoint import num_parameters, stored_tensors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- begin of the table: {} -->\n", "<!-- end of the table -->\n"
COMMAND = "python training/make_checkpoints.py NAME"
HEAD = ["model", "parameters", "weights", "read in training", "F1", "SyntaxGym", "BLiMP", "words a second"]


def model_table(specifications: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown of the minis that are measured."""
    rows = [HEAD, ["---", *["---:"] * 2, "---", *["---:"] * 4]]
    for name, checkpoint in specifications.items():
        results = [ROOT / "model_cards" / name / "results" / f"{result}.json" for result in checkpoint["evaluations"]]
        if "in_short" in checkpoint and all(result.is_file() for result in results):
            rows.append(_row(name, checkpoint))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str, checkpoint: dict[str, Any]) -> list[str]:
    folder = ROOT / "model_cards" / name
    results = {stated: load_result(folder / "results" / f"{stated}.json") for stated in checkpoint["evaluations"]}
    parameters = num_parameters(stored_tensors(folder))
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    name_of = {"gpst": "GPST", "pcfg": "PCFG", "rnng": "RNNG", "tree_lm": "Tree LM"}[
        AutoConfig.from_pretrained(folder).model_type
    ]
    adapted = f", LoRA on {checkpoint['base_model'].partition('/')[2]}" if "base_model" in checkpoint else ""
    of_task = {result.task: result for result in reversed(results.values())}  # the first of each task
    speed = of_task["perplexity"].scores["words"] / of_task["perplexity"].seconds
    return [
        f"[`{name}`](model_cards/{name}/README.md) ({name_of}{adapted})",
        f"{parameters / 1e6:.1f} M{' and the backbone' * bool(adapted)}",
        f"{size / 1e6:.1f} MB",
        checkpoint["in_short"],
        _f1(of_task["parsing"], next(iter(checkpoint["evaluations"].values()))["dataset"]),
        f"{100 * of_task['syntaxgym'].scores['mean_over_suites']:.1f}",
        f"{100 * of_task['blimp'].scores['accuracy']:.1f} ({of_task['blimp'].data['pairs']:,} pairs)",
        f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
    ]


def _f1(result: EvaluationResult, dataset: str) -> str:
    row = card_rows(result)[0]
    kind = row["metric"].removesuffix("_f1") + (f" by `{row['estimator']}`" if row["num_beams"] is None else "")
    right = row.get("baselines", {}).get("right")
    return f"{row['value']:.1f} {kind}, {dataset}" + (f" (right branching {right:.1f})" if right else "")


def write_between(page: Path, command: str, text: str) -> None:
    """Replace what stands in a page between the mark that names the command and the end of the table."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN.format(command))
    _, end, after = rest.partition(END)
    write_text(page, f"{before}{begin}\n{text}\n{end}{after}")
