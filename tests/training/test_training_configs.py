"""The shipped configurations: they parse, name their command, and have the sizes and values of the papers."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.data.treebank import read_treebank
from hf_synlm.training.engine.arguments import check_overrides, parse_arguments
from hf_synlm.training.programs import train_pushdown, train_recurrent, train_rnng, train_tree_lm, train_urnng
from hf_synlm.training.programs.finetune_glue import GlueRecipe
from hf_synlm.training.programs.finetune_grammar_induction import InductionRecipe
from hf_synlm.training.programs.finetune_summarization import SummarizationRecipe
from hf_synlm.training.programs.pretrain_gpst import GPSTRecipe
from tests.helpers.training_runs import PACKAGE_FILES, sample_files

RECIPES = (GPSTRecipe, train_rnng.RNNGRecipe, train_tree_lm.TreeLMRecipe, train_urnng.URNNGRecipe)
RECIPES = (
    *RECIPES,
    train_pushdown.PushdownRecipe,
    train_recurrent.RecurrentRecipe,
    GlueRecipe,
    SummarizationRecipe,
    InductionRecipe,
)
RECIPES = {recipe.program: recipe for recipe in RECIPES}
# Those of programs that use `Trainer` are in test_treereg.py and test_tree_planting.py.
OF_TRAINER = ("treereg_bllip", "treereg_tiny", "tree_planting_tiny")
CONFIGS = sorted(path for path in (PACKAGE_FILES / "configs").glob("*.yaml") if path.stem not in OF_TRAINER)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A treebank and a text, which configurations of corpora with a licence read."""
    paths = sample_files(tmp_path_factory.mktemp("trees"), "trees", train=6)
    words = [" ".join(sentence.words) for sentence in read_treebank(paths["train"])]
    (text := Path(paths["train"]).with_name("words.txt")).write_text("\n".join(words), encoding="utf-8")
    return {"trees": paths["train"], "text": str(text)}


def parse(name: str, files: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """The recipe of a configuration, and its arguments by name of the field."""
    text = (PACKAGE_FILES / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    recipe = RECIPES[re.search(r"training/(\w+)\.py", text)[1]]
    given = files["text" if "file_format: text" in text else "trees"]
    flags = ["--config", name, "--output_dir", "x"]
    for flag in re.findall(r"--(\w+_(?:files?|trees))", text.partition("\n\n")[0]):
        flags += [f"--{flag}", given]
    for key in re.findall(r"(?m)^(\w+_(?:files|trees)): (?!\[?embedded)", text):
        flags += [f"--{key}", given]
    if issubclass(recipe, (GlueRecipe, SummarizationRecipe, InductionRecipe)):
        flags += ["--model_name_or_path", "a/b"] + (["--task_name", "rte"] if name == "glue" else [])
    parsed = parse_arguments(recipe.argument_types(), flags, recipe.mappings)
    return recipe, {key: value for part in parsed for key, value in vars(part).items()}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_parse_and_name_their_command(path: Path, files: dict[str, str]) -> None:
    text = " ".join(line.strip("# \\") for line in path.read_text(encoding="utf-8").splitlines())
    assert f"--config {path.stem} " in text
    recipe, values = parse(path.stem, files)
    if recipe is train_rnng.RNNGRecipe:
        assert path.stem.startswith(values["architecture"])
        assert values["weight_decay"] == 0.0 and values["max_grad_norm"] == 5.0
    if recipe is train_recurrent.RecurrentRecipe:
        check_recurrent(path.stem, values)


def check_recurrent(name: str, values: dict[str, Any]) -> None:
    """Supervision, schedule and options of `parse` go with the architecture."""
    model_class = train_recurrent.MODELS[values["architecture"]]
    assert name.startswith(values["architecture"])
    overrides = check_overrides(model_class.config_class, values["config_overrides"])
    config = model_class.config_class.from_preset(values["model_preset"], **overrides)
    gold = train_recurrent.gold_structure(config, values["tree_supervision"])
    assert (gold is not None) == ("syd" in name or "palm_s" in name)
    assert values["num_train_epochs"] > values["finetuning_epoch"]
    if "tiny" not in name:
        schedules = {"on_lstm": "sgd-asgd", "awd_lstm": "sgd-asgd", "palm": "adam-asgd", "prpn": "adam-plateau"}
        assert values["schedule"] == schedules[values["architecture"]]
        rates = {"sgd-asgd": 30, "adam-asgd": 1e-3, "adam-plateau": 1e-3 if name == "prpn_wsj10" else 3e-3}
        assert values["learning_rate"] == rates[values["schedule"]]
    if config.gives_trees:  # what parse would refuse is refused here, not after an epoch
        assert set(values["parse_options"]) <= set(inspect.signature(model_class.parse).parameters)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("rnng_ptb", 15.2), ("rnng_ptb_subwords", 35.3), ("lstm_ptb", 15.1), ("lstm_ptb_subwords", 35.3),
        ("on_lstm_ptb", 25.2), ("prpn_ptb", 43.6), ("palm_ptb", 23.6), ("awd_lstm_ptb", 24.2),
        ("tree_lm_bllip", 251.9), ("pushdown_bllip", 440.6),
    ],
)  # fmt: skip
def test_published_sizes(name: str, millions: float, files: dict[str, str]) -> None:
    recipe, values = parse(name, files)
    program = train_recurrent if recipe is train_recurrent.RecurrentRecipe else train_rnng
    model_class = program.MODELS[values["architecture"]]
    sizes = {"vocab_size": 10000} if recipe is train_recurrent.RecurrentRecipe else values["config_overrides"]
    config = model_class.config_class.from_preset(values["model_preset"], **sizes)
    with torch.device("meta"):
        model = model_class(config)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions
    if recipe is train_rnng.RNNGRecipe:
        expected = {
            "max_batch_actions": 26000, "batch_group_size": 4096, "per_device_train_batch_size": 512,
            "learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_ratio": 0, "num_warmup_steps": None,
            "tokenizer_vocab_size": config.vocab_size,
        }  # fmt: skip
        assert {key: values[key] for key in expected} == expected and config.dropout == 0.1
        assert values["early_stopping_patience"] > 0 and values["num_train_epochs"]


