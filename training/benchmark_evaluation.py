"""Speed of evaluation, in sentences per second, by batch and beam; `benchmark.py --evaluation MODEL` prints it.

The sentences are those of the embedded test treebank, in their natural lengths. Scoring is what surprisal, perplexity,
SyntaxGym, BLiMP and minimal pairs do; parsing is what F1 needs. Speeds hold for the machine they were measured on.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from benchmark_clock import Step, seconds
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.scoring import TextScorer
from hf_synlm.evaluation.treebank_parsing import parse_sentences
from hf_synlm.evaluation.words import encode_sentences
from hf_synlm.hub.checkpoint import load_pretrained

NUM_SENTENCES = 32
BATCH_SIZES = (1, 8, 32)
BEAMS = (1, 20, 100, 300)


def evaluation_speed(name: str, runs: int) -> str:
    """Sentences per second of scoring and of parsing.

    Args:
        name: folder of a causal language model, or its name on the Hub; it need not have trees.
        runs: timings of every cell, of which the median counts; all cells are timed in turn.

    Returns:
        A table in Markdown: a row per evaluation and beam, a column per batch size. The first line names what was
        measured.
    """
    model, tokenizer = load_pretrained(name)
    model.eval()
    trees = list(read_treebank(sample_path("trees.test.txt")))[:NUM_SENTENCES]
    sentences = [[word.lower() for word in sentence.words] for sentence in trees]
    rows = dict(_rows(model, tokenizer, sentences))
    times: dict[tuple[str, int], list[float]] = {(row, size): [] for row in rows for size in BATCH_SIZES}
    for _ in range(runs):
        for row, size in times:
            times[row, size].append(seconds(rows[row](size)))
    lines = [
        f"{name}: {type(model).__name__}, {model.num_parameters():,} parameters, {len(sentences)} sentences of "
        f"{sum(map(len, sentences)) / len(sentences):.1f} words; {torch.get_num_threads()} thread(s), "
        f"{model.device.type}, median of {runs}",
        "",
        "| sentences per second | " + " | ".join(f"batch {size}" for size in BATCH_SIZES) + " |",
        "|---" * (len(BATCH_SIZES) + 1) + "|",
    ]
    for row in rows:
        speeds = (len(sentences) / statistics.median(times[row, size]) for size in BATCH_SIZES)
        lines.append(f"| {row} | " + " | ".join(f"{speed:.1f}" for speed in speeds) + " |")
    return "\n".join(lines)


def _rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[list[str]]
) -> Iterator[tuple[str, Callable[[int], Step]]]:
    """Name of a row -> what makes its step for a batch size."""
    texts = encode_sentences(tokenizer, sentences)

    def score(num_beams: int | None, estimator: str | None, batch_size: int) -> Step:
        scorer = TextScorer(model, tokenizer, num_beams=num_beams, estimator=estimator, batch_size=batch_size)
        return lambda: scorer.score(texts)

    def parse(options: dict, batch_size: int) -> Step:
        return lambda: parse_sentences(model, tokenizer, sentences, batch_size=batch_size, **options)

    if not hasattr(model, "word_search"):
        yield "scoring", partial(score, None, None)
        if hasattr(model, "parse"):
            yield "parsing", partial(parse, {})
        return
    for beam in BEAMS:
        yield f"scoring, beam marginal, beam {beam}", partial(score, beam, "beam_marginal")
    yield "scoring, stepwise, beam 20", partial(score, 20, "stepwise")
    yield "parsing, left to right, beam 20", partial(parse, {"num_beams": 20})
    if model.config.model_type == "gpst":
        yield "parsing, inside", partial(parse, {"method": "inside"})
