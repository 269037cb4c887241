"""The benchmarks: every row is measured, and says where it comes from."""

import json

import pytest
import torch
from benchmarks import cases, lengths, search, train
from benchmarks.sides import Sides, measure, origin


def rows_of(capsys: pytest.CaptureFixture, *arguments: str) -> list[dict]:
    assert cases.main(list(arguments)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_cases_are_listed_and_measured(capsys, monkeypatch):
    assert [row["case"] for row in rows_of(capsys, "--list")] == list(cases.CASES)
    monkeypatch.setattr(cases, "peak_memory", lambda name, side=0: 5.0)
    weight, seen = torch.nn.Linear(2, 1), set()

    def step() -> None:
        seen.add(weight(torch.ones(1, 2)).dtype)
        weight(torch.ones(1, 2)).sum().backward()

    def wrong() -> None:
        raise AssertionError("one is two")

    built = {"good": Sides(step, step, step, weight), "bad": Sides(step, step, wrong)}
    monkeypatch.setattr(cases, "CASES", {name: cases.Case(name, "", lambda s=s: s) for name, s in built.items()})
    (row,) = rows_of(capsys, "--case", "good", "--runs", "1")
    assert row["ratio"] > 0 and row["runs"] == 1 and row["peak_memory_mib"] == [5, 5] and row["commit"]
    assert rows_of(capsys, "--case", "good", "--runs", "1", "--precision", "bf16")[0]["precision"] == "bf16"
    assert seen == {torch.float32, torch.bfloat16} and rows_of(capsys, "--list", "--precision", "tf32")
    assert torch.backends.cuda.matmul.allow_tf32
    assert rows_of(capsys, "--gradients")[0]["bf16"]["zeros"]["weight"] == 0
    assert cases.main(["--case", "bad"]) == 1
    assert "one is two" in json.loads(capsys.readouterr().out)["error"]


def test_rnng_is_timed_without_its_plan(monkeypatch):
    sides = train.rnng_train(2)
    monkeypatch.setattr("hf_synlm.models.rnng.modeling_rnng.make_plan", lambda *plan, **options: pytest.fail("a plan"))
    sides.ours()


def test_growth_by_beam_and_length(capsys, monkeypatch):
    monkeypatch.setattr(search, "BEAMS", (2, 4))
    monkeypatch.setattr(search, "LENGTHS", (3, 5))
    rows = list(search.gpst_growth(1, lambda build: 5.0))
    assert [row["search"] for row in rows] == [f"gpst, {n} tokens, beam {k}" for n in (3, 5) for k in (2, 4)]
    assert all(row["seconds"] > 0 and row["mib"] == 5 for row in rows)


def test_time_by_length(monkeypatch):
    monkeypatch.setattr(lengths, "VOCABULARY", 60)
    models = {**lengths.MODELS, "URNNG": lengths.MODELS["URNNG"]._replace(longest=4)}
    monkeypatch.setattr(lengths, "MODELS", models)
    rows = list(lengths.time_by_length(1, (4, 8), 16, 60_000))
    assert {(row["model"], row["tokens of a sentence"]) for row in rows} == {
        (name, length) for name in models for length in (4, 8) if (name, length) != ("URNNG", 8)
    }
    near = {row["model"] for row in rows if abs(row["parameters"] - 60_000) < 16_000}
    assert near == set(models) - {"GPST"}  # the widths of which are 48 apart


def test_an_origin_names_machine_versions_and_commit():
    found = origin()
    assert found["torch"] == torch.__version__ and found["device"] == "cpu"
    assert all(found[name] for name in ("machine", "python", "transformers", "hf_synlm", "commit"))
    assert measure(lambda: torch.ones(3).sum(), 2)["ms"] > 0
