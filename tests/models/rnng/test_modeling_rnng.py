"""RNNG as a model of transformers: the contract of `forward` and `parse`, bad input, options, saving, training."""

import copy
import math
import pickle
import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_synlm import RNNGConfig, RNNGForCausalLM, RNNGForSequenceClassification, RNNGModel
from hf_synlm.models.rnng.plan import make_plan
from hf_synlm.trees.transitions import TransitionSystem
from tests.helpers.refusals import refused
from tests.helpers.search_models import varied
from tests.models.rnng.test_rnng_derivations import SYSTEMS, batch_of, draw
from tests.reference.rnng import naive_log_prob

TINY = {
    "vocab_size": 19, "embedding_size": 8, "hidden_size": 10, "num_layers": 2, "nonterminals": ["NP", "S", "VP"],
    "scoring_num_beams": 4, "action_beam_size": 12, "dropout": 0.0,
}  # fmt: skip
LENGTHS = [7, 1, 4, 10, 2]
FLAT = {"top_down": [3, 1, 1, 2], "in_order": [1, 4, 1, 2, 3]}
IDS, ACTIONS = torch.tensor([[5, 6, 7]]), torch.tensor([[3, 1, 4, 1, 1, 2, 2]])


def tiny(cls=RNNGForCausalLM, **overrides):
    torch.manual_seed(0)
    return varied(cls(RNNGConfig(**{**TINY, **overrides})), 0.1).eval()


def batch(system="top_down", lengths=LENGTHS, pieces=False, left=False, words=False):
    values = batch_of(draw(system, lengths, pieces, seed=1), left)
    return values if pieces or words else {k: v for k, v in values.items() if k != "word_ends"}


# ----------------------------------------------------------------------------------------------------- configuration
@pytest.mark.parametrize("x", [None, 0.1])
def test_initialization(x):
    model = RNNGForCausalLM(RNNGConfig(**{**TINY, "embedding_size": 64, "hidden_size": 48, "initializer_range": x}))
    words = model.model.embed_tokens.weight
    expected = {None: 1.0, 0.1: 0.1 / math.sqrt(3)}[x]
    assert words[1:].std().item() == pytest.approx(expected, rel=0.1)
    assert bool(words[0].any()) == (x is not None)
    recurrent = model.model.stack_lstm.cells[0].weight_hh
    assert recurrent.abs().max() <= (48**-0.5 if x is None else x)
    assert recurrent.std().item() == pytest.approx((48**-0.5 if x is None else x) / math.sqrt(3), rel=0.1)
    assert model.model.initial_element.std().item() == pytest.approx(expected, rel=0.4)


# ------------------------------------------------------------------------------------------------ given derivations
def test_a_missing_mask_is_inferred():
    model = tiny()
    for left in (False, True):
        values = batch(left=left)
        mask = values.pop("attention_mask")
        assert torch.equal(model(**values).joint_log_prob, model(**values, attention_mask=mask).joint_log_prob)
        ids = values["input_ids"]
        assert torch.equal(model.parse(ids).log_probs, model.parse(ids, mask).log_probs)


def test_a_begin_token_is_no_word():
    model = tiny(bos_token_id=1)
    with_begin = torch.tensor([[1, 5, 6, 7]])
    assert torch.equal(model(with_begin, actions=ACTIONS).loss, model(IDS, actions=ACTIONS).loss)
    spans = model.parse(IDS).spans[0][0]
    assert model.parse(with_begin).spans[0][0] == [(i + 1, j + 1) for i, j in spans]


def test_labels_mask_the_word_loss_only():
    model = tiny(loss_normalization="sum")
    values = batch()
    whole = model(**values)
    labels = values["input_ids"].masked_fill(values["attention_mask"] == 0, -100)
    same = model(**values, labels=labels)
    unmasked = model(**values, labels=values["input_ids"])
    assert torch.equal(same.loss, whole.loss) and torch.equal(unmasked.loss, same.loss)
    labels[:, 0] = -100
    part = model(**values, labels=labels)
    logits = model(**values, output_logits=True).token_logits_given_tree[:, 0].log_softmax(-1)
    first = logits.gather(1, values["input_ids"][:, :1]).sum()
    torch.testing.assert_close(part.losses["word"], whole.losses["word"] + first.detach())
    assert torch.equal(part.losses["action"], whole.losses["action"])
    torch.testing.assert_close(part.joint_log_prob, whole.joint_log_prob)
    model.zero_grad()
    model(**values, labels=torch.full_like(labels, -100)).loss.backward()
    assert not model.lm_head.bias.grad.any() and model.action_head.bias.grad.any()


