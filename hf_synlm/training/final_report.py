"""What a user gets: load the saved folder where hf_synlm is not installed, parse held-out sentences, generate.

The model runs in a clean process (`hf_synlm.hub.probe`), in which `import hf_synlm` fails; trees come back as spans and
are scored here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import encode_words
from hf_synlm.evaluation.parsing import ParsingScores
from hf_synlm.evaluation.treebank_parsing import (
    PUNCTUATION,
    Treebank,
    load_treebank,
    score_baselines,
    score_numbers,
    score_table,
    score_trees,
)
from hf_synlm.hub.probe import run_without_package
from hf_synlm.trees import Span, fold_tokens
from hf_synlm.viz import tree_to_text


@dataclass
class FinalReport:
    """Scores of a saved model on held-out trees, and a sentence of its own.

    Fields:
        scores: by treatment of punctuation, by kind of tree; the model's trees first.
        conventions: by treatment of punctuation, what is counted.
        generated: text of the generated sentence.
    """

    scores: dict[str, dict[str, ParsingScores]]
    conventions: dict[str, str]
    generated: str

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        trees = {
            name: {"convention": self.conventions[name], "sentence_and_corpus_f1": score_numbers(scores)}
            for name, scores in self.scores.items()
        }
        return {"trees": trees, "generated": self.generated}

    def summary(self) -> str:
        """The comparison with right branching in one line."""
        parts = []
        for name, scores in self.scores.items():
            kinds = [kind for kind in scores if kind not in ("left", "balanced", "random", "binarized gold")]
            numbers = ", ".join(f"{kind} {100 * scores[kind].sentence_f1:.2f}" for kind in kinds)
            parts.append(f"{PUNCTUATION[name]}: {numbers}")
        return "test sentence F1: " + "; ".join(parts)


def load_report_treebanks(
    path: str, treatments: Sequence[str], max_sentences: int | None = None, split_leaves: bool = False
) -> dict[str, Treebank]:
    """Read the trees of the report.

    Args:
        path: a treebank.
        treatments: of punctuation (`make_treebank`).
        max_sentences: read only so many of the first sentences.
        split_leaves: as in `read_treebank`.

    Returns:
        The trees by treatment of punctuation.

    Raises:
        ValueError: as `load_treebank`.
    """
    treebanks = {}
    for name in treatments:
        try:
            treebanks[name] = load_treebank(path, name, max_sentences, split_leaves)
        except ValueError as error:
            raise ValueError(f"trees of the final report (report_punctuation {name!r}): {error}") from error
    return treebanks


def report_saved_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    treebanks: dict[str, Treebank],
    methods: dict[str, dict[str, Any]],
    seed: int,
    convention: str = "gpst",
) -> FinalReport:
    """Load a saved model in a clean process, print its scores and a generated sentence with its tree.

    Args:
        folder: the exported model.
        tokenizer: its tokenizer.
        treebanks: by treatment of punctuation, held-out trees.
        methods: by kind of tree, options of `model.parse`.
        seed: of the generated sentence.
        convention: how spans are counted, by its name in `hf_synlm.evaluation.parsing`.

    Returns:
        The report.

    Raises:
        RuntimeError: the clean process fails; the message shows the end of what it wrote.
    """
    word_ends = {
        name: [encode_words(tokenizer, words)[1] for words in treebank.words] for name, treebank in treebanks.items()
    }
    request = {
        "texts": {name: [" ".join(words) for words in treebank.words] for name, treebank in treebanks.items()},
        "word_ends": word_ends,
        "methods": methods,
        "prompt": next(iter(treebanks.values())).words[0][0],
        "seed": seed,
    }
    answer = run_without_package("report", folder, request)
    count = len(next(iter(treebanks.values())).words)
    print(
        f"loaded {folder} without hf_synlm ({answer['class']}); its trees of the first {count} sentences for the test:"
    )
    scores: dict[str, dict[str, ParsingScores]] = {}
    for name, treebank in treebanks.items():
        scores[name] = {}
        for kind, trees in answer["trees"][name].items():
            pairs = zip(trees, word_ends[name], strict=True)
            folded = [fold_tokens(distinct_spans(tree), ends) for tree, ends in pairs]
            scores[name][kind] = score_trees(folded, treebank, convention)
        scores[name].update(score_baselines(treebank, convention))
        print(score_table(scores[name], treebank))
    generated = answer["generated"]
    print(f"generated: {generated['text']}")
    print(tree_to_text(generated["tokens"], generated["spans"], generated["labels"]))
    conventions = {name: next(iter(table.values())).convention for name, table in scores.items()}
    return FinalReport(scores, conventions, generated["text"])


def distinct_spans(spans: Sequence[Sequence[int]]) -> list[Span]:
    """Spans of two or more tokens, each once: labeled trees have unary chains, too."""
    return list(dict.fromkeys((i, j) for i, j in spans if j - i > 1))
