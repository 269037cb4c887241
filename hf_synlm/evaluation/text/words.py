# SPDX-License-Identifier: Apache-2.0
"""The user's words and the model's tokens: which token belongs to which word.

Words are separated by white space (as by `str.split`). The model reads the words joined by single spaces,
so double spaces, tabs and other white space change nothing. Every token is assigned to the word whose characters it
covers. Punctuation is part of a word if the user's text has it so. With `tokenize`, the model reads such a word in
several pieces, as in the Penn Treebank, or without marks. The tokens still belong to the user's word. A model whose
`text_style` is "natural" reads these pieces without spaces between them, as the text has them.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any

import torch
from sentencex import segment
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import cut_texts, encode_joined, word_ends_from_word_ids
from hf_synlm.data.punctuation import BRACKET_OF, BRACKETS, drop_edge_punctuation, is_punctuation, stands_joined
from hf_synlm.data.text import NATURAL, Tokenization, check_list, tokenization_of

_WORD = re.compile(r"\S+")
# Classes of unknown words, see `hf_synlm.data.vocabulary.unknown_class`.
_UNKNOWN_CLASS = re.compile(r"<(un)?c?unk[^>]*>|UNK(-[A-Za-z]+)*")
_SPACE_MARKS = ("\u0120", "\u2581")  # of byte-level BPE, of sentencepiece
# Characters of printed text as the treebank's tokenizer knows them.
_TYPEWRITER = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": " -- ", "–": "-", "…": " ... "})
_SAME_LENGTH = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": ";", "…": ";"})
_ESCAPE = re.compile(r"\W*[LR]RB\W*", re.IGNORECASE)  # in a vocabulary of pieces
_Pieces = dict[tuple[str, bool], list[str]]  # by word, and whether it is the last of its sentence


@dataclass(frozen=True)
class Word:
    """A word of a text and where it stands there, `text[start:end]`."""

    text: str
    start: int
    end: int


@dataclass
class EncodedText:
    """A text as token ids.

    Attributes:
        ids: the tokens, without a begin token.
        word_of_token: for each token the index of its word, -1 for tokens between sentences.
        num_words: words of the text; some may have no token.
        context: token ids of complete sentences before it.
        unknown: indices of words with a part that has no token, or only an unknown token; marks left out do not count.
        leaf_of_token: for each token the index of its leaf in a tree, if words are split; default: `word_of_token`.
    """

    ids: list[int]
    word_of_token: list[int]
    num_words: int
    context: list[list[int]] = field(default_factory=list)
    unknown: frozenset[int] = frozenset()
    leaf_of_token: list[int] | None = None

    @property
    def word_ends(self) -> list[bool]:
        """Whether a leaf ends at each token: a constituent may end there."""
        return word_ends_from_word_ids(self.leaf_of_token or self.word_of_token)


def has_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokens are words, and not pieces of words."""
    return tokenizer.is_fast and type(tokenizer.backend_tokenizer.model).__name__ == "WordLevel"


def split_words(text: str, start: int = 0) -> list[Word]:
    """Words of a text, as `text.split()` gives them, with their positions if the text begins at `start`."""
    return [Word(match.group(), start + match.start(), start + match.end()) for match in _WORD.finditer(text)]


