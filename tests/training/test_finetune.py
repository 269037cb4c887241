"""Fine-tuning: scores against their formulas, input layouts, runs of all three scripts, exact resume, refusals."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from tokenizers.processors import TemplateProcessing

import hf_synlm
from hf_synlm.data.tokenizers import add_classification_template, train_wordpiece_tokenizer
from hf_synlm.evaluation.results import load_result
from hf_synlm.evaluation.suites.glue import GLUE_TASKS, TextTask, check_labels, glue_task, main_score, task_scores
from hf_synlm.evaluation.suites.rouge import rouge_scores, sentences_as_lines
from hf_synlm.evaluation.summary import summarize
from hf_synlm.evaluation.text.words import unknown_ids
from hf_synlm.evaluation.trees.gold_treebank import score_trees
from hf_synlm.evaluation.trees.treebank_parsing import parse_words
from hf_synlm.training.arguments.base import TrainingArguments, parse_arguments
from hf_synlm.training.arguments.finetuning import name_split
from hf_synlm.training.engine.export import hub_facts
from hf_synlm.training.engine.recipe import kept_evaluation
from hf_synlm.training.engine.samplers import seed_micro_step
from hf_synlm.training.programs import finetune_glue, finetune_grammar_induction, finetune_summarization
from hf_synlm.training.programs.finetune_summarization import ContextCollator, ContextLayout
from hf_synlm.training.tasks import example_tables
from hf_synlm.training.tasks.example_tables import load_table
from tests.helpers import two_processes
from tests.helpers.documentation import ROOT, blocks
from tests.helpers.finetuning import SENTENCES, command, write_files, write_models, write_rows
from tests.helpers.refusals import refused
from tests.helpers.training_runs import TRAINING, reset_accelerate, results_of

# ---------------------------------------------------------------------------------------------- scores
CLASSES = TextTask("x", ("a",), ("no", "yes"), ("accuracy", "f1", "matthews_correlation"))
NUMBERS = GLUE_TASKS["stsb"]


def test_scores_of_constants() -> None:
    """Others are compared with the package `evaluate` in test_metrics.py."""
    for task, gold, predicted, expected in (
        (CLASSES, [0, 1, 1], [0, 0, 0], (1 / 3, 0.0, 0.0)),
        (CLASSES, [0, 0], [0, 0], (1.0, 0.0, 0.0)),
        (NUMBERS, [0, 1, 2], [1, 1, 1], (0.0, 0.0)),
    ):
        assert task_scores(task, predicted, gold) == pytest.approx(dict(zip(task.metrics, expected, strict=True)))


def test_names_of_glue_tasks() -> None:
    assert [glue_task(name).name for name in ("CoLA", "SST-2", "sts_b", "MNLI")] == ["cola", "sst2", "stsb", "mnli"]
    assert main_score(NUMBERS, {"pearson": 0.5, "spearmanr": 0.7}) == pytest.approx(0.6)
    refused("sst3", glue_task, "sst3")


def test_bad_labels_are_refused() -> None:
    place = ".counted from 0. is not"
    refused(f"label 2 of row 1 {place} an id from 0 to 1", check_labels, CLASSES, np.array([0, 2]), "file.csv")
    refused(f"label nan of row 0 {place} a finite number", check_labels, NUMBERS, np.array([float("nan")]), "file.csv")


def test_rouge_takes_the_best_of_several_references_and_splits_sentences() -> None:
    scores = rouge_scores(["a b c", ""], [["x y z", "a b c"], "a b c"])
    assert scores["rouge1"] == scores["rougeLsum"] == pytest.approx(50)
    assert scores["rouge_average"] == pytest.approx((scores["rouge1"] + scores["rouge2"] + scores["rougeL"]) / 3)
    lines = sentences_as_lines("It rained. Dr. Smith left.\nNobody saw him").split("\n")
    assert lines == ["It rained.", "Dr. Smith left.", "Nobody saw him"]
    refused("document 1", rouge_scores, ["a", "b"], ["a", " "])
    refused("shorter", rouge_scores, ["a", "b"], ["a"])


# ---------------------------------------------------------------------------------------------- models and files
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The cache of `datasets` belongs to these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    reset_accelerate()


SCRIPTS = {"glue": finetune_glue, "summarization": finetune_summarization, "induction": finetune_grammar_induction}


def run(script: str, model: Path | str, files: dict[str, str], output_dir: Path, *flags: str) -> dict[str, Any]:
    reset_accelerate()
    SCRIPTS[script].main(command(script, model, files, output_dir, *flags))
    return json.loads((output_dir / "all_results.json").read_text())


# Four steps.
RUNS = {
    "glue": ("--max-train-steps", "4", "--evaluation-steps", "1"),
    "summarization": ("--max-train-steps", "4", "--evaluation-steps", "2", "--num-validation-summaries", "2",
                      "--summary-column", "references", "--summary-loss-only"),
    "induction": ("--max-train-steps", "9", "--num-train-epochs", "2", "--per-device-train-batch-size", "12",
                  "--config-overrides", "stop_structure_gradient=false,token_loss_weight=1.0,surrogate=false"),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(models: Path, files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """(script, model) -> results and folder of a run, which is made once for all tests."""

    @functools.cache
    def make(script: str, name: str) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp(f"{script}_{name}") / "out"
        few = ("--max-eval-samples", "2") if name == "rnng" else ()  # which searches every example
        both = ("--objective-weight", "1") if script == "glue" and name in ("gpst", "rnng") else ()
        return run(script, models / name, files, folder, *RUNS[script], *few, *both), folder

    return make


# ---------------------------------------------------------------------------------------------- layouts
def test_layout_of_glue_and_its_sentences_in_gpst(models: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "gpst")
    sep, cls = tokenizer.sep_token_id, tokenizer.cls_token_id
    a, b = (tokenizer([text])["input_ids"][0] for text in ("the house", "a nation"))
    add_classification_template(tokenizer)
    encode = finetune_glue.encode_texts
    assert encode([["the house"], ["a nation"]], tokenizer, 99)["input_ids"] == [[*a, sep, *b, cls]]
    assert encode([["the house"]], tokenizer, 99)["input_ids"] == [[*a, cls]]
    assert encode([["the house"]], tokenizer, 3)["input_ids"] == [[*a[:2], cls]]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(models / "gpst")
    ids = torch.tensor([[*a, sep, *b, cls]])
    expected = [1] * len(a) + [2] + [3] * len(b) + [4]
    assert model.sentence_ids(ids, torch.ones_like(ids, dtype=torch.bool)).tolist() == [expected]


def test_a_tokenizer_with_a_layout_of_its_own_keeps_it() -> None:
    tokenizer = train_wordpiece_tokenizer(SENTENCES, 300)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    add_classification_template(tokenizer)
    batch = {"sentence1": ["the house", "we"], "sentence2": ["a nation of laws", "you"]}
    encoded = finetune_glue.encode_batch(batch, [0, 1], tokenizer, GLUE_TASKS["rte"], np.array([0, 1]), 32, None)
    assert encoded["input_ids"][0][0] == cls and encoded["input_ids"][0].count(sep) == 2
    assert max(encoded["token_type_ids"][0]) == 1


def test_tokens_of_unknown_words(models: Path) -> None:
    """Classes of them count; an unknown token that also ends texts does not."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TRAINING.parent / "model_cards" / "rnng-tiny")
    read = tokenizer("Zebras hesitated in the country")["input_ids"]
    assert [token in unknown_ids(tokenizer) for token in read] == [True, True, False, False, False]
    pieces = train_wordpiece_tokenizer(SENTENCES, 300)
    assert unknown_ids(pieces) == {pieces.unk_token_id}
    pieces.eos_token = pieces.unk_token
    assert not unknown_ids(pieces)
    assert unknown_ids(transformers.ByT5Tokenizer()) == {2}  # has no fast form