@pytest.mark.parametrize(("system", "composition"), SYSTEMS)
def test_a_plan_made_ahead_changes_nothing(system, composition):
    model = tiny(transition_system=system, composition=composition)
    values = batch(system, pieces=True)
    mask = values["attention_mask"].bool()
    expected = model(**values)
    plan = model.model.make_plan(values["actions"], mask, values["word_ends"])
    taken = [[action for action in row if action] for row in values["actions"].tolist()]
    ends = [row[kept].tolist() for row, kept in zip(values["word_ends"], mask, strict=True)]
    sizes = {"num_labels": 3, "num_words": mask.sum(1).tolist(), "by_level": composition == "lstm"}
    by_hand = make_plan(taken, transition_system=system, word_ends=ends, **sizes)
    _, (_, flat) = plan.__reduce__()
    assert flat.dim() == 1 and flat.dtype == torch.long  # plans travel between processes as one tensor
    assert plan.to("cpu") is plan and plan.to("meta").final.device.type == "meta"
    for made in (plan, by_hand, pickle.loads(pickle.dumps(plan))):
        output = model(**values, plan=made)
        assert torch.equal(output.loss, expected.loss)
        assert torch.equal(output.joint_log_prob, expected.joint_log_prob)
    refused("other actions", model, **{k: v[:1] for k, v in values.items()}, plan=plan)
    refused("other actions", model, **{k: v.flip(0) for k, v in values.items()}, plan=plan)


def test_a_search_in_half_precision_keeps_its_digits():
    """Tanh by a sigmoid would lose them near 0: errors were eight times as large."""
    errors = []
    for seed in range(3):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 200, "embedding_size": 64, "hidden_size": 64, "action_beam_size": 20}
        model = varied(RNNGForCausalLM(RNNGConfig(**{**TINY, **sizes}, normalization="train")).eval(), 0.05)
        exact, ids = copy.deepcopy(model.half()).double(), torch.randint(1, 200, (2, 20))
        found = model.parse(ids, num_beams=5)
        errors.append(found.log_probs[:, 0].double() - exact(ids, actions=found.actions[:, 0]).joint_log_prob)
    assert torch.cat(errors).abs().mean() < 1e-3


@pytest.mark.parametrize("shape", ["right", "left", "unary"])
@pytest.mark.parametrize(("system", "composition"), SYSTEMS)
def test_deep_trees(system, composition, shape):
    """Depth 120, which the authors' in-order stack does not hold."""
    depth = 120
    spans = {
        "right": [(k % 3, depth - 1 - k, depth) for k in range(depth)],
        "left": [(k % 3, 0, k + 1) for k in range(depth)],
        "unary": [(k % 3, 0, 2) for k in range(depth)],
    }[shape]
    length = 2 if shape == "unary" else depth
    model = tiny(transition_system=system, composition=composition, loss_normalization="sum").train()
    actions = TransitionSystem(system, 3).spans_to_actions(spans, length)
    tokens = [random.randrange(1, 19) for _ in range(length)]
    output = model(torch.tensor([tokens]), actions=torch.tensor([actions]))
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    expected = sum(naive_log_prob(model.eval(), tokens, actions))
    torch.testing.assert_close(-output.loss, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("composition", ["lstm", "attention"])
def test_dropout_is_seeded_and_off_in_evaluation(composition):
    model = tiny(composition=composition, dropout=0.4)
    values = batch()
    assert torch.equal(model(**values).loss, model(**values).loss)
    model.train()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(**values).loss)
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    losses[2].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    ids, mask = values["input_ids"], values["attention_mask"]
    assert torch.equal(model.parse(ids, mask).log_probs, model.eval().parse(ids, mask).log_probs)


# --------------------------------------------------------------------------------------------------- parse and logits


# ------------------------------------------------------------------------------------------------------------ saving
def test_what_the_model_knows_of_word_pieces():
    model = tiny(subwords=True, transition_system="in_order")
    model.model.word_final[5] = False
    ids = torch.tensor([[5, 6, 7]])
    actions = torch.tensor([[1, 1, 4, 1, 2, 3]])  # both pieces of the first word are the left corner
    given = model(ids, actions=actions, word_ends=torch.tensor([[False, True, True]])).loss
    assert torch.equal(model(ids, actions=actions).loss, given)
    refused("between the pieces of a word", model, ids, actions=torch.tensor([[1, 4, 1, 1, 2, 3]]))
    for tree in model.parse(ids, num_return_sequences=4).spans[0]:
        assert not any(edge == 1 for span in tree for edge in span)


