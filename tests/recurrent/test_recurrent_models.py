"""What all recurrent language models promise: padding, labels, cache, generation, saving, types, bad input, tools."""

import copy
import pickle

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    DynamicCache,
    StoppingCriteriaList,
)

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
    model_class,
    state_rows,
    structures,
    without_penalties,
)
from tests.helpers.search_models import StopAfter

every_model = pytest.mark.parametrize("name", list(MODELS))
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
sides = pytest.mark.parametrize("left", [False, True])


# ----------------------------------------------------------------------------------------------- padding and rows
@every_model
def test_later_tokens_and_other_rows_change_nothing(name):
    model = make_model(name)
    ids, _ = ids_of(8, 8, 8)
    changed = ids.clone()
    changed[0, 5:], changed[1] = torch.tensor([1, 2, 3]), changed[1].flip(0)
    first, second = model(ids), model(changed)
    assert torch.equal(first.logits[0, :5], second.logits[0, :5])
    assert not torch.equal(first.logits[0, 5:], second.logits[0, 5:])
    torch.testing.assert_close(first.logits[2], second.logits[2])
    for field, values in structures(first).items():
        assert torch.equal(values[0, :5], structures(second)[field][0, :5])
    for row in range(3):
        torch.testing.assert_close(model(ids[row : row + 1]).logits[0], first.logits[row])


@every_model
@sides
def test_padding_and_batching_change_nothing(name, left):
    model = make_model(name)
    lengths = (9, 4, 1)
    ids, mask = ids_of(*lengths, width=12, left=left)
    together = model(ids, attention_mask=mask, use_cache=True)
    labeled = model(ids, attention_mask=mask, labels=ids)
    sums = dict.fromkeys(labeled.losses, 0.0)
    for row, length in enumerate(lengths):
        keep = mask[row].bool()
        own = ids[row][keep][None]
        alone = model(own, use_cache=True)
        torch.testing.assert_close(together.logits[row][keep], alone.logits[0])
        for field, values in structures(together).items():
            torch.testing.assert_close(values[row][keep], structures(alone)[field][0])
        for mine, theirs in zip(state_rows(together.past_key_values), state_rows(alone.past_key_values), strict=True):
            torch.testing.assert_close(mine[row], theirs[0])
        single = model(own, labels=own)
        torch.testing.assert_close(labeled.joint_log_prob[row], single.joint_log_prob[0])
        predicted = length if "word" in sums else length - 1
        weights = {"language_model": predicted, "word": predicted, "activation": length}
        for part in sums:
            sums[part] += weights.get(part, length - 1) * single.losses[part]
    assert torch.isfinite(together.logits).all()
    inner = sum(lengths) - len(lengths)
    counts = {"word": sum(lengths), "activation": sum(lengths)}
    for part in sums.keys() - {"syntactic_distance"}:
        torch.testing.assert_close(labeled.losses[part], sums[part] / counts.get(part, inner))


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
    for places, kept in ((2, slice(-2, None)), (torch.tensor([1, 4]), [1, 4])):
        torch.testing.assert_close(model(ids, logits_to_keep=places).logits, model(ids).logits[:, kept])
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
    items = model.count_loss_items(ids, attention_mask=mask, shift_labels=shifted)
    assert items["word" if name == "lstm" else "language_model"] == counts.sum()
    if "activation" in items:
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


@every_model
def test_every_parameter_learns(name):
    model = make_model(name).train()
    ids, mask = ids_of(9, 4, 6)
    grads = gradients(model, model(ids, attention_mask=mask, labels=ids).loss)
    # Heads of supervised distances have nothing to learn here, and one span has all the attention whatever its score;
    # distributed training waits for their gradients all the same.
    idle = ("split_head", "distance_heads", "supervised_head")
    idle += ("attention.score", "attention.key", "attention.query") if name == "palm, one span" else ()
    for parameter, gradient in grads.items():
        assert gradient is not None and torch.isfinite(gradient).all(), parameter
        assert gradient.any() != any(part in parameter for part in idle), parameter


