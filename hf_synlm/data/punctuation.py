# SPDX-License-Identifier: Apache-2.0
"""Punctuation of treebanks: which words are, by their tags or their form, and how words stand in ordinary text.

Of the spaces between the words of GUM (CoNLL-U says which are there), the rules get 99.1 to 99.8 % right.
"""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from hf_synlm.data.treebank import PUNCTUATION_TAGS, SYMBOL_TAGS, UNIVERSAL_WORD_TAGS, WORD_TAGS

logger = logging.getLogger(__name__)

BRACKETS = {"(": "-LRB-", ")": "-RRB-", "[": "-LSB-", "]": "-RSB-", "{": "-LCB-", "}": "-RCB-"}
"""How the Penn Treebank writes brackets."""
BRACKET_OF = {escape: bracket for bracket, escape in BRACKETS.items()}
# What Unicode calls punctuation and treebanks call words, and the other way round.
_WORDS, _MARKS = frozenset("%‰&@#*/\\§¶†‡％＆＠＃＊／"), frozenset("`´¨<>|^~～")
# Marks at the edge of a word; inside a word (don't, 3.5, well-known) they stay.
_EDGE_PUNCTUATION = re.compile(r"(?<!\w)[^\w\s]+|[^\w\s]+(?!\w)")
_ESCAPED = re.compile(r"-[LR][RSC]B-", re.IGNORECASE)
_CLOSING = frozenset(", . ; : ? ! % ) ] } ” … ... .. ° ′ ″ '' ® ™ ?! !! ??".split())
_OPENING = frozenset("( [ { “ ‘ `` ` $ £ € # US$ C$ A$".split())
_CLITIC = re.compile(r"(n['’]t|['’](s|re|ve|ll|d|m))", re.IGNORECASE)
# Words of two parts that a treebank writes apart.
_PARTS = frozenset(
    "gon na|wan na|got ta|can not|gim me|lem me|out ta|kind a|d' ye|d’ ye|'t is|’t is|'t was|’t was|y' all".split("|")
)
Punctuation = Literal["tag", "form"]


def keep_words(words: Sequence[str], tags: Sequence[str], punctuation: Punctuation) -> list[bool]:
    """Mark the tokens that are not punctuation.

    Args:
        words: the tokens.
        tags: one part-of-speech tag per token.
        punctuation: how to recognize it: by "tag", all words whose tag is not one of words in the Penn Treebank or in
            Universal Dependencies, so also $ and #; or by
            "form", the words of punctuation marks of any script (Unicode's category P) and escapes such as -LRB-, for
            text without tags.

    Returns:
        One bool per token, True = keep.

    Raises:
        ValueError: another value of `punctuation`.
    """
    if punctuation not in get_args(Punctuation):
        raise ValueError(f"unknown punctuation_by={punctuation!r}. Choose one of {', '.join(get_args(Punctuation))}")
    if punctuation == "tag":
        return [tag in WORD_TAGS | UNIVERSAL_WORD_TAGS for tag in tags]
    return [not is_punctuation(word) for word in words]


def is_punctuation(word: str) -> bool:
    """Whether a word consists of punctuation marks, or is an escape of one, such as -LRB-."""
    # A single ' is a possessive as often as a quotation mark.
    if word in BRACKET_OF or word in ("'", "’") or _WORDS.issuperset(word):
        return word in BRACKET_OF
    return all(unicodedata.category(character).startswith("P") or character in _MARKS for character in word)


def drop_marks(words: Sequence[str]) -> list[str]:
    """The words of a treebank that have a letter or a digit, as text has them in lower case."""
    return [word.lower() for word in map(spell, words) if any(map(str.isalnum, word))]


def drop_edge_punctuation(text: str) -> str:
    """Leave out the punctuation at the edges of words, in text without tags."""
    return " ".join(_EDGE_PUNCTUATION.sub(" ", text).split())


