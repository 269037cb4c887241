"""Word and subword tokenizers of treebanks, classes of unknown words."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_synlm.data.collate import encode_words
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.data.vocabulary import (
    WORD_END,
    subword_tokenizer,
    unknown_class,
    word_final_ids,
    word_tokenizer,
)

SENTENCES = [
    ["the", "dog", "Barks", "."],
    ["the", "cat", "sees", "1,200", "dogs", "."],
    ["the", "U.S.", "dog", "undone", "working", "."],
]
RULES = ["berkeley", "berkeley2"]


@pytest.fixture(scope="module")
def sample():
    return [sentence.words for sentence in read_treebank(sample_path("trees.train.txt"))]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("Dogs", "<cunks>"), ("1,200", "<unkn>"), ("5", "<unkn>"), ("5th", "<unk>"), ("undone", "<ununk>"),
        ("Undone", "<cunk>"), ("undoing", "<unking>"), ("worker", "<unkER>"), ("U.S.", "<cunk.>"), ("is", "<unk>"),
        ("ing", "<unk>"), ("king", "<unking>"), ("Red", "<cunk>"), ("bared", "<unked>"), ("only", "<unkly>"),
        ("nicest", "<unkest>"), ("nation", "<unkion>"), ("Theory", "<cunkory>"), ("legal", "<unkal>"),
        ("well-known", "<unk->"), ("a.b-c", "<unk.>"), ("done-", "<unk>"), ("...", "<unk>"), ("-LRB-", "<unk->"),
        ("1990s", "<unks>"), ("house", "<unk>"), ("Élan", "<cunk>"), ("$5.2", "<unk.>"), ("unusual", "<ununk>"),
    ],
)  # fmt: skip
def test_berkeley_classes(word, name):
    assert unknown_class(word, "berkeley") == name
    assert unknown_class(word, "single") == "<unk>"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("Dogs", "UNK-INITC-s"), ("NASA", "UNK-CAPS"), ("McDonald", "UNK-CAPS"), ("dogs", "UNK-LC-s"),
        ("iPod", "UNK-LC"), ("1,200", "UNK-NUM"), ("3D", "UNK-CAPS-NUM"), ("well-known", "UNK-LC-DASH"),
        ("F-16s", "UNK-INITC-NUM-DASH-s"), ("...", "UNK"), ("bus", "UNK-LC"), ("class", "UNK-LC"), ("as", "UNK-LC"),
        ("gas", "UNK-LC-s"), ("baked", "UNK-LC-ed"), ("bed", "UNK-LC"), ("doing", "UNK-LC-ing"),
        ("QUICKLY", "UNK-CAPS-ly"),
        ("nation", "UNK-LC-ion"), ("worker", "UNK-LC-er"), ("nicest", "UNK-LC-est"), ("unity", "UNK-LC-ity"),
        ("happy", "UNK-LC-y"), ("legal", "UNK-LC-al"), ("4legal", "UNK-LC-NUM-al"), ("4Legal", "UNK-CAPS-NUM"),
    ],
)  # fmt: skip
def test_berkeley2_classes(word, name):
    assert unknown_class(word, "berkeley2") == name


def test_wrong_rules_and_words_are_named():
    with pytest.raises(ValueError, match="'porter': choose one of single, berkeley, berkeley2"):
        unknown_class("a", "porter")
    with pytest.raises(ValueError, match="the word is empty"):
        unknown_class("", "single")


def test_ids_are_padding_classes_and_words_by_frequency():
    tokenizer = word_tokenizer(SENTENCES, unknown="berkeley", min_count=2)
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary, key=vocabulary.__getitem__) == [
        "<pad>", "<unk>", "<cunk.>", "<cunks>", "<unking>", "<unkn>", "<unks>", "<ununk>", ".", "the", "dog"
    ]  # fmt: skip
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        0,
        0,
        0,
        1,
    )
    assert tokenizer.tokenize("the Cats see 7 dogs thinking") == [
        "the",
        "<cunks>",
        "<unk>",
        "<unkn>",
        "<unks>",
        "<unking>",
    ]
    # <unked> is not a class of any word of the sentences.
    assert tokenizer.tokenize("the dog walked  .") == ["the", "dog", "<unk>", "."]
    assert word_final_ids(tokenizer) == [True] * 11


def test_single_unknown_word_and_sizes():
    tokenizer = word_tokenizer(SENTENCES, vocab_size=4)
    assert tokenizer.get_vocab() == {"<pad>": 0, "<unk>": 1, ".": 2, "the": 3}
    assert tokenizer("the dog .")["input_ids"] == [3, 1, 2]
    assert set(tokenizer("the dog .")) == {"input_ids", "attention_mask"}
    assert len(word_tokenizer(SENTENCES)) == 2 + len({word for words in SENTENCES for word in words})


def test_cleaning_comes_before_counting():
    tokenizer = word_tokenizer(
        [["The", "1,200", "the", "x2.5%", "3"]], unknown="berkeley", lowercase=True, replace_numbers=True
    )
    assert tokenizer.tokenize("THE 17 x9% Dogs") == ["the", "N", "xN%", "<unk>"]
    assert set(tokenizer.get_vocab()) == {"<pad>", "<unk>", "<cunk>", "the", "N", "xN%"}


def expected_token(word: str, vocabulary: dict[str, int], rule: str) -> str:
    name = unknown_class(word, rule)
    return word if word in vocabulary else name if name in vocabulary else "<unk>"


@pytest.mark.parametrize("rule", ["single", *RULES])
@pytest.mark.parametrize("options", [{"min_count": 1}, {"min_count": 2}, {"vocab_size": 200}])
def test_the_stock_tokenizer_follows_the_rule_on_every_word(sample, rule, options):
    tokenizer = word_tokenizer(sample[:1500], unknown=rule, **options)
    vocabulary = tokenizer.get_vocab()
    num_unknown = 0
    for words in sample:
        tokens = tokenizer.convert_ids_to_tokens(encode_words(tokenizer, words)[0])
        assert tokens == [expected_token(word, vocabulary, rule) for word in words]
        num_unknown += sum(word not in vocabulary for word in words)
    assert num_unknown > 100
    assert all(encode_words(tokenizer, sample[-1])[1])


KNOWN = [
    *"ab",
    "abs",
    "ab-",
    "a.b",
    "(x)",
    "[^",
    "a|b",
    "ing",
    "-",
    "\\",
    "Σ",
    "é",
    "do",
    "dog",
    "dogs",
    "#",
    "a&&b",
    "{2}",
]
BEGINNINGS = ["x", "X", "4", "un", "XX", "-", "4X"]
MIDDLES = ["", "a-b", "ab.", "4-b", "4"]
ENDINGS = ["zzz", "ing", "ed", "ly", "s", "est", "er", "ion", "ory", "al", "ity", "y", "4"]
RARE = ["".join(parts) for parts in product(BEGINNINGS, MIDDLES, ENDINGS)]
# The rare words are unknown, but their classes are in the vocabulary.
TOKENIZERS = {rule: word_tokenizer([KNOWN * 2, RARE], unknown=rule, min_count=2) for rule in RULES}
LETTERS = st.sampled_from("abdeiglnorstuyABDEIGNSTUZ04-.,é\u00c9σΣ([|\\")
WORDS = st.lists(
    st.text(LETTERS, min_size=1, max_size=9)
    | st.text(st.characters(codec="utf-8", max_codepoint=0x2FFF, exclude_categories=("Z", "C")), min_size=1, max_size=6)
    | st.sampled_from(KNOWN),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=300)
@given(words=WORDS)
@example(words=["Ⓐing", "Ⅳs", "ªªªª", "²", "٣", "ǅabc", "İNG4S", "AKS", "ſſs"])
def test_the_stock_tokenizer_follows_the_rule_on_any_word(rule, words):
    tokenizer = TOKENIZERS[rule]
    vocabulary = tokenizer.get_vocab()
    ids, word_ends = encode_words(tokenizer, words)
    assert tokenizer.convert_ids_to_tokens(ids) == [expected_token(word, vocabulary, rule) for word in words]
    assert all(word_ends)


def test_known_words_make_the_round_trip(sample):
    tokenizer = word_tokenizer(sample, unknown="berkeley")
    for words in sample[:200]:
        ids, _ = encode_words(tokenizer, words)
        assert tokenizer.convert_ids_to_tokens(ids) == list(words)
        assert tokenizer.decode(ids) == " ".join(words)


@pytest.mark.parametrize(
    ("sentences", "options", "message"),
    [
        ([], {}, "there are no words"),
        ([["a b"]], {}, "the word 'a b' is empty, or holds white space"),
        ([["a", ""]], {}, "the word '' is empty"),
        ([["\U0010ff00"]], {}, "characters U\\+10FF00 to U\\+10FF04"),
        ([["a"]], {"min_count": 0}, "min_count is 0"),
        ([["a"]], {"min_count": 2}, "no word is left of 1 with min_count 2"),
        ([["a"]], {"vocab_size": 2}, "no word is left of 1 with min_count 1 and vocab_size 2"),
        ([["a"]], {"unknown": "porter"}, "'porter': choose one of"),
    ],
)
def test_vocabularies_that_cannot_be_made_are_named(sentences, options, message):
    with pytest.raises(ValueError, match=message):
        word_tokenizer(sentences, **options)


# Pieces of words


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def subwords(request, sample):
    return subword_tokenizer(sample, 600, model=request.param)


def test_pieces_make_the_round_trip(subwords, sample):
    vocabulary = subwords.get_vocab()
    assert [vocabulary[token] for token in ("<pad>", "<unk>", "<s>", "</s>")] == [0, 1, 2, 3]
    assert (subwords.pad_token_id, subwords.unk_token_id, subwords.bos_token_id, subwords.eos_token_id) == (0, 1, 2, 3)
    assert len(subwords) == 600
    is_final = word_final_ids(subwords)
    assert is_final[:4] == [True, False, True, True]
    for words in sample[:500]:
        ids, word_ends = encode_words(subwords, words)
        assert word_ends == [is_final[index] for index in ids]
        assert sum(word_ends) == len(words)
        assert subwords.decode(ids) == " ".join(words)
    assert 1 < len(ids) / len(words) < 4
    pieces = Counter(token.endswith(WORD_END) and len(token) > 1 for token in vocabulary)
    assert pieces[True] > 100


def test_no_pieces_are_an_empty_text(subwords):
    assert subwords.decode([]) == "" and subwords.decode([3], skip_special_tokens=True) == ""


def test_unknown_characters_do_not_end_words(subwords):
    words = ["☃", "the", "a☃", "☃☃a", "x▁y", "▁"]
    ids, word_ends = encode_words(subwords, words)
    is_final = word_final_ids(subwords)
    assert word_ends == [is_final[index] for index in ids]
    assert sum(word_ends) == len(words)
    assert ids[0] == subwords.unk_token_id
    assert subwords.convert_ids_to_tokens(ids[1]) == WORD_END


def test_wrong_subword_vocabularies_are_named(sample):
    with pytest.raises(ValueError, match="'wordpiece': choose 'bpe' or 'unigram'"):
        subword_tokenizer(sample, 600, model="wordpiece")
    with pytest.raises(
        ValueError, match=r"vocab_size is 6: it must be at least 7 \(3 characters and 4 special tokens\)"
    ):
        subword_tokenizer([["ab"]], 6)
    with pytest.raises(ValueError, match="there are no words"):
        subword_tokenizer([], 600)
    with pytest.raises(ValueError, match="the word 'a b'"):
        subword_tokenizer([["a b"]], 600)


def test_tokenizers_without_word_ends_are_named():
    from hf_synlm.data.tokenizers import train_bpe_tokenizer

    with pytest.raises(ValueError, match=r"no piece '▁' \(U\+2581\)"):
        word_final_ids(train_bpe_tokenizer(["the cat"], 300))


MAKER = """
import hashlib, sys
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.data.vocabulary import subword_tokenizer, word_tokenizer
sample = [sentence.words for sentence in read_treebank(sample_path("trees.train.txt"))]
made = [word_tokenizer(sample, unknown="berkeley2", min_count=2)]
made += [subword_tokenizer(sample, 600, model=model) for model in ("bpe", "unigram")]
print(*(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest() for tokenizer in made))
"""


def test_tokenizers_depend_neither_on_the_process_nor_on_the_order_of_sentences(sample):
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", MAKER], capture_output=True, text=True, check=True, env=environment)
    made = [word_tokenizer(sample[::-1], unknown="berkeley2", min_count=2)]
    made += [subword_tokenizer(sample[::-1], 600, model=model) for model in ("bpe", "unigram")]
    here = [hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest() for tokenizer in made]
    assert run.stdout.split() == here


LOADER = """
import json, sys
from transformers import AutoTokenizer
for folder in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print(json.dumps([tokenizer(sys.argv[1])["input_ids"], len(tokenizer), tokenizer.pad_token_id,
                      tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.padding_side]))
assert "hf_synlm" not in sys.modules
"""


def test_saved_tokenizers_load_with_transformers_alone(sample, tmp_path):
    made = {rule: word_tokenizer(sample, unknown=rule, min_count=3) for rule in ("single", *RULES)}
    made |= {model: subword_tokenizer(sample, 600, model=model) for model in ("bpe", "unigram")}
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(tmp_path / name)
        assert not list((tmp_path / name).glob("*.py"))
    text = " ".join([*sample[0], *sample[1], "Zorkings", "1,234.5", "unzorked", "☃", "re-zorked"])
    run = subprocess.run(
        [sys.executable, "-c", LOADER, text, *(str(tmp_path / name) for name in made)],
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    for tokenizer, line in zip(made.values(), run.stdout.splitlines(), strict=True):
        assert json.loads(line) == [
            tokenizer(text)["input_ids"], len(tokenizer), tokenizer.pad_token_id, tokenizer.bos_token_id,
            tokenizer.eos_token_id, "left",
        ]  # fmt: skip
    assert re.search("<unk-?>|UNK", " ".join(made["berkeley2"].tokenize(text)))
