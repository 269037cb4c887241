"""Given derivations: RNNG against one stack machine per sentence, the forest LSTM, and what plans list."""

import random

import pytest
import torch

from hf_synlm import RNNGConfig, RNNGForCausalLM
from hf_synlm.evaluation.trees.baseline_trees import random_tree
from hf_synlm.models.rnng.forest_lstm import forest_lstm
from hf_synlm.models.rnng.plan import make_plan
from hf_synlm.trees.transitions import TransitionSystem
from tests.helpers.search_models import padded, varied
from tests.reference.rnng import naive_derivation, naive_log_prob, over_pieces, random_labeled_tree, random_word_ends

SYSTEMS = [(system, composition) for system in ("top_down", "in_order") for composition in ("lstm", "attention")]
NUM_LABELS, VOCAB_SIZE = 3, 19
TIGHT = {"rtol": 1e-9, "atol": 1e-10}


def make_model(system="top_down", composition="lstm", **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "embedding_size": 6, "hidden_size": 7, "nonterminals": ["NP", "S", "VP"]}
    options = {"transition_system": system, "composition": composition, "dropout": 0.0, "loss_normalization": "sum"}
    return varied(RNNGForCausalLM(RNNGConfig(**{**sizes, **options, **fields})).double(), 0.2)


def draw(system, lengths, pieces=False, seed=0):
    """Sentences with random trees: rows of tokens, derivations, and word ends."""
    generator = random.Random(seed)
    transition = TransitionSystem(system, NUM_LABELS)
    rows = []
    for length in lengths:
        ends = random_word_ends(generator, length) if pieces else [True] * length
        if system == "binary":
            spans = [(generator.randrange(NUM_LABELS), i, j) for i, j in random_tree(length, generator)]
        else:
            spans = random_labeled_tree(generator, length, NUM_LABELS)
        spans = over_pieces(spans, ends)
        tokens = [generator.randrange(1, VOCAB_SIZE) for _ in ends]
        rows.append((tokens, transition.spans_to_actions(spans, len(ends), ends), ends))
    return rows


