"""Minimal pairs: what counts as right, groups and phenomena, files, and the same numbers through lm-eval."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_synlm.data.tokenizers import character_tokenizer, train_bpe_tokenizer
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.evaluation.generation import generate_texts
from hf_synlm.evaluation.suites import blimp
from hf_synlm.evaluation.suites.rouge import rouge_scores
from hf_synlm.evaluation.suites.syntaxgym import evaluate_syntaxgym
from hf_synlm.evaluation.text.surprisal import score_words
from hf_synlm.evaluation.text.words import encode_sentences
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import SENTENCES, model_and_tokenizer, scorer_of

PAIRS = [
    ("The keys to the cabinet are here.", "The keys to the cabinet is here."),
    ("We ask for peace", "We asks for peace"),
    ("The state of our Union is strong.", "The state of our Union are strong."),
    ("She is back, standing tall.", "She are back, standing tall."),
    ("No one has ever asked.", "Some one has ever asked."),
    ("We ask for peace", "We asking for peace"),
]


def write_blimp(folder: Path) -> list[Path]:
    """Two paradigms in BLiMP's format."""
    folder.mkdir(exist_ok=True)
    paradigms = {"agreement_1": ("subject_verb_agreement", PAIRS[:4]), "subject_trans": ("s-selection", PAIRS[4:])}
    for name, (term, pairs) in paradigms.items():
        rows = [
            {"sentence_good": good, "sentence_bad": bad, "field": "syntax", "linguistics_term": term, "UID": name}
            for good, bad in pairs
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return blimp.find_blimp(folder)


@pytest.mark.parametrize("architecture", ["gpst", "rnng_pieces", "prpn"])
def test_accuracy_is_the_share_of_pairs_that_are_right(architecture):
    model, tokenizer = model_and_tokenizer(architecture)

    def log_prob(sentence):
        ids = torch.tensor([tokenizer(sentence)["input_ids"]])
        return model.parse(ids).token_log_probs[:, : ids.shape[1]].sum().item()

    pairs = PAIRS[:3]
    right = [log_prob(good) > log_prob(bad) for good, bad in pairs]
    result = blimp.evaluate_pairs(scorer_of(architecture), [blimp.MinimalPair(*pair) for pair in pairs])
    assert result.scores["accuracy"] == pytest.approx(sum(right) / len(right))
    tie = blimp.evaluate_pairs(scorer_of(architecture), [blimp.MinimalPair("We ask", "We  ask")])
    assert tie.scores["accuracy"] == tie.scores["mean_over_groups"] == tie.tables["Groups"][0]["accuracy"] == 0.0
    assert [item["correct"] for item in tie.items] == [False]


def test_ends_count_on_request():
    scorer = scorer_of("rnng")
    plain, closed = ([p for p, _ in blimp.score_sentences(scorer, SENTENCES, SENTENCES, end)] for end in (False, True))
    model, tokenizer = model_and_tokenizer("rnng")
    parsed = [model.parse(torch.tensor([tokenizer(sentence)["input_ids"]])) for sentence in SENTENCES]
    assert plain == pytest.approx([each.token_log_probs.sum().item() for each in parsed], abs=1e-3)
    assert closed == pytest.approx([each.text_log_probs.item() for each in parsed], abs=1e-3)
    assert all(one > other + 0.01 for one, other in zip(plain, closed, strict=True))
    with pytest.raises(ValueError, match="GPSTForCausalLM is not trained to predict the end .*--end-of-sentence"):
        blimp.score_sentences(scorer_of("gpst"), SENTENCES, SENTENCES, end=True)


def test_means_over_paradigms_and_phenomena(tmp_path):
    paths = write_blimp(tmp_path / "data")
    result = blimp.evaluate_blimp(scorer_of("gpt2"), paths)
    rows = {row["group"]: row for row in result.tables["Groups"]}
    assert rows["agreement_1"]["pairs"] == 4 and rows["subject_trans"]["pairs"] == 2
    assert rows["subject_trans"]["phenomenon"] == "argument_structure"
    first, second = rows["agreement_1"]["accuracy"], rows["subject_trans"]["accuracy"]
    assert result.scores["accuracy"] == pytest.approx((4 * first + 2 * second) / 6)
    assert result.scores["mean_over_groups"] == pytest.approx((first + second) / 2)
    assert result.scores["phenomenon argument_structure"] == second
    assert blimp.evaluate_blimp(scorer_of("gpt2"), paths, limit=1).data["pairs"] == 2


def test_the_first_pairs(tmp_path):
    pairs = [pair for path in write_blimp(tmp_path) for pair in blimp.read_blimp(path)]
    assert blimp.first_pairs(pairs, 1) == [pairs[0], pairs[4]] and blimp.first_pairs(pairs, None) == pairs


def test_pairs_of_tables(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("good\tbad\tkind\nWe ask\tWe asks\tnumber\nShe is\tShe are\tperson\n", encoding="utf-8")
    pairs = blimp.read_pairs(path, good_column="good", bad_column="bad", group_column="kind")
    assert pairs == [blimp.MinimalPair("We ask", "We asks", "number"), blimp.MinimalPair("She is", "She are", "person")]
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "We ask", "sentence_bad": "We asks", "kind": 1}\n')
    assert blimp.read_pairs(tmp_path / "pairs.jsonl", group_column="kind") == [
        blimp.MinimalPair("We ask", "We asks", "1")
    ]
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "We ask", "sentence_bad": "We asks", "kind": 1.5}\n')
    assert blimp.read_pairs(tmp_path / "pairs.jsonl", group_column="kind")[0].group == "1.5"


