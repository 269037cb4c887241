"""The modules for `evaluate`: loaded by path as users do, without a network, in a cache of their own."""

import json
from pathlib import Path

import evaluate
import pytest
import yaml

from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.evalb import EvalbParameters, evaluate_files
from hf_synlm.evaluation.metrics import NAMES, metric_path
from hf_synlm.evaluation.treebank_parsing import make_treebank, score_baselines
from hf_synlm.trees import right_branching, spans_to_tree, tree_to_brackets

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
