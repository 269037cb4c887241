"""What every architecture promises alike: padding, batches, caches, gradients, types, vocabulary.

What is special to an architecture stands beside its equations in its own folder.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.architectures import (
    EVERY,
    PCFGS,
    RECURRENT,
    RNNGS,
    SEARCHING,
    TREE_LMS,
    batch,
    build,
    labeled,
    row_of,
    without_dropout,
)
from tests.helpers.recurrent_models import (
    ARCHITECTURES,
    WITH_TREES,
    gradients,
    state_rows,
    structures,
    without_penalties,
)
from tests.helpers.refusals import refused

every_model = pytest.mark.parametrize("name", EVERY)
sides = pytest.mark.parametrize("left", [False, True])
# All networks, but few of their variants.
NETWORKS = ("gpst", "rnng", "rnng, in-order", "tree_lm", "urnng", "pushdown", *PCFGS, *ARCHITECTURES)
every_network = pytest.mark.parametrize("name", NETWORKS)
STATISTICS = ("token_log_probs", "stepwise_log_probs", "beam_entropy", "num_actions", "stack_depth")
BY_TOKEN = ("logits", "token_logits_given_tree", "last_hidden_state", "hidden_states")


def parts_of(name: str, output: Any, row: int, mask: Tensor, steps: Tensor) -> dict[str, Any]:
    """What an output says of the tokens and actions of one row, and of the row as a whole."""
    found: dict[str, Any] = {}
    for field, value in {**output, **structures(output)}.items():
        if field in BY_TOKEN or field in structures(output):
            states = value if isinstance(value, tuple) else (value,)
            # The pushdown model tells what it knew before every token in a row of its own.
            tokens = slice(int(mask.sum())) if name == "pushdown" and field == "token_logits_given_tree" else mask
            found |= {f"{field} {number}": state[row][tokens] for number, state in enumerate(states)}
        elif field == "action_logits" and name in (*RNNGS, *TREE_LMS, "urnng"):
            found[field] = value[row][steps]
        elif field in ("joint_log_prob", "sentence_state", "log_likelihood"):
            found[field] = value[row]
        elif field == "span_probs" or (field == "chart" and name in PCFGS):
            bounds = F.pad(mask, (0, 1)) | F.pad(mask, (1, 0))
            found["span_probs"] = (value if field == "span_probs" else value["span_probs"])[row][bounds][:, bounds]
        elif field == "spans":
            start = int(mask.long().argmax())
            found[field] = [(i - start, j - start) for i, j in value[row]]
        elif field == "past_key_values":
            found |= {f"state {number}": state[row] for number, state in enumerate(state_rows(value))}
    return found


@every_model
@sides
@pytest.mark.parametrize("kind", ["Model", "ForCausalLM"])
def test_padding_and_batching_change_nothing(name: str, left: bool, kind: str) -> None:
    """Neither logits, trees and probabilities nor hidden states and caches."""
    pieces = name in (*RNNGS, *TREE_LMS)
    model = build(name, kind, **({"subwords": True} if pieces else {}))
    inputs = batch(name, 9, 4, 1, 6, left=left, pieces=pieces)
    options: dict[str, Any] = {} if name in ("urnng", *PCFGS) else {"output_hidden_states": True}
    if name in PCFGS:
        options = {"output_chart": True} if kind == "ForCausalLM" else {}
    elif kind == "ForCausalLM":
        options = {"output_chart": True, "output_spans": True} if name == "gpst" else {}
        options |= {} if name == "gpst" else {"output_logits": True}
    if name in RECURRENT:
        options = {"use_cache": True, "output_hidden_states": True}
    together = model(**inputs, **options)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        own = row_of(name, inputs, row)
        alone = model(**own, **options)
        steps = torch.ones_like(own.get("actions", own["input_ids"]))[0].bool()
        expected = parts_of(name, alone, 0, own["attention_mask"][0].bool(), steps)
        steps = torch.arange(together.get("action_logits", mask[None]).shape[1]) < len(steps)
        found = parts_of(name, together, row, mask, steps)
        assert found.keys() == expected.keys() and found
        torch.testing.assert_close(found, expected)


@every_model
@sides
def test_a_causal_mask_says_what_its_last_row_says(name: str, left: bool) -> None:
    """BabyLM's fine-tuning writes one for `AutoModel`, [B, T, T]."""
    inputs = batch(name, 9, 4, left=left)
    mask = inputs["attention_mask"]
    causal = mask.unsqueeze(1).repeat(1, mask.shape[1], 1).tril(diagonal=0)
    text = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    for kind, given in (("Model", inputs), ("ForCausalLM", text)):
        model = build(name, kind)
        assert torch.equal(model(**{**given, "attention_mask": causal})[0], model(**given)[0])
    for (row, column, other), message in (((1, 4, 5), "row 1, column 4 sees column 5"), ((0, 7, 2), "not see token 2")):
        wrong = torch.ones(2, 9, 9).tril()
        wrong[row, column, other] = 1 - wrong[row, column, other]
        refused(message, model, inputs["input_ids"], attention_mask=wrong)
    with pytest.raises(ValueError, match=r"attention_mask .*2, 9, 8.*and input_ids"):
        model(inputs["input_ids"], attention_mask=causal[..., 1:])


