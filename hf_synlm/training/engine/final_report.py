# SPDX-License-Identifier: Apache-2.0
"""What a user gets: the saved folder with and without hf_synlm, its trees of held-out sentences, and a sentence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed

from hf_synlm.data.text import errors_at
from hf_synlm.evaluation.generation import generate_texts
from hf_synlm.evaluation.trees.gold_treebank import (
    Treebank,
    load_treebank,
    score_baselines,
    score_numbers,
    score_table,
    score_trees,
)
from hf_synlm.evaluation.trees.treebank_parsing import parse_words
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.hub.verify import verify_export
from hf_synlm.training.engine.sample_texts import text_with_tree
from hf_synlm.training.engine.steps import map_rows
from hf_synlm.trees.spans import Span


def load_report_treebanks(
    path: str | None, treatments: Sequence[str], max_sentences: int | None = None, **reading: Any
) -> dict[str, Treebank]:
    """The trees of the report by treatment of punctuation (`make_treebank`); empty without a path."""
    treebanks = {}
    for name in treatments if path is not None else ():
        with errors_at(f"trees of the final report (report_punctuation {name!r})"):
            treebanks[name] = load_treebank(str(path), name, max_sentences, **reading)
    return treebanks


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


def report_saved_model(
    folder: Path,
    treebanks: dict[str, Treebank],
    methods: dict[str, dict[str, Any]],
    seed: int,
    convention: str = "gpst",
    backbone: str | None = None,
) -> dict[str, Any]:
    """Print whether a saved model needs this package, the scores of its trees by method of `parse`, and a sentence.

    Returns for JSON: `verified`; `trees`, by name of the treebank the convention and the scores, the model's first;
    `generated`, the text of the sentence. `backbone` is that of an adapter.
    """
    first = next(iter(treebanks.values())).words
    verified = verify_export(folder, texts=[" ".join(words) for words in first[:2]], backbone=backbone)
    print(f"{verified.table()}\nIts trees of {len(first)} sentences for the test:")
    model, tokenizer = load_pretrained(str(folder), backbone=backbone)
    report: dict[str, Any] = {}
    for name, treebank in treebanks.items():
        trees = {kind: parse_words(model, tokenizer, treebank.words, **options) for kind, options in methods.items()}
        scores = {kind: score_trees(found, treebank, convention) for kind, found in trees.items()}
        used = next(iter(scores.values())).convention
        scores |= score_baselines(treebank, convention)
        print(score_table(scores, treebank))
        report[name] = {"convention": used, "sentence_and_corpus_f1": score_numbers(scores)}
    set_seed(seed)
    (generated,) = generate_texts(model, tokenizer, [first[0][0]], max_new_tokens=14, do_sample=True, top_k=20)
    print(f"generated: {text_with_tree(generated)}")
    return {"verified": verified.passed, "trees": report, "generated": generated.text}
