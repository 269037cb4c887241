"""What all recurrent language models promise: padding, labels, cache, generation, saving, types, bad input, tools."""

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, StoppingCriteriaList

from hf_synlm.recurrent.distances import distances_to_spans
from tests.helpers.recurrent_models import (
    ARCHITECTURES,
    BOUNDARY,
    MODELS,
    PADDING,
    WITH_TREES,
    dropouts,
    gradients,
    ids_of,
    make_model,
    structures,
    without_penalties,
)
from tests.helpers.refusals import refused
from tests.reference.distances import ranking_loss

every_model = pytest.mark.parametrize("name", list(MODELS))
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
sides = pytest.mark.parametrize("left", [False, True])


# ----------------------------------------------------------------------------------------------- padding and rows
@every_model
def test_columns_out_of_the_mask_do_not_exist(name):
    model = make_model(name)
    ids, _ = ids_of(6)
    ids[0, 3] = -7  # not even looked up
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]])
    keep = mask[0] == 1
    with_holes, without = model(ids, attention_mask=mask), model(ids[:, keep])
    torch.testing.assert_close(with_holes.logits[:, keep], without.logits)
    assert torch.equal(with_holes.logits[:, 3], with_holes.logits[:, 2])
    for field, values in structures(with_holes).items():
        torch.testing.assert_close(values[:, keep], structures(without)[field])
    labels = ids.masked_fill(mask == 0, -100)
    expected = model(ids[:, keep], labels=ids[:, keep]).losses
    for part, value in model(ids, attention_mask=mask, labels=labels).losses.items():
        torch.testing.assert_close(value, expected[part])


# ----------------------------------------------------------------------------------------------- labels and loss


@every_model
def test_labels_choose_what_counts(name):
    model = make_model(name, **without_penalties(name))
    ids, _ = ids_of(8)
    log_probs = model(ids).logits[0, torch.arange(7), ids[0, 1:]]
    labels = ids.clone()
    labels[0, :5] = -100
    output = model(ids, labels=labels)
    torch.testing.assert_close(output.loss, -log_probs[4:].mean())
    torch.testing.assert_close(output.joint_log_prob, log_probs[4:].sum()[None].detach())
    assert torch.equal(output.logits[0, torch.arange(7), ids[0, 1:]], log_probs)
    assert not any(value.requires_grad for value in output.losses.values())
    shifted = torch.cat([ids[:, 1:], torch.tensor([[5]])], 1)
    last = model(ids).logits[0, -1, 5]
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, -torch.cat([log_probs, last[None]]).mean())
    assert torch.equal(model(ids, labels=ids, shift_labels=shifted).loss, model(ids, shift_labels=shifted).loss)
    assert model.train()(ids, labels=labels).logits is None  # the largest tensor of all


@every_architecture
@sides
def test_padding_has_no_labels_and_is_not_counted(name, left):
    model = make_model(name, **without_penalties(name))
    ids, mask = ids_of(7, 4, 1, left=left)
    output = model(ids, attention_mask=mask)
    shifted = torch.randint(1, 28, ids.shape)  # also at padding, where no token stands
    own = output.logits.gather(2, shifted[..., None])[..., 0]
    counts = mask.bool()
    if name == "lstm":  # the label before the first token is predicted from the beginning
        counts = counts | torch.nn.functional.pad(counts[:, 1:], (0, 1))
        mask_only = shifted.masked_fill(mask == 0, -100)
        torch.testing.assert_close(model(ids, mask, shift_labels=mask_only).loss, -own[mask == 1].mean())
    else:
        torch.testing.assert_close(model(ids, mask, shift_labels=shifted).loss, -own[counts].mean())
    losses = model(ids, mask, shift_labels=shifted).losses
    items = model.count_loss_items(ids, attention_mask=mask, shift_labels=shifted)
    assert items["word" if name == "lstm" else "language_model"] == counts.sum()
    assert ("activation" in items) == model.config.penalizes_activations == ("activation" in losses)
    if model.config.penalizes_activations:
        assert (items["activation"], items["temporal_activation"]) == (12, 9)


@every_model
def test_gradients_are_those_of_the_logits(name):
    model = make_model(name, **without_penalties(name))
    ids, mask = ids_of(9, 4, left=True)
    logits = model(ids, attention_mask=mask).logits[:, :-1]
    counts = mask[:, :-1] * mask[:, 1:]
    taken = logits.gather(2, ids[:, 1:, None]).squeeze(2)
    expected = gradients(model, -(taken * counts).sum() / counts.sum())
    labels = ids.masked_fill(mask == 0, -100)
    labels[torch.arange(2), mask.argmax(1)] = -100  # the first token of each row
    mine = gradients(model, model(ids, attention_mask=mask, labels=labels).loss)
    for parameter, gradient in mine.items():
        if expected[parameter] is not None:
            torch.testing.assert_close(gradient, expected[parameter])


