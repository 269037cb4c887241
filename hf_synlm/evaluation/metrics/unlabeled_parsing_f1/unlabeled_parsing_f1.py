# SPDX-License-Identifier: Apache-2.0
"""Unlabeled F1 of constituency trees, with the conventions of the literature by name.

Unlabeled F1 of predicted constituency trees against gold trees, as used in grammar induction. Published numbers differ
by more than ten points through convention alone (mean over sentences or pooled counts, with or without the span of the
whole sentence, one-word sentences, punctuation), so the convention is an argument with named presets, and the four
common numbers are always returned.
"""

from typing import Any

import evaluate

from hf_synlm.data.parsed import TreeStyle, read_parse
from hf_synlm.data.punctuation import Punctuation
from hf_synlm.data.text import errors_at
from hf_synlm.data.treebank import TreebankSentence, parse_treebank
from hf_synlm.evaluation.metrics import ListInputs
from hf_synlm.evaluation.trees.gold_treebank import best_trees, make_treebank, match_treebank, score_trees

_CITATION = """
@inproceedings{kim-etal-2019-compound,
  title = "Compound Probabilistic Context-Free Grammars for Grammar Induction",
  author = "Kim, Yoon and Dyer, Chris and Rush, Alexander",
  booktitle = "Proceedings of ACL",
  year = "2019"
}
"""


class UnlabeledParsingF1(ListInputs, evaluate.Metric):
    """Unlabeled parsing F1; see `hf_synlm.evaluation.trees.parsing`."""

    def _info(self) -> evaluate.MetricInfo:
        return self._text_info(__doc__, _CITATION, "predictions", "references")

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        convention: str = "gpst",
        punctuation: str = "remove",
        punctuation_by: Punctuation = "tag",
        prediction_style: TreeStyle = "unlabeled",
        reference_style: str = "treebank",
        **changes: Any,
    ) -> dict[str, Any]:
        """Score the inputs that were added.

        Args:
            predictions: one bracketed tree per sentence, such as "((the cat) sleeps)"; "" where the parser has none.
            references: one gold tree per sentence.
            convention: "gpst" (default), "prpn", "on-lstm", "compound-pcfg", "compound-pcfg-corpus" or "palm".
            punctuation: "remove" (default): predictions are over the gold words without punctuation; "ignore": they are
                over all words, but punctuation does not count; "keep": it counts as words.
            punctuation_by: how to recognize punctuation: by "tag" (default) or "form".
            prediction_style: "unlabeled" (default), "labeled" as in "(S (NP the cat) (VP sleeps))", or "treebank".
            reference_style: "treebank" (default), trees with labels and tags as in the Penn Treebank; or "unlabeled",
                whose punctuation is recognized by form.
            **changes: single fields of the convention, such as max_length=40 or min_length=2.

        Returns:
            f1: the number that publications with this convention report, 0..1.
            sentence_f1, corpus_f1, precision, recall: by the convention.
            sentence_drop, corpus_drop, sentence_count, corpus_count: F1 with the whole-sentence span dropped and
                counted.
            num_sentences: sentences scored.
            convention: one line that says what was counted.

        Examples:
            >>> metric = evaluate.load("unlabeled_parsing_f1")
            >>> gold = ["(S (NP (DT the) (NN cat)) (VP (VBZ sleeps) (ADVP (RB well))) (. .))"]
            >>> round(metric.compute(predictions=["((the cat) (sleeps well))"], references=gold)["f1"], 4)
            1.0
        """
        if reference_style == "unlabeled":
            punctuation_by = "form"
        gold = [_gold_sentence(line, number, reference_style) for number, line in enumerate(references)]
        treebank = make_treebank(gold, punctuation, punctuation_by=punctuation_by)
        if len(treebank.sentences) != len(gold):
            raise ValueError(
                f"{len(gold) - len(treebank.sentences)} references have only punctuation. Leave them out on both sides"
            )
        parsed = []
        for number, line in enumerate(predictions):
            with errors_at(f"prediction {number}"):
                parsed.append(read_parse(line, prediction_style))
        match_treebank({"predictions": parsed}, treebank)
        scores = score_trees(best_trees(parsed), treebank, convention, **changes)
        return {
            **{name: getattr(scores, name) for name in ("f1", "sentence_f1", "corpus_f1", "precision", "recall")},
            **scores.variants,
            "num_sentences": scores.num_sentences,
            "convention": f"{treebank.convention}; {scores.convention}",
        }


def _gold_sentence(line: str, number: int, style: str) -> TreebankSentence:
    source = f"reference {number}"
    if style == "treebank":
        sentences = list(parse_treebank([line], source=source))
        if len(sentences) != 1:
            raise ValueError(f"{source} holds {len(sentences)} trees. Give one tree per sentence")
        return sentences[0]
    if style != "unlabeled":
        raise ValueError(f"reference_style is {style!r}. Choose 'treebank' or 'unlabeled'")
    with errors_at(source):
        parsed = read_parse(line)
        spans = parsed.tree().spans
    return TreebankSentence(parsed.words, ("",) * len(parsed.words), tuple(("", i, j) for i, j in spans), source)