@every_architecture
def test_backward_twice_and_frozen_parts(name):
    model = make_model(name, rates=0.0)
    ids, _ = ids_of(6, 6)
    loss = model(ids, labels=ids).loss
    loss.backward(retain_graph=True)
    once = {key: p.grad.clone() for key, p in model.named_parameters()}
    loss.backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[key])
    for frozen, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()
        for key, p in model.named_parameters():
            if key == frozen:
                assert p.grad is None
            else:
                torch.testing.assert_close(p.grad, once[key])
        parameter.requires_grad_(True)


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
    @every_model
    @pytest.mark.parametrize("split", [1, 3, 6])
    def test_two_calls_are_one(self, name, split):
        model = make_model(name)
        ids, _ = ids_of(7, 7)
        first = model(ids[:, :split], use_cache=True)
        second = model(ids[:, split:], past_key_values=first.past_key_values)
        whole = model(ids, use_cache=True)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole.logits)
        for field, values in structures(whole).items():
            torch.testing.assert_close(torch.cat([structures(x)[field] for x in (first, second)], 1), values)
        assert second.past_key_values.get_seq_length() == 7
        for mine, theirs in zip(second.past_key_values.state, whole.past_key_values.state, strict=True):
            torch.testing.assert_close(mine, theirs)

    @every_model
    @sides
    def test_rows_of_unequal_length(self, name, left):
        # The second row holds no token in one of the two segments.
        model = make_model(name)
        ids, mask = ids_of(8, 3, 5, left=left)
        whole = model(ids, attention_mask=mask, use_cache=True)
        first = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True)
        for given in (mask, mask[:, 4:]):
            cache = copy.deepcopy(first.past_key_values)
            second = model(ids[:, 4:], attention_mask=given, past_key_values=cache)
            both = torch.cat([first.logits, second.logits], 1)
            torch.testing.assert_close(both[mask == 1], whole.logits[mask == 1])
            for mine, theirs in zip(cache.state, whole.past_key_values.state, strict=True):
                torch.testing.assert_close(mine, theirs)
        if not left:  # a column that is skipped has the state of the column before it, also across the segments
            torch.testing.assert_close(both[1, 4:], both[1, 2].expand(4, -1))

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

    @every_architecture
    def test_rows_are_selected_and_repeated(self, name):
        model = make_model(name)
        ids, mask = ids_of(6, 3)
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 4
        cache.reorder_cache(torch.tensor([3, 0]))
        following = torch.tensor([[7], [7]])
        mine = model(following, past_key_values=cache).logits[:, 0]
        for row, length in ((0, 3), (1, 6)):
            text = torch.cat([ids[1 - row, :length], following[0]])[None]
            torch.testing.assert_close(mine[row], model(text).logits[0, -1])
        with pytest.raises(ValueError, match="crop"):
            cache.crop(1)
        with pytest.raises(ValueError, match="2 rows and input_ids 1"):
            model(following[:1], past_key_values=cache)
        cache.reset()
        assert not cache.is_initialized and cache.batch_size == cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids[:1], past_key_values=cache).logits, model(ids[:1]).logits)

    @every_architecture
    def test_states_of_other_networks_are_refused(self, name):
        model = make_model(name)
        ids, _ = ids_of(4, 4)
        for other in ARCHITECTURES:
            if other != name:
                cache = make_model(other)(ids, use_cache=True).past_key_values
                with pytest.raises(ValueError, match="past_key_values holds tensors of the shapes"):
                    model(ids, past_key_values=cache)
        for call in (model, model.generate):
            with pytest.raises(ValueError, match="past_key_values is a DynamicCache"):
                call(ids, past_key_values=DynamicCache())
        cache = model(ids, use_cache=True).past_key_values
        assert cache
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids, attention_mask=torch.ones(8), past_key_values=cache)

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

    @every_architecture
    def test_copies(self, name):
        model = make_model(name)
        ids, _ = ids_of(5)
        cache = model(ids, use_cache=True).past_key_values
        expected = model(ids, past_key_values=copy.deepcopy(cache)).logits
        for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            torch.testing.assert_close(copy.deepcopy(model)(ids, past_key_values=copied).logits, expected)


# ------------------------------------------------------------------------------------------------------- generation
MODES = ({}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "top_k": 5})


