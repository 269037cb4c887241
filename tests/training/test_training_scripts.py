"""The training scripts: two steps on the embedded data, and what must be refused."""

import contextlib
import functools
import importlib
import runpy
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_synlm import GPSTConfig, GPSTForCausalLM, LSTMConfig, LSTMForCausalLM
from hf_synlm.data.collate import collate_contexts
from hf_synlm.data.contexts import ContextDataset
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.training.arguments import base as run_arguments
from hf_synlm.training.arguments.contexts import DataArguments
from hf_synlm.training.arguments.text import RecurrentModelArguments
from hf_synlm.training.arguments.treebank import RNNGModelArguments
from hf_synlm.training.engine import run as common, samplers
from hf_synlm.training.programs import pretrain_gpst, train_pcfg, train_recurrent, train_rnng
from hf_synlm.training.programs.prepare_text import prepare
from hf_synlm.training.programs.pretrain_gpst import GPSTRecipe, collate_plain
from hf_synlm.training.tasks import finetuning
from tests.helpers.refusals import refused
from tests.helpers.training_runs import SMALL_GPST, TRAINING, sample_files


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in TRAINING.glob("*_*.py") if path.stem != "make_checkpoints")
)
def test_scripts_start_the_programs_of_their_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, started = importlib.import_module(f"hf_synlm.training.programs.{name}"), Mock(return_value=0)
    monkeypatch.setattr(program, "main", started)
    with contextlib.suppress(SystemExit):  # status 0 of prepare_text
        runpy.run_path(str(TRAINING / f"{name}.py"), run_name="__main__")
    started.assert_called_once_with()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A few sentences of the embedded corpus, so that preprocessing takes no time."""
    return sample_files(tmp_path_factory.mktemp("corpus"), "raw", train=120, valid=120)


def flags_of(corpus: dict[str, str], output_dir: Path, *flags: str) -> list[str]:
    return [
        *("--config", "gpst_tiny", "--output-dir", str(output_dir)),
        *("--overwrite-output-dir", "False", "--config-overrides", SMALL_GPST),
        *("--train-files", corpus["train"], "--validation-files", corpus["valid"], "--one-sentence-per-line"),
        *("--tokenizer-vocab-size", "400", "--context-length", "48", "--per-device-train-batch-size", "2"),
        *("--validation-trees", "none", "--logging-steps", "1", "--evaluation-steps", "0", *flags),
    ]


@pytest.fixture
def run(corpus: dict[str, str], program: Callable[..., dict]) -> Callable[..., dict]:
    """Runs the program in this process; its results and what it printed."""
    return lambda output_dir, *flags: program("pretrain_gpst", flags_of(corpus, output_dir, *flags))


def parse(*flags: str) -> tuple:
    return run_arguments.parse_arguments(GPSTRecipe.parts.values(), flags)


@pytest.mark.usefixtures("warm_verify")
def test_two_steps_with_trees_and_final_report(run: Callable[..., dict], tmp_path: Path) -> None:
    flags = ("--max-train-steps", "2", "--max-tree-sentences", "6", "--validation-trees", "embedded")
    flags = (*flags, "--test-trees", "embedded")
    results = run(tmp_path / "out", *flags, "--search-num-beams", "2", "--report-punctuation", "remove", "keep")
    assert results["step"] == 2 and len(results["train"]) == 2
    assert set(results["train"][0]) >= {"loss", "auto_encoding", "height", "parser", "token", "action"}
    tested = results["test"]["trees"]
    assert set(tested) == {"remove", "keep"}
    for trees in (results["evaluations"][0]["trees"], *(x["sentence_and_corpus_f1"] for x in tested.values())):
        assert {"induced (inside)", "left to right (beam 2)", "left", "right", "balanced", "random"} <= set(trees)
    assert "computes the same without hf_synlm." in results["stdout"]
    *_, last, end = results["stdout"].strip().splitlines()
    assert end.endswith(f"Next: synlm parse FILE --model {tmp_path / 'out' / 'model'}")
    assert last.startswith("validation loss") and "->" in last
    assert AutoConfig.from_pretrained(tmp_path / "out" / "model").text_style == "no-punctuation"


def test_prepared_text_is_taken_as_it_is(run: Callable[..., dict], corpus: dict[str, str], tmp_path: Path) -> None:
    flags = ("--max-train-steps", "1", "--final-report", "False", "--prepared", str(tmp_path / "text"))
    run(tmp_path / "out", *flags)
    assert (tmp_path / "text" / "train" / "corpus.json").is_file() and not (tmp_path / "out" / "text").exists()
    _, changed, _, _ = parse(*flags_of(corpus, tmp_path / "other", *flags), "--drop-punctuation", "False")
    refused("drop_punctuation was True and is now False", prepare, changed, changed.prepared)
    # Without text named, a complete folder is enough.
    data = DataArguments(prepared=str(tmp_path / "text"), drop_punctuation=True)
    text = prepare(data, data.prepared)
    contexts = ContextDataset(text.train, data.context_length)
    assert data.takes_finished and contexts.totals()["tokens"] == text.train.num_tokens


@pytest.mark.parametrize("text", ["The old man saw the dog.\n\nThe dog saw him.\n", "A cat sat. It slept."])
def test_own_text_without_a_configuration(text: str, tmp_path: Path, program: Callable[..., dict]) -> None:
    """The smallest texts train a small model; what was chosen is said."""
    file = tmp_path / "my.txt"
    file.write_text(text)
    (own := tmp_path / "own.yaml").write_text("max_train_steps: 21\nnum_train_epochs: 0\nconfig_overrides:\n")
    argv = ("--train-files", str(file), "--output-dir", str(tmp_path / "out"), "--final-report")
    steps = ("--max-train-steps", "21", "--num-train-epochs", "0")
    argv = (*argv, *(steps if "\n" in text else ("--config", str(own))))
    found = program("pretrain_gpst", argv)
    chosen = "no --config: gpst_own_text is used" if "\n" in text else "--config names no size: gpst_own_text sets"
    told = ("--final-report: there is none without --test-trees", "step 20: the other 1 steps take about")
    for line in (chosen, *told, "0 left out as too long", "synlm evaluate perplexity FILE"):
        assert line in found["stdout"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert model.config.hidden_size == 64 and model.config.text_style is None and found["step"] == 21


def test_the_default_configuration_fits_device_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset, overrides or a model leave nothing to choose."""
    file = tmp_path / "my.txt"
    file.write_text("One. Two.")
    flags = ("--output-dir", "x", "--train-files", str(file))
    assert [GPSTRecipe.default_config(device, *parse(*flags)) for device in ("cpu", "cuda")] == ["gpst_own_text"] * 2
    for chosen in ("--model-preset=gpst-small", "--config-overrides=hidden_size=64", "--architecture=gpt2"):
        assert GPSTRecipe.default_config("cpu", *parse(*flags, chosen)) is None
    monkeypatch.setattr(pretrain_gpst, "LARGE_TEXT", 1)
    assert [GPSTRecipe.default_config(device, *parse(*flags)) for device in ("cpu", "cuda")] == ["gpst_own_text", None]


