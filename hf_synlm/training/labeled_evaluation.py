"""What a grammar is measured by: probabilities of gold trees, and beam search over held-out sentences.

Probabilities of given trees come from teacher forcing. They are no language model of the words alone: the search sums
over trees, and its word perplexity is the one that compares with a model without trees.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_synlm.data.parsed import word_brackets
from hf_synlm.evaluation.evalb import EvalbParameters, EvalbScores, labeled_f1
from hf_synlm.evaluation.parsing import ParsingScores, Punctuation, branching_baselines, keep_words, unlabeled_f1
from hf_synlm.losses import share_of
from hf_synlm.training.steps import to_device
from hf_synlm.training.tree_batches import TreeCollator, TreeDataset, padded_batches
from hf_synlm.trees import Span


# ---------------------------------------------------------------------------------------------- given trees
def add_perplexities(totals: dict[str, float]) -> dict[str, float]:
    """Perplexities from sums (or from means over the same batches).

    exp(nats / count). A grammar predicts tokens given the actions before them, so it has no word perplexity here.

    Args:
        totals: `word_nats`, `tokens`, `words`, and for grammars `action_nats`, `actions`; others are passed on.

    Returns:
        The others, `token_perplexity`, and for grammars `action_perplexity` and `perplexity` (of both), for models of
        words alone `word_perplexity`.
    """
    values = dict(totals)
    word_nats, tokens, words = (values.pop(name) for name in ("word_nats", "tokens", "words"))
    values["token_perplexity"] = _exp(word_nats / tokens)
    if "actions" in values:
        action_nats, actions = values.pop("action_nats"), values.pop("actions")
        values["action_perplexity"] = _exp(action_nats / actions)
        values["perplexity"] = _exp((word_nats + action_nats) / (tokens + actions))
    else:
        values["word_perplexity"] = _exp(word_nats / words)
    return values


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


class Objective:
    """The loss of a micro batch, with the sums that perplexities need as its parts.

    Args:
        config: of the model; a grammar has `loss_normalization`, an LSTM takes the mean over tokens.
    """

    def __init__(self, config: Any):
        self.normalization = getattr(config, "loss_normalization", "token")

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and detached: its named parts in nats over the batch (`word_nats`, ...) with what they count."""
        batch = dict(batch)
        counts = {"words": batch.pop("num_words").float(), "tokens": batch["attention_mask"].sum().float()}
        output = model(**batch)
        if "actions" in batch:
            counts["actions"] = (batch["actions"] != 0).sum().float()
        divisors = {
            "batch": len(batch["input_ids"]),
            "sum": 1,
            "token": counts["tokens"],
            "action": counts.get("actions"),
        }
        divisor = divisors[self.normalization]
        shares = batch.get("loss_shares")
        nats = {f"{name}_nats": part * (divisor / share_of(shares, name)) for name, part in output.losses.items()}
        return output.loss, {**counts, **nats}


@torch.no_grad()
def evaluate_given_trees(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: TreeDataset,
    collate: TreeCollator,
    objective: Objective,
    max_batch_size: int,
    max_batch_actions: int,
) -> dict[str, float]:
    """Negative log-likelihood of held-out trees (for a model of words: of their words) and perplexities.

    Every process takes its share of the batches; the sums are the same however they are shared, up to rounding.

    Args:
        accelerator: of the run. Every process has to call.
        model: with or without the wrapper of the run.
        dataset: held-out trees.
        collate: makes the batches.
        objective: of the model.
        max_batch_size: sentences per process and batch.
        max_batch_actions: bound on the padded size.

    Returns:
        `nats` of all sentences, `nats_per_sentence`, and perplexities.
    """
    plain = accelerator.unwrap_model(model)
    was_training = plain.training
    plain.eval()
    batches = padded_batches(dataset.lengths("actions"), max_batch_size, max_batch_actions)
    names: list[str] = []
    total = torch.zeros(0)
    for rows in batches[accelerator.process_index :: accelerator.num_processes]:
        batch = to_device(collate(dataset.__getitems__(rows)), accelerator.device)
        parts = objective(plain, batch)[1]
        names = list(parts)
        values = torch.stack([part.double().cpu() for part in parts.values()])
        total = values if not len(total) else total + values
    shares = gather_object([dict(zip(names, total.tolist(), strict=True))])
    plain.train(was_training)
    sums = {name: sum(share.get(name, 0.0) for share in shares) for name in next(filter(None, shares))}
    nats = sum(value for name, value in sums.items() if name.endswith("_nats"))
    return {"nats": nats, "nats_per_sentence": nats / len(dataset), **add_perplexities(sums)}