def test_long_training_examples_are_left_out_before_the_cut(models: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "gpst")
    batch = {"sentence": ["we", "we the people of the united states " * 3, "so"]}
    encoded = finetune_glue.encode_batch(batch, [5, 6, 7], tokenizer, GLUE_TASKS["cola"], np.arange(9), 64, 10)
    assert encoded["labels"] == [5, 7] and len(encoded["input_ids"]) == 2


def layout(**changes: Any) -> ContextLayout:
    values = {"by_sentences": True, "begin_ids": (), "end_id": 1}
    limits = {"max_source_length": changes.pop("max_source", 1000), "max_target_length": changes.pop("max_target", 100)}
    data = finetune_summarization.SummaryArguments(dataset_name="x", **limits)
    return ContextLayout(data, **{**values, **changes})


def test_layout_of_a_summary(models: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "gpst")
    ids = {text: tokenizer(text)["input_ids"] for text in ("We rest.", "They work.", "Summary:", "We do", " We do")}
    batch = {"text": ["We rest. They work."], "references": [["We  do", "They do"]]}
    row = {name: values[0] for name, values in layout().encode(batch, tokenizer).items()}
    pieces = [ids["We rest."], ids["They work."], ids["Summary:"], ids["We do"], [1]]
    assert row["input_ids"] == sum(pieces, [])
    assert row["sentence_lengths"] == [len(piece) for piece in pieces]
    assert row["prompt_length"] == sum(map(len, pieces[:3]))
    # Cut inside the second sentence; a short summary; no end token.
    cut = layout(max_source=len(pieces[0]) + 1, max_target=2, end_id=None)
    row = {name: values[0] for name, values in cut.encode(batch, tokenizer).items()}
    assert row["input_ids"] == [*pieces[0], pieces[1][0], *pieces[2], *pieces[3][:2]]
    # As running text, with a begin token: one space before prompt and summary.
    plain = layout(by_sentences=False, begin_ids=(7,))
    row = {name: values[0] for name, values in plain.encode(batch, tokenizer).items()}
    assert row["input_ids"] == [7, *tokenizer("We rest. They work. Summary: We do")["input_ids"], 1]
    assert row["input_ids"][row["prompt_length"] :] == [*ids[" We do"], 1]