@every_model
def test_padding_changes_no_training(name: str) -> None:
    """Loss, gradients and statistics, wherever the padding stands and whatever is written there."""
    results: list[Any] = []
    for left, filler in ((False, 7), (False, -100), (True, -100)):
        model = build(name, **without_dropout(name)).train()
        inputs = labeled(name, 9, 4, 1, left=left)
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, filler)
        torch.manual_seed(0)
        loss = model(**inputs).loss
        results.append((loss, gradients(model, loss), dict(model.named_buffers())))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*SEARCHING, *PCFGS, *WITH_TREES])
@sides
def test_trees_of_a_batch(name: str, left: bool) -> None:
    """Those one by one, with probabilities, statistics and next words: in training too, whatever the padding holds."""
    pieces, searches = left and name in (*RNNGS, *TREE_LMS), name in SEARCHING
    model, inputs = build(name, **({"subwords": True} if pieces else {})).train(), batch(name, 9, 4, 1, left=left)
    if pieces:
        model.model.word_final[5::3] = False
    options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "stepwise": True} if searches else {}
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    given = (ids.masked_fill(~mask, -100), mask) if left else (ids, None)
    together, logits = model.parse(*given, **options), model.eval()(*given).logits if searches else ids
    for row, own in enumerate(mask):
        words, start = ids[row, own][None], int(own.long().argmax())
        alone = model.train().parse(words, **options)
        assert model.training and (alone.labels is None or together.labels[row] == alone.labels[0])
        assert together.spans[row] == [[(i + start, j + start) for i, j in tree] for tree in alone.spans[0]]
        torch.testing.assert_close(together.log_probs[row], alone.log_probs[0], rtol=1.3e-6, atol=1e-5)
        for field in STATISTICS if searches else STATISTICS[:1]:
            near = {"rtol": 1.3e-6, "atol": 1e-4 if field == "stack_depth" else 1e-5}
            torch.testing.assert_close(together[field][row, own], alone[field][0], **near)
            assert not together[field][row, ~own].any()
        if searches:
            torch.testing.assert_close(logits[row, own], model.eval()(words).logits[0], rtol=1.3e-6, atol=1e-5)


@every_model
def test_later_tokens_and_other_rows_change_nothing(name: str) -> None:
    model = build(name)
    ids = torch.randint(5, 12, (3, 6))
    changed = ids.clone()
    changed[0, 4:], changed[1] = torch.tensor([12, 13]), changed[1].flip(0)
    first, second = model(ids), model(changed)
    torch.testing.assert_close(first.logits.exp().sum(-1), torch.ones(3, 6))
    torch.testing.assert_close(first.logits[0, :4], second.logits[0, :4])
    assert not torch.allclose(first.logits[0, 4:], second.logits[0, 4:], atol=1e-3)
    torch.testing.assert_close(first.logits[2], second.logits[2])
    for field, values in structures(first).items():
        assert torch.equal(values[0, :4], structures(second)[field][0, :4])
    for places, kept in ((2, slice(-2, None)), (torch.tensor([4, 1]), [4, 1])):
        torch.testing.assert_close(model(ids[2:], logits_to_keep=places).logits, first.logits[2:, kept])