def test_configurations_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    pretrain_gpst.main(["--list-configs"])
    listed = capsys.readouterr().out
    assert "gpst_tiny" in listed and "gpst_own_text" in listed and "rnng" not in listed


def test_baseline_on_the_same_contexts(corpus: dict[str, str], tmp_path: Path, program) -> None:
    def flags(name: str, *more: str) -> list[str]:
        gpst = flags_of(corpus, tmp_path / name, "--max-train-steps", "2")
        gpst[gpst.index(SMALL_GPST)] = "n_embd=32,n_head=2,n_positions=64"
        return [flag.replace("gpst_tiny", "gpt2_tiny") for flag in gpst] + list(more)

    results = program("pretrain_gpst", flags("out"))
    assert set(results["train"][0]) == {"step", "loss", "gradient_norm"}
    assert "trees" not in results["evaluations"][-1]
    losses = results["evaluations"][-1]["losses"]
    assert losses["perplexity"] == pytest.approx(np.exp(losses["loss"]))
    assert f"; perplexity of a token {losses['perplexity']:.2f}\n" in results["stdout"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert model.config.model_type == "gpt2" and model.config.vocab_size == len(tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    batch = collate_plain([{"input_ids": [5, 6, 7], "sentence_ids": [1, 1, 2]}, {"input_ids": [8]}], 2, 0)
    assert batch["input_ids"].tolist() == [[0, 5, 6, 7], [0, 8, 2, 2]]
    assert batch["labels"].tolist() == [[0, 5, 6, 7], [0, 8, -100, -100]]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    for name, value, match in (
        ("architecture", "elman", "architecture 'elman'"),
        ("config_overrides", "n_positions=32", "context_length 48"),
        ("config_overrides", "hidden=32", "'hidden'"),
        ("model_name_or_path", "x", "model-name-or-path is 'x'"),
    ):
        refused(match, pretrain_gpst.main, flags("bad", f"--{name}", value))


def test_the_model_to_continue_from_must_be_of_the_kind_and_complete(tmp_path: Path) -> None:
    tokenizer = word_tokenizer([["a"]])
    model = LSTMForCausalLM(LSTMConfig(vocab_size=len(tokenizer), embedding_size=4, hidden_size=4, num_layers=1))
    model.save_pretrained(tmp_path / "lstm")
    loaded = common.load_pretrained(LSTMForCausalLM, str(tmp_path / "lstm"), None, tokenizer)
    assert loaded.dtype == torch.float32
    given = {"embedding_size": 4, "dropout": 1}
    changed = common.load_pretrained(LSTMForCausalLM, str(tmp_path / "lstm"), given, tokenizer)
    assert changed.config.dropout == changed.model.dropout.p == 1
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), changed.parameters(), strict=True))
    for field in ({"hidden_size": 5}, {"num_layers": 2}, {"vocab_size": 9}, {"width": 1}):
        refused(next(iter(field)), common.load_pretrained, LSTMForCausalLM, str(tmp_path / "lstm"), field, tokenizer)
    refused("'lstm_lm'.*'gpst'", common.load_pretrained, GPSTForCausalLM, str(tmp_path / "lstm"), None, tokenizer)
    refused("nowhere", common.load_pretrained, LSTMForCausalLM, str(tmp_path / "nowhere"), None, tokenizer)
    kinds = pretrain_gpst.GPSTModelArguments, RNNGModelArguments, RecurrentModelArguments, finetuning.ModelArguments
    for kind in kinds:
        refused("nowhere", kind, model_name_or_path=str(tmp_path / "nowhere"))
    refused("lstm' holds no tokenizer", finetuning.ModelArguments, model_name_or_path=str(tmp_path / "lstm"))
    weights = load_file(tmp_path / "lstm" / "model.safetensors")
    name = sorted(weights)[-1]
    del weights[name]
    save_file(weights, tmp_path / "lstm" / "model.safetensors", metadata={"format": "pt"})
    refused(name, common.load_pretrained, LSTMForCausalLM, str(tmp_path / "lstm"), None, tokenizer)


