"""The loop of the training scripts: accumulation, signals, kills, NaN, full disks, resume, trackers, the Hub."""

import copy
import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from hf_synlm import GPSTConfig, ONLSTMConfig, ONLSTMForCausalLM
from hf_synlm.data.collate import pad_inputs
from hf_synlm.data.tokenizers import character_tokenizer, train_bpe_tokenizer, train_wordpiece_tokenizer
from hf_synlm.data.vocabulary import subword_tokenizer, word_tokenizer
from hf_synlm.models.gpst.composition import GPSTPairEncoder
from hf_synlm.training.arguments.base import TrainingArguments
from hf_synlm.training.engine import checkpoints, loop, run as common, samplers, steps
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.export import check_repository, export_run, push_final_model
from hf_synlm.training.engine.recipe import Recipe
from hf_synlm.training.engine.steps import StopSignals
from hf_synlm.training.engine.word_counts import WordCounter
from hf_synlm.training.tasks.gpst_training import GPSTTraining
from tests.helpers.refusals import raised, refused
from tests.helpers.training_runs import reset_accelerate
from tests.models.gpst.test_modeling_gpst import NO_DROPOUT, ids_of, tiny
from tests.models.rnng import test_modeling_rnng as rnng


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    reset_accelerate()


# ---------------------------------------------------------------------------------------------- a run in this process
class Rows(Dataset):
    """Rows of a batch, each a sample."""

    def __init__(self, batch: dict[str, torch.Tensor]):
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[index] for name, value in self.batch.items()}


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def gpst_rows() -> dict[str, torch.Tensor]:
    ids, mask = ids_of(9, 4, 6, 1, 12, 3, 2, 8)
    sentence_ids = (torch.arange(ids.shape[1]) // 5 + 1) * mask
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "sentence_ids": sentence_ids, "labels": labels}


def on_lstm_rows() -> dict[str, torch.Tensor]:
    rows = gpst_rows()
    rows["distances"] = torch.randint(1, 5, rows.pop("sentence_ids").shape).float()
    return rows


def make_on_lstm() -> torch.nn.Module:
    torch.manual_seed(0)
    none = {f"{name}_dropout": 0.0 for name in ("embedding", "input", "hidden", "output", "weight")}
    sizes = {"vocab_size": 40, "embedding_size": 8, "hidden_size": 12, "chunk_size": 2, "supervised_layers": [1]}
    return ONLSTMForCausalLM(ONLSTMConfig(**sizes, **none))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "gpst": (lambda: tiny(**NO_DROPOUT, merge_noise=0.0), gpst_rows),
    "rnng": (
        lambda: rnng.tiny(dropout=0.0, loss_normalization="action"),
        lambda: rnng.batch(lengths=[6, 9, 1, 4, 12, 2, 1, 5]),
    ),
    "on_lstm": (make_on_lstm, on_lstm_rows),
}


def make_run(output_dir: Path, name: str = "gpst", **changes: Any) -> tuple[common.Run, Any]:
    """A run of a tiny model without randomness, and its loader."""
    options = {"max_train_steps": 3, "learning_rate": 1e-2, "adam_epsilon": 1e-3, "num_warmup_steps": 0}
    options.update({"per_device_train_batch_size": 8, "logging_steps": 1, **changes})
    arguments = TrainingArguments(output_dir=str(output_dir), **options)
    accelerator = common.make_accelerator(arguments)
    make, rows = MODELS[name]
    model = make()
    optimizer, schedule = common.make_optimizer(model, arguments)
    prepared = accelerator.prepare(model, optimizer, schedule)
    run = common.Run(accelerator, arguments, *prepared, common.TrainingState())
    sampler = samplers.StepSampler(8, arguments.per_device_train_batch_size, 0)
    sampler.sample_id = lambda k: k % 8  # in their order
    return run, samplers.make_loader(accelerator, Rows(rows()), stack, arguments, sampler)