@every_architecture
def test_second_derivatives_are_refused(name):
    model = make_model(name)
    ids, _ = ids_of(6)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()), create_graph=True)


@every_model
def test_nothing_to_learn(name):
    model = make_model(name, rates=0.0, **without_penalties(name))
    ids, _ = ids_of(9, 4)
    output = model(ids, labels=torch.full_like(ids, -100))
    assert output.loss.item() == 0 and output.joint_log_prob.tolist() == [0.0, 0.0]
    assert all(gradient is not None and not gradient.any() for gradient in gradients(model, output.loss).values())


@every_architecture
def test_every_dropout_is_used_in_training_only(name):
    ids, _ = ids_of(9, 9)
    for rate in dropouts(name):
        model = make_model(name, rates=0.0, **{rate: 0.5})
        assert len({model(ids, labels=ids).loss.item() for _ in range(3)}) == 1
        assert len({model.train()(ids, labels=ids).loss.item() for _ in range(3)}) > 1, rate


# ------------------------------------------------------------------------------------------------------------ cache
class TestCache:
    @every_architecture
    def test_training_in_segments(self, name):
        model = make_model(name, rates=0.0, **without_penalties(name))
        ids, _ = ids_of(9, 9)
        targets = ids[:, 1:]
        whole = model(ids[:, :8], shift_labels=targets).loss
        first = model(ids[:, :4], shift_labels=targets[:, :4], use_cache=True)
        second = model(ids[:, 4:8], shift_labels=targets[:, 4:], past_key_values=first.past_key_values)
        torch.testing.assert_close((first.loss + second.loss) / 2, whole)
        assert not any(tensor.requires_grad for tensor in second.past_key_values.state)
        first.loss.backward()
        second.loss.backward()
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids[:, :4], attention_mask=torch.ones(8), past_key_values=first.past_key_values)

    @every_architecture
    def test_the_state_holds_no_more_than_itself(self, name):
        cache = make_model(name)(ids_of(50, 50)[0], use_cache=True).past_key_values
        for tensor in cache.state:
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()

    @every_architecture
    def test_a_state_of_inference_mode_goes_on_in_training(self, name):
        model = make_model(name)
        ids, _ = ids_of(4, 4)
        with torch.inference_mode():
            cache = model(ids, use_cache=True).past_key_values
        model.train()(ids, labels=ids, past_key_values=cache).loss.backward()


# ------------------------------------------------------------------------------------------------------- generation
MODES = ({}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "top_k": 5})