def test_trees_of_the_report_are_read_before_training(corpus: dict[str, str], tmp_path: Path) -> None:
    given = parse("--output-dir", str(tmp_path), "--test-trees", corpus["train"], "--final-report")
    refused(r"raw.train.txt:1: .* stands outside of all trees", GPSTRecipe(Mock(), *given).load)


def test_an_ended_run_has_dropped_the_wrapped_model_before_its_processes_part() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(1, 1)

    wrapped = Wrapper()
    alive, models, seen = weakref.ref(wrapped), [wrapped], []
    calls = {"wait_for_everyone": lambda: seen.append("barrier"), "end_training": lambda: seen.append(alive())}
    accelerator = SimpleNamespace(unwrap_model=lambda model: model.module, free_memory=models.clear, **calls)
    run = SimpleNamespace(accelerator=accelerator, model=wrapped, output_dir=Path("x"))
    del wrapped
    common.end_run(run)
    assert seen == ["barrier", None] and isinstance(run.model, torch.nn.Linear)


def test_unknown_key_in_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("learning_rat: 1.0e-3\noutput_dir: x\n")
    refused(r"'learning_rat'.*learning_rate\?", parse, "--config", str(path))


def test_flags_win_over_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 5e-5\nmax_train_steps: 7\nconfig_overrides: {hidden_size: 64, window_size: 3}\n")
    flags = ("--output-dir", "x", "--max-train-steps", "9", "--config-overrides", "window_size=4")
    model, _, _, training = parse("--config", str(path), *flags)
    assert (training.learning_rate, training.max_train_steps) == (5e-5, 9)
    assert model.config_overrides == {"hidden_size": 64, "window_size": 4}


