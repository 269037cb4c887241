# SPDX-License-Identifier: Apache-2.0
"""Surprisal and other measures for each of the user's words.

The surprisal of a word is the sum over its tokens, -log p(tokens of the word | everything before it). With an estimator
by beam it has two parts (Roark et al. 2009): with B the derivations in the beam after the word,

    surprisal  = log p(before) - log sum_{y in B} p(before, y up to and with the word)
    structural = log p(before) - log sum_{y in B} p(before, y up to but without the word)
    lexical    = surprisal - structural

*Word correction.* Where tokens mark the beginning of words (" the"), the tokens of a word do not mark the end of word:
" the" also begins " theory". The probability of a word is then (Pimentel and Meister 2024; Oh and Schuler 2024)

    p(word | before) = p(tokens | before) p(a word begins or the text ends | before, word) / p(a word begins | before)

The last factor is 1 for the first word of a text. Off by default, as most published numbers are without it.

*Trees.* ON-LSTM, PRPN and PaLM give every sentence one tree, which is a function of all its words. It gives each word
its depth (number of constituents around it), the numbers of constituents that begin and end with it, and its distance
to the word before. This is the height, less one, of the smallest constituent over both, in the tree binarized to the
right (Shen et al. 2018).
"""

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.text import NATURAL, Tokenization, check_list
from hf_synlm.evaluation.text.batches import growing_blocks
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.text_items import TextItem, columns_of_rows
from hf_synlm.evaluation.text.token_scores import TokenScores
from hf_synlm.evaluation.text.words import EncodedText, Word, encode_sentences, split_words, word_starts
from hf_synlm.evaluation.trees.treebank_parsing import EncodedSentence, parse_encoded
from hf_synlm.hub.abilities import declared
from hf_synlm.recurrent.distances import spans_to_distances
from hf_synlm.trees.spans import Span

Unit = Literal["bits", "nats"]
Context = Literal["sentence", "document"]
_Encode = Callable[[Sequence[Sequence[str]]], list[EncodedText]]
ENTROPY_COLUMNS = {"shannon": "entropy_{}", "renyi": "renyi_entropy_{}"}
"""Names of the entropies of `TextScorer` in `WordScores.more`: of the first token of a word, before it is read."""
ATTENTION_COLUMNS = {"projected": "nae", "raw": "nae_raw"}
"""Names of the attention entropies of `TextScorer` in `WordScores.more`: sums over the tokens of a word."""
TREE_COLUMNS = ("tree_distance", "tree_depth", "n_opened", "n_closed")
"""Names of the measures of the tree in `WordScores.more`, of models that have one tree."""
NATS = {"bits": math.log(2), "nats": 1.0}
"""Nats in one unit."""


@dataclass
class WordScores:
    """Measures of the n words of one text; log-probabilities in nats, NaN if missing.

    Attributes:
        words: the user's words with their places in the text.
        num_tokens: [n] tokens of each word.
        unknown: [n] words outside the vocabulary.
        log_probs: [n] log p(word | before).
        lexical: [n] lexical part of `log_probs`.
        beam_entropy: [n] entropy of the derivations in the beam after the word.
        num_actions: [n] expected structural actions before and inside the word.
        stack_depth: [n] expected number of trees on the stack after the word.
        tokens: per token its text and its log-probability.
        end: log p(the text ends), or None.
        more: [n] further measures by the name of their column; if the name has {} for the unit, they are in nats.
    """

    words: list[Word]
    num_tokens: Tensor
    unknown: list[bool]
    log_probs: Tensor
    lexical: Tensor
    beam_entropy: Tensor
    num_actions: Tensor
    stack_depth: Tensor
    tokens: list[tuple[str, float]]
    end: float | None = None
    more: dict[str, Tensor] = field(default_factory=dict)


def score_words(scorer: TextScorer, items: Sequence[TextItem], **options: Any) -> list[WordScores]:
    """Scores of the words of texts, see `iterate_words`."""
    check_list("items", items, 'TextItem("1", "...")')
    return list(iterate_words(scorer, list(items), **options))


