"""Normalized attention entropy of Tree LM: head by head, of given trees and over a beam."""

import pytest
import torch

from hf_synlm.search.parsing import read_text, start_state
from tests.helpers.refusals import refused
from tests.models.tree_lm.test_modeling_tree_lm import LENGTHS, STRUCTURES, TOLERANCE, batch, tiny
from tests.reference.tree_lm import attention_entropies


@pytest.fixture(params=STRUCTURES)
def structure(request):
    return request.param


@pytest.mark.parametrize("kind", ["projected", "raw"])
@torch.no_grad()
def test_given_trees_head_by_head(structure, kind):
    """Sentences of one word among longer ones, padding on both sides."""
    model = tiny(structure_attention=structure)
    for left in (False, True):
        given = batch(left=left, structure=structure)
        found = model.train().attention_entropy(**given, kind=kind)
        assert model.training and found.shape == given["input_ids"].shape
        mask = given["attention_mask"].bool()
        assert not found[~mask].any() and found.min() >= 0 and found.max() < model.config.num_attention_heads
        for row, length in enumerate(LENGTHS):
            words = given["input_ids"][row][mask[row]].tolist()
            taken = [action for action in given["actions"][row].tolist() if action]
            expected = attention_entropies(model.eval(), taken, words, kind)
            assert len(expected) == length
            assert torch.allclose(found[row][mask[row]], torch.tensor(expected), **TOLERANCE)
    implementation = getattr(model.model, "backbone", model).config._attn_implementation
    assert implementation == "sdpa" or structure not in ("gpt2", "qwen3")


@pytest.mark.parametrize("kind", ["projected", "raw"])
@torch.no_grad()
def test_beams_are_averaged_after_every_word(structure, kind):
    """A derivation in the beam after a word counts by its probability so far; nothing depends on later words."""
    model = tiny(structure_attention=structure)
    given = batch(lengths=[5, 1, 3], structure=structure)
    ids, mask = given["input_ids"], given["attention_mask"]
    parsed, plain = (model.parse(ids, mask, num_beams=3, attention_entropy=k) for k in (kind, None))
    assert torch.equal(parsed.token_log_probs, plain.token_log_probs) and plain.attention_entropy is None
    assert not parsed.attention_entropy[~mask.bool()].any()
    for row, length in enumerate([5, 1, 3]):
        for count in range(1, length + 1):
            search = model.word_search(3)
            state = read_text(search, *start_state(search, ids[row : row + 1, :count], None))
            nodes = state.pool.derivations(state.nodes)
            words = ids[row, :count].tolist()
            entropies = [
                attention_entropies(model, [a for a in actions if a > 0], words, kind)[-1]
                for actions in nodes.action[0].tolist()
            ]
            expected = (state.scores.softmax(1)[0] * torch.tensor(entropies)).sum()
            assert torch.allclose(parsed.attention_entropy[row, count - 1], expected, **TOLERANCE)


def test_unknown_kinds_are_refused():
    model = tiny()
    with pytest.raises(ValueError, match="attention_entropy 'both' is unknown. Choose 'projected' or 'raw'"):
        model.attention_entropy(**batch(), kind="both")
    refused("attention_entropy 'both' is unknown", model.parse, torch.tensor([[3, 4]]), attention_entropy="both")