class TestGenerate:
    @every_architecture
    def test_from_the_beginning(self, name):
        model = make_model(name)
        started = model.generate(torch.tensor([[BOUNDARY]]), max_new_tokens=5, eos_token_id=None)
        assert torch.equal(model.generate(max_new_tokens=5, eos_token_id=None), started)
        assert started[0, 1] == model(torch.tensor([[BOUNDARY]])).logits[0, -1].argmax()

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
        options = {
            "max_new_tokens": 5,
            "eos_token_id": 28,
            "suppress_tokens": [BOUNDARY, 28, PADDING],
            "return_dict_in_generate": True,
        }
        word = model.generate(ids, **options).sequences[0, 4]
        result = model.generate(ids, stopping_criteria=StoppingCriteriaList([StopAfter(word)]), **options)
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
        with pytest.raises(ValueError, match="holes"):
            model.generate(ids, attention_mask=mask, max_new_tokens=2, return_dict_in_generate=True)

    @pytest.mark.parametrize("name", ["on_lstm", "prpn", "palm"])
    def test_sentence_without_words(self, name):
        model = make_model(name)
        with torch.no_grad():
            model.lm_head.bias[BOUNDARY] += 100
        result = model.generate(torch.full((2, 1), BOUNDARY), max_new_tokens=5, return_dict_in_generate=True)
        assert result.sequences.tolist() == [[BOUNDARY, BOUNDARY]] * 2 and result.spans == [[], []]

    def test_baselines_have_no_trees(self):
        for name in ("awd_lstm", "lstm"):
            output = make_model(name).generate(
                ids_of(4)[0], max_new_tokens=3, eos_token_id=None, return_dict_in_generate=True
            )
            assert output.sequences.shape == (1, 7) and output.spans is None


# ----------------------------------------------------------------------------------------------- saving and resizing
# ------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("name", "dtype"),
    # On CPUs, PyTorch has no LSTM in float16.
    [(x, torch.bfloat16) for x in ARCHITECTURES]
    + [(x, torch.float16) for x in ARCHITECTURES if MODELS[x][0] in ("ONLSTM", "PRPN")],
)
def test_autocast(name, dtype):
    model = make_model(name, rates=0.0)
    ids, mask = ids_of(9, 4)
    expected = model(ids, attention_mask=mask, labels=ids).loss.item()
    with torch.autocast("cpu", dtype=dtype):
        first = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        second = model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
        states = model.model(ids[:, :5]).last_hidden_state
        evaluated = model(ids, attention_mask=mask, labels=ids).loss
        loss = model.train()(ids, attention_mask=mask, labels=ids).loss
    assert evaluated.item() == pytest.approx(expected, rel=0.1)
    if name in ("palm", "awd_lstm", "lstm"):  # whose layers run in the type of their weights, on every CPU
        assert states.dtype == torch.float32
    assert torch.isfinite(second.logits).all() and second.logits.dtype == torch.float32
    for gradient in gradients(model, loss).values():
        assert torch.isfinite(gradient).all() and gradient.dtype == torch.float32


@every_architecture
def test_half_precision(name):
    model = make_model(name, rates=0.0).to(torch.bfloat16)
    ids, mask = ids_of(9, 4)
    first = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
    second = model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
    assert second.logits.isfinite().all() and second.logits.dtype == torch.float32
    loss = model.train()(ids, attention_mask=mask, labels=ids).loss
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model, loss).values())
    assert model.eval().generate(ids, attention_mask=mask, max_new_tokens=3, eos_token_id=None).shape == (2, 12)


@pytest.mark.parametrize("name", ["on_lstm, split head", "prpn", "palm"])
def test_compiled_model_gives_the_same_numbers(name):
    model = make_model(name, rates=0.0, num_layers=3 if "split" in name else 2)
    ids, mask = ids_of(3, 2)  # the compiler sees every step of a recurrence
    compiled = torch.compile(model, backend="aot_eager")
    expected = model(ids, attention_mask=mask, labels=ids).loss
    loss = compiled(ids, attention_mask=mask, labels=ids).loss
    torch.testing.assert_close(loss, expected)
    theirs = gradients(model, expected)
    for parameter, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, theirs[parameter])


# --------------------------------------------------------------------------------------------------------- bad input
SEVENS = torch.full((1, 4), 7)


