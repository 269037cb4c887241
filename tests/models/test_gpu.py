"""All models on a GPU: numbers of the CPU, gradients in half precision, searches, waits of the host.

Without a GPU, `test_pretend_gpu.py` runs these tests on the pretend one.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_synlm.evaluation.text.scoring import EncodedText, TextScorer
from tests.helpers.launches import CASES, count
from tests.helpers.pretend_gpu import PretendGPU
from tests.helpers.scoring_models import model_and_tokenizer, scorer_of

pytestmark = pytest.mark.gpu

TEXTS = ["We ask for peace", "America is back, standing tall"]
LABELED = ("rnng", "tree_lm", "tree_lm_binary", "tree_lm_gpt2")
RECURRENT = ("on_lstm", "prpn", "prpn_syd", "palm", "ordered_memory", "lstm")
PCFGS = ("pcfg", "pcfg_compound", "pcfg_tensor", "pcfg_simple")
ARCHITECTURES = ("gpst", *LABELED, "urnng", "pushdown", *PCFGS, *RECURRENT)
WITH_TREES = ARCHITECTURES[:-1]
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def make(architecture: str) -> tuple[Any, dict[str, Tensor]]:
    """A model that drops nothing, and the arguments of `forward` that train it."""
    model, tokenizer = model_and_tokenizer(architecture.removesuffix("_syd"))
    fields = model.config.to_dict()
    fields.update({name: 0.0 for name in fields if name.endswith("dropout")})
    if architecture == "prpn_syd":
        fields["parsing_network"] = "recurrent"
    torch.manual_seed(0)
    copy = type(model)(type(model.config)(**fields))
    with torch.no_grad():
        for weight in copy.parameters():
            weight += 0.1 * torch.randn_like(weight)
    batch = dict(tokenizer(TEXTS, return_tensors="pt", padding=True))
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if architecture in (*LABELED, "urnng"):
        return copy, {**batch, "actions": copy.eval().parse(**batch).actions[:, 0]}
    if architecture == "pushdown":
        own = batch["attention_mask"].cumsum(1).masked_fill(batch["attention_mask"] == 0, -100)
        return copy, {**batch, "attachments": own}
    return copy, {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def texts(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arguments of `parse` and `generate`."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def step(model: Any, inputs: dict[str, Tensor], scale: float = 1.0) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one training step, on the CPU; the loss is multiplied by `scale` on the way.

    The noise of a compound PCFG is drawn on the CPU: a GPU has other random numbers.
    """
    model.train().zero_grad()
    torch.manual_seed(0)
    with mock.patch("torch.randn_like", lambda like: torch.randn(like.shape).to(like)):
        loss = model(**inputs).loss
    (loss * scale).backward()
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.grad is not None]
    return loss.item(), {name: weight.grad.cpu() / scale for name, weight in weights}


def farthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of a gradient, and whose it is.

    The norm of the difference beside the norm of the gradient; the latter counts as at least 0.03 of the largest, for
    some gradients are 0 but for rounding.
    """
    assert found.keys() == expected.keys()
    floor = 0.03 * max(gradient.norm().item() for gradient in expected.values())
    return max(
        ((found[name] - gradient).norm().item() / max(gradient.norm().item(), floor), name)
        for name, gradient in expected.items()
    )


def on(gpu: Any, thing: Any) -> Any:
    return {name: gpu.move(value) for name, value in thing.items()} if isinstance(thing, dict) else gpu.move(thing)


@every_architecture
def test_training_equals_the_cpu(gpu, architecture):
    model, inputs = make(architecture)
    loss, gradients = step(model, inputs)
    found_loss, found = step(on(gpu, model), on(gpu, inputs))
    assert found_loss == pytest.approx(loss, rel=gpu.tolerance)
    assert farthest(found, gradients) < (100 * gpu.tolerance, "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_architecture
def test_half_precision_loses_no_gradient(gpu, architecture, dtype):
    """Autocast: gradients are those of autocast on the CPU, and none becomes 0 by underflow.

    cuDNN's LSTM would run in float16 under autocast, and two thirds of its gradients would be 0.
    """
    scale = 1.0 if dtype == torch.bfloat16 else 2.0**8
    model, inputs = make(architecture)
    loss, gradients = step(model, inputs)
    with torch.autocast("cpu", dtype=dtype):
        _, expected = step(model, inputs, scale)
    model, inputs = on(gpu, model), on(gpu, inputs)
    with torch.autocast(gpu.device, dtype=dtype):
        half, found = step(model, inputs, scale)
    assert half == pytest.approx(loss, rel=0.02)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        if gradient.abs().max() > 1e-2 * largest:
            counts = gradient.abs() > 1e-3 * gradient.abs().max()
            if architecture in PCFGS:  # rounding switches some units of relu off, on the CPU as well
                counts &= expected[name] != 0
            assert (found[name][counts] == 0).float().mean() < 0.01, name
    # In half precision, a gradient that is 0 but for rounding is noise, and every device has its own.
    names = [name for name, gradient in gradients.items() if gradient.norm() > 1e-5 * largest]
    assert farthest({name: found[name] for name in names}, {name: expected[name] for name in names}) < (0.1, "")


@pytest.mark.parametrize("architecture", WITH_TREES)
def test_parse_equals_the_cpu(gpu, architecture):
    model, inputs = make(architecture)
    expected = model.eval().parse(**texts(inputs))
    found = on(gpu, model).parse(**on(gpu, texts(inputs)))
    assert found.spans == expected.spans
    torch.testing.assert_close(found.token_log_probs.cpu(), expected.token_log_probs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", WITH_TREES)
def test_generation_equals_the_cpu(gpu, architecture):
    model, inputs = make(architecture)
    options = {"num_beams": 3, "max_new_tokens": 3, "return_dict_in_generate": True}
    expected = model.eval().generate(**texts(inputs), **options)
    found = on(gpu, model).generate(**on(gpu, texts(inputs)), **options)
    assert torch.equal(found.sequences.cpu(), expected.sequences)
    assert found.spans == expected.spans


@pytest.mark.parametrize("architecture", ["gpst", "rnng", *PCFGS])
def test_marginal_generation_and_logits_equal_the_cpu(gpu, architecture):
    model, inputs = make(architecture)
    options = {"max_new_tokens": 2, "structure_mode": "marginal", "do_sample": False}
    expected = model.eval()(**texts(inputs)).logits, model.generate(**texts(inputs), **options)
    on(gpu, model)
    inputs = on(gpu, texts(inputs))
    torch.testing.assert_close(model(**inputs).logits.cpu(), expected[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(model.generate(**inputs, **options).cpu(), expected[1])


@pytest.mark.parametrize("architecture", ["on_lstm", "palm"])
def test_a_training_step_waits_for_nothing(gpu, architecture):
    model, inputs = make(architecture)
    model, inputs = on(gpu, model).train(), on(gpu, inputs)
    model(**inputs).loss.backward()  # what the first step prepares may wait
    with gpu.nothing_waits():
        model(**inputs).loss.backward()


@every_architecture
def test_deterministic_algorithms(gpu, architecture, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, inputs = make(architecture)
    model, inputs = on(gpu, model), on(gpu, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        (loss, gradients), (again, repeated) = step(model, inputs), step(model, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert loss == again
    for name, gradient in gradients.items():
        assert torch.equal(gradient, repeated[name]), name


@pytest.mark.parametrize("architecture", ["gpst", "on_lstm", "gpt2"])
def test_scores_of_texts_equal_the_cpu(gpu, architecture):
    model, tokenizer = model_and_tokenizer(architecture)
    texts = [EncodedText(ids, [0] * len(ids), 1) for ids in tokenizer(TEXTS)["input_ids"]]
    expected = scorer_of(architecture).score(texts)
    found = TextScorer(on(gpu, deepcopy(model)), tokenizer).score(texts)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_a_plan_of_the_data_loader_fits_inputs_on_the_gpu(gpu):
    model, inputs = make("rnng")
    plan = model.model.make_plan(inputs["actions"], inputs["attention_mask"].bool(), None)
    loss = model(**inputs, plan=plan).loss.item()
    assert on(gpu, model)(**on(gpu, inputs), plan=plan).loss.item() == pytest.approx(loss, rel=gpu.tolerance)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * ("8 x" in name)) for name in CASES])
def test_launches_and_waits_stay_below_their_ceilings(gpu, name):
    if not isinstance(gpu, PretendGPU):
        pytest.skip("only the pretend GPU counts")
    kernels, waits = count(gpu, CASES[name])
    assert kernels <= CASES[name].kernels, gpu.kernels.most_common(20)
    assert waits <= CASES[name].waits, gpu.waits.most_common(20)


def test_the_pretend_gpu_finds_mistakes(gpu):
    if not isinstance(gpu, PretendGPU):
        pytest.skip("only the pretend GPU")
    x = gpu.move(torch.arange(6.0).requires_grad_())
    assert x.device.type == "pretend" and torch.equal((2 * x).cpu(), 2 * torch.arange(6.0))
    for mistake, message in ((lambda: x + torch.ones(6), "mixes devices"), (lambda: x.double(), "float64")):
        with pytest.raises(RuntimeError, match=message):
            mistake()

    def write() -> None:
        (x.detach() > 2)[gpu.move(torch.tensor([0]))] = True

    for waits in (
        lambda: x.sum().item(),
        lambda: x[x > 2],
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: x.nonzero(),
        write,
    ):
        with pytest.raises(AssertionError, match="waits"), gpu.nothing_waits():
            waits()
    ones = torch.ones(3, device="pretend")
    with gpu.nothing_waits():
        (x[:3] + 1).exp() @ ones
    assert gpu.kernels["exp"] == 1 and sum(gpu.kernels.values()) == 3, gpu.kernels  # add, exp and dot
    lstm = gpu.move(torch.nn.LSTM(3, 4))
    with torch.autocast("pretend", dtype=torch.bfloat16):
        assert lstm(x.view(2, 1, 3))[0].dtype == torch.float16
        assert (x.view(2, 3) @ x.view(3, 2)).dtype == torch.bfloat16
