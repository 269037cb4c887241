"""The training scripts: two steps on the embedded data, exact resume after a kill, and what must be refused."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from training_runs import TRAINING, kill_after_checkpoint, run_script

sys.path.insert(0, str(TRAINING))

import common  # noqa: E402
import pretrain_gpst  # noqa: E402
from text_contexts import DataArguments, load_contexts, load_text  # noqa: E402

from hf_synlm import GPSTConfig, GPSTForCausalLM  # noqa: E402

TYPES = (
    pretrain_gpst.ModelArguments,
    DataArguments,
    pretrain_gpst.EvaluationArguments,
    common.TrainingArguments,
)
SMALL = "hidden_size=32,composition_size=32,composition_intermediate_size=64,score_size=16,parser_size=32"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A few sentences of the embedded corpus, so that preprocessing takes no time."""
    from hf_synlm.data.samples import sample_path

    folder = tmp_path_factory.mktemp("corpus")
    paths = {}
    for name in ("train", "valid"):
        lines = sample_path(f"raw.{name}.txt").read_text(encoding="utf-8").splitlines()[:120]
        paths[name] = str(folder / f"{name}.txt")
        Path(paths[name]).write_text("\n".join(lines), encoding="utf-8")
    paths["cache"] = str(folder / "cache")
    return paths


def command(corpus: dict[str, str], output_dir: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, str(TRAINING / "pretrain_gpst.py"), "--config", str(TRAINING / "configs/gpst_tiny.yaml")),
        *("--output_dir", str(output_dir), "--overwrite_output_dir", "False", "--config_overrides", SMALL),
        *("--train_files", corpus["train"], "--validation_files", corpus["valid"], "--one_sentence_per_line"),
        *("--tokenizer_vocab_size", "400", "--context_length", "48", "--per_device_train_batch_size", "2"),
        *("--validation_trees", "none", "--logging_steps", "1", "--evaluation_steps", "0", *flags),
    ]


def run(corpus: dict[str, str], output_dir: Path, *flags: str) -> dict:
    return run_script(command(corpus, output_dir, *flags), output_dir, corpus["cache"])


def parse(*flags: str) -> tuple:
    return common.parse_arguments(TYPES, flags, mappings=["config_overrides"])


def test_two_steps_with_trees_and_final_report(corpus: dict[str, str], tmp_path: Path) -> None:
    flags = ("--max_train_steps", "2", "--max_tree_sentences", "6", "--validation_trees", "embedded")
    results = run(corpus, tmp_path / "out", *flags, "--search_num_beams", "2", "--report_punctuation", "remove", "keep")
    assert results["step"] == 2 and len(results["train"]) == 2
    assert set(results["train"][0]) >= {"loss", "auto_encoding", "height", "parser", "token", "action"}
    tested = results["test"]["trees"]
    assert set(tested) == {"remove", "keep"}
    for trees in (results["evaluations"][0]["trees"], *(x["sentence_and_corpus_f1"] for x in tested.values())):
        assert {"induced (inside)", "left to right (beam 2)", "left", "right", "balanced", "random"} <= set(trees)
    assert "without hf_synlm (transformers_modules." in results["stdout"]
    last = results["stdout"].strip().splitlines()[-1]
    assert last.startswith("validation loss") and "->" in last and "right" in last
    saved = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_gpst.py", "tokenizer.json", "README.md"} <= saved