BAD_FILES = [
    ("pairs.tsv", "good\tbad\nWe ask\t \n", {}, "'sentence_good'"),
    ("pairs.tsv", "good\tbad\nWe ask\t \n", {"good_column": "good", "bad_column": "bad"}, "row 1 has an empty"),
    ("pairs.txt", "We ask\n", {}, "pairs.txt"),
    ("pairs.jsonl", '{"sentence_good": "a", "sentence_bad": "b"}', {"group_column": "UID"}, "'UID'"),
]


@pytest.mark.parametrize(("name", "content", "columns", "message"), BAD_FILES)
def test_bad_files_are_named(tmp_path, name, content, columns, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    refused(message, blimp.read_pairs, tmp_path / name, **columns)


def test_blimp_keeps_its_pairs_of_equal_sentences(tmp_path):
    """BLiMP itself has seven; a table of a user's own is refused."""
    row = {"sentence_good": "We ask", "sentence_bad": "We ask", "linguistics_term": "binding", "UID": "passive_1"}
    path = tmp_path / "passive_1.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    result = blimp.evaluate_blimp(scorer_of("gpt2"), [path])
    assert (result.scores["accuracy"], result.scores["ties"], result.scores["accuracy_ties_right"]) == (0, 1, 1)
    refused("row 1 has the same sentence twice", blimp.read_pairs, path)


def test_blimp_sends_files_with_other_columns_to_pairs(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"sentence_good": "We ask", "sentence_bad": "We asks"}\n')
    refused(
        r"own.jsonl: data row 1 has no column 'UID'.*`synlm evaluate pairs`", blimp.read_blimp, tmp_path / "own.jsonl"
    )


# ------------------------------------------------------------------------------------------------------- lm-eval
@pytest.mark.parametrize(
    ("architecture", "options"),
    [("gpst", {}), ("gpst", {"estimator": "stepwise"}), ("rnng_pieces", {"num_beams": 3}), ("gpt2", {}), ("prpn", {})],
)
def test_lm_eval_gives_the_same_scores(architecture, options):
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    import hf_synlm.evaluation.suites.lm_harness  # noqa: F401

    model, tokenizer = model_and_tokenizer(architecture)
    lm = get_model("hf-synlm")(pretrained=model, tokenizer=tokenizer, batch_size=4, **options)
    sentences = [sentence for pair in PAIRS for sentence in pair]
    requests = [Instance("loglikelihood", {}, ("", sentence), k) for k, sentence in enumerate(sentences)]
    expected = [p for p, _ in blimp.score_sentences(scorer_of(architecture, **options), sentences, sentences)]
    assert [score for score, _ in lm.loglikelihood(requests)] == pytest.approx(expected, abs=1e-3)


def test_lm_eval_continuations_and_greedy():
    from lm_eval.api.instance import Instance

    from hf_synlm.evaluation.suites.lm_harness import SyntacticLM

    model, tokenizer = model_and_tokenizer("gpst")
    refused("there is no folder './nowhere'", SyntacticLM, pretrained="./nowhere")
    lm = SyntacticLM(pretrained=model, tokenizer=tokenizer, batch_size=2, greedy=True)
    context = "We ask"
    ids = torch.tensor([tokenizer(context)["input_ids"]])
    best = tokenizer.decode([model(ids).logits[0, -1].argmax().item()])
    if tokenizer(context + best)["input_ids"][:-1] != ids[0].tolist():
        pytest.fail("the test needs a continuation of one token")
    requests = [Instance("loglikelihood", {}, (context, text), 0) for text in (best, " for peace")]
    (_, is_best), (score, is_second) = lm.loglikelihood(requests)
    assert is_best and not is_second
    parsed = model.parse(torch.tensor([tokenizer(context + " for peace")["input_ids"]]))
    assert score == pytest.approx(parsed.token_log_probs[0, ids.shape[1] :].sum().item(), abs=1e-3)


@pytest.mark.parametrize("text", ["We ask", "\u548c\u5e73"])
def test_a_text_is_no_list_of_texts(text, tmp_path):
    scorer = scorer_of("gpst")
    own = scorer.model, scorer.tokenizer
    evaluations = (blimp.evaluate_pairs, blimp.evaluate_blimp, evaluate_syntaxgym, score_words)
    calls = [(call, (scorer, text)) for call in evaluations] + [(score_words, (scorer, [text]))]
    calls += [(scorer.score, (given,)) for given in (text, [text])]
    calls += [(encode_sentences, (scorer.tokenizer, given)) for given in (text, [text])]
    calls += [(call, (*own, text)) for call in (parse_sentences, generate_texts)]
    calls += [(call, (text,)) for call in (word_tokenizer, character_tokenizer)]
    for call, arguments in [*calls, (rouge_scores, (text, text)), (train_bpe_tokenizer, (text, 300))]:
        refused(r"is .*. Give a list, \[", call, *arguments)


def test_an_empty_sentence_has_the_number_that_the_caller_gave_it():
    scorer = scorer_of("gpst")
    for empty in ("", "..."):
        given = (scorer.model, scorer.tokenizer, ["We ask for peace", empty])
        refused(rf"sentence 2 \('{empty}'\) has no words", partial(parse_sentences, tokenize="no-punctuation"), *given)
    with pytest.raises(ValueError, match="pair 2 .*: the sentence '' has no tokens"):
        blimp.evaluate_pairs(scorer, [blimp.MinimalPair("We ask", "peace"), blimp.MinimalPair("We ask", "")])
