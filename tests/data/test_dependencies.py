"""Dependency treebanks as constituents: goldens of `tests/goldens/dependencies`, and what holds for every tree."""

import itertools
import json
import os
import random
import re
import threading
from collections import Counter
from pathlib import Path

import pytest
from accelerate import Accelerator

from hf_synlm.cli import main
from hf_synlm.data.dependencies import crossing_arcs, lift, read_conllu
from hf_synlm.data.treebank import parse_treebank, read_dependency_trees, read_treebank, sentence_to_brackets
from hf_synlm.evaluation.trees.evalb import labeled_f1
from hf_synlm.training.arguments.text import StreamDataArguments, read_trees
from hf_synlm.training.arguments.treebank import TreeDataArguments
from hf_synlm.training.tasks.tree_batches import load_trees, row_to_sentence
from hf_synlm.trees.spans import validate_spans
from tests.helpers.commands import fail, run as run_command
from tests.helpers.refusals import refused

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "dependencies"
TREES: dict[str, list[str]] = json.loads((GOLDENS / "trees.json").read_text(encoding="utf-8"))
MALFORMED: dict[str, dict[str, str]] = json.loads((GOLDENS / "malformed.json").read_text(encoding="utf-8"))


def conllu(*rows: str) -> str:
    """A sentence of rows "FORM UPOS HEAD DEPREL"."""
    lines = []
    for number, row in enumerate(rows, 1):
        form, tag, head, relation = row.split()
        lines.append("\t".join([str(number), form, "_", tag, "_", "_", head, relation, "_", "_"]))
    return "\n".join([*lines, "", ""])


