"""The tables of speeds: every row is measured, on the sentences that it names."""

import functools
import re
from pathlib import Path

import pytest
from benchmarks import beams as benchmark_beams
from benchmarks import evaluation as benchmark_evaluation
from benchmarks import lengths as benchmark_lengths

CARDS = Path(__file__).parents[2] / "model_cards"


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "gpst-tiny",
            {
                "scoring, beam marginal, beam 1": 3,
                "scoring, beam marginal, beam 4": 2,
                "scoring, stepwise, beam 20": 3,
                "parsing, left to right, beam 20": 3,
                "parsing, inside": 3,
            },
        ),
        ("palm-s-tiny", {"scoring": 3, "parsing": 3}),
    ],
)
def test_speeds_by_batch_and_beam(monkeypatch, name, rows):
    settings = {"NUM_SENTENCES": 3, "NUM_SENTENCES_OF_WIDE_BEAMS": 2, "BATCH_SIZES": (1, 2)}
    for setting, value in {**settings, "BEAMS": (1,), "WIDE_BEAMS": (4,)}.items():
        monkeypatch.setattr(benchmark_evaluation, setting, value)
    title, _, head, _, *lines = benchmark_evaluation.evaluation_speed(str(CARDS / name), runs=1).splitlines()
    assert name in title and "median of 1" in title and head.endswith("| batch 1 | batch 2 |")
    cells = [re.split(r" *\| *", line.strip("| ")) for line in lines]
    assert {row: int(number) for row, number, *_ in cells} == rows
    assert all(float(speed) > 0 for _, _, _, *speeds in cells for speed in speeds)


def test_time_by_beam(monkeypatch, tmp_path):
    timed = functools.partial(benchmark_beams.time_by_beam, beams=(2, 4), lengths=(3, 5))
    monkeypatch.setattr(benchmark_beams, "time_by_beam", timed)
    head, _, *lines = benchmark_beams.compare_beams(str(tmp_path / "out"), 1, lambda build: 5.0).splitlines()
    assert head == "| tokens | beam 2 | beam 4 |" and [line.split()[1] for line in lines] == ["3", "5"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"beams.json", "beams.md", "beams.svg"}


def test_time_by_length(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark_lengths, "VOCABULARY", 60)
    models = {**benchmark_lengths.MODELS, "URNNG": benchmark_lengths.MODELS["URNNG"]._replace(longest=4)}
    monkeypatch.setattr(benchmark_lengths, "MODELS", models)
    timed = functools.partial(benchmark_lengths.time_by_length, (4, 8), 16, 60_000)
    monkeypatch.setattr(benchmark_lengths, "time_by_length", timed)
    head, _, *lines = benchmark_lengths.compare_lengths(str(tmp_path / "out"), runs=1).splitlines()
    cells = [line.strip("|").split("|") for line in lines]
    assert head.endswith("| 4 tokens | 8 tokens |") and [row[0].strip() for row in cells] == list(models)
    assert [name for name, *_, last in cells if not last.strip()] == [" URNNG "]
    sizes = {name.strip(): int(size.replace(",", "")) for name, size, *_ in cells}
    near = {name for name, size in sizes.items() if abs(size - 60_000) < 16_000}
    assert near == set(models) - {"GPST"}  # the widths of which are 48 apart
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"lengths.json", "lengths.md", "lengths.svg"}