def test_killed_run_resumes_bit_equal(corpus: dict[str, str], tmp_path: Path) -> None:
    flags = ("--max_train_steps", "4", "--checkpointing_steps", "2", "--gradient_accumulation_steps", "2")
    flags = (*flags, "--final_report", "False", "--prepared", str(tmp_path / "text"))
    straight = run(corpus, tmp_path / "straight", *flags)
    killed = tmp_path / "killed"
    kill_after_checkpoint(command(corpus, killed, *flags), killed, 2, corpus["cache"])
    resumed = run(corpus, killed, *flags, "--resume_from_checkpoint", "latest")
    assert "resumed from" in resumed["stdout"] and "step_2" in resumed["stdout"]
    assert resumed["train"] == straight["train"]
    assert resumed["evaluations"] == straight["evaluations"]
    weights = [path / "model" / "model.safetensors" for path in (tmp_path / "straight", killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert (tmp_path / "text" / "train" / "corpus.json").is_file() and not (killed / "text").exists()
    _, changed, _, _ = parse(*command(corpus, tmp_path / "other", *flags)[2:], "--drop_punctuation", "False")
    with pytest.raises(ValueError, match="drop_punctuation was True and is now False"):
        load_text(changed, tmp_path / "other", None)
    # Without text named, a complete folder is taken as it is.
    data = DataArguments(prepared=str(tmp_path / "text"), drop_punctuation=True)
    text = load_text(data, tmp_path / "nowhere", None)
    contexts = load_contexts(data, text.train, None)
    assert data.takes_finished and contexts.totals()["tokens"] == text.train.num_tokens


def test_output_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    arguments = common.TrainingArguments(output_dir=str(tmp_path))
    accelerator = common.make_accelerator(arguments)
    with pytest.raises(ValueError, match="is not empty.*--overwrite_output_dir"):
        common.prepare_output_dir(accelerator, arguments)
    arguments.overwrite_output_dir = True
    assert common.prepare_output_dir(accelerator, arguments) is None
    assert not any(tmp_path.iterdir())
    arguments.resume_from_checkpoint = str(tmp_path / "step_7")
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        common.prepare_output_dir(accelerator, arguments)


def test_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert common.find_checkpoint(tmp_path, "latest") is None
    for name in ("step_2", "step_10", "step_11.partial", "step_12"):
        (tmp_path / name).mkdir()
    for name in ("step_2", "step_10", "step_11.partial"):
        (tmp_path / name / common.STATE_FILE).write_text("{}")
    assert common.find_checkpoint(tmp_path, "latest") == tmp_path / "step_10"


def test_unknown_key_in_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("learning_rat: 1.0e-3\noutput_dir: x\n")
    with pytest.raises(ValueError, match="'learning_rat'.*'learning_rate'"):
        parse("--config", str(path))


def test_flags_win_over_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 5e-5\nmax_train_steps: 7\nconfig_overrides: {hidden_size: 64, window_size: 3}\n")
    flags = ("--output_dir", "x", "--max_train_steps", "9", "--config_overrides", "window_size=4")
    model, _, _, training = parse("--config", str(path), *flags)
    assert (training.learning_rate, training.max_train_steps) == (5e-5, 9)
    assert model.config_overrides == {"hidden_size": 64, "window_size": 4}


@pytest.mark.parametrize(
    "flag", ["--context_length=0", "--lr_scheduler_type=exponential", "--max_train_steps=0", "--rows=x"]
)
def test_bad_values_are_refused_before_work(flag: str) -> None:
    with pytest.raises(ValueError):
        parse("--output_dir", "x", flag)


def test_configs_parse_and_name_their_command() -> None:
    paths = sorted((TRAINING / "configs").glob("gpst_*.yaml"))
    assert len(paths) == 5
    for path in paths:
        parse("--config", str(path), "--output_dir", "x")
        text = path.read_text()
        assert text.startswith("#") and f"--config training/configs/{path.name}" in text.replace("\\\n#", "")


@pytest.mark.parametrize(("size", "millions"), [("small", 144.05), ("medium", 403.7)])
@pytest.mark.parametrize("corpus_name", ["owt", "wikitext103"])
def test_published_configs(size: str, millions: float, corpus_name: str) -> None:
    path = TRAINING / f"configs/gpst_{size}_{corpus_name}.yaml"
    model, data, _, training = parse("--config", str(path), "--output_dir", "x")
    config = GPSTConfig.from_preset(model.model_preset, **model.config_overrides)
    assert config.to_dict() == GPSTConfig.from_preset(f"gpst-{size}").to_dict()
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in GPSTForCausalLM(config).parameters())
    assert round(count / 1e6, 2 if size == "small" else 1) == millions
    contexts = 8 * training.per_device_train_batch_size * training.gradient_accumulation_steps
    assert (contexts, data.context_length) == (256, 1024)
    tokens = training.max_train_steps * contexts * data.context_length
    assert tokens == pytest.approx({"owt": 15e9, "wikitext103": 5e9}[corpus_name], rel=0.03)
    assert training.learning_rate == {"small": 5e-5, "medium": 1e-4}[size]
    assert model.parser_learning_rate == {"small": 1e-3, "medium": 2e-3}[size]
    assert (training.adam_epsilon, training.weight_decay, training.max_grad_norm) == (1e-6, 0.0, 1.0)


def test_sample_ids_do_not_depend_on_history_or_world_size() -> None:
    def ids(world_size: int, consumed: int, count: int) -> list[int]:
        batch = 12 // world_size
        ranks = [
            iter(common.StepSampler(17, batch, 5, rank, world_size, consumed)) for rank in range(world_size)
        ]  # fmt: skip
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
    with pytest.raises(ValueError, match="'lexer'"):
        common.parameter_groups(model, 1e-3, {"lexer": 1.0}, 0.0)


def test_infinite_loss_stops_the_run() -> None:
    meter = common.LossMeter(common.make_accelerator(common.TrainingArguments(output_dir="x")))
    for value in (1.0, float("inf")):
        meter.add(common.StepReport({"loss": torch.tensor(value)}, torch.tensor(0.5)))
    with pytest.raises(FloatingPointError, match="loss became NaN or infinite between steps 6 and 7"):
        meter.read(7)


def test_schedule_counts_optimizer_steps() -> None:
    arguments = common.TrainingArguments(output_dir="x", max_train_steps=10, num_warmup_steps=2, learning_rate=1.0)
    optimizer, schedule = common.make_optimizer(torch.nn.Linear(2, 2), arguments)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])
    assert schedule.get_last_lr()[0] == 0


def test_readme_names_every_script_and_config() -> None:
    readme = (TRAINING / "README.md").read_text(encoding="utf-8")
    assert "pretrain_gpst.py" in readme
    for path in (TRAINING / "configs").glob("*.yaml"):
        assert path.name in readme
        assert isinstance(yaml.safe_load(path.read_text()), dict)
