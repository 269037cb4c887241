# SPDX-License-Identifier: Apache-2.0
"""Evaluation of grammars: likelihood of gold trees by teacher forcing, and beam search over held-out sentences.

The likelihood given the gold trees is not that of a language model of words. The search sums over trees: compare its
word perplexity with that of a model without trees.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_synlm.core.losses import share_of
from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.collate import LABEL_PADDING
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.punctuation import Punctuation, keep_words
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.evaluation.trees.evalb import EvalbParameters, labeled_f1
from hf_synlm.evaluation.trees.gold_treebank import Treebank
from hf_synlm.evaluation.trees.parsing import ParsingScores, branching_baselines, unlabeled_f1
from hf_synlm.evaluation.trees.treebank_parsing import EncodedSentence, parse_encoded, parse_words
from hf_synlm.training.engine.samplers import padded_batches
from hf_synlm.training.engine.steps import map_rows, to_device
from hf_synlm.training.tasks.tree_batches import TreeDataset
from hf_synlm.trees.codecs import TreeCodec
from hf_synlm.trees.spans import Span

# Names of parts of Pushdown Layers' loss.
PARTS = {"language_model": "word", "attachment": "action"}


# ---------------------------------------------------------------------------------------------- given trees
def add_perplexities(totals: dict[str, float]) -> dict[str, float]:
    """Perplexities exp(nats / count) from sums (or from means over the same batches).

    `totals` has `word_nats`, `tokens`, `words`, and for grammars `action_nats`, `actions`; others are passed on. Added
    are `token_perplexity`, and for grammars `action_perplexity` and `perplexity` (of both), for models of words alone
    `word_perplexity`: a grammar predicts tokens given the actions before them, which gives no word perplexity.
    """
    values = dict(totals)
    word_nats, tokens, words = (values.pop(name) for name in ("word_nats", "tokens", "words"))
    values["token_perplexity"] = perplexity_of(word_nats / tokens)
    if "actions" in values:
        action_nats, actions = values.pop("action_nats"), values.pop("actions")
        values["action_perplexity"] = perplexity_of(action_nats / actions)
        values["perplexity"] = perplexity_of((word_nats + action_nats) / (tokens + actions))
    else:
        values["word_perplexity"] = perplexity_of(word_nats / words)
    return values


class Objective:
    """The loss of a micro batch; its parts are the sums from which perplexities are computed.

    `codec` is that of the model's trees, None for a model of words alone. A part of the loss is divided by what
    `config.loss_normalization` says; None is the mean over what it counts.
    """

    def __init__(self, config: Any, codec: TreeCodec | None):
        self.codec = codec
        self.normalization: Any = None if codec is None else config.loss_normalization

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and detached: its named parts in nats over the batch (`word_nats`, ...) with what they count."""
        batch = dict(batch)
        tokens = batch["labels"] != LABEL_PADDING if "labels" in batch else batch["attention_mask"]
        counts = {"words": batch.pop("num_words").float(), "tokens": tokens.sum().float()}
        output = model(**batch)
        if self.codec is not None:
            counts["actions"] = (self.codec.steps(batch)[0] >= 0).sum().float()
        own: dict[str, Any] = {"word": counts["tokens"], "action": counts.get("actions")}
        sizes = {"batch": len(batch["input_ids"]), "sum": 1, "token": own["word"], "action": own["action"]}
        shares, losses = batch.get("loss_shares"), output.get("losses") or {"word": output.loss.detach()}
        for name, part in losses.items():
            kind = PARTS.get(name, name)
            divisor = sizes.get(self.normalization, own[kind])
            counts[f"{kind}_nats"] = part * (divisor / share_of(shares, name))
        return output.loss, counts


@torch.no_grad()
def evaluate_given_trees(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: TreeDataset,
    collate: Callable[[list[Any]], dict[str, Any]],
    objective: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, dict[str, Tensor]]],
    max_batch_size: int,
    max_batch_actions: int,
) -> dict[str, float]:
    """Negative log-likelihood of held-out trees (for a model of words: of their words); every process calls.

    Returns `nats` of all sentences, `nats_per_sentence`, and perplexities. The processes share the batches of up to
    `max_batch_size` sentences and `max_batch_actions` padded actions; their number changes the sums by rounding only.
    """
    plain = accelerator.unwrap_model(model)
    batches = padded_batches(dataset.lengths("actions"), max_batch_size, max_batch_actions)
    own: Counter[str] = Counter()
    with evaluation_mode(plain):
        for rows in batches[accelerator.process_index :: accelerator.num_processes]:
            batch = to_device(collate(dataset.__getitems__(rows)), accelerator.device)
            own.update({name: part.item() for name, part in objective(plain, batch)[1].items()})
    shares = gather_object([dict(own)])
    sums = {name: sum(share.get(name, 0.0) for share in shares) for name in next(filter(None, shares))}
    nats = sum(value for name, value in sums.items() if name.endswith("_nats"))
    return {"nats": nats, "nats_per_sentence": nats / len(dataset), **add_perplexities(sums)}


# ---------------------------------------------------------------------------------------------- search
def spread(count: int, limit: int | None) -> list[int]:
    """At most `limit` (`None`: all) of `count` indices, spread evenly."""
    if limit is None or limit >= count:
        return list(range(count))
    return np.linspace(0, count - 1, num=limit, dtype=int).tolist()


