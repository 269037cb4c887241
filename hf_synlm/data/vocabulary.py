# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of treebanks: words with classes of unknown words, or pieces of words with a mark at the end of word.

All functions return a fast tokenizer of transformers: a saved one loads anywhere with
`AutoTokenizer.from_pretrained(folder)`, without this library. Its input is sentences with white space between all words
and punctuation marks, as in a treebank. It adds no special tokens.

**Classes of unknown words.** A word that is not in the vocabulary becomes one of a few classes that depend on its
spelling: `Dogs` -> `<cunks>`, `1,200` -> `<unkn>`, as `unknown_class` says. In tokenizer.json, steps of the normalizer
    find the class. They apply to every word that the regular expression of all known words does not match. Offsets are
those of the word in the text. `tests/reference/unknown_words.py` has the rules as the authors' program writes them.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Literal, TypeAlias

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_synlm.data.text import check_list
from hf_synlm.data.tokenizers import fast_tokenizer

UnknownRule: TypeAlias = Literal["single", "berkeley", "berkeley2"]

PAD_TOKEN = "<pad>"
UNKNOWN_TOKEN = "<unk>"
BEGIN_TOKEN = "<s>"
END_TOKEN = "</s>"
WORD_END = "\u2581"  # as in sentencepiece, there before words, here after them

# Endings of words and what they add to the class, in the order of the tests.
_ENDINGS = (
    ("ing", "ing"), ("ed", "ed"), ("ly", "ly"), ("s", "s"), ("est", "est"), ("er", "ER"), ("ion", "ion"), ("ory", "ory")
)  # fmt: skip
_ENDINGS_2 = ("ed", "ing", "ion", "er", "est", "ly", "ity", "y", "al")

_WORD_STOPS = r"(?!\S)"

# Characters of the last plane for private use that stand in a word while its class is found.
_FIRST_RESERVED = 0x10FF00
_RESERVED = tuple(map(chr, range(_FIRST_RESERVED, _FIRST_RESERVED + 80)))
_CURSORS, _SPELLER = _RESERVED[:15], _RESERVED[15]
_MARKS = tuple(_RESERVED[16 * part : 16 * (part + 1)] for part in range(1, 5))

# Parts of a class: in each the first pattern that matches at the beginning of a word, and what it writes.
_Parts: TypeAlias = tuple[tuple[tuple[str, str], ...], ...]
_BERKELEY_PARTS: _Parts = (
    (
        (rf"(?=\S{{4}})un(?!\S*(?:{'|'.join(ending for ending, _ in _ENDINGS)}){_WORD_STOPS})", "<ununk"),
        (r"\p{Lu}", "<cunk"),
        (r"\S", "<unk"),
    ),
    (
        (rf"\p{{Nd}}(?:\S*\p{{Nd}})?{_WORD_STOPS}", "n>"),
        (rf"\S{{1,3}}{_WORD_STOPS}", ">"),
        *((rf"\S*{ending}{_WORD_STOPS}", f"{added}>") for ending, added in _ENDINGS),
        ("un", ">"),
        (rf"\S*al{_WORD_STOPS}", "al>"),
        *((rf"[^\s.\-]*{re.escape(character)}\S", f"{character}>") for character in "-."),
        (r"\S", ">"),
    ),
)


def unknown_class(word: str, rule: UnknownRule) -> str:
    """Give the class of a word that is not in the vocabulary.

    * "single": `<unk>` for every word.
    * "berkeley": "unk"; "c" before it if the first character is upper case; then the first of these that applies: "n"
      if the first and the last character are digits, nothing if the word has three characters or less, an ending (ing,
      ed, ly, s, est, er as "ER", ion, ory), "un" in front if the word begins with un, the ending al, the first "-"
      or "." before the last character. All in angle brackets.
    * "berkeley2": UNK; -INITC for a capital that is the only one, -CAPS for several, -LC for lower case; -NUM with a
      digit; -DASH with a hyphen; an ending of a longer word (-s, -ed, -ing, -ion, -er, -est, -ly, -ity, -y, -al).

    Upper and lower case, letters and digits are the Unicode categories Lu, Ll, L and Nd.

    Source: utils.py of the authors of RNNG (`berkeley_unk_conv`, `berkeley_unk_conv2`), simplified there from the
    Berkeley parser.

    Args:
        word: the word, non-empty and free of white space.
        rule: "single", "berkeley" or "berkeley2".

    Returns:
        The class.
    """
    return UNKNOWN_TOKEN if rule == "single" else _unknown_normalizer(rule).normalize_str(word)