def iterate_words(
    scorer: TextScorer,
    items: Iterable[TextItem],
    *,
    context: Context = "sentence",
    word_correction: bool = False,
    tokenize: Tokenization | None = None,
    end: bool = False,
    progress: str | None = None,
) -> Iterator[WordScores]:
    """Score every word of texts; the scores come in the order of the texts.

    Args:
        scorer: the model.
        items: the texts; they may be empty. Those of an iterator are taken as they are needed. The first scores then
            come as soon as possible, which costs some speed. Memory holds the longest document, if it is read whole.
        context: "sentence" reads every text alone. "document" reads it after the earlier texts of its document. A GPST
            reads these with their trees, a Tree LM on a backbone as plain text before its begin token, a recurrent
            model with an end token between texts, other models as running text, joined by spaces, in windows if it is
            long.
        word_correction: give the probability of words instead of that of their tokens, see the top of this file.
            No effect if `can_correct_words` is false.
        tokenize: how the model reads words, see `encode_sentences`; None = as its `text_style` says.
        end: also score the end of every text ("sentence" only).
        progress: name of a progress bar; None = no bar.

    Yields:
        One element per text, with one value per word of `text.split()`, or per row of a table of words.

    Raises:
        ValueError: as `TextScorer.score`; or a document context for a model that reads single sentences.
    """
    if context not in ("sentence", "document"):
        raise ValueError(f"context {context!r} is unknown. Choose 'sentence' or 'document'")
    encode = partial(scorer.encode, tokenize=tokenize)
    as_written = encode if scorer.text_style == NATURAL else partial(encode_sentences, scorer.tokenizer)
    reads_documents = context == "document" and not scorer.reads_context
    is_list = isinstance(items, list)
    has_one_tree = scorer.details and declared(scorer.model.config, "gives_trees") and not scorer.searches
    # Of each group of texts their numbers, their words, and what the model reads.
    read: deque[tuple[list[int], list[list[Word]], EncodedText]] = deque()

    def encoded() -> Iterator[EncodedText]:
        first, before = 0, list[TextItem]()
        most = 64 * scorer.batch_size
        blocks = _whole_documents(items, most) if reads_documents else growing_blocks(items, most, 8)
        blocks = iter([items]) if isinstance(items, list) else blocks
        for block in blocks:
            part = before + block
            words = [words_of(item) for item in part]
            groups = _documents(part) if reads_documents else [[k] for k in range(len(part))]
            texts = _encode(scorer, encode, as_written, words, part, groups, context)
            for group, text in list(zip(groups, texts, strict=True))[len(before) :]:
                read.append(([first + k - len(before) for k in group], [words[k] for k in group], text))
                yield text
            first += len(block)
            start, size = len(part), 0
            if context == "document" and not reads_documents:  # the next block goes on with what the model can see
                while start and part[start - 1].document == part[-1].document and size <= 2 * scorer.max_context:
                    start, size = start - 1, size + len(texts[start - 1].ids)
            before = part[start:]

    starts = word_correction and can_correct_words(scorer)
    trees: deque[Tensor] = deque()
    results: dict[int, WordScores] = {}
    following = 0
    texts = list(encoded()) if is_list else encoded()
    for found in scorer.iterate(texts, end=end, starts=starts, progress=progress):
        if has_one_tree and not trees:
            near = islice(read, None if is_list else 8 * scorer.batch_size)
            trees.extend(_tree_measures(scorer, encode, [words for _, group, _ in near for words in group]))
        group, words, text = read.popleft()
        whole = by_words(scorer, list(chain.from_iterable(words)), text, found)
        first = 0
        for k, own in zip(group, words, strict=True):
            results[k] = _slice(whole, text, first, first + len(own)) if len(group) > 1 else whole
            if has_one_tree:
                results[k].more = dict(zip(TREE_COLUMNS, trees.popleft().T, strict=True)) | results[k].more
            first += len(own)
        while following in results:
            yield results.pop(following)
            following += 1