def compute_loss(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    output = model(**batch)
    return output.loss, output.losses


def no_evaluation(model: torch.nn.Module, step: int) -> dict[str, Any]:
    return {"step": step}


def train(run: common.Run, batches: Any, objective: Any = compute_loss, **options: Any) -> dict[str, float]:
    evaluate = options.pop("evaluate", no_evaluation)
    recipe = SimpleNamespace(
        loader=lambda run: batches,
        compute_loss=objective,
        evaluate=evaluate,
        evaluation_due=lambda step: steps.is_due(step, run.arguments.evaluation_steps, run.arguments.num_steps),
        summarize=dict,
        flops_per_token=lambda model: None,
        tokenizer=options.pop("tokenizer", None) or word_tokenizer([["a"]]),
    )
    run.output_dir.mkdir(parents=True, exist_ok=True)
    if not run.state.notes:
        loop.start_or_resume(run, None, {}, evaluate, options.get("best"))
    return loop.TrainingLoop(run, recipe, **options).train()


def losses(run: common.Run) -> list[dict[str, float]]:
    return run.state.notes["train"]


# ---------------------------------------------------------------------------------------------- accumulation
@pytest.mark.parametrize("name", list(MODELS))
def test_accumulation_changes_nothing(name: str, tmp_path: Path) -> None:
    """Eight rows at once, or two after the other, each part of the loss normalized by its count in all eight."""
    whole, batches = make_run(tmp_path / "whole", name)
    train(whole, batches)
    pieces, batches = make_run(tmp_path / "pieces", name, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    train(pieces, batches)
    assert pieces.state.consumed == whole.state.consumed == 24
    assert len(losses(whole)) == 3 and losses(whole)[-1]["loss"] < losses(whole)[0]["loss"]
    for mine, theirs in zip(losses(pieces), losses(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-6)
    for mine, theirs in zip(pieces.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)


def test_a_model_that_does_not_count_is_averaged(tmp_path: Path) -> None:
    run, batches = make_run(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_train_steps=1)
    seen = []

    def first_weight(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert "loss_shares" not in batch
        seen.append(float(batch["input_ids"].float().mean()))
        return model.lm_head.weight[0, 0] * 0 + seen[-1], {"mean": torch.tensor(seen[-1])}

    run.model.count_loss_items = None
    train(run, batches, first_weight)
    assert losses(run)[0]["loss"] == pytest.approx(sum(seen) / 2) == losses(run)[0]["mean"]


def test_recomputed_and_compiled_layers_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One layer of each kind and sentences of one length, for every further graph takes seconds.
    small = tiny(**NO_DROPOUT, merge_noise=0.0, num_token_layers=1, num_composition_layers=1)
    ids, mask = ids_of(*[4] * 8)
    batch = {"input_ids": ids, "attention_mask": mask, "sentence_ids": mask, "labels": ids}
    monkeypatch.setitem(MODELS, "gpst", (lambda: copy.deepcopy(small), lambda: batch))
    plain, batches = make_run(tmp_path / "plain", max_train_steps=2)
    train(plain, batches)
    compiled = []

    def compile_layer(layer: torch.nn.Module, dynamic: bool) -> None:
        compiled.append(layer)
        # All but the last stages of torch.compile, which take a minute on a CPU.
        layer._compiled_call_impl = torch.compile(layer._call_impl, dynamic=dynamic, backend="eager")

    def compile_chart(encoder: GPSTPairEncoder, dynamic: bool) -> None:
        compiled.append(encoder)
        encoder.compile_options = {"backend": "eager"}

    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    monkeypatch.setattr(GPSTPairEncoder, "compile", compile_chart)
    arguments = TrainingArguments(output_dir="x", gradient_checkpointing=True, torch_compile=True)
    other, batches = make_run(tmp_path / "other", max_train_steps=2)
    names = list(other.model.state_dict())
    common.set_up_layers(other.model, arguments, GPSTTraining.layers_to_compile(None, other.model))
    assert len(compiled) == 5 and list(other.model.state_dict()) == names
    train(other, batches)
    for mine, theirs in zip(losses(other), losses(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    grammar = MODELS["rnng"][0]()
    assert Recipe.layers_to_compile(None, grammar) == [grammar.model.stack_lstm, grammar.model.composition.rnn]
    for flag, name in (("torch_compile", "on_lstm"), ("gradient_checkpointing", "rnng")):
        option = f"--{flag.replace('_', '-')}"
        with pytest.raises(ValueError, match=f"{option}.*{name}|{name}.*{option}"):
            common.set_up_layers(MODELS[name][0](), TrainingArguments(output_dir="x", **{flag: True}), [])


@pytest.mark.parametrize("name", ["gpst", "rnng"])
def test_bfloat16(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch --mixed_precision bf16` asks for it."""
    exact, batches = make_run(tmp_path / "exact", name)
    train(exact, batches)
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    run, batches = make_run(tmp_path / "bf16", name)
    assert run.accelerator.mixed_precision == "bf16"
    train(run, batches)
    assert losses(run)[-1]["loss"] == pytest.approx(losses(exact)[-1]["loss"], rel=0.03)
    assert losses(run) != losses(exact)
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}


# ---------------------------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("steps_between", [{"logging_steps": 4}, {"logging_steps": 9, "evaluation_steps": 4}])
def test_nan_names_the_samples(steps_between: dict[str, int], first: int, tmp_path: Path) -> None:
    """At a report of losses, or before an evaluation meets it; of several bad steps the first."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_train_steps": 9}
    run, batches = make_run(tmp_path, **sizes, **steps_between)
    bad = gpst_rows()["input_ids"][5]
    calls = []

    def poisoned(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, parts = compute_loss(model, batch)
        calls.append(loss)
        hit = (batch["input_ids"] == bad).all(1).any() and len(calls) > 2 * (first - 1)
        return loss * (torch.inf if hit else 1.0), parts

    def evaluate(model: torch.nn.Module, step: int) -> dict[str, Any]:
        assert step == 0
        return {"step": step}

    message = rf"^loss.*steps 1 and 4, first at step {first}, .* samples \[4, 5, 6, 7\]"
    raised(FloatingPointError, message, train, run, batches, poisoned, evaluate=evaluate)


def test_infinite_gradient_of_a_finite_loss(tmp_path: Path) -> None:
    run, batches = make_run(tmp_path, max_train_steps=3)

    def steep(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight = model.lm_head.weight[0, 0]
        return (weight - weight.detach()).sqrt() + 1, {}

    raised(FloatingPointError, "^gradient_norm .* step 1", train, run, batches, steep)


def test_full_disk(tmp_path: Path) -> None:
    """Files may not grow beyond a limit: the next checkpoint fails, the one before it stays, nothing else is left."""
    run, batches = make_run(tmp_path, checkpointing_steps=1, max_train_steps=3)

    def fill(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if run.state.step == 1:
            files = [path.stat().st_size for path in (tmp_path / "step_1").iterdir() if path.is_file()]
            resource.setrlimit(resource.RLIMIT_FSIZE, (max(files) // 2, limits[1]))
        return compute_loss(model, batch)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        raised(OSError, "step_2.*step_1", train, run, batches, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    again, batches = make_run(tmp_path, checkpointing_steps=1, max_train_steps=3)
    again.state = checkpoints.load_checkpoint(again.accelerator, tmp_path / "step_1", {})
    assert again.state.step == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("writer failed")])
def test_a_cut_save_leaves_nothing(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path)
    save = run.accelerator.save_state

    def fail(folder: str) -> None:
        save(folder)
        raise error

    monkeypatch.setattr(run.accelerator, "save_state", fail)
    with pytest.raises(OSError, match=f"{error.args[-1]}.*from the beginning"):
        checkpoints.save_checkpoint(run.accelerator, tmp_path, run.state, word_tokenizer([["a"]]), 2)
    assert not list(tmp_path.iterdir())


def test_a_repository_that_cannot_be_made_is_seen_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, push_to_hub=True, hub_model_id="a/b")
    created: list[str] = []
    hub = SimpleNamespace(create_repo=lambda name, **options: created.append(name))
    monkeypatch.setattr("hf_synlm.training.engine.export.HfApi", lambda: hub)
    check_repository(run.arguments)
    assert created == ["a/b"]
    monkeypatch.setattr(hub, "create_repo", lambda *args, **options: int("no token"))
    refused("'a/b'.*HF_TOKEN", check_repository, run.arguments)


def test_a_push_that_fails_says_that_the_run_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path, push_to_hub=True, hub_model_id="a/b")
    raised(RuntimeError, "hf upload a/b", push_final_model, run)


def test_a_failing_export_keeps_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, batches = make_run(tmp_path, checkpointing_steps=2, max_train_steps=3)
    train(run, batches)
    assert [folder.name for folder in checkpoints.list_checkpoints(tmp_path)] == ["step_2", "step_3"]

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hf_synlm.training.engine.export.export_model", fail)
    raised(OSError, "The model .*step_3", export_run, run, word_tokenizer([["a"]]), {}, run.output_dir / "model")


# ---------------------------------------------------------------------------------------------- numbers of words
def test_checkpoints_at_numbers_of_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step reads 45 words. What is kept stays, beside the newest checkpoint, also where the run is resumed."""
    options = {"keep_at_words": "90, 0.1K,179,180,900", "checkpointing_steps": 1, "checkpoints_total_limit": 1}
    words = word_tokenizer([[f"w{number}" for number in range(36)]])
    straight, batches = make_run(tmp_path / "straight", max_train_steps=6, **options)
    train(straight, batches, tokenizer=words)
    assert straight.state.words == 6 * 45 == 6 * int(gpst_rows()["attention_mask"].sum())
    assert names_of(tmp_path / "straight") == ["step_2", "step_3", "step_4", "step_6"]
    assert "step 3: 135 words have been read (keep_at_words)" in capsys.readouterr().out

    cut, batches = make_run(tmp_path / "cut", max_train_steps=3, **options)
    train(cut, batches, tokenizer=words)
    assert names_of(tmp_path / "cut") == ["step_2", "step_3"]
    for start in ("step_3", "step_2"):
        again, batches = make_run(tmp_path / "cut", max_train_steps=6, **options)
        loop.start_or_resume(again, tmp_path / "cut" / start, {}, no_evaluation)
        assert names_of(tmp_path / "cut")[-1] == start  # those ahead of it are deleted
        train(again, batches, tokenizer=words)
        assert again.state.words == 270 and again.state.notes["kept"] == [2, 3, 4]
        assert names_of(tmp_path / "cut") == ["step_2", "step_3", "step_4", "step_6"]

    # Where words were not counted from the beginning, their number is unknown.
    uncounted, _ = make_run(Path("x"), max_train_steps=3, checkpointing_steps=1, checkpoints_total_limit=1)
    settings = [common.course_settings(x.arguments, GPSTConfig(), x.accelerator, words) for x in (cut, uncounted)]
    assert settings[0] == {**settings[1], "keep_at_words": True}


def names_of(output_dir: Path) -> list[str]:
    return [folder.name for folder in checkpoints.list_checkpoints(output_dir)]


@pytest.mark.parametrize("given", ["1G", "1M,0", "1M;2M", "-5"])
def test_numbers_of_words_that_are_none(given: str) -> None:
    with pytest.raises(ValueError, match="keep-at-words: .* is not a number of words. Write 500K"):
        TrainingArguments(output_dir="x", keep_at_words=given)


def test_numbers_of_words() -> None:
    arguments = TrainingArguments(output_dir="x", keep_at_words="500K, 1.5M,2000000,1B")
    assert arguments.word_marks == [500_000, 1_500_000, 2_000_000, 10**9]


SENTENCES = ["the people agree", "they unquestionably agreed", "so be it"]
WORDS = [sentence.split() for sentence in SENTENCES]
PIECES = {
    "words": word_tokenizer([words[1:] for words in WORDS], end_token=True),
    "ends of words": subword_tokenizer(WORDS, 40, min_frequency=1),
    "byte-level": train_bpe_tokenizer(SENTENCES, 280),
    "wordpiece": train_wordpiece_tokenizer(SENTENCES, 40),
    "characters": character_tokenizer(SENTENCES),
}


@pytest.mark.parametrize("name", list(PIECES))
def test_words_are_counted(name: str) -> None:
    """Nine words in three sentences: in rows of their own with special tokens around them, or in one row."""
    tokenizer = PIECES[name]
    count = WordCounter(tokenizer)
    sentences = [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in SENTENCES]
    rows = [[tokenizer.eos_token_id, *ids, tokenizer.eos_token_id] for ids in sentences]
    assert count(pad_inputs(rows, tokenizer.pad_token_id)) == 9
    one = [token for ids in sentences for token in ids]
    numbers = [number for number, ids in enumerate(sentences, 1) for _ in ids]
    assert count({"input_ids": torch.tensor([one]), "sentence_ids": torch.tensor([numbers])}) == 9
    assert count({"input_ids": torch.tensor([one]), "num_words": torch.tensor(7)}) == 7


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    run, batches = make_run(tmp_path, checkpointing_steps=1, max_train_steps=2)
    train(run, batches)
    for name in ("optimizer.bin", "model.safetensors"):
        file = tmp_path / "step_2" / name
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        refused("step_2 is damaged", checkpoints.load_checkpoint, run.accelerator, tmp_path / "step_2", {})
        file.write_bytes(whole)


def test_the_best_weights_travel_with_a_checkpoint(tmp_path: Path) -> None:
    def evaluate(model: torch.nn.Module, step: int) -> dict[str, Any]:
        return {"step": step, "value": float(abs(step - 1))}

    def best_of() -> BestModel:
        return BestModel(lambda evaluation: evaluation["value"], 0)

    run, batches = make_run(tmp_path / "one", checkpointing_steps=1, evaluation_steps=1, max_train_steps=4)
    train(run, batches, evaluate=evaluate, best=best_of())
    assert [folder.name for folder in run.output_dir.glob("best_*")] == ["best_1"]
    shutil.copytree(run.output_dir / "step_3", tmp_path / "downloaded")
    kept = (run.output_dir / "best_1" / "model.safetensors").read_bytes()
    shutil.rmtree(run.output_dir)

    again, _ = make_run(tmp_path / "two", max_train_steps=4)
    again.output_dir.mkdir()
    loop.start_or_resume(again, tmp_path / "downloaded", {}, evaluate, best_of())
    assert again.state.step == 3 and (again.output_dir / "best_1" / "model.safetensors").read_bytes() == kept
    assert best_of().restore(again) == 1
    shutil.rmtree(again.output_dir / "best_1")
    (tmp_path / "downloaded" / checkpoints.BEST_FILE).unlink()
    with pytest.raises(ValueError, match="step 1, .*best_model.safetensors"):
        loop.start_or_resume(again, tmp_path / "downloaded", {}, evaluate, best_of())


def test_changed_settings_are_named(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    tokenizer = word_tokenizer([["a", "b"]])
    settings = common.course_settings(run.arguments, run.model.config, run.accelerator, tokenizer)
    run.state.settings = checkpoints.plain_settings(settings)
    folder = checkpoints.save_checkpoint(run.accelerator, tmp_path, run.state, tokenizer, 1)
    assert checkpoints.load_checkpoint(run.accelerator, folder, settings).settings == run.state.settings
    # How a tokenizer was last called changes nothing.
    tokenizer(["a b", "b"], padding=True, truncation=True, max_length=1)
    assert common.course_settings(run.arguments, run.model.config, run.accelerator, tokenizer) == settings
    run.arguments.learning_rate = 0.5
    run.model.config.window_size = 7
    two = SimpleNamespace(num_processes=2, mixed_precision="bf16", distributed_type="MULTI_CPU")
    other = common.course_settings(run.arguments, run.model.config, two, word_tokenizer([["a", "c"]]))
    with pytest.raises(ValueError) as error:
        checkpoints.load_checkpoint(run.accelerator, folder, other)
    for text in ("learning_rate 0.01 (now 0.5)", "config.window_size 2 (now 7)",
                 "num_processes 1 (now 2)", "mixed_precision 'no' (now 'bf16')", "tokenizer '"):  # fmt: skip
        assert text in str(error.value)


# ---------------------------------------------------------------------------------------------- signals
def test_stop_signals() -> None:
    # A test run in the background may have begun with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM" and signal.getsignal(signal.SIGTERM) == before
        raised(KeyboardInterrupt, None, os.kill, os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


# ---------------------------------------------------------------------------------------------- on the way
def test_steps_read_the_batches_that_the_sampler_names(tmp_path: Path) -> None:
    run, batches = make_run(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_train_steps=4)
    rows = gpst_rows()["input_ids"]
    seen = []

    def remember(model: torch.nn.Module, batch: dict[str, Any]) -> Any:
        seen.append(batch["input_ids"].clone())
        return compute_loss(model, batch)

    reports = list(steps.optimizer_steps(run, batches, remember, StopSignals()))
    assert torch.equal(torch.cat(seen), rows.repeat(2, 1)) and run.state.consumed == 16
    assert reports[0].tokens == int((gpst_rows()["attention_mask"][:4]).sum())
