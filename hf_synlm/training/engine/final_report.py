"""What a user gets: load the saved folder where hf_synlm is not installed, parse held-out sentences, generate.

The model runs in a clean process (`hf_synlm.hub.probe`), in which `import hf_synlm` fails; trees come back as spans and
are scored here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import encode_words
from hf_synlm.evaluation.trees.parsing import ParsingScores
from hf_synlm.evaluation.trees.treebank_parsing import (
    Treebank,
    load_treebank,
    parse_words,
    score_baselines,
    score_numbers,
    score_table,
    score_trees,
)
from hf_synlm.hub.probe import run_without_package
from hf_synlm.training.engine.steps import map_rows
from hf_synlm.trees.spans import Span, fold_tokens
from hf_synlm.viz import tree_to_text


def load_report_treebanks(
    path: str | None, treatments: Sequence[str], max_sentences: int | None = None, split_leaves: bool = False
) -> dict[str, Treebank]:
    """Read the trees of the report, for each treatment of punctuation (`make_treebank`); no path, no report."""
    treebanks = {}
    for name in treatments if path is not None else ():
        try:
            treebanks[name] = load_treebank(str(path), name, max_sentences, split_leaves)
        except ValueError as error:
            raise ValueError(f"trees of the final report (report_punctuation {name!r}): {error}") from error
    return treebanks


def parse_together(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    treebank: Treebank,
    batch_size: int = 32,
    **options: Any,
) -> list[list[Span]]:
    """Best tree of each sentence of a treebank (see `parse_words`), on every process; every process calls."""
    plain = accelerator.unwrap_model(model)

    def parse(rows: list[int]) -> list[list[Span]]:
        return parse_words(plain, tokenizer, [treebank.words[row] for row in rows], batch_size=batch_size, **options)

    return map_rows(accelerator, treebank.lengths, batch_size, parse, "parsing")


def report_saved_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    treebanks: dict[str, Treebank],
    methods: dict[str, dict[str, Any]],
    seed: int,
    convention: str = "gpst",
) -> dict[str, Any]:
    """Load a saved model in a clean process, print its scores and a generated sentence with its tree.

    `treebanks` are held-out trees by treatment of punctuation, `methods` options of `model.parse` by kind of tree,
    `convention` a name in `hf_synlm.evaluation.trees.parsing`. Returns JSON: `trees`, by treatment of punctuation the
    convention and the scores by kind of tree, the model's first; and `generated`, the text of the sentence.
    """
    words = {name: treebank.words for name, treebank in treebanks.items()}
    ends = {name: [encode_words(tokenizer, sentence)[1] for sentence in words[name]] for name in words}
    first = next(iter(words.values()))
    request = {
        "texts": {name: [" ".join(sentence) for sentence in words[name]] for name in words},
        "word_ends": ends,
        "methods": methods,
        "prompt": first[0][0],
        "seed": seed,
    }
    answer = run_without_package("report", folder, request)
    print(f"loaded {folder} without hf_synlm ({answer['class']}); its trees of {len(first)} sentences for the test:")
    report: dict[str, Any] = {}
    for name, treebank in treebanks.items():
        scores: dict[str, ParsingScores] = {}
        for kind, trees in answer["trees"][name].items():
            # Labeled trees have unary chains, too; spans of two or more tokens count, each once.
            spans = [list(dict.fromkeys((i, j) for i, j in tree if j - i > 1)) for tree in trees]
            folded = [fold_tokens(tree, sentence) for tree, sentence in zip(spans, ends[name], strict=True)]
            scores[kind] = score_trees(folded, treebank, convention)
        scores |= score_baselines(treebank, convention)
        print(score_table(scores, treebank))
        used = next(iter(scores.values())).convention
        report[name] = {"convention": used, "sentence_and_corpus_f1": score_numbers(scores)}
    generated = answer["generated"]
    print(f"generated: {generated['text']}")
    print(tree_to_text(generated["tokens"], generated["spans"], generated["labels"]))
    return {"trees": report, "generated": generated["text"]}
