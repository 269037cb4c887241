"""Speed of evaluation, in sentences per second, by batch and beam; `benchmark.py --evaluation MODEL` prints it.

The sentences are those of the embedded test treebank, in their natural lengths. Scoring is what surprisal, perplexity,
SyntaxGym, BLiMP and minimal pairs do; parsing is what F1 needs. Only texts of about equal length share a call, so small
sets make small batches: there are enough sentences here to fill them; wide beams take few texts at once in any case.
Speeds hold for the machine they were measured on.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from benchmarks.sides import Step, seconds
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.words import encode_sentences
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.hub.checkpoint import load_pretrained

NUM_SENTENCES = 128
NUM_SENTENCES_OF_WIDE_BEAMS = 32
BATCH_SIZES = (1, 8, 32)
BEAMS = (1, 20)
WIDE_BEAMS = (100, 300)


def evaluation_speed(name: str, runs: int) -> str:
    """Sentences per second of scoring and of parsing.

    Args:
        name: folder of a causal language model, or its name on the Hub; it need not have trees.
        runs: timings of every cell, of which the median counts; all cells are timed in turn.

    Returns:
        A table in Markdown: a row per evaluation and beam, with the number of sentences and their mean length, and a
        column per batch size. The first line names what was measured.
    """
    model, tokenizer = load_pretrained(name)
    model.eval()
    trees = list(read_treebank(sample_path("trees.test.txt")))[:NUM_SENTENCES]
    sentences = [[word.lower() for word in sentence.words] for sentence in trees]
    rows = {name: (number, step) for name, number, step in _rows(model, tokenizer, sentences)}
    times: dict[tuple[str, int], list[float]] = {(row, size): [] for row in rows for size in BATCH_SIZES}
    for _ in range(runs):
        for row, size in times:
            times[row, size].append(seconds(rows[row][1](size)))
    lines = [
        f"{name}: {type(model).__name__}, {model.num_parameters():,} parameters; {torch.get_num_threads()} thread(s), "
        f"{model.device.type}, median of {runs}",
        "",
        "| sentences per second | read | words | " + " | ".join(f"batch {size}" for size in BATCH_SIZES) + " |",
        "|---" * (len(BATCH_SIZES) + 3) + "|",
    ]
    for row, (number, _) in rows.items():
        mean_length = sum(map(len, sentences[:number])) / number
        speeds = (number / statistics.median(times[row, size]) for size in BATCH_SIZES)
        cells = [row, str(number), f"{mean_length:.1f}", *(f"{speed:.1f}" for speed in speeds)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[list[str]]
) -> Iterator[tuple[str, int, Callable[[int], Step]]]:
    """Name of a row, how many sentences it reads, and what makes its step for a batch size."""
    texts, number = encode_sentences(tokenizer, sentences), len(sentences)

    def score(number: int, num_beams: int | None, estimator: str | None, batch_size: int) -> Step:
        scorer = TextScorer(model, tokenizer, num_beams=num_beams, estimator=estimator, batch_size=batch_size)
        return lambda: scorer.score(texts[:number])

    def parse(options: dict, batch_size: int) -> Step:
        return lambda: parse_sentences(model, tokenizer, sentences, batch_size=batch_size, **options)

    if not hasattr(model, "word_search"):
        yield "scoring", number, partial(score, number, None, None)
        if hasattr(model, "parse"):
            yield "parsing", number, partial(parse, {})
        return
    for beam in (*BEAMS, *WIDE_BEAMS):
        read = min(number, NUM_SENTENCES_OF_WIDE_BEAMS) if beam in WIDE_BEAMS else number
        yield f"scoring, beam marginal, beam {beam}", read, partial(score, read, beam, "beam_marginal")
    yield "scoring, stepwise, beam 20", number, partial(score, number, 20, "stepwise")
    yield "parsing, left to right, beam 20", number, partial(parse, {"num_beams": 20})
    if model.config.model_type == "gpst":
        yield "parsing, inside", number, partial(parse, {"method": "inside"})