def split_as_treebank(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]], text_style: str | None = None
) -> list[list[list[str]]]:
    """Split words as the Penn Treebank does: `end.` is `end .`, `it's` is `it 's`.

    A word of the vocabulary stays whole, because treebanks differ (`don't`, `Mr.`). So does a word that is one token of
    a vocabulary of pieces, except contractions whose parts are tokens, too. A period is split from the last word of a
    line, and from words before a new sentence, but not from abbreviations (`Mr. Smith of the U.S. came. Then`).
    Brackets become `-LRB-`, or `-LRB-` a bracket, whichever the vocabulary has. Quotes become `` and '' if a vocabulary
    of words has these. Punctuation is left out for models that learned without it (no "." in the vocabulary).

    Args:
        tokenizer: a fast tokenizer.
        sentences: per sentence its words.
        text_style: "natural": the vocabulary does not matter, and all pieces stay as they are written.

    Returns:
        Per sentence, per word its pieces; none for punctuation that is left out.

    Cost: O(characters); every different word is split once.
    """
    check_list("sentences", sentences, '["the", "dog"]')
    is_natural = text_style == NATURAL
    has_period = is_natural or bool(_spelled(tokenizer, {"."}))
    split = partial(_split_of_words if has_words(tokenizer) else _split_of_pieces, tokenizer)
    split = _split_text if is_natural else split
    keys = [
        [(word, not has_period or place in ends) for place, word in enumerate(sentence)]
        for sentence, ends in ((sentence, _sentence_ends(sentence)) for sentence in sentences)
    ]
    pieces = split(set(chain.from_iterable(keys)))
    if not has_period:
        pieces = {
            key: [part for part in parts if any(map(str.isalnum, part)) and part not in BRACKET_OF]
            for key, parts in pieces.items()
        }
    return [[pieces[key] for key in sentence] for sentence in keys]


def treebank_words(sentence: str) -> list[str]:
    """The words of a sentence as the Penn Treebank writes them: `it's (late).` is `it 's -LRB- late -RRB- .`."""
    words = sentence.split()
    ends = _sentence_ends(words)
    pieces = (piece for place, word in enumerate(words) for piece in _treebank_pieces(word, place in ends))
    return [BRACKETS.get(piece, piece) for piece in pieces]


@lru_cache(maxsize=2**18)
def _treebank_pieces(word: str, is_last: bool) -> tuple[str, ...]:
    # nltk takes a period from the end of its text only.
    more = word.endswith(".") and not is_last
    pieces = _treebank_tokenizer().tokenize(word.translate(_TYPEWRITER) + " a" * more)
    return tuple(pieces[: len(pieces) - more])


@lru_cache(maxsize=1)
def _treebank_tokenizer() -> Any:
    from nltk.tokenize.treebank import TreebankWordTokenizer  # slow to import

    return TreebankWordTokenizer()


def _sentence_ends(words: Sequence[str]) -> set[int]:
    """Indices of the last word, and of words with a period that end a sentence before it."""
    ends, last = set[int](), len(words) - 1
    if any(word.endswith(".") for word in words[:-1]):
        starts = accumulate((len(word) + 1 for word in words), initial=0)
        place_of = {start: place for place, start in enumerate(starts)}
        lengths = (len(sentence) for sentence in segment("en", " ".join(words)))
        ends = {place_of[start] - 1 for start in accumulate(lengths) if start in place_of}
    # Rules for sentences take `Fri. evening` and `5 a.m. Monday` for an end.
    return {last} | {k for k in ends if k < last and not (words[k + 1][0].islower() or "." in words[k][:-1])}


def _typed(word: str) -> str:
    """The typewriter form of a word, if it is one word."""
    typed = word.translate(_TYPEWRITER)
    return word if len(typed.split()) != 1 or typed != typed.strip() else typed


def _split_of_words(tokenizer: PreTrainedTokenizerBase, places: set[tuple[str, bool]]) -> _Pieces:
    """Pieces as a vocabulary of words has them."""
    forms = {word: _typed(word) for word, _ in places}
    whole = _spelled(tokenizer, {*forms, *forms.values()}) - {*BRACKETS, *BRACKET_OF}
    split: _Pieces = {}
    for word, is_last in places:
        known = next((form for form in (word, forms[word]) if form in whole), None)
        split[word, is_last] = list(_treebank_pieces(word, is_last)) if known is None else [known]
    # What the tokenizer writes for a bracket or quote, or the mark itself.
    spellings = {quote: (quote, '"') for quote in ("``", "''")}
    spellings |= {mark: (escape, mark) for mark, escape in BRACKETS.items()}
    spellings |= {escape: (escape, mark) for mark, escape in BRACKETS.items()}
    found = _spelled(tokenizer, set(chain.from_iterable(spellings.values())))
    read = {piece: next((one for one in both if one in found), piece) for piece, both in spellings.items()}
    return {key: [part if part in whole else read.get(part, part) for part in parts] for key, parts in split.items()}


