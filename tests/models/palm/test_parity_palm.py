"""PaLM equals the authors' code on the stored cases: states, scores, losses, gradients, dropout, trees."""

import pytest
import torch

from hf_synlm.conversion.files import convert_files
from hf_synlm.conversion.palm import convert_palm, rename_tensors
from hf_synlm.models.palm.span_attention import gold_attention, span_states, split_by_scores
from hf_synlm.recurrent import layers as recurrent_layers
from hf_synlm.recurrent.cache import RecurrentCache
from tests.helpers.goldens import read_bytes, read_case
from tests.helpers.refusals import refused

CASES = ["u_small_m", "u_large_m", "s_small_m", "s_large_m", "rb"]


def load(case, **options):
    state, io, meta = read_case(f"palm/{case}")
    return convert_palm(state, {**meta, "config": {**meta["config"], **options}}), io, meta


def close(mine, theirs, tolerance=2e-6):
    """Compare a batch-first tensor with a stored one, whose first dimension is time."""
    torch.testing.assert_close(mine.transpose(0, 1), theirs, rtol=0, atol=tolerance)


def spans_of_segment(meta, segment):
    """Gold spans of a case, half-open and counted from the beginning of a segment."""
    if meta["gold_spans"] is None:
        return None
    start = segment * meta["segment_length"]
    end = start + meta["segment_length"]
    return [[(i - start, j + 1 - start) for i, j in row if start <= j + 1 <= end] for row in meta["gold_spans"][1]]


def run_segment(model, io, meta, segment, cache):
    prefix = f"seg{segment}."
    ids, targets = (io[f"{prefix}{name}_ids"].T for name in ("input", "target"))
    return model(ids, shift_labels=targets, spans=spans_of_segment(meta, segment), past_key_values=cache)


def state_of(io, prefix, num_spans):
    layers = [io[f"{prefix}{name}_in.{layer}"] for layer in range(3) for name in "hc"]
    return (*layers, io[prefix + "att_history_in"][-num_spans:].transpose(0, 1))


@pytest.mark.parametrize("case", CASES)
def test_two_segments(case):
    model, io, meta = load(case)
    cache, num_spans = RecurrentCache(), meta["config"]["num_spans"]
    assert model.config.num_spans == num_spans
    for segment in range(2):
        prefix = f"seg{segment}."
        logits = model(io[prefix + "input_ids"].T, past_key_values=_copy(cache)).logits
        output = run_segment(model, io, meta, segment, cache)
        for layer in range(3):
            for place, name in enumerate("hc"):
                mine = cache.state[2 * layer + place]
                torch.testing.assert_close(mine, io[f"{prefix}{name}_out.{layer}"], rtol=0, atol=1e-6)
        close(cache.state[-1], io[prefix + "att_history_out"][-num_spans:], 1e-6)
        close(output.span_scores, io[prefix + "scores"], 5e-6)
        close(output.span_scores.softmax(-1), io[prefix + "omega"], 1e-6)
        close(logits, io[prefix + "logits"].log_softmax(-1), 2e-6)
        names = {"language_model": "loss_lm", "activation": "loss_ar", "temporal_activation": "loss_tar"}
        for mine, theirs in names.items():
            weight = 2 if mine == "activation" else 1
            torch.testing.assert_close(weight * output.losses[mine], io[prefix + theirs], rtol=0, atol=1e-6)
        torch.testing.assert_close(output.loss, io[prefix + "loss_total"], rtol=0, atol=1e-6)


def _copy(cache):
    copy = RecurrentCache()
    if cache.is_initialized:
        copy.store(cache.state, 0)
    return copy


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    model, io, meta = load(case)
    cache = RecurrentCache()
    for segment in range(2):
        model.zero_grad()
        run_segment(model, io, meta, segment, cache).loss.backward()
        mark = f"seg{segment}.grad."
        compare_gradients(model, {k.removeprefix(mark): v for k, v in io.items() if k.startswith(mark)})