class TestGenerate:
    @pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in WITH_TREES])
    @pytest.mark.parametrize("options", MODES)
    def test_trees_are_those_of_parse(self, name, options):
        model = make_model(name)
        ids, mask = ids_of(5, 2, left=True)
        torch.manual_seed(1)
        result = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, suppress_tokens=[PADDING], return_dict_in_generate=True,
            output_scores=True, **options,
        )  # fmt: skip
        copies = options.get("num_return_sequences", 1)
        assert len(result.spans) == len(result.sequences) == 2 * copies == len(result.actions)
        for row, sequence in enumerate(result.sequences):
            new = sequence[5:]
            ended = ((new == BOUNDARY) | (new == PADDING)).long()
            words = torch.cat([mask[row // copies], (ended.cumsum(0) == 0).long()]).bool()
            start = int(words.long().argmax())
            alone = model.parse(sequence[words][None])
            assert result.spans[row] == [(i + start, j + start) for i, j in alone.spans[0][0]]
            actions = result.actions[row]
            assert actions[actions >= 0].tolist() == alone.actions[0, 0].tolist()

    @pytest.mark.parametrize("name", ["on_lstm", "prpn", "palm"])
    def test_sequences_that_a_criterion_ends(self, name):
        model = make_model(name)
        ids, _ = ids_of(3, 3)
        options = {"max_new_tokens": 5, "eos_token_id": 28, "return_dict_in_generate": True}
        options["suppress_tokens"] = [BOUNDARY, 28, PADDING]
        word = model.generate(ids, **options).sequences[0, 4]
        criteria = StoppingCriteriaList([lambda ids, *_, **__: ids[:, -1] == word])
        result = model.generate(ids, stopping_criteria=criteria, **options)
        end = 4 + int((result.sequences[0, 3:] == word).long().argmax())
        assert result.sequences[0, end:].tolist() == [PADDING] * (result.sequences.shape[1] - end)
        assert max(end for _, end in result.spans[0]) == end

    @pytest.mark.parametrize("name", ["on_lstm", "prpn", "palm"])
    def test_end_tokens_are_no_words(self, name):
        model = make_model(name)
        ids, _ = ids_of(3)
        with torch.no_grad():
            model.lm_head.bias[[BOUNDARY, PADDING]] -= 100
        end = model.generate(ids, max_new_tokens=1, eos_token_id=None)[0, -1].item()
        result = model.generate(ids, max_new_tokens=4, eos_token_id=[28, end], return_dict_in_generate=True)
        assert result.sequences[0].tolist() == [*ids[0].tolist(), end]
        assert max(end for _, end in result.spans[0]) == 3

    @pytest.mark.parametrize("name", ["on_lstm", "prpn", "palm"])
    def test_bad_prompts_are_found_before_anything_is_written(self, name, monkeypatch):
        model = make_model(name)
        ids, mask = ids_of(5, 2)
        monkeypatch.setattr(model.model, "forward", None)
        refused("holes", model.generate, ids, attention_mask=mask, max_new_tokens=2, return_dict_in_generate=True)
        refused("structure_mode='jiont' must be", model.generate, ids, structure_mode="jiont")

    @pytest.mark.parametrize("name", ["on_lstm", "prpn", "palm"])
    def test_sentence_without_words(self, name):
        model = make_model(name)
        with torch.no_grad():
            model.lm_head.bias[BOUNDARY] += 100
        result = model.generate(torch.full((2, 1), BOUNDARY), max_new_tokens=5, return_dict_in_generate=True)
        assert result.sequences.tolist() == [[BOUNDARY, BOUNDARY]] * 2 and result.spans == [[], []]


# ----------------------------------------------------------------------------------------------- saving and resizing
# ------------------------------------------------------------------------------------------------------------- types


# --------------------------------------------------------------------------------------------------------- bad input
SEVENS = torch.full((1, 4), 7)


@every_architecture
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.tensor([[7, 99]])}, "99"),
        ({"input_ids": SEVENS, "labels": torch.full((1, 4), 30)}, "Label 30"),
    ],
)
def test_bad_input_is_named(name, arguments, message):
    refused(message, make_model(name), **arguments)


