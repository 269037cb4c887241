"""PCFGs: the numbers of the authors' programs, and probabilities of prefixes that were computed in three other ways."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_synlm.conversion import convert_state_dict
from hf_synlm.models.pcfg.cache import next_token_log_probs
from hf_synlm.models.pcfg.inside import Grammar, inside
from hf_synlm.models.pcfg.prefix import PrefixState, prefix_log_probs, read_sentences
from hf_synlm.models.pcfg.rules import DenseRules, LowRankRules
from hf_synlm.models.pcfg.sentences import read_rows
from tests.helpers.goldens import read_case, read_tensors

# Only the first two tell nonterminals; the next two only trees.
CASES = (
    "01_neural", "02_compound", "03_neural_mixed", "04_compound_mixed", "05_tensor", "06_tensor_fast", "07_simple",
    "08_simple_compound",
)  # fmt: skip
NUMBERS = {"atol": 2e-4, "rtol": 0.0}
every_case = pytest.mark.parametrize("case", CASES)


class Batch:
    """A batch of a case: arguments of `forward`, and the authors' numbers, those of the mean of q(z | x) in `mean/`."""

    def __init__(self, io: dict[str, Tensor], prefix: str) -> None:
        self.gold = {name.removeprefix(prefix): value for name, value in io.items() if name.startswith(prefix)}
        ids = self.gold["input_ids"]
        self.lengths = self.gold.get("lengths", torch.full((len(ids),), ids.shape[1]))
        mask = (torch.arange(ids.shape[1]) < self.lengths[:, None]).long()
        self.text = {"input_ids": ids, "attention_mask": mask}
        self.noise = self.gold.get("sample/noise")

    def __getitem__(self, name: str) -> Tensor | None:
        return self.gold.get(f"mean/{name}", self.gold.get(name))

    def loss(self, model: Any, noise: Tensor | None) -> Any:
        labels = self.text["input_ids"].masked_fill(self.text["attention_mask"] == 0, -100)
        return model(**self.text, labels=labels, latent_noise=noise)


def read_model(case: str) -> tuple[Any, list[Batch], dict[str, Any]]:
    """The model of a case, its batches, and its `meta.json`."""
    state, io, meta = read_case(f"pcfg/{case}")
    return convert_state_dict("pcfg", state, meta["config"]), [Batch(io, b["prefix"]) for b in meta["batches"]], meta


@every_case
def test_values_are_those_of_the_authors(case: str) -> None:
    model, batches, meta = read_model(case)
    for batch, described in zip(batches, meta["batches"], strict=True):
        for run in ("sample/", "mean/") if model.config.is_compound else ("",):
            output = batch.loss(model, batch.noise if run == "sample/" else None)
            expected = batch.gold[f"{run}log_likelihood"]
            torch.testing.assert_close(output.losses["language_model"], -expected.mean(), **NUMBERS)
            if model.config.is_compound:
                divergence = batch.gold.get(f"{run}kl", batch["kl"])
                torch.testing.assert_close(output.losses["kl"], divergence.mean(), **NUMBERS)
                expected = expected - divergence
            torch.testing.assert_close(output.joint_log_prob, expected, **NUMBERS)
            if run != "mean/":
                assert output.loss.item() == pytest.approx(described["loss"], abs=2e-4)


@every_case
def test_gradients_are_those_of_the_authors(case: str) -> None:
    model, batches, meta = read_model(case)
    state, grads = (read_tensors(f"pcfg/{case}", name) for name in ("state", "grads"))
    model.train()
    for batch, described in zip(batches, meta["batches"], strict=True):
        gold = {name: grads.get(described["prefix"] + name, torch.zeros_like(tensor)) for name, tensor in state.items()}
        expected = dict(convert_state_dict("pcfg", gold, meta["config"]).named_parameters())
        model.zero_grad()
        batch.loss(model, batch.noise).loss.backward()
        for name, parameter in model.named_parameters():
            largest = expected[name].abs().max().item()
            if name.endswith("bias") and largest < 1e-5:
                largest = 1.0  # the same for all entries of a softmax: 0 but for rounding
            torch.testing.assert_close(parameter.grad, expected[name].detach(), atol=1e-3 * largest, rtol=0.0)


@every_case
def test_trees_are_those_of_the_authors(case: str) -> None:
    model, batches, _ = read_model(case)
    for batch in batches:
        found = model.parse(**batch.text)
        if (posteriors := batch["marginals"]) is not None:
            spans = found.span_probs.clone()
            whole = spans[torch.arange(len(spans)), 0, batch.lengths]
            torch.testing.assert_close(whole, torch.ones_like(whole), atol=5e-5, rtol=0.0)
            if "simple" in case:  # these programs leave 0 there
                spans[torch.arange(len(spans)), 0, batch.lengths] = 0.0
            torch.testing.assert_close(spans, posteriors, atol=5e-5, rtol=0.0)
            for row, trees in enumerate(found.spans):
                assert sorted(trees[0]) == [tuple(span) for span in batch[f"mbr_spans/{row}"].tolist()]
        if (scores := batch["viterbi_score"]) is None:
            continue
        best = model.parse(**batch.text, method="viterbi")
        torch.testing.assert_close(best.log_probs[:, 0], scores, **NUMBERS)
        nodes = [
            sorted(zip(trees[0], labels[0], strict=True)) for trees, labels in zip(best.spans, best.labels, strict=True)
        ]
        if (tags := batch["viterbi_tags"]) is not None:
            gold = [[((i, j), f"NT{symbol}") for i, j, symbol in tree] for tree in batch["viterbi_spans"].tolist()]
            assert nodes == gold and best.preterminals == [[[f"T{tag}" for tag in row]] for row in tags.tolist()]
        else:
            for row, tree in enumerate(nodes):
                assert [list(span) for span, _ in tree] == batch[f"viterbi_spans/{row}"].tolist()


