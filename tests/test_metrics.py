"""The modules for `evaluate`: loaded by path as users do, without a network, in a cache of their own."""

import json
import math
from pathlib import Path

import evaluate
import pytest
import yaml

from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.evalb import EvalbParameters, evaluate_files
from hf_synlm.evaluation.glue import GLUE_TASKS, glue_task, task_scores
from hf_synlm.evaluation.metrics import NAMES, metric_path
from hf_synlm.evaluation.perplexity import perplexities
from hf_synlm.evaluation.rouge import rouge_scores
from hf_synlm.evaluation.surprisal import score_words
from hf_synlm.evaluation.syntaxgym import evaluate_syntaxgym
from hf_synlm.evaluation.text_items import TextItem
from hf_synlm.evaluation.treebank_parsing import make_treebank, score_baselines
from hf_synlm.hub.export import export_model
from hf_synlm.trees import right_branching, spans_to_tree, tree_to_brackets
from tests.scoring_models import SENTENCES, model_and_tokenizer, scorer_of
from tests.test_syntaxgym import suite_data

EVALB = Path(__file__).parent / "goldens" / "evalb"
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
    yield lambda name, **options: evaluate.load(metric_path(name), cache_dir=str(cache), **options)
    patch.undo()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("gpst", "gpt2"):
        if name == "gpst":
            export_model(*model_and_tokenizer(name), folder / name)
        else:
            for part in model_and_tokenizer(name):
                part.save_pretrained(folder / name)
    return folder


def test_unlabeled(load):
    metric = load("unlabeled_parsing_f1")
    scores = metric.compute(predictions=["((The cat) (sleeps well))", "((I eat) nuts)"], references=GOLD)
    assert scores["f1"] == scores["sentence_f1"] == pytest.approx((1 + 0) / 2, abs=1e-7)
    assert scores["corpus_f1"] == pytest.approx(2 * 2 / (3 + 3))
    assert scores["corpus_count"] == pytest.approx(2 * 4 / (5 + 5))
    assert scores["num_sentences"] == 2
    assert scores["convention"].startswith("punctuation removed before parsing; gpst: sentence F1")
    corpus = metric.compute(predictions=["", "(I (eat nuts))"], references=GOLD, convention="compound-pcfg-corpus")
    assert corpus["f1"] == corpus["corpus_f1"] == pytest.approx(2 * 1 / (1 + 3))
    json.dumps(corpus)


def test_unlabeled_options(load):
    metric = load("unlabeled_parsing_f1")
    labeled = ["(S (NP the cat) (VP sleeps well))", "(S I (VP eat nuts))"]
    assert metric.compute(predictions=labeled, references=GOLD, prediction_style="labeled")["corpus_f1"] == 1
    for punctuation, expected in (("ignore", 1), ("keep", 1)):
        options = {"prediction_style": "treebank", "punctuation": punctuation}
        assert metric.compute(predictions=GOLD, references=GOLD, **options)["corpus_f1"] == expected
    plain = ["((the cat) (sleeps well) .)", "(I (eat (-LRB- nuts -RRB-)))"]
    words = ["((the cat) (sleeps well))", "(I (eat nuts))"]
    assert metric.compute(predictions=words, references=plain, reference_style="unlabeled")["corpus_f1"] == 1
    assert metric.compute(predictions=words, references=GOLD, max_length=3)["num_sentences"] == 1


def test_unlabeled_agrees_with_the_library(load):
    treebank = make_treebank(read_treebank(sample_path("trees.test.txt")), max_sentences=20)
    lines = sample_path("trees.test.txt").read_text(encoding="utf-8").splitlines()[:20]
    trees = [
        tree_to_brackets(spans_to_tree(right_branching(len(words)), len(words)), words) for words in treebank.words
    ]
    metric = load("unlabeled_parsing_f1")
    for prediction, reference in zip(trees, lines, strict=True):
        metric.add(prediction=prediction, reference=reference)
    scores, expected = metric.compute(), score_baselines(treebank)["right"]
    assert scores["f1"] == expected.f1 and {name: scores[name] for name in expected.variants} == expected.variants


