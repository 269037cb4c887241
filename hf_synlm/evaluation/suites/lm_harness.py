# SPDX-License-Identifier: Apache-2.0
"""The model `hf-synlm` of lm-eval: models with a search are scored by sentence and by the beam's own probabilities.

    python -m hf_synlm.evaluation.suites.lm_harness run --model hf-synlm \
        --model_args pretrained=runs/gpst_tiny/model,num_beams=100 --tasks blimp --batch_size 16

is lm-eval's command with this model registered. lm-eval's own `--model hf` reads `forward(...).logits` of a GPST or
RNNG (the estimator "stepwise", at the model's `scoring_num_beams`); here the default is "beam_marginal", which is what
papers report, needs no distribution over the vocabulary, and scores equal sentences once. Other models are scored as
by `hf`.

Needs lm-eval (`pip install '.[eval]'`).
"""

import logging
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from hf_synlm.data.files import find_model
from hf_synlm.evaluation.text.scoring import Estimator, TextScorer
from hf_synlm.evaluation.text.words import EncodedText
from hf_synlm.hub.checkpoint import check_model_source
from hf_synlm.search.parsing import marginal_logits

_logger = logging.getLogger(__name__)
_DEFAULT_BATCH_SIZE = 16

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""Texts of context and continuation, and their tokens."""


@register_model("hf-synlm")
class SyntacticLM(HFLM):
    """A syntactic language model in lm-eval; `options` are those of lm-eval's `hf`, the others those of `TextScorer`.

    With `greedy`, one more search tells whether continuations are the most probable ones. Otherwise they are reported
    as not greedy, which only tasks with exact matches (such as lambada) use.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        estimator: Estimator | None = None,
        num_beams: int | None = None,
        greedy: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(pretrained, str):
            names = ("revision", "subfolder")
            pretrained = find_model(pretrained)
            check_model_source(pretrained, **{name: options[name] for name in names if options.get(name)})
        search = {name: options.pop(name, None) for name in ("action_beam_size", "fast_track_size", "normalization")}
        super().__init__(pretrained=pretrained, **{"backend": "causal", **options})
        self.greedy = greedy
        size = self.batch_size if isinstance(self.batch_size, int) else _DEFAULT_BATCH_SIZE
        self.scorer = TextScorer(
            self.model,
            self.tokenizer,
            estimator=estimator,
            num_beams=num_beams,
            search_options=search,
            batch_size=size,
            name=pretrained if isinstance(pretrained, str) else None,
        )
        if self.scorer.searches and not greedy:
            _logger.info("is_greedy is reported as False; pass greedy=True for tasks that count exact matches")

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is the greedy one."""
        if not self.scorer.searches:
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        limit = self.scorer.max_tokens
        texts = []
        for _, context, continuation in requests:
            ids = [*context, *continuation]
            # The begin token is the beginning, not a word. As in lm-eval, what does not fit is cut off on the left.
            ids = ids[1:] if context and context[0] == self.prefix_token_id else ids
            ids = ids if limit is None else ids[-limit:]
            texts.append(EncodedText(ids, [0] * len(ids), 1, leaf_of_token=list(range(len(ids)))))
        scores = self.scorer.score(texts, progress=None if disable_tqdm else "hf-synlm")
        results = []
        for (strings, _, continuation), text, found in zip(requests, texts, scores, strict=True):
            count = min(len(continuation), len(text.ids))
            total = float(found.log_probs[len(text.ids) - count :].sum())
            results.append((total, self.greedy and self._is_greedy(text.ids, count)))
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, results[-1])
        return results

    @torch.no_grad()
    def _is_greedy(self, ids: list[int], count: int) -> bool:
        """Whether each of the last `count` tokens is the most probable one after those before it."""
        begin = [] if self.scorer.begin_id is None else [self.scorer.begin_id]
        row = torch.tensor([[*begin, *ids]], device=self.model.device)
        search = self.model.word_search(self.scorer.num_beams, **self.scorer.search_options)
        logits, _ = marginal_logits(search, row, torch.ones_like(row), bos_token_id=self.model.config.bos_token_id)
        best = logits[0, :-1].argmax(-1)[-count:]
        return bool((best == row[0, 1:][-count:]).all())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