@torch.no_grad()
def search_trees(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: TreeDataset,
    rows: Sequence[int],
    batch_size: int,
    beam: dict[str, Any],
) -> tuple[dict[str, Any], str]:
    """Parse the sentences `rows` by beam search and score the best trees; every process calls.

    `beam` holds `num_beams`, `action_beam_size`, `fast_track_size` for `model.parse`. Returns the scores for
    JSON (F1 in percent), and a line that says them:

    - `labeled_f1`, `labeled_precision`, `labeled_recall`: EVALB's (COLLINS.prm); missing for unlabeled trees.
    - `unlabeled_f1`: the same brackets without their labels.
    - `induction_sentence_f1`: as for models that induce their trees (convention "gpst", punctuation not counted).
    - `right_branching_sentence_f1`: the same for right-branching trees.
    - `punctuation_by`: how punctuation was recognized for these two; see `TreeDataset.punctuation_by`.
    - `word_perplexity`: exp(- sum of the words' log prefix-probability ratios / number of words).
    - `num_failures`: sentences without a complete tree in the beam; their gold brackets count as missed.
    """
    plain, lengths = accelerator.unwrap_model(model), dataset.lengths("input_ids")
    gold = [dataset.sentence(row) for row in rows]

    def parse(numbers: list[int]) -> list[ParsedSentence]:
        items = zip(numbers, dataset.__getitems__([rows[number] for number in numbers]), strict=True)
        sentences = [
            EncodedSentence(tuple(item["input_ids"]), tuple(item["word_ends"]), gold[number].words)
            for number, item in items
        ]
        return parse_encoded(plain, sentences, batch_size=batch_size, **beam)

    found = map_rows(accelerator, [int(lengths[row]) for row in rows], batch_size, parse, "search")
    return score_parses(gold, dataset.punctuation_by, found, beam, plain.config)


def induction_scores(
    spans: Sequence[Sequence[Span]], gold: Sequence[TreebankSentence], by: Punctuation
) -> tuple[ParsingScores, ParsingScores]:
    """Scores of trees and of right-branching ones (convention "gpst", punctuation, recognized `by`, not counted)."""
    sizes, correct = [len(sentence.words) for sentence in gold], [sentence.spans for sentence in gold]
    keep = [keep_words(sentence.words, sentence.tags, by) for sentence in gold]
    return unlabeled_f1(spans, correct, sizes, keep=keep), branching_baselines(correct, sizes, keep=keep)["right"]


def score_parses(
    gold: list[TreebankSentence], by: Punctuation, parsed: Sequence[ParsedSentence], beam: dict[str, Any], config: Any
) -> tuple[dict[str, Any], str]:
    """The scores of `search_trees` of parsed sentences, by how punctuation is recognized; and the line."""
    with_labels = config.gives_labels
    best = [sentence.hypotheses[0] if sentence.hypotheses else None for sentence in parsed]
    trees = [(tree.labels or ["X"] * len(tree.spans), tree.spans) if tree else ((), ()) for tree in best]
    spans = [found for _, found in trees]
    lengths, (induction, right) = [len(sentence.words) for sentence in gold], induction_scores(spans, gold, by)
    labeled = labeled_f1(trees, gold)
    fractions = {
        f"labeled_{name}": getattr(labeled.overall, name) for name in ("f1", "precision", "recall") if with_labels
    }
    fractions |= {
        "unlabeled_f1": labeled_f1(trees, gold, EvalbParameters(labeled=False)).overall.f1,
        "induction_sentence_f1": induction.sentence_f1,
        "right_branching_sentence_f1": right.sentence_f1,
    }
    numbers = {
        **{name: round(100 * value, 2) for name, value in fractions.items()},
        "punctuation_by": by,
        "word_perplexity": perplexity_of(-sum(math.fsum(one.word_log_probs or ()) for one in parsed) / sum(lengths)),
        "num_sentences": len(parsed),
        "num_failures": best.count(None),
        "beam": beam,
    }
    widths, text = "".join(f", {name} {value}" for name, value in beam.items()), ""
    if with_labels:
        precision, recall = numbers["labeled_precision"], numbers["labeled_recall"]
        text = f"labeled F1 {numbers['labeled_f1']:.2f} (precision {precision:.2f}, recall {recall:.2f}), "
    return numbers, (
        f"search over {len(parsed)} sentences, {numbers['num_failures']} without a tree{widths}: {text}unlabeled "
        f"F1 {numbers['unlabeled_f1']:.2f} (EVALB, COLLINS.prm); sentence F1 {numbers['induction_sentence_f1']:.2f}, "
        f"right branching {numbers['right_branching_sentence_f1']:.2f} (convention {induction.convention}; "
        f"punctuation, recognized by {by}, not counted); word perplexity {numbers['word_perplexity']:.2f}"
    )


def parse_together(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    treebank: Treebank,
    batch_size: int = 32,
    **options: Any,
) -> list[list[Span]]:
    """The best tree of each sentence of a treebank (`parse_words`); the processes share the work and all must call."""
    plain = accelerator.unwrap_model(model)

    def parse(rows: list[int]) -> list[list[Span]]:
        return parse_words(plain, tokenizer, [treebank.words[row] for row in rows], batch_size=batch_size, **options)

    return map_rows(accelerator, treebank.lengths, batch_size, parse, "parsing")
