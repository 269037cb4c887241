"""Treebank and text readers, trees as actions, batches, the embedded corpus."""

import bz2
import dataclasses
import gzip
import itertools
import json
import lzma
from collections import Counter

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_synlm.cli import main
from hf_synlm.data.collate import collate_contexts, word_ends_from_offsets, word_ends_from_word_ids
from hf_synlm.data.gold_trees import encode_trees, label_inventory
from hf_synlm.data.punctuation import check_tags, keep_words
from hf_synlm.data.samples import sample_path
from hf_synlm.data.text import read_lines, split_sentences
from hf_synlm.data.treebank import WORD_TAGS, clean_label, parse_treebank, read_treebank
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.trees.codecs import LabeledCodec
from hf_synlm.trees.spans import in_post_order, validate_spans
from hf_synlm.trees.transitions import FINISH, REDUCE, SHIFT
from tests.helpers.commands import fail
from tests.helpers.refusals import refused

# Treebank


def parse(text: str, **options):
    return list(parse_treebank(text.splitlines(keepends=True), **options))


def test_penn_treebank_tree():
    (sentence,) = parse(
        "( (S (NP-SBJ-1 (DT The) (NN cat)) (VP (VBZ seems) (S (NP-SBJ (-NONE- *-1)) (VP (TO to) (VP (VB sleep)))))"
        " (. .)) )"
    )
    assert sentence.words == ("The", "cat", "seems", "to", "sleep", ".")
    assert sentence.tags == ("DT", "NN", "VBZ", "TO", "VB", ".")
    assert sentence.labeled_spans == (
        ("NP", 0, 2), ("VP", 4, 5), ("VP", 3, 5), ("S", 3, 5), ("VP", 2, 5), ("S", 0, 6)
    )  # fmt: skip
    assert sentence.spans == [(0, 2), (3, 5), (2, 5), (0, 6)]
    assert sentence.source == "<text>:1"


def test_labels():
    labels = {"NP-SBJ-1": "NP", "NP=2": "NP", "ADVP|PRT": "ADVP", "-LRB-": "-LRB-", "-NONE-": "-NONE-", "PRP$": "PRP$"}
    for label, cleaned in {**labels, "=": "=", "S": "S"}.items():
        assert clean_label(label) == cleaned


def test_layout_of_the_file_is_free(tmp_path):
    file = tmp_path / "trees.mrg"
    file.write_bytes(b"\xef\xbb\xbf(S (A a)\r\n   (B b))(S (A c)(B d))\r\n\r\n  (TOP (S\r\n(A e\r\n)(B f)))")
    sentences = list(read_treebank(file))
    assert [s.words for s in sentences] == [("a", "b"), ("c", "d"), ("e", "f")]
    assert [s.source for s in sentences] == [f"{file}:1", f"{file}:2", f"{file}:4"]


CLEANED = [
    ("(S (NP-SBJ=1 (NN-X a)) (PRT|ADVP (RP b)))", {}, "a/NN b/RP", "NP 0 1, PRT 1 2, S 0 2"),
    ("(S (NP-SBJ=1 (NN a)) (VP (B b)))", {"keep_functions": True}, "a/NN b/B", "NP-SBJ=1 0 1, VP 1 2, S 0 2"),
    # Wrappers go, unless they are the only constituent over the whole sentence.
    *((wrapper.format("(S (A a) (B b))"), {}, "a/A b/B", "S 0 2")
      for wrapper in ("( {} )", "(TOP {})", "(ROOT {})", "(S1 {})", "( (TOP {}))", "{}")),
    ("( (NP (A a) (B b)) (. .))", {}, "a/A b/B ./.", "NP 0 2, ROOT 0 3"),
    ("( (NP (A a)) (VP (-NONE- *)) )", {}, "a/A", "NP 0 1"),
    ("( (A a) (B b) )", {}, "a/A b/B", "ROOT 0 2"),
    ("(TOP (A a) (B b) )", {}, "a/A b/B", "TOP 0 2"),
    ("(A a)", {}, "a/A", "ROOT 0 1"),
    ("( (A a) )", {}, "a/A", "ROOT 0 1"),
    ("(TOP (A a) (-NONE- *))", {}, "a/A", "TOP 0 1"),
    ("(S (VP (V (X go) (Y on))))", {}, "go/X on/Y", "V 0 2, VP 0 2, S 0 2"),
    ("(PRN (-LRB- -LRB-) (NN x) (-RRB- -RRB-))", {}, "-LRB-/-LRB- x/NN -RRB-/-RRB-", "PRN 0 3"),
    ("(NP (NN New York) (NN x))", {"split_leaves": True}, "New/NN York/NN x/NN", "NP 0 3"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "words", "labeled_spans"), CLEANED)