def _split_of_pieces(tokenizer: PreTrainedTokenizerBase, places: set[tuple[str, bool]]) -> _Pieces:
    """Pieces of words that are more than one token, and of contractions (`don't`) whose pieces are tokens, too."""
    split, forms = _split_text(places), {word: _typed(word) for word, _ in places}
    pieces = set(chain.from_iterable(split.values()))
    tokens = _of_one_token(tokenizer, {*forms, *forms.values(), *pieces, *map(_typed, pieces)})
    # Raw text, of which many vocabularies are made, has no escapes.
    read = BRACKETS if any(map(_ESCAPE.fullmatch, tokenizer.get_vocab())) else BRACKET_OF
    found: _Pieces = {}
    for (word, is_last), parts in split.items():
        spelled = [part if part in tokens else _typed(part) for part in parts]
        if any("'" in _typed(part) for part in parts[1:]) and tokens.issuperset(spelled):
            whole = spelled
        else:
            whole = next(([form] for form in (word, forms[word]) if form in tokens), parts)
        found[word, is_last] = [read.get(part, part) for part in whole]
    return found


def _split_text(places: set[tuple[str, bool]]) -> _Pieces:
    """Pieces of words as they are written."""
    found: _Pieces = {}
    for word, is_last in places:
        # As long as the word, so that places agree.
        text = word.translate(_SAME_LENGTH) + " a" * (word.endswith(".") and not is_last)
        found[word, is_last] = [word[i:j] for i, j in _treebank_tokenizer().span_tokenize(text) if i < len(word)]
    return found


def split_sentences(
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[Sequence[str]],
    tokenize: Tokenization | None,
    text_style: str | None = None,
) -> list[list[list[str]]]:
    """Per sentence, per word the pieces that a model reads.

    "ptb": by `split_as_treebank`; "no-punctuation": without the marks at its edges, as `drop_punctuation` in training;
    "auto": as the text style says.
    """
    tokenize = tokenization_of(text_style) if tokenize == "auto" else tokenize
    if tokenize in (None, "words"):
        return [[[word] for word in sentence] for sentence in sentences]
    if tokenize == "ptb":
        return split_as_treebank(tokenizer, sentences, text_style)
    return [
        [[] if is_punctuation(word) else drop_edge_punctuation(word).split() for word in sentence]
        for sentence in sentences
    ]


def _spelled(tokenizer: PreTrainedTokenizerBase, words: set[str]) -> set[str]:
    """The words that are not unknown."""
    listed = sorted(words)
    encoded = encode_sentences(tokenizer, [[word] for word in listed])
    return {word for word, text in zip(listed, encoded, strict=True) if not text.unknown}


def _of_one_token(tokenizer: PreTrainedTokenizerBase, words: set[str]) -> set[str]:
    """The words that are one token, alone or after another word."""
    listed = sorted(words)
    alone = encode_sentences(tokenizer, [[word] for word in listed])
    after = encode_sentences(tokenizer, [["a", word] for word in listed])
    counts = [{len(one.ids), two.word_of_token.count(1)} for one, two in zip(alone, after, strict=True)]
    return {word for word, found, one in zip(listed, counts, alone, strict=True) if 1 in found and not one.unknown}