@pytest.mark.parametrize("name", TREES)
def test_trees_are_the_goldens(name: str):
    treebank, structure, labels, tokens, punctuation = name.split(".")
    options = {"structure": structure, "labels": labels, "tokens": tokens, "punctuation": punctuation}
    found = read_dependency_trees(GOLDENS / f"{treebank}.conllu", **options)
    assert [sentence_to_brackets(sentence) for sentence in found] == TREES[name]


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused_by_line(name: str, tmp_path: Path, caplog):
    """Or, where only the tree is wrong, left out by request, with a count."""
    path = tmp_path / f"{name}.conllu"
    path.write_text(MALFORMED[name]["text"], encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read_conllu(path)
    told, _, remedy = str(error.value).partition(". `synlm treebank")
    assert told == f"{path}:{MALFORMED[name]['error']}"
    if not remedy:
        return
    assert len(read_conllu(path, invalid="skip")) == MALFORMED[name]["text"].strip().count("\n\n")
    assert "their dependencies form no tree: 1 sentence," in caplog.text


def test_all_bad_sentences_are_listed(tmp_path: Path):
    path = tmp_path / "bad.conllu"
    path.write_text(conllu("a X 2 dep") * 25 + conllu("a X 0 root"), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read_conllu(path)
    lines = str(error.value).split("\n")
    assert lines[0] == f"{path}: 25 sentences cannot be read:" and lines[-1] == "..." and len(lines) == 22
    assert lines[1] == f"{path}:1: HEAD of word 1 of 1 is 2" and lines[2].startswith(f"{path}:3: ")


def random_heads(draw: random.Random, size: int) -> list[int]:
    """Heads of a random tree, crossing arcs included."""
    order = draw.sample(range(size), size)
    return [-1 if word == order[0] else draw.choice(order[: order.index(word)]) for word in range(size)]


def test_lifting_and_structures_of_random_trees(tmp_path: Path):
    """Lifted trees do not cross, words move to ancestors only; flat constituents are part of the binary structures."""
    draw = random.Random(0)
    path = tmp_path / "random.conllu"
    trees = [random_heads(draw, draw.randint(2, 12)) for _ in range(60)]
    rows = [[f"w{word} X {head + 1} {'dep' if head >= 0 else 'root'}" for word, head in enumerate(t)] for t in trees]
    path.write_text("".join(conllu(*row) for row in rows), encoding="utf-8")
    counts = Counter[str]()
    for sentence, heads in zip(read_conllu(path), trees, strict=True):
        assert list(sentence.heads) == heads
        above = {word: set() for word in range(len(heads))}
        for word in above:
            at = heads[word]
            while at >= 0:
                above[word].add(at)
                at = heads[at]
        lifted = lift(sentence, counts)
        assert not crossing_arcs(lifted.heads)
        assert all(head == -1 or head in above[word] for word, head in enumerate(lifted.heads))
    assert counts["lifts"] >= counts["words moved"] > 20
    flat, left, right = (list(read_dependency_trees(path, structure=s)) for s in ("flat", "left-first", "right-first"))
    for sentences in zip(flat, left, right, strict=True):
        number = len(sentences[0].words)
        for sentence in sentences:
            validate_spans(sentence.spans, number)
        assert len(sentences[1].spans) == len(sentences[2].spans) == number - 1
        assert set(sentences[0].spans) <= set(sentences[1].spans) & set(sentences[2].spans)
    skipped = Counter[str]()
    kept = list(read_dependency_trees(path, nonprojective="skip", left_out=skipped))
    assert len(kept) + skipped["not projective"] == 60 and skipped["not projective"] > 20


def test_the_command_writes_trees_that_every_program_reads(tmp_path: Path, capsys):
    out = tmp_path / "de.mrg"
    assert main(["treebank", str(GOLDENS / "de.conllu"), "--labels", "deprel", "--out", str(out)]) == 0
    expected = TREES["de.flat.deprel.surface.keep"]
    assert out.read_text(encoding="utf-8").splitlines() == expected
    said = capsys.readouterr().err
    assert "multiword tokens" in said and "crossing arcs" in said
    facts = json.loads(Path(f"{out}.meta.json").read_text())["dependencies"]
    assert facts["labels"] == "deprel" and facts["lifts"] == 1
    assert [sentence_to_brackets(sentence) for sentence in read_treebank(out)] == expected
    # Dependencies themselves can be read wherever brackets can, with the defaults.
    found = [sentence_to_brackets(sentence) for sentence in read_treebank(GOLDENS / "de.conllu")]
    assert found == TREES["de.flat.upos.surface.keep"]
    removed = ["treebank", str(GOLDENS / "ja.conllu"), "--punctuation", "remove", "--out", str(tmp_path / "ja.mrg")]
    assert main(removed) == 0
    assert (tmp_path / "ja.mrg").read_text(encoding="utf-8").splitlines() == TREES["ja.flat.upos.surface.remove"]


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys):
    out = ("--out", tmp_path / "out.mrg")
    de, mrg = GOLDENS / "de.conllu", tmp_path / "de.mrg"
    mrg.write_text("\n".join(TREES["de.flat.X.surface.keep"]), encoding="utf-8")
    for command, message in (
        ((mrg, "--structure", "flat"), "holds bracketed trees, which are constituents already. Leave out --structure"),
        ((de, "--binarize", "right"), "holds dependencies, but --binarize"),
        ((de, "--words", "ptb-concat"), "holds dependencies, but --words ptb-concat"),
        ((de, "--nonprojective", "refuse"), "the arc to 'Hund' is not projective"),
        ((de, "--punctuation-by", "form"), "holds dependencies, but --punctuation-by form"),
        ((de, "--from", "brackets"), "'1' stands outside of all trees"),
    ):
        assert message in fail(capsys, "treebank", *command, *out)
    untagged = tmp_path / "untagged.txt"
    untagged.write_text(conllu("a _ 2 dep", "b _ 0 root"), encoding="utf-8")
    assert "no word has a UPOS" in fail(capsys, "treebank", untagged, *out)
    assert main(["treebank", str(untagged), "--labels", "X", "--out", str(out[1])]) == 0
    assert out[1].read_text() == "(X (_ a) (_ b))\n"


def test_what_files_hold_beside_universal_dependencies(tmp_path: Path, capsys):
    """CoNLL-X with tags of the Penn Treebank, labels with parentheses, white space in words, no heads."""
    path, out = tmp_path / "x.conllx", tmp_path / "out.mrg"
    path.write_text(conllu("It PRP 2 nsubj", "rains$ $( 0 root", ". . 2 p", "- : 2 p"), encoding="utf-8")
    assert main(["treebank", str(path), "--punctuation", "remove", "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == "($-LRB-P (PRP It) ($-LRB- rains$))\n"
    assert "2 punctuation removed" in capsys.readouterr().err
    facts = json.loads(Path(f"{out}.meta.json").read_text())["dependencies"]
    assert facts["structure"] == "flat" and facts["empty nodes"] == 0
    spaces = conllu("a\u00a0\u00a0b X 0 root".replace("\u00a0", "~")).replace("~", "\u00a0")
    path.write_text(spaces.replace("1\t", "1-1\t\u00a0c" + "\t_" * 8 + "\n1\t"), encoding="utf-8")
    counts = Counter[str]()
    assert read_conllu(path, "syntactic")[0].words == ("a__b",)
    assert read_conllu(path, counts=counts)[0].words == ("_c",) and counts["words with white space"] == 1
    path.write_text(conllu("a X _ dep") * 3, encoding="utf-8")
    refused("no word has a HEAD. Parse the text first", read_conllu, path)
    wrong = {"a X 0 ~": "DEPREL is empty", "a ~ 0 root": "UPOS is empty", "a X~X 0 root": "white space"}
    for row, message in wrong.items():
        path.write_text(conllu(row).replace("X~X", "X X").replace("~", ""), encoding="utf-8")
        refused(message, read_conllu, path)


def test_evalb_removes_punctuation():
    (gold,) = parse_treebank(["(VERBP (NOUNP (DET the) (NOUN cat)) (PUNCT ,) (VERB sleeps) (PUNCT .))"])
    assert labeled_f1([(["NOUNP", "VERBP"], [(0, 3), (0, 5)])], [gold]).overall.f1 == 1


def test_pipes_are_read_once(tmp_path: Path):
    trees = "\n".join(TREES["de.flat.X.surface.keep"] * 1000)
    for text in (trees, (GOLDENS / "de.conllu").read_text(encoding="utf-8") * 300):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=lambda: pipe.write_text(text, encoding="utf-8"), daemon=True)  # noqa: B023
        writer.start()
        assert len(list(read_treebank(pipe))) == (3000 if text is trees else 900)
        pipe.unlink()


def test_a_chain_that_needs_thousands_of_lifts(tmp_path: Path):
    """Through the even and then the odd places; each lift moves one word."""
    order = [*range(0, 150, 2), *range(1, 150, 2)]
    heads = {word: before for before, word in itertools.pairwise(order)}
    rows = [f"w X {heads[k] + 1 if k in heads else 0} {'dep' if k in heads else 'root'}" for k in range(150)]
    path = tmp_path / "chain.conllu"
    path.write_text(conllu(*rows), encoding="utf-8")
    counts = Counter[str]()
    (sentence,) = read_conllu(path)
    assert not crossing_arcs(lift(sentence, counts).heads) and counts["lifts"] > 2000


def test_programs_read_dependencies(tmp_path: Path, capsys):
    """Training and evaluation take CoNLL-U where they take brackets; punctuation is told by UPOS."""
    treebank = str(GOLDENS / "en.conllu")
    run = ["train", "rnng", "--config", "rnng_tiny", "--train-file", treebank, "--validation-file", treebank]
    run += ["--test-files", "--max-train-steps", "1", "--evaluation-steps", "0", "--search-sentences", "0"]
    run += ["--final-search-sentences", "0", "--tree-labels", "deprel", "--tree-tokens", "syntactic"]
    assert main([*run, "--output-dir", str(tmp_path / "run")]) == 0
    labels = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["nonterminals"]
    assert {"root", "acl:relcl"} <= set(labels)
    capsys.readouterr()
    scored = ("evaluate", "parsing", "--treebank", treebank, "--model", tmp_path / "run" / "model", "--num-beams", 2)
    assert "punctuation removed before parsing" in run_command(capsys, *scored)
    # Brackets have none of these options.
    brackets = tmp_path / "en.mrg"
    brackets.write_text("\n".join(TREES["en.flat.X.surface.keep"]), encoding="utf-8")
    run[run.index(treebank)] = str(brackets)
    punctuation = [*run[: run.index("--tree-labels")], "--tree-punctuation", "remove"]
    assert "dependencies (punctuation)" in fail(capsys, *punctuation, "--output-dir", tmp_path / "other")
    said = fail(capsys, *run, "--output-dir", tmp_path / "other")
    assert "constituents already. Leave out the options of dependencies (labels, tokens)" in said


def test_the_programs_hand_over_every_option(tmp_path: Path):
    treebank = str(GOLDENS / "de.conllu")
    given = {"structure": "left-first", "labels": "X", "punctuation": "remove", "nonprojective": "lift"}
    arguments = {f"tree_{name}": value for name, value in given.items()}
    expected = [sentence_to_brackets(sentence) for sentence in read_dependency_trees(treebank, **given)]
    rows = TreeDataArguments([treebank], [treebank], **arguments)
    found = load_trees(Accelerator(cpu=True), rows.train_files, rows.reading)
    assert [sentence_to_brackets(row_to_sentence(row)) for row in found] == expected
    brackets = tmp_path / "swbd.mrg"
    brackets.write_text("(S*A (EDITED (NP (PRP I-i) (UH um-um))) (VP (VBP mean-mean) (NP (NN New York-York))))\n")
    given = {"drop_tags": ["UH"], "drop_labels": ["EDITED"], "label_separators": "*", "lemma_separator": "-"}
    rows = TreeDataArguments([str(brackets)], [str(brackets)], split_leaves=True, **given)
    (row,) = load_trees(Accelerator(cpu=True), rows.train_files, rows.reading)
    expected_words = "(S (NP (PRP I)) (VP (VBP mean) (NP (NN New) (NN York))))"
    assert sentence_to_brackets(row_to_sentence(row)) == expected_words
    stream = StreamDataArguments([treebank], [treebank], **arguments)
    assert [sentence_to_brackets(tree) for tree in read_trees(stream.train_files, reading=stream.reading)] == expected


def test_evaluation_chooses_constituents_of_dependencies(tmp_path: Path, capsys):
    """Punctuation goes before conversion; the recall of flat constituents stands beside F1 and its bound."""
    treebank, trees = GOLDENS / "de.conllu", tmp_path / "trees.txt"
    found = read_dependency_trees(treebank, structure="right-first", punctuation="remove")
    trees.write_text("\n".join(map(sentence_to_brackets, found)), encoding="utf-8")
    command = ["evaluate", "parsing", "--treebank", str(treebank), "--trees", str(trees), "--tree-style", "treebank"]
    for structure, f1 in (("right-first", 100.0), ("flat", None)):
        out = tmp_path / f"{structure}.json"
        assert main([*command, "--structure", structure, "--out", str(out)]) == 0
        result = json.loads(out.read_text(encoding="utf-8"))
        assert result["scores"]["recall"] == 100 and (f1 is None or result["scores"]["f1"] == f1)
    rows = {row["trees"]: row for row in result["tables"]["unlabeled F1 (%)"]}
    assert result["scores"]["f1"] < 100 and rows["binarized gold"]["recall"] == 100
    assert rows["right"]["recall"] < 100
    # Dependencies of a parser are read as the gold ones.
    copy = tmp_path / "copy.conllu"
    copy.write_bytes(treebank.read_bytes())
    for options in (["--structure", "right-first"], ["--labels", "deprel", "--convention", "evalb"], ["--limit", "2"]):
        command = ["evaluate", "parsing", "--treebank", str(treebank), "--trees", str(copy), *options]
        assert main([*command, "--out", str(out), "--overwrite"]) == 0
        assert json.loads(out.read_text(encoding="utf-8"))["scores"]["f1"] == 100
    command = ("evaluate", "parsing", "--treebank", trees, "--trees", trees, "--structure", "flat")
    assert "Leave out the options of dependencies (structure)" in fail(capsys, *command)


def test_marked_heads_give_the_dependencies_back(tmp_path: Path):
    """In every structure, from the word that is marked all the way down, to the head of what is around it."""
    out = tmp_path / "marked.mrg"
    for structure in ("flat", "left-first", "right-first"):
        command = ["treebank", str(GOLDENS / "de.conllu"), "--structure", structure, "--mark-heads", "--overwrite"]
        assert main([*command, "--out", str(out)]) == 0
        written = out.read_text(encoding="utf-8")
        cut = [sentence_to_brackets(sentence) for sentence in parse_treebank(written.splitlines())]
        assert cut == TREES[f"de.{structure}.upos.surface.keep"]
        for line, sentence in zip(written.splitlines(), read_conllu(GOLDENS / "de.conllu"), strict=True):
            assert heads_of_marks(line) == list(lift(sentence, Counter()).heads)


def heads_of_marks(line: str) -> list[int]:
    """Heads of a tree whose parts that hold the head are marked."""
    heads: dict[int, int] = {}
    open_nodes: list[list[tuple[str, int]]] = [[]]
    labels, count = [], 0
    for symbol in re.findall(r"\([^\s()]+|\)|[^\s()]+", line):
        if symbol.startswith("("):
            labels.append(symbol[1:])
            open_nodes.append([])
        elif symbol == ")":
            parts = open_nodes.pop()
            head = next(word for label, word in parts if label == "" or label.endswith("-HD"))
            heads |= {word: head for _, word in parts if word != head}
            open_nodes[-1].append((labels.pop(), head))
        else:
            open_nodes[-1].append(("", count))
            count += 1
    (_, root) = open_nodes[0][0]
    return [heads.get(word, -1) if word != root else -1 for word in range(count)]