def compare_gradients(model, stored):
    for name, gradient in stored.items():
        if name.startswith("_att_.rrnn") and name.endswith("bias"):
            assert not gradient[: len(gradient) // 2].any()  # of the half that is never read
    theirs = rename_tensors(stored)
    theirs.pop("lm_head.weight", None)
    mine = {name: parameter.grad for name, parameter in model.named_parameters()}
    if model.config.span_scores == "right_branching":
        theirs = {name: gradient for name, gradient in theirs.items() if name in mine}
    assert set(mine) == set(theirs)
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("case", ["s_small_m", "s_large_m"])
def test_attention_to_gold_spans(case):
    model, io, meta = load(case)
    cache = RecurrentCache()
    for segment in range(2):
        output = run_segment(model, io, meta, segment, cache)
        prefix = f"seg{segment}."
        target = gold_attention(spans_of_segment(meta, segment), None, output.span_scores)
        close(target, io[prefix + "att_target"], 1e-6)
        assert target.any() and (target.sum(-1) == 0).any()
        torch.testing.assert_close(output.losses["span_attention"], io[prefix + "loss_att"], rtol=0, atol=1e-6)


def test_recorded_dropout(monkeypatch):
    model, io, meta = load("u_train_masks")
    masks = [(entry["p"], io[entry["name"]]) for entry in meta["mask_order"]]
    # The masks of the two directions of the rational RNN are one mask here.
    first = next(i for i, entry in enumerate(meta["mask_order"]) if entry["name"] == "mask.rrnn_fw")
    masks[first : first + 2] = [(masks[first][0], torch.cat([masks[first][1], masks[first + 1][1]], -1))]
    masks = [(p, mask.transpose(0, 1) if mask.dim() == 3 else mask) for p, mask in masks]

    def replay(shape, p, like, rescale=True):
        expected, mask = masks.pop(0)
        assert tuple(shape) == mask.shape and p == expected and rescale
        return mask

    monkeypatch.setattr(recurrent_layers, "keep_mask", replay)
    cache = RecurrentCache()
    cache.store(state_of(io, "seg0.", 5), 0)
    output = model.train()(io["seg0.input_ids"].T, shift_labels=io["seg0.target_ids"].T, past_key_values=cache)
    assert not masks
    close(output.span_scores, io["seg0.scores"], 5e-6)
    close(cache.state[-1], io["seg0.att_history_out"][-5:], 1e-6)
    parts = (("language_model", "lm", 1), ("activation", "ar", 2), ("temporal_activation", "tar", 1))
    for mine, theirs, weight in parts:
        torch.testing.assert_close(weight * output.losses[mine], io[f"seg0.loss_{theirs}"], rtol=0, atol=1e-6)
    torch.testing.assert_close(output.loss, io["seg0.loss_total"], rtol=0, atol=1e-6)
    output.loss.backward()
    compare_gradients(model, {k.removeprefix("seg0.grad."): v for k, v in io.items() if k.startswith("seg0.grad.")})


@pytest.mark.parametrize("name", ["near_one", "near_zero", "mixed", "underflow"])
def test_extreme_gates(name):
    # The authors' arithmetic gives NaN for `underflow` and for most of `mixed`.
    _, io, meta = read_case("palm/stress_gates")
    num_spans = meta["config"]["num_spans"]
    logit, preactivation = (io[f"{name}.{part}"] for part in ("forget_logit", "input_preact"))
    gates = (preactivation * (-logit).sigmoid(), logit.sigmoid())
    gates = [value[-num_spans - meta["config"]["T"] : -1].transpose(0, 1).repeat(1, 1, 2) for value in gates]
    states = span_states(*gates, num_spans).permute(1, 2, 0, 3)
    for mine, direction in zip(states.chunk(2, -1), ("fw", "bw"), strict=True):
        close(mine, io[f"{name}.span_state_{direction}"])


@pytest.mark.parametrize("mode", ["reset", "carry"])
def test_trees(mode):
    model, io, meta = load("parse", max_span_length=21)  # the authors' program has one for every sentence
    cache = RecurrentCache()
    for entry in (entry for entry in meta["trees"] if entry["mode"] == mode):
        n = entry["n"]
        ids = io[f"{mode}.n{n}.input_ids"][None]
        if mode == "reset":
            cache.reset()
        elif cache.is_initialized:  # the authors keep the state of the LSTM, and forget what was attended to
            cache.state = (*cache.state[:-1], torch.zeros_like(cache.state[-1]))
        output = model.model(ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
        attention = model.model.span_context.attention
        scores = attention.scores(output.query_states, output.query_states.new_zeros(1, n, 16))[0]
        torch.testing.assert_close(scores, io[f"{mode}.n{n}.scores"], rtol=1e-6, atol=5e-6)
        assert set(split_by_scores(scores, range(n + 1))) == {(i, j + 1) for i, j in entry["spans_inclusive"]}


def test_every_tensor_is_accounted_for():
    tensors, _, meta = read_case("palm/u_small_m")
    for name in tensors:
        refused("missing|lacks", convert_palm, {key: value for key, value in tensors.items() if key != name}, meta)
    refused("should be", convert_palm, {**tensors, "_att_._w2_": torch.zeros(1, 9)}, meta)
    refused("differ", convert_palm, {**tensors, "decoder.weight": tensors["decoder.weight"] + 1}, meta)
    refused("hidden_size is 17", convert_palm, tensors, {"hidden_size": 17})


def test_other_forms_of_a_checkpoint():
    tensors, io, meta = read_case("palm/u_small_m")
    ids = io["seg0.input_ids"].T
    expected = convert_palm(tensors, meta)(ids).logits
    # Without weight dropout the layers are not wrapped; data-parallel training puts `module.` in front.
    renamed = {f"module.{key.replace('.module', '').replace('_raw', '')}": value for key, value in tensors.items()}
    assert torch.equal(convert_palm(renamed, {"max_span_length": 6})(ids).logits, expected)
    assert convert_palm(tensors, {"max_span_length": 6}).config.num_spans == 5
    twice = {**tensors, "rnns.0.module.weight_hh_l0": tensors["rnns.0.module.weight_hh_l0_raw"]}
    assert torch.equal(convert_palm(twice, meta)(ids).logits, expected)
    twice["rnns.0.module.weight_hh_l0"] = twice["rnns.0.module.weight_hh_l0"] + 1
    refused("and an earlier tensor", convert_palm, twice, meta)
    assert convert_palm({key: value.double() for key, value in tensors.items()}, meta).dtype == torch.float64
    layers = {key: value for key, value in tensors.items() if not key.startswith(("_att_", "_hidden_"))}
    baseline = convert_palm(layers, {**meta, "eos_token_id": 3})
    assert baseline.model.span_context is None and baseline.config.eos_token_id == baseline.config.bos_token_id == 3
    assert baseline(ids).logits.shape == expected.shape


def test_pickled_checkpoint_is_refused(tmp_path):
    weights, meta, output = tmp_path / "model.pt", tmp_path / "meta.json", tmp_path / "model"
    meta.write_bytes(read_bytes("palm/rb", "meta.json"))
    torch.save([torch.nn.Linear(2, 2)], weights)
    refused("max_span_length is needed", convert_files, "palm", weights, [meta], output)


def test_number_of_spans_is_asked_for():
    state, _, meta = read_case("palm/parse")
    others = {key: value for key, value in meta.items() if key not in ("max_span_length", "num_spans", "config")}
    for options, message in (
        ({}, "neither 'num_spans' nor 'max_span_length'"),
        ({"num_spans": 5, "max_span_length": 20}, "must be num_spans"),
    ):
        refused(message, convert_palm, state, {**others, **options})
    model = convert_palm(state, {**others, "num_spans": 5, "max_span_length": 6, "kind": "palm-rb"})
    assert (model.config.num_spans, model.config.span_scores) == (5, "right_branching")


def test_no_word_is_taken_for_the_boundary():
    model, _, _ = load("parse", num_spans=5, max_span_length=6)
    assert model.config.eos_token_id is model.config.bos_token_id is None
    refused("bos_token_id or eos_token_id is None", model.parse, torch.tensor([[3, 4, 5]]))