@every_model
@pytest.mark.parametrize("cut", [1, 4])
def test_two_calls_are_one(name: str, cut: int) -> None:
    """From a cache that was copied, with rows that begin, end and pause in either call."""
    model = build(name)
    ids = torch.randint(5, 12, (4, 7))
    ids[1, 0] = model.config.bos_token_id if name in SEARCHING else 5
    mask = torch.ones_like(ids)
    mask[2, :4], mask[3, 2:] = 0, 0
    options: dict[str, Any] = {"use_cache": True} | ({"output_hidden_states": True} if name in RECURRENT else {})
    whole = model(ids, attention_mask=mask, **options)
    first = model(ids[:, :cut], attention_mask=mask[:, :cut], **options)
    for given in (mask, mask[:, cut:]) if name in RECURRENT else (mask,):
        cache = pickle.loads(pickle.dumps(first.past_key_values))
        second = model(ids[:, cut:], attention_mask=given, past_key_values=cache, **options)
        assert second.past_key_values.get_seq_length() == 7
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole.logits)
        for field, values in structures(whole).items():
            parts = torch.cat([structures(first)[field], structures(second)[field]], 1)
            torch.testing.assert_close(parts[mask == 1], values[mask == 1])
        if name in RECURRENT:
            torch.testing.assert_close(cache.state, whole.past_key_values.state)
            for state, *parts in zip(whole.hidden_states, first.hidden_states, second.hidden_states, strict=True):
                torch.testing.assert_close(torch.cat(parts, 1)[mask == 1], state[mask == 1])


@every_network
def test_rows_of_a_cache_are_chosen_repeated_and_copied(name: str) -> None:
    """They go on as the chosen texts do; a deep copy is independent, and what was reset begins anew."""
    model, ids, order = build(name), torch.randint(5, 12, (3, 6)), torch.tensor([2, 0, 0, 1])
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    with torch.no_grad():  # nobody copies a graph
        first = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True).past_key_values
    cache, twin = copy.deepcopy(first), copy.deepcopy(first)
    refused("3 (rows|sentences).*input_ids", model, ids[:1, 4:], past_key_values=cache)
    cache.reorder_cache(order)
    if name in RNNGS:  # what the model knows of the next word moves along
        assert torch.equal(cache.state.next_log_probs, first.state.next_log_probs[order])
    twin.batch_repeat_interleave(2)
    assert twin.batch_size == 6 and first.get_seq_length() == 4
    for rows, held in ((order, cache), (torch.arange(3).repeat_interleave(2), twin)):
        found = model(ids[rows, 4:], attention_mask=mask[rows], past_key_values=held).logits
        torch.testing.assert_close(found, model(ids[rows], attention_mask=mask[rows]).logits[:, 4:])
    refused("cannot go back|crop", twin.crop, 1)
    twin.reset()
    assert twin.get_seq_length() == 0 and not twin.is_initialized and not twin.is_croppable
    torch.testing.assert_close(model(ids, past_key_values=twin).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["batch", "sum", "action", "token"])
@pytest.mark.parametrize("name", [*RNNGS, *TREE_LMS])
def test_loss_is_the_joint_probability(name: str, kind: str) -> None:
    model, inputs = build(name, loss_normalization=kind), batch(name)
    output = model(**inputs)
    counts = {"action": int((inputs["actions"] != 0).sum()), "token": int(inputs["attention_mask"].sum()), "batch": 3}
    torch.testing.assert_close(output.loss, -output.joint_log_prob.sum() / counts.get(kind, 1))
    torch.testing.assert_close(sum(output.losses.values()), output.loss.detach())
    assert not any(part.requires_grad for part in (*output.losses.values(), output.joint_log_prob))
    assert output.logits is output.action_logits is output.token_logits_given_tree is None
    labels = inputs["input_ids"].clone()
    labels[:, 0] = -100
    assert model(**inputs, labels=labels).loss < output.loss


# ------------------------------------------------------------------------------------------------------ gradients
@every_model
def test_every_parameter_gets_a_gradient(name: str) -> None:
    """Distributed training waits for all of them: also where a sentence has one word, and in parts that are idle."""
    model = build(name).train()
    # Heads of supervised distances have nothing to learn here, and one span has all the attention.
    idle = ("split_head", "distance_heads", "supervised_head")
    idle += ("attention.score", "attention.key", "attention.query") if name == "palm, one span" else ()
    short = ((2,), (1,)) if name in SEARCHING else ((2,),) if name in PCFGS else ()
    for lengths in ((9, 4, 6), *short):
        for key, gradient in gradients(model, model(**labeled(name, *lengths)).loss).items():
            assert gradient is not None and torch.isfinite(gradient).all(), key
            assert name in SEARCHING or gradient.any() != any(part in key for part in idle), key


