"""RNNG equals the authors' code on the stored cases: log-probabilities, states, losses, gradients, n-best trees."""

import pytest
import torch

from hf_synlm.conversion import convert_state_dict
from hf_synlm.conversion.rename import rename_state_dict
from hf_synlm.conversion.rnng import RULES
from hf_synlm.models.rnng.stack_machine import RNNGStackMachine
from tests.helpers.goldens import cases_of, read_case, read_tensors

CASES = cases_of("rnng")
BEAMS = [(10, 10, 1), (50, 10, 1), (100, 10, 5)]  # action beam, word beam, fast-track
TOLERANCE = {"rtol": 0, "atol": 1e-5}
SEARCH_TOLERANCE = {"rtol": 0, "atol": 1e-4}


def load(case):
    state, io, meta = read_case(f"rnng/{case}")
    config = {**meta["config"], "max_open_nts": meta["max_open_nts"], "max_cons_nts": meta["max_cons_nts"]}
    model = convert_state_dict("rnng", state, config)
    model.config.loss_normalization = "sum"
    ids = io["token_ids"]
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "word_ends": io["subword_end_mask"]}
    return model, batch, io, meta


@pytest.fixture(autouse=True)
def known_lengths(monkeypatch):
    """The scores of the authors, to whom the length of a sentence is known."""
    monkeypatch.setattr(RNNGStackMachine, "price_of_ends", lambda self, pool, nodes, count: torch.zeros(nodes.shape))


def test_all_cases_are_there():
    assert len(CASES) == 11
    configs = [read_case(f"rnng/{case}")[2]["config"] for case in CASES]
    assert {(config["strategy"], config["composition"]) for config in configs} == {
        (strategy, composition) for strategy in ("top_down", "in_order") for composition in ("lstm", "attention")
    }


@pytest.mark.parametrize("case", CASES)
def test_given_derivations(case):
    model, batch, io, _ = load(case)
    output = model(**batch, actions=io["action_ids"], output_logits=True)
    taken, tokens = io["action_ids"] != 0, io["token_ids"] != 0
    actions = output.action_logits.log_softmax(-1)
    torch.testing.assert_close(actions[taken], io["action_log_probs"][taken], **TOLERANCE)
    words = output.token_logits_given_tree.log_softmax(-1)
    torch.testing.assert_close(words[tokens], io["word_log_probs"][tokens], **TOLERANCE)
    gold = actions.gather(2, io["action_ids"][..., None]).squeeze(2)[taken]
    torch.testing.assert_close(gold, io["gold_action_log_prob"][taken], **TOLERANCE)
    torch.testing.assert_close(output.joint_log_prob, io["sent_log_likelihood"], rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(output.loss, io["loss"].squeeze(), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(sum(output.losses.values()), output.loss.detach())
    torch.testing.assert_close(output.losses["word"], -io["gold_word_log_prob"].sum(), rtol=1e-6, atol=1e-4)
    states = model.model(**batch, actions=io["action_ids"]).action_hidden_state
    torch.testing.assert_close(states[taken], io["context"][taken], **TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    model, batch, io, _ = load(case)
    model(**batch, actions=io["action_ids"]).loss.backward()
    theirs = rename_state_dict(read_tensors(f"rnng/{case}", "grads"), RULES)
    mine = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set(mine) == set(theirs)
    for name, gradient in mine.items():
        expected = theirs[name]
        if name == "model.initial_element":
            expected = expected.squeeze(0)
        elif len(expected) == len(gradient) + 1:  # a row of the in-order label tables that no action reads
            assert not expected[-1].any()
            expected = expected[:-1]
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item(), msg=name)


def compare_beams(output, io, prefix, rows):
    """Compare the n-best lists and surprisals of `parse` with those of some rows."""
    sequences, lengths, scores, surprisals = (
        io[prefix + name][rows] for name in ("nbest_actions", "nbest_action_lengths", "nbest_log_prob", "surprisals")
    )
    for row in range(len(rows)):
        count = int((lengths[row] > 0).sum())
        expected = [sequences[row, n, : lengths[row, n]].tolist() for n in range(count)]
        assert [[a for a in tree if a] for tree in output.actions[row, :count].tolist()] == expected
        assert output.log_probs[row, count:].isneginf().all() and len(output.spans[row]) == count
    present = lengths > 0
    found = output.log_probs[:, : present.shape[1]][present]
    torch.testing.assert_close(found, scores[present], **SEARCH_TOLERANCE)
    width = output.token_log_probs.shape[1]
    torch.testing.assert_close(-output.token_log_probs, surprisals[:, :width], **SEARCH_TOLERANCE)


def beam_options(beam):
    action_beam, word_beam, fast_track = beam
    sizes = {"action_beam_size": action_beam, "fast_track_size": fast_track}
    return {"num_beams": word_beam, "num_return_sequences": word_beam, **sizes}


def beam_prefix(beam):
    return "beam_k{}_w{}_s{}.".format(*beam)


@pytest.mark.parametrize("beam", BEAMS)
@pytest.mark.parametrize("case", CASES)
def test_beams_in_a_batch(case, beam):
    model, batch, io, _ = load(case)
    output = model.parse(**batch, **beam_options(beam))
    compare_beams(output, io, beam_prefix(beam), list(range(len(io["token_ids"]))))
    # The best tree, scored as in training.
    forced = model(**batch, actions=output.actions[:, 0]).joint_log_prob
    torch.testing.assert_close(forced, io[beam_prefix(beam) + "best_forced_log_likelihood"], **SEARCH_TOLERANCE)


@pytest.mark.parametrize("case", [case for case in CASES if "subword" in case])
def test_the_model_knows_which_tokens_end_words(case):
    model, batch, io, meta = load(case)
    ends = torch.ones(meta["config"]["vocab_size"], dtype=torch.bool)
    ends[io["token_ids"][~io["subword_end_mask"]]] = False
    model.model.word_final.copy_(ends)
    batch.pop("word_ends")
    output = model.parse(**batch, **beam_options(BEAMS[0]))
    compare_beams(output, io, beam_prefix(BEAMS[0]), list(range(len(io["token_ids"]))))
    given = model(**batch, actions=io["action_ids"]).joint_log_prob
    torch.testing.assert_close(given, io["sent_log_likelihood"], rtol=1e-6, atol=2e-5)


def test_particles():
    model, batch, io, _ = load("td_lstm_trained_L2")
    output = model.parse(**batch, method="particle", num_particles=100, num_return_sequences=100)
    expected = io["particle_K100.best_actions"]
    best = [[a for a in row if a > 0] for row in expected.tolist()]
    assert [[a for a in row if a] for row in output.actions[:, 0].tolist()] == best
    torch.testing.assert_close(output.log_probs[:, 0], io["particle_K100.best_log_prob"].flatten(), **SEARCH_TOLERANCE)
    torch.testing.assert_close(-output.token_log_probs, io["particle_K100.surprisals"], **SEARCH_TOLERANCE)
    assert (output.log_probs > -torch.inf).sum(1).tolist() == io["particle_K100.n_final"].flatten().tolist()
