"""The modules for `evaluate`: loaded by path as users do, without a network, in a cache of their own."""

import json
import math
import re
import sys
from pathlib import Path

import evaluate
import pytest
import yaml

from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.metrics import NAMES, metric_path
from hf_synlm.evaluation.suites.glue import GLUE_TASKS, glue_task, task_scores
from hf_synlm.evaluation.suites.rouge import rouge_scores
from hf_synlm.evaluation.suites.syntaxgym import evaluate_syntaxgym
from hf_synlm.evaluation.text.perplexity import perplexities
from hf_synlm.evaluation.text.surprisal import score_words
from hf_synlm.evaluation.text.text_items import TextItem
from hf_synlm.evaluation.trees.evalb import EvalbParameters, evaluate_files
from hf_synlm.evaluation.trees.gold_treebank import make_treebank, score_baselines
from hf_synlm.trees.spans import right_branching, spans_to_brackets
from tests.evaluation.test_syntaxgym import suite_data
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import SENTENCES, scorer_of

EVALB = Path(__file__).parents[1] / "goldens" / "evalb"
GOLD = [
    "(S (NP (DT the) (NN cat)) (VP (VBZ sleeps) (ADVP (RB well))) (. .))",
    "( (S (NP (PRP I)) (VP (VBP eat) (NP (-LRB- -LRB-) (NNS nuts) (-RRB- -RRB-)))) )",
]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setattr("datasets.config.HF_MODULES_CACHE", str(cache))
    patch.setattr("evaluate.config.HF_MODULES_CACHE", cache)
    # Modules that an earlier program has left in the user's cache have the same name, and may be found first.
    patch.syspath_prepend(str(cache))
    for name in [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]:
        patch.delitem(sys.modules, name)
    yield lambda name, **options: evaluate.load(metric_path(name), cache_dir=str(cache), **options)
    patch.undo()


def test_unlabeled_agrees_with_the_library(load):
    treebank = make_treebank(read_treebank(sample_path("trees.test.txt")), max_sentences=20)
    lines = sample_path("trees.test.txt").read_text(encoding="utf-8").splitlines()[:20]
    metric = load("unlabeled_parsing_f1")
    for words, line in zip(treebank.words, lines, strict=True):
        metric.add(prediction=spans_to_brackets(right_branching(len(words)), words), reference=line)
    scores, expected = metric.compute(), score_baselines(treebank)["right"]
    assert scores["f1"] == expected.f1 and {name: scores[name] for name in expected.variants} == expected.variants
    assert scores["num_sentences"] == 20
    assert scores["convention"].startswith("punctuation removed before parsing; gpst: sentence F1")
    corpus = metric.compute(predictions=["", "(I (eat nuts))"], references=GOLD, convention="compound-pcfg-corpus")
    assert corpus["f1"] == corpus["corpus_f1"] == pytest.approx(2 * 1 / (1 + 3))
    json.dumps(corpus)


LABELED = ["(S (NP the cat) (VP sleeps well))", "(S I (VP eat nuts))"]
WORDS = ["((the cat) (sleeps well))", "(I (eat nuts))"]
UNLABELED = ["((the cat) (sleeps well) .)", "(I (eat (-LRB- nuts -RRB-)))"]


UNLABELED_OPTIONS = [
    (LABELED, GOLD, {"prediction_style": "labeled"}),
    (GOLD, GOLD, {"prediction_style": "treebank", "punctuation": "ignore"}),
    (GOLD, GOLD, {"prediction_style": "treebank", "punctuation": "keep"}),
    (WORDS, UNLABELED, {"reference_style": "unlabeled"}),
    (WORDS, GOLD, {"max_length": 3}),
]


@pytest.mark.parametrize(("predictions", "references", "options"), UNLABELED_OPTIONS)
def test_unlabeled_options(load, predictions, references, options):
    scores = load("unlabeled_parsing_f1").compute(predictions=predictions, references=references, **options)
    assert scores["corpus_f1"] == 1 and scores["num_sentences"] == (1 if "max_length" in options else 2)


