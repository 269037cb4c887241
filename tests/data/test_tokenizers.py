"""Tokenizers of treebanks (words, classes of unknown words, pieces of words) and of running text."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest
from hypothesis import example, given, settings, strategies as st
from transformers import AutoTokenizer, GPT2Tokenizer

from hf_synlm import GPSTConfig, SpanParserConfig
from hf_synlm.data import tokenizers
from hf_synlm.data.collate import encode_words
from hf_synlm.data.vocabulary import WORD_END, subword_tokenizer, unknown_class, word_final_ids, word_tokenizer
from hf_synlm.evaluation.text.words import encode_sentences
from tests.helpers import warm_python
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import ARCHITECTURES, MODELS, gpst_ids, model_and_tokenizer
from tests.helpers.tokenizer_hashes import NUM_SENTENCES, hashes, sample_words
from tests.reference.unknown_words import UNKNOWN_CLASSES

SENTENCES = [
    ["the", "dog", "Barks", "."],
    ["the", "cat", "sees", "1,200", "dogs", "."],
    ["the", "U.S.", "dog", "undone", "working", "."],
]
RULES = ["berkeley", "berkeley2"]


@pytest.fixture(scope="module")
def sample():
    return sample_words()


CLASSES = {
    "berkeley": """
        Dogs <cunks>    1,200 <unkn>    5 <unkn>        5th <unk>       undone <ununk>  Undone <cunk>   undoing <unking>
        worker <unkER>  U.S. <cunk.>    is <unk>        ing <unk>       king <unking>   Red <cunk>      bared <unked>
        only <unkly>    nicest <unkest> nation <unkion> Theory <cunkory> legal <unkal>  well-known <unk-> a.b-c <unk.>
        done- <unk>     ... <unk>       -LRB- <unk->    1990s <unks>    house <unk>     Élan <cunk>     $5.2 <unk.>
        unusual <ununk>
    """,
    "berkeley2": """
        Dogs UNK-INITC-s   NASA UNK-CAPS     McDonald UNK-CAPS   dogs UNK-LC-s      iPod UNK-LC       1,200 UNK-NUM
        3D UNK-CAPS-NUM    well-known UNK-LC-DASH                F-16s UNK-INITC-NUM-DASH-s           ... UNK
        bus UNK-LC         class UNK-LC      as UNK-LC           gas UNK-LC-s       baked UNK-LC-ed   bed UNK-LC
        doing UNK-LC-ing   QUICKLY UNK-CAPS-ly                   nation UNK-LC-ion  worker UNK-LC-er  nicest UNK-LC-est
        unity UNK-LC-ity   happy UNK-LC-y    legal UNK-LC-al     4legal UNK-LC-NUM-al    4Legal UNK-CAPS-NUM
    """,
}


@pytest.mark.parametrize(("rule", "num_words"), [("berkeley", 29), ("berkeley2", 26)])
def test_classes_of_unknown_words(rule, num_words):
    listed = CLASSES[rule].split()
    words = listed[::2]
    assert len(words) == num_words
    assert [unknown_class(word, rule) for word in words] == listed[1::2]
    assert {unknown_class(word, "single") for word in words} == {"<unk>"}


def test_ids_are_padding_classes_and_words_by_frequency():
    tokenizer = word_tokenizer(SENTENCES, unknown="berkeley", min_count=2)
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary, key=vocabulary.__getitem__) == [
        "<pad>", "<unk>", "<cunk.>", "<cunks>", "<unking>", "<unkn>", "<unks>", "<ununk>", ".", "the", "dog"
    ]  # fmt: skip
    assert tokenizer.pad_token_id == tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.unk_token_id == 1
    assert " ".join(tokenizer.tokenize("the Cats see 7 dogs thinking")) == "the <cunks> <unk> <unkn> <unks> <unking>"
    # <unked> is not a class of any word of the sentences.
    assert tokenizer.tokenize("the dog walked  .") == ["the", "dog", "<unk>", "."]
    assert word_final_ids(tokenizer) == [True] * 11


def test_single_unknown_word_and_sizes():
    tokenizer = word_tokenizer(SENTENCES, vocab_size=4)
    assert tokenizer.get_vocab() == {"<pad>": 0, "<unk>": 1, ".": 2, "the": 3}
    assert tokenizer("the dog .")["input_ids"] == [3, 1, 2]
    assert set(tokenizer("the dog .")) == {"input_ids", "attention_mask"}
    assert len(word_tokenizer(SENTENCES)) == 2 + len({word for words in SENTENCES for word in words})
    ended = word_tokenizer([["a", "b", "a", "<unk>", "N"], ["a", "b", "</s>"]], vocab_size=5, end_token=True)
    assert ended.get_vocab() == {"<pad>": 0, "<unk>": 1, "</s>": 2, "a": 3, "b": 4}
    assert (ended.pad_token_id, ended.bos_token_id, ended.eos_token_id) == (0, 2, 2)


def test_cleaning_comes_before_counting():
    tokenizer = word_tokenizer(
        [["The", "1,200", "the", "x2.5%", "3"]], unknown="berkeley", lowercase=True, replace_numbers=True
    )
    words = tokenizer("THE 17 x9% Dogs 17#")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(words) == ["the", "N#", "xN%", "<unk>", "<cunk>"]
    assert tokenizer.decode(words) == " the N xN% <unk> <cunk>"
    assert set(tokenizer.get_vocab()) == {"<pad>", "<unk>", "<cunk>", "the", "N#", "xN%"}


def expected_token(word: str, vocabulary: dict[str, int], rule: str) -> str:
    name = UNKNOWN_CLASSES[rule](word)
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


KNOWN = r"a b abs ab- a.b (x) [^ a|b ing - \ Σ é do dog dogs # a&&b {2}".split()
BEGINNINGS = ["x", "X", "4", "un", "XX", "-", "4X"]
MIDDLES = ["", "a-b", "ab.", "4-b", "4"]
ENDINGS = ["zzz", "ing", "ed", "ly", "s", "est", "er", "ion", "ory", "al", "ity", "y", "4"]
RARE = ["".join(parts) for parts in product(BEGINNINGS, MIDDLES, ENDINGS)]
# By rule and whether numbers are replaced: the rare words are unknown, but their classes are in the vocabulary.
MADE = {
    (rule, replace): word_tokenizer(
        [KNOWN * 2, RARE], unknown=rule, min_count=2, replace_numbers=replace, lowercase=replace
    )
    for rule in ("single", *RULES)
    for replace in (False, True)
}
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
    tokenizer = MADE[rule, False]
    vocabulary = tokenizer.get_vocab()
    ids, word_ends = encode_words(tokenizer, words)
    assert tokenizer.convert_ids_to_tokens(ids) == [expected_token(word, vocabulary, rule) for word in words]
    assert all(word_ends)


MESSY = st.text(
    st.sampled_from("aenbdsXAN.,-04579#%'\u00e9\u00c9\u0301\u200d\u2060\U0001f600\u4e2d \u00a0\u3000\u2028\t\r\n")
    | LETTERS,
    max_size=30,
)
NUMBERS = ["1,200", "1996", "5th", "a1.5", "3%", "7", "N", "9#", "4,", "x" * 200]


@pytest.mark.parametrize("rule", ["single", *RULES])
@pytest.mark.parametrize("replace_numbers", [False, True])
@settings(max_examples=60)
@given(parts=st.lists(MESSY | st.sampled_from([*KNOWN, *NUMBERS]), max_size=6))
@example(
    parts=[
        "Presidents hesitated the 1996 budget of 25,000 jobs",
        "\u00a05.5zs\r\n",
        "unzzz \U0001f600ing e\u0301-\u0301",
    ]
)
def test_offsets_are_those_of_the_words_in_the_text(rule, replace_numbers, parts):
    """Every token covers its word of the text, also by way of its characters."""
    encoding = MADE[rule, replace_numbers](" ".join(parts), return_offsets_mapping=True)
    spans = [match.span() for match in re.finditer(r"\S+", " ".join(parts))]
    assert encoding["offset_mapping"] == spans
    for index, (start, end) in enumerate(spans):
        assert encoding.char_to_token(start) == encoding.char_to_token(end - 1) == index


def test_vocabularies_that_cannot_be_made_are_named():
    refused("there are no words", word_tokenizer, [])
    refused("the word 'a b' is empty, or contains white space", word_tokenizer, [["a b"]])
    refused("characters U\\+10FF00 to U\\+10FF4F", word_tokenizer, [["\U0010ff00"]])
    refused("no word is left of 1: min_count is 1, and special tokens", word_tokenizer, [["a"]], vocab_size=2)


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
        assert subwords.decode(ids) == "".join(f" {word}" for word in words)
    assert 1 < len(ids) / len(words) < 4
    assert sum(token.endswith(WORD_END) and len(token) > 1 for token in vocabulary) > 100


def test_unknown_characters_do_not_end_words(subwords):
    assert subwords.decode([]) == "" and subwords.decode([3], skip_special_tokens=True) == ""
    words = ["☃", "the", "a☃", "☃☃a", "x▁y", "▁"]
    ids, word_ends = encode_words(subwords, words)
    is_final = word_final_ids(subwords)
    assert word_ends == [is_final[index] for index in ids]
    assert sum(word_ends) == len(words)
    assert ids[0] == subwords.unk_token_id
    assert subwords.convert_ids_to_tokens(ids[1]) == WORD_END


def test_bytes_spell_unknown_characters(sample):
    tokenizer = subword_tokenizer(sample, 800, byte_fallback=True)
    assert len(tokenizer) == 800 and not word_final_ids(tokenizer)[tokenizer.convert_tokens_to_ids("<0xE2>")]
    words = ["☃", "the", "a☃", "Dvořák", "日本", "<0xE2>"]
    ids, word_ends = encode_words(tokenizer, words)
    assert tokenizer.unk_token_id not in ids and sum(word_ends) == len(words)
    assert tokenizer.convert_ids_to_tokens(ids[:4]) == ["<0xE2>", "<0x98>", "<0x83>", WORD_END]
    assert tokenizer.decode(ids) == "".join(f" {word}" for word in words)
    (text,) = encode_sentences(tokenizer, [words])
    assert not text.unknown and text.ids == ids and set(text.word_of_token) == set(range(6))
    uses = Counter("".join("".join(words) for words in sample))
    rare = {character for character, count in uses.items() if count < 2}
    assert rare and all(f"<0x{ord(character):02X}>" in tokenizer.tokenize(f"a{character}b") for character in rare)
    common = [[word for word in words if rare.isdisjoint(word)] for words in sample]
    without = subword_tokenizer(common, 800 - 256)
    for words in common[:99]:
        assert tokenizer.encode(" ".join(words)) == without.encode(" ".join(words))


def test_wrong_subword_vocabularies_are_named(sample):
    least = r"\(3 characters and 4 special tokens"
    refused(rf"vocab_size is 6 and must be at least 7 {least}\)", subword_tokenizer, [["ab"]], 6)
    bytes_too = {"vocab_size": 262, "byte_fallback": True}
    refused(rf"must be at least 263 {least}, and 256 bytes\)", subword_tokenizer, 2 * [["ab"]], **bytes_too)
    refused("there are no words", subword_tokenizer, [], 600)
    refused("the word 'a b'", subword_tokenizer, [["a b"]], 600)
    refused(r"no piece '▁' \(U\+2581\)", word_final_ids, tokenizers.train_bpe_tokenizer(["the cat"], 300))


# Tokenizers of running text

TEXTS = (
    3
    * """the cat sat on the mat
