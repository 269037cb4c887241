"""Time and memory of GPST's search against the width of its beam.

    python training/benchmark.py --beams runs/beams --runs 3

`gpst-tiny` parses texts of 17 and 60 tokens of the embedded treebank with beams of 20 to 1,000. A derivation attends to
its own nodes only, so that the time per token and derivation should not grow with the beam.
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.sides import Sides, Step, origin, place, seconds
from transformers import AutoTokenizer

from hf_synlm import GPSTForCausalLM
from hf_synlm.data.files import folder_writer, write_json, write_text
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.viz import plot_lines

BEAMS, LENGTHS = (20, 50, 100, 300, 1000), (17, 60)
MODEL = Path(__file__).resolve().parents[2] / "model_cards" / "gpst-tiny"


@torch.no_grad()
def _parse(model: Any, ids: torch.Tensor, beam: int) -> None:
    model.parse(ids, num_beams=beam)


def search(length: int, beam: int) -> Sides:
    """A parse of `length` tokens with a beam; there is no baseline."""
    model, tokenizer = GPSTForCausalLM.from_pretrained(MODEL).eval(), AutoTokenizer.from_pretrained(MODEL)
    words = [word for sentence in read_treebank(sample_path("trees.test.txt")) for word in sentence.words]
    text = " ".join(words[: 2 * length]).lower()
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    step: Step = partial(_parse, place(model), place(ids[:, :length]), beam)
    return Sides(step, step, step)


def time_by_beam(
    peak_memory: Callable[[Any], float],
    beams: tuple[int, ...] = BEAMS,
    lengths: tuple[int, ...] = LENGTHS,
    runs: int = 3,
) -> dict[str, Any]:
    """Parse a text of every length with every beam.

    Args:
        peak_memory: measures the memory of a step in a fresh process.
        beams: their widths.
        lengths: tokens of the texts.
        runs: timed runs, after one that is not timed.

    Returns:
        For JSON: by length and beam `seconds` (median), `microseconds` per token and derivation, and `mebibytes`.
    """
    results: dict[int, dict[int, dict[str, float]]] = {length: {} for length in lengths}
    for length in lengths:
        for beam in beams:
            step = search(length, beam).ours
            step()
            time = statistics.median(seconds(step) for _ in range(runs))
            row = {"seconds": time, "microseconds": 1e6 * time / length / beam}
            results[length][beam] = {**row, "mebibytes": peak_memory(partial(search, length, beam))}
            print(f"{length} tokens, beam {beam}: {results[length][beam]}", flush=True)
    return {"results": results, "beams": list(beams), "runs": runs, **origin()}


def compare_beams(folder: str, runs: int, peak_memory: Callable[[Any], float]) -> str:
    """Run `time_by_beam` and write its results, table and picture.

    Args:
        folder: for `beams.json`, `beams.md` and `beams.svg`.
        runs: timed runs of every beam.
        peak_memory: see `time_by_beam`.

    Returns:
        The table.
    """
    found = time_by_beam(peak_memory, runs=runs)
    lines = [["tokens", *(f"beam {beam}" for beam in found["beams"])]]
    lines.append(["---"] * len(lines[0]))
    for length, row in found["results"].items():
        cells = (f"{v['seconds']:.2f} s, {v['microseconds']:.0f} µs, {v['mebibytes']:.0f} MiB" for v in row.values())
        lines.append([str(length), *cells])
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    series = {
        f"{length} tokens": {beam: value["microseconds"] for beam, value in row.items()}
        for length, row in found["results"].items()
    }
    title = "GPST's search: time per token and derivation by the width of the beam"
    with folder_writer(Path(folder)) as made:
        write_json(made / "beams.json", found)
        write_text(made / "beams.md", text)
        plot_lines(made / "beams.svg", series, title=title, x="beam", y="µs", log=True)
    return text
