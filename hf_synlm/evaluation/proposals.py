"""Probabilities of sentences as sums over given trees, as papers on supervised syntactic language models report them.

    log p(x) >= log sum_k p(x, y_k)    over the distinct trees y_1..y_K of x in a file (n-best lists of any parser)

The sum is not divided by K, and how probable the parser found a tree does not count: a lower bound that grows with K.
It misses what the model gives to other trees, so it favors models that agree with the parser. It must not be compared
with sums over a beam, which are searched for in the model's own trees, nor with exact probabilities.

Source: perplexities of Transformer Grammars (Sartran et al. 2022) and of later work; not the importance sampling of
Dyer et al. (2016), which divides by the probabilities of a proposal distribution.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_synlm.actions import PAD_ACTION, spans_to_actions
from hf_synlm.data.collate import LABEL_PADDING, collate_trees, encode_words
from hf_synlm.data.gold_trees import binary_token_spans, encode_trees, system_constituents
from hf_synlm.data.text import PathLike
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.evaluation.perplexity import averages
from hf_synlm.evaluation.results import EvaluationResult, describe_files
from hf_synlm.evaluation.scoring import TextScorer
from hf_synlm.evaluation.text_items import TextItem
from hf_synlm.pushdown_tape import tree_attachments
from hf_synlm.rnng_actions import TransitionSystem
from hf_synlm.trees import Span

# Most tokens of a call of the model.
_MAX_TOKENS = 4096


class ProposalScore(NamedTuple):
    """What the trees of a sentence give.

    Fields:
        log_prob: log of the sum over the trees, in nats; the end of the sentence is part of it.
        num_tokens: tokens of the sentence.
        num_trees: distinct trees.
        best_share: share of the best tree in the sum.
    """

    log_prob: float
    num_tokens: int
    num_trees: int
    best_share: float


def read_proposals(paths: Iterable[PathLike]) -> dict[tuple[str, ...], list[TreebankSentence]]:
    """Read trees and group them by their words, in whatever order they stand.

    Args:
        paths: files of bracketed trees.

    Returns:
        By the words of a sentence its trees.

    Raises:
        ValueError: a file cannot be read as trees, or has none.
    """
    found: dict[tuple[str, ...], list[TreebankSentence]] = {}
    for path in paths:
        for sentence in read_treebank(Path(path)):
            found.setdefault(sentence.words, []).append(sentence)
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))}: no tree to sum over")
    return found


def _binary(scorer: TextScorer, tree: TreebankSentence) -> tuple[list[int], list[Span]]:
    """Token ids of a sentence, and the spans of its tree over tokens, binarized to the right."""
    ids, is_end = encode_words(scorer.tokenizer, tree.words)
    return ids, binary_token_spans(tree.spans, is_end)


def _labeled(scorer: TextScorer, trees: list[TreebankSentence]) -> list[dict[str, Any]]:
    config = scorer.model.config
    system = TransitionSystem(config.transition_system, len(config.nonterminals))
    # The model gives trees with other labels the probability 0.
    labels_of = [{label for label, _, _ in system_constituents(tree, system.name)} for tree in trees]
    known = [tree for tree, labels in zip(trees, labels_of, strict=True) if labels <= set(config.nonterminals)]
    if not known:
        labels = set().union(*labels_of) - set(config.nonterminals)
        raise ValueError(
            f"every tree of {' '.join(trees[0].words)!r} has a label that the model does not know "
            f"({', '.join(sorted(labels))}; it knows {', '.join(config.nonterminals)}): rename or remove these labels"
        )
    rows = encode_trees(known, scorer.tokenizer, system, config.nonterminals)
    return [{**row, "key": tuple(row["actions"])} for row in rows]


def _gpst(scorer: TextScorer, trees: list[TreebankSentence]) -> list[dict[str, Any]]:
    pairs = [_binary(scorer, tree) for tree in trees]
    return [{"input_ids": ids, "spans": spans, "key": tuple(spans)} for ids, spans in pairs]


def _urnng(scorer: TextScorer, trees: list[TreebankSentence]) -> list[dict[str, Any]]:
    pairs = [_binary(scorer, tree) for tree in trees]
    return [
        {"input_ids": ids, "actions": spans_to_actions(spans, len(ids)), "key": tuple(spans)} for ids, spans in pairs
    ]


def _pushdown(scorer: TextScorer, trees: list[TreebankSentence]) -> list[dict[str, Any]]:
    config, rows = scorer.model.config, []
    for ids, spans in (_binary(scorer, tree) for tree in trees):
        attachments = [LABEL_PADDING, *tree_attachments(spans, len(ids)), LABEL_PADDING]
        framed = [config.bos_token_id, *ids, config.eos_token_id]
        rows.append({"input_ids": framed, "attachments": attachments, "key": tuple(spans)})
    return rows


_ENCODERS: dict[str, Callable[[TextScorer, list[TreebankSentence]], list[dict[str, Any]]]] = {
    "gpst": _gpst,
    "rnng": _labeled,
    "tree_lm": _labeled,
    "urnng": _urnng,
    "pushdown": _pushdown,
}


def _batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Arguments of `forward` for trees of one sentence, which have equally many tokens."""
    if "word_ends" in rows[0]:
        return collate_trees(rows, 0)
    batch: dict[str, Any] = {"input_ids": torch.tensor([row["input_ids"] for row in rows])}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if "spans" in rows[0]:
        batch["spans"] = [row["spans"] for row in rows]
    elif "attachments" in rows[0]:
        batch["attachments"] = torch.tensor([row["attachments"] for row in rows])
    else:
        batch["actions"] = pad_sequence([torch.tensor(row["actions"]) for row in rows], True, PAD_ACTION)
    return batch