@cache
def _unknown_normalizer(rule: UnknownRule) -> normalizers.Normalizer:
    """The steps of a tokenizer that knows no word."""
    return normalizers.Sequence(_unknown_steps([""], rule))


def _any_case(text: str) -> str:
    """Write ASCII letters as a regular expression that matches both cases of them, and no other character."""
    return "".join(f"[{letter}{letter.upper()}]" for letter in text)


def _words_of(sentences: Iterable[Sequence[str]]) -> Iterator[str]:
    for sentence in sentences:
        check_list("a sentence", sentence, '"the", "dog"')
        yield from sentence


def word_tokenizer(
    sentences: Iterable[Sequence[str]],
    *,
    unknown: UnknownRule = "single",
    min_count: int = 1,
    vocab_size: int | None = None,
    lowercase: bool = False,
    replace_numbers: bool = False,
    end_token: bool = False,
) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the words of sentences and classes of unknown words.

    Id 0 is `<pad>`, also the begin and end token, because sentences of a treebank have no such tokens; id 1 is `<unk>`;
    with `end_token`, id 2 is `</s>`, begin and end token of a language model that reads sentence after sentence. The
    other classes of all words of the sentences follow in alphabetical order, then the words, the most frequent first,
    ties in alphabetical order. A class that is not in the vocabulary becomes `<unk>`.

    Args:
        sentences: per sentence its words, without white space inside.
        unknown: rule of `unknown_class`.
        min_count: words that occur less often are unknown. With 1 every word of the sentences is known, so that a model
            learns nothing about the classes.
        vocab_size: largest size of the vocabulary, with padding and classes; the rarest words are left out.
        lowercase: lower-case all text.
        replace_numbers: write N for each sequence of digits, commas and periods that begins with a digit. A word that
            consists of it alone becomes `N#`, which is decoded as N.
        end_token: make `</s>` the token between sentences.

    Returns:
        A fast tokenizer, padding on the left as generation wants it.

    Raises:
        ValueError: there are no words, no word is left, a word is empty, or contains white space or a reserved
            character.

    Cost: O(words) to make. Encoding takes 2 to 4 microseconds per word with 20,000 known words, 7 with 50,000 (one CPU
        core).
    """
    steps = _cleaning(lowercase, replace_numbers)
    counts = Counter[str]()
    for word, count in Counter(_words_of(sentences)).items():
        counts[_clean(word, steps)] += count
    if not counts:
        raise ValueError("there are no words to make a vocabulary of. Name other files")
    classes = sorted({unknown_class(word, unknown) for word in counts} - {UNKNOWN_TOKEN})
    boundary = END_TOKEN if end_token else PAD_TOKEN
    reserved = list(dict.fromkeys([PAD_TOKEN, UNKNOWN_TOKEN, boundary, *classes]))
    ranked = sorted((word for word, count in counts.items() if count >= min_count), key=lambda w: (-counts[w], w))
    known = [word for word in ranked if word not in set(reserved)]
    if vocab_size is not None:
        known = known[: max(0, vocab_size - len(reserved))]
    if not known:
        raise ValueError(
            f"no word is left of {len(counts)}: min_count is {min_count}, and special tokens and classes take "
            f"{len(reserved)} of vocab_size {vocab_size}. Lower min_count (--tokenizer-min-frequency) or raise "
            "vocab_size (--tokenizer-vocab-size)"
        )
    return tokenizer_of_words(
        [*reserved, *known],
        unknown=unknown,
        lowercase=lowercase,
        replace_numbers=replace_numbers,
        boundary=boundary,
    )


def tokenizer_of_words(
    tokens: Sequence[str],
    *,
    unknown: UnknownRule = "single",
    lowercase: bool = False,
    replace_numbers: bool = False,
    boundary: str = PAD_TOKEN,
    unknown_token: str = UNKNOWN_TOKEN,
) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a vocabulary of words.

    Args:
        tokens: tokens in the order of their ids; the first is `<pad>`. With `replace_numbers` the word N is `N#`.
        unknown: rule of `unknown_class`; a class that is not in the vocabulary becomes `unknown_token`.
        lowercase: lower-case all text.
        replace_numbers: write N for each sequence of digits, commas and periods that begins with a digit.
        boundary: the begin and end token.
        unknown_token: one of the tokens.

    Returns:
        A fast tokenizer, padding on the left as generation wants it.

    Raises:
        ValueError: tokens occur twice, `<pad>` is not the first, or `unknown_token` is missing.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or vocabulary.get(PAD_TOKEN) != 0 or unknown_token not in vocabulary:
        raise ValueError(
            f"the {len(tokens)} tokens must differ, begin with {PAD_TOKEN} and contain {unknown_token}: "
            f"{len(vocabulary)} differ, and the first are {list(tokens[:3])}"
        )
    steps = _cleaning(lowercase, replace_numbers)
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown_token))
    steps += _unknown_steps(vocabulary, unknown)
    if steps:
        made.normalizer = normalizers.Sequence(steps)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Sequence(
        [decoders.Replace(Regex(r"\AN#(?=#*\z)"), "N"), decoders.Replace(Regex(r"\A"), " ")]
    )
    return fast_tokenizer(made, pad_token=PAD_TOKEN, bos_token=boundary, eos_token=boundary, unk_token=unknown_token)


def _cleaning(lowercase: bool, replace_numbers: bool) -> list[normalizers.Normalizer]:
    """List the steps of a normalizer that change known words as well.

    The first character of a word stays aligned with the first of the text, and the last with the last, so that the
    offsets of a token are those of its word. A word that is nothing but a number needs two characters for that.
    """
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lowercase else []
    if replace_numbers:
        rest = _CURSORS[0]
        replacements = [
            (r"(?<=\s[0-9]|\A[0-9])[0-9,.]+", rest),  # of a number at the beginning of a word
            (r"[0-9][0-9,.]*", "N"),
            (rf"(?<=\sN|\AN){rest}?(?=#*(?!\S))", "#"),  # also if # follows, so that no other word becomes N#
            (rest, ""),
        ]
        steps += [normalizers.Replace(Regex(pattern), content) for pattern, content in replacements]
    return steps


def _clean(word: str, steps: Sequence[normalizers.Normalizer]) -> str:
    """Check a word and run the first steps of the normalizer on it."""
    if not word or any(character.isspace() or character in _RESERVED for character in word):
        raise ValueError(
            f"the word {word!r} is empty, or contains white space or one of the reserved characters U+10FF00 to "
            "U+10FF4F. Spell the word with other characters"
        )
    for step in steps:
        word = step.normalize_str(word)
    return word


def _unknown_steps(vocabulary: Iterable[str], rule: UnknownRule) -> list[normalizers.Normalizer]:
    """List the steps of a normalizer that turn the words outside a vocabulary into their classes.

    A class has several parts. The first steps write a mark for each part before the word, followed by a cursor. The
    others turn the end of the word into the parts, the last part first, and its beginning into the first character of
    the class. So both ends of the class are aligned with those of the word.
    """
    if rule == "single":
        return []
    parts = _BERKELEY_PARTS if rule == "berkeley" else _berkeley2_parts()
    steps = [(rf"(?<!\S)(?!{_trie_regex(vocabulary)}{_WORD_STOPS})(?=\S)", _CURSORS[0])]
    for cursor, following, marks, cases in zip(_CURSORS, _CURSORS[1:], _MARKS, parts, strict=False):
        steps += [(f"{cursor}(?={case})", mark + following) for mark, (case, _) in zip(marks, cases, strict=False)]
    end = _CURSORS[len(parts)]
    steps.append((rf"(?<={end}\S)\S*", _SPELLER))
    for part in reversed(range(len(parts))):
        between = "." * (len(parts) - 1 - part) + end
        for mark, (_, text) in zip(_MARKS[part], parts[part], strict=False):
            steps.append((rf"(?<={mark}{between}\S){_SPELLER}", _SPELLER + text if part else text[1:]))
    steps.append((rf"[{''.join(_MARKS[0])}]{between}\S", parts[0][0][1][0]))
    return [normalizers.Replace(Regex(pattern), content) for pattern, content in steps]


def _berkeley2_parts() -> _Parts:
    """List the parts of a class by the rule "berkeley2"."""
    capital, other = r"\p{Lu}", r"[^\s\p{Lu}]"
    is_long = rf"(?=\S{{5}})(?!\S*-)(?!(?=\S*\p{{Nd}})\S*{capital})"
    return (
        (
            (rf"{capital}{other}*{_WORD_STOPS}", "UNK-INITC"),
            (capital, "UNK-CAPS"),
            (rf"[^\s\p{{L}}]\S*{capital}", "UNK-CAPS"),
            (r"\S*\p{Ll}", "UNK-LC"),
            (r"\S", "UNK"),
        ),
        ((r"\S*\p{Nd}", "-NUM"), (r"\S", "")),
        ((r"\S*-", "-DASH"), (r"\S", "")),
        (
            (rf"\S+[^\ssiuSIU][sS]{_WORD_STOPS}", "-s"),
            *((rf"{is_long}\S*{_any_case(ending)}{_WORD_STOPS}", f"-{ending}") for ending in _ENDINGS_2),
            (r"\S", ""),
        ),
    )


def _trie_regex(words: Iterable[str]) -> str:
    """Write a regular expression that matches one of some words, sharing their beginnings.

    At most one alternative matches at each character, so the time does not depend on the number of words.
    """

    def branches(suffixes: list[str]) -> str:
        is_end = suffixes[0] == ""
        parts = []
        for _, group in groupby(suffixes[1:] if is_end else suffixes, key=lambda suffix: suffix[0]):
            members = list(group)
            # The common prefix of sorted strings is that of the first and the last.
            shared = os.path.commonprefix([members[0], members[-1]])
            rest = [suffix[len(shared) :] for suffix in members]
            parts.append(re.escape(shared) + (branches(rest) if rest != [""] else ""))
        return f"(?:{'|'.join(parts)}){'?' if is_end else ''}"

    return branches(sorted(set(words)))


def subword_tokenizer(
    sentences: Iterable[Sequence[str]],
    vocab_size: int,
    *,
    model: Literal["bpe", "unigram"] = "bpe",
    min_frequency: int = 2,
    byte_fallback: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer whose tokens are pieces of words; the last piece of each word ends in U+2581.

    Ids 0 to 3 are `<pad>`, `<unk>`, `<s>` (begin) and `</s>` (end) as in the authors' sentencepiece models. A character
    that does not occur in the sentences becomes `<unk>`. With `byte_fallback`, a character that occurs fewer than
    `min_frequency` times becomes its bytes in UTF-8, so that some bytes are learned. The end of its word is then a
    separate piece, so that `word_final_ids` is always right. U+2581 in a text is read as an underscore.

    Args:
        sentences: per sentence its words, without white space inside.
        vocab_size: size of the vocabulary, special tokens included. Smaller if the words have too few pieces.
        model: "bpe", or "unigram" (Kudo 2018).
        min_frequency: BPE merges a pair only if it occurs this often; without effect on "unigram".
        byte_fallback: 256 entries of the vocabulary are bytes, so that no word is unknown ("bpe" only).

    Returns:
        A fast tokenizer, padding on the left as generation wants it.

    Raises:
        ValueError: `vocab_size` is too small for the special tokens and the characters, there are no words, or a word
            is empty or contains white space.
    """
    counts = Counter(_words_of(sentences))
    if not counts:
        raise ValueError("there are no words to train a tokenizer on. Name other files")
    for word in counts:
        _clean(word, ())
    uses: Counter[str] = Counter()
    for word, count in counts.items():
        uses.update(dict.fromkeys(word.replace(WORD_END, "_"), count))
    rare = {character for character, count in uses.items() if count < min_frequency} if byte_fallback else set()
    counts = Counter({word: count for word, count in counts.items() if rare.isdisjoint(word)})
    alphabet = sorted({*uses, WORD_END} - rare)
    special = [PAD_TOKEN, UNKNOWN_TOKEN, BEGIN_TOKEN, END_TOKEN]
    num_bytes = 256 * byte_fallback
    if vocab_size < len(special) + len(alphabet) + num_bytes:
        raise ValueError(
            f"vocab_size is {vocab_size} and must be at least {len(special) + len(alphabet) + num_bytes} "
            f"({len(alphabet)} characters and {len(special)} special tokens{', and 256 bytes' * byte_fallback})"
        )
    if model == "bpe":
        trained = _learn_bpe(counts, vocab_size - num_bytes, special, alphabet, min_frequency)
        if byte_fallback:
            trained.model = _with_bytes(trained.model)
    else:
        trained = _learn_unigram(counts, vocab_size, special, alphabet)
    trained.normalizer = _word_end_normalizer()
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trained.decoder = decoders.Sequence(
        [
            decoders.Replace(WORD_END, " "),
            *([decoders.ByteFallback()] if byte_fallback else []),
            decoders.Fuse(),
            decoders.Replace(Regex(r"\A(?=.)"), " "),
            decoders.Replace(Regex(" $"), ""),
        ]
    )
    return fast_tokenizer(
        trained, pad_token=PAD_TOKEN, unk_token=UNKNOWN_TOKEN, bos_token=BEGIN_TOKEN, eos_token=END_TOKEN
    )


