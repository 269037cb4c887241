# SPDX-License-Identifier: Apache-2.0
"""Probabilities of sentences as sums over given trees, as papers on supervised syntactic language models report them.

    log p(x) >= log sum_k p(x, y_k)    over the distinct trees y_1..y_K of x in a file (n-best lists of any parser)

The sum is not divided by K, and how probable the parser found a tree does not count: a lower bound that grows with K.
It misses what the model gives to other trees, so it favors models that agree with the parser. It must not be compared
with sums over a beam, which are searched for in the model's own trees, nor with exact probabilities.

Source: perplexities of Transformer Grammars (Sartran et al. 2022) and of later work; not the importance sampling of
Dyer et al. (2016), which divides by the probabilities of a proposal distribution.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_synlm.data.brackets import plain_word
from hf_synlm.data.gold_trees import encode_trees
from hf_synlm.data.parsed import ParsedSentence, TreeStyle, guess_style, kind_of_trees, parses_of_lines, read_parse
from hf_synlm.data.text import PathLike, Tokenization, check_list, errors_at, iterate_lines_beside
from hf_synlm.data.treebank import TreebankSentence, parse_treebank, read_treebank
from hf_synlm.evaluation.results import EvaluationResult, describe_files
from hf_synlm.evaluation.text.perplexity import averages
from hf_synlm.evaluation.text.processes import progress_bar
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.text_items import TextItem
from hf_synlm.hub.abilities import joint_log_probs, tree_codec
from hf_synlm.trees.codecs import NO_LABEL, Row, TreeCodec

# Most tokens of a call of the model: a Tree LM that reads beginnings once has numbers for all pairs of them.
_MAX_TOKENS = 1024
_NUM_HEAD = 4096  # lines of a file from which its format is told
# Lines of Charniak's n-best lists beside the trees.
_CHARNIAK_HEAD, _SCORE = re.compile(r"\s*[0-9]+\s+\S+\s*"), re.compile(r"\s*[-+]?[0-9.]+(e[-+]?[0-9]+)?\s*")


class ProposalScore(NamedTuple):
    """What the distinct trees of a sentence give."""

    log_prob: float  # of their sum, in nats, with the end of the sentence
    num_tokens: int
    num_words: int  # as the trees split them
    num_trees: int
    best_share: float  # of the best tree in the sum
    has_unknown_words: bool


def read_proposals(paths: Iterable[PathLike]) -> dict[tuple[str, ...], list[TreebankSentence]]:
    """Trees by their words, from files of bracketed trees or of the JSON lines of `synlm parse --format json`.

    Also from n-best lists: lines of `ID ||| SCORE ||| TREE`, with or without tags (Dyer's RNNG), or a line
    `COUNT SENTENCE` before pairs of lines with score and tree (Charniak's parser).
    """
    found: dict[tuple[str, ...], list[TreebankSentence]] = {}
    for path in paths:
        for sentence in iterate_trees(Path(path)):
            found.setdefault(sentence.words, []).append(sentence)
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))}: no tree")
    return found


def iterate_trees(path: Path) -> Iterator[TreebankSentence]:
    """The trees of a file of `read_proposals`, one after the other if each line of the file has one."""
    lines = iterate_lines_beside(path)
    head = list(islice(lines, _NUM_HEAD))
    first = next(filter(str.strip, head), "")
    keep: Callable[[str], str] = str
    if " ||| " in first:
        keep = _tree_of_list
    elif _CHARNIAK_HEAD.fullmatch(first):
        keep = _not_beside
    elif kind_of_trees(path, head) == "conllu":
        return (yield from read_treebank(path))
    head = list(map(keep, head))
    lines = chain(head, map(keep, lines))
    style = "treebank" if keep is _not_beside else guess_style(head)[0]
    if style == "treebank":
        yield from parse_treebank(lines, source=str(path))
    elif all(line.count("(") == line.count(")") or line.startswith('{"') for line in head):
        yield from _without_tags(_parses(lines, style, path), str(path))
    else:
        yield from _without_tags(parses_of_lines(lines, style, source=str(path)), str(path))


def _tree_of_list(line: str) -> str:
    return next((part for part in line.split(" ||| ") if part.lstrip().startswith("(")), "")


def _not_beside(line: str) -> str:
    return "" if _CHARNIAK_HEAD.fullmatch(line) or _SCORE.fullmatch(line) else line


def _parses(lines: Iterable[str], style: TreeStyle, path: Path) -> Iterator[ParsedSentence]:
    for number, line in enumerate(lines, start=1):
        with errors_at(f"{path}:{number}"):
            yield read_parse(line, style)


def _without_tags(sentences: Iterable[ParsedSentence], path: str) -> Iterator[TreebankSentence]:
    for number, sentence in enumerate(sentences, start=1):
        words = sentence.words
        for tree in sentence.hypotheses:
            labels = tree.labels or [NO_LABEL] * len(tree.spans)
            spans = tuple((label, *span) for label, span in zip(labels, tree.spans, strict=True))
            yield TreebankSentence(words, (NO_LABEL,) * len(words), spans, f"{path}:{number}")


def batch_trees(scorer: TextScorer, codec: TreeCodec, rows: Sequence[Row]) -> dict[str, Any]:
    """Arguments of `forward` for trees that the codec of the model has encoded, on its device."""
    device = scorer.model.device
    return {name: part.to(device) if isinstance(part, Tensor) else part for name, part in codec.pad(rows).items()}


def known_trees(codec: TreeCodec, trees: Sequence[TreebankSentence]) -> list[TreebankSentence]:
    """Trees whose labels the model knows: to others it gives the probability 0. ValueError if there are none."""
    unknown = [codec.unknown(tree.labeled_spans, len(tree.words)) for tree in trees]
    known = [tree for tree, lacking in zip(trees, unknown, strict=True) if not lacking]
    if not known:
        labels = {label for lacking in unknown for label, _, _ in lacking}
        raise ValueError(
            f"every tree of {' '.join(trees[0].words)!r} has a label that the model does not know "
            f"({', '.join(sorted(labels))}; its labels are {', '.join(codec.labels)}). Rename or remove these labels"
        )
    return known


@torch.no_grad()
def score_proposals(scorer: TextScorer, words: Sequence[str], trees: Sequence[TreebankSentence]) -> ProposalScore:
    """Sum the probabilities of a sentence with given trees.

    Cost: a forward pass over each distinct tree, or over what they do not share (see `joint_log_probs`).
    """
    codec = tree_codec(scorer.model.config)
    encoded = encode_trees(known_trees(codec, trees), scorer.tokenizer, codec, scorer.text_style)
    rows = list({codec.key(row): row for row in encoded}.values())
    size, joint = max(1, _MAX_TOKENS // len(rows[0]["input_ids"])), list[Tensor]()
    for start in range(0, len(rows), size):
        batch = batch_trees(scorer, codec, rows[start : start + size])
        joint.append(joint_log_probs(scorer.model, batch).double().cpu())
    log_probs = torch.cat(joint)
    total = log_probs.logsumexp(0)
    share = (log_probs.max() - total).exp()
    unknown = bool(scorer.encode([words], "words")[0].unknown)
    return ProposalScore(float(total), len(rows[0]["word_ends"]), len(words), len(rows), float(share), unknown)


def without_search(scorer: TextScorer) -> dict[str, None]:
    """The options of a search, None each, for results of given trees."""
    searching = ("num_beams", "action_beam_size", "fast_track_size", "normalization")
    return dict.fromkeys(name for name in searching if name in scorer.options())


class Proposals:
    """Trees from files for sentences with the same characters, which may split them into other words."""

    def __init__(self, paths: Sequence[PathLike]) -> None:
        self.files = describe_files(paths)
        self._trees: dict[str, list[TreebankSentence]] = {}
        for words, trees in read_proposals(paths).items():
            self._trees.setdefault(plain_word(" ".join(words)), []).extend(trees)

    def trees_of(self, sentence: str, number: int) -> list[TreebankSentence]:
        """The trees of a sentence, the `number`-th of the input, with all repetitions."""
        trees = self._trees.get(plain_word(sentence), [])
        if not trees:
            paths = ", ".join(file["path"] for file in self.files)
            raise ValueError(
                f"sentence {number} has no tree in {paths}: {sentence!r}. Add trees, or use their spelling."
            )
        return trees

    def settings(self, scorer: TextScorer, tokenize: Tokenization | None = None) -> dict[str, Any]:
        """Options that results state; options of a search, and `tokenize`, are refused."""
        if tokenize:
            raise ValueError("the words of --proposals come from the trees. Leave --tokenize out")
        if scorer.num_beams is not None or scorer.search_options:
            raise ValueError("num_beams and the other options of a search do not apply to proposals. Leave them out")
        return {
            **without_search(scorer),
            "estimator": "proposals",
            "end_of_text": scorer.end_of_text,
        }

    def score(self, scorer: TextScorer, sentences: Sequence[str], progress: str | None = None) -> list[ProposalScore]:
        """Sum the probabilities of sentences over their trees; equal sentences are scored once."""
        check_list("sentences", sentences)
        given = {sentence: self.trees_of(sentence, number) for number, sentence in enumerate(sentences, 1)}
        for sentence, trees in given.items():
            words = {tree.words for tree in trees}
            if len(words) > 1:
                raise ValueError(
                    f"trees of {sentence!r} split its words in {len(words)} ways, such as "
                    f"{' | '.join(map(' '.join, sorted(words)[:2]))}. Give trees that split the sentence in one way"
                )
        found = {
            sentence: score_proposals(scorer, given[sentence][0].words, given[sentence])
            for sentence in progress_bar(given, progress, unit="sentences")
        }
        return [found[sentence] for sentence in sentences]


def evaluate_proposals(
    scorer: TextScorer,
    items: Sequence[TextItem],
    proposals: Proposals,
    *,
    tokenize: Tokenization | None = None,
    data: dict | None = None,
    options: dict | None = None,
) -> EvaluationResult:
    """Perplexities of sentences (`_with_end` where the model has ends), each summed over the trees of files.

    Also counts, `mean_trees`, and `mean_best_share`: how much of the sum the best tree of a sentence has.
    """
    start, settings = time.perf_counter(), proposals.settings(scorer, tokenize)
    texts = [item.text for item in items if item.text.strip()]
    scores = proposals.score(scorer, texts, f"perplexity: {scorer.name}")
    nats = -math.fsum(score.log_prob for score in scores)
    tokens, words_in_all = (sum(getattr(score, f"num_{unit}") for score in scores) for unit in ("tokens", "words"))
    ends, suffix = (0, "") if scorer.end_of_text == "not modeled" else (len(texts), "_with_end")
    results = {
        **averages(nats, tokens + ends, words_in_all + ends, suffix),
        "sentences": len(texts),
        "words": words_in_all,
        "tokens": tokens,
        "mean_trees": mean(score.num_trees for score in scores),
        "mean_best_share": mean(score.best_share for score in scores),
    }
    settings |= {"unit": "nats inside, bits where the name says so", **(options or {})}
    described = {**(data or {"texts": len(texts)}), "proposals": proposals.files}
    seconds = time.perf_counter() - start
    return EvaluationResult.of(scorer, "perplexity", results, settings, data=described, seconds=seconds)