# ---------------------------------------------------------------------------------------------- runs
def test_cards_name_what_is_on_the_hub(tmp_path: Path) -> None:
    assert hub_facts("org/gpst", "nyu-mll/glue") == {"base_model": "org/gpst", "datasets": ["nyu-mll/glue"]}
    assert hub_facts(str(tmp_path), str(tmp_path)) == hub_facts(None) == {}


@pytest.mark.parametrize("name", ["gpst", "gpt2", "on_lstm", "rnng"])
def test_glue_runs(name: str, finished: Callable) -> None:
    results, folder = finished("glue", name)
    assert results["step"] == 4 and results["best_step"] > 0 and results["task"] == "rte"
    assert [item["step"] for item in results["evaluations"]] == [0, 1, 2, 3, 4]
    assert 0 <= results["eval_accuracy"] <= 1
    parts = {"gpst": {"classification", "auto_encoding", "height", "parser", "token", "action"}, "gpt2": set(),
             "on_lstm": {"classification"}, "rnng": {"classification", "action", "word"}}[name]  # fmt: skip
    assert set(results["train"][0]) == {"step", "loss", "gradient_norm"} | parts
    saved = folder / "model"
    assert (saved / f"modeling_{name}.py").is_file() == (name != "gpt2")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}
    assert len(tokenizer) <= model.config.vocab_size and tokenizer.cls_token_id is not None
    card = saved / "README.md"
    assert not card.exists() or "pipeline_tag: text-classification" in card.read_text()