def test_trees_are_cleaned(text, options, words, labeled_spans):
    (sentence,) = parse(text, **options)
    assert " ".join(f"{word}/{tag}" for word, tag in zip(sentence.words, sentence.tags, strict=True)) == words
    assert ", ".join(f"{label} {i} {j}" for label, i, j in sentence.labeled_spans) == labeled_spans
    assert sentence.spans == list(dict.fromkeys((i, j) for _, i, j in sentence.labeled_spans if j > i + 1))


def test_dropping_punctuation():
    text = "(S (`` ``) (S (NP (PRP I)) (VP (VBP am) (, ,))) ('' '') (FRAG (: -) (: -)) (. .))\n(X (. .))"
    first, second = parse(text)
    sentence = first.select_words(keep_words(first.words, first.tags, "tag"))
    assert sentence.words == ("I", "am")
    assert sentence.labeled_spans == (("NP", 0, 1), ("VP", 1, 2), ("S", 0, 2), ("S", 0, 2))
    assert not second.select_words(keep_words(second.words, second.tags, "tag")).words
    assert len(WORD_TAGS) == 36


SCRIPTS = [
    (". , ; ? ! - -- ... `` '' ' % & # $ -LRB- 3.5 U.S. n't '", "' % & # $ 3.5 U.S. n't '"),
    ("§§ ** ~ < | ´ \\/ != …… ——", "§§ ** \\/ !="),
    ("« oui » – non … ¿ qué ? ‚so‘ “ ” ' ’", "oui non qué ‚so‘ ' ’"),
    ("太郎 。 、 「 本 」 ・ ！ ５％ ％", "太郎 本 ５％ ％"),
    ("كتاب ، ؛ ؟ राम । ॥ שלום ־ שלום", "كتاب राम שלום שלום"),
]


@pytest.mark.parametrize(("words", "kept"), SCRIPTS)
def test_punctuation_by_form_is_that_of_every_script(words, kept):
    found = keep_words(words.split(), ["X"] * len(words.split()), "form")
    assert [word for word, keep in zip(words.split(), found, strict=True) if keep] == kept.split()


def test_tags_of_universal_dependencies_tell_punctuation():
    tags = "DET NOUN VERB PUNCT SYM NNP , X".split()
    assert keep_words(["w"] * 8, tags, "tag") == [True, True, True, False, True, True, False, True]
    assert check_tags(Counter(tags), "") == 0


def test_one_word_and_deep_trees():
    assert parse("(FRAG (NN hello))")[0].spans == []
    depth = 3000
    (sentence,) = parse("(S (A a) " * depth + "(B b)" + ")" * depth)
    assert len(sentence.spans) == depth
    validate_spans(sentence.spans, depth + 1)


def test_malformed_trees_are_named_with_their_line():
    refused(r"<text>:1: '\(' is never closed", parse, "(S (A a)\n(B b)")
    refused("<text>:2: 'word' stands outside", parse, "(S (A a))\nword")
    refused("<text>:2: the word 'b' has no bracket", parse, "(S\n(A a) b)")
    refused(r"<text>:1: '\(' follows the word 'a'", parse, "(S (A a (B b)))")
    refused(r"<text>:2: \(B\) contains neither", parse, "(S (A a)\n(B))")
    refused("<text>:1: a bracket inside the tree has no label", parse, "(S (A a) ((B b)))")
    refused("<text>:1: the word 'York' has no bracket.*split_leaves=True", parse, "(NP (NN New York) (NN x))")
    refused("<text> contains no tree", parse, "\n \n")


# Samples