# ------------------------------------------------------------------------------------------------------ classification
@pytest.mark.parametrize(("system", "composition"), SYSTEMS)
def test_classifier(system, composition, tmp_path):
    system_of = {"transition_system": system, "composition": composition}
    model = tiny(RNNGForSequenceClassification, **system_of, num_labels=3, objective_weight=1)
    values = batch(system, lengths=[4, 1, 6])
    given = model(**values)
    torch.testing.assert_close(given.logits, model.score(model.model(**values).sentence_state))
    found = model(values["input_ids"], attention_mask=values["attention_mask"])
    language_model = RNNGForCausalLM(model.config).eval()
    language_model.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("score")})
    best = language_model.parse(values["input_ids"], values["attention_mask"]).actions[:, 0]
    torch.testing.assert_close(found.logits, model(**{**values, "actions": best}).logits)
    labels = torch.tensor([0, 2, 1])
    trained = model.train()(**values, labels=labels)
    trained.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert set(trained.losses) == {"classification", "action", "word"}
    torch.testing.assert_close(sum(trained.losses.values()), trained.loss.detach())
    expected = torch.nn.functional.cross_entropy(given.logits, labels)
    torch.testing.assert_close(trained.losses["classification"], expected.detach())
    language_model.save_pretrained(tmp_path)
    started = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(started.model.output.weight, model.model.output.weight)
    assert started(**values).logits.shape == (3, 3) and started.lm_head.weight is started.model.embed_tokens.weight


def test_classifier_regression_and_flat_trees():
    values = {"input_ids": torch.tensor([[5, 6]]), "actions": torch.tensor([FLAT["top_down"]])}
    model = tiny(RNNGForSequenceClassification, num_labels=1, objective_weight=1).train()
    model(**values, labels=torch.tensor([0.5])).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# ------------------------------------------------------------------------------------------------------------- tools


def test_no_graph_is_kept_without_gradients(monkeypatch):
    model, kept = tiny(composition="attention"), []
    plain = type(model.model.composition).forward
    monkeypatch.setattr(type(model.model.composition), "forward", lambda *args: kept.append(plain(*args)) or kept[-1])
    with torch.no_grad():
        model(**batch())
    assert kept and not any(value.requires_grad for value in kept)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_small_integers_are_token_ids(dtype):
    for pieces in (False, True):
        model = tiny(subwords=pieces)
        values = batch(pieces=pieces)
        expected = model(**values).joint_log_prob
        assert torch.equal(model(**{**values, "input_ids": values["input_ids"].to(dtype)}).joint_log_prob, expected)


# --------------------------------------------------------------------------------------------------------- bad input
TWO = torch.tensor([[5, 6, 7], [0, 0, 0]])


BAD_INPUT = [
    ({"input_ids": torch.tensor([[5, 6, 99]])}, "99"),
    ({"input_ids": torch.tensor([[5, 6, 3, 7]]), "attention_mask": torch.tensor([[1, 1, 0, 1]])}, "holes"),
    ({"input_ids": TWO, "actions": ACTIONS.repeat(2, 1)}, "Row 1 of input_ids has no token"),
    ({"actions": ACTIONS.repeat(2, 1)}, "for 1 rows"),
    ({"actions": torch.cat([ACTIONS, torch.tensor([[-1]])], 1)}, r"actions hold -1: ids below the padding .0. are"),
    ({"actions": torch.tensor([[0, 3, 1, 1, 1, 2]])}, "padding.*right end"),
    ({"actions": torch.tensor([[3, 1, 0, 1, 1, 2]])}, "padding.*right end"),
    ({"actions": torch.tensor([[3, 1, 1, 1]])}, "row 0.*Add the missing actions"),
    ({"actions": torch.tensor([[3, 1, 1, 1, 9, 2, 2]])}, "action 9 at position 4 is illegal"),
    ({"actions": torch.zeros(1, 4, dtype=torch.long)}, "row 0: the 0 actions stop with"),
    ({"word_ends": torch.ones(1, 2)}, "word_ends"),
    (
        {"word_ends": torch.tensor([[True, False, True]]), "actions": torch.tensor([[3, 1, 4, 1, 2, 1, 2]])},
        "row 0: action 2 at position 4.*pieces of a word",
    ),
    ({"labels": torch.tensor([[5, 6, 8]])}, "labels must be input_ids, or -100"),
    ({"actions": None, "labels": IDS}, "need actions"),
    ({"actions": None, "output_logits": True}, "need actions"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_named(arguments, message):
    refused(message, tiny(), **{"input_ids": IDS, "actions": ACTIONS, **arguments})


@pytest.mark.parametrize("cls", [RNNGModel, RNNGForSequenceClassification])
def test_bad_input_of_the_other_classes_is_named(cls):
    refused("word_ends .* need equal shapes", tiny(cls), IDS, actions=ACTIONS, word_ends=torch.ones(1, 2))
    if cls is RNNGForSequenceClassification:
        refused("Row 1", tiny(cls), TWO)


def test_padding_after_a_cache_is_no_begin_token():
    """Without a mask, id 0 right before a text is its begin token; where the text has begun, it is padding."""
    model = tiny()
    cache = model(torch.tensor([[3, 4]]), use_cache=True).past_key_values
    continued = model(torch.tensor([[0, 5]]), past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(continued, model(torch.tensor([[3, 4, 5]])).logits[:, -1])
