"""GPST as a model of transformers: the contract of `forward`, bad input, options, saving."""

import functools
import math

import pytest
import torch

from hf_synlm import GPSTConfig, GPSTForCausalLM, GPSTForSequenceClassification
from hf_synlm.trees.spans import right_branching
from tests.helpers import recurrent_models
from tests.helpers.refusals import raised, refused
from tests.helpers.search_models import GPST_TINY, varied
from tests.reference.trees import keeps_words_together

SIZES = {"hidden_size": 24, "composition_size": 12, "score_size": 6, "num_token_layers": 2, "num_composition_layers": 2}
SPECIAL = {"pad_token_id": 2, "reduce_token_id": 3, "cls_token_id": 4, "sep_token_id": 5}
TINY = GPST_TINY | SIZES | SPECIAL | {"scoring_num_beams": 4, "merge_noise": 0.0}
ids_of = functools.partial(recurrent_models.ids_of, padding=2, words=range(6, 40))
NO_DROPOUT = {
    f"{name}_dropout": 0.0
    for name in ("embedding", "residual", "attention", "composition", "composition_attention", "parser", "head")
}


def tiny(cls=GPSTForCausalLM, **overrides):
    torch.manual_seed(0)
    return varied(cls(GPSTConfig(**{**TINY, **overrides})), 0.1).eval()


def test_special_ids_are_refused_together_and_told_apart():
    refused("bos_token_id 50256, .*sep_token_id 50263: not in the .*from_tokenizer", GPSTConfig, vocab_size=8192)
    same = {f"{role}_token_id": 5 for role in ("bos", "eos", "pad", "reduce", "cls", "sep")}
    said = r"reduce_token_id 5 has the same id as bos_token_id.*from_tokenizer\(tokenizer"
    refused(said, GPSTConfig, **{**TINY, **same})
    refused("sep_token_id 5 has the same id as cls_token_id", GPSTConfig, **{**TINY, "cls_token_id": 5})
    with pytest.raises(ValueError, match="hidden_size 90 is not a multiple of num_attention_heads 12. Change one"):
        GPSTConfig(**{**TINY, "hidden_size": 90, "num_attention_heads": 12})


def test_leading_begin_token_is_the_beginning():
    model = tiny()
    ids, _ = ids_of(6)
    with_begin = torch.cat([torch.ones_like(ids[:, :1]), ids], 1)
    mine, other = (model(x, output_chart=True, output_spans=True) for x in (with_begin, ids))
    torch.testing.assert_close(mine.joint_log_prob, other.joint_log_prob)
    assert mine.spans == [[(i + 1, j + 1) for i, j in other.spans[0]]]
    assert torch.equal(model(with_begin, labels=with_begin).loss, model(ids, labels=ids).loss)


def test_labels_mask_the_token_loss_only():
    model = tiny()
    ids, _ = ids_of(8)
    labels = ids.clone()
    labels[0, :5] = -100
    part, whole = model(ids, labels=labels).losses, model(ids, labels=ids).losses
    assert part["token"] != whole["token"]
    for name in ("auto_encoding", "height", "parser", "action"):
        assert part[name] == whole[name]
    given = model(ids, output_chart=True).token_logits_given_tree.log_softmax(-1)
    torch.testing.assert_close(part["token"], -given[0, torch.arange(5, 8), ids[0, 5:]].mean())


def test_shifted_labels():
    model = tiny()
    ids, _ = ids_of(8)
    shifted = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    labels = ids.clone()
    labels[:, 0] = -100  # nothing before the first token predicts it in a shifted stream
    assert torch.equal(model(ids, shift_labels=shifted).loss, model(ids, labels=labels).loss)
    assert torch.equal(model(ids, labels=ids, shift_labels=shifted).loss, model(ids, shift_labels=shifted).loss)


def test_words_stay_whole():
    model = tiny()
    ids, _ = ids_of(12)
    word_ends = torch.ones_like(ids, dtype=torch.bool)
    word_ends[0, [2, 3, 7]] = False  # words (2..4), (7, 8)
    for method in ("inside", "mbr", "merge_order", "search"):
        output = model.parse(ids, word_ends=word_ends, method=method)
        spans = output.spans[0][0]
        assert len(spans) == 11
        assert keeps_words_together(spans, word_ends[0].tolist())
        words = "a b cde f g hi j k l".split()
        assert output.brackets(words).replace("(", "").replace(")", "").split() == words


@pytest.mark.parametrize("option", ["surrogate", "stop_structure_gradient"])
def test_ablations_change_what_they_should(option):
    ids, _ = ids_of(9)
    grads = {}
    for value in (True, False):
        model = tiny(**{option: value, **NO_DROPOUT}, auto_encoding_loss_weight=0.0, height_loss_weight=0.0)
        model.train()(ids, labels=ids).loss.backward()
        composition = model.model.composition
        grads[value] = (
            composition.left_score[0].weight.grad.abs().max() > 1e-8,
            composition.layers[0].linear1.weight.grad.abs().max() > 1e-8,
        )
    # Split scores learn from the language-modeling loss only without the stop; the composition does with the surrogate.
    assert grads == {True: (False, True), False: (False, False) if option == "surrogate" else (True, True)}


