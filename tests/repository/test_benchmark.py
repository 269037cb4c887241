"""The benchmarks: every kind of case is built and runs, and a row says where it comes from."""

import fnmatch
import json

import benchmark
import pytest
import torch

SMALL_GPST = {**benchmark.QUARTER, "vocab_size": 60, "num_type_layers": 1, "num_token_layers": 1}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_case_is_measured(capsys, monkeypatch, precision):
    weight, seen = torch.nn.Linear(2, 1), set()

    def step() -> None:
        seen.add(weight(torch.ones(1, 2)).dtype)

    monkeypatch.setattr(benchmark, "TABLE", {"one": lambda: (step, step), "other": pytest.fail})
    monkeypatch.setattr(benchmark, "resources", lambda case, side, step: {"peak_mib": 5})
    benchmark.main(["--case", "on*", "--runs", "2", "--precision", precision])
    row = json.loads(capsys.readouterr().out)
    assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"] and row["runs"] == 2 and row["precision"] == precision
    assert [cost["peak_mib"] for cost in row["costs"]] == [5, 5]
    assert all(row[name] for name in ("device_name", "num_threads", "torch", "transformers", "hf_synlm", "commit"))
    assert seen == {torch.float32 if precision == "float32" else torch.bfloat16}


def test_memory_grows_by_what_a_step_holds(monkeypatch):
    monkeypatch.setattr(benchmark, "TABLE", {"x": lambda: (lambda: torch.ones(64 << 18), None)})
    assert benchmark.grown_mib("x", 0) >= 60


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (benchmark.gpst_train, (SMALL_GPST, 1, 60)),
        (benchmark.gpst_parse, (SMALL_GPST,)),
        (benchmark.rnng_train, (2,)),
        (benchmark.pcfg_growth, ("loss", 3, "tensor", 4, 2)),
        (benchmark.pcfg_growth, ("logits", 3, "simple", 4)),
        (benchmark.gpst_growth, (3, 2)),
        (benchmark.length_train, ("ordered-memory", 4, 4)),
        (benchmark.length_train, ("urnng", 4, 4)),
    ],
)
def test_both_sides_of_a_case_run(build, arguments):
    for step in build(*arguments):
        step()


def test_rnng_is_timed_without_its_plan(monkeypatch):
    ours, _ = benchmark.rnng_train(2)
    monkeypatch.setattr("hf_synlm.models.rnng.modeling_rnng.make_plan", lambda *plan, **options: pytest.fail("a plan"))
    ours()


def test_models_of_a_length_are_of_one_size():
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in make().parameters()) for name, make in benchmark.EIGHT_MILLION.items()}
    assert all(6_900_000 < size < 8_900_000 for size in sizes.values())
    assert fnmatch.filter(benchmark.TABLE, "length-urnng-*") == ["length-urnng-128", "length-urnng-256"]
