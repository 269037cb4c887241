"""A run that is resumed, stopped by a signal, killed or watched equals the undisturbed one bit for bit (on the CPU)."""

import dataclasses
import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import GPT2Config

from hf_synlm import TreeLMConfig
from hf_synlm.training.engine import checkpoints
from hf_synlm.training.engine.run import Run
from tests.helpers import finetuning
from tests.helpers.refusals import refused
from tests.helpers.training_runs import SMALL_GPST, TINY, ScriptRun, cut_off, results_of, run_here, sample_files

# ---------------------------------------------------------------------------------------------- every program
TREES = "--train-files {train} --validation-files {valid} --test-files {test} --logging-steps 1"
# Search and report take no part in training.
NO_SEARCH = "--final-search-sentences 0 --final-report False"
GRAMMAR = f"{TREES} --max-batch-actions 300 --batch-group-size 16 --per-device-train-batch-size 4 --num-train-epochs 1"
GRAMMAR += " --checkpointing-steps 3 --evaluation-steps 2 --gradient-accumulation-steps 2"
RECURRENT = f"{TREES} --per-device-train-batch-size 3 --per-device-eval-batch-size 2 --bptt 8 --parse-sentences 4"
RECURRENT += " --num-train-epochs 4 --checkpointing-steps 7 --learning-rate 0.01"


class Case(NamedTuple):
    """A program, its flags, and the checkpoint to resume from, counted from the first or the last."""

    program: str
    flags: str
    checkpoint: int = 0


CASES = {
    "gpst": Case("pretrain_gpst",
         f"--config gpst_tiny --config-overrides {SMALL_GPST} --train-files {{raw}} --validation-files {{raw}} "
         "--one-sentence-per-line --tokenizer-vocab-size 400 --context-length 48 --per-device-train-batch-size 2 "
         "--validation-trees none --logging-steps 1 --evaluation-steps 0 --max-train-steps 4 --checkpointing-steps 2 "
         "--gradient-accumulation-steps 2 --final-report False"),
    "rnng": Case("train_rnng", f"--config rnng_tiny --config-overrides {TINY['rnng']} {GRAMMAR} {NO_SEARCH}"),
    "lstm": Case("train_rnng", f"--config lstm_tiny --config-overrides {TINY['rnng']} {GRAMMAR}"),
    "tree_lm": Case("train_tree_lm",
         f"--config tree_lm_tiny --config-overrides hidden_size=16,num_hidden_layers=1,num_attention_heads=2 {GRAMMAR} "
         f"{NO_SEARCH}"),
    "pushdown": Case("train_pushdown",
         "--config pushdown_tiny --config-overrides hidden_size=16,num_hidden_layers=1,num_attention_heads=2,"
         f"intermediate_size=24 {GRAMMAR} {NO_SEARCH}"),
    # The rates are halved after the first epoch without a best.
    "urnng": Case("train_urnng",
         f"--config urnng_tiny --config-overrides hidden_size=6,num_layers=1,dropout=0.1 {TREES} --seed 0 "
         "--per-device-train-batch-size 4 --batch-group-size 8 --num-samples 3 --importance-samples 8 "
         "--network-hidden-size 5 --num-train-epochs 2 --gradient-accumulation-steps 2 --checkpointing-steps 1 "
         "--network-epochs 1 --decay-epoch 0", 1),
    # In the middle of the second epoch, which has more sentences than the first.
    "pcfg": Case("train_pcfg",
         f"--config pcfg_tiny --config-overrides {TINY['pcfg']},latent_size=3,encoder_embedding_size=5,"
         f"encoder_hidden_size=4 {TREES} --seed 0 --per-device-train-batch-size 2 --batch-group-size 8 "
         "--num-train-epochs 3 --curriculum-words 12 --curriculum-growth 6 --parse-sentences 4 "
         "--gradient-accumulation-steps 2 --checkpointing-steps 3", 1),
    # In the middle of an epoch and of a phase: averaging begins after the first epoch, fine-tuning after the third.
    "on_lstm": Case("train_recurrent",
         f"{RECURRENT} --architecture on_lstm --config-overrides {TINY['on_lstm']},supervised_layers=[1] "
         "--tree-supervision --schedule adam-asgd --averaging-epoch 1 --finetuning-epoch 3", -2),
    "prpn": Case("train_recurrent",
         f"{RECURRENT} --architecture prpn --config-overrides {TINY['prpn']},parsing_network=recurrent "
         "--tree-supervision --schedule adam-plateau --plateau-patience 0 --batching sentences", -2),
    "palm": Case("train_recurrent",
         f"{RECURRENT} --architecture palm --config-overrides {TINY['palm']},output_gate=False --tree-supervision "
         "--schedule sgd-asgd --non-monotone-interval 1 --learning-rate 10", -2),
    "awd_lstm": Case("train_recurrent",
         f"{RECURRENT} --architecture awd_lstm --config-overrides {TINY['awd_lstm']} --schedule adam-plateau "
         "--tokenizer-type characters --bptt 60", -2),
    "glue-gpst": Case("finetune_glue", "--max-train-steps 4 --evaluation-steps 2"),
    "glue-gpt2": Case("finetune_glue", "--max-train-steps 4 --evaluation-steps 2"),
    "summarization-gpst": Case("finetune_summarization",
         "--max-train-steps 4 --evaluation-steps 2 --num-validation-summaries 2 --summary-column references "
         "--summary-loss-only --max-eval-samples 3"),
    "induction-gpst": Case("finetune_grammar_induction",
         "--max-train-steps 9 --num-train-epochs 2 --per-device-train-batch-size 12 --config-overrides "
         "stop_structure_gradient=false,token_loss_weight=1.0,surrogate=false --methods inside"),
}  # fmt: skip


