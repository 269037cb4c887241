"""Inside and outside passes against a cell-by-cell specification: values, gradients and gradient channels."""

import random

import pytest
import torch

from hf_synlm.models.gpst import inside_outside
from hf_synlm.models.gpst.chart import plan_chart
from hf_synlm.models.gpst.composition import GPSTComposition, GPSTDecomposition, GPSTParser
from hf_synlm.models.gpst.configuration_gpst import GPSTConfig
from hf_synlm.models.gpst.inside_outside import WeightGradients, inside, outside
from tests.reference.inside_outside import naive_inside, naive_outside, replay_chart

CONFIG = {"composition_size": 8, "composition_intermediate_size": 12, "score_size": 5}
CONFIG |= {"composition_num_heads": 2, "num_composition_layers": 2}


def make(window=2, num_decomposition_layers=1, lengths=(7, 1, 2, 10)):
    torch.manual_seed(1)
    config = GPSTConfig(**CONFIG, window_size=window, num_decomposition_layers=num_decomposition_layers)
    models = [GPSTComposition(config).double().eval(), GPSTDecomposition(config).double().eval()]
    for model in models:
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    generator = random.Random(window)
    orders = [generator.sample(range(n - 1), n - 1) for n in lengths]
    width = max(lengths)
    places = range(width - 1)
    order = torch.tensor([[*own, *(k for k in places if k not in own)] for own in orders], dtype=torch.long)
    sentence_ids = torch.stack([(torch.arange(width) < n).long() for n in lengths])
    leaves = torch.randn(sum(lengths), 8, dtype=torch.double, requires_grad=True)
    root = torch.rand(8, dtype=torch.double, requires_grad=True)
    return config, *models, orders, plan_chart(order, sentence_ids, window), leaves, root


def test_the_parser_keeps_double_precision():
    torch.manual_seed(0)
    parser, ids = GPSTParser(GPSTConfig(**CONFIG, parser_dropout=0.0)).double(), torch.arange(12)[None]
    scores = parser(ids, torch.ones_like(ids))
    assert scores.dtype == torch.double and not torch.equal(scores, scores.float().double())
    torch.testing.assert_close(parser.float()(ids, torch.ones_like(ids)), scores.float(), rtol=1e-4, atol=1e-6)