# Every program checks what it is given before it reads data.
GPST, RNNG, RECURRENT = GPSTRecipe, train_rnng.RNNGRecipe, train_recurrent.RecurrentRecipe
PCFG = train_pcfg.PCFGRecipe
# Options whose name the message has, each alone.
NAMED = {
    GPST: ["--max-train-steps 0", "--context-length 0"],
    RNNG: ["--max-batch-actions 0", "--num-beams 0"],
    RECURRENT: ["--gradient-checkpointing", "--bptt 0", "--num-train-epochs -1", "--averaging-epoch 0",
                "--plateau-factor 1", "--averaging-learning-rate 0", "--parsing-max-words 0", "--parse-sentences -1"],
    PCFG: ["--curriculum-growth -1", "--max-sentence-words 0"],
}  # fmt: skip


BAD_VALUES = [
    *((recipe, given, given.split()[0]) for recipe, every in NAMED.items() for given in every),
    (GPST, "--max-grad-norm -1", "--max-grad-norm.* -1"),
    (GPST, "--learning-rate nan", "learning-rate.* nan"),
    (GPST, "--push-to-hub", "--hub-model-id"),
    (GPST, "--with-tracking --report-to paper", "report-to is 'paper'"),
    (GPST, "--with-tracking --report-to wandb", "pip install wandb"),
    (GPST, "--lr-scheduler-type exponential", "'exponential' .*linear.*cosine"),
    (GPST, "--rows x", "--rows.*'x'"),
    (GPST, "--config gpst_tinny", "'gpst_tinny'.* gpst_tiny\\?"),
    (RNNG, "--architecture gru", "architecture is 'gru'"),
    (RNNG, "--tokenizer-type bpe --lowercase", "lowercase"),
    (RNNG, "--report-punctuation none", "--report-punctuation.*'none'"),
    (RECURRENT, "--architecture gru", "architecture is 'gru'"),
    (RECURRENT, "--tokenizer-type characters --lowercase", "lowercase is True"),
    (RECURRENT, "--file-format text", "--train-files"),
    (RECURRENT, "--file-format text --tree-supervision", "tree-supervision is True"),
    (RECURRENT, f"--train-files {__file__}", "--validation-files"),
    (RECURRENT, "--train-files nowhere.txt --validation-files nowhere.txt", "nowhere.txt"),
    (RECURRENT, "--schedule adam-plateau --finetuning-epoch 3", "finetuning-epoch"),
    (RECURRENT, "--lr-scheduler-type linear", "lr-scheduler-type is 'linear'"),
    (RECURRENT, "--evaluation-steps 10", "evaluation"),
    (RECURRENT, "--parsing-convention wsj", "--parsing-convention.*'wsj'"),
    (PCFG, "--architecture gru", "architecture is 'gru'"),
    (PCFG, "--curriculum-words 1", "curriculum-words is 1, .* Use 0 or at least 2"),
    (PCFG, "--bptt 9", "--bptt is not an option"),
]


@pytest.mark.parametrize(("recipe", "flags", "message"), BAD_VALUES)
def test_bad_values_are_refused_before_work(recipe: type, flags: str, message: str) -> None:
    refused(message, run_arguments.parse_arguments, recipe.parts.values(), ["--output-dir", "x", *flags.split()])


def test_sample_ids_do_not_depend_on_history_or_world_size() -> None:
    def ids(world_size: int, consumed: int, count: int) -> list[int]:
        sizes = 17, 12 // world_size, 5
        ranks = [iter(samplers.StepSampler(*sizes, rank, world_size, consumed)) for rank in range(world_size)]
        return [k for _ in range(count) for rank in ranks for k in next(rank)]

    whole = ids(1, 0, 10)
    assert ids(3, 0, 10) == whole
    assert ids(1, 48, 6) == whole[48:]
    assert sorted(whole[:17]) == list(range(17)) and whole[:17] != whole[17:34]