the dog sat on the log
a cat and a dog, they sat.
cats don't sit; dogs do!""".splitlines()
)


@pytest.fixture(scope="module")
def bpe():
    return tokenizers.train_bpe_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def wordpiece():
    return tokenizers.train_wordpiece_tokenizer(TEXTS, 60)


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
    config = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "GPT2Tokenizer"}))
    return folder


def test_bpe_special_tokens(bpe):
    assert isinstance(bpe, GPT2Tokenizer)
    assert len(bpe) <= 300
    assert gpst_ids(bpe) == {
        "vocab_size": len(bpe), "bos_token_id": 0, "eos_token_id": 0, "reduce_token_id": 1, "pad_token_id": 2,
        "cls_token_id": 3, "sep_token_id": 4,
    }  # fmt: skip
    assert bpe.decode(bpe("a <|REDUCE|>cat")["input_ids"], skip_special_tokens=True) == "a cat"


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
    assert tokenizers.train_bpe_tokenizer(iter(TEXTS), 300).get_vocab() == bpe.get_vocab()
    refused("vocab_size is 260: byte-level BPE needs at least 261", tokenizers.train_bpe_tokenizer, TEXTS, 260)
    refused("no text", tokenizers.train_bpe_tokenizer, ["", " "], 300)


def test_wordpiece(wordpiece):
    assert wordpiece.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    assert gpst_ids(wordpiece) == {
        "vocab_size": len(wordpiece), "bos_token_id": 5, "eos_token_id": 5, "reduce_token_id": 6, "pad_token_id": 0,
        "cls_token_id": 2, "sep_token_id": 3,
    }  # fmt: skip
    encoding = wordpiece("The CAT sat.")
    assert set(encoding) == {"input_ids", "attention_mask"}
    assert wordpiece.decode(encoding["input_ids"]) == " the cat sat."
    piece = next(token for token in wordpiece.get_vocab() if token.startswith("##"))
    assert wordpiece.convert_tokens_to_string([piece, "cat", "."]) == f"{piece[2:]} cat."
    ids, word_ends = encode_words(wordpiece, ["dogs", "don't", "☃"])
    assert sum(word_ends) == 3
    assert ids[-1] == wordpiece.unk_token_id
    assert any(token.startswith("##") for token in wordpiece.get_vocab())
    assert tokenizers.train_wordpiece_tokenizer(TEXTS, 60).get_vocab() == wordpiece.get_vocab()
    assert len(wordpiece) <= 60
    refused("vocab_size is 7", tokenizers.train_wordpiece_tokenizer, TEXTS, 7)
    refused(r"word 1 is 'b c'", encode_words, wordpiece, ["a", "b c"])