# ---------------------------------------------------------------------------------------------------- classification
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "lstm"])
@sides
def test_classifier_reads_the_last_token(name, left, tmp_path):
    model = make_model(name, "ForSequenceClassification", num_labels=3)
    ids, mask = ids_of(7, 3, left=left)
    output = model(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    for row in range(2):
        torch.testing.assert_close(output.logits[row], model(ids[row][mask[row].bool()][None]).logits[0])
    torch.testing.assert_close(output.loss, -output.logits.log_softmax(-1)[[0, 1], [0, 2]].mean())
    assert set(output.losses) == {"classification"}
    rate = "dropout" if name.startswith("prpn") else "output_dropout"
    assert make_model(name, "ForSequenceClassification", rates=0.0, **{rate: 0.25}).dropout.p == 0.25
    output.loss.backward()
    assert model.score.weight.grad.any() and model.model.embed_tokens.weight.grad.any()
    language_model = make_model(name)
    language_model.save_pretrained(tmp_path)
    started = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(started) is type(model)
    assert torch.equal(started.model.embed_tokens.weight, language_model.model.embed_tokens.weight)


# ------------------------------------------------------------------------------------------------------------- trees
@pytest.mark.parametrize("decoder", ["unbiased", "biased"])
@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("name", ["on_lstm", "on_lstm, split head", "prpn", "prpn, syd", "ordered_memory"])
def test_trees_and_probabilities(name, end, begin, decoder):
    """Of a sentence with and without its boundaries, by each kind of distances; the supervised ones are the default."""
    model = make_model(name)
    framed = torch.cat([torch.tensor([[BOUNDARY]]), ids_of(6)[0], torch.tensor([[BOUNDARY]])], 1)
    output = model(framed)
    log_probs = output.logits[0, torch.arange(7), framed[0, 1:]]
    kinds = {"language_model": output.distances[0, :2][-1]}  # of layer 1, where there are several
    if output.syd_distances is not None:  # of the last layer that is supervised, layer 0
        kinds = {"language_model": output.distances[0, 0], "supervised": output.syd_distances[0, -1]}
    for kind, distances in [*kinds.items(), (None, list(kinds.values())[-1])]:
        options = {"decoder": decoder} if kind is None else {"decoder": decoder, "distances": kind}
        parsed = model.parse(framed[:, 0 if begin else 1 : None if end else -1], **options)
        torch.testing.assert_close(parsed.log_probs, log_probs.sum()[None, None])
        expected = torch.cat([torch.zeros(int(begin)), log_probs if end else log_probs[:-1]])
        torch.testing.assert_close(parsed.token_log_probs[0], expected)
        spans = distances_to_spans(distances[1:7].tolist(), decoder)
        assert parsed.spans == [[[(i + begin, j + begin) for i, j in spans]]]
        assert (parsed.offsets, parsed.lengths, parsed.actions.shape) == ([int(begin)], [6], (1, 1, 11))
        assert parsed.brackets(list("abcdef")).replace("(", "").replace(")", "") == "a b c d e f"


BAD_PARSE_OPTIONS = [
    ("on_lstm", {"distances": "gold"}, "gold"),
    ("on_lstm", {"distances": "supervised"}, "Layer 1 has no supervised distances"),
    ("on_lstm", {"layer": 3}, "Layer 3"),
    ("on_lstm", {"decoder": "baised"}, "decoder 'baised' is unknown"),
    ("on_lstm", {"word_ends": torch.ones(1, 3)}, "word_ends"),
    ("on_lstm", {"word_ends": torch.tensor([[1, 0, 1, 0]])}, "last token"),
    ("on_lstm", {"attention_mask": torch.zeros(1, 4)}, "Row 0 of input_ids has no token"),
    ("palm", {"input_ids": torch.zeros(1, 2).long()}, "no token"),
    ("palm", {"method": "distance"}, "distance"),
    ("awd_lstm", {}, "span_attention=False"),
    ("prpn", {"method": "search"}, "method 'search'"),
    ("prpn", {"distances": "supervised"}, "no supervised distances"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD_PARSE_OPTIONS)
def test_bad_options_of_parse_are_named(name, options, message):
    refused(message, make_model(name).parse, **{"input_ids": ids_of(4)[0], **options})


@pytest.mark.parametrize("name", WITH_TREES)
def test_weights_that_are_no_numbers_give_no_tree(name):
    model = make_model(name)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    if name != "palm, right branching":  # whose scores no weight decides
        refused("not a number", model.parse, ids_of(5)[0])


@pytest.mark.parametrize("name", ["on_lstm, split head", "prpn, syd"])
def test_supervision_without_end_token(name):
    model = make_model(name, eos_token_id=None, bos_token_id=None)
    ids, _ = ids_of(6)
    distances = torch.tensor([[5.0, 1, 2, 3, 1, 2]])
    found, expected = (one(ids, labels=ids, distances=distances).losses for one in (model, make_model(name)))
    torch.testing.assert_close(found["syntactic_distance"], expected["syntactic_distance"])


@pytest.mark.parametrize("scope", ["sentence", "batch"])
@pytest.mark.parametrize("name", ["on_lstm, split head", "prpn, syd"])
def test_supervised_loss_is_that_of_all_pairs(name, scope):
    """Sentences of a stream by themselves, layers added up, without padding and gaps that have no gold distance."""
    fields = {"scope": scope, "reduction": "sum", "scale": 5.0, "margin": 0.4, "weight": 2.0}
    fields = {f"syntactic_distance_{key}": value for key, value in fields.items()} | without_penalties(name)
    model = make_model(name, rates=0.0, language_model_weight=0.5, **fields)
    ids = torch.tensor([[0, 3, 4, 5, 0, 6, 7, 8], [9, 9, 0, 0, 5, 5, PADDING, PADDING]])
    sentences = [[0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 1, 2, 2, 3, 3]] if scope == "sentence" else None
    gold, mask = torch.randint(1, 4, ids.shape).float(), ids != PADDING
    gold[0, 6] = math.nan
    output = model(ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100), distances=gold)
    seen, layers = gold.masked_fill(~mask, math.nan).tolist(), (5 * output.syd_distances).unbind(1)
    pairs = sum(ranking_loss(layer.tolist(), seen, 0.4, scope, "sum", sentences) for layer in layers)
    assert output.losses["syntactic_distance"].item() == pytest.approx(pairs, rel=1e-5) and pairs > 0
    assert output.loss.item() == pytest.approx(0.5 * output.losses["language_model"].item() + 2 * pairs, rel=1e-5)
    for key, gradient in gradients(model, output.loss).items():
        assert "weight" not in key or not ("split_head" in key or "supervised_head" in key) or gradient.any(), key


BAD_DISTANCES = [
    ("on_lstm", 6, "does not learn from trees"),
    ("on_lstm, split head", 5, r"distances \(1, 5\), input_ids"),
    ("prpn", 6, "parsing_network='recurrent'"),
    ("prpn, syd", 5, "need equal shapes"),
]


@pytest.mark.parametrize(("name", "width", "message"), BAD_DISTANCES)
def test_bad_distances_are_named(name, width, message):
    ids, _ = ids_of(6)
    refused(message, make_model(name), ids, labels=ids, distances=torch.ones(1, width))