def test_parser_has_its_own_learning_rate() -> None:
    model = torch.nn.ModuleDict({"parser": torch.nn.Linear(2, 2), "rest": torch.nn.Linear(2, 2)})
    groups = common.parameter_groups(model, 1e-3, {"parser": 5e-3}, 0.1)
    rates = {(group["lr"], group["weight_decay"]): len(group["params"]) for group in groups}
    assert rates == {(5e-3, 0.1): 1, (5e-3, 0.0): 1, (1e-3, 0.1): 1, (1e-3, 0.0): 1}
    assert {(group["lr"], group["name"]) for group in groups} == {(5e-3, "parser"), (1e-3, "")}
    (one,) = common.parameter_groups(model, 1e-3, {"parser": 1e-3}, 0.0)
    assert one["name"] == ""
    refused("'lexer'", common.parameter_groups, model, 1e-3, {"lexer": 1.0}, 0.0)


def test_schedule_counts_optimizer_steps() -> None:
    given = {"max_train_steps": 10, "num_warmup_steps": 2, "learning_rate": 1.0}
    arguments = run_arguments.TrainingArguments(output_dir="x", **given)
    optimizer, schedule = common.make_optimizer(torch.nn.Linear(2, 2), arguments)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])
    assert schedule.get_last_lr()[0] == 0


def test_validation_losses_do_not_depend_on_the_batches(tiny_gpst_config: GPSTConfig) -> None:
    model = GPSTForCausalLM(tiny_gpst_config)
    contexts = [
        {"input_ids": torch.randint(10, tiny_gpst_config.vocab_size, (n,)).tolist(), "sentence_ids": ids}
        for n, ids in ((7, [1, 1, 1, 2, 2, 2, 2]), (2, [1, 1]), (9, [1] * 9), (4, [1, 2, 3, 4]), (5, [1, 1, 1, 1, 2]))
    ]
    accelerator = common.make_accelerator(run_arguments.TrainingArguments(output_dir="x"))
    collate = functools.partial(collate_contexts, pad_token_id=tiny_gpst_config.pad_token_id)
    one, two, five = (pretrain_gpst.evaluate_losses(accelerator, model, contexts, collate, size) for size in (1, 2, 5))
    assert one == pytest.approx(five, rel=1e-5) and two == pytest.approx(five, rel=1e-5)
    model.eval()
    whole = model(**collate(contexts))
    assert five == pytest.approx({k: v.item() for k, v in {"loss": whole.loss, **whole.losses}.items()}, rel=1e-5)


def test_errors_of_users_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpst.py", "--output-dir", "x", "--trainfiles", "a.txt"])
    with pytest.raises(SystemExit) as stopped:
        pretrain_gpst.main()
    assert stopped.value.code == 2
    expected = "Error: --trainfiles is not an option of this program. Did you mean --train-files?\n"
    assert capsys.readouterr().err == expected
    (tmp_path / "my.txt").write_text("One. Two.")
    words = ["--train-files", str(tmp_path / "my.txt"), "--config", "gpst_tiny", "--config-overrides=hidden_size=null"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "argv", ["pretrain_gpst.py", "--output-dir", str(tmp_path / "run"), *words])
        pretrain_gpst.main()
    assert capsys.readouterr().err.endswith("Error: Field 'hidden_size' expected int, got NoneType (value: None)\n")
    for twice, value in (("--train-files", "a.txt"), ("--config", "gpst_tiny")):
        refused(f"{twice} is given 2 times. Give it once", parse, "--output-dir", "x", twice, value, twice, value)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["synlm train gpst", "--seed", "1", "--output-dir", "x", "--seed", "2"])
        refused("--seed is given 2 times. Give it once", run_arguments.parse_arguments, GPSTRecipe.parts.values())
    assert parse("--seed", "1", "--output-dir", "x", "--seed", "2")[-1].seed == 2  # of a list, the last one counts
    monkeypatch.setenv("HF_SYNLM_TRACEBACK", "1")
    refused("--train-files", pretrain_gpst.main)


def test_errors_of_other_libraries_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_SYNLM_TRACEBACK", raising=False)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpst.py", "--output-dir", "x"])
    monkeypatch.setattr(GPSTRecipe, "check", lambda recipe: np.zeros(2).reshape(3))
    refused("reshape", pretrain_gpst.main)