@settings(max_examples=60)
@given(parts=st.lists(MESSY | st.sampled_from(NUMBERS), max_size=6))
def test_offsets_of_pieces_tile_the_words(wordpiece, subwords, bpe, parts):
    text = " ".join(parts)
    for tokenizer in (wordpiece, subwords, bpe):
        spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        assert all(0 <= start <= end <= len(text) for start, end in spans)
        assert [start for start, _ in spans] == sorted(start for start, _ in spans)
        covered = {index for start, end in spans for index in range(start, end)}
        missed = {text[index] for index in range(len(text)) if index not in covered and not text[index].isspace()}
        # BERT's normalizer drops accents and format characters.
        assert missed <= ({"\u0301", "\u200d", "\u2060"} if tokenizer is wordpiece else set())


def test_stock_gpt2_gets_the_vocabulary_of_gpst(stock_gpt2):
    tokenizer = tokenizers.load_tokenizer(stock_gpt2)
    assert len(tokenizer) == 50_264
    assert tokenizer.convert_tokens_to_ids(list(tokenizers.GPST_EXTRA_TOKENS)) == list(range(50_257, 50_264))
    assert gpst_ids(tokenizer) == {
        "vocab_size": 50_264, "bos_token_id": 50_256, "eos_token_id": 50_256, "reduce_token_id": 50_257,
        "pad_token_id": 50_258, "cls_token_id": 50_259, "sep_token_id": 50_263,
    }  # fmt: skip
    assert set(tokenizers.GPST_EXTRA_TOKENS) < set(tokenizer.all_special_tokens)


