# SPDX-License-Identifier: Apache-2.0
"""How the cost of PCFGs grows: a step of training, and the logits of next words, by length, symbols and ranks."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.sides import place, seconds
from benchmarks.train import FIRST_WORD

import hf_synlm

SENTENCES, VOCABULARY, LENGTH = 8, 10_000, 20
LENGTHS, SYMBOLS, RANKS = (5, 10, 20, 40, 80), (15, 30, 60), (25, 50, 100, 200, 400)
GRAMMARS: dict[str, dict[str, Any]] = {
    "dense 30/60": {},
    "tensor 60/120, rank 100": {"grammar": "tensor", "num_nonterminals": 60, "num_preterminals": 120, "rank": 100},
    "simple 128/256": {"grammar": "simple", "num_nonterminals": 128, "num_preterminals": 256},
}


def pcfg_growth(runs: int) -> Iterator[dict[str, Any]]:
    """Forward and backward of the loss, the loss alone, and `logits`; medians, where a step of dense 30/60 is 1."""
    rows = [(f"{name}, {n} words", fields, n) for name, fields in GRAMMARS.items() for n in LENGTHS]
    rows += [
        (f"dense {y}/{2 * y}, {LENGTH} words", {"num_nonterminals": y, "num_preterminals": 2 * y}, LENGTH)
        for y in SYMBOLS
    ]
    tensor = GRAMMARS["tensor 60/120, rank 100"]
    rows += [(f"tensor 60/120, rank {r}, {LENGTH} words", {**tensor, "rank": r}, LENGTH) for r in RANKS]
    base = _calls({}, LENGTH)["step"]
    for name, fields, length in rows:
        ratios: dict[str, float] = {}
        for key, call in _calls(fields, length).items():
            call()
            ratios[key] = round(statistics.median(seconds(call) / seconds(base) for _ in range(runs)), 2)
        yield {"grammar": name, **ratios}


def _calls(fields: dict[str, Any], length: int) -> dict[str, Callable[[], Any]]:
    """What is measured of a grammar, on sentences of one length."""
    torch.manual_seed(0)
    model = place(hf_synlm.PCFGForCausalLM(hf_synlm.PCFGConfig(vocab_size=VOCABULARY, **fields)))
    ids = place(torch.randint(FIRST_WORD, VOCABULARY, (SENTENCES, length)))
    return {
        "step": lambda: model.train()(ids, labels=ids).loss.backward(),
        "loss": torch.no_grad()(lambda: model.train()(ids, labels=ids)),
        "logits": torch.no_grad()(lambda: model.eval()(ids)),
    }