def pipeline_logits(folder: Path, path: str, limit: int | None = None) -> tuple[list[dict], list[list[dict]]]:
    """The first rows of a file, and what the stock pipeline finds for their pairs of texts."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()[:limit]]
    classify = transformers.pipeline("text-classification", model=str(folder / "model"))
    pairs = [{"text": row["sentence1"], "text_pair": row["sentence2"]} for row in rows]
    return rows, classify(pairs, top_k=None, function_to_apply="none", truncation=True)


@pytest.mark.parametrize("name", ["gpst", "gpt2", "rnng"])
def test_pipeline_gives_the_scores_of_the_run(files: dict[str, str], finished: Callable, name: str) -> None:
    results, folder = finished("glue", name)
    rows, found = pipeline_logits(folder, files["rte"], 2 if name == "rnng" else None)
    best = next(item for item in results["evaluations"] if item["step"] == results["best_step"])
    names = ["entailment", "not_entailment"]
    logits = torch.tensor([[{x["label"]: x["score"] for x in scores}[name] for name in names] for scores in found])
    labels = torch.tensor([row["label"] for row in rows])
    assert (logits.argmax(1) == labels).double().mean().item() == pytest.approx(results["eval_accuracy"])
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert loss == pytest.approx(best["classification_loss"]["validation"], rel=1e-4)
    # A single text, too.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer("the house")["input_ids"][-1] == tokenizer.cls_token_id


def test_saved_regression_gives_the_scores_of_the_run(models: Path, files: dict[str, str], tmp_path, capsys) -> None:
    flags = ("--task-name", "sts-b", "--train-file", files["stsb"], "--validation-file", files["stsb"])
    results = run("glue", models / "gpst", files, tmp_path / "out", *flags, "--learning-rate", "1e-2")
    means = [(scores["pearson"] + scores["spearmanr"]) / 2 for scores in (
        results["evaluations"][0]["scores"]["validation"], kept_evaluation(results)["scores"]["validation"]
    )]  # fmt: skip
    assert "validation mean of pearson and spearmanr {:.5g} -> {:.5g}".format(*means) in capsys.readouterr().out
    assert {"eval_pearson", "eval_spearmanr"} <= set(results)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    rows, found = pipeline_logits(tmp_path / "out", files["stsb"])
    errors = [(scores[0]["score"] - row["label"]) ** 2 for row, scores in zip(rows, found, strict=True)]
    best = results["evaluations"][-1]
    assert np.mean(errors) == pytest.approx(best["classification_loss"]["validation"], rel=1e-4)


def test_results_of_glue(files: dict[str, str], finished: Callable) -> None:
    measured, folder = finished("glue", "gpt2")
    result = load_result(folder / "evaluation.json")
    assert result.scores == {"accuracy": measured["eval_accuracy"]}
    assert (result.task, result.model["architecture"]) == ("glue/rte", "GPT2ForSequenceClassification")
    described = [(file["role"], file["path"], file["rows"]) for file in result.data["files"]]
    assert described == [(role, files["rte"], 14) for role in ("training", "validation")]
    assert {"max_length": 32, "num_processes": 1, "mixed_precision": "no"}.items() <= result.options.items()
    assert "output_dir" not in result.options
    larger = {**result.model, "num_parameters": result.model["num_parameters"] + 1}
    other_seed = dataclasses.replace(result, options={**result.options, "seed": 1})
    assert summarize([result, other_seed])[0]["runs"] == 2
    refused("num_parameters", summarize, [result, dataclasses.replace(other_seed, model=larger)])


def test_tables_are_known_by_their_content() -> None:
    texts = ["one", "ö"]
    numbers = datasets.Dataset.from_dict({"sentence": texts, "label": [0, 1]})
    names = datasets.Dataset.from_dict({"label": ["no", "yes"], "sentence": texts, "more": [1, 2]})

    def described(table: datasets.Dataset, labels: list[int], path: str = "a.csv") -> dict[str, Any]:
        return example_tables.describe_table("train", path, table, ["sentence"], np.array(labels))

    first = described(numbers, [0, 1])
    assert {**first, "sha256_of_rows": ""} == {"role": "train", "path": "a.csv", "rows": 2, "sha256_of_rows": ""}
    assert described(names, [0, 1], "b.csv") == {**first, "path": "b.csv"}
    assert name_split("glue", None, "train") == "glue train"
    others = [described(numbers, [1, 0]), described(numbers.select([1, 0]), [0, 1]), described(numbers.take(1), [0])]
    assert len({item["sha256_of_rows"] for item in (first, *others)}) == 4


def test_mnli_has_two_parts_and_own_tasks_are_inferred(models: Path, files: dict[str, str], tmp_path: Path) -> None:
    three = ("--train-file", files["mnli"], "--validation-file", files["mnli"])
    flags = (*three, "--task-name", "mnli", "--validation-mismatched-file", files["mnli"], "--max-eval-samples", "5")
    results = run("glue", models / "gpt2", files, tmp_path / "mnli", *flags)
    assert {"eval_accuracy_matched", "eval_accuracy_mismatched"} <= set(results)
    data = finetune_glue.GlueArguments(train_file=files["named"], validation_file=files["named"])
    accelerator = Accelerator(cpu=True)
    task, parts = finetune_glue.read_tables(accelerator, data)
    assert task == TextTask("custom", ("review",), ("bad", "good", "odd"))
    assert parts["training"].labels[:4].tolist() == [0, 1, 2, 0]
    data = finetune_glue.GlueArguments(train_file=files["stsb"], validation_file=files["stsb"])
    assert finetune_glue.read_tables(accelerator, data)[0].is_regression
    # A folder with a file for every split is a data set.
    folder = tmp_path / "cola"
    folder.mkdir()
    for split in ("train", "validation"):
        shutil.copy(files["cola"], folder / f"{split}.jsonl")
    data = finetune_glue.GlueArguments(task_name="cola", dataset_name=str(folder), max_eval_samples=3)
    _, parts = finetune_glue.read_tables(accelerator, data)
    assert {name: len(part.table) for name, part in parts.items()} == {"training": 14, "validation": 3}


@pytest.mark.parametrize("name", ["gpst", "gpt2", "on_lstm"])
def test_summarization_runs(name: str, files: dict[str, str], finished: Callable) -> None:
    results, folder = finished("summarization", name)
    assert "rouge" not in results["evaluations"][0] and "rouge" in results["evaluations"][-1]
    assert set(results["test"]["rouge"]) == {"rouge1", "rouge2", "rougeL", "rougeLsum", "rouge_average"}
    paper = {"do_sample": True, "num_beams": 2, "top_k": 0} if name == "gpst" else {"do_sample": True, "top_k": 2}
    assert paper.items() <= results["test"]["options"].items()
    saved = load_result(folder / "evaluation.json")
    assert saved.scores == results["test"]["rouge"]
    expected = [("train", 14), ("validation", 14), ("test", 3)]
    assert [(file["role"], file["rows"]) for file in saved.data["files"]] == expected
    lines = (folder / "summaries.jsonl").read_text(encoding="utf-8").splitlines()
    summaries = [json.loads(line) for line in lines]
    assert len(summaries) == 3 and len(summaries[0]["references"]) == 2
    written = [row["summary"] for row in summaries]
    assert rouge_scores(written, [row["references"] for row in summaries]) == results["test"]["rouge"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.model_type == name and (name != "gpst" or model.config.document_end_token)
    assert name != "gpst" or "Fine-tuned from gpst." in (folder / "model" / "README.md").read_text()
    # The saved model writes the summaries of the run.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    data = finetune_summarization.SummaryArguments(
        train_file=files["documents"], validation_file=files["documents"], summary_column="references",
        max_source_length=24, max_target_length=8, max_predict_samples=3,
    )  # fmt: skip
    table = finetune_summarization.read_tables(Accelerator(cpu=True), data)["test"]
    layout = finetune_summarization.make_layout(data, model, tokenizer)
    encoded = layout.encode(table[:], tokenizer)
    examples = [{column: values[row] for column, values in encoded.items()} for row in range(len(table))]
    batch = ContextCollator(tokenizer.pad_token_id, layout.by_sentences, True).prompts(examples)
    seed_micro_step(404, 0, 0)
    output = model.generate(**batch, **results["test"]["options"])
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [text.strip() for text in texts] == written
    if name == "gpst":  # so does the page about it
        (block,) = blocks(ROOT / "docs" / "fine-tuning.md", "python")
        exec(block["code"].replace("model_cards/gpst-tiny", str(folder / "model")), told := {})
        (row,) = datasets.Dataset.from_dict(layout.encode({"text": [told["text"]], "references": [["x"]]}, tokenizer))
        batch = ContextCollator(tokenizer.pad_token_id, True, True).prompts([row])
        assert batch["input_ids"].equal(told["ids"]) and batch["context_sentence_ids"].equal(told["order"])


def test_summaries_of_gpst_without_synchronization(models: Path, files: dict[str, str], tmp_path: Path) -> None:
    flags = ("--generation-options", "num_beams=2,synchronous=false", "--end-token", "false", "--max-train-steps", "1")
    options = run("summarization", models / "gpst", files, tmp_path / "out", *flags)["test"]["options"]
    assert (options["synchronous"], options["eos_token_id"]) == (False, None)


def test_grammar_induction_runs_with_ablations(files: dict[str, str], finished: Callable) -> None:
    results, folder = finished("induction", "gpst")
    assert [item["step"] for item in results["evaluations"]] == [0, 2, 4]
    assert set(results["test"]["trees"]) == {
        "inside", "left to right (beam 2)", "left to right w/o sync (beam 2)", "merges of the parser",
        "left", "right", "balanced", "random", "binarized gold",
    }  # fmt: skip
    assert results["test"]["num_sentences"] == 6 and "lower case" in results["test"]["convention"]
    saved = load_result(folder / "evaluation.json")
    assert saved.scores["sentence_f1 inside"] == results["test"]["trees"]["inside"]["sentence_f1"]
    expected = [("train_trees", "train"), ("validation_trees", "valid"), ("test_trees", "test")]
    assert [(file["role"], file["path"]) for file in saved.data["files"]] == [(r, files[name]) for r, name in expected]
    scores = {item["step"]: item["trees"]["inside"]["sentence_f1"] for item in results["evaluations"][1:]}
    assert scores[results["best_step"]] == max(scores.values())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert (model.config.stop_structure_gradient, model.config.token_loss_weight) == (False, 1.0)
    assert model.model.up_scale is None  # without surrogate
    bank = finetune_grammar_induction.InductionArguments(
        train_trees=[files["train"]], validation_trees=files["valid"], test_trees=files["test"]
    ).treebank(files["test"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    trees = parse_words(model, tokenizer, bank.words, method="inside")
    assert score_trees(trees, bank).numbers() == results["test"]["trees"]["inside"]


def test_files_replace_the_data_set_of_a_configuration(files: dict[str, str]) -> None:
    named = {"dataset_name": "EdinburghNLP/xsum", "train_file": files["documents"]}
    data = finetune_summarization.SummaryArguments(**named, validation_file=files["documents"])
    assert data.dataset_name is None and data.source("train") == files["documents"]
    refused("--dataset-name.*--train-file", finetune_summarization.SummaryArguments)


NO_DROPOUT = "embedding residual attention composition composition_attention parser head".split()
ALIKE = {
    "gpt2": ("--config-overrides", "attn_pdrop=0,embd_pdrop=0,resid_pdrop=0"),
    "rnng": ("--config-overrides", "dropout=0", "--max-eval-samples", "3"),
    "gpst": ("--config-overrides", ",".join(["merge_noise=0", *(f"{part}_dropout=0" for part in NO_DROPOUT)]),
             "--gradient-checkpointing", "true"),
}  # fmt: skip


def test_two_processes_train_and_evaluate_like_one(models: Path, files: dict[str, str], tmp_path: Path) -> None:
    """Also where the heads of the objective get no gradient, and where the processes share a search for trees."""
    size, jobs, ones = "--per-device-train-batch-size", [], {}
    for name, flags in ALIKE.items():
        flags, folder = (*flags, "--per-device-eval-batch-size", "3"), tmp_path / name
        ones[folder] = run("glue", models / name, files, tmp_path / f"{name}_one", *flags, size, "4")
        argv = command("glue", models / name, files, folder, *flags, size, "2")
        jobs.append({"script": "hf_synlm.training.programs.finetune_glue", "argv": argv, "output_dir": str(folder)})
    two_processes.run_jobs(jobs, tmp_path, str(tmp_path / "cache"))
    for folder, one in ones.items():
        two_processes.check_status(folder)
        two = results_of(folder)
        assert two["examples"] == one["examples"]
        for mine, theirs in zip(two["evaluations"], one["evaluations"], strict=True):
            assert mine["scores"] == theirs["scores"]
            losses = [found["classification_loss"]["validation"] for found in (mine, theirs)]
            assert losses[0] == pytest.approx(losses[1])
        for mine, theirs in zip(two["train"], one["train"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)


def test_trees_are_searched_once(models: Path, files: dict[str, str], tmp_path: Path, monkeypatch, capfd) -> None:
    """By the pretrained model, of every row; and by the final model, of the rows for validation."""
    rows, plain = [], hf_synlm.RNNGForSequenceClassification.best_trees
    noted = lambda *inputs: rows.append(len(inputs[1])) or plain(*inputs)  # noqa: E731
    monkeypatch.setattr(hf_synlm.RNNGForSequenceClassification, "best_trees", noted)
    limits = ("--max-train-samples", "5", "--max-eval-samples", "2", "--evaluation-steps", "1")
    results = run("glue", models / "rnng", files, tmp_path / "out", *limits)
    assert rows == [5, 2, 2] and len(results["evaluations"]) == 3
    assert set(results["train"][0]) == {"step", "classification", "loss", "gradient_norm"}
    assert "step/s, classification=" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------- refusals
def test_bad_weights_of_the_objective(models: Path, files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="objective_weight must be .* not negative, and is -1"):
        run("glue", models / "gpst", files, tmp_path / "out", "--objective-weight", "-1")
    with pytest.raises(ValueError, match="objective-weight is 0.0, but gpt2 has no loss of its own"):
        run("glue", models / "gpt2", files, tmp_path / "out", "--objective-weight", "0")


def test_bad_tables_of_glue_are_refused(models: Path, files: dict[str, str], tmp_path, capsys, monkeypatch) -> None:
    """Before the model is loaded."""
    monkeypatch.setattr(finetune_glue.GlueRecipe, "_read_classifier", None)

    def fails(rows: list[dict[str, Any]], match: str, task: str = "cola") -> None:
        path = write_rows(tmp_path / "bad.jsonl", rows)
        flags = ("--task-name", task, "--train-file", path, "--validation-file", path, "--overwrite-output-dir")
        refused(match, run, "glue", models / "gpt2", files, tmp_path / "out", *flags)
        assert f"--validation-file: {path} is also a training file" in capsys.readouterr().err
        assert not (tmp_path / "out" / "all_results.json").exists()

    fails([{"text": "a", "label": 1}], "bad.jsonl.*'sentence'.*text, label")
    fails([{"sentence": "a"}], "'label'")
    where, good = "bad.jsonl.*", {"sentence": "a", "label": 1}
    fails([good, {"sentence": "b", "label": None}], where + "row 1")
    fails([{"sentence": "a", "label": -1}], where + "row 0 .*-1")
    fails([good, {"sentence": "b", "label": 2}], where + "label 2 of row 1")
    fails([{"sentence": "a", "label": "fine"}], where + "row 0 .*'fine'.*unacceptable")
    fails([{"sentence": " ", "label": 1}], where + "sentence of row 0")
    pair = {"sentence1": "a", "sentence2": "b"}
    fails([{**pair, "label": 5.5}], r"row 0 .* 5.5", task="stsb")
    mnli = ["--task-name", "mnli", "--train-file", "a", "--validation-file", "b", "--validation-mismatched-file", "a"]
    parse_arguments([finetune_glue.GlueArguments], mnli)
    assert "--validation-mismatched-file: " in capsys.readouterr().err


def test_too_long_examples_are_told_before_the_model_is_loaded(models, files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(finetune_glue.GlueRecipe, "load_model", None)
    flags = ("--task-name", "rte", "--max-train-tokens", "1", "--max-train-steps", "1")
    refused("No examples are left", run, "glue", models / "gpt2", files, tmp_path / "out", *flags)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (cut := tmp_path / "cut.jsonl").write_bytes(b'{"sentence": "a", "label": 1}\n{"sentence": "b", "la')
    (latin := tmp_path / "latin.csv").write_bytes(b"sentence,label\ncaf\xe9,1\n")
    refused("cut.jsonl'.*JSON parse error", load_table, str(cut), None)
    refused("latin.csv'.*can't decode byte 0xe9", load_table, str(latin), None)


@pytest.mark.parametrize("label", [10**9, -3, [1]])
def test_classes_are_counted_from_zero(label: Any) -> None:
    table = datasets.Dataset.from_list([{"text": "a", "label": label}] * 2)
    refused(r"label", finetune_glue.infer_task, table, "training data")


BAD_INPUT = [
    ("glue", "gpt2", ("--task-name", "xnli"), "xnli"),
    ("glue", "gpt2", ("--train-files", "missing.jsonl"), "missing.jsonl"),  # also the plural
    ("glue", "gpt2", ("--train-file", __file__), ".py'"),
    ("glue", "gpt2", ("--validation-mismatched-file", __file__), "validation-mismatched-file"),
    ("glue", "gpt2", ("--config-overrides", "n_layers=3"), "n_layers"),
    ("glue", "", (), "--model-name-or-path is not set"),
    ("glue", "gpt2", ("--tokenizer-name", "{wide}"), "420 tokens.* 400"),
    ("glue", "gpst", ("--tokenizer-name", "{other}"), "[a-z]{3}_token_id is .* in the tokenizer"),
    ("summarization", "gpst", ("--text-column", "body"), "body"),
    ("summarization", "gpst", ("--summary-column", "other"), "train data .*other of row 0"),
    ("summarization", "gpst", ("--max-source-length", "60"), "64 positions"),
    ("summarization", "gpst", ("--generation-options", "num_beams=2,num_beam_groups=2"), "num_beam_groups"),
    ("summarization", "gpst", ("--prompt", " "), "prompt"),
    ("summarization", "gpt2", ("--max-new-tokens", "60"), "max_new_tokens 60.* 64 positions"),
    ("summarization", "rnng", (), "RNNG"),
    ("summarization", "bart", (), "bart"),
    ("induction", "gpt2", (), "gpt2"),
    ("induction", "gpst", ("--methods", "cky"), "cky"),
    ("induction", "gpst", ("--max-sentence-tokens", "1"), "limits on length"),
    ("induction", "gpst", ("--max-tree-words", "1"), "6 sentences"),
    ("induction", "gpst", ("--config-overrides", "merge_noise=-1"), "merge_noise"),
]


@pytest.mark.parametrize(("script", "name", "flags", "match"), BAD_INPUT)
def test_bad_input_is_refused_before_training(script, name, flags, match, models, files, tmp_path):
    wide = transformers.AutoTokenizer.from_pretrained(models / "gpt2")
    wide.add_tokens([f"<{k}>" for k in range(20)])
    wide.save_pretrained(tmp_path / "wide")
    places = {"{wide}": tmp_path / "wide", "{other}": models / "rnng"}
    flags = tuple(str(places.get(flag, flag)) for flag in flags)
    refused(match, run, script, models / name if name else "", files, tmp_path / "out", *flags)
    assert not list((tmp_path / "out").glob("best_*")) and not (tmp_path / "out" / "all_results.json").exists()


def test_an_architecture_without_classifier_is_named() -> None:
    recipe = object.__new__(finetune_glue.GlueRecipe)
    recipe.model_arguments = SimpleNamespace(model_name_or_path="mine")
    with pytest.raises(ValueError, match="mine.*PushdownForSequenceClassification"):
        recipe.choose_tokenizer(hf_synlm.PushdownConfig())


def test_incomplete_data_of_glue_are_refused() -> None:
    refused("--validation-file", finetune_glue.GlueArguments, train_file="x")
    given = {"task_name": "mnli", "train_file": "x", "validation_file": "y"}
    refused("--validation-mismatched-file", finetune_glue.GlueArguments, **given)
    refused("--train-file", finetune_glue.GlueArguments)


# ---------------------------------------------------------------------------------------------- shared parts
def test_epochs_become_steps() -> None:
    arguments = TrainingArguments(output_dir="x", per_device_train_batch_size=3, gradient_accumulation_steps=2)
    accelerator = SimpleNamespace(num_processes=2, process_index=0)
    for epochs, steps in ((0, 1000), (3, 5)):
        arguments.num_train_epochs, arguments.max_train_steps = epochs, None
        recipe = finetune_glue.GlueRecipe(accelerator, None, None, arguments)
        recipe.examples = range(20)
        recipe.settle_steps()
        assert arguments.max_train_steps == steps


def test_only_gpst_has_a_parser_with_a_rate_of_its_own(models: Path) -> None:
    arguments, run_arguments = SimpleNamespace(parser_learning_rate=0.5), TrainingArguments(output_dir="x")
    recipe = finetune_glue.GlueRecipe(Accelerator(cpu=True), arguments, None, run_arguments)
    gpst, gpt2 = (transformers.AutoModelForCausalLM.from_pretrained(models / name) for name in ("gpst", "gpt2"))
    assert recipe.learning_rates(gpst) == {"parser": 0.5} and recipe.learning_rates(gpt2) == {}


def read_own(path: Path, **more: Any) -> tuple[TextTask, finetune_glue.Part]:
    data = finetune_glue.GlueArguments(train_file=str(path), validation_file=str(path), **more)
    task, parts = finetune_glue.read_tables(Accelerator(cpu=True), data)
    return task, parts["training"]


OWN_TABLES = [
    ("guid,sentence,label", ["a0,we agree,0", "a1,null,1"], ("sentence",), ("0", "1")),
    ("sentence1,sentence2,url,label", ["a,b,x,no", "NA,None,y,yes"], ("sentence1", "sentence2"), ("no", "yes")),
    ("idx,review,label", ["7,nan,true", "8,good,false"], ("review",), ("false", "true")),
    ("idx,review,label", ["7,n/a,True", "8,good,False"], ("review",), ("False", "True")),
    ("year,label", ["2024,1", "007,2"], ("year",), ("1", "2")),
    ("text,label", ["null,1.0", "good,0.0"], ("text",), ("0", "1")),
    ("text,label", ["null,1.5", "good,0.0"], ("text",), ()),
]


@pytest.mark.parametrize(("header", "rows", "columns", "classes"), OWN_TABLES)
@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_columns_and_labels_of_own_tables(header, rows, columns, classes, ending, tmp_path: Path, capsys) -> None:
    """Cells are the text that stands there; one or two columns of text are known, and classes named, and printed."""
    path = tmp_path / f"own{ending}"
    path.write_text("\n".join([header, *rows]).replace(",", "," if ending == ".csv" else "\t"), encoding="utf-8")
    task, part = read_own(path)
    assert (task.text_columns, task.labels) == (columns, classes)
    place = header.split(",").index(columns[0])
    assert part.table[columns[0]][:] == [row.split(",")[place] for row in rows]
    assert sorted(part.labels.tolist()) == ([0, 1] if classes else [0.0, 1.5])
    assert f"text: {', '.join(columns)}; label: label" in capsys.readouterr().out


def test_columns_of_text_that_are_in_doubt_are_refused(tmp_path: Path) -> None:
    (path := tmp_path / "own.csv").write_text("title,review,label\na,b,0\nc,d,1\n", encoding="utf-8")
    refused("2 columns may be the text. Pass --text-columns .* The table has title, review", read_own, path)
    assert read_own(path, text_columns=["review"])[0].text_columns == ("review",)
    assert read_own(path, text_columns=["review", "title"])[0].text_columns == ("review", "title")
    refused("has no column 'x'", read_own, path, text_columns=["x"])
    for missing in ("", "NA", "nan", " null "):
        path.write_text(f"text,label\na,0\nb,{missing}\nc,1\n", encoding="utf-8")
        refused(r"row 1 \(counted from 0\) has no label", read_own, path)
    path.write_text("text;label\na;0,5\nb;1,5\n", encoding="utf-8")
    refused("labels such as '0,5' are numbers with a comma. Write a point", read_own, path)
    (summaries := tmp_path / "s.csv").write_text('document,text,summary\n"null\nNA",b,NA\n', encoding="utf-8")
    given = {"train_file": str(summaries), "validation_file": str(summaries)}
    with pytest.raises(ValueError, match="set --text-column to one of its columns"):
        finetune_summarization.read_tables(Accelerator(cpu=True), finetune_summarization.SummaryArguments(**given))
    data = finetune_summarization.SummaryArguments(**given, text_column="document")
    table = finetune_summarization.read_tables(Accelerator(cpu=True), data)["train"]
    assert table[0] == {"text": "null\nNA", "references": ["NA"]}
