"""Treebank and text readers, batches, tokenizers, the embedded corpus."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from hf_synlm.actions import FINISH, REDUCE, SHIFT, TransitionSystem
from hf_synlm.data.collate import (
    collate_contexts,
    collate_trees,
    encode_words,
    word_ends_from_offsets,
    word_ends_from_word_ids,
)
from hf_synlm.data.gold_trees import encode_tree, encode_trees, label_inventory
from hf_synlm.data.samples import SAMPLE_NAMES, sample_path
from hf_synlm.data.text import read_lines, split_sentences
from hf_synlm.data.tokenizers import (
    GPST_EXTRA_TOKENS,
    encode_sentences,
    load_tokenizer,
    special_token_ids,
    train_bpe_tokenizer,
    train_wordpiece_tokenizer,
)
from hf_synlm.data.treebank import PUNCTUATION_TAGS, WORD_TAGS, clean_label, parse_treebank, read_treebank
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.trees import spans_to_tree, tree_to_spans, validate_spans

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


def test_function_tags_can_be_kept():
    text = "(S (NP-SBJ=1 (NN-X a)) (PRT|ADVP (RP b)))"
    assert parse(text)[0].labeled_spans == (("NP", 0, 1), ("PRT", 1, 2), ("S", 0, 2))
    assert parse(text, keep_functions=True)[0].labeled_spans[0] == ("NP-SBJ=1", 0, 1)
    assert parse(text)[0].tags == ("NN", "RP")


@pytest.mark.parametrize(
    ("label", "cleaned"),
    [("NP-SBJ-1", "NP"), ("NP=2", "NP"), ("ADVP|PRT", "ADVP"), ("-LRB-", "-LRB-"), ("-NONE-", "-NONE-"),
     ("PRP$", "PRP$"), ("=", "="), ("S", "S")],
)  # fmt: skip
def test_labels(label, cleaned):
    assert clean_label(label) == cleaned


def test_layout_of_the_file_is_free(tmp_path):
    file = tmp_path / "trees.mrg"
    file.write_bytes(b"\xef\xbb\xbf(S (A a)\r\n   (B b))(S (A c)(B d))\r\n\r\n  (TOP (S\r\n(A e\r\n)(B f)))")
    sentences = list(read_treebank(file))
    assert [s.words for s in sentences] == [("a", "b"), ("c", "d"), ("e", "f")]
    assert [s.source for s in sentences] == [f"{file}:1", f"{file}:2", f"{file}:4"]


@pytest.mark.parametrize("wrapper", ["( {} )", "(TOP {})", "(ROOT {})", "(S1 {})", "( (TOP {}))", "{}"])
def test_root_wrappers(wrapper):
    (sentence,) = parse(wrapper.format("(S (A a) (B b))"))
    assert sentence.labeled_spans == (("S", 0, 2),)


def test_a_wrapper_around_several_constituents_stays():
    (sentence,) = parse("( (NP (A a) (B b)) (. .))")
    assert sentence.labeled_spans == (("NP", 0, 2), ("ROOT", 0, 3))


def test_every_tree_has_a_constituent_over_the_whole_sentence():
    assert parse("( (S (NP (A a)) (VP (B b))) (. .))", drop_tags=["."])[0].labeled_spans[-2:] == (
        ("VP", 1, 2), ("S", 0, 2)
    )  # fmt: skip
    assert parse("( (NP (A a)) (VP (-NONE- *)) )")[0].labeled_spans == (("NP", 0, 1),)
    assert parse("( (A a) (B b) )")[0].labeled_spans == (("ROOT", 0, 2),)
    assert parse("(TOP (A a) (B b) )")[0].labeled_spans == (("TOP", 0, 2),)
    for text in ("(A a)", "( (A a) )", "(TOP (A a) (-NONE- *))"):
        assert len(parse(text)[0].labeled_spans) == 1
    assert parse("(A a)")[0].labeled_spans == (("ROOT", 0, 1),)


def test_unary_chains_are_kept_and_their_spans_given_once():
    (sentence,) = parse("(S (VP (V (X go) (Y on))))")
    assert sentence.labeled_spans == (("V", 0, 2), ("VP", 0, 2), ("S", 0, 2))
    assert sentence.spans == [(0, 2)]


def test_dropping_punctuation():
    text = "(S (`` ``) (S (NP (PRP I)) (VP (VBP am) (, ,))) ('' '') (FRAG (: -) (: -)) (. .))\n(X (. .))"
    (sentence,) = parse(text, drop_tags=PUNCTUATION_TAGS)
    assert sentence.words == ("I", "am")
    assert sentence.labeled_spans == (("NP", 0, 1), ("VP", 1, 2), ("S", 0, 2), ("S", 0, 2))
    assert parse(text, keep_tags=WORD_TAGS) == [sentence]
    assert len(WORD_TAGS) == 36


def test_parentheses_as_words():
    (sentence,) = parse("(PRN (-LRB- -LRB-) (NN x) (-RRB- -RRB-))")
    assert sentence.tags == ("-LRB-", "NN", "-RRB-")
    assert parse("(PRN (-LRB- -LRB-) (NN x) (-RRB- -RRB-))", drop_tags=PUNCTUATION_TAGS)[0].words == ("x",)


def test_leaves_of_several_words():
    text = "(NP (NN New York) (NN x))"
    with pytest.raises(ValueError, match="<text>:1: the word 'York' has no bracket.*split_leaves=True"):
        parse(text)
    assert parse(text, split_leaves=True)[0].words == ("New", "York", "x")


def test_one_word_and_deep_trees():
    assert parse("(FRAG (NN hello))")[0].spans == []
    depth = 3000
    (sentence,) = parse("(S (A a) " * depth + "(B b)" + ")" * depth)
    assert len(sentence.spans) == depth
    validate_spans(sentence.spans, depth + 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(S (A a)\n(B b)", r"<text>:1: '\(' is never closed"),
        ("(S (A a))\n)", r"<text>:2: '\)' closes nothing"),
        ("(S (A a))\nword", "<text>:2: 'word' stands outside"),
        ("(S\n(A a) b)", "<text>:2: the word 'b' has no bracket"),
        ("(S (A a (B b)))", r"<text>:1: '\(' after the word 'a'"),
        ("(S (A a)\n(B))", r"<text>:2: \(B\) holds neither"),
        ("(S (A a) ())", r"<text>:1: \(\) holds neither"),
        ("(S (A a) ((B b)))", "<text>:1: a bracket inside the tree has no label"),
        ("\n \n", "<text> holds no tree"),
    ],
)
def test_malformed_trees_are_named_with_their_line(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


# Samples


def test_samples_are_installed_and_readable():
    assert {sample_path(name).name for name in SAMPLE_NAMES} == set(SAMPLE_NAMES)
    assert all(sample_path(name).is_file() for name in SAMPLE_NAMES)
    assert "CC0" in sample_path("NOTICE.txt").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="no sample 'x'.*raw.train.txt"):
        sample_path("x")


@pytest.mark.parametrize(("split", "num_trees"), [("train", 2000), ("valid", 175), ("test", 250)])
def test_sample_trees(split, num_trees):
    sentences = list(read_treebank(sample_path(f"trees.{split}.txt")))
    assert len(sentences) == num_trees
    for sentence in sentences:
        assert 4 <= len(sentence.words) <= 25
        assert tree_to_spans(spans_to_tree(sentence.spans, len(sentence.words))) == sentence.spans


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
    top_down = encode_trees(sentences, pieces, TransitionSystem("top_down", 2), labels)
    assert top_down[0] == {
        "input_ids": [1, 2, 3, 4, 5],
        "actions": [4, 3, SHIFT, SHIFT, SHIFT, SHIFT, REDUCE, SHIFT, REDUCE],
        "word_ends": [False, True, False, True, True],
    }
    in_order = TransitionSystem("in_order", 2)
    assert encode_tree(sentences[0], pieces, in_order, labels)["actions"] == [
        SHIFT, SHIFT, 4, SHIFT, SHIFT, REDUCE, 5, SHIFT, REDUCE, FINISH
    ]  # fmt: skip
    assert [encode_tree(s, pieces, TransitionSystem("top_down", 2), labels) for s in sentences] == top_down
    assert encode_trees([], pieces, in_order, labels) == []
    batch = collate_trees(top_down, pad_token_id=7)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [3, 4, 7, 7, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch["actions"].tolist() == [[4, 3, 1, 1, 1, 1, 2, 1, 2], [3, 1, 1, 2, 0, 0, 0, 0, 0]]
    assert batch["word_ends"].tolist() == [[False, True, False, True, True], [False, True, False, False, False]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5], [3, 4, -100, -100, -100]]
    assert {key for key in batch if batch[key].dtype is not torch.long} == {"word_ends"}
    with pytest.raises(ValueError, match="<text>:1: a word is the padding token"):
        encode_tree(parse("(S (NN the) (NN <pad>))")[0], word_tokenizer([["the"]]), in_order, labels)


@pytest.mark.parametrize("name", ["top_down", "in_order"])
def test_sample_trees_survive_the_oracle(name, bpe):
    sentences = [s for split in ("train", "valid", "test") for s in read_treebank(sample_path(f"trees.{split}.txt"))]
    labels = label_inventory(sentences)
    system = TransitionSystem(name, len(labels))
    for sentence, encoded in zip(sentences, encode_trees(sentences, bpe, system, labels), strict=True):
        assert sum(encoded["word_ends"]) == len(sentence.words)
        words_before = [0]
        for is_end in encoded["word_ends"]:
            words_before.append(words_before[-1] + is_end)
        spans = system.actions_to_spans(encoded["actions"], encoded["word_ends"])
        found = tuple((labels[label], words_before[i], words_before[j]) for label, i, j in spans)
        assert found == sentence.labeled_spans


def test_sentences_that_the_oracle_cannot_encode_are_named(pieces):
    (good, bad) = parse("(S (NP (A a)) (B b))\n(S (QP (A a)) (B b))")
    system = TransitionSystem("top_down", 2)
    with pytest.raises(ValueError, match=r"<text>:2: the label 'QP' of \(0, 1\) is not one of the 2 labels NP, S"):
        encode_trees([good, bad], pieces, system, ("NP", "S"))
    with pytest.raises(ValueError, match="3 labels for a system of 2"):
        encode_tree(good, pieces, system, ("NP", "QP", "S"))
    with pytest.raises(ValueError, match="no labeled constituent"):
        label_inventory([])
    for change, message in [
        ({"words": ("a b", "c")}, "word 0 is 'a b'"),
        ({"labeled_spans": (("NP", 0, 1),)}, r"the whole-sentence span \(0, 2\) is missing"),
        ({"labeled_spans": ()}, "the tree has no constituent"),
    ]:
        with pytest.raises(ValueError, match=f"<text>:1: {message}"):
            encode_tree(dataclasses.replace(good, **change), pieces, system, ("NP", "S"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [], "word_ends": []}, "sentence 0 has no tokens or no actions"),
        ({"actions": []}, "sentence 0 has no tokens or no actions"),
        ({"word_ends": [True]}, "sentence 0 has 1 word_ends for 2 tokens"),
    ],
)
def test_batches_of_trees_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match="the batch is empty"):
        collate_trees([], 0)
    with pytest.raises(ValueError, match=message):
        collate_trees([{"input_ids": [1, 2], "actions": [3, 1, 1, 2], "word_ends": [True, True], **change}], 0)


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
    with pytest.raises(ValueError, match=r"latin.txt:2: byte 0xef at position 7 is not utf-8"):
        list(read_lines(file))
    with pytest.raises(ValueError, match=r"latin.txt:2: byte 0xef"):
        list(read_treebank(file))
    long_file = tmp_path / "long.txt"
    long_file.write_bytes(b"line\n" * 100_000 + b"\xff")
    with pytest.raises(ValueError, match="long.txt:100001: byte 0xff at position 500000"):
        list(read_lines(long_file))


def test_empty_files_are_named(tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text(" \n\n", encoding="utf-8")
    with pytest.raises(ValueError, match="empty.txt holds no tree"):
        list(read_treebank(file))
    with pytest.raises(FileNotFoundError):
        list(read_lines(tmp_path / "absent.txt"))


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
    assert {name: value.dtype for name, value in batch.items()} == {
        **dict.fromkeys(("input_ids", "attention_mask", "labels", "sentence_ids"), torch.int64),
        "word_ends": torch.bool,
    }


def test_collating_contexts_of_one_sentence():
    batch = collate_contexts([{"input_ids": torch.tensor([5, 6])}, {"input_ids": [7]}], pad_token_id=0)
    assert batch["sentence_ids"].tolist() == [[1, 1], [1, 0]]
    assert "word_ends" not in batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "the batch is empty"),
        ([{"input_ids": []}], "context 0 has no tokens"),
        (
            [{"input_ids": [1], "sentence_ids": [1]}, {"input_ids": [1]}],
            "context 1 has no sentence_ids but others have",
        ),
        ([{"input_ids": [1, 2], "word_ends": [True]}], "context 0 has 1 word_ends for 2 tokens"),
    ],
)
def test_bad_batches_are_named(batch, message):
    with pytest.raises(ValueError, match=message):
        collate_contexts(batch, pad_token_id=0)


@pytest.mark.parametrize(
    "offsets",
    [
        [(0, 2), (2, 5), (5, 7), (7, 8), (8, 12)],  # the space belongs to the token
        [(0, 2), (2, 5), (6, 7), (7, 8), (9, 12)],  # it does not
        [(0, 2), (2, 5), (6, 6), (6, 8), (9, 12)],  # a token of nothing but the space, trimmed to nothing
    ],
)
def test_word_ends_from_offsets(offsets):
    assert word_ends_from_offsets(offsets, ["fruit", "of", "fly"]) == [False, True, False, True, True]


def test_word_ends_from_offsets_of_characters_in_several_tokens():
    assert word_ends_from_offsets([(0, 1), (0, 1), (1, 3), (2, 3)], ["é", "é"]) == [False, True, False, True]


def test_word_ends_that_do_not_exist():
    with pytest.raises(ValueError, match=r"characters 0\.\.3 spans 'a' and 'b'"):
        word_ends_from_offsets([(0, 3)], ["a", "b"])
    with pytest.raises(ValueError, match=r"word 1 \('b'\) has no token"):
        word_ends_from_offsets([(0, 1)], ["a", "b"])
    with pytest.raises(ValueError, match=r"word 0 \('a'\) has no token"):
        word_ends_from_offsets([(2, 3)], ["a", "b"])


def test_word_ends_from_word_ids():
    assert word_ends_from_word_ids([None, 0, 0, 1, None]) == [True, False, True, True, True]
    assert word_ends_from_word_ids([0, 0]) == [False, True]
    assert word_ends_from_word_ids([]) == []


# Tokenizers

TEXTS = [
    "the cat sat on the mat",
    "the dog sat on the log",
    "a cat and a dog, they sat.",
    "cats don't sit; dogs do!",
] * 3


@pytest.fixture(scope="module")
def bpe():
    return train_bpe_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def wordpiece():
    return train_wordpiece_tokenizer(TEXTS, 60)


@pytest.fixture(scope="module")
def stock_gpt2(tmp_path_factory):
    """A folder like the stock GPT-2 tokenizer: 256 bytes, 50,000 merges (here invented), <|endoftext|> last."""
    folder = tmp_path_factory.mktemp("gpt2")
    # GPT-2 writes bytes as printable characters: these stay, the others move up from code point 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    merges = [(a, b) for a in alphabet for b in alphabet][:50_000]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges), "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    config = {name: "<|endoftext|>" for name in ("bos_token", "eos_token", "unk_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "GPT2Tokenizer"}))
    return folder


def test_bpe_special_tokens(bpe):
    assert isinstance(bpe, GPT2Tokenizer)
    assert len(bpe) <= 300
    assert special_token_ids(bpe) == {
        "vocab_size": len(bpe), "bos_token_id": 0, "eos_token_id": 0, "reduce_token_id": 1, "pad_token_id": 2,
        "cls_token_id": 3, "sep_token_id": 4,
    }  # fmt: skip
    assert bpe.decode(bpe("a <|REDUCE|>cat")["input_ids"], skip_special_tokens=True) == "a cat"


def test_bpe_encodes_sentences_without_leading_space(bpe):
    ids = encode_sentences(bpe, ["the cat sat\n", "  cat"])
    assert [bpe.decode(row) for row in ids] == ["the cat sat", "cat"]
    # From the second word on, the space is part of the first piece.
    assert bpe.convert_ids_to_tokens(ids[0])[1].startswith("Ġ")
    assert encode_sentences(bpe, []) == []
    with pytest.raises(ValueError, match=r"sentence 1 \(' '\) has no tokens"):
        encode_sentences(bpe, ["a", " "])


@given(words=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("Z", "C")), min_size=1), min_size=1))
def test_bpe_loses_nothing_and_finds_every_word(bpe, words):
    ids, word_ends = encode_words(bpe, words)
    assert bpe.decode(ids, clean_up_tokenization_spaces=False) == " ".join(words)
    assert sum(word_ends) == len(words)
    pieces, start = [], 0
    for end, is_end in enumerate(word_ends, start=1):
        if is_end:
            pieces.append(bpe.decode(ids[start:end], clean_up_tokenization_spaces=False).removeprefix(" "))
            start = end
    assert pieces == words


def test_bpe_training_repeats_and_rejects_bad_sizes(bpe):
    assert train_bpe_tokenizer(iter(TEXTS), 300).get_vocab() == bpe.get_vocab()
    with pytest.raises(ValueError, match="vocab_size is 260: byte-level BPE needs at least 261"):
        train_bpe_tokenizer(TEXTS, 260)
    with pytest.raises(ValueError, match="no text"):
        train_bpe_tokenizer(["", " "], 300)


def test_wordpiece(wordpiece):
    assert wordpiece.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    assert special_token_ids(wordpiece) == {
        "vocab_size": len(wordpiece), "bos_token_id": 5, "eos_token_id": 5, "reduce_token_id": 6, "pad_token_id": 0,
        "cls_token_id": 2, "sep_token_id": 3,
    }  # fmt: skip
    encoding = wordpiece("The CAT sat.")
    assert set(encoding) == {"input_ids", "attention_mask"}
    assert wordpiece.decode(encoding["input_ids"]) == "the cat sat."
    ids, word_ends = encode_words(wordpiece, ["dogs", "don't", "☃"])
    assert sum(word_ends) == 3
    assert ids[-1] == wordpiece.unk_token_id
    assert any(token.startswith("##") for token in wordpiece.get_vocab())
    assert train_wordpiece_tokenizer(TEXTS, 60).get_vocab() == wordpiece.get_vocab()
    assert len(wordpiece) <= 60
    with pytest.raises(ValueError, match="vocab_size is 7"):
        train_wordpiece_tokenizer(TEXTS, 7)
    with pytest.raises(ValueError, match=r"word 1 is 'b c'"):
        encode_words(wordpiece, ["a", "b c"])


def test_stock_gpt2_gets_the_vocabulary_of_gpst(stock_gpt2):
    tokenizer = load_tokenizer(stock_gpt2)
    assert len(tokenizer) == 50_264
    assert tokenizer.convert_tokens_to_ids(list(GPST_EXTRA_TOKENS)) == list(range(50_257, 50_264))
    assert special_token_ids(tokenizer) == {
        "vocab_size": 50_264, "bos_token_id": 50_256, "eos_token_id": 50_256, "reduce_token_id": 50_257,
        "pad_token_id": 50_258, "cls_token_id": 50_259, "sep_token_id": 50_263,
    }  # fmt: skip
    assert set(GPST_EXTRA_TOKENS) < set(tokenizer.all_special_tokens)


def test_incomplete_tokenizers_are_completed_once(tmp_path):
    alphabet = "abcĠ"
    plain = GPT2Tokenizer(vocab={c: i for i, c in enumerate([*alphabet, "<|endoftext|>"])}, merges=[])
    with pytest.raises(ValueError, match="no pad_token_id, cls_token_id, sep_token_id, reduce_token_id"):
        special_token_ids(plain)
    plain.save_pretrained(tmp_path / "plain")
    completed = load_tokenizer(tmp_path / "plain")
    expected = ["<|REDUCE|>", "<|pad|>", "<|CLS|>", "<|SEP|>"]
    assert completed.convert_tokens_to_ids(expected) == [5, 6, 7, 8]
    completed.save_pretrained(tmp_path / "completed")
    again = load_tokenizer(tmp_path / "completed")
    assert again.get_vocab() == completed.get_vocab()
    assert special_token_ids(again) == special_token_ids(completed)
    assert set(again.all_special_tokens) == set(completed.all_special_tokens)


LOADER = """
import json, sys
from transformers import AutoTokenizer
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the cat<|REDUCE|> sat, don't"
    ids = tokenizer(text)["input_ids"]
    print(json.dumps([type(tokenizer).__name__, len(tokenizer), ids, tokenizer.decode(ids, skip_special_tokens=True),
                      tokenizer.pad_token_id, tokenizer.padding_side]))
assert "hf_synlm" not in sys.modules
"""


def test_saved_tokenizers_load_with_transformers_alone(bpe, wordpiece, stock_gpt2, tmp_path):
    made = {"bpe": bpe, "wordpiece": wordpiece, "gpst": load_tokenizer(stock_gpt2)}
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(tmp_path / name)
        assert not list((tmp_path / name).glob("*.py"))
        config = json.loads((tmp_path / name / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert config["tokenizer_class"] == ("TokenizersBackend" if name == "wordpiece" else "GPT2Tokenizer")
    folders = [str(tmp_path / name) for name in made]
    run = subprocess.run([sys.executable, "-c", LOADER, *folders], capture_output=True, text=True, check=True, cwd="/")
    text = "the cat<|REDUCE|> sat, don't"
    for tokenizer, line in zip(made.values(), run.stdout.splitlines(), strict=True):
        ids = tokenizer(text)["input_ids"]
        assert json.loads(line) == [
            type(tokenizer).__name__, len(tokenizer), ids, tokenizer.decode(ids, skip_special_tokens=True),
            tokenizer.pad_token_id, "left",
        ]  # fmt: skip