def encode_sentences(
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[Sequence[str]],
    tokenize: Tokenization | None = None,
    text_style: str | None = None,
) -> list[EncodedText]:
    """Encode sentences given as words, and assign every token to a word.

    Words may have white space inside, or be empty and have no token. Text that looks like a special token is read as
    text. In a vocabulary of words, such a word is unknown. No token is added.

    Args:
        tokenizer: a fast tokenizer, which gives the positions of its tokens.
        sentences: per sentence its words; a sentence may be empty.
        tokenize: how the model reads words, see `split_sentences`; None = as they are.
        text_style: that of the model's configuration. "natural": pieces of a word stand together in text; words that
            are not split are those of a treebank, and stand as `stands_joined` says.

    Returns:
        One text per sentence.

    Raises:
        ValueError: the tokenizer gives no positions, or a token covers two words.

    Cost: O(characters).
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not give the positions of its tokens, so they cannot be assigned to "
            "words. Use a fast tokenizer (one with a tokenizer.json)"
        )
    check_list("sentences", sentences, '["the", "dog"]')
    parts = [[word.split() for word in words] for words in sentences]
    leaves = [[part for word in words for part in word] for words in parts]
    texts = _encode_leaves(tokenizer, leaves, tokenize, text_style)
    return [_join_pieces(words, text) for words, text in zip(parts, texts, strict=True)]


def _encode_leaves(
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[Sequence[str]],
    tokenize: Tokenization | None = None,
    text_style: str | None = None,
) -> list[EncodedText]:
    """`encode_sentences` of words without white space."""
    if text_style == NATURAL or tokenize not in (None, "words"):
        pieces = split_sentences(tokenizer, sentences, tokenize, text_style)
        leaves = [[piece for word in words for piece in word] for words in pieces]
        encoded = (
            _encode_natural(tokenizer, pieces, leaves, tokenize)
            if text_style == NATURAL
            else _encode_leaves(tokenizer, leaves)
        )
        return [_join_pieces(words, text) for words, text in zip(pieces, encoded, strict=True)]
    try:
        texts = cut_texts(tokenizer, [" ".join(words) for words in sentences])
    except Exception as error:  # tokenizers has no type of its own for a word that a vocabulary cannot write
        raise ValueError(
            f"The tokenizer cannot encode the text: {error}. If it has no unknown token, add one to the tokenizer."
        ) from error
    classes = _classes_of_unknown_words(tokenizer)
    unknown = tokenizer.unk_token_id
    special = set() if unknown is None else set(tokenizer.all_special_ids) - {unknown}
    return [
        _assign(words, [unknown if token in special else token for token in ids], offsets, tokenizer, classes)
        for words, (ids, offsets) in zip(sentences, texts, strict=True)
    ]


def _encode_natural(
    tokenizer: PreTrainedTokenizerBase,
    pieces: Sequence[Sequence[Sequence[str]]],
    leaves: Sequence[Sequence[str]],
    tokenize: Tokenization | None,
) -> list[EncodedText]:
    """Texts of leaves, the pieces of words: those of a word touch; words that are not split stand as by the rules."""
    if tokenize in (None, "words"):
        joined = [stands_joined(words) for words in leaves]
    else:
        joined = [[place > 0 for word in words for place in range(len(word))] for words in pieces]
    unknown = tokenizer.unk_token_id
    return [
        EncodedText(
            ids, owners, len(words), unknown=frozenset(k for k, t in zip(owners, ids, strict=True) if t == unknown)
        )
        for (ids, owners), words in zip(encode_joined(tokenizer, leaves, joined), leaves, strict=True)
    ]


def _join_pieces(words: Sequence[Sequence[str]], text: EncodedText) -> EncodedText:
    """A text of pieces as a text of the words that have them."""
    owners = [number for number, pieces in enumerate(words) for _ in pieces]
    unknown = {owners[piece] for piece in text.unknown}  # nothing is unknown of a word without pieces
    of_words, leaves = [owners[k] for k in text.word_of_token], text.leaf_of_token or text.word_of_token
    return EncodedText(text.ids, of_words, len(words), unknown=frozenset(unknown), leaf_of_token=leaves)


def _assign(
    words: Sequence[str],
    ids: list[int],
    offsets: Sequence[tuple[int, int]],
    tokenizer: PreTrainedTokenizerBase,
    classes: dict[int, str],
) -> EncodedText:
    """Give every token to the word whose characters it covers."""
    text = " ".join(words)
    word_at: list[int] = []
    for number, word in enumerate(words):
        word_at += [number] * (len(word) + (number > 0))  # a space goes with the word after it
    owners = []
    for token, (start, end) in zip(ids, offsets, strict=True):
        piece = text[start:end]
        start += len(piece) - len(piece.lstrip(" "))
        end -= len(piece) - len(piece.rstrip(" "))
        if start < end:
            owners.append(word_at[start])
            if word_at[end - 1] != owners[-1]:
                raise ValueError(
                    f"the token {tokenizer.convert_ids_to_tokens(token)!r} covers the words {words[owners[-1]]!r} "
                    f"and {words[word_at[end - 1]]!r}. Use a tokenizer whose tokens do not cross white space"
                )
        elif piece:
            owners.append(word_at[min(start, len(text)) - 1])  # white space only
        else:  # a mark of the end or the beginning of a word, which covers no character
            ends_word = start == len(text) or (start > 0 and text[start] == " ")
            owners.append(word_at[start - ends_word])
    unknown = set(range(len(words))) - set(owners)
    for token, owner in zip(ids, owners, strict=True):
        if token == tokenizer.unk_token_id or classes.get(token, words[owner]) != words[owner]:
            unknown.add(owner)
    return EncodedText(ids, owners, len(words), unknown=frozenset(unknown))


def unknown_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of tokens that only stand for unknown words: the unknown token, and classes of unknown words.

    GPT-2's unknown token is its end token, too, and does not count.
    """
    others = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.sep_token_id, None}
    return {tokenizer.unk_token_id, *_classes_of_unknown_words(tokenizer)} - others