def surprisal(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    unit: Unit = "bits",
    tokenize: Tokenization | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Surprisal of every word of sentences, the table of `synlm surprisal`.

        rows = hf_synlm.surprisal(model, tokenizer, ["the people agree"])
        table = pandas.DataFrame(rows)

    Args:
        model: any causal language model of transformers.
        tokenizer: its fast tokenizer.
        sentences: texts, whose words are separated by white space.
        unit: of surprisals and entropies.
        tokenize: how the model reads words, see `encode_sentences`; None = as its `text_style` says.
        **options: options of `TextScorer`, such as `num_beams=20` or `details=True`.

    Returns:
        One row per word, by the names of `columns`; structural measures with `details=True` only.

    Raises:
        ValueError: as `TextScorer`, or `sentences` is a text.
    """
    check_list("sentences", sentences)
    items = [TextItem(str(number), text) for number, text in enumerate(sentences, 1)]
    scores = score_words(TextScorer(model, tokenizer, **options), items, tokenize=tokenize)
    names = columns(unit, more=scores[0].more if scores else ())
    return [dict(zip(names, row, strict=True)) for row in word_table(items, scores, unit)]


def words_of(item: TextItem) -> list[Word]:
    """Words of the rows of a table, with their places in the text that joins them by spaces; or words of a text.

    Places of a sentence are those in the text from which it was split.
    """
    if not item.rows:
        return split_words(item.text, item.start)
    starts = accumulate((len(row.word) + 1 for row in item.rows), initial=0)
    return [Word(row.word, start, start + len(row.word)) for row, start in zip(item.rows, starts, strict=False)]


def _tree_measures(scorer: TextScorer, encode: _Encode, words: Sequence[Sequence[Word]]) -> list[Tensor]:
    """`TREE_COLUMNS` [n, 4] of sentences; a word without tokens has no place in the tree, and NaN.

    Cost: one more pass over the texts.
    """
    texts = encode([[word.text for word in sentence] for sentence in words])
    found = [torch.full((text.num_words, 4), math.nan, dtype=torch.float64) for text in texts]
    places = [list(dict.fromkeys(text.word_of_token)) for text in texts]
    full = [k for k, text in enumerate(texts) if text.ids]
    # A grammar has no pieces of words: constituents that cut a word of several tokens are left out of its tree.
    is_grammar = declared(scorer.model.config, "is_grammar")
    sentences = []
    for k in full:
        owner = texts[k].word_of_token
        ends = tuple(is_grammar or a != b for a, b in zip(owner, [*owner[1:], -1], strict=True))
        spelled = tuple("_".join(words[k][place].text.split()) for place in (owner if is_grammar else places[k]))
        sentences.append(EncodedSentence(tuple(texts[k].ids), ends, spelled))
    parsed = parse_encoded(scorer.model, sentences, batch_size=scorer.batch_size, num_processes=scorer.num_processes)
    for k, sentence in zip(full, parsed, strict=True):
        if not sentence.hypotheses:  # a grammar has no derivation of it
            continue
        spans = sentence.tree().unlabeled_spans
        if is_grammar:
            owner = [-1, *texts[k].word_of_token, -1]
            places_of = dict(zip(places[k], range(len(places[k])), strict=True))
            whole = [(i, j) for i, j in spans if owner[i] != owner[i + 1] and owner[j] != owner[j + 1]]
            whole = [(places_of[owner[i + 1]], places_of[owner[j]] + 1) for i, j in whole]
            spans = tuple(dict.fromkeys((i, j) for i, j in whole if j - i > 1))
        measures = _measures_of_tree(spans, len(places[k]))
        found[k][places[k]] = torch.tensor(measures, dtype=torch.float64)
    return found


def _measures_of_tree(spans: Sequence[Span], num_words: int) -> list[list[float]]:
    """Distance, depth, constituents opened and closed of every word; the first word has no distance."""
    distances = [math.nan, *spans_to_distances(spans, num_words)[1:]]
    opened, closed = Counter(i for i, _ in spans), Counter(j - 1 for _, j in spans)
    depths = accumulate(opened[k] - closed[k - 1] for k in range(num_words))
    return [[distances[k], depth, opened[k], closed[k]] for k, depth in enumerate(depths)]


def can_correct_words(scorer: TextScorer) -> bool:
    """Whether tokens mark the beginning of words, so that word correction has something to correct.

    If tokens are words, or mark the end of words, the tokens of a word tell that it is over.
    """
    return word_starts(scorer.tokenizer, scorer.model.config.vocab_size, []) is not None


def why_sentences_alone(scorer: TextScorer) -> str | None:
    """Why a model does not read documents, or has not learned to; None if it has."""
    is_grammar = declared(scorer.model.config, "is_grammar")
    if is_grammar or (scorer.searches and not scorer.reads_context):
        return f"{type(scorer.model).__name__} reads one sentence"
    if scorer.end_of_text == "not modeled" or scorer.reads_context == "plain text":
        return f"{type(scorer.model).__name__} is trained on single sentences"
    return None


def _whole_documents(items: Iterable[TextItem], most: int) -> Iterator[list[TextItem]]:
    """Texts in blocks of whole documents, of at least 8, 16, ..., `most` texts."""
    block, size, last = list[TextItem](), 8, 0
    for item in items:
        if item.document < last:  # documents have numbers in the order of their first texts
            raise ValueError(
                f"item {item.item!r} belongs to a document that began earlier, but another document stands in "
                "between. Sort the table by document, because a long table is read piece by piece"
            )
        if item.document != last and len(block) >= size:
            yield block
            block, size = [], min(2 * size, most)
        block.append(item)
        last = item.document
    yield block


def _documents(items: Sequence[TextItem]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.document, []).append(number)
    return list(groups.values())


def _encode(
    scorer: TextScorer,
    encode: _Encode,
    as_written: _Encode,
    words: list[list[Word]],
    items: Sequence[TextItem],
    groups: list[list[int]],
    context: Context,
) -> list[EncodedText]:
    """One text per group of items."""
    sentences = [[word.text for word in sentence] for sentence in words]
    if context == "sentence":
        return encode(sentences)
    if not scorer.reads_context and (reason := why_sentences_alone(scorer)):
        raise ValueError(f"{reason}: choose the context 'sentence'")
    if not scorer.reads_context and not scorer.begins_itself:
        return encode([[word for k in group for word in sentences[k]] for group in groups])
    texts = encode(sentences)
    if scorer.reads_context:
        is_plain = scorer.reads_context == "plain text"
        for group in _documents(items):
            parts = [texts[k].ids for k in group]
            parts = _running_text(as_written, [sentences[k] for k in group]) if is_plain else parts
            stops = list(accumulate(map(len, parts), initial=0))
            for place, k in enumerate(group):  # one sentence more than fits, so that the cut is counted
                first = max(0, bisect_right(stops, stops[place] - scorer.max_context) - 1)
                texts[k].context = [ids for ids in parts[first:place] if ids]
        return texts
    return [_with_ends([texts[k] for k in group], scorer.end_ids[0]) for group in groups]


def _running_text(encode: _Encode, sentences: Sequence[Sequence[str]]) -> list[list[int]]:
    """Tokens of sentences that stand one after the other in a text, with spaces between them."""
    text = encode([[word for words in sentences for word in words]])[0]
    owners = [number for number, words in enumerate(sentences) for _ in words]
    ids: list[list[int]] = [[] for _ in sentences]
    for token, word in zip(text.ids, text.word_of_token, strict=True):
        ids[owners[word]].append(token)
    return ids


def _with_ends(texts: list[EncodedText], end_id: int) -> EncodedText:
    """Texts one after the other with an end token after each."""
    joined = EncodedText([], [], 0)
    unknown: set[int] = set()
    for text in texts:
        joined.ids += [*text.ids, end_id] if text.ids else []
        joined.word_of_token += [*(joined.num_words + w for w in text.word_of_token), -1] if text.ids else []
        unknown |= {joined.num_words + w for w in text.unknown}
        joined.num_words += text.num_words
    joined.unknown = frozenset(unknown)
    return joined


def by_words(scorer: TextScorer, words: list[Word], text: EncodedText, scores: TokenScores) -> WordScores:
    """Sum tokens to words."""
    owner = torch.tensor(text.word_of_token, dtype=torch.long)
    inside = owner >= 0
    count = torch.bincount(owner[inside], minlength=len(words))
    log_probs = scores.log_probs
    if scores.word_start is not None:
        log_probs = log_probs + _correction(scores.word_start, owner)
    first, last = (
        torch.zeros(len(words), dtype=torch.long).scatter_reduce(
            0, owner[inside], torch.arange(len(owner))[inside], which, include_self=False
        )
        for which in ("amin", "amax")
    )

    def sums(values: Tensor | None) -> Tensor:
        total = torch.zeros(len(words), dtype=torch.float64)
        if values is None or not len(values):
            return total.fill_(math.nan)
        return total.index_add(0, owner[inside], values[inside]).masked_fill(count == 0, math.nan)

    def at(places: Tensor, values: Tensor | None) -> Tensor:
        if values is None or not len(values):
            return torch.full((len(words),), math.nan, dtype=torch.float64)
        return values[places].masked_fill(count == 0, math.nan)

    more = {} if scorer.entropy is None else {ENTROPY_COLUMNS[scorer.entropy]: at(first, scores.entropy)}
    if scorer.attention_entropy is not None:
        more[ATTENTION_COLUMNS[scorer.attention_entropy]] = sums(scores.attention_entropy)
    if scorer.belief_update is not None:
        more |= {"belief_update_{}": at(last, scores.belief_update), "belief_cut": at(last, scores.belief_cut)}
    pieces = zip(scorer.tokenizer.convert_ids_to_tokens(text.ids), log_probs.tolist(), strict=True)
    return WordScores(
        words=words,
        num_tokens=count,
        unknown=[number in text.unknown for number in range(len(words))],
        log_probs=sums(log_probs),
        lexical=sums(scores.lexical),
        beam_entropy=at(last, scores.beam_entropy),
        num_actions=sums(scores.num_actions),
        stack_depth=at(last, scores.stack_depth),
        tokens=[piece for piece, w in zip(pieces, text.word_of_token, strict=True) if w >= 0],
        end=scores.end,
        more=more,
    )


def _correction(word_start: Tensor, owner: Tensor) -> Tensor:
    """[n] word correction of every token, given the word that owns it.

    The last token of a word gets log p(a word begins or the text ends) after it. The first token of the next word pays
    it back.
    """
    if not len(owner):
        return word_start[:-1]
    before = owner.roll(1)
    starts = owner != before
    starts[0] = True
    paid = word_start[:-1].masked_fill(~starts | (before < 0), 0.0)
    paid[0] = 0.0
    return word_start[1:].masked_fill(~starts.roll(-1), 0.0) - paid


def _slice(whole: WordScores, text: EncodedText, first: int, last: int) -> WordScores:
    """The words from `first` to `last` of a document."""
    own = ("words", "num_tokens", "unknown", "log_probs", "lexical", "beam_entropy", "num_actions", "stack_depth")
    owners = [w for w in text.word_of_token if w >= 0]
    tokens = [piece for piece, w in zip(whole.tokens, owners, strict=True) if first <= w < last]
    more = {name: values[first:last] for name, values in whole.more.items()}
    return WordScores(tokens=tokens, more=more, **{name: getattr(whole, name)[first:last] for name in own})


# ---------------------------------------------------------------------------------------------------------- beams
def side_by_side(
    scores: Iterable[WordScores], columns: Mapping[str, Iterable[WordScores] | None]
) -> Iterator[WordScores]:
    """The `scores`, with a column of surprisals for each of `columns`, by the ending of its name; None = their own."""
    others = {name: each for name, each in columns.items() if each is not None}
    for found, *parts in zip(scores, *others.values(), strict=True):
        of_others = dict(zip(others, parts, strict=True))
        found.more |= {f"surprisal_{{}}_{name}": -of_others.get(name, found).log_probs for name in columns}
        yield found


def with_beams(
    scores: Iterable[WordScores], width: int, others: Mapping[int, Iterable[WordScores]], say: Callable[[str], object]
) -> Iterator[WordScores]:
    """Add the surprisals by the beams `others` to scores by a beam of this width; `say` then tells how they differ."""
    surprisals: list[Tensor] = []
    for found in side_by_side(scores, {f"b{one}": part for one, part in {**others, width: None}.items()}):
        surprisals.append(torch.stack([found.more[f"surprisal_{{}}_b{one}"] for one in (*others, width)]))
        yield found
    *narrow, wide = torch.cat(surprisals, 1) / NATS["bits"]
    for one, values in zip(others, narrow, strict=True):
        if said := describe_difference(values, wide):
            say(f"beam {one} and {width}: {said}")


def describe_difference(narrow: Tensor, wide: Tensor) -> str:
    """How surprisals of words (bits) by two beams differ; nothing for fewer than two words."""
    both = torch.stack([narrow, wide]).double()
    both = both[:, both.isfinite().all(0)]
    if both.shape[1] < 2:
        return ""
    difference = (both[0] - both[1]).abs()
    return (
        f"correlation {torch.corrcoef(both)[0, 1]:.4f}, mean absolute difference {difference.mean():.3g} bits (mean "
        f"surprisal {both[1].mean():.3g}), above 1 bit: {(difference > 1).double().mean():.1%} of the words"
    )


# ---------------------------------------------------------------------------------------------------------- files
def columns(unit: Unit, items: Sequence[TextItem] = (), more: Iterable[str] = ()) -> list[str]:
    """Names of the columns of a table of words (some hold the `unit`), then those of the texts.

    `more` names further measures, as in `WordScores`.
    If the name of a column of the texts is taken, it gets the ending "_input".
    """
    own = [
        "item", "sentence_id", "word_id", "word", "n_tokens", "oov", f"surprisal_{unit}", f"lexical_{unit}",
        f"structural_{unit}", "cum_logprob_nats", f"beam_entropy_{unit}", "n_actions", "stack_depth", "char_start",
        "char_end", *(name.format(unit) for name in more),
    ]  # fmt: skip
    return own + [f"{name}_input" if name in own else name for name in more_columns(items)]


def more_columns(items: Sequence[TextItem]) -> list[str]:
    """Names of the columns that come from the input."""
    tables = chain.from_iterable(map(columns_of_rows, items))
    return list(dict.fromkeys(name for columns in tables for name in columns))


def word_table(items: Sequence[TextItem], scores: Sequence[WordScores], unit: Unit = "bits") -> list[list[Any]]:
    """One row per word.

    `sentence_id` counts the texts of the input from 1 (in plain text: the lines, empty ones too), `word_id` the words
    of a text from 1. `char_start` and `char_end` are half-open positions in the given text.

    Args:
        items: the texts.
        scores: their words.
        unit: of surprisals and entropies.

    Returns:
        Rows with the columns of `columns(unit, items, scores[0].more)`; NaN if a measure does not exist.
    """
    more = more_columns(items)
    return [
        row
        for number, (item, found) in enumerate(zip(items, scores, strict=True), 1)
        for row in word_rows(number, item, found, unit, more)
    ]


def word_rows(number: int, item: TextItem, found: WordScores, unit: Unit, more: Sequence[str]) -> Iterator[list[Any]]:
    """The rows of one text, the `number`-th of the input; `more` names the columns that come from the input."""
    total = found.log_probs.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf).cumsum(0).tolist()
    measures = torch.stack([
        -found.log_probs / NATS[unit],
        -found.lexical / NATS[unit],
        (found.lexical - found.log_probs).clamp_min(0) / NATS[unit],  # rounding may leave -1e-7
        found.beam_entropy / NATS[unit],
        found.num_actions,
        found.stack_depth,
    ], 1).tolist()  # fmt: skip
    counts = found.num_tokens.tolist()
    further = [(values / NATS[unit] if "{" in name else values).tolist() for name, values in found.more.items()]
    for place, word in enumerate(found.words):
        columns = item.rows[place].columns if item.rows else item.columns
        surprisal, lexical, structural, entropy, actions, depth = measures[place]
        yield [
            item.item, number, place + 1, word.text, counts[place], int(found.unknown[place]), surprisal, lexical,
            structural, total[place], entropy, actions, depth, word.start, word.end,
            *(values[place] for values in further), *(columns.get(name) for name in more),
        ]  # fmt: skip


def token_rows(number: int, found: WordScores) -> Iterator[list[Any]]:
    """One row per token of the `number`-th text with the columns of lm-zoo: ids from 1, the surprisal in bits."""
    for place, (token, log_prob) in enumerate(found.tokens, 1):
        yield [number, place, token, -log_prob / NATS["bits"]]


LMZOO_COLUMNS = ["sentence_id", "token_id", "token", "surprisal"]