@every_architecture
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(1, 0)}, "hold no token"),
        ({"input_ids": torch.tensor([[7, 99]])}, "99"),
        ({"input_ids": SEVENS, "labels": torch.full((1, 4), 30)}, "Label 30"),
        ({"input_ids": SEVENS, "labels": SEVENS, "logits_to_keep": 1}, "logits_to_keep"),
    ],
)
def test_bad_input_is_named(name, arguments, message):
    model = make_model(name)
    with pytest.raises(ValueError, match=message):
        model(**arguments)
    with pytest.raises(TypeError, match="position_ids"):
        model(SEVENS, position_ids=SEVENS)


@every_architecture
def test_bad_configurations_are_named(name):
    config_class = model_class(name).config_class
    rate = dropouts(name)[0]
    for fields, message in (
        ({"num_slots": 0}, "num_slots must be at least")
        if name == "ordered_memory"
        else ({"num_layers": 0}, "num_layers must be at least 1"),
        ({rate: 1.0}, rf"{rate} must be in \[0, 1\)"),
        ({"pad_token_id": 30}, "pad_token_id 30 is outside"),
        ({"eos_token_id": -1}, "eos_token_id -1 is outside"),
    ):
        with pytest.raises(ValueError, match=message):
            config_class(**{"vocab_size": 30, **MODELS[name][1], **fields})
    with pytest.raises(ValueError, match=next(iter(config_class.presets))):
        config_class.from_preset("no such preset")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("palm", {"num_spans": 0}, "num_spans must be at least 1"),
        ("palm", {"span_attention_weight": -1.0}, "span_attention_weight"),
        ("palm", {"activation_regularization": float("inf")}, "activation_regularization"),
        ("palm", {"num_layers": 1}, "between two layers"),
        ("palm", {"span_scores": "balanced"}, "balanced"),
        ("prpn", {"layer_size": 7}, "layer_size must be even"),
        ("prpn", {"num_slots": 0}, "num_slots must be at least 1"),
        ("prpn", {"num_lookback": -1}, "num_lookback must not be negative"),
        ("prpn", {"resolution": 1000.0}, "resolution"),
        ("prpn", {"gate": "wide"}, "gate 'wide'"),
        ("on_lstm", {"chunk_size": 5}, "chunk_size 5 does not divide the width"),
        ("on_lstm", {"syntactic_distance_margin": -1.0}, "syntactic_distance_margin"),
        ("on_lstm", {"syntactic_distance_head": "two"}, "two"),
        ("on_lstm", {"syntactic_distance_scope": "corpus"}, "corpus"),
        ("on_lstm", {"supervised_layers": [3]}, "below 3"),
        ("on_lstm", {"supervised_layers": [1, 1]}, "distinct"),
        ("lstm", {"initializer_range": 0.0}, "initializer_range"),
        ("lstm", {"bos_token_id": None}, "bos_token_id is None"),
    ],
)
def test_bad_fields_of_one_architecture_are_named(name, fields, message):
    with pytest.raises(ValueError, match=message):
        make_model(name, **fields)


# ---------------------------------------------------------------------------------------------------- classification
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "lstm"])
@sides
def test_classifier_reads_the_last_token(name, left, tmp_path):
    model = make_model(name, "ForSequenceClassification", num_labels=3)
    ids, mask = ids_of(7, 3, left=left)
    output = model(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    for row in range(2):
        own = ids[row][mask[row].bool()][None]
        torch.testing.assert_close(output.logits[row], model(own).logits[0])
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
@pytest.mark.parametrize("name", WITH_TREES)
def test_weights_that_are_no_numbers_give_no_tree(name):
    model = make_model(name)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    if name != "palm, right branching":  # whose scores no weight decides
        with pytest.raises(ValueError, match="not a number"):
            model.parse(ids_of(5)[0])


@pytest.mark.parametrize("name", ["on_lstm, split head", "prpn, syd"])
def test_supervision_without_end_token(name):
    model = make_model(name, eos_token_id=None, bos_token_id=None)
    ids, _ = ids_of(6)
    distances = torch.tensor([[5.0, 1, 2, 3, 1, 2]])
    losses = model(ids, labels=ids, distances=distances).losses
    torch.testing.assert_close(
        losses["syntactic_distance"],
        make_model(name)(ids, labels=ids, distances=distances).losses["syntactic_distance"],
    )
