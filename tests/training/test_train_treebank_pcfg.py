"""PCFGs counted in a treebank: rules and words, exact probabilities, trees with their labels, and the program."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import nltk
import pytest
import torch

from hf_synlm import PCFGForCausalLM
from hf_synlm.data.treebank import TreebankSentence, parse_treebank, read_treebank
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.evaluation.text.perplexity import perplexities
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import score_words
from hf_synlm.evaluation.text.text_items import TextItem
from hf_synlm.evaluation.trees.evalb import labeled_f1
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.training.programs import train_treebank_pcfg
from hf_synlm.training.tasks.treebank_grammar import binary_rules, count_grammar
from tests.helpers.refusals import refused
from tests.helpers.training_runs import sample_treebank

TREES = """
(S (NP (DT the) (NN dog)) (VP (VBZ sleeps)))
(S (NP (DT the) (JJ old) (NN cat)) (VP (VBZ sees)))
(S (NP (PRP it)) (VP (VBZ sees) (NP (PRP it))))
(S (VP (VBZ sees) (NP (DT the) (NN cat))))
(FRAG (NP (DT a) (NN dog)) (. !))
(S (NP (PRP it)) (VP (VBZ sleeps)))
"""


def counted(trees: list[TreebankSentence], smoothing: float = 0.5, **options: Any) -> tuple[PCFGForCausalLM, Any]:
    """A grammar in float64, and its tokenizer."""
    tokenizer = word_tokenizer((tree.words for tree in trees), end_token=True)
    ids = [tokenizer(" ".join(tree.words), add_special_tokens=False)["input_ids"] for tree in trees]
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    special = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    options = {"order": 2, "annotate": False, **options}
    torch.set_default_dtype(torch.float64)
    try:
        model = count_grammar(zip(trees, ids, strict=True), smoothing=smoothing, **options, **special)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval(), tokenizer


def test_binary_rules_remember_children_and_parents() -> None:
    (tree,) = parse_treebank(["(S (VP (V go) (NP (N a) (X (N b)) (N c) (N d))))"])
    root, rules, words = binary_rules(tree, order=1, annotate=True)
    assert root == (False, "S VP") and [word.name for word in words] == ["V", "N", "X N(^NP)", "N", "N"]
    assert [tuple(symbol.name for symbol in rule) for rule in rules] == [
        ("S VP", "V", "NP(^VP)"),
        ("NP(^VP)", "N", "(NP^VP N)"),
        ("(NP^VP N)", "X N(^NP)", "(NP^VP X)"),
        ("(NP^VP X)", "N", "N"),
    ]
    names = [rule[2].name for rule in binary_rules(tree, order=0, annotate=False)[1]]
    assert names == ["NP", "(NP)", "(NP)", "N"]


@pytest.mark.parametrize("annotate", [False, True])
def test_probabilities_are_those_of_nltk(annotate: bool, tmp_path: Path) -> None:
    trees = list(read_treebank(sample_treebank(tmp_path, train=80)["train"]))
    model, tokenizer = counted(trees, smoothing=1e-12, annotate=annotate)
    start, productions = nltk.Nonterminal("TOP"), []
    for tree in trees:
        root, rules, words = binary_rules(tree, order=2, annotate=annotate)
        productions.append(nltk.Production(start, [nltk.Nonterminal(root)]))
        productions += [nltk.Production(nltk.Nonterminal(a), [*map(nltk.Nonterminal, (b, c))]) for a, b, c in rules]
        productions += [nltk.Production(nltk.Nonterminal(a), [w]) for a, w in zip(words, tree.words, strict=True)]
    induced = {(p.lhs(), p.rhs()): p.prob() for p in nltk.induce_pcfg(start, productions).productions()}
    grammar, config = model.model.make_grammar(), model.config
    symbols = [nltk.Nonterminal((k >= config.num_nonterminals, name)) for k, name in enumerate(config.symbols)]
    found = {(start, (a,)): p for a, p in zip(symbols, grammar.root.tolist(), strict=False) if p > 0}
    for *rule, log_prob in zip(*grammar.rules.rules.tolist(), grammar.rules.log_probs.tolist(), strict=True):
        a, b, c = (symbols[k] for k in rule)
        found[a, (b, c)] = math.exp(log_prob)
    rows, words = (grammar.probabilities > 1e-8).nonzero().t().tolist()
    for row, word in zip(rows, words, strict=True):
        rule = symbols[config.num_nonterminals + row], (tokenizer.convert_ids_to_tokens(word),)
        found[rule] = grammar.probabilities[row, word].item()
    assert found == pytest.approx(induced, abs=1e-9)


def test_sentences_and_prefixes_add_up() -> None:
    """No rule is recursive, and the longest sentences have four words."""
    model, tokenizer = counted(list(parse_treebank(TREES.splitlines())), annotate=True)
    words = [k for k in range(len(tokenizer)) if k not in model.config.silent_ids]
    mass = Counter[tuple[int, ...]]()
    for size in (2, 3, 4, 5):
        ids = torch.tensor(list(itertools.product(words, repeat=size)))
        for row, log_prob in zip(ids.tolist(), model.log_likelihood(ids).tolist(), strict=True):
            for end in range(size + 1):
                mass[tuple(row[:end])] += math.exp(log_prob)
            assert size < 5 or log_prob == -math.inf
    assert mass[()] == pytest.approx(1, abs=1e-9)
    for size in (1, 2, 3, 4):
        ids = torch.tensor(list(itertools.product(words, repeat=size)))
        log_probs = model.parse(ids, method="mbr").token_log_probs.sum(1).exp()
        assert log_probs.tolist() == pytest.approx([mass[tuple(row)] for row in ids.tolist()], abs=1e-9)


def test_a_sentence_without_derivation_is_infinitely_surprising() -> None:
    """From the word on that cannot follow; other sentences keep their numbers."""
    model, tokenizer = counted(list(parse_treebank(TREES.splitlines())))
    scorer = TextScorer(model, tokenizer)
    sentences = ["it sleeps", "the dog sleeps it it it it"]
    possible, impossible = score_words(scorer, [TextItem("1", text) for text in sentences], end=True)
    assert possible.log_probs.isfinite().all()
    assert impossible.log_probs.isfinite().tolist() == [True] * 4 + [False] * 3
    assert impossible.log_probs[4] == -math.inf and impossible.log_probs[5:].isnan().all()
    scores = perplexities([possible, impossible])
    assert scores["tokens"] == 7 and all(scores[f"word_perplexity{end}"] == math.inf for end in ("", "_with_end"))


def test_words_are_smoothed_by_their_tags() -> None:
    model, tokenizer = counted(list(parse_treebank(TREES.splitlines())), smoothing=2.0)
    names, weight = model.config.symbols[model.config.num_nonterminals :], model.model.grammar.emission_head[-1].weight
    it, dog = tokenizer.convert_tokens_to_ids(["it", "dog"])
    total, size = 18, len(tokenizer)
    expected = (3 + 2 * (3 + 2 * 4 / (total + size)) / 5) / 5
    assert weight[it, names.index("NP PRP")].exp().item() == pytest.approx(expected)
    expected = (2 * (2 * 3 / (total + size)) / 5) / 5
    assert weight[dog, names.index("NP PRP")].exp().item() == pytest.approx(expected)


@pytest.mark.parametrize("annotate", [False, True])
def test_trees_are_those_of_the_treebank_again(annotate: bool, tmp_path: Path) -> None:
    """With their unary chains, in `parse` and `generate`."""
    trees = list(parse_treebank(TREES.splitlines()))
    model, tokenizer = counted(trees, annotate=annotate)
    for tree, parsed in zip(trees, parse_sentences(model, tokenizer, [t.words for t in trees]), strict=True):
        found = parsed.tree()
        labeled = sorted((j, -i, label) for label, (i, j) in zip(found.labels, found.spans, strict=True))
        assert labeled == sorted((j, -i, label) for label, i, j in tree.labeled_spans)
    ids = torch.tensor([[*tokenizer("it sleeps", add_special_tokens=False)["input_ids"]]])
    output = model.parse(ids)
    assert output.brackets(tokenizer) == "(S (NP it) (VP sleeps))" and output.preterminals == [[["PRP", "VBZ"]]]
    for method in ("viterbi", "sample"):
        assert model.parse(ids, method=method).labels == [[["NP", "VP", "S"]]]
    assert model.parse(ids, method="mbr").labels is None
    drawn = model.generate(
        structure_mode="joint", do_sample=True, max_new_tokens=9, num_return_sequences=20, return_dict_in_generate=True
    )
    assert drawn.complete.all()
    assert {label for labels in drawn.labels for label in labels} <= {"S", "NP", "VP", "FRAG"}
    assert all(drawn.brackets(tokenizer, k).startswith(("(S (", "(FRAG (")) for k in range(20))
    written = model.generate(ids[:, :1], max_new_tokens=3, return_dict_in_generate=True)
    text = model.parse(written.sequences)
    assert written.labels == text.labels[0] and written.brackets(tokenizer) == text.brackets(tokenizer)
    model.save_pretrained(tmp_path)
    loaded = PCFGForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.grammar == "sparse" and loaded.config.symbols == model.config.symbols
    torch.testing.assert_close(loaded.parse(ids).log_probs, output.log_probs)


@pytest.mark.usefixtures("warm_verify")
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sample_treebank(tmp_path, train=150, valid=12)
    out = tmp_path / "out"
    flags = ["--train-files", files["train"], "--validation-files", files["valid"], "--output-dir", str(out)]
    train_treebank_pcfg.main(flags)
    size, result, end = capsys.readouterr().out.strip().splitlines()
    assert end == f"The model is in {out}. Next: synlm parse FILE --model {out}"
    model, tokenizer = load_pretrained(str(out))
    assert size.startswith(f"{model.config.num_rules:,} rules, {model.config.num_nonterminals:,} nonterminals")
    assert size.endswith("counted in 150 trees") and "counted in 150 trees" in (out / "README.md").read_text()
    gold = list(read_treebank(files["valid"]))
    parsed = parse_sentences(model, tokenizer, [tree.words for tree in gold])
    f1 = labeled_f1([(one.tree().labels, one.tree().spans) for one in parsed], gold).overall.f1
    nats = -sum(value for one in parsed for value in one.word_log_probs)
    perplexity = math.exp(nats / sum(len(tree.words) for tree in gold))
    assert result.startswith(f"validation: labeled_f1 {100 * f1:.2f}  ")
    assert f"  word_perplexity {perplexity:.2f}  " in result and f1 > 0.3
    written = json.loads((out / "all_results.json").read_text())
    assert written["validation"]["word_perplexity"] == pytest.approx(perplexity) and "versions" in written
    assert written["validation"]["labeled_f1"] == round(100 * f1, 2) and "test" not in written
    card = (out / "README.md").read_text()
    assert "Andreas Stolcke." in card and "Mark Johnson." in card and "arxiv" not in card.lower()
    assert "A treebank PCFG (probabilistic context-free grammar) language model." in card
    assert "Stolcke" in TextScorer(model, tokenizer).describe()["paper"]
    assert model.config.text_style == "treebank"
    (found,) = score_words(TextScorer(model, tokenizer), [TextItem("1", " ".join(gold[0].words))])
    assert found.log_probs.tolist() == pytest.approx(list(parsed[0].word_log_probs), rel=1e-4)
    known = tokenizer.get_vocab()
    assert any(token.startswith("UNK-") for token in known)
    refused("exists. Choose another --output-dir, or pass --overwrite-output-dir", train_treebank_pcfg.main, flags)
    train_treebank_pcfg.main([*flags, "--overwrite-output-dir", "true", "--parent-annotation", "false"])
    assert load_pretrained(str(out))[0].config.num_nonterminals < model.config.num_nonterminals


def test_bad_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trees := tmp_path / "un.mrg").write_text("((the cat) (sat down))\n((the dog) (ran off))\n")
    files = ["--train-files", str(trees), "--validation-files", str(trees), "--output-dir", str(tmp_path / "out")]
    refused("hold unlabeled trees. Write labels and tags", train_treebank_pcfg.main, files)
    assert f"--validation-files: {trees} is also a training file" in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"--train-files names {trees} twice. Name it once"):
        train_treebank_pcfg.main(["--train-files", str(trees), str(trees), *files[2:]])
    for flag, value, message in (
        ("--horizontal-order", "-1", "--horizontal-order: must not be negative and is -1"),
        ("--lexicon-smoothing", "0", "--lexicon-smoothing is 0.0 and must be finite and above 0"),
        ("--tokenizer-name", "model_cards/rnng-mini", "splits words, but a PCFG reads words. Leave this option out"),
    ):
        refused(message, train_treebank_pcfg.main, [flag, value, "--output-dir", str(tmp_path / "out")])