# ---------------------------------------------------------------------------------------------- search
@dataclass
class SearchScores:
    """Beam search over held-out sentences.

    Fields:
        labeled: EVALB's scores (COLLINS.prm).
        unlabeled: the same brackets without their labels.
        induction: unlabeled F1 as for models that induce their trees (convention "gpst", punctuation not counted;
            see `TreeDataset.punctuation_by`).
        right_branching: the same for right-branching trees.
        punctuation_by: what told punctuation in these two, "tag" or "form".
        word_perplexity: exp(- sum of the words' log prefix-probability ratios / number of words).
        num_sentences: sentences parsed.
        num_failures: sentences for which the beam held no complete tree; their gold brackets count as missed.
        beam: widths of the search.
    """

    labeled: EvalbScores
    unlabeled: EvalbScores
    induction: ParsingScores
    right_branching: ParsingScores
    punctuation_by: Punctuation
    word_perplexity: float
    num_sentences: int
    num_failures: int
    beam: dict[str, Any]

    def numbers(self) -> dict[str, Any]:
        """For JSON; F1, precision and recall in percent."""
        return {
            "labeled_f1": round(100 * self.labeled.f1, 2),
            "labeled_precision": round(100 * self.labeled.precision, 2),
            "labeled_recall": round(100 * self.labeled.recall, 2),
            "unlabeled_f1": round(100 * self.unlabeled.f1, 2),
            "induction_sentence_f1": round(100 * self.induction.sentence_f1, 2),
            "right_branching_sentence_f1": round(100 * self.right_branching.sentence_f1, 2),
            "punctuation_by": self.punctuation_by,
            "word_perplexity": self.word_perplexity,
            "num_sentences": self.num_sentences,
            "num_failures": self.num_failures,
            "beam": self.beam,
        }

    def __str__(self) -> str:
        n = self.numbers()
        beam = ", ".join(f"{name} {value}" for name, value in self.beam.items())
        return (
            f"search over {n['num_sentences']} sentences, {n['num_failures']} without a tree ({beam}): "
            f"labeled F1 {n['labeled_f1']:.2f} (precision {n['labeled_precision']:.2f}, recall "
            f"{n['labeled_recall']:.2f}), unlabeled F1 {n['unlabeled_f1']:.2f} (EVALB, COLLINS.prm); sentence F1 "
            f"{n['induction_sentence_f1']:.2f}, right branching {n['right_branching_sentence_f1']:.2f} (convention "
            f"{self.induction.convention}; punctuation, told by {self.punctuation_by}, not counted); word "
            f"perplexity {n['word_perplexity']:.2f}"
        )


def spread(count: int, limit: int | None) -> list[int]:
    """At most `limit` (None: all) of `count` indices, spread evenly."""
    if limit is None or limit >= count:
        return list(range(count))
    return np.linspace(0, count - 1, num=limit, dtype=int).tolist()


@torch.no_grad()
def search_trees(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: TreeDataset,
    rows: Sequence[int],
    collate: TreeCollator,
    batch_size: int,
    beam: dict[str, Any],
) -> SearchScores:
    """Parse held-out sentences by beam search and score the best trees.

    Args:
        accelerator: of the run. Every process has to call; each takes its share of the sentences.
        model: with or without the wrapper of the run.
        dataset: held-out trees.
        rows: sentences to parse.
        collate: makes the batches.
        batch_size: sentences per process and batch.
        beam: for `model.parse`: `num_beams`, `action_beam_size`, `fast_track_size`.

    Returns:
        The scores, on every process.
    """
    plain = accelerator.unwrap_model(model)
    was_training = plain.training
    plain.eval()
    # Neighbours in length share a batch, and the processes share every length.
    lengths = dataset.lengths("input_ids")
    order = sorted(rows, key=lambda row: (int(lengths[row]), row))[
        accelerator.process_index :: accelerator.num_processes
    ]
    results: list[tuple[int, Any, float]] = []
    with tqdm(total=len(order), unit="sent", desc="search", disable=not accelerator.is_main_process) as bar:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            results += _parse_batch(plain, dataset, chosen, collate, accelerator.device, beam)
            bar.update(len(chosen))
    plain.train(was_training)
    return _score(dataset, sorted(gather_object(results)), beam)


def _parse_batch(
    model: nn.Module,
    dataset: TreeDataset,
    rows: Sequence[int],
    collate: TreeCollator,
    device: torch.device,
    beam: dict[str, Any],
) -> list[tuple[int, Any, float]]:
    """Per sentence its row, (labels, word spans) of the best tree or None, and the log-probability of its words."""
    items = dataset.__getitems__(list(rows))
    batch = collate(items)
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask", "word_ends")}
    output = model.parse(**inputs, **beam)
    log_probs = output.token_log_probs.double().sum(1).tolist()
    results = []
    for index, (row, item) in enumerate(zip(rows, items, strict=True)):
        tree = None
        if output.spans[index]:
            labels, spans = output.labels[index][0], output.spans[index][0]
            ends = [token + 1 for token, is_end in enumerate(item["word_ends"]) if is_end]
            tree = (list(labels), word_brackets(spans, labels, ends))
        results.append((row, tree, log_probs[index]))
    return results


def _score(dataset: TreeDataset, results: Sequence[tuple[int, Any, float]], beam: dict[str, Any]) -> SearchScores:
    gold = [dataset.sentence(row) for row, _, _ in results]
    trees: list[tuple[list[str], list[Span]]] = [([], []) if tree is None else tree for _, tree, _ in results]
    spans = [[tuple(span) for span in tree[1]] for tree in trees]
    lengths = [len(sentence.words) for sentence in gold]
    by = dataset.punctuation_by
    keep = [keep_words(sentence.words, sentence.tags, by) for sentence in gold]
    gold_spans = [sentence.spans for sentence in gold]
    baselines = branching_baselines(gold_spans, lengths, keep=keep)
    return SearchScores(
        labeled=labeled_f1(trees, gold),
        unlabeled=labeled_f1(trees, gold, EvalbParameters(labeled=False)),
        induction=unlabeled_f1(spans, gold_spans, lengths, keep=keep),
        right_branching=baselines["right"],
        punctuation_by=by,
        word_perplexity=_exp(-sum(log_prob for _, _, log_prob in results) / sum(lengths)),
        num_sentences=len(results),
        num_failures=sum(tree is None for _, tree, _ in results),
        beam=beam,
    )