class Straight(NamedTuple):
    """An undisturbed run: its folder, and how to run the program on another one."""

    folder: Path
    run: Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Straight]:
    """Runs a case once, without disturbing it."""
    folder = tmp_path_factory.mktemp("straight")
    paths = sample_files(folder, "trees", train=30, valid=8, test=5)
    paths["raw"] = sample_files(folder, "raw", train=120)["train"]

    @cache
    def written() -> tuple[Path, dict[str, str]]:
        (folder / "finetuning").mkdir()
        return finetuning.write_models(folder / "finetuning"), finetuning.write_files(folder / "finetuning")

    def argv(name: str, output_dir: Path) -> list[str]:
        flags = [flag.format(**paths) for flag in CASES[name].flags.split()]
        flags = [*flags, "--checkpoints-total-limit", "99"]
        task, _, model = name.partition("-")
        if model:
            models, files = written()
            flags += ["--checkpointing-steps", "2"]
            return finetuning.command(task, models / model, files, output_dir, *flags)
        return ["--output-dir", str(output_dir), "--overwrite-output-dir", "False", *flags]

    def straight(name: str, capsys: pytest.CaptureFixture[str]) -> Straight:
        def run(output_dir: Path, *more: str) -> dict[str, Any]:
            return run_here(CASES[name].program, [*argv(name, output_dir), *more], paths["cache"], capsys)

        if not (folder / name).exists():
            run(folder / name)
        return Straight(folder / name, run)

    return straight


def same_run(resumed: Path, straight: Path) -> None:
    """Bit-equal results and models."""
    measured = dict.fromkeys(("seconds_of_this_process", "tokens_per_second"))
    assert {**results_of(resumed), **measured} == {**results_of(straight), **measured}
    same_files(resumed / "model", straight / "model")


def same_files(one: Path, other: Path) -> None:
    """Bit-equal weights, optimizers and states."""
    names = {path.name for path in other.iterdir() if path.suffix in (".safetensors", ".bin")}
    names |= {path.name for path in other.glob("custom_checkpoint_*")}
    assert "model.safetensors" in names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("name", list(CASES))
