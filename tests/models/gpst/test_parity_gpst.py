"""GPST equals the authors' code on the stored cases: charts, trees, states, losses and gradients."""

import pytest
import torch

from hf_synlm.conversion import convert_state_dict
from hf_synlm.conversion.gpst import RULES
from hf_synlm.conversion.rename import rename_state_dict
from tests.helpers.goldens import read_case, read_tensors

FORWARD = ["01_padded", "02_packed", "03_atoms", "04_window3", "05_grads", "06_no_surrogate", "07_hard"]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
LOSSES = {name: f"{name}_loss" for name in ("height", "parser", "action")}
LOSSES |= {"auto_encoding": "inside_outside_loss", "token": "gpt_loss"}


def without_dropout(model):
    """The goldens were made in training mode with every dropout at 0 and without noise on the merge order."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.config.merge_noise = 0.0
    return model.train()


def load(case):
    state, io, meta = read_case(f"gpst/{case}")
    model = convert_state_dict("gpst", state, meta)
    model.config.bos_token_id = None  # in these contexts the id is a word like any other
    word_ends = None
    if meta["atom_spans"]:
        word_ends = torch.ones_like(io["inputs/chunk_input_ids"], dtype=torch.bool)
        for row, spans in enumerate(meta["atom_spans"]):
            for first, last in spans:
                word_ends[row, first:last] = False
    labels = io["inputs/chunk_input_ids"]
    batch = {"input_ids": labels.clamp_min(0), "sentence_ids": io["inputs/chunk_masks"], "word_ends": word_ends}
    return without_dropout(model), batch, labels, io, meta


@pytest.mark.parametrize("case", FORWARD)
def test_losses(case):
    model, batch, labels, _, meta = load(case)
    output = model(**batch, labels=labels)
    for mine, theirs in LOSSES.items():
        assert output.losses[mine].item() == pytest.approx(meta["losses"][theirs], abs=1e-5), mine
    total = meta["losses"]["struct_loss"] + meta["losses"]["non_struct_loss"]
    assert output.loss.item() == pytest.approx(total, abs=2e-5)


@pytest.mark.parametrize(("variant", "key"), [("sentence", "height_loss_elementwise"), ("paper", "height_loss_paper")])
@pytest.mark.parametrize("case", ["04_window3", "05_grads"])
def test_other_height_losses(case, variant, key):
    model, batch, labels, _, meta = load(case)
    model.config.height_loss = variant
    assert model(**batch, labels=labels).losses["height"].item() == pytest.approx(meta["losses"][key], abs=1e-5)


@pytest.mark.parametrize("case", FORWARD)
def test_chart_trees_and_states(case):
    model, batch, _, io, _ = load(case)
    output = model.model(**batch, output_chart=True, output_spans=True, output_structure=True)
    chart = output.chart
    row, first = _sentence_starts(io)
    cell = {
        (row[s], first[s] + i, first[s] + j + 1): x
        for x, (s, i, j) in enumerate(zip(*(io[f"chart/cell_{k}"].tolist() for k in ("sent", "i", "j")), strict=True))
    }
    mine = list(zip(*(chart[k].tolist() for k in ("context", "start", "end")), strict=True))
    assert set(mine) == set(cell) and len(mine) == len(cell)
    order = torch.tensor([cell[x] for x in mine])
    level = torch.zeros(len(order), dtype=torch.long)
    for number, (begin, end, _) in enumerate(chart["levels"]):
        level[chart["num_leaves"] + begin : chart["num_leaves"] + end] = number + 1
    assert torch.equal(level, io["chart/cell_level"][order])
    for name in ("inside", "height", "outside"):
        torch.testing.assert_close(chart[name], io[f"chart/{name}"][order], **TOLERANCE)
    inner = torch.ones(len(order), dtype=torch.bool)
    inner[chart["root"]] = False
    torch.testing.assert_close(chart["outside_log_sum_exp"][inner], io["chart/outside_lse"][order][inner], **TOLERANCE)
    _compare_splits(chart, order, io)
    _compare_trees(output, io, row, first)
    _compare_states(model, output, io)


def _sentence_starts(io):
    row = io["inputs/group_ids"].tolist()
    length = io["inputs/masks"].sum(1).tolist()
    first, used = [], {}
    for r, n in zip(row, length, strict=True):
        first.append(used.get(r, 0))
        used[r] = first[-1] + n
    return row, first


def _compare_splits(chart, order, io):
    theirs = {
        (int(c), int(left)): score
        for c, left, score in zip(io["chart/comp_cell"], io["chart/comp_left"], io["chart/comp_score"], strict=True)
    }
    seen = 0
    for begin, end, width in chart["levels"]:
        for x in range(begin, end):
            for m in range(width):
                key = int(order[chart["num_leaves"] + x]), int(order[chart["left"][x, m]])
                torch.testing.assert_close(chart["split_score"][x, m], theirs[key], **TOLERANCE)
                seen += 1
    assert seen == len(theirs)


def _compare_trees(output, io, row, first):
    expected = {}
    for s, i, j in zip(*(io[f"tree/node_{k}"].tolist() for k in ("sent", "i", "j")), strict=True):
        if j > i:
            expected.setdefault(row[s], []).append((first[s] + i, first[s] + j + 1))
    for number, spans in enumerate(output.spans):
        assert spans == expected.get(number, [])


def _compare_states(model, output, io):
    structure = output.structure
    targets = io["gpt/target_ids"]
    width = structure.sequence.inputs.shape[1]
    valid = targets[:, :width] != -1
    assert torch.equal(structure.sequence.action_targets >= 0, valid) and not (targets[:, width:] != -1).any()
    reduce_id = model.config.reduce_token_id
    assert torch.equal(structure.sequence.action_targets[valid] == 1, targets[:, :width][valid] == reduce_id)
    torch.testing.assert_close(output.type_hidden_state[valid], io["gpt/type_hidden"][:, :width][valid], **TOLERANCE)
    actions = model.heads.action(output.type_hidden_state)
    torch.testing.assert_close(actions[valid], io["gpt/action_logits"][:, :width][valid], **TOLERANCE)
    tokens = io["inputs/chunk_masks"] != 0
    torch.testing.assert_close(output.token_hidden_state[:, :-1][tokens], io["gpt/token_hidden"][tokens], **TOLERANCE)
    logits = model.lm_head(model.heads.token(output.token_hidden_state))
    torch.testing.assert_close(logits[:, :-1][tokens], io["gpt/logits"][tokens], **TOLERANCE)
    after = torch.nn.functional.pad(tokens, (1, 0), value=True)  # the state after the last token, too
    torch.testing.assert_close(logits[after], io["eval/logits"][after], **TOLERANCE)
    leaves = model.lm_head(model.heads.auto_encoding(output.outside_vectors))
    torch.testing.assert_close(leaves, io["ae/logits"], **TOLERANCE)
    boundaries = (io["inputs/chunk_masks"][:, 1:] != 0) & (
        io["inputs/chunk_masks"][:, 1:] == io["inputs/chunk_masks"][:, :-1]
    )
    torch.testing.assert_close(output.parser_scores[boundaries], io["parser/scores"][boundaries], **TOLERANCE)


@pytest.mark.parametrize("case", FORWARD)
def test_merge_order_is_that_of_the_authors(case):
    model, batch, labels, io, _ = load(case)
    replayed = model(**batch, labels=labels, merge_order=io["parser/order"]).loss
    assert torch.equal(replayed, model(**batch, labels=labels).loss)


def _golden_gradients():
    stored = read_tensors("gpst/05_grads", "grads")
    parts = {}
    for part in ("struct", "non_struct"):
        prefix = f"grad_{part}/"
        own = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        parts[part] = rename_state_dict(own, RULES)
    return parts


def _compare_gradients(model, expected):
    for name, parameter in model.named_parameters():
        theirs = expected.get(name)
        if theirs is None:
            assert parameter.grad is None or parameter.grad.abs().max() < 1e-6, name
        elif theirs.abs().max() > 1e-6:  # the last bias of the parser has a zero gradient: rounding noise
            scale = theirs.abs().max()
            torch.testing.assert_close(parameter.grad / scale, theirs / scale, rtol=0, atol=1e-5, msg=name)


def test_one_backward_call_is_the_sum_of_the_authors_two():
    model, batch, labels, _, _ = load("05_grads")
    model(**batch, labels=labels).loss.backward()
    parts = _golden_gradients()
    names = set(parts["struct"]) | set(parts["non_struct"])
    _compare_gradients(model, {n: parts["struct"].get(n, 0) + parts["non_struct"].get(n, 0) for n in names})


@pytest.mark.parametrize("part", ["struct", "non_struct"])
def test_gradients_of_each_loss(part):
    model, batch, labels, _, _ = load("05_grads")
    for name in ("auto_encoding", "height"):
        setattr(model.config, f"{name}_loss_weight", 1.0 if part == "struct" else 0.0)
    for name, weight in (("parser", 1.0), ("token", 0.5), ("action", 1.0)):
        setattr(model.config, f"{name}_loss_weight", weight if part == "non_struct" else 0.0)
    model(**batch, labels=labels).loss.backward()
    _compare_gradients(model, _golden_gradients()[part])