def test_samples_are_installed_and_readable():
    for kind, part in itertools.product(("raw", "trees"), ("train", "valid", "test")):
        assert sample_path(f"{kind}.{part}.txt").is_file()
    assert "CC0" in sample_path("NOTICE.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("split", "num_trees"), [("train", 2000), ("valid", 175), ("test", 250)])
def test_sample_trees(split, num_trees):
    sentences = list(read_treebank(sample_path(f"trees.{split}.txt")))
    assert len(sentences) == num_trees
    for sentence in sentences:
        assert 4 <= len(sentence.words) <= 25
        assert in_post_order(sentence.spans, len(sentence.words)) == sentence.spans


# Trees as actions


@pytest.fixture(scope="module")
def pieces():
    """A tokenizer that cuts words into pairs of letters."""
    stock = Tokenizer(models.WordLevel({"<unk>": 0, "th": 1, "e": 2, "ca": 3, "t": 4, "a": 5}, unk_token="<unk>"))
    stock.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"..?"), "isolated")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=stock, unk_token="<unk>")


def test_oracle(pieces):
    sentences = parse("(S (NP (DT the) (NN cat)) (. a))\n(NP (NN cat))")
    labels = label_inventory(sentences)
    assert labels == ("NP", "S")
    top_down = encode_trees(sentences, pieces, LabeledCodec("top_down", labels))
    assert top_down[0] == {
        "input_ids": [1, 2, 3, 4, 5],
        "actions": [4, 3, SHIFT, SHIFT, SHIFT, SHIFT, REDUCE, SHIFT, REDUCE],
        "word_ends": [False, True, False, True, True],
    }
    in_order = LabeledCodec("in_order", labels)
    assert encode_trees(sentences[:1], pieces, in_order)[0]["actions"] == [
        SHIFT, SHIFT, 4, SHIFT, SHIFT, REDUCE, 5, SHIFT, REDUCE, FINISH
    ]  # fmt: skip
    assert encode_trees([], pieces, in_order) == []
    batch = in_order.pad(top_down, pad_token_id=7)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [3, 4, 7, 7, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch["actions"].tolist() == [[4, 3, 1, 1, 1, 1, 2, 1, 2], [3, 1, 1, 2, 0, 0, 0, 0, 0]]
    assert batch["word_ends"].tolist() == [[False, True, False, True, True], [False, True, False, False, False]]
    assert {key for key in batch if batch[key].dtype is not torch.long} == {"word_ends"}
    with pytest.raises(ValueError, match="<text>:1: a word is the padding token"):
        encode_trees(parse("(S (NN the) (NN <pad>))"), word_tokenizer([["the"]]), in_order)


def test_sentences_that_the_oracle_cannot_encode_are_named(pieces):
    (good, bad) = parse("(S (NP (A a)) (B b))\n(S (QP (A a)) (B b))")
    codec = LabeledCodec("top_down", ("NP", "S"))
    refused(r"<text>:2: the label 'QP' is not one of the 2 labels NP, S", encode_trees, [good, bad], pieces, codec)
    refused("no labeled constituent", label_inventory, [])
    for change, message in [
        ({"words": ("a b", "c")}, "word 0 is 'a b'"),
        ({"labeled_spans": (("NP", 0, 1),)}, r"the whole-sentence span \(0, 2\) is missing"),
        ({"labeled_spans": ()}, "the tree has no constituent"),
    ]:
        refused(f"<text>:1: {message}", encode_trees, [dataclasses.replace(good, **change)], pieces, codec)


# Text


def test_lines(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffone\r\ntwo \r\n\r\n \t\r\nthree".encode())
    assert list(read_lines(file)) == ["one", "two ", "", " \t", "three"]


def test_sentences():
    text = 'Dr. Smith went to Washington. He arrived at 5 p.m. yesterday. "Really?" he said.'
    sentences = ["Dr. Smith went to Washington.", "He arrived at 5 p.m. yesterday.", '"Really?" he said.']
    assert split_sentences(f" {text} ") == sentences
    assert split_sentences("これは本です。それも本です。", language="ja") == ["これは本です。", "それも本です。"]


def test_other_encodings(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("fine\nna\xefve".encode("latin-1"))
    assert list(read_lines(file, encoding="latin-1")) == ["fine", "na\xefve"]
    refused(r"latin.txt:2: byte 0xef is not utf-8", list, read_lines(file))
    refused(r"latin.txt:2: byte 0xef", list, read_treebank(file))
    long_file = tmp_path / "long.txt"
    long_file.write_bytes(b"line\n" * 100_000 + b"\xff")
    refused("long.txt:100001: byte 0xff", list, read_lines(long_file))


@pytest.mark.parametrize("packing", [gzip, bz2, lzma])
def test_compressed_files(tmp_path, packing):
    """Files are unpacked by their content, whatever their name; what is cut off or packed otherwise is named."""
    data = "one\ntwo \u00e9\n".encode() * 1000
    file = tmp_path / "text.txt"
    file.write_bytes(packing.compress(data))
    assert list(read_lines(file)) == ["one", "two \u00e9"] * 1000
    file.write_bytes(packing.compress(data)[:-9])
    refused("text.txt cannot be unpacked", list, read_lines(file))
    file.write_bytes(packing.compress(b"one\n\xff"))
    refused("text.txt:2: byte 0xff is not utf-8", list, read_lines(file))
    file.write_bytes(b"PK\x03\x04 zip")
    refused("text.txt is compressed in an unknown format. Unpack it", list, read_lines(file))
    file.write_text("BZh9 is a word")
    assert list(read_lines(file)) == ["BZh9 is a word"]


# Batches


def test_collating_by_hand():
    batch = collate_contexts(
        [
            {"input_ids": [5, 9, 7], "sentence_ids": [1, 1, 2], "word_ends": [False, True, True], "id": "x"},
            {"input_ids": [9], "sentence_ids": [1], "word_ends": [True]},
        ],
        pad_token_id=9,
    )
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 9, 7], [9, 9, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[5, 9, 7], [9, -100, -100]],
        "sentence_ids": [[1, 1, 2], [1, 0, 0]],
        "word_ends": [[False, True, True], [True, False, False]],
    }
    assert {name for name, value in batch.items() if value.dtype != torch.int64} == {"word_ends"}


def test_collating_contexts_of_one_sentence():
    batch = collate_contexts([{"input_ids": torch.tensor([5, 6])}, {"input_ids": [7]}], pad_token_id=0)
    assert batch["sentence_ids"].tolist() == [[1, 1], [1, 0]]
    assert "word_ends" not in batch


OFFSETS = [
    [(0, 2), (2, 5), (5, 7), (7, 8), (8, 12)],  # the space belongs to the token
    [(0, 2), (2, 5), (6, 7), (7, 8), (9, 12)],  # it does not
    [(0, 2), (2, 5), (6, 6), (6, 8), (9, 12)],  # a token that is only the space, trimmed to nothing
]


@pytest.mark.parametrize("offsets", OFFSETS)
def test_word_ends_from_offsets(offsets):
    assert word_ends_from_offsets(offsets, ["fruit", "of", "fly"]) == [False, True, False, True, True]


def test_word_ends_of_shared_characters_and_missing_tokens():
    assert word_ends_from_offsets([(0, 1), (0, 1), (1, 3), (2, 3)], ["é", "é"]) == [False, True, False, True]
    for offset, message in [
        ((0, 3), r"characters 0\.\.3 spans 'a' and 'b'"),
        ((0, 1), r"word 1 \('b'\) has no token"),
        ((2, 3), r"word 0 \('a'\) has no token"),
    ]:
        refused(message, word_ends_from_offsets, [offset], ["a", "b"])


def test_word_ends_from_word_ids():
    assert word_ends_from_word_ids([None, 0, 0, 1, None]) == [True, False, True, True, True]
    assert word_ends_from_word_ids([0, 0]) == [False, True]
    assert word_ends_from_word_ids([]) == []


def test_treebank_command(tmp_path, capsys):
    """Trees of parsers and treebanks, in one clean file with counts and checksums."""
    benepar = "(TOP\n  (S\n    (NP (DT The) (NN cat))\n    (VP (VBZ sees) (NP (PRP it)) (ADVP (RB now)))\n    (. .)))\n"
    stanza = "(ROOT (S (NP (PRP We)) (VP (VBP agree)) (. .)))\n(ROOT (X (. ...)))\n(S (NP (-NONE- *)))\n"
    penn = "( (S (NP-SBJ-1 (NNP America)) (VP (VBZ wins) (NP-TMP (CD 3) (NNS days)) (NP (-NONE- *T*-1)))) )\n"
    for name, text in (("a.txt", benepar), ("b.txt", stanza), ("c.mrg", penn)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files, out = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.mrg")], tmp_path / "out.txt"
    command = ["treebank", *files, "--out", str(out)]
    assert main([*command, "--punctuation", "remove", "--binarize", "right"]) == 0
    assert out.read_text().split("\n")[:3] == [
        "(S (NP (DT The) (NN cat)) (VP (VBZ sees) (VP (NP (PRP it)) (ADVP (RB now)))))",
        "(S (NP (PRP We)) (VP (VBP agree)))",
        "(S (NP (NNP America)) (VP (VBZ wins) (NP (CD 3) (NNS days))))",
    ]
    facts = json.loads((tmp_path / "out.txt.meta.json").read_text())
    assert (facts["trees"], facts["words"], facts["left_out"]) == (3, 11, {"no words": 1, "no words left": 1})
    assert [len(facts[name]) for name in ("inputs", "output")] == [3, 1]
    assert facts["command"].startswith("synlm treebank")
    printed = capsys.readouterr().err
    assert all(f"1 left out ({why})" in printed for why in ("no words", "no words left"))
    assert main([*command, "--words", "ptb-concat", "--max-words", "4", "--overwrite"]) == 0
    assert out.read_text().startswith("(S (NP (PRP we))") and "(CD N)" in out.read_text()
    # What it writes reads as it is.
    assert main(["treebank", str(out), "--out", str(tmp_path / "again.txt")]) == 0
    assert (tmp_path / "again.txt").read_text() == out.read_text()
    (tmp_path / "a.txt").write_text("(S (NP (DT The)\n", encoding="utf-8")
    assert "a.txt" in fail(capsys, *command, "--overwrite") and out.read_text().startswith("(S (NP (PRP we))")
    # Tags that are not the Penn Treebank's do not tell punctuation.
    (tmp_path / "d.txt").write_text("(S (FOO a) (NN b) (BAR c) (. .))\n", encoding="utf-8")
    other = ["treebank", str(tmp_path / "d.txt"), "--out", str(tmp_path / "d.out"), "--punctuation", "remove"]
    assert "such as FOO, BAR" in (said := fail(capsys, *other)) and "--punctuation-by form" in said
    assert main([*other, "--punctuation-by", "form"]) == 0
    assert (tmp_path / "d.out").read_text() == "(S (FOO a) (NN b) (BAR c))\n"
    said = fail(capsys, "treebank", tmp_path / "d.out", "--max-words", 2, "--out", tmp_path / "f.out")
    assert "d.out: 1 left out (more than 2 words). Give other files or weaker filters." in said
    (tmp_path / "none.mrg").write_text("((S (-NONE- *)))\n", encoding="utf-8")
    said = fail(capsys, "treebank", tmp_path / "none.mrg", "--out", tmp_path / "f.out")
    assert "1 left out (no words). Give other files or weaker filters." in said
    # What `synlm parse` writes has no tags, and perhaps no labels.
    (tmp_path / "e.txt").write_text("((the cat) (sat .))\n\n(go (on .))\n", encoding="utf-8")
    parses = ["treebank", str(tmp_path / "e.txt"), "--from", "parses", "--out", str(tmp_path / "e.out")]
    assert "words of --from parses have no tags" in fail(capsys, *parses, "--punctuation", "remove")
    assert main([*parses, "--punctuation", "remove", "--punctuation-by", "form"]) == 0
    assert (tmp_path / "e.out").read_text() == "(X (X (X the) (X cat)) (X (X sat)))\n(X (X go) (X (X on)))\n"
    assert "1 left out (no tree)" in capsys.readouterr().err
    (tmp_path / "e.txt").write_text("(the (dog barks))\n")
    assert main([*parses, "--overwrite"]) == 0 and "If this is wrong, give --tree-style" in capsys.readouterr().err
    assert main([*parses, "--overwrite", "--tree-style", "labeled"]) == 0
    assert (tmp_path / "e.out").read_text() == "(the (dog (X barks)))\n"
    assert "--tree-style is for --from parses" in fail(capsys, *command, "--overwrite", "--tree-style", "labeled")
    # Where trees stand on one line each, all bad ones are listed.
    (tmp_path / "a.txt").write_text("(S (X a))\n(S (X a)\n\n(S (X b))\n(S a (X b))\n(S (X c))\n", encoding="utf-8")
    listed = fail(capsys, *command, "--overwrite")
    assert "2 lines are not trees" in listed and "line 2: '(' is never closed" in listed and "line 5: " in listed
    assert main(command) == 2