def test_resumed_run_is_bit_equal(name: str, straight_run: Callable[..., Straight], tmp_path: Path, capsys) -> None:
    straight, run = straight_run(name, capsys)
    start = checkpoints.list_checkpoints(straight)[CASES[name].checkpoint]
    step = int(start.name.removeprefix("step_"))
    assert 0 < step < results_of(straight)["step"]
    cut_off(straight, tmp_path / "resumed", step)
    resumed = run(tmp_path / "resumed")  # an unfinished run goes on without being asked to
    assert "resumed from" in resumed["stdout"] and start.name in resumed["stdout"]
    same_run(tmp_path / "resumed", straight)
    same_files(*(checkpoints.list_checkpoints(folder)[-1] for folder in (tmp_path / "resumed", straight)))
    # A finished run with other settings is refused, and stays as it is.
    before = (tmp_path / "resumed" / "arguments.json").read_bytes()
    refused(r"seed \d+ \(now 5\)", run, tmp_path / "resumed", "--resume-from-checkpoint", "latest", "--seed", "5")
    assert (tmp_path / "resumed" / "arguments.json").read_bytes() == before
    assert (tmp_path / "resumed" / "all_results.json").is_file()
    if name in CHECKS:
        CHECKS[name](straight)


@pytest.mark.parametrize(("problem", "weight"), [(None, 0.0), ("single_label_classification", 1.0)])
def test_runs_older_than_the_weight_of_the_objective_resume(problem: str | None, weight: float, tmp_path: Path) -> None:
    config = {"problem_type": problem}
    state = checkpoints.TrainingState(settings={"config": config})
    (tmp_path / checkpoints.STATE_FILE).write_text(json.dumps(dataclasses.asdict(state)))
    checkpoints.read_state(tmp_path, {"config": {**config, "objective_weight": weight}})
    if problem:
        with pytest.raises(ValueError, match=r"config.objective_weight 1.0 \(now 0\)"):
            checkpoints.read_state(tmp_path, {"config": {**config, "objective_weight": 0}})


@pytest.mark.parametrize(("old", "is_same"), [({}, True), ({"text_style": None}, True), ({"text_style": "x"}, False)])
def test_runs_older_than_the_style_of_text_resume(old: dict[str, Any], is_same: bool, tmp_path: Path) -> None:
    state = checkpoints.TrainingState(settings={"config": old})
    (tmp_path / checkpoints.STATE_FILE).write_text(json.dumps(dataclasses.asdict(state)))
    with nullcontext() if is_same else pytest.raises(ValueError, match="text_style 'x'"):
        checkpoints.read_state(tmp_path, {"config": {"text_style": "treebank"}})


def test_runs_of_another_version_of_transformers_resume(tmp_path: Path) -> None:
    config = TreeLMConfig(backbone_config=GPT2Config(n_layer=1, n_head=1, n_embd=8)).to_dict()
    old, new = json.loads(json.dumps({"config": config})), {"config": config}
    old["config"]["transformers_version"] = "5.0.0"
    del old["config"]["backbone_config"]["scale_attn_weights"]
    old["config"]["backbone_config"]["dropped"] = {"size": 1}

    def read(settings: dict[str, Any]) -> checkpoints.TrainingState:
        state = checkpoints.TrainingState(step=3, settings=old)
        (tmp_path / checkpoints.STATE_FILE).write_text(json.dumps(dataclasses.asdict(state)))
        return checkpoints.read_state(tmp_path, settings)

    assert read(new).step == 3
    other = {"config": {**config, "backbone_config": {**config["backbone_config"], "n_layer": 2}}}
    refused("backbone_config.n_layer 1 .now 2", read, other)
    refused("backbone_config.n_layer 1 .now None", read, {"config": {**config, "backbone_config": None}})
    old["config"]["transformers_version"] = config["transformers_version"]
    refused("dropped.size 1.*scale_attn_weights None .now True", read, new)


def test_older_runs_are_told_their_size_and_keep_the_names_of_rates(tmp_path: Path) -> None:
    state = checkpoints.TrainingState(settings={"config": {"hidden_size": 768}})
    (tmp_path / checkpoints.STATE_FILE).write_text(json.dumps(dataclasses.asdict(state)))
    with pytest.raises(ValueError, match="an older run without a size: --model-preset gpst-small"):
        checkpoints.read_state(tmp_path, {"config": {"hidden_size": 64}})
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **name} for name in ({}, {"name": "parser"})]
    optimizer = torch.optim.AdamW(groups)
    run = Run(*[None] * 3, optimizer, *[None] * 2)
    old = optimizer.state_dict()
    old["param_groups"][1].pop("name")
    optimizer.load_state_dict(old)
    assert "name" not in optimizer.param_groups[1] and run.rate_names == [None, "parser"]