@every_case
def test_next_words_of_converted_models(case: str) -> None:
    """Of compound grammars that of z = 0. Their ids are all words, so the end stands in no column of `logits`."""
    model, *_ = read_model(case)
    io = read_tensors(f"pcfg/{case}", "next_word")
    ids = io["input_ids"]
    mask = (torch.arange(ids.shape[1]) < io["lengths"][:, None]).long()
    text = read_rows(model.config, ids, mask)
    places = torch.arange(ids.shape[1] + 1).expand(len(ids), -1)
    rows = model._next_tokens(text, places, torch.zeros_like(places, dtype=torch.bool))
    found = model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask, use_cache=True).logits
    unused = min(set(range(model.config.vocab_size)) - set(ids.flatten().tolist()))
    model.config.eos_token_id = unused
    ends = model(ids, attention_mask=mask).logits[..., unused]
    for row, length in enumerate(io["lengths"].tolist()):
        gold = io[f"{row}/next_log_probs"].float()
        torch.testing.assert_close(rows[row, : length + 1], gold[:, :-1], **NUMBERS)
        for logits in found:
            torch.testing.assert_close(logits[row, :length], gold[1:, :-1], **NUMBERS)
        torch.testing.assert_close(ends[row, :length], gold[1:, -1], **NUMBERS)


# ------------------------------------------------------------------------------------------ probabilities of prefixes
def grammars(case: str) -> tuple[list[list[Grammar]], dict[str, Tensor]]:
    """Mixtures of grammars that are one function, and the numbers of a case."""
    io = read_tensors(f"pcfg/{case}", "io")
    parts = ["g0/", "g1/", "g2/"] if "mixture" in case else [""]
    mixtures = [[Grammar(io[f"{p}root"], io[f"{p}emission"].log(), DenseRules(io[f"{p}rule"])) for p in parts]]
    if "head" in io:
        rules = LowRankRules(io["head"], io["left"], io["right"])
        mixtures.append([Grammar(io["root"], io["emission"].log(), rules)])
    return mixtures, io


class Ends:
    """A configuration: the end token stands behind the words."""

    def __init__(self, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", ["09_prefix_dense", "10_prefix_runaway", "11_prefix_low_rank", "12_prefix_mixture"])
def test_probabilities_of_prefixes(case: str, dtype: torch.dtype) -> None:
    """Read as wholes, and word by word with pauses; one grammar, and a mixture."""
    mixtures, io = grammars(case)
    ids, tolerance = io["input_ids"], {"atol": 1e-9 if dtype == torch.float64 else 2e-5, "rtol": 0.0}
    end = io["next_log_probs"].shape[2] - 1
    never = torch.zeros(len(ids), ids.shape[1] + 1, dtype=torch.bool)
    for mixture in mixtures:
        expected, whole, prefix = [], [], []
        for grammar in (in_type(grammar, end, dtype) for grammar in mixture):
            chart = inside(grammar, grammar.of_words(ids))
            weights, scale = read_sentences(grammar, chart)
            rows = prefix_log_probs(grammar, weights, scale)[:, :-1]
            steps = rows.gather(2, ids[..., None]).squeeze(2)
            expected.append((grammar, weights, scale))
            whole.append(torch.nn.functional.pad(chart.whole, (1, 0), value=-torch.inf))
            prefix.append(torch.nn.functional.pad(steps, (1, 0)))
            read_with_pauses(grammar, ids, weights, torch.stack([scale, prefix[-1], whole[-1]], 2), tolerance)
        found = next_token_log_probs(Ends(end), expected, torch.stack(whole), torch.stack(prefix), never)
        torch.testing.assert_close(found, io["next_log_probs"].to(dtype), **tolerance)
        torch.testing.assert_close(found.logsumexp(2), torch.zeros_like(found[..., 0]), **tolerance)
        total = torch.stack(prefix).logsumexp(0) - torch.tensor(len(mixture), dtype=dtype).log()
        torch.testing.assert_close(total, io["prefix_log_probs"].to(dtype), **tolerance)


def in_type(grammar: Grammar, end: int, dtype: torch.dtype) -> Grammar:
    """A grammar in another type, with a column for the end token, which is no word."""
    emission = torch.nn.functional.pad(grammar.emission[:, :end], (0, 1), value=-torch.inf)
    rules = grammar.rules
    sides = [rules.rule] if isinstance(rules, DenseRules) else [rules.head, rules.left, rules.right]
    return Grammar(grammar.root.to(dtype), emission.to(dtype), type(rules)(*(side.to(dtype) for side in sides)))


def read_with_pauses(grammar: Grammar, ids: Tensor, weights: Tensor, scales: Tensor, tolerance: dict) -> None:
    """Every row waits at other places, and has what all words at once have."""
    torch.manual_seed(0)
    columns = ids.shape[1] + 4
    present = torch.rand(len(ids), columns).argsort(1) < ids.shape[1]
    state = PrefixState.before(grammar, len(ids))
    for column in range(columns):
        count = present[:, : column + 1].sum(1)
        words = ids.gather(1, (count[:, None] - 1).clamp_min(0)).squeeze(1)
        state = state.read(grammar, words, present[:, column])
        rows = torch.arange(len(ids))
        torch.testing.assert_close(state.preterminals, weights[rows, count], **tolerance)
        found = torch.stack([state.state_scale[:, -1], state.prefix, state.whole], 1)
        torch.testing.assert_close(found, scales[rows, count], **tolerance)
