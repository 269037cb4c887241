# SPDX-License-Identifier: Apache-2.0
"""Labeled F1 of constituency trees as the program EVALB computes it.

Labeled bracketing precision, recall and F1 of constituency trees as the program EVALB (Sekine and Collins) computes
them, with its parameter files (.prm); by default COLLINS.prm, by which parsing on the Penn Treebank is reported.
"""

import dataclasses
from typing import Any

import evaluate

from hf_synlm.evaluation.metrics import ListInputs
from hf_synlm.evaluation.trees.evalb import COLLINS, EvalbParameters, EvalbTree, labeled_f1

_CITATION = """
@misc{sekine-collins-1997-evalb,
  title = "EVALB: bracket scoring program",
  author = "Sekine, Satoshi and Collins, Michael",
  year = "1997"
}
"""


class LabeledParsingF1(ListInputs, evaluate.Metric):
    """Labeled parsing F1; see `hf_synlm.evaluation.trees.evalb`."""

    def _info(self) -> evaluate.MetricInfo:
        return self._text_info(
            __doc__, _CITATION, "predictions", "references", reference_urls=["https://nlp.cs.nyu.edu/evalb/"]
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        parameters: str | None = None,
        labeled: bool | None = None,
        cutoff_length: int | None = None,
    ) -> dict[str, Any]:
        """Score the inputs that were added.

        Args:
            predictions: one tree per sentence in the format of the Penn Treebank, with a tag for each word, which
                should be the gold one, because words are left out by their tags; "" where the parser has none (EVALB
                leaves the sentence out of all scores).
            references: one gold tree per sentence.
            parameters: path of a parameter file (.prm) of EVALB; default: COLLINS.prm.
            labeled: False compares brackets without their labels; default: as the parameters say.
            cutoff_length: of the sentences in the scores that end in "_short"; default: as the parameters say (40).

        Returns:
            f1, precision, recall: over all sentences, 0..1.
            complete_match, no_crossing, two_or_less_crossing, tagging_accuracy: shares, 0..1.
            average_crossing: crossing brackets per sentence.
            num_sentences, num_valid, num_errors, num_skipped: sentences in all, scored, with other words, without a
                tree.
            The same with "_short" for the sentences of at most `cutoff_length` words.

        Examples:
            >>> metric = evaluate.load("labeled_parsing_f1")
            >>> gold = ["(S (NP (DT the) (NN cat)) (VP (VBZ sleeps)) (. .))"]
            >>> metric.compute(predictions=["(S (NP (DT the) (NN cat)) (X (VBZ sleeps)) (. .))"], references=gold)["f1"]
            0.6666666666666666
        """
        base = COLLINS if parameters is None else EvalbParameters.read(parameters)
        changes: dict[str, Any] = {"labeled": labeled, "cutoff_length": cutoff_length}
        base = dataclasses.replace(base, **{name: value for name, value in changes.items() if value is not None})
        test, gold = (
            [EvalbTree.from_line(line, f"{name} {number}") for number, line in enumerate(lines)]
            for name, lines in (("prediction", predictions), ("reference", references))
        )
        scores = labeled_f1(test, gold, base)
        overall, short = dataclasses.asdict(scores.overall), dataclasses.asdict(scores.short)
        del overall["name"], short["name"]
        return {**overall, **{f"{name}_short": value for name, value in short.items()}}