def batch_of(rows, left=False):
    tokens, actions, ends = zip(*rows, strict=True)
    ids, mask = padded(tokens, left, fill=0)
    ends = padded(ends, left, fill=0)[0].bool()
    return {"input_ids": ids, "attention_mask": mask, "actions": padded(actions, False, fill=0)[0], "word_ends": ends}


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("system", "composition"), SYSTEMS)
def test_values_and_gradients_are_those_of_one_stack_machine(system, composition, layers, pieces):
    model = make_model(system, composition, num_layers=layers)
    rows = draw(system, [1, 9, 4, 1, 13, 2], pieces, seed=layers)
    batch = batch_of(rows, left=pieces)
    output, states = model(**batch, output_logits=True), model.model(**batch).sentence_state
    weight = torch.randn_like(states)
    (output.loss + (states * weight).sum()).backward()
    mine = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    total, at_states, parts = 0.0, 0.0, [0.0, 0.0]
    for row, (tokens, actions, ends) in enumerate(rows):
        action_logits, word_logits, state = naive_derivation(model, tokens, actions, ends)
        torch.testing.assert_close(states[row], state, **TIGHT)
        at_states = at_states + (state * weight[row]).sum()
        torch.testing.assert_close(output.action_logits[row, : len(actions)], action_logits, **TIGHT)
        kept = batch["attention_mask"][row].bool()
        torch.testing.assert_close(output.token_logits_given_tree[row, kept], word_logits, **TIGHT)
        assert not output.action_logits[row, len(actions) :].any()
        assert not output.token_logits_given_tree[row, ~kept].any()
        action, word = naive_log_prob(model, tokens, actions, word_ends=ends)
        torch.testing.assert_close(output.joint_log_prob[row], action + word, **TIGHT)
        total, parts = total - action - word, [parts[0] - action.item(), parts[1] - word.item()]
    (total + at_states).backward()
    torch.testing.assert_close(output.loss, total, **TIGHT)
    assert [output.losses[name].item() for name in ("action", "word")] == pytest.approx(parts, rel=1e-9)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max() + 1e-6
        torch.testing.assert_close(mine[name] / scale, parameter.grad / scale, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("composition", ["lstm", "attention"])
def test_bare_model_shows_the_state_around_every_word(composition):
    model = make_model("in_order", composition)
    rows = draw("in_order", [6, 2], seed=3)
    output = model.model(**batch_of(rows, left=True))
    heads = model.action_head(output.action_hidden_state)
    for row, (tokens, actions, _) in enumerate(rows):
        logits, _, _ = naive_derivation(model, tokens, actions)
        torch.testing.assert_close(heads[row, : len(actions)], logits, **TIGHT)
        after = [step + 1 for step, action in enumerate(actions) if action == 1]
        mine = model.action_head(output.last_hidden_state[row, -len(tokens) :])
        torch.testing.assert_close(mine, logits[after], **TIGHT)
        assert not output.last_hidden_state[row, : -len(tokens)].any()


@pytest.mark.parametrize("composition", ["lstm", "attention"])
def test_dropout_between_layers_leaves_the_recurrent_state(composition, monkeypatch):
    """In training the next layer reads the dropped state, the next push the whole one."""
    model = make_model("top_down", composition, num_layers=3, dropout=0.5)
    model.eval()
    model.model.stack_lstm.train()
    kept = torch.tensor([0.0, 2.0, 2.0, 0.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    rows = draw("top_down", [7, 3], seed=5)
    # The same units are dropped at every push, so that the reference can do it, too.
    monkeypatch.setattr(
        "torch.nn.functional.dropout", lambda x, p, training, inplace=False: x * kept if training else x
    )
    output = model(**batch_of(rows), output_logits=True)
    for row, (tokens, actions, _) in enumerate(rows):
        logits, _, _ = naive_derivation(model, tokens, actions, between=lambda state: state * kept)
        torch.testing.assert_close(output.action_logits[row, : len(actions)], logits)


# ------------------------------------------------------------------------------------------------------ forest LSTM
@pytest.mark.parametrize("directions", [1, 2])
def test_compiled_levels_are_the_same_and_new_batches_need_no_graphs(directions):
    graphs, counts, size = [], [], 3
    options = {"backend": lambda graph, inputs: graphs.append(graph) or graph}
    for rows in (2, 3, 4, 5):
        sizes = [4 * rows, 3 * rows, 2 * rows, rows]
        parents = [None if directions == 2 else torch.randint(sizes[k], (sizes[k + 1],)) for k in range(3)]
        gates = torch.randn(directions, sum(sizes), 4 * size, requires_grad=True)
        weight = torch.randn(directions, 4 * size, size, requires_grad=True)
        upstream, found = torch.randn(directions, sum(sizes), size), []
        for compile_options in (None, options):
            states = forest_lstm(gates, weight, sizes, parents, compile_options)
            found.append([*states, *torch.autograd.grad(states[0], [gates, weight], upstream)])
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
        counts.append(len(graphs))
    assert 0 < counts[0] <= 8 and counts[1:] == counts[1:2] * 3, counts


# --------------------------------------------------------------------------------------------------------- plans
def plan_of(rows, system, **options):
    words, actions, ends = ([row[part] for row in rows] for part in range(3))
    options |= {"transition_system": system, "num_labels": NUM_LABELS, "num_words": [*map(len, words)]}
    return make_plan(actions, word_ends=ends, **options)


@pytest.mark.parametrize("system", ["top_down", "in_order"])
def test_random_changes_of_derivations_are_refused_as_the_transition_system_does(system):
    """A changed sequence is a derivation of the tokens for both, or for neither."""
    generator, transition = random.Random(4), TransitionSystem(system, NUM_LABELS)
    accepted = 0
    for number in range(400):
        ((tokens, actions, ends),) = draw(system, [generator.randint(1, 4)], pieces=number % 2 == 0, seed=number)
        changed = list(actions)
        for _ in range(generator.randint(1, 2)):
            place = generator.randrange(len(changed))
            match generator.randrange(3):
                case 0:
                    changed[place] = generator.randrange(1, transition.num_actions)
                case 1:
                    changed.insert(place, generator.randrange(1, transition.num_actions))
                case _ if len(changed) > 1:
                    del changed[place]
        results = []
        for check in (
            lambda: transition.actions_to_spans(changed, ends),  # noqa: B023
            lambda: plan_of([(tokens, changed, ends)], system),  # noqa: B023
        ):
            try:
                check()
                results.append(True)
            except ValueError:
                results.append(False)
        assert results[0] == results[1], (changed, ends, results)
        accepted += results[0]
    assert 10 < accepted < 390
