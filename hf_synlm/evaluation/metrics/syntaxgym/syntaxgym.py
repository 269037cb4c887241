# SPDX-License-Identifier: Apache-2.0
"""Accuracy of causal language models, syntactic ones included, on SyntaxGym's test suites.

SyntaxGym: share of the items of a test suite for which a language model's surprisals fulfil the suite's prediction; and
the means over suites and circuits that papers report. Formulas are evaluated in full, without Docker.
"""

from typing import Any

import evaluate

from hf_synlm.evaluation.metrics import ListInputs
from hf_synlm.evaluation.suites.syntaxgym import evaluate_syntaxgym
from hf_synlm.evaluation.text.scoring import TextScorer

_CITATION = """
@inproceedings{hu-etal-2020-systematic,
  title = "A Systematic Assessment of Syntactic Generalization in Neural Language Models",
  author = "Hu, Jennifer and Gauthier, Jon and Qian, Peng and Wilcox, Ethan and Levy, Roger",
  booktitle = "Proceedings of ACL",
  year = "2020"
}
"""


class SyntaxGym(ListInputs, evaluate.Metric):
    """Accuracy on suites; see `hf_synlm.evaluation.suites.syntaxgym`."""

    def _info(self) -> evaluate.MetricInfo:
        return self._text_info(__doc__, _CITATION, "suites", reference_urls=["https://syntaxgym.org"])

    def _compute(self, suites: list[str], model_id: str, **options: Any) -> dict[str, Any]:
        """Score the inputs that were added.

        Args:
            suites: paths of suites in the JSON format of SyntaxGym, such as those in cpllab/syntactic-generalization.
            model_id: folder of a model, or its name on the Hub.
            **options: of `hf_synlm.evaluation.text.scoring.TextScorer.from_pretrained`, such as estimator="stepwise",
                num_beams=300, batch_size=16, device="cuda", trust_remote_code=True.

        Returns:
            accuracy: mean over the given suites, 0..1.
            suites: accuracy of each suite by its name.
            circuits: mean of each circuit of Hu et al. 2020 whose suites are all given.
            mean_31_suites, mean_6_circuits: the numbers of papers; None unless their 31 suites are all given.
            predictions: one entry per prediction of a suite: suite, circuit, items, prediction, accuracy,
                items_with_unknown_words, formula.
            options: everything in the model and its beam that changes numbers.

        Examples:
            >>> metric = evaluate.load("syntaxgym")
            >>> metric.compute(suites=["suites/number_orc.json"], model_id="gpt2")["suites"]    # doctest: +SKIP
            {'number_orc': 0.7894736842105263}
        """
        result = evaluate_syntaxgym(TextScorer.from_pretrained(model_id, **options), suites)
        scores = result.scores

        def named(kind: str) -> dict[str, float]:
            return {
                name.removeprefix(f"{kind} "): value for name, value in scores.items() if name.startswith(f"{kind} ")
            }

        return {
            "accuracy": scores["mean_over_suites"],
            "suites": named("suite"),
            "circuits": named("circuit"),
            "mean_31_suites": scores.get("mean_31_suites"),
            "mean_6_circuits": scores.get("mean_6_circuits"),
            "predictions": result.tables["Predictions"],
            "options": result.options,
        }