def test_incomplete_tokenizers_are_completed_once(tmp_path):
    alphabet = "abcĠ"
    plain = GPT2Tokenizer(vocab={c: i for i, c in enumerate([*alphabet, "<|endoftext|>"])}, merges=[])
    refused("no pad_token_id, cls_token_id, sep_token_id, reduce_token_id", gpst_ids, plain)
    plain.save_pretrained(tmp_path / "plain")
    completed = tokenizers.load_tokenizer(tmp_path / "plain")
    assert completed.convert_tokens_to_ids(["<|REDUCE|>", "<|pad|>", "<|CLS|>", "<|SEP|>"]) == [5, 6, 7, 8]
    completed.save_pretrained(tmp_path / "completed")
    again = tokenizers.load_tokenizer(tmp_path / "completed")
    assert again.get_vocab() == completed.get_vocab()
    assert gpst_ids(again) == gpst_ids(completed)
    assert set(again.all_special_tokens) == set(completed.all_special_tokens)


@pytest.mark.parametrize("make", [tokenizers.train_bpe_tokenizer, tokenizers.train_wordpiece_tokenizer])
def test_classifiers_read_texts_and_pairs_in_one_layout(make, tmp_path):
    tokenizer = make(TEXTS, 300)
    (a, b), cls, sep = tokenizer(["the cat sat", "a dog"])["input_ids"], tokenizer.cls_token_id, tokenizer.sep_token_id
    tokenizers.add_classification_template(tokenizer)
    tokenizers.add_classification_template(tokenizer)  # nothing is appended twice
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert each(["the cat sat"])["input_ids"] == [[*a, cls]]
        assert each(["the cat sat"], ["a dog"])["input_ids"] == [[*a, sep, *b, cls]]
        assert each("the cat sat", truncation=True, max_length=3)["input_ids"] == [*a[:2], cls]
        assert each("the cat sat", add_special_tokens=False)["input_ids"] == a


