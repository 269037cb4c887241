# SPDX-License-Identifier: Apache-2.0
"""Searches: GPST against GPT-2's beams, RNNG against other settings of its search, and how costs grow.

Before the RNNG's search is timed, the model is trained for a few steps: the work depends on how sure the model is.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.sides import Sides, place, seconds
from benchmarks.train import FIRST_WORD, TREE_SIZES, gpt2, treebank
from torch import Tensor
from transformers import AutoTokenizer

import hf_synlm
from hf_synlm.core.outputs import ParseOutput
from hf_synlm.data.collate import collate_trees
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank

BEAM, PARSE_TOKENS = 20, 30
SEARCH_TOKENS, WARM_UP_STEPS = 17, 40
WORD_BEAM, FAST_TRACK = 10, 1
BEAMS, LENGTHS = (20, 50, 100, 300, 1000), (17, 60)
MODEL = Path(__file__).resolve().parents[2] / "model_cards" / "gpst-tiny"


def gpst_parse(overrides: dict, num_rows: int = 1) -> Sides:
    """Word-synchronous parsing of sentences against GPT-2's beam search for equally many tokens."""
    torch.manual_seed(0)
    config = hf_synlm.GPSTConfig(**overrides)
    model, baseline = place(hf_synlm.GPSTForCausalLM(config).eval()), place(gpt2(config).eval())
    ids = place(torch.randint(FIRST_WORD, config.vocab_size, (num_rows, PARSE_TOKENS)))
    prompt = torch.ones_like(ids[:, :1])

    def ours() -> ParseOutput:
        return model.parse(ids, num_beams=BEAM)

    def theirs() -> torch.Tensor:
        return baseline.generate(
            prompt, num_beams=BEAM, max_new_tokens=PARSE_TOKENS, min_new_tokens=PARSE_TOKENS, do_sample=False
        )

    def check() -> None:
        output = ours()
        with torch.no_grad():  # the score of the found derivation, computed without search and caches
            rescored = model(ids, spans=[beams[0] for beams in output.spans]).joint_log_prob
        torch.testing.assert_close(output.log_probs[:, 0], rescored, rtol=1e-5, atol=1e-3)
        if theirs().shape[1] != PARSE_TOKENS + 1:
            raise AssertionError("the baseline did not generate as many tokens as the parser reads")

    return Sides(ours, theirs, check)


class SearchedSentences:
    """A briefly trained model and sentences that it has not seen in training."""

    def __init__(self) -> None:
        sentences, labels, trees = treebank()
        torch.manual_seed(0)
        self.model = hf_synlm.RNNGForCausalLM(hf_synlm.RNNGConfig(nonterminals=labels, **TREE_SIZES))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        for start in range(0, 32 * WARM_UP_STEPS, 32):
            optimizer.zero_grad()
            self.model(**collate_trees(trees[start : start + 32], 0)).loss.backward()
            optimizer.step()
        place(self.model.eval())
        unseen = zip(sentences[32 * WARM_UP_STEPS :], trees[32 * WARM_UP_STEPS :], strict=True)
        self.ids = [place(torch.tensor(tree["input_ids"])) for x, tree in unseen if len(x.words) == SEARCH_TOKENS]

    def search(self, ids: Sequence[Tensor], action_beam_size: int, **options: str) -> ParseOutput:
        """Search sentences of one length together."""
        return self.model.parse(
            torch.stack(list(ids)),
            num_beams=WORD_BEAM,
            action_beam_size=action_beam_size,
            fast_track_size=FAST_TRACK,
            **options,
        )

    def check(self, ids: Sequence[Tensor], action_beam_size: int) -> None:
        """The best derivation has the score that `forward` gives it; sentences have the scores they have alone."""
        together = self.search(ids, action_beam_size, normalization="train")
        with torch.no_grad():
            rescored = self.model(torch.stack(list(ids)), actions=together.actions[:, 0]).joint_log_prob
        torch.testing.assert_close(together.log_probs[:, 0], rescored, rtol=1e-5, atol=1e-3)
        for x, sentence in enumerate(ids):
            alone = self.search([sentence], action_beam_size, normalization="train")
            torch.testing.assert_close(together.token_log_probs[x], alone.token_log_probs[0], rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(together.log_probs[x], alone.log_probs[0], rtol=1e-4, atol=1e-3)


def rnng_search(num_sentences: int, action_beam_size: int, baseline_size: int) -> Sides:
    """Search of sentences together against the same sentences one by one, with another beam."""
    data = SearchedSentences()
    ids = data.ids[:num_sentences]
    return Sides(
        lambda: data.search(ids, action_beam_size),
        lambda: [data.search([sentence], baseline_size) for sentence in ids],
        lambda: data.check(ids, action_beam_size),
    )


def rnng_growth(runs: int) -> Iterator[dict[str, Any]]:
    """Time per sentence against action beam, length and batch; one sentence of 17 tokens with action beam 10 = 1."""
    data = SearchedSentences()
    first, second = data.ids[0], data.ids[1]
    rows = [(f"action beam {size}", [first], size) for size in (20, 50, 100, 200, 400)]
    lengths = {8: first[:8], 34: torch.cat([first, second]), 68: torch.cat(data.ids[:4])}
    rows += [(f"action beam 100, {length} tokens", [ids], 100) for length, ids in lengths.items()]
    rows += [(f"action beam 100, {size} sentences together", data.ids[:size], 100) for size in (2, 4, 8, 16)]
    for name, ids, size in rows:
        ratios = []
        for _ in range(runs):
            base, this = seconds(lambda: data.search([first], 10)), seconds(lambda i=ids, s=size: data.search(i, s))
            ratios.append(this / len(ids) / base)
        yield {"search": f"rnng, {name}", "ratio": round(statistics.median(ratios), 2)}


def gpst_search(length: int, beam: int) -> Sides:
    """A parse of `length` tokens with a beam; there is no baseline."""
    model, tokenizer = hf_synlm.GPSTForCausalLM.from_pretrained(MODEL).eval(), AutoTokenizer.from_pretrained(MODEL)
    words = [word for sentence in read_treebank(sample_path("trees.test.txt")) for word in sentence.words]
    text = " ".join(words[: 2 * length]).lower()
    ids = place(tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[:, :length])
    place(model)

    @torch.no_grad()
    def step() -> None:
        model.parse(ids, num_beams=beam)

    return Sides(step, step, step)


def gpst_growth(runs: int, peak_memory: Callable[[Callable[[], Sides]], float]) -> Iterator[dict[str, Any]]:
    """Median seconds, microseconds per token and derivation, and MiB of `gpst-tiny` by length and beam.

    A derivation attends to its own nodes only, so the time per token and derivation should not grow with the beam.
    """
    for length in LENGTHS:
        for beam in BEAMS:
            step = gpst_search(length, beam).ours
            step()
            time = statistics.median(seconds(step) for _ in range(runs))
            yield {
                "search": f"gpst, {length} tokens, beam {beam}",
                "seconds": round(time, 3),
                "microseconds": round(1e6 * time / length / beam, 1),
                "mib": round(peak_memory(partial(gpst_search, length, beam))),
            }