def has_penn_tags(tags: Mapping[str, int]) -> bool:
    """Whether at most one in twenty words has a tag that neither the Penn Treebank nor Universal Dependencies has.

    Args:
        tags: how often each tag occurs.

    Returns:
        True also for no words.
    """
    return 20 * _unknown_tags(tags).total() <= sum(tags.values())


def _unknown_tags(tags: Mapping[str, int]) -> Counter[str]:
    known = WORD_TAGS | UNIVERSAL_WORD_TAGS | PUNCTUATION_TAGS | SYMBOL_TAGS
    return Counter({tag: count for tag, count in tags.items() if tag not in known})


def check_tags(tags: Mapping[str, int], remedy: str) -> int:
    """Check that tags identify punctuation (`has_penn_tags`), and warn of unknown tags.

    Args:
        tags: how often each tag occurs in a treebank.
        remedy: what to do otherwise, for the message.

    Returns:
        How many words have other tags, so that `keep_words` takes them for punctuation too.

    Raises:
        ValueError: more than one in twenty, as in the Brown corpus and in treebanks of other languages.
    """
    unknown, total = _unknown_tags(tags), sum(tags.values())
    shown = ", ".join(tag for tag, _ in unknown.most_common(5))
    if not has_penn_tags(tags):
        raise ValueError(
            f"{unknown.total()} of {total} words have tags of neither the Penn Treebank nor Universal Dependencies, "
            f"such as {shown}. So tags do not tell which words are punctuation: {remedy}"
        )
    if unknown:
        logger.warning(
            f"{unknown.total()} of {total} words count as punctuation, because their tags are not among those of words "
            f"in the Penn Treebank or Universal Dependencies: {shown}"
        )
    return unknown.total()


def spell(word: str) -> str:
    r"""A word of a treebank as text has it: brackets for -LRB- ..., \" for `` and '', / for \\/."""
    word = _ESCAPED.sub(lambda found: BRACKET_OF[found[0].upper()], word)
    return '"' if word in ("``", "''") else word.replace("\\/", "/").replace("\\*", "*")


def stands_joined(words: Sequence[str], tags: Sequence[str] = ()) -> list[bool]:
    """Which words of a treebank's sentence have no space before them in text; so has the first.

    Args:
        words: the words, punctuation by itself.
        tags: their tags (Penn Treebank), if known: they say whether a straight quote opens, and what a hyphen is.

    Returns:
        One bool per word.
    """
    joined: list[bool] = []
    is_open: dict[str, bool] = {}
    joins_next = True
    for place, word in enumerate(words):
        tag = tags[place] if tags else ""
        before, after = words[place - 1] if place else "", words[place + 1] if place + 1 < len(words) else ""
        left, right = _joins(word, tag, before, after, is_open)
        joined.append(joins_next or left)
        joins_next = right
    return joined


def _joins(word: str, tag: str, before: str, after: str, is_open: dict[str, bool]) -> tuple[bool, bool]:
    """Whether a word is joined to the word before, and to the word after; notes which quotes are open."""
    text, inside = spell(word), bool(before and after)
    if tag == "POS" or _CLITIC.fullmatch(text) or f"{before} {text}".lower() in _PARTS:
        return True, False
    if text == "'" and not is_open.get(text) and not tag and before[-1:] in ("s", "x", "z"):
        return True, False  # the girls' toys
    if word not in ("``", "''") and text in ('"', "'", "_"):
        opens = tag == "``" if tag in ("``", "''") else not is_open.get(text)
        is_open[text] = opens
        return not opens, opens
    if word in _OPENING or text in _OPENING:
        return False, True
    if word in _CLOSING or text in _CLOSING or text == "’":
        return (False, True) if tag == "``" else (True, False)
    if text in ("/", "--"):
        return inside, inside
    if text == "-":
        is_dash = tag in (":", "NFP", "PUNCT", ",") or not (before[-1:].isalnum() or before[-1:] in tuple("”’'\")._"))
        return inside and not is_dash, inside and not is_dash
    is_range = inside and text in ("–", "‑", "−") and before[-1].isdigit() and after[0].isdigit()
    return is_range, is_range
