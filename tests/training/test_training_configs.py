"""The shipped configurations: they parse, name their command, and have the sizes and values of the papers."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from hf_synlm.training.architectures import ARCHITECTURES
from hf_synlm.training.arguments.base import check_overrides, parse_arguments
from hf_synlm.training.engine.recipe import Recipe
from hf_synlm.training.programs import (
    train_pcfg,
    train_pushdown,
    train_recurrent,
    train_rnng,
    train_span_parser,
    train_tree_lm,
    train_urnng,
)
from hf_synlm.training.programs.finetune_glue import GlueRecipe
from hf_synlm.training.programs.finetune_grammar_induction import InductionRecipe
from hf_synlm.training.programs.finetune_summarization import SummarizationRecipe
from hf_synlm.training.programs.pretrain_gpst import GPSTRecipe
from hf_synlm.training.tasks.text_recipe import TextRecipe, gold_structure
from hf_synlm.training.tasks.treebank_recipe import TreebankRecipe
from tests.helpers.training_runs import PACKAGE_FILES, last_wins, sample_treebank

FINE_TUNING_RECIPES = (GlueRecipe, SummarizationRecipe, InductionRecipe)
RECIPES = {recipe.program: recipe for recipe in (
    GPSTRecipe, train_rnng.RNNGRecipe, train_tree_lm.TreeLMRecipe, train_urnng.URNNGRecipe,
    train_pushdown.PushdownRecipe, train_recurrent.RecurrentRecipe, train_pcfg.PCFGRecipe,
    train_span_parser.SpanParserRecipe, *FINE_TUNING_RECIPES,
)}  # fmt: skip
# Those of programs that use `Trainer` are in test_treereg.py and test_tree_planting.py.
OF_TRAINER = ("treereg_bllip", "treereg_tiny", "tree_planting_tiny")
CONFIGS = sorted(path for path in (PACKAGE_FILES / "configs").glob("*.yaml") if path.stem not in OF_TRAINER)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A treebank and a text, which configurations of corpora with a licence read."""
    paths = sample_treebank(tmp_path_factory.mktemp("trees"), train=6)
    return {"trees": paths["train"], "text": paths["train.words"]}