def _word_end_normalizer() -> normalizers.Normalizer:
    """Make the normalizer that writes the mark at the end of each word."""
    return normalizers.Sequence(
        [normalizers.Replace(WORD_END, "_"), normalizers.Replace(Regex(r"(?<=\S)(?!\S)"), WORD_END)]
    )


def _learn_bpe(
    counts: Counter[str], vocab_size: int, special: list[str], alphabet: list[str], min_frequency: int
) -> Tokenizer:
    """Learn pieces by merging frequent pairs."""
    trained = Tokenizer(models.BPE(unk_token=UNKNOWN_TOKEN))
    trained.normalizer = _word_end_normalizer()
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    # Sorted, so that the order of the sentences does not matter.
    trained.train_from_iterator((" ".join([word] * count) for word, count in sorted(counts.items())), trainer)
    return trained


def _with_bytes(learned: models.BPE) -> models.BPE:
    """The same pieces, and behind them the bytes, which spell what no piece has."""
    state = json.loads(learned.__getstate__())
    vocabulary = state["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    merges = [tuple(pair) for pair in state["merges"]]
    return models.BPE(vocabulary, merges, unk_token=UNKNOWN_TOKEN, byte_fallback=True)


def _learn_unigram(counts: Counter[str], vocab_size: int, special: list[str], alphabet: list[str]) -> Tokenizer:
    """Learn pieces by the unigram trainer of tokenizers and one more step of hard EM.

    The trainer never joins the last character of a text to another, so it reads the words backwards. Its probabilities
    differ in their last digits from run to run; they are estimated again from the best segmentation of each word.
    """
    marked = {word.replace(WORD_END, "_") + WORD_END: count for word, count in sorted(counts.items())}
    backwards = Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(special) + 1,
        unk_token=UNKNOWN_TOKEN,
        special_tokens=[UNKNOWN_TOKEN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backwards.train_from_iterator((word[::-1] for word, count in marked.items() for _ in range(count)), trainer)
    scores = json.loads(backwards.to_str())["model"]["vocab"]
    # Rounding and the order of the pieces make the result the same in every run.
    pieces = sorted((piece[::-1], round(score, 6)) for piece, score in scores if piece != UNKNOWN_TOKEN)
    model = models.Unigram([(UNKNOWN_TOKEN, 0.0), *pieces], unk_id=0, byte_fallback=False)
    uses: Counter[str] = Counter()
    for word, count in marked.items():
        for token in model.tokenize(word):
            uses[token.value] += count
    total = sum(uses.values())
    # An unused piece counts as half a use.
    estimated = [(piece, math.log(max(uses[piece], 0.5) / total)) for piece, _ in pieces]
    vocabulary = [(token, 0.0) for token in special] + sorted(estimated, key=lambda item: (-item[1], item[0]))
    return Tokenizer(models.Unigram(vocabulary, unk_id=special.index(UNKNOWN_TOKEN), byte_fallback=False))


def word_final_ids(tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Find the ids, of a tokenizer of this module, that may end a word.

    Args:
        tokenizer: made by `word_tokenizer` or `subword_tokenizer`.

    Returns:
        One bool per id. For words and classes of unknown words all are True. For pieces, True marks those that end a
            word: the pieces that end in U+2581, and the special tokens except `<unk>`, which replaces a character
            inside a word.

    Raises:
        ValueError: the tokenizer marks the end of words in another way, or not at all.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if backend["model"]["type"] == "WordLevel":
        return [True] * len(tokens)
    if WORD_END not in vocabulary:
        raise ValueError(
            f"the tokenizer has no piece {WORD_END!r} (U+2581), so its ids do not mark where a word ends. Train a "
            "tokenizer with subword_tokenizer"
        )
    whole = set(tokenizer.all_special_tokens) - {tokenizer.unk_token}
    return [token.endswith(WORD_END) or token in whole for token in tokens]