def _classes_of_unknown_words(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Tokens of a vocabulary of words that stand for classes of unknown words."""
    if not has_words(tokenizer):
        return {}
    return {index: token for token, index in tokenizer.get_vocab().items() if _UNKNOWN_CLASS.fullmatch(token)}


def word_starts(tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Sequence[int]) -> Tensor | None:
    """Which tokens begin a word, or end the text, if the vocabulary marks the beginning of words.

    In such a vocabulary (byte-level BPE, sentencepiece, WordPiece) the last token of a word does not tell that the word
    is over. Only the next token does.

    Args:
        tokenizer: a fast tokenizer.
        vocab_size: size V of the model's vocabulary.
        end_token_ids: tokens that end a text.

    Returns:
        [V] bool; None if tokens are words or mark the end of words, so that the end of a word is known.
    """
    if has_words(tokenizer):
        return None
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    continuing = backend["model"].get("continuing_subword_prefix") or ""
    final = backend["model"].get("end_of_word_suffix") or ""
    if backend["model"]["type"] == "WordPiece":
        starting = {index for token, index in vocabulary.items() if not token.startswith(continuing or "##")}
        starting -= set(tokenizer.all_special_ids)
    elif final or _marks_ends(vocabulary):
        return None
    else:
        starting = {
            index for token, index in vocabulary.items() if token.startswith(_SPACE_MARKS) or token[:1].isspace()
        }
        for index, token in tokenizer.added_tokens_decoder.items():
            starting |= {index} if token.lstrip else set()
    starts = torch.zeros(vocab_size, dtype=torch.bool)
    starts[[index for index in {*starting, *end_token_ids} if index < vocab_size]] = True
    return starts


def _marks_ends(vocabulary: dict[str, int]) -> bool:
    """Whether the space marks stand at the end of pieces, as in the vocabularies of RNNG."""
    marked = [
        token for token in vocabulary if len(token) > 1 and (token[0] in _SPACE_MARKS or token[-1] in _SPACE_MARKS)
    ]
    return sum(token[-1] in _SPACE_MARKS for token in marked) > len(marked) / 2