def parse(name: str, files: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """The recipe of a configuration, and its arguments by name of the field."""
    text = (PACKAGE_FILES / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    recipe = RECIPES[re.search(r"training/(\w+)\.py", text)[1]]
    given = files["text" if "file_format: text" in text else "trees"]
    flags = ["--config", name, "--output-dir", "x"]
    for flag in re.findall(r"--([\w-]+-(?:files?|trees))", text.partition("\n\n")[0]):
        flags += [f"--{flag}", given]
    for key in re.findall(r"(?m)^(\w+_(?:files|trees)): (?!\[?embedded)", text):
        flags += [f"--{key}", given]
    if issubclass(recipe, FINE_TUNING_RECIPES):
        flags += ["--model-name-or-path", str(PACKAGE_FILES.parents[1] / "model_cards" / "gpst-tiny")]
        flags += ["--task-name", "rte"] if name == "glue" else []
    if recipe is train_span_parser.SpanParserRecipe:
        flags += ["--encoder", "name-on-the-hub"]
    parsed = parse_arguments(recipe.parts.values(), last_wins(flags))
    return recipe, {key: value for part in parsed for key, value in vars(part).items()}


def test_the_table_of_architectures_says_what_the_recipes_are() -> None:
    assert set(ARCHITECTURES) == {name for name, recipe in RECIPES.items() if recipe not in FINE_TUNING_RECIPES}
    for program, rows in ARCHITECTURES.items():
        recipe = RECIPES[program]
        arguments = recipe.parts["model_arguments"]
        assert arguments.__dataclass_fields__["architecture"].default == next(iter(rows))
        for row in rows.values():
            tasks = {"treebank": issubclass(recipe, TreebankRecipe), "text": issubclass(recipe, TextRecipe)}
            assert [task for task, found in tasks.items() if found] == [row.task] * (row.task in tasks)
            assert (recipe.prepare is not Recipe.prepare) == (row.learner != "default")
            if row.model is not None:
                assert not row.preset or row.preset in row.model_class.config_class.presets


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
    row = ARCHITECTURES["train_recurrent"][values["architecture"]]
    model_class = row.model_class
    assert name.startswith(values["architecture"])
    overrides = check_overrides(model_class.config_class, values["config_overrides"])
    config = model_class.config_class.from_preset(values["model_preset"] or row.preset, **overrides)
    gold = gold_structure(config, values["tree_supervision"])
    assert (gold is not None) == ("syd" in name or "palm_s" in name)
    assert values["num_train_epochs"] > values["finetuning_epoch"]
    if "tiny" not in name:
        schedules = {"on_lstm": "sgd-asgd", "awd_lstm": "sgd-asgd", "palm": "adam-asgd", "prpn": "adam-plateau"}
        assert values["schedule"] == schedules[values["architecture"]]
        rates = {"sgd-asgd": 30, "adam-asgd": 1e-3, "adam-plateau": 1e-3 if name == "prpn_wsj10" else 3e-3}
        assert values["learning_rate"] == rates[values["schedule"]]
    if config.gives_trees:  # what parse would refuse is refused here, not after an epoch
        assert set(values["parse_options"]) <= set(inspect.signature(model_class.parse).parameters)


@pytest.mark.parametrize("corpus", ["owt", "wikitext103"])
@pytest.mark.parametrize("size", ["small", "medium"])
def test_published_gpst(size: str, corpus: str, files: dict[str, str]) -> None:
    _, values = parse(f"gpst_{size}_{corpus}", files)
    contexts = 8 * values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    tokens = values["max_train_steps"] * contexts * values["context_length"]
    assert contexts == 256 and tokens == pytest.approx({"owt": 15e9, "wikitext103": 5e9}[corpus], rel=0.03)
    published = {
        "model_preset": f"gpst-{size}", "config_overrides": {}, "context_length": 1024, "adam_epsilon": 1e-6,
        "learning_rate": {"small": 5e-5, "medium": 1e-4}[size], "weight_decay": 0.0, "max_grad_norm": 1.0,
        "parser_learning_rate": {"small": 1e-3, "medium": 2e-3}[size],
    }  # fmt: skip
    assert published.items() <= values.items()


DROPOUT = {"config_overrides": {"dropout": 0.1}}
GRAMMARS = {
    **DROPOUT, "batch": 512, "max_batch_actions": 26000, "batch_group_size": 4096, "learning_rate": 1e-3,
    "lr_scheduler_type": "constant", "warmup_ratio": 0, "num_warmup_steps": None,
}  # fmt: skip
SURFACE = {**DROPOUT, "num_warmup_steps": 8000, "lr_scheduler_type": "cosine", "max_grad_norm": 3.0}
FINE_TUNING = {"learning_rate": 5e-5, "parser_learning_rate": 1e-3, "batch": 16, "num_train_epochs": 15}
SUMMARIES = {**FINE_TUNING, "prompt": "Summary:", "max_source_length": 900, "max_target_length": 100}


PUBLISHED = [
    # The sizes of presets are tested in tests/models.
    ("rnng_ptb", 1, {**GRAMMARS, "model_preset": "rnng-15m", "tokenizer_vocab_size": 50000}),
    ("rnng_ptb_subwords", 1, {**GRAMMARS, "model_preset": "rnng-35m", "tokenizer_vocab_size": 30720}),
    ("lstm_ptb", 1, {**GRAMMARS, "model_preset": "lstm-15m", "tokenizer_vocab_size": 50000}),
    ("lstm_ptb_subwords", 1, {**GRAMMARS, "model_preset": "lstm-35m", "tokenizer_vocab_size": 30720}),
    ("on_lstm_ptb", 1, {"model_preset": "on-lstm-ptb", "config_overrides": {}}),
    ("prpn_ptb", 1, {"model_preset": "prpn-ptb-word", "config_overrides": {}}),
    ("palm_ptb", 1, {"model_preset": "palm-ptb", "config_overrides": {}}),
    ("awd_lstm_ptb", 1, {"model_preset": "awd-lstm-ptb", "config_overrides": {}}),
    ("tree_lm_bllip", 1, {**SURFACE, "model_preset": "transformer-grammar", "learning_rate": 1.5e-4,
                          "max_train_steps": 108_000, "batch": 64, "adam_epsilon": 1e-8}),
    ("pushdown_bllip", 1, {**SURFACE, "model_preset": "pushdown-bllip", "learning_rate": 1e-4,
                           "max_train_steps": 300_000, "batch": 120, "adam_epsilon": 1e-7}),
    ("glue", 8, {**FINE_TUNING, "num_train_epochs": 20, "batch": 512}),
    ("induction_ptb", 8, {**FINE_TUNING, "num_train_epochs": 10, "batch": 32}),
    ("summarization_xsum", 8, SUMMARIES),
    ("summarization_cnn_dailymail", 8, SUMMARIES),
    ("summarization_gigaword", 8, {**SUMMARIES, "num_train_epochs": 10, "batch": 64, "max_source_length": 400,
                                   "max_target_length": 120}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "processes", "published"), PUBLISHED)
def test_published_values(name: str, processes: int, published: dict[str, Any], files: dict[str, str]) -> None:
    _, values = parse(name, files)
    rows = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert published.items() <= {**values, "batch": processes * rows}.items()