def check_averaging(straight: Path) -> None:
    """The optimizer that averages is in use, the first one has no state."""
    assert len(results_of(straight)["evaluations"]) == 5
    newest = checkpoints.list_checkpoints(straight)[-1]
    state = torch.load(newest / "optimizer_1.bin", weights_only=False)["state"]
    assert all("ax" in item for item in state.values()) and state
    assert not torch.load(newest / "optimizer.bin", weights_only=False)["state"]


def check_urnng(straight: Path) -> None:
    """It learns; the inference network learns in the first epoch alone."""
    found = results_of(straight)
    first, last = found["evaluations"][0]["losses"], found["evaluations"][-1]["losses"]
    assert last["nats"] < first["nats"] and last["importance_perplexity"] <= 1.01 * last["perplexity_bound"]
    assert found["step"] == 8
    steps = [load_file(straight / f"step_{step}" / "model.safetensors") for step in (1, 4, 8)]
    for before, after, learns in ((steps[0], steps[1], True), (steps[1], steps[2], False)):
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert learns is any(name.startswith("inference_network") for name in moved)
        assert "lm_head.bias" in moved


def check_pcfg(straight: Path) -> None:
    """The checkpoint to resume from lies inside an epoch, and epochs become longer."""
    ends = [item["step"] for item in results_of(straight)["evaluations"]]
    assert ends[1] < 6 < ends[2] and ends[1] < ends[2] - ends[1] < ends[3] - ends[2]


CHECKS: dict[str, Callable[[Path], None]] = {
    "on_lstm": check_averaging, "palm": check_averaging, "urnng": check_urnng, "pcfg": check_pcfg,
}  # fmt: skip


OTHER_SETTINGS = [
    ("--bptt 9", r"bptt 60 \(now 9\)"),
    ("--schedule sgd-asgd", r"schedule_schedule 'adam-plateau' \(now 'sgd-asgd'\)"),
    ("--validation-files {test}", r"validation '.*' \(now '.*'\)"),
]


@pytest.mark.parametrize(("flags", "setting"), OTHER_SETTINGS)
def test_other_settings_are_named(flags: str, setting: str, straight_run: Callable[..., Straight], capsys) -> None:
    straight, run = straight_run("awd_lstm", capsys)
    flags = flags.format(test=straight.parent / "trees.test.txt")
    refused(setting, run, straight, "--resume-from-checkpoint", "latest", *flags.split())


# ---------------------------------------------------------------------------------------------- signals and kills
@pytest.fixture(scope="module")
def gpst(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ScriptRun]:
    """Starts small runs of pretrain_gpst in processes, with a checkpoint after every step."""
    folder = tmp_path_factory.mktemp("gpst")
    files = sample_files(folder, "raw", train=40, valid=40)
    flags = (
        f"--config gpst_tiny --overwrite-output-dir False --config-overrides {SMALL_GPST} "
        f"--train-files {files['train']} --validation-files {files['valid']} --one-sentence-per-line "
        "--tokenizer-vocab-size 300 --context-length 24 --per-device-train-batch-size 1 --validation-trees none "
        "--logging-steps 1 --checkpointing-steps 1 --evaluation-steps 4 --max-train-steps 10 --final-report False"
    ).split()

    def start(name: str, *more: str, number: signal.Signals | None = None) -> ScriptRun:
        argv = ["--output-dir", str(folder / name), *flags, *more]
        return ScriptRun("pretrain_gpst", argv, files["cache"], number)

    return start


@pytest.fixture(scope="module")
def straight(gpst: Callable[..., ScriptRun]) -> Path:
    """Folder of a run that nothing has disturbed."""
    run = gpst("straight")
    run.finish()
    return run.output_dir


