"""Plain text before the begin token of a Tree LM on a backbone."""

import pytest
import torch

from tests.helpers.search_models import padded
from tests.models.tree_lm.test_modeling_tree_lm import TOLERANCE, tiny

CONTEXT, TEXT = [5, 6, 7, 3], [4, 8, 9]


def parse(model, rows, **options):
    """Token log-probabilities of the texts of rows (context, text), padded on the right."""
    ids, mask = padded([[*context, *text] for context, text in rows], left=False, fill=0)
    numbers, _ = padded([[1] * len(context) + [0] * len(text) for context, text in rows], left=False, fill=0)
    found = model.parse(ids, mask, context_sentence_ids=numbers, num_beams=50, action_beam_size=50, **options)
    return [found.token_log_probs[row, len(c) : len(c) + len(t)] for row, (c, t) in enumerate(rows)], found


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
@torch.no_grad()
def test_every_state_attends_to_the_context(kind):
    """The joint probability of a tree is that of the decoder on context, begin token and tree, one after the other."""
    model = tiny(structure_attention=kind)
    _, found = parse(model, [(CONTEXT, TEXT)], normalization="train")
    actions = found.actions[:, 0]
    base, text = model.model, torch.tensor([TEXT])
    plan = base.lay_out(text, actions, torch.ones_like(text, dtype=torch.bool), None)
    whole = torch.cat([base.embed(torch.tensor([CONTEXT])), base.embed(plan.tokens)], 1)
    hidden = base.backbone(inputs_embeds=whole).last_hidden_state[0, len(CONTEXT) :]
    logits = torch.cat([model.lm_head(hidden), model.label_head(hidden)], 1).log_softmax(1)
    expected = logits[:-1].gather(1, plan.tokens[0, 1:, None]).sum()
    assert torch.allclose(found.log_probs[0, 0], expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
@torch.no_grad()
def test_batches_and_order_change_nothing(kind):
    """An empty context is none; other contexts give other values; equal texts do not share what they read."""
    model = tiny(structure_attention=kind)
    rows = [(CONTEXT, TEXT), ([], TEXT), ([9, 4], TEXT), (CONTEXT, TEXT[:1]), ([9, 4, 8, 6], TEXT)]
    alone = [parse(model, [row])[0][0] for row in rows]
    plain = model.parse(torch.tensor([TEXT]), num_beams=50, action_beam_size=50).token_log_probs[0]
    assert torch.allclose(alone[1], plain, **TOLERANCE)
    assert torch.allclose(alone[0][:1], alone[3], **TOLERANCE)
    assert not torch.allclose(alone[0], plain, atol=1e-3) and not torch.allclose(alone[0], alone[2], atol=1e-3)
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 4]):
        together, _ = parse(model, [rows[k] for k in order])
        for place, k in enumerate(order):
            assert torch.allclose(together[place], alone[k], **TOLERANCE)


@pytest.mark.parametrize("structure", ["causal", "stack_compose", "binary"])
def test_context_needs_a_backbone(structure):
    with pytest.raises(ValueError, match="context_sentence_ids: TreeLMForCausalLM reads one sentence"):
        parse(tiny(structure_attention=structure), [(CONTEXT, TEXT)])
