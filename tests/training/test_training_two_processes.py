"""Runs on two processes (gloo): equal to one process, exact resume after a kill, signals, NaN, FSDP2."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_synlm import PRPNForCausalLM
from hf_synlm.training.arguments import base as run_arguments
from hf_synlm.training.arguments.text import StreamDataArguments
from hf_synlm.training.engine import run as common
from hf_synlm.training.tasks import stream_batches, text_recipe
from tests.helpers import two_processes
from tests.helpers.commands import run
from tests.helpers.training_runs import ROOT, TINY, ScriptRun, results_of, sample_files

DROPOUTS = {
    "gpst": "embedding residual attention composition composition_attention parser head",
    "on_lstm": "embedding input hidden output weight",
}
NO_DROPOUT = {name: ",".join(f"{part}_dropout=0" for part in parts.split()) for name, parts in DROPOUTS.items()}
SIZES = TINY | {"on_lstm": f"{TINY['on_lstm']},supervised_layers=[1]"}
SCRIPTS = {"gpst": "pretrain_gpst", "rnng": "train_rnng", "on_lstm": "train_recurrent", "pcfg": "train_pcfg"}
# Training text and batches of each architecture; the recurrent one reads a stream and learns from gold distances.
FLAGS = {
    "gpst": "--one-sentence-per-line --tokenizer-vocab-size 300 --context-length 64 --max-sentence-tokens 60 "
    "--validation-trees none --max-train-steps 4 --evaluation-steps 2 --learning-rate 1e-2 --warmup-ratio 0",
    "rnng": "--max-batch-actions 300 --batch-group-size 16 --per-device-train-batch-size 4 --evaluation-steps 2 "
    "--max-train-steps 4 --final-search-sentences 0 --architecture rnng",
    "on_lstm": "--architecture on_lstm --bptt 20 --parse-sentences 0 --tree-supervision --learning-rate 0.01 "
    "--schedule adam-asgd --averaging-epoch 1 --num-train-epochs 2",
    "pcfg": "--curriculum-words 15 --curriculum-growth 20 --num-train-epochs 2 --batch-group-size 8",
}
CHECKPOINT = {"gpst": 2, "rnng": 2, "on_lstm": 6, "pcfg": 2}
RESUMED = ("gpst", "on_lstm")  # a sampler of samples, and one of batches with a state that is carried along
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block,GPSTParserLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


_GPST = ("--model", str(ROOT / "model_cards" / "gpst-tiny"), "--num-beams", "2", "--batch-size", "2")
# Commands of `synlm`, by the file that each writes.
COMMANDS = {"perplexity.json": ["evaluate", "perplexity", *_GPST], "surprisal.tsv": ["surprisal", *_GPST]}


@dataclasses.dataclass
class Jobs:
    """What ran on two processes, and what one process does next to it."""

    folder: Path
    files: dict[str, list[str]]
    cache: str

    def argv(self, name: str, architecture: str, *more: str) -> list[str]:
        """Flags of a run; later ones win."""
        return [
            *("--output-dir", str(self.folder / name), "--config-overrides", SIZES[architecture]),
            *("--logging-steps", "1", "--checkpointing-steps", str(CHECKPOINT[architecture])),
            *("--checkpoints-total-limit", "9", *self.files[architecture], *FLAGS[architecture].split(), *more),
        ]

    def alone(self, architecture: str) -> Path:
        """The same run on one process, made once."""
        name = f"{architecture}-one"
        if not (self.folder / name).exists():
            more = (*SAME_AS_ONE[architecture], *ONE_PROCESS[architecture])
            ScriptRun(SCRIPTS[architecture], self.argv(name, architecture, *more), self.cache).finish()
        return self.folder / name

    def log(self, name: str, rank: int = 0) -> str:
        """What a process has printed."""
        return (self.folder / f"{name}.log_{rank}").read_text(encoding="utf-8", errors="replace")

    def done(self, name: str) -> Path:
        """Folder of a run that has ended well."""
        two_processes.check_status(self.folder / name)
        return self.folder / name


NO_NOISE = f"{SIZES['gpst']},merge_noise=0,{NO_DROPOUT['gpst']}"
# A larger epsilon keeps Adam from blowing up the rounding of gradients that are nearly zero.
SAME_AS_ONE = {
    "gpst": ("--config-overrides", NO_NOISE, "--per-device-train-batch-size", "2", "--adam-epsilon", "1e-3"),
    "rnng": ("--config-overrides", f"{SIZES['rnng']},dropout=0", "--adam-epsilon", "1e-3"),
    "on_lstm": (
        *("--config-overrides", f"{SIZES['on_lstm']},{NO_DROPOUT['on_lstm']}", "--adam-epsilon", "1e-3"),
        *("--per-device-train-batch-size", "2"),
    ),
    "pcfg": ("--adam-epsilon", "1e-3"),
}
# The whole batch on one process: twice the rows, or (where sentences are sorted into batches) twice the micro steps.
ONE_PROCESS = dict.fromkeys(("gpst", "on_lstm"), ("--per-device-train-batch-size", "4"))
ONE_PROCESS |= dict.fromkeys(("rnng", "pcfg"), ("--gradient-accumulation-steps", "2"))


PRPN = (
    *("--architecture", "prpn", "--config-overrides", TINY["prpn"]),
    *("--schedule", "adam-plateau", "--tree-supervision", "False"),
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """All jobs of this file, on the same two processes."""
    folder = tmp_path_factory.mktemp("two")
    given = {}
    for kind, train, valid in (("raw", 60, 12), ("trees", 30, 6)):
        paths = sample_files(folder, kind, train=train, valid=valid)
        given[kind] = ["--train-files", paths["train"], "--validation-files", paths["valid"]]
    gpst = ["--config", "gpst_tiny", "--final-report", "False", *given["raw"], "--overwrite-output-dir", "False"]
    files = dict.fromkeys(("rnng", "pcfg"), given["trees"])
    files["gpst"] = [*gpst, "--per-device-train-batch-size", "2"]
    files["on_lstm"] = [*given["trees"], "--per-device-train-batch-size", "3"]
    jobs = Jobs(folder, files, str(folder / "cache"))
    listed: list[dict[str, Any]] = []

    def add(name: str, architecture: str, *more: str, **options: Any) -> None:
        job = {"script": f"hf_synlm.training.programs.{SCRIPTS[architecture]}", "output_dir": str(folder / name)}
        listed.append({**job, "argv": jobs.argv(name, architecture, *more), **options})

    for architecture in SCRIPTS:
        add(f"{architecture}-same", architecture, *SAME_AS_ONE[architecture])
    for architecture in RESUMED:
        after = f"step_{CHECKPOINT[architecture]}/training_state.json"
        add(f"{architecture}-straight", architecture)
        add(f"{architecture}-killed", architecture, after=after, signal="SIGKILL", ranks=[0, 1])
        add(f"{architecture}-killed", architecture)
    add("prpn", "on_lstm", *PRPN)
    add("late", "rnng", "--max-train-steps", "100000", "--max-time", "1e-5", "--dataloader-num-workers", "2")
    endless = ("--max-train-steps", "100000", "--checkpointing-steps", "3", "--evaluation-steps", "0")
    add("signal", "gpst", *endless, after="step_3", signal="SIGTERM", ranks=[1])
    ruin = ("--learning-rate", "1e30", "--max-grad-norm", "1e30", "--max-train-steps", "9", "--logging-steps", "3")
    add("nan", "gpst", *ruin, "--evaluation-steps", "0")
    add("fsdp", "gpst", *SAME_AS_ONE["gpst"], environment=FSDP, after="step_2/training_state.json",
        signal="SIGTERM", ranks=[0])  # fmt: skip
    add("fsdp", "gpst", *SAME_AS_ONE["gpst"], environment=FSDP)
    for name, command in COMMANDS.items():
        argv = [*command, str(folder / "raw.valid.txt"), "--out", str(folder / name)]
        listed.append({"script": "hf_synlm.cli", "argv": argv, "output_dir": str(folder / name)})
    two_processes.run_jobs(listed, folder, jobs.cache)
    return jobs


def same_weights(first: Path, second: Path, **tolerance: float) -> None:
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], msg=name, **tolerance)


@pytest.mark.parametrize("architecture", RESUMED)
def test_killed_run_resumes_bit_equal(architecture: str, jobs: Jobs) -> None:
    straight, resumed = jobs.done(f"{architecture}-straight"), jobs.done(f"{architecture}-killed")
    state = json.loads((straight / f"step_{CHECKPOINT[architecture]}" / "training_state.json").read_text())
    assert state["settings"]["num_processes"] == 2
    assert "resumed from" in jobs.log(f"{architecture}-killed")
    for key in ("step", "train", "evaluations"):
        assert results_of(resumed)[key] == results_of(straight)[key]
    same_weights(straight, resumed, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", list(SCRIPTS))
def test_two_processes_equal_one(architecture: str, jobs: Jobs) -> None:
    """With half of every batch each; dropout and noise, which differ between processes, are off."""
    two = jobs.done(f"{architecture}-same")
    one = jobs.alone(architecture)
    same_losses(two, one)
    same_weights(two, one, rtol=1e-4, atol=2e-5)


def same_losses(first: Path, second: Path) -> None:
    own, other = results_of(first), results_of(second)
    assert len(own["train"]) == len(other["train"]) >= 4
    for mine, theirs in zip(own["train"], other["train"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)
    for mine, theirs in zip(own["evaluations"], other["evaluations"], strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=2e-4, abs=2e-5)


def test_processes_end_at_the_same_time(jobs: Jobs) -> None:
    """The clock of the first process decides; batches come from workers."""
    assert results_of(jobs.done("late"))["step"] == 1
    assert "step 1 is the last one: max_time 1e-05 is reached" in jobs.log("late")


def test_processes_evaluate_the_saved_model(jobs: Jobs) -> None:
    """PRPN has running statistics, which every process collects from its own rows."""
    folder = jobs.done("prpn")
    found = results_of(folder)
    best = next(item for item in found["evaluations"] if item["step"] == found["best_step"])
    assert best["step"] > 0
    model, tokenizer = (kind.from_pretrained(folder / "model") for kind in (PRPNForCausalLM, AutoTokenizer))
    data = StreamDataArguments([str(jobs.folder / "trees.train.txt")], [str(jobs.folder / "trees.valid.txt")])
    stream = stream_batches.load_stream(data, data.validation_files, tokenizer)
    accelerator = common.make_accelerator(run_arguments.TrainingArguments(output_dir=str(jobs.folder)))
    nats = text_recipe.evaluate_stream(accelerator, model, stream, 8, 20)
    assert best["losses"]["nats"] == pytest.approx(nats, rel=1e-6)


def test_a_signal_to_one_process_stops_both(jobs: Jobs) -> None:
    folder = jobs.done("signal")
    assert "stopped by a signal to another process at step" in jobs.log("signal")
    assert not (folder / "all_results.json").exists()
    newest = max(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))
    assert f"saved in {folder / f'step_{newest}'}. The same command continues the run." in jobs.log("signal")


def test_nan_names_the_samples_of_all_processes(jobs: Jobs) -> None:
    two_processes.check_status(jobs.folder / "nan", 1)
    assert "FloatingPointError" in jobs.log("nan", 1)
    found = re.search(r"first at step (\d+), which reads the samples (\[.*?\])", jobs.log("nan", 1))
    assert found and len(set(json.loads(found[2]))) == 4  # two of each process
    assert not list((jobs.folder / "nan").glob(f"step_{int(found[1]) + 1}*"))


def test_fsdp_equals_one_process(jobs: Jobs) -> None:
    """The preparation of accelerate for FSDP2, a resumed sharded checkpoint, and the gathered export."""
    one, two = jobs.alone("gpst"), jobs.done("fsdp")
    assert (two / "step_2" / "pytorch_model_fsdp_0").is_dir() and "resumed from" in jobs.log("fsdp")
    same_losses(two, one)
    same_weights(two, one, rtol=1e-4, atol=2e-5)


def test_commands_share_their_texts(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    """One result as of one process, which the first writes."""
    for name, command in COMMANDS.items():
        both, alone = jobs.done(name), jobs.folder / f"alone-{name}"
        run(capsys, *command, jobs.folder / "raw.valid.txt", "--out", alone)
        texts = [path.read_text(encoding="utf-8") for path in (both, alone)]
        if name == "perplexity.json":
            scores = [json.loads(text)["scores"] for text in texts]
            assert scores[0] == pytest.approx(scores[1], rel=1e-5)
            assert "word_perplexity" in jobs.log(name) and "word_perplexity" not in jobs.log(name, 1)
        else:
            tables = [[line.split("\t") for line in text.splitlines()] for text in texts]
            for one, two in zip(*tables, strict=True):
                assert (one[:4] == two[:4] and one[6] == two[6]) or float(one[6]) == pytest.approx(float(two[6]))