def test_labeled_is_evalb(load):
    metric = load("labeled_parsing_f1")
    test, gold = ((EVALB / f"sample.{end}").read_text().splitlines() for end in ("tst", "gld"))
    parameters = EVALB / "sample.prm"
    scores = metric.compute(predictions=test, references=gold, parameters=str(parameters))
    expected = evaluate_files(EVALB / "sample.gld", EVALB / "sample.tst", EvalbParameters.read(parameters))
    for name in ("f1", "precision", "recall"):
        assert scores[name] == getattr(expected.overall, name)
    assert scores["num_valid"] == expected.overall.num_valid < scores["num_sentences"]
    assert scores["f1_short"] == expected.short.f1
    # By hand: of S, NP, VP and ADVP one label differs.
    changed = [GOLD[0].replace("(VP", "(X")]
    assert metric.compute(predictions=changed, references=GOLD[:1])["f1"] == 3 / 4
    assert metric.compute(predictions=changed, references=GOLD[:1], labeled=False)["f1"] == 1
    assert metric.compute(predictions=changed, references=GOLD[:1], cutoff_length=2)["num_sentences_short"] == 0


@pytest.mark.parametrize("architecture", ["gpst", "gpt2"])
def test_surprisal_is_that_of_the_library(load, saved_models, architecture):
    texts = [SENTENCES[0], "  ", "He  said no"]
    options = {"num_beams": 2} if architecture == "gpst" else {}
    given = {"model_id": str(saved_models / architecture), "device": "cpu", **options}
    found = load("surprisal").compute(predictions=texts, **given)
    json.dumps(found, allow_nan=False)
    assert found["words"] == [text.split() for text in texts]
    expected = score_words(scorer_of(architecture, details=True, **options), [TextItem("", text) for text in texts])
    for k, scores in enumerate(expected):
        row, lexical, structural = (found[name][k] for name in ("surprisals", "lexical", "structural"))
        assert row == pytest.approx((-scores.log_probs / math.log(2)).tolist(), abs=1e-4)
        if architecture == "gpst":
            assert [a + b for a, b in zip(lexical, structural, strict=True)] == pytest.approx(row, abs=1e-4)
        else:
            assert lexical == structural == [None] * len(row)
    values = [value for row in found["surprisals"] for value in row]
    assert found["mean_surprisal"] == pytest.approx(sum(values) / len(values))
    assert found["word_perplexity"] == pytest.approx(perplexities(expected)["word_perplexity"], rel=1e-4)
    estimator = "beam_marginal" if architecture == "gpst" else "exact"
    assert found["unit"] == "bits" and found["estimator"] == found["options"]["estimator"] == estimator


def test_surprisal_options(load, saved_models):
    model = {"model_id": str(saved_models / "gpt2"), "device": "cpu"}
    options = {"unit": "nats", "context": "document", "begin": False, "word_correction": True}
    found = load("surprisal").compute(predictions=["We ask", "for peace"], **model, **options)
    items = [TextItem("", "We ask"), TextItem("", "for peace")]
    scorer = scorer_of("gpt2", begin=False)
    expected = [-s.log_probs for s in score_words(scorer, items, context="document", word_correction=True)]
    assert found["surprisals"][0] == [None, pytest.approx(expected[0][1].item(), abs=1e-4)]
    assert found["surprisals"][1] == pytest.approx(expected[1].tolist(), abs=1e-4)
    for text, options, message in (
        ("We ask", {"context": "page"}, "context 'page'"),
        ("We ask", {"num_beams": 3}, "num_beams"),
        (" ", {}, "no token has"),
    ):
        refused(message, load("surprisal").compute, predictions=[text], **model, **options)


def test_syntaxgym_is_that_of_the_library(load, saved_models, tmp_path):
    path = tmp_path / "own_agreement.json"
    path.write_text(json.dumps(suite_data()), encoding="utf-8")
    model = {"model_id": str(saved_models / "gpst"), "num_beams": 2, "device": "cpu"}
    found = load("syntaxgym").compute(suites=[str(path)], **model)
    json.dumps(found, allow_nan=False)
    expected = evaluate_syntaxgym(scorer_of("gpst", num_beams=2), [path])
    assert found["suites"] == {"own_agreement": expected.scores["suite own_agreement"]}
    assert found["accuracy"] == expected.scores["mean_over_suites"]
    assert found["predictions"] == expected.tables["Predictions"]
    assert found["circuits"] == {} and found["mean_31_suites"] is None and found["mean_6_circuits"] is None
    assert found["options"]["num_beams"] == 2