@pytest.mark.parametrize("name", ["on_lstm, split head", "on_lstm, hidden", "prpn, syd"])
def test_every_parameter_of_a_classifier_gets_a_gradient(name: str) -> None:
    """Heads of supervised distances, too, which no class depends on."""
    model = build(name, "ForSequenceClassification").train()
    model(torch.randint(3, 20, (2, 5)), labels=torch.tensor([0, 1])).loss.backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


@every_network
@pytest.mark.parametrize("kind", ["Model", "ForCausalLM", "ForSequenceClassification"])
def test_outputs_begin_with_the_rows(name: str, kind: str) -> None:
    """DataParallel gathers, and pipelines slice, tensors whose first dimension is the batch."""
    if kind == "ForSequenceClassification" and name in ("lstm", "urnng", "pushdown", *PCFGS):
        return
    inputs, options = batch(name), {"output_hidden_states": True} if name in RECURRENT else {}
    rows = len(inputs["input_ids"])
    if kind != "Model":
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        inputs["labels"] = labels if kind == "ForCausalLM" else torch.zeros(rows, dtype=torch.long)
    for key, value in build(name, kind)(**inputs, **options).items():
        parts = value.values() if key == "losses" else value if isinstance(value, tuple) else [value]
        for part in parts:
            assert isinstance(part, Tensor) and (part.dim() == 0 if "loss" in key else len(part) == rows), key


@every_model
def test_input_that_is_no_batch_of_ids(name: str) -> None:
    """A row, texts of no token, and a text."""
    model = build(name)
    for options in ({}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=r"shape \(3,\). Give \[batch, tokens\]"):
            model.generate(torch.tensor([3, 4, 5]), max_new_tokens=2, **options)
    calls = [model, model.generate, *([model.parse] if name in (*SEARCHING, *PCFGS, *WITH_TREES) else [])]
    for call in calls:
        refused(r"\[1, 0\] hold no token", call, torch.zeros(1, 0))
    for parse in calls[2:]:
        refused(r"is a str.*parse\(\*\*tokenizer", parse, "We ask")


@pytest.mark.parametrize("name", [*RNNGS, "pcfg", "pcfg, compound", *ARCHITECTURES])
def test_backward_twice_and_frozen_parts(name: str) -> None:
    model, inputs = build(name, **without_dropout(name)), labeled(name, 6, 6)
    loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    once = {key: p.grad.clone() for key, p in model.named_parameters()}
    loss.backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[key])
    for frozen, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()
        found = {key: p.grad for key, p in model.named_parameters()}
        torch.testing.assert_close(found, {**once, frozen: None})
        parameter.requires_grad_(True)


# ---------------------------------------------------------------------------------------------------------- types
@every_model
def test_other_types(name: str) -> None:
    """float64 agrees; autocast and weights of half precision give finite gradients and log-probabilities."""
    inputs = labeled(name, 9, 4)
    fields = {**without_dropout(name), **(without_penalties(name) if name in RECURRENT else {})}
    model = build(name, **fields).train()
    loss = model(**inputs).loss.item()
    assert build(name, **fields).double().train()(**inputs).loss.item() == pytest.approx(loss, rel=1e-5)
    tolerance = 0.02 if name in RNNGS else 0.05 if name == "gpst" else 0.1
    half = build(name, **fields).bfloat16().train()
    results = [(half, half(**inputs).loss)]
    is_float16 = name.startswith(("on_lstm", "prpn"))  # on CPUs, PyTorch has no LSTM in float16
    for dtype in (torch.bfloat16, torch.float16) if is_float16 else (torch.bfloat16,):
        model = build(name, **fields).train()
        with torch.autocast("cpu", dtype=dtype):
            results.append((model, model(**inputs).loss))
        assert results[-1][1].item() == pytest.approx(loss, rel=tolerance)
    for model, loss in results:
        for key, gradient in gradients(model, loss).items():
            assert gradient.isfinite().all() and gradient.dtype == next(model.parameters()).dtype, key
    text, model, half = (inputs[key] for key in ("input_ids", "attention_mask")), model.eval(), half.eval()
    ids, mask = text
    if name in SEARCHING:
        trees = [one.parse(ids, mask).log_probs for one in (build(name), build(name).double(), half)]
        torch.testing.assert_close(trees[1], trees[0], atol=1e-4, rtol=0)
        assert trees[2].dtype == torch.float32 and trees[2].isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [model(ids, mask).logits, half(ids, mask).logits]
        if name.startswith(("palm", "awd_lstm", "lstm")):  # whose layers run in the type of their weights
            assert model.model(inputs["input_ids"]).last_hidden_state.dtype == torch.float32
    for logits in found:
        possible = logits if name in RECURRENT else logits[~logits.isneginf()]
        assert possible.isfinite().all() and logits.dtype == torch.float32