def test_noise_is_drawn_in_training_only():
    model = tiny(merge_noise=5.0, **NO_DROPOUT)
    ids, _ = ids_of(20)
    assert model.parse(ids, method="merge_order").spans == model.parse(ids, method="merge_order").spans
    model.train()
    assert len({model(ids, labels=ids).loss.item() for _ in range(4)}) > 1
    assert model.parse(ids, method="inside").spans == model.eval().parse(ids, method="inside").spans
    assert not model.training


def test_fresh_parameters_are_initialized_as_the_authors_do():
    torch.manual_seed(0)
    model = GPSTForCausalLM(GPSTConfig(**{**TINY, "composition_size": 64, "hidden_size": 128, "vocab_size": 2000}))
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.model.parser.embed_tokens.weight.std().item() == pytest.approx(1.0, rel=0.05)
    layers = model.model.composition.layers
    for first, second in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(first, second)
    assert model.model.root_embedding.min() >= 0 and model.model.root_embedding.max() <= 1
    attention = model.model.type_layers.h[0].attn.c_proj.weight
    assert attention.std().item() == pytest.approx(0.02 / math.sqrt(2), rel=0.1)


def test_classifier():
    model = tiny(GPSTForSequenceClassification, num_labels=3, objective_weight=1)
    text, pair = [10, 11, 12, 13, 4], [10, 11, 5, 12, 13, 14, 4]
    ids = torch.tensor([text + [2, 2], pair])
    mask = (ids != 2).long()
    output = model(ids, attention_mask=mask, output_spans=True)
    assert output.logits.shape == (2, 3)
    torch.testing.assert_close(output.logits[:1], model(torch.tensor([text])).logits)
    numbers = torch.tensor([[1, 1, 2, 3, 3, 3, 4]])
    assert output.spans[1] == model.model(ids[1:], sentence_ids=numbers, output_spans=True).spans[0]
    trained = model.train()(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    trained.loss.backward()
    assert "classification" in trained.losses and all(p.grad is not None for p in model.parameters())


THREE = torch.full((1, 3), 7)


BAD_INPUT = [
    ({"input_ids": torch.rand(2, 3)}, "integers"),
    ({"input_ids": torch.tensor([[7, 99]])}, "99"),
    ({"input_ids": torch.tensor([[1]])}, "no token"),
    ({"input_ids": torch.full((1, 65), 7)}, "65 tokens"),
    ({"input_ids": torch.full((1, 4), 7), "attention_mask": torch.tensor([[1, 0, 1, 1]])}, "holes"),
    ({"input_ids": torch.full((1, 4), 7), "sentence_ids": torch.tensor([[1, 1, 2]])}, "shape"),
    ({"input_ids": torch.full((1, 4), 7), "labels": torch.ones(1, 3)}, "labels"),
    ({"input_ids": torch.full((1, 3), 7), "labels": torch.tensor([[7, 40, 7]])}, "Label 40"),
    (
        {"input_ids": THREE, "spans": [[(0, 2), (0, 3)]], "word_ends": torch.tensor([[True, False, True]])},
        "cuts a word",
    ),
    ({"input_ids": torch.full((1, 3), 7), "spans": []}, "rows"),
    ({"input_ids": torch.full((1, 3), 7), "merge_order": torch.tensor([[0, 0]])}, "permutation"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_named(arguments, message):
    model = tiny()
    if not {"labels", "spans", "merge_order"} & set(arguments):
        arguments = {**arguments, "output_chart": True}
    refused(message, model, **arguments)


def test_unknown_method():
    refused("cky", tiny().parse, torch.tensor([[7, 8]]), method="cky")


def test_trees_of_one_two_and_three_tokens():
    model = tiny()
    for n in (1, 2, 3):
        ids, _ = ids_of(n)
        for method in ("inside", "mbr", "merge_order", "search"):
            spans = model.parse(ids, method=method).spans[0][0]
            assert len(spans) == n - 1 and ((0, n) in spans or n == 1)


def test_backward_twice_is_refused():
    ids, _ = ids_of(6)
    loss = tiny().train()(ids, labels=ids).loss
    loss.backward(retain_graph=True)
    raised(RuntimeError, "call forward again", loss.backward)
    model = tiny().train()
    loss = model(ids, labels=ids).loss
    with pytest.raises(RuntimeError):
        (gradient,) = torch.autograd.grad(loss, [model.model.down_scale.weight], create_graph=True)
        gradient.sum().backward()


def test_compiled_training_keeps_the_stopped_gradient():
    ids, _ = ids_of(4)  # every other shape is compiled anew, and every layer
    layers = {"num_token_layers": 1, "num_composition_layers": 1}
    grads = []
    for compiled in (False, True):
        model = tiny(**NO_DROPOUT, **layers, auto_encoding_loss_weight=0.0, height_loss_weight=0.0).train()
        run = torch.compile(model, backend="eager") if compiled else model
        run(ids, labels=ids).loss.backward()
        assert not model.model.composition.left_score[0].weight.grad.any()
        grads.append(model.model.composition.layers[0].linear1.weight.grad)
    torch.testing.assert_close(*grads)


def test_half_precision_gradients_survive_loss_scaling():
    ids, _ = ids_of(60)
    grads = []
    for dtype in (torch.float32, torch.float16):
        model = tiny(**NO_DROPOUT, vocab_size=4000).train()
        spans = [right_branching(60)]
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(ids, labels=ids, spans=spans).loss
        (loss * 65536).backward()
        grads.append(model.heads.token[3].weight.grad / 65536)
    assert (grads[0] - grads[1]).norm() < 0.05 * grads[0].norm()


def test_sentence_ids_and_mask_both_count():
    model = tiny()
    ids, mask = ids_of(9, 4)
    labels = ids.masked_fill(mask == 0, -100)
    whole = model(ids, attention_mask=mask, labels=labels).loss
    one = torch.ones_like(ids).int()
    assert torch.equal(model(ids, attention_mask=mask, sentence_ids=one, labels=labels).loss, whole)
    numbers, first = ([1, 1, 1, 2, 2, 2, 1, 1, 1], [1, 1, 1, 2, 2, 2, 3, 3, 3]), ids[:1]
    apart, runs = (model(first, sentence_ids=torch.tensor([row]), labels=first).loss for row in numbers)
    assert torch.equal(apart, runs)


def test_begin_token_that_is_a_sentence_of_its_own_stays():
    model = tiny(document_end_token=True)
    ids = torch.tensor([[1, 7, 8, 9]])
    kept = model(ids, sentence_ids=torch.tensor([[1, 2, 2, 2]]), labels=ids).losses["token"]
    dropped = model(ids, sentence_ids=torch.tensor([[1, 1, 1, 1]]), labels=ids).losses["token"]
    assert kept != dropped
    assert dropped == model(ids[:, 1:], labels=ids[:, 1:]).losses["token"]


def test_given_orders_keep_words_whole():
    model = tiny(window_size=1)
    torch.manual_seed(1)
    for _ in range(20):
        ids, _ = ids_of(12)
        word_ends = torch.rand(1, 12) < 0.6
        word_ends[0, -1] = True
        order = torch.randperm(11)[None]
        spans = model.model(ids, word_ends=word_ends, merge_order=order, output_spans=True).spans[0]
        assert len(spans) == 11 and keeps_words_together(spans, word_ends[0].tolist())


def test_without_surrogate_every_parameter_is_used():
    model = tiny(surrogate=False).train()
    ids, _ = ids_of(5)
    model(ids, labels=ids).loss.backward()
    assert model.model.up_scale is None
    assert all(p.grad is not None for p in model.parameters())


def test_whole_context_fits_the_positions():
    model = tiny()
    ids = torch.full((1, 64), 7)
    assert math.isfinite(model(ids, labels=ids).loss.item())
    assert model(torch.cat([torch.ones(1, 1, dtype=torch.long), ids], 1), logits_to_keep=1).logits.shape == (1, 1, 40)


def test_modes_of_submodules_survive_parsing():
    model = tiny().train()
    model.model.parser.eval()
    ids, _ = ids_of(5)
    for method in ("inside", "search"):
        first, second = (model.parse(ids, method=method) for _ in range(2))
        assert first.spans == second.spans
        if method == "search":
            assert torch.equal(first.log_probs, second.log_probs)
        assert model.training and not model.model.parser.training


def test_probability_of_a_given_tree_is_that_of_the_search():
    model = tiny()
    for parameter in model.model.composition.parameters():
        parameter.data *= 0.05  # small vectors show whether both sides normalize equally often
    ids, _ = ids_of(8)
    output = model.parse(ids, num_beams=20, num_return_sequences=5)
    for spans, log_prob in zip(output.spans[0], output.log_probs[0], strict=True):
        for labels in (None, ids):
            found = model(ids, spans=[spans], labels=labels).joint_log_prob[0]
            torch.testing.assert_close(found, log_prob, rtol=0, atol=1e-4)


def test_trees_that_share_little_are_read_one_by_one():
    model = tiny().train()
    for length, spans in ((1, [[]]), (4, [[(0, 2), (2, 4), (0, 4)], [(1, 4), (2, 4), (0, 4)]])):
        ids = ids_of(length)[0].expand(len(spans), -1)
        found = model.joint_log_probs(ids, spans=spans)
        assert model.training  # but dropout was off
        torch.testing.assert_close(found, model.eval()(ids, spans=spans).joint_log_prob)
        model.train()


@pytest.mark.parametrize("ids", [[[7, 8], [7, 9]], [[1, 7], [1, 7]]])
def test_trees_must_be_of_one_text(ids):
    refused(
        r"one and the same text, without a begin token",
        tiny().joint_log_probs,
        torch.tensor(ids),
        spans=[[(0, 2)], [(0, 2)]],
    )