BAD_INPUT = [
    ("unlabeled_parsing_f1", {"predictions": ["((the dog) (sleeps well))"]}, "word 2 is 'dog', .*'cat'"),
    ("unlabeled_parsing_f1", {"predictions": WORDS[:1], "convention": "f1"}, "'f1'"),
    ("unlabeled_parsing_f1", {"predictions": WORDS[:1], "prediction_style": "ptb"}, "'ptb'"),
    ("labeled_parsing_f1", {"predictions": ["(S (NP"]}, "prediction 0: .* is never closed"),
    ("surprisal", {"predictions": "the dog"}, "predictions is 'the dog'"),
    ("syntaxgym", {"suites": "suite.json"}, "suites is 'suite.json'"),
    ("syntaxgym", {"suites": ["nowhere.json"]}, r"nowhere\.json"),
]


@pytest.mark.parametrize(("name", "inputs", "message"), BAD_INPUT)
def test_bad_input_is_named(load, saved_models, name, inputs, message):
    gold = {"references": GOLD[:1]} if "parsing" in name else {"model_id": str(saved_models / "gpt2")}
    refused(message, load(name).compute, **inputs, **gold)


@pytest.mark.parametrize("name", NAMES)
def test_folders_are_spaces(name):
    folder = Path(metric_path(name))
    files = {file.name for file in folder.iterdir() if file.is_file()}
    assert files == {"README.md", "app.py", "requirements.txt", f"{name}.py"}
    card = yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert card["sdk"] == "gradio" and card["app_file"] == "app.py" and {"evaluate", "metric"} <= set(card["tags"])
    compile((folder / "app.py").read_text(encoding="utf-8"), "app.py", "exec")


# --------------------------------------------------------------------------------------- the modules glue and rouge
STORED = json.loads((Path(__file__).parents[1] / "goldens" / "evaluate" / "cases.json").read_text(encoding="utf-8"))


def test_glue_scores_are_those_of_evaluate():
    assert {case["task"] for case in STORED["glue"]} == set(GLUE_TASKS)
    for case in STORED["glue"]:
        found = task_scores(glue_task(case["task"]), case["predictions"], case["references"])
        # The module reads targets of STS-B as float32.
        assert found == pytest.approx(case["scores"], rel=1e-6), case["task"]


def test_rouge_scores_are_those_of_evaluate():
    assert len(STORED["rouge"]) == 3
    for case in STORED["rouge"]:
        found = rouge_scores(case["predictions"], case["references"], use_stemmer=case["use_stemmer"])
        means = {name: 100 * sum(values) / len(values) for name, values in case["scores"].items()}
        assert {name: found[name] for name in means} == pytest.approx(means)
        assert means["rougeLsum"] > means["rougeL"]  # texts of several sentences, with moved words


@pytest.mark.parametrize(
    ("text", "language"),
    [("Да, это так", "ru"), ("同意 修路 。", "zh"), ("同意修路。", "zh"), ("Él está", "es"), ("ไทย", "th")],
)
def test_rouge_of_other_scripts(text, language):
    """Equal texts have 100; by the tokens of English some have none, which is an error."""
    assert rouge_scores([text], [text], language=language)["rouge1"] == 100
    assert rouge_scores(["xyz"], [text], language=language)["rouge1"] == 0
    if not re.search("[a-z]", text):
        refused("no letters of 'en' in its reference .*. Set language", rouge_scores, [text], [text])
    refused("stems English words, but", rouge_scores, [text], [text], language=language, use_stemmer=True)


def test_rouge_counts_characters_of_scripts_without_spaces():
    assert rouge_scores(["同意"], ["同意修路"], language="zh")["rouge1"] == pytest.approx(100 * 2 / 3)