def gradients(loss, tensors):
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors, strict=True)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("window", "layers", "flags"),
    [(2, 1, "stop"), (2, 1, "stop again"), (2, 2, ""), (3, 1, "stop"), (3, 1, "stop hard"), (1, 1, "stop")],
)
def test_values_and_gradients_equal_the_specification(window, layers, accumulate, flags):
    stop, hard, again = (flag in flags for flag in ("stop", "hard", "again"))
    config, composition, decomposition, orders, plan, leaves, root = make(window, layers)
    composition.gradient_checkpointing = decomposition.gradient_checkpointing = again
    options = {"hard": hard, "accumulate_scores": accumulate, "stop_structure_gradient": stop}
    chart = inside(plan, leaves, composition, temperature=0.7, **options)
    leaf_outside, _ = outside(plan, chart, root, decomposition, accumulate_scores=accumulate)
    mix = torch.randn(plan.num_cells, 8, dtype=torch.double)
    loss = (chart.language_vector_ND * mix).sum() + (leaf_outside * mix[: plan.num_leaves]).sum()
    loss = loss + chart.height_N[plan.root_S].pow(2).sum()

    expected, start = 0.0, 0
    cells = {}
    for index in range(plan.num_cells):
        span = int(plan.start_N[index]), int(plan.end_N[index])
        cells[int(plan.context_N[index]), span] = index
    for row, order in enumerate(orders):
        n = len(order) + 1
        splits, _ = replay_chart(order, window)
        sentence = leaves[start : start + n]
        main, language, height, score, _ = naive_inside(splits, sentence, composition, 0.7, accumulate, hard)
        for span, vector in main.items():
            torch.testing.assert_close(chart.vector_ND[cells[row, span]], vector)
            expected = expected + ((language if stop else main)[span] * mix[cells[row, span]]).sum()
        naive = naive_outside(splits, main, score, root, decomposition, n, accumulate)
        torch.testing.assert_close(leaf_outside[start : start + n], naive)
        expected = expected + (naive * mix[start : start + n]).sum() + height[0, n].pow(2)
        start += n
    torch.testing.assert_close(loss, expected)
    parameters = [leaves, root, *composition.parameters(), *decomposition.parameters()]
    names = ["leaves", "root", *(n for m in (composition, decomposition) for n, _ in m.named_parameters())]
    for name, mine, other in zip(names, gradients(loss, parameters), gradients(expected, parameters), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")


def test_levels_that_are_computed_again_or_compiled_drop_the_same():
    _, composition, decomposition, _, plan, leaves, root = make(lengths=(3, 2))
    parameters = [leaves, root, *composition.parameters(), *decomposition.parameters()]
    found = []
    for again, compiled in ((False, None), (True, None), (True, {"backend": lambda graph, inputs: graph})):
        for model in (composition, decomposition):
            model.train().gradient_checkpointing, model.compile_options = again, compiled
        torch.manual_seed(3)
        chart = inside(plan, leaves, composition)
        leaf_outside, _ = outside(plan, chart, root, decomposition)
        mix = torch.randn_like(chart.vector_ND)
        loss = (chart.language_vector_ND * mix).sum() + (leaf_outside * mix[: plan.num_leaves]).sum()
        found.append([loss, *gradients(loss, parameters)])
    for kept, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(kept, other, rtol=0, atol=1e-12)
    composition.eval()
    assert not torch.equal(inside(plan, leaves, composition).vector_ND, chart.vector_ND)


@torch._dynamo.config.patch(recompile_limit=1)
def test_compiled_levels_in_bfloat16_then_in_float32():
    """Each needs a graph of every function; torch's own limit, here one, does not stop the second."""
    _, *models, _, plan, leaves, root = make(lengths=(2, 2))
    models = [model.float() for model in models]
    inputs = [leaves.detach().float().requires_grad_(), root.detach().float().requires_grad_()]

    def step(bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            chart = inside(plan, inputs[0], models[0])
            leaf_outside, _ = outside(plan, chart, inputs[1], models[1])
        loss = (chart.language_vector_ND.float() ** 2).sum() + leaf_outside.float().sum()
        return [loss, *gradients(loss, [*inputs, *models[0].parameters(), *models[1].parameters()])]

    expected = [step(bfloat16) for bfloat16 in (True, False)]
    for model in models:
        model.compile(dynamic=True, backend=lambda graph, inputs: graph)
    for bfloat16, values in zip((True, False), expected, strict=True):
        torch.testing.assert_close(step(bfloat16), values, rtol=0, atol=0)


def test_no_graph_without_gradients():
    _, composition, decomposition, _, plan, leaves, root = make()
    with torch.no_grad():
        chart = inside(plan, leaves, composition)
        leaf_outside, notes = outside(plan, chart, root, decomposition, return_all=True)
    assert not chart.vector_ND.requires_grad and not leaf_outside.requires_grad
    assert notes["outside_ND"].shape == chart.vector_ND.shape


def test_second_channels_are_added_at_once_beyond_a_bound(monkeypatch):
    torch.manual_seed(1)
    maps = {"map": (torch.randn(3, 4), torch.randn(3))}
    levels = [(torch.randn(size, 4), torch.randn(2, size, 3)) for size in (1, 2, 4)]
    found = []
    for bound in (100, 20, 0):
        monkeypatch.setattr(inside_outside, "_SECOND_CHANNELS", bound)
        weights = WeightGradients(maps)
        weights.adds_at_once = weights.on_cpu = False
        for level in levels:
            weights.add({"map": level})
        kept = [len(gradient) for _, gradient in weights.rows["map"]]
        assert kept == {100: [2, 2, 2], 20: [1, 1], 0: [1, 1, 1]}[bound]
        found.append(weights.results())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-6)