@pytest.mark.parametrize(
    ("name", "rate", "steps", "batch", "epsilon"),
    [("tree_lm_bllip", 1.5e-4, 108_000, 64, 1e-8), ("pushdown_bllip", 1e-4, 300_000, 120, 1e-7)],
)
def test_published_schedules(
    name: str, rate: float, steps: int, batch: int, epsilon: float, files: dict[str, str]
) -> None:
    _, values = parse(name, files)
    assert (values["learning_rate"], values["max_train_steps"], values["adam_epsilon"]) == (rate, steps, epsilon)
    assert values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] == batch
    assert (values["num_warmup_steps"], values["lr_scheduler_type"], values["max_grad_norm"]) == (8000, "cosine", 3.0)


@pytest.mark.parametrize(("size", "millions"), [("small", 144.05), ("medium", 403.7)])
@pytest.mark.parametrize("corpus", ["owt", "wikitext103"])
def test_published_gpst(size: str, millions: float, corpus: str, files: dict[str, str]) -> None:
    _, values = parse(f"gpst_{size}_{corpus}", files)
    config = GPSTConfig.from_preset(values["model_preset"], **values["config_overrides"])
    assert config.to_dict() == GPSTConfig.from_preset(f"gpst-{size}").to_dict()
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in GPSTForCausalLM(config).parameters())
    assert round(count / 1e6, 2 if size == "small" else 1) == millions
    contexts = 8 * values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert (contexts, values["context_length"]) == (256, 1024)
    tokens = values["max_train_steps"] * contexts * values["context_length"]
    assert tokens == pytest.approx({"owt": 15e9, "wikitext103": 5e9}[corpus], rel=0.03)
    assert values["learning_rate"] == {"small": 5e-5, "medium": 1e-4}[size]
    assert values["parser_learning_rate"] == {"small": 1e-3, "medium": 2e-3}[size]
    assert (values["adam_epsilon"], values["weight_decay"], values["max_grad_norm"]) == (1e-6, 0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "epochs", "batch", "lengths"),
    [
        ("glue", 20, 512, None), ("induction_ptb", 10, 32, None), ("summarization_xsum", 15, 16, (900, 100)),
        ("summarization_cnn_dailymail", 15, 16, (900, 100)), ("summarization_gigaword", 10, 64, (400, 120)),
    ],
)  # fmt: skip
def test_published_fine_tuning(
    name: str, epochs: int, batch: int, lengths: tuple | None, files: dict[str, str]
) -> None:
    _, values = parse(name, files)
    size = 8 * values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert (values["num_train_epochs"], size) == (epochs, batch)
    assert (values["learning_rate"], values["parser_learning_rate"]) == (5e-5, 1e-3)
    if lengths is not None:
        assert (values["max_source_length"], values["max_target_length"]) == lengths and values["prompt"] == "Summary:"


def test_configurations_are_found_by_name_or_path(files: dict[str, str]) -> None:
    types, path = GPSTRecipe.argument_types(), str(PACKAGE_FILES / "configs" / "gpst_small_owt.yaml")
    flags = ("--output_dir", "x", "--config")
    by_name, by_path = (
        parse_arguments(types, [*flags, config], GPSTRecipe.mappings) for config in ("gpst_small_owt", path)
    )
    assert list(map(dataclasses.asdict, by_name)) == list(map(dataclasses.asdict, by_path))