def test_signal_saves_and_ends_without_error(gpst: Callable[..., ScriptRun], straight: Path) -> None:
    run = gpst("signal", "--checkpointing-steps", "0", number=signal.SIGINT)  # SIGTERM: test_training_two_processes
    text = run.finish()
    assert checkpoints.list_checkpoints(run.output_dir), text[-3000:]
    (checkpoint,) = checkpoints.list_checkpoints(run.output_dir)
    assert checkpoint.name == "step_2"
    assert f"stopped by SIGINT at step 2: saved in {checkpoint}. The same command continues" in text
    assert not (run.output_dir / "all_results.json").exists()
    assert f"resumed from {checkpoint} at step 2" in gpst("signal", "--checkpointing-steps", "0").finish()
    same_run(run.output_dir, straight)


def check_complete(output_dir: Path) -> list[int]:
    """Every checkpoint that would be picked up can be read to its end; their steps."""
    found = []
    for folder in checkpoints.list_checkpoints(output_dir):
        state = json.loads((folder / checkpoints.STATE_FILE).read_text())
        assert folder.name == f"step_{state['step']}" and state["consumed"] == state["step"]
        with safe_open(folder / "model.safetensors", "pt") as weights:
            assert all(weights.get_tensor(name).isfinite().all() for name in weights.keys())  # noqa: SIM118
        for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
            torch.load(folder / name, weights_only=False)
        found.append(state["step"])
    return found


def kill_often(gpst: Callable[..., ScriptRun], count: int) -> tuple[ScriptRun, int]:
    """Kill -9 a run `count` times, every second time while it is saving; the run that is left, and cuts of saves."""
    draw, cut = random.Random(count), 0
    name = f"killed-{count}"
    for attempt in range(count):
        run = gpst(name)
        if attempt % 2:
            run.wait_until(partial(is_saving, run), "save")
            time.sleep(draw.uniform(0, 0.02))
        else:
            run.wait_until(partial(has_started, run), "start")
            time.sleep(draw.uniform(0, 0.5))
        run.kill()
        cut += bool(list(run.output_dir.glob("step_*.partial")))
        check_complete(run.output_dir)
        if is_done(run):  # before it was killed: once more from the start
            shutil.rmtree(run.output_dir)
    return gpst(name), cut


def is_done(run: ScriptRun) -> bool:
    return (run.output_dir / "all_results.json").exists()


def is_saving(run: ScriptRun) -> bool:
    return bool(list(run.output_dir.glob("step_*.partial"))) or is_done(run)


def has_started(run: ScriptRun) -> bool:
    return "step 0" in run.text or "resumed from" in run.text or is_done(run)


LONG = (pytest.mark.slow, pytest.mark.timeout(1800))


@pytest.mark.parametrize(("count", "cuts"), [(3, 0), pytest.param(20, 3, marks=LONG)])
def test_killed_at_random_moments(count: int, cuts: int, gpst: Callable[..., ScriptRun], straight: Path) -> None:
    last, cut = kill_often(gpst, count)
    last.finish()
    same_run(last.output_dir, straight)
    assert check_complete(last.output_dir) == [9, 10]
    assert cut >= cuts  # some kills came in the middle of a save


# ---------------------------------------------------------------------------------------------- on the way
def test_trackers(gpst: Callable[..., ScriptRun], straight: Path) -> None:
    """Without leaving a trace in the run: what it learns is what it learns without them."""
    flags = ("--with-tracking", "True", "--checkpointing-steps", "0")
    run = gpst("watched", *flags, "--load-best-model-at-end", "True")
    text = run.finish()
    found = results_of(run.output_dir)
    assert found["tokens_per_second"] > 0
    best = min(found["evaluations"], key=lambda item: item["losses"]["loss"])["step"]
    assert f"the best model is that of step {best}" in text
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.output_dir / "logs" / "pretrain_gpst"))
    events.Reload()
    tags = events.Tags()
    speed = {f"speed/{name}" for name in ("tokens_per_second", "tflops_per_device", "data_wait")}
    assert {"train/loss", "learning_rate", "learning_rate/parser", "validation/loss"} | speed <= set(tags["scalars"])
    assert len(events.Scalars("train/loss")) == 10
    assert results_of(straight)["train"] == found["train"]
