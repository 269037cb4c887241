"""How brackets are counted: the conventions of the literature as named presets, every part of them an argument.

Published numbers differ by more than ten points through convention alone: mean over sentences or pooled counts, with or
without the span of the whole sentence, with or without one-word sentences, punctuation kept or not. The scorer itself
is `hf_synlm.evaluation.parsing`; the conventions of the program EVALB are in `hf_synlm.evaluation.evalb`.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, get_args

from hf_synlm.data.treebank import PUNCTUATION_TAGS, SYMBOL_TAGS, WORD_TAGS
from hf_synlm.trees import Span

logger = logging.getLogger(__name__)

# The single ' is not among them: in treebanks it is a possessive as often as a quotation mark.
PUNCTUATION_WORDS = frozenset(
    ". , : ; ? ! - -- --- ... .. ` `` '' \" “ ” ‘ – — … ( ) [ ] { } -LRB- -RRB- -LSB- -RSB- -LCB- -RCB-".split()
)
Punctuation = Literal["tag", "form"]


@dataclasses.dataclass(frozen=True)
class ParsingConvention:
    """How spans are counted; start from a preset of `CONVENTIONS` and change single fields by `dataclasses.replace`.

    Attributes:
        name: how the convention is called in output.
        level: which F1 is the published number: "sentence", the mean of the sentences' F1, or "corpus", of the counts
            pooled over all sentences. Both are always computed.
        sentence_span: the span (0, n): "drop" it on both sides, or "count" it on both sides, listed or not.
        min_width: narrower spans are not counted; 2 leaves single tokens out.
        duplicates: "set" counts a span once, "multiset" counts every copy (unary chains).
        min_length: shorter sentences are left out; 1 keeps all, 2 skips one-word sentences, 3 also two-word ones.
        max_length: longer sentences are left out; None keeps all.
        empty_gold: a sentence without gold spans (under this convention) has recall 1, and precision 1 too if nothing
            is predicted ("recall_one"); or is left out ("skip"); or has F1 0 ("zero").
        epsilon: added to the denominators of a sentence's P, R and F1; corpus F1 has none.
    """

    name: str
    level: Literal["sentence", "corpus"] = "sentence"
    sentence_span: Literal["drop", "count"] = "drop"
    min_width: int = 2
    duplicates: Literal["set", "multiset"] = "set"
    min_length: int = 1
    max_length: int | None = None
    empty_gold: Literal["recall_one", "skip", "zero"] = "recall_one"
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            allowed, value = get_args(field.type), getattr(self, field.name)
            if field.name in ("level", "sentence_span", "duplicates", "empty_gold") and value not in allowed:
                raise ValueError(f"{field.name} is {value!r}: choose one of {', '.join(map(repr, allowed))}")
        if self.min_width < 1 or self.min_length < 1:
            raise ValueError(f"min_width {self.min_width} and min_length {self.min_length} must be at least 1")
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError(f"max_length {self.max_length} is below min_length {self.min_length}: no sentence is left")
        if self.epsilon < 0:
            raise ValueError(f"epsilon is {self.epsilon}: it must not be negative")

    def describe(self) -> str:
        """Say in one line what is counted."""
        longest = "" if self.max_length is None else f" to {self.max_length}"
        empty = {"recall_one": "have recall 1", "skip": "are left out", "zero": "have F1 0"}[self.empty_gold]
        return (
            f"{self.name}: {self.level} F1, whole-sentence span "
            f"{'dropped' if self.sentence_span == 'drop' else 'counted'}, "
            f"spans of at least {self.min_width} token(s) as {self.duplicates}s, "
            f"sentences of {self.min_length}{longest or ' or more'} token(s), "
            f"sentences without gold spans {empty}, epsilon {self.epsilon:g}"
        )


# gpst: the scorer of ant-research/StructuredLM_RTDT. prpn and on-lstm: the scorers of yikangshen/PRPN (WSJ10, up to 10
# words) and yikangshen/Ordered-Neurons, both for trees over the words alone (see `keep_by_tag`). The three count alike.
# compound-pcfg: compare_trees.py of harvardnlp/compound-pcfg, whose input has no one-word sentences (its eval.py leaves
# sentences without gold spans out of the mean: empty_gold="skip"); compound-pcfg-corpus: the other number it prints.
# palm: the script of an early commit of Noahs-ARK/PaLM; Table 3 of the paper (right branching 40.7) fits its corpus F1
# (level="corpus") or sentence F1 without the whole sentence better than the mean that the script returns.
CONVENTIONS = {
    convention.name: convention
    for convention in (
        ParsingConvention("gpst"),
        ParsingConvention("prpn", max_length=10),
        ParsingConvention("on-lstm"),
        ParsingConvention("compound-pcfg", min_length=2),
        ParsingConvention("compound-pcfg-corpus", level="corpus", min_length=2),
        ParsingConvention("palm", sentence_span="count", max_length=40),
    )
}


def resolve_convention(convention: str | ParsingConvention, **changes: Any) -> ParsingConvention:
    """Look up a convention by name and change single fields of it.

    Args:
        convention: a key of `CONVENTIONS`, or a convention.
        **changes: fields of `ParsingConvention` to replace, e.g. `max_length=40`.

    Returns:
        The convention; its name lists the changes.

    Raises:
        ValueError: unknown name, field or value.
    """
    if isinstance(convention, str):
        if convention not in CONVENTIONS:
            raise ValueError(f"there is no convention {convention!r}: choose one of {', '.join(CONVENTIONS)}")
        convention = CONVENTIONS[convention]
    fields = {field.name for field in dataclasses.fields(ParsingConvention)} - {"name"}
    for name in changes:
        if name not in fields:
            raise ValueError(f"a parsing convention has no field {name!r}: choose among {', '.join(sorted(fields))}")
    changed = {name: value for name, value in changes.items() if value != getattr(convention, name)}
    if not changed:
        return convention
    listed = ", ".join(f"{name}={value}" for name, value in changed.items())
    return dataclasses.replace(convention, name=f"{convention.name} with {listed}", **changed)


def keep_by_tag(tags: Sequence[str], kept_tags: Collection[str] = WORD_TAGS) -> list[bool]:
    """Mark the tokens whose part-of-speech tag is in a white list; the default drops punctuation, $ and #.

    Args:
        tags: one tag per token.
        kept_tags: tags of the tokens to keep.

    Returns:
        One bool per token, True = keep.
    """
    return [tag in kept_tags for tag in tags]


def keep_by_word(words: Sequence[str], dropped_words: Collection[str] = PUNCTUATION_WORDS) -> list[bool]:
    """Mark the tokens that are no punctuation by their form, for text without tags.

    Args:
        words: the tokens.
        dropped_words: the forms to drop.

    Returns:
        One bool per token, True = keep.
    """
    return [word not in dropped_words for word in words]


def keep_words(words: Sequence[str], tags: Sequence[str], punctuation: Punctuation) -> list[bool]:
    """Mark the tokens that are no punctuation.

    Args:
        words: the tokens.
        tags: one tag per token.
        punctuation: what tells it: "tag" (`keep_by_tag`) or "form" (`keep_by_word`).

    Returns:
        One bool per token, True = keep.

    Raises:
        ValueError: another value of `punctuation`.
    """
    if punctuation not in get_args(Punctuation):
        raise ValueError(f"punctuation is told by {punctuation!r}: choose one of {', '.join(get_args(Punctuation))}")
    return keep_by_tag(tags) if punctuation == "tag" else keep_by_word(words)


def has_penn_tags(tags: Mapping[str, int]) -> bool:
    """Whether at most one in twenty words of a treebank has a tag that is not of the Penn Treebank.

    Args:
        tags: how often each tag occurs.

    Returns:
        True also for no words.
    """
    return 20 * _unknown_tags(tags).total() <= sum(tags.values())


def _unknown_tags(tags: Mapping[str, int]) -> Counter[str]:
    known = WORD_TAGS | PUNCTUATION_TAGS | SYMBOL_TAGS
    return Counter({tag: count for tag, count in tags.items() if tag not in known})


def check_tags(
    tags: Mapping[str, int], remedy: str = "keep punctuation, or tell it by form where that can be chosen"
) -> int:
    """Check that tags tell punctuation (`has_penn_tags`), and warn of those that are not known.

    Args:
        tags: how often each tag occurs in a treebank.
        remedy: what to do if they do not, for the message.

    Returns:
        How many words have other tags, so that `keep_by_tag` takes them for punctuation too.

    Raises:
        ValueError: more than one in twenty, as in the Brown corpus and in treebanks of other languages.
    """
    unknown, total = _unknown_tags(tags), sum(tags.values())
    shown = ", ".join(tag for tag, _ in unknown.most_common(5))
    if not has_penn_tags(tags):
        raise ValueError(
            f"{unknown.total()} of {total} words have tags that are not the Penn Treebank's, such as {shown}, so tags "
            f"do not tell punctuation here: {remedy}"
        )
    if unknown:
        logger.warning(
            f"{unknown.total()} of {total} words count as punctuation, because their tags are not among those of words "
            f"in the Penn Treebank: {shown}"
        )
    return unknown.total()


def drop_tokens(spans: Sequence[Span], keep: Sequence[bool]) -> list[Span]:
    """Remove tokens from under a tree: boundaries are renumbered, spans that lose all tokens vanish.

    Args:
        spans: half-open spans over n tokens.
        keep: one bool per token, True = keep.

    Returns:
        Spans over the tokens kept, in the order given; copies that arise are kept.

    Raises:
        ValueError: a span is out of range.
    """
    kept_before = list(accumulate(map(bool, keep), initial=0))
    check_spans(spans, len(keep), "spans to drop tokens from")
    renumbered = [(kept_before[start], kept_before[end]) for start, end in spans]
    return [(start, end) for start, end in renumbered if end > start]


def check_spans(spans: Sequence[Span], num_tokens: int, what: str) -> None:
    """Check that spans lie inside their sentence.

    Args:
        spans: half-open spans, which may cross or repeat.
        num_tokens: length of the sentence.
        what: whose spans they are, for the message.

    Raises:
        ValueError: a span is outside the sentence or empty.
    """
    for start, end in spans:
        if not 0 <= start < end <= num_tokens:
            raise ValueError(
                f"span ({start}, {end}) of the {what} does not fit into {num_tokens} tokens: "
                "spans are half-open and counted in the same tokens as the lengths"
            )