def test_labeled_is_evalb(load):
    metric = load("labeled_parsing_f1")
    test, gold = ((EVALB / f"sample.{end}").read_text().splitlines() for end in ("tst", "gld"))
    parameters = EVALB / "sample.prm"
    scores = metric.compute(predictions=test, references=gold, parameters=str(parameters))
    expected = evaluate_files(EVALB / "sample.gld", EVALB / "sample.tst", EvalbParameters.read(parameters))
    assert (scores["f1"], scores["precision"], scores["recall"]) == (expected.f1, expected.precision, expected.recall)
    assert scores["num_valid"] == expected.overall.num_valid < scores["num_sentences"]
    assert scores["f1_short"] == expected.short.f1
    # By hand: of S, NP, VP and ADVP one label differs.
    changed = [GOLD[0].replace("(VP", "(X")]
    assert metric.compute(predictions=changed, references=GOLD[:1])["f1"] == 3 / 4
    assert metric.compute(predictions=changed, references=GOLD[:1], labeled=False)["f1"] == 1
    assert metric.compute(predictions=changed, references=GOLD[:1], cutoff_length=2)["num_sentences_short"] == 0


@pytest.mark.parametrize("architecture", ["gpst", "gpt2"])
def test_surprisal_is_that_of_the_library(load, models, architecture):
    texts = [SENTENCES[0], "  ", "He  said no"]
    options = {"num_beams": 2} if architecture == "gpst" else {}
    metric = load("surprisal")
    found = metric.compute(predictions=texts, model_id=str(models / architecture), device="cpu", **options)
    json.dumps(found, allow_nan=False)
    assert found["words"] == [text.split() for text in texts]
    expected = score_words(scorer_of(architecture, details=True, **options), [TextItem("", text) for text in texts])
    for row, lexical, structural, scores in zip(
        found["surprisals"], found["lexical"], found["structural"], expected, strict=True
    ):
        assert row == pytest.approx((-scores.log_probs / math.log(2)).tolist(), abs=1e-4)
        if architecture == "gpst":
            assert lexical == pytest.approx((-scores.lexical / math.log(2)).tolist(), abs=1e-4)
            assert [a + b for a, b in zip(lexical, structural, strict=True)] == pytest.approx(row, abs=1e-4)
        else:
            assert lexical == structural == [None] * len(row)
    values = [value for row in found["surprisals"] for value in row]
    assert found["mean_surprisal"] == pytest.approx(sum(values) / len(values))
    assert found["word_perplexity"] == pytest.approx(perplexities(expected)["word_perplexity"], rel=1e-4)
    estimator = "beam_marginal" if architecture == "gpst" else "exact"
    assert found["unit"] == "bits" and found["estimator"] == found["options"]["estimator"] == estimator
    nats = metric.compute(predictions=texts, model_id=str(models / architecture), device="cpu", unit="nats", **options)
    assert nats["mean_surprisal"] == pytest.approx(found["mean_surprisal"] * math.log(2), rel=1e-5)


def test_surprisal_options(load, models):
    metric = load("surprisal")
    gpt2 = {"model_id": str(models / "gpt2"), "device": "cpu"}
    no_begin = metric.compute(predictions=["We ask"], begin=False, **gpt2)
    assert no_begin["surprisals"][0][0] is None and no_begin["surprisals"][0][1] > 0
    alone = metric.compute(predictions=["We ask", "for peace"], **gpt2)
    document = metric.compute(predictions=["We ask", "for peace"], context="document", **gpt2)
    joined = metric.compute(predictions=["We ask for peace"], **gpt2)
    assert sum(document["surprisals"], []) == pytest.approx(joined["surprisals"][0], abs=1e-4)
    assert document["surprisals"][1] != pytest.approx(alone["surprisals"][1], abs=1e-4)
    corrected = metric.compute(predictions=["We ask"], word_correction=True, **gpt2)
    assert corrected["surprisals"] != alone["surprisals"][:1] and corrected["options"]["word_correction"]
    for options, message in (
        ({"unit": "bytes"}, "unit is 'bytes'"),
        ({"context": "page"}, "context 'page'"),
        ({"num_beams": 3}, "not an option of GPT2LMHeadModel"),
    ):
        with pytest.raises(ValueError, match=message):
            metric.compute(predictions=["We ask"], **gpt2, **options)
    with pytest.raises(ValueError, match="there are no tokens"):
        metric.compute(predictions=[" "], **gpt2)


def test_syntaxgym_is_that_of_the_library(load, models, tmp_path):
    path = tmp_path / "own_agreement.json"
    path.write_text(json.dumps(suite_data()), encoding="utf-8")
    metric = load("syntaxgym")
    found = metric.compute(suites=[str(path)], model_id=str(models / "gpst"), num_beams=2, device="cpu")
    json.dumps(found, allow_nan=False)
    expected = evaluate_syntaxgym(scorer_of("gpst", num_beams=2), [path])
    assert found["suites"] == {"own_agreement": expected.scores["suite own_agreement"]}
    assert found["accuracy"] == expected.scores["mean_over_suites"]
    assert found["predictions"] == expected.tables["Predictions"]
    assert found["circuits"] == {} and found["mean_31_suites"] is None and found["mean_6_circuits"] is None
    assert found["options"]["num_beams"] == 2 and found["options"]["estimator"] == "beam_marginal"
    metric.add(suites=str(path))  # one by one, as other modules
    assert metric.compute(model_id=str(models / "gpst"), num_beams=2, device="cpu")["suites"] == found["suites"]
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        metric.compute(suites=["nowhere.json"], model_id=str(models / "gpst"))