# ----------------------------------------------------------------------------------------------------- vocabulary
@pytest.mark.parametrize("subwords", [False, True])
@pytest.mark.parametrize("name", [*RNNGS, *TREE_LMS])
def test_the_vocabulary_grows_and_shrinks(name: str, subwords: bool, tmp_path: Any) -> None:
    """With it, what the model knows of word pieces; of the other architectures, transformers' own tests do it."""
    model, inputs = build(name, subwords=subwords), batch(name, pieces=subwords)
    if subwords:
        model.model.word_final[4] = False
    before = model(**inputs, output_logits=True)
    model.resize_token_embeddings(25)
    after = model(**inputs, output_logits=True)
    size = model.config.system.first_nonterminal if name in TREE_LMS else 0
    torch.testing.assert_close(after.action_logits[..., size:], before.action_logits[..., size:])
    torch.testing.assert_close(after.token_logits_given_tree[..., :19], before.token_logits_given_tree)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded(**inputs).loss, after.loss) and loaded(inputs["input_ids"]).logits.shape[2] == 25
    model.resize_token_embeddings(10)
    if subwords:
        assert loaded.model.word_final.tolist() == [k != 4 for k in range(25)]
        assert model.model.word_final.tolist() == [k != 4 for k in range(10)]


@pytest.mark.parametrize("name", ["gpst", "gpst, pieces", *(f"{name}, pieces" for name in RNNGS), *TREE_LMS])
def test_trees_of_one_text_share_their_beginnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their probabilities are those one by one, as exact as the model; the layers read each distinct beginning once."""
    name, _, pieces = name.partition(", pieces") if "pieces" in name else (name, "", None)
    model, sizes = build(name).double(), list[int]()
    base, ids, ends = model.model, torch.tensor([[7, 9, 8, 10, 6]]), torch.ones(1, 5, dtype=torch.bool)
    ends[0, 1] = pieces is None
    wide = {"num_beams": 30, "num_return_sequences": 30} | ({} if name == "gpst" else {"action_beam_size": 60})
    found = model.parse(ids, word_ends=ends, **wide)
    actions = found.actions[0, : len(found.spans[0])].repeat(2, 1)
    ids, ends = ids.expand(len(actions), -1), ends.expand(len(actions), -1)
    trees: dict[str, Any] = {"spans": found.spans[0] * 2} if name == "gpst" else {"actions": actions}
    trees |= {} if pieces is None else {"word_ends": ends}
    apart = model(ids, **trees).joint_log_prob
    if name == "gpst":
        for layers in (base.type_layers, base.token_layers):
            layers.h[0].mlp.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[:2].numel()))
    elif name in RNNGS:
        sizes.append(sum(base.make_plan(actions, torch.ones_like(ends), ends, shared=True).sizes))
    else:
        decode = base.decode
        count = lambda x, *more, **options: sizes.append(x.shape[:2].numel()) or decode(x, *more, **options)  # noqa: E731
        monkeypatch.setattr(base, "decode", count)
    together = model.joint_log_probs(ids, **trees)
    torch.testing.assert_close(together, apart, rtol=1e-8, atol=0)
    assert together.dtype == torch.float64
    rows = [[action for action in row if action >= (name != "gpst")] for row in actions.tolist()]
    beginnings = {tuple(row[:end]) for row in rows for end in range(len(row) + (name in TREE_LMS))}
    twice = sum(row[-1:] == (2,) for row in beginnings) if name == "tree_lm" else 0  # its constituents are read twice
    assert set(sizes) == {len(beginnings) + twice} and len(beginnings) < sum(map(len, rows)) / 2