@torch.no_grad()
def score_proposals(
    scorer: TextScorer, words: Sequence[str], trees: Sequence[TreebankSentence], max_trees: int | None = None
) -> ProposalScore:
    """Sum the probabilities of a sentence with given trees.

    Args:
        scorer: the model.
        words: the sentence.
        trees: trees of these words; what the model cannot tell apart counts once.
        max_trees: take the first distinct trees only, at most this many.

    Returns:
        The sum and its parts.

    Raises:
        ValueError: the model does not read given trees, or every tree has a label that it does not know (some of them
            count as impossible).

    Cost: one forward pass over every distinct tree.
    """
    encode = _ENCODERS.get(scorer.model.config.model_type)
    if encode is None:
        raise ValueError(
            f"{type(scorer.model).__name__} gives no probability to given trees: sums over proposals are for "
            f"{', '.join(_ENCODERS)}. Leave the proposals out."
        )
    rows = list({row["key"]: row for row in encode(scorer, list(trees))}.values())[:max_trees]
    length = len(rows[0]["input_ids"])
    size, joint = max(1, _MAX_TOKENS // length), list[Tensor]()
    for start in range(0, len(rows), size):
        batch = {
            name: value.to(scorer.model.device) if isinstance(value, Tensor) else value
            for name, value in _batch(rows[start : start + size]).items()
        }
        joint.append(scorer.model(**batch).joint_log_prob.double().cpu())
    log_probs = torch.cat(joint)
    total = log_probs.logsumexp(0)
    share = (log_probs.max() - total).exp()
    num_tokens = length - 2 if "attachments" in rows[0] else length
    return ProposalScore(float(total), num_tokens, len(rows), float(share))


def evaluate_proposals(
    scorer: TextScorer,
    items: Sequence[TextItem],
    paths: Sequence[PathLike],
    *,
    max_trees: int | None = None,
    data: dict | None = None,
    options: dict | None = None,
) -> EvaluationResult:
    """Perplexity of sentences, each summed over the trees that files give for it.

    Args:
        scorer: the model.
        items: the sentences, their words separated by white space.
        paths: files of bracketed trees.
        max_trees: see `score_proposals`.
        data: what results say about the data.
        options: further options for the result, such as the seed.

    Returns:
        The result: perplexities `_with_end` (see `evaluation.perplexity`), counts, `mean_trees`, and
        `mean_best_share`, how much of the sum the best tree of a sentence has.

    Raises:
        ValueError: a sentence has no tree, or the scorer has options of a search; see also `read_proposals` and
            `score_proposals`.
    """
    if scorer.num_beams is not None or scorer.search_options:
        raise ValueError("with proposals nothing is searched: leave num_beams and the other options of the search out")
    start, proposals = time.perf_counter(), read_proposals(paths)
    texts = [tuple(item.text.split()) for item in items if item.text.strip()]
    for number, words in enumerate(texts, 1):
        if words not in proposals:
            raise ValueError(
                f"sentence {number} has no tree in {', '.join(map(str, paths))}: {' '.join(words)!r}. Write it with "
                "the words of the trees (--format treebank reads a treebank), or add trees."
            )
    scores = [score_proposals(scorer, words, proposals[words], max_trees) for words in texts]
    nats = -math.fsum(score.log_prob for score in scores)
    tokens, words_in_all = sum(score.num_tokens for score in scores), sum(map(len, texts))
    results = {
        **averages(nats, tokens + len(texts), words_in_all + len(texts), "_with_end"),
        "sentences": len(texts),
        "words": words_in_all,
        "tokens": tokens,
        "mean_trees": mean(score.num_trees for score in scores),
        "mean_best_share": mean(score.best_share for score in scores),
    }
    searching = ("num_beams", "action_beam_size", "fast_track_size", "normalization")
    settings = {
        **dict.fromkeys((name for name in searching if name in scorer.options()), None),
        "estimator": "proposals",
        "max_trees": max_trees,
        "end_of_text": scorer.end_of_text,
        "unit": "nats inside, bits where the name says so",
        **(options or {}),
    }
    described = {**(data or {"texts": len(texts)}), "proposals": describe_files(paths)}
    seconds = time.perf_counter() - start
    return EvaluationResult.of(scorer, "perplexity", results, settings, data=described, seconds=seconds)