@pytest.mark.parametrize(
    ("name", "predictions", "options", "message"),
    [
        ("unlabeled_parsing_f1", ["((the dog) (sleeps well))"], {}, "word 2 is 'dog', in the gold tree 'cat'"),
        ("unlabeled_parsing_f1", ["((the cat) (sleeps well) .)"], {}, "it has 5 words, the gold tree 4"),
        ("unlabeled_parsing_f1", ["((the cat"], {}, r"prediction 0: '\(' at character 1 is never closed"),
        ("unlabeled_parsing_f1", ["(a b)"], {"convention": "f1"}, "there is no convention 'f1'"),
        ("unlabeled_parsing_f1", ["(a b)"], {"limit": 40}, "no field 'limit'"),
        ("unlabeled_parsing_f1", ["(a b)"], {"prediction_style": "ptb"}, "style is 'ptb'"),
        ("unlabeled_parsing_f1", ["(a b)"], {"reference_style": "ptb"}, "reference_style is 'ptb'"),
        ("labeled_parsing_f1", ["(S (NP"], {}, "prediction 0: .* is never closed"),
    ],
)
def test_bad_input_is_named(load, name, predictions, options, message):
    if options.get("convention") or options.get("limit"):
        predictions = ["((the cat) (sleeps well))"]
    with pytest.raises(ValueError, match=message):
        load(name).compute(predictions=predictions, references=GOLD[:1], **options)


def test_lists_are_lists(load, models, tmp_path):
    for name, inputs in (
        ("surprisal", {"predictions": "the dog"}),
        ("syntaxgym", {"suites": "suite.json"}),
        ("labeled_parsing_f1", {"predictions": GOLD, "references": GOLD[0]}),
        ("unlabeled_parsing_f1", {"predictions": "(a b)", "references": GOLD}),
    ):
        with pytest.raises(ValueError, match=r"a single text: give a list, \w+=\[...\]"):
            load(name).compute(**inputs, **({} if "f1" in name else {"model_id": str(models / "gpt2")}))
    for suites, message in (
        ([], "there are no suites"),
        ([str(tmp_path)], "is a folder: give the files of the suites"),
    ):
        with pytest.raises(ValueError, match=message):
            load("syntaxgym").compute(suites=suites, model_id=str(models / "gpt2"))


@pytest.mark.parametrize("name", NAMES)
def test_folders_are_spaces(name):
    folder = Path(metric_path(name))
    assert {file.name for file in folder.iterdir() if file.is_file()} == {
        "README.md",
        "app.py",
        "requirements.txt",
        f"{name}.py",
    }
    card = yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert card["sdk"] == "gradio" and {"evaluate", "metric"} <= set(card["tags"])
    assert (folder / card["app_file"]).is_file()
    compile((folder / "app.py").read_text(encoding="utf-8"), "app.py", "exec")
    with pytest.raises(ValueError, match="there is no metric 'f1'"):
        metric_path("f1")


# --------------------------------------------------------------------------------------- the modules glue and rouge
STORED = json.loads((Path(__file__).parent / "goldens" / "evaluate" / "cases.json").read_text(encoding="utf-8"))


def test_glue_scores_are_those_of_evaluate():
    assert {case["task"] for case in STORED["glue"]} == set(GLUE_TASKS)
    for case in STORED["glue"]:
        found = task_scores(glue_task(case["task"]), case["predictions"], case["references"])
        # The module reads targets of STS-B as float32.
        assert found == pytest.approx(case["scores"], rel=1e-6), case["task"]


def test_rouge_scores_are_those_of_evaluate():
    assert len(STORED["rouge"]) == 3
    for case in STORED["rouge"]:
        texts = case["predictions"], case["references"]
        found = rouge_scores(*texts, use_stemmer=case["use_stemmer"])
        means = {name: 100 * sum(values) / len(values) for name, values in case["scores"].items()}
        assert {name: found[name] for name in means} == pytest.approx(means)
        assert means["rougeLsum"] > means["rougeL"]  # texts of several sentences, with moved words