# All of them


def test_tokenizers_depend_neither_on_the_process_nor_on_the_order_of_sentences(sample):
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-m", "tests.helpers.tokenizer_hashes"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.split() == hashes(sample[:NUM_SENTENCES][::-1])


LOADER = """
import json, sys
from transformers import AutoTokenizer
for folder in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(sys.argv[1])["input_ids"]
    print(json.dumps([type(tokenizer).__name__, len(tokenizer), ids, tokenizer.decode(ids, skip_special_tokens=True),
                      tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.padding_side]))
assert "hf_synlm" not in sys.modules
"""


def test_saved_tokenizers_load_with_transformers_alone(sample, bpe, wordpiece, stock_gpt2, tmp_path):
    made = {"bpe": bpe, "wordpiece": wordpiece, "gpst": tokenizers.load_tokenizer(stock_gpt2)}
    made |= {rule: word_tokenizer(sample, unknown=rule, min_count=3) for rule in ("single", *RULES)}
    made |= {f"subword_{model}": subword_tokenizer(sample, 600, model=model) for model in ("bpe", "unigram")}
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(tmp_path / name)
        assert not list((tmp_path / name).glob("*.py"))
        config = json.loads((tmp_path / name / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert config["tokenizer_class"] == ("GPT2Tokenizer" if name in ("bpe", "gpst") else "TokenizersBackend")
    text = " ".join([*sample[0], *sample[1], "Zorkings 1,234.5 unzorked ☃ re-zorked the cat<|REDUCE|> sat, don't"])
    command = [sys.executable, "-c", LOADER, text, *(str(tmp_path / name) for name in made)]
    run = warm_python.run(command, check=True, cwd="/")
    for tokenizer, line in zip(made.values(), run.stdout.splitlines(), strict=True):
        ids = tokenizer(text)["input_ids"]
        assert json.loads(line) == [
            type(tokenizer).__name__, len(tokenizer), ids, tokenizer.decode(ids, skip_special_tokens=True),
            tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, "left",
        ]  # fmt: skip
    assert re.search("<unk-?>|UNK", " ".join(made["berkeley2"].tokenize(text)))


@pytest.mark.parametrize(
    ("text", "is_exact"),
    [
        ("i can't say it's the rock-climbers' fault", True),
        ("o'clock ma'am d'artagnan they've he’ll twenty-one 5.00 and 1,000", True),
        ('yes , no . well -- \'tis "so" ; (a) b', False),
    ],
)
def test_wordpiece_gives_the_text_back_at_once_and_bit_by_bit(text: str, is_exact: bool):
    tokenizer = tokenizers.train_wordpiece_tokenizer([text], 200)
    ids = tokenizer(text)["input_ids"]
    decoded, written = tokenizer.decode(ids), ""
    assert not is_exact or decoded == f" {text}"
    for end in range(1, len(ids) + 1):  # as a streamer: what lies before the last space is printed
        part = tokenizer.decode(ids[:end])
        written += part[len(written) : part.rfind(" ") + 1]
        assert decoded.startswith(written)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt2"])
def test_configurations_take_the_special_tokens_of_a_tokenizer(name: str):
    model, tokenizer = model_and_tokenizer(name)
    fields = {key: value for key, value in MODELS[name][2].items() if not key.endswith(("_token_id", "vocab_size"))}
    config = type(model.config).from_tokenizer(tokenizer, **fields)
    boundary = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    begin = boundary if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    found = config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id
    assert found == (len(tokenizer), begin, boundary, tokenizer.pad_token_id)
    refused(r"bos_token_id 99999.*from_tokenizer", type(config).from_tokenizer, tokenizer, **fields, bos_token_id=99999)


def test_a_tokenizer_without_special_tokens_is_refused():
    plain = word_tokenizer([["we", "agree"]], end_token=True)
    refused("no cls_token_id, sep_token_id, reduce_token_id. Load the tokenizer by", GPSTConfig.from_tokenizer, plain)
    framed = word_tokenizer([["we", "agree", "[CLS]", "[SEP]"]])
    framed.bos_token = framed.eos_token = None  # as BERT
    framed.cls_token, framed.sep_token = "[CLS]", "[SEP]"
    config = SpanParserConfig.from_tokenizer(framed)
    assert [config.bos_token_id, config.eos_token_id] == framed.convert_tokens_to_ids(["[CLS]", "[SEP]"])
