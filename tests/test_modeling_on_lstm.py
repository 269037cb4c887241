"""ON-LSTM as a model of transformers: definition, contract of `forward`, cache, trees, generation, saving, tools."""

import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)

from hf_synlm import ONLSTMConfig, ONLSTMForCausalLM, ONLSTMForSequenceClassification, ONLSTMModel
from hf_synlm.layer_on_lstm import ONLSTMLayer, on_lstm, split_distance
from hf_synlm.recurrent_cache import RecurrentCache
from hf_synlm.syntactic_distance import distances_to_spans, spans_to_distances
from hf_synlm.trees import fold_tokens
from tests.reference import on_lstm as reference

TINY = {"vocab_size": 30, "embedding_size": 8, "hidden_size": 12, "num_layers": 3, "chunk_size": 2, "pad_token_id": 29}
SUPERVISED = {"supervised_layers": [2, 0], "syntactic_distance_scope": "sentence"}
HEADS = ["split", "shared", "hidden"]
SENTENCES = ["the keys to the cabinet are on the table", "fruit flies like a banana", "flies like the table"]


def tiny(cls=ONLSTMForCausalLM, **overrides):
    torch.manual_seed(0)
    model = cls(ONLSTMConfig(**{**TINY, **overrides}))
    with torch.no_grad():  # states that differ
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.eval()


def without_dropout(**overrides):
    rates = {f"{name}_dropout": 0.0 for name in ("embedding", "input", "hidden", "output", "weight")}
    return tiny(**{**rates, **overrides})


def ids_of(*lengths, width=None, left=False):
    torch.manual_seed(3)
    width = width or max(lengths)
    ids = torch.full((len(lengths), width), 29)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        where = slice(width - n, width) if left else slice(0, n)
        ids[row, where] = torch.randint(1, 28, (n,))
        mask[row, where] = 1
    return ids, mask


# ------------------------------------------------------------------------------------------------------- values
def test_size_is_the_published_one():
    with torch.device("meta"):
        model = ONLSTMForCausalLM(ONLSTMConfig.from_preset("on-lstm-ptb"))
        supervised = ONLSTMForCausalLM(ONLSTMConfig.from_preset("on-lstm-syd-ptb"))
    assert model.num_parameters() == 25_232_180
    assert [layer.num_chunks for layer in model.model.layers] == [115, 115, 40]
    assert supervised.num_parameters() == 25_232_180 + 40 * 41


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 1, "chunk_size": 1}, SUPERVISED, {"tie_word_embeddings": False}]
)
def test_values_are_those_of_the_definition(options):
    model = tiny(**options).double()
    ids, _ = ids_of(7)
    with torch.no_grad():
        own = reference.read(model, ids[0].tolist())
        output = model(ids)
    torch.testing.assert_close(output.logits[0], own["log_probs"])
    torch.testing.assert_close(output.distances[:, 0], own["distances"])
    torch.testing.assert_close(output.logits.exp().sum(-1), torch.ones(1, 7, dtype=torch.float64))
    torch.testing.assert_close(model.model(ids).last_hidden_state[0], own["outputs"])
    if "supervised_layers" in options:
        torch.testing.assert_close(output.syd_distances[:, 0], own["splits"][[2, 0]])
    taken = own["log_probs"][torch.arange(6), ids[0, 1:]]
    labeled = model(ids, labels=ids)
    torch.testing.assert_close(labeled.losses["language_model"].double(), -taken.mean())
    torch.testing.assert_close(labeled.joint_log_prob[0].double(), taken.sum())
    torch.testing.assert_close(labeled.losses["activation"], own["outputs"].square().mean())
    torch.testing.assert_close(labeled.losses["temporal_activation"], own["outputs"].diff(dim=0).square().mean())
    assert labeled.logits is None


def test_loss_is_the_weighted_sum_of_its_parts():
    options = {"language_model_weight": 0.5, "syntactic_distance_weight": 3.0, "activation_regularization": 7.0}
    model = without_dropout(**SUPERVISED, **options)
    ids, _ = ids_of(7, 7)
    output = model(ids, labels=ids, distances=torch.rand(2, 7))
    losses = output.losses
    assert set(losses) == {"language_model", "activation", "temporal_activation", "syntactic_distance"}
    assert not any(part.requires_grad for part in losses.values())
    language_model = losses["language_model"] + 7 * losses["activation"] + losses["temporal_activation"]
    torch.testing.assert_close(output.loss, 0.5 * language_model + 3 * losses["syntactic_distance"])


def test_layer_gradients_in_double_precision():
    torch.manual_seed(0)
    chunks, units, batch, steps, width = 3, 2, 2, 4, 5
    size, gates = chunks * units, 2 * chunks + 4 * chunks * units
    shapes = [(steps, batch, width), (batch, size), (batch, size), (gates, width), (gates, size), (gates,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    for places in ([0, 1, 2], [0], [1], [2]):  # each output alone: gradients that are not there count as zero
        assert torch.autograd.gradcheck(lambda *x, y=places: [on_lstm(*x, chunks)[i] for i in y], inputs)


def test_layer_is_autograd_over_the_loop():
    layer = ONLSTMLayer(5, 6, 2, split_head=True).double().eval()
    inputs = torch.randn(7, 3, 5, dtype=torch.float64)
    state = torch.randn(2, 3, 6, dtype=torch.float64)

    def total(states, cells, distance, split):
        weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in (states, distance, split)]
        return sum((w * x).sum() for w, x in zip(weights, (states, distance, split), strict=True)) + cells[-1].sum()

    states, cells, distance, split = layer(inputs, *state, 0.25)
    total(states[1:], cells, distance, split).backward()
    mine = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    rows = []
    for b in range(3):
        h, c, row = state[0, b], state[1, b], []
        for x in inputs[:, b]:
            h, c, d, s = reference.step(layer, x, h, c, 0.75)
            row.append((h, c, d, s))
        rows.append([torch.stack(part) for part in zip(*row, strict=True)])
    own = [torch.stack(part, 1) for part in zip(*rows, strict=True)]
    torch.testing.assert_close(states[1:], own[0])
    total(*own).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad)


def test_distance_is_the_mean_of_the_gate():
    scores = torch.randn(4, 5, 9, dtype=torch.float64)
    torch.testing.assert_close(split_distance(scores), 1 - scores.softmax(-1).cumsum(-1).mean(-1))
    assert split_distance(torch.tensor([0.0, 0.0, 1e4])).item() == pytest.approx(2 / 3)


# ----------------------------------------------------------------------------------------------- padding and labels
def test_later_tokens_change_nothing_before_them():
    model = tiny(**SUPERVISED)
    ids, _ = ids_of(8, 8)
    changed = ids.clone()
    changed[0, 5:] = torch.tensor([1, 2, 3])
    first, second = model(ids), model(changed)
    assert torch.equal(first.logits[:, :5], second.logits[:, :5])
    assert torch.equal(first.logits[1], second.logits[1]) and not torch.equal(first.logits[0, 5:], second.logits[0, 5:])
    assert torch.equal(first.distances[:, :, :5], second.distances[:, :, :5])
    assert torch.equal(first.syd_distances[:, :, :5], second.syd_distances[:, :, :5])


@pytest.mark.parametrize("left", [False, True])
def test_padding_and_batching_change_nothing(left):
    model = without_dropout(**SUPERVISED)
    lengths = (9, 4, 2)
    ids, mask = ids_of(*lengths, width=12, left=left)
    together = model(ids, attention_mask=mask, use_cache=True)
    labeled = model(ids, attention_mask=mask, labels=ids)
    sums = dict.fromkeys(labeled.losses, 0.0)
    for row, length in enumerate(lengths):
        keep = mask[row].bool()
        own = ids[row][keep][None]
        alone = model(own, use_cache=True)
        torch.testing.assert_close(together.logits[row][keep], alone.logits[0])
        for name in ("distances", "syd_distances"):
            torch.testing.assert_close(together[name][:, row][:, keep], alone[name][:, 0])
            assert not together[name][:, row][:, ~keep].any()
        for mine, other in zip(together.past_key_values.state, alone.past_key_values.state, strict=True):
            torch.testing.assert_close(mine[row], other[0])
        single = model(own, labels=own)
        torch.testing.assert_close(labeled.joint_log_prob[row], single.joint_log_prob[0])
        for name, weight in (
            ("language_model", length - 1),
            ("activation", length),
            ("temporal_activation", length - 1),
        ):
            sums[name] += weight * single.losses[name] / (sum(lengths) - (0 if name == "activation" else len(lengths)))
    assert torch.isfinite(together.logits).all()
    for name in ("language_model", "activation", "temporal_activation"):
        torch.testing.assert_close(labeled.losses[name], sums[name])


def test_columns_out_of_the_mask_do_not_exist():
    model = tiny()
    ids, _ = ids_of(6)
    ids[0, 3] = -7  # not even looked up
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]])
    keep = mask[0] == 1
    with_holes, without = model(ids, attention_mask=mask), model(ids[:, keep])
    torch.testing.assert_close(with_holes.logits[:, keep], without.logits)
    assert torch.equal(with_holes.logits[:, 3], with_holes.logits[:, 2])
    labels = ids.masked_fill(mask == 0, -100)
    for name, value in model(ids, attention_mask=mask, labels=labels).losses.items():
        torch.testing.assert_close(value, model(ids[:, keep], labels=ids[:, keep]).losses[name])


def test_labels_choose_what_counts():
    model = tiny()
    ids, _ = ids_of(8)
    log_probs = model(ids).logits[0, torch.arange(7), ids[0, 1:]]
    labels = ids.clone()
    labels[0, :5] = -100
    loss = model(ids, labels=labels).losses["language_model"]
    torch.testing.assert_close(loss, -log_probs[4:].mean())
    shifted = torch.cat([ids[:, 1:], torch.tensor([[5]])], 1)
    last = model(ids).logits[0, -1, 5]
    loss = model(ids, shift_labels=shifted).losses["language_model"]
    torch.testing.assert_close(loss, -torch.cat([log_probs, last[None]]).mean())
    with pytest.raises(ValueError, match="both"):
        model(ids, labels=ids, shift_labels=shifted)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("given", [True, False])
def test_every_parameter_learns(head, given):
    model = tiny(**SUPERVISED, syntactic_distance_head=head).train()
    ids, mask = ids_of(9, 4, 2)
    distances = torch.rand(3, 9) if given else None
    output = model(ids, attention_mask=mask, labels=ids, distances=distances)
    output.loss.backward()
    assert (output.losses["syntactic_distance"] > 0) == given
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()
        # Without gold distances their heads get gradients, too (distributed training waits for them), which are 0.
        assert bool(parameter.grad.any()) == (given or "_head" not in name.replace("lm_head", ""))


def test_nothing_to_learn():
    model = without_dropout(activation_regularization=0.0, temporal_activation_regularization=0.0)
    ids, _ = ids_of(9, 4)
    output = model(ids, labels=torch.full_like(ids, -100))
    output.loss.backward()
    assert output.loss.item() == 0 and output.joint_log_prob.tolist() == [0.0, 0.0]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_gradients_are_those_of_the_logits():
    model = without_dropout(activation_regularization=0.0, temporal_activation_regularization=0.0)
    ids, mask = ids_of(9, 4, left=True)
    logits = model(ids, attention_mask=mask).logits[:, :-1]
    counts = mask[:, :-1] * mask[:, 1:]
    taken = logits.gather(2, ids[:, 1:, None]).squeeze(2)
    (-(taken * counts).sum() / counts.sum()).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_dropout_in_training_only():
    model = tiny()
    ids, _ = ids_of(9)
    assert len({model(ids, labels=ids).loss.item() for _ in range(3)}) == 1
    assert len({model.train()(ids, labels=ids).loss.item() for _ in range(3)}) == 3


@pytest.mark.parametrize("name", ["embedding", "input", "hidden", "output", "weight"])
def test_every_dropout_is_used(name):
    model = without_dropout(**{f"{name}_dropout": 0.5}).train()
    ids, _ = ids_of(9)
    assert len({model(ids, labels=ids).loss.item() for _ in range(3)}) == 3


def test_logits_to_keep():
    model = tiny()
    ids, _ = ids_of(7)
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])


# ------------------------------------------------------------------------------------------------- gold distances
class TestSupervision:
    def test_sentence_scope_ends_at_the_boundary(self):
        model = without_dropout(supervised_layers=[1], syntactic_distance_margin=0.4)
        ids = torch.tensor([[0, 3, 4, 5, 0, 6, 7, 8], [9, 9, 0, 0, 5, 5, 5, 0]])
        sentences = [[0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 1, 2, 2, 2, 2]]
        gold = torch.randint(1, 4, ids.shape).float()
        gold[1, 5] = math.nan
        output = model(ids, labels=ids, distances=gold)
        predicted = output.syd_distances[0].tolist()
        own = reference.ranking_loss(predicted, gold.tolist(), 0.4, "sentence", "mean", sentences)
        assert output.losses["syntactic_distance"].item() == pytest.approx(own, rel=1e-5)

    @pytest.mark.parametrize("scope", ["sentence", "batch"])
    def test_layers_add_up_and_padding_is_left_out(self, scope):
        options = {"syntactic_distance_scope": scope, "syntactic_distance_reduction": "sum"}
        model = without_dropout(supervised_layers=[2, 0], syntactic_distance_scale=5.0, **options)
        ids, mask = ids_of(7, 4, 5)
        gold = torch.rand(3, 7)
        output = model(ids, attention_mask=mask, labels=ids, distances=gold)
        seen = gold.masked_fill(mask == 0, math.nan).tolist()
        parts = [
            reference.ranking_loss((5 * layer).tolist(), seen, 1.0, scope, "sum") for layer in output.syd_distances
        ]
        assert output.losses["syntactic_distance"].item() == pytest.approx(sum(parts), rel=1e-5)

    def test_one_set_of_trees(self):
        model = tiny(supervised_layers=[1], syntactic_distance_head="shared")
        output = model(ids_of(6)[0])
        assert torch.equal(output.syd_distances[0], output.distances[1])

    def test_vanilla_multitasking_reads_states(self):
        model = tiny(supervised_layers=[2], syntactic_distance_head="hidden")
        ids, _ = ids_of(6)
        states = model.model(ids).last_hidden_state
        torch.testing.assert_close(model(ids).syd_distances[0], model.model.distance_heads[0](states)[..., 0])

    def test_learns_a_tree(self):
        model = without_dropout(supervised_layers=[1])
        ids = torch.tensor([[0, 3, 4, 5, 6, 7, 0]])
        spans = [(0, 2), (3, 5), (2, 5), (0, 5)]
        gold = torch.tensor([[math.nan, *spans_to_distances(spans, 5), math.nan]])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(150):
            optimizer.zero_grad()
            model(ids, labels=ids, distances=gold).loss.backward()
            optimizer.step()
        assert model.parse(ids).spans == [[[(i + 1, j + 1) for i, j in spans]]]

    @pytest.mark.parametrize(
        ("options", "arguments", "message"),
        [
            ({}, {"labels": True, "distances": (1, 6)}, "learns from no trees"),
            (SUPERVISED, {"distances": (1, 6)}, "Pass labels"),
            (SUPERVISED, {"labels": True, "distances": (1, 5)}, r"distances are \(1, 5\)"),
        ],
    )
    def test_bad_distances(self, options, arguments, message):
        ids, _ = ids_of(6)
        labels = ids if arguments.get("labels") else None
        with pytest.raises(ValueError, match=message):
            tiny(**options)(ids, labels=labels, distances=torch.rand(arguments["distances"]))


# --------------------------------------------------------------------------------------------------------- trees
class TestParse:
    @pytest.mark.parametrize("decoder", ["unbiased", "biased"])
    @pytest.mark.parametrize("begin", [False, True])
    @pytest.mark.parametrize("end", [False, True])
    def test_trees_and_probabilities(self, decoder, begin, end):
        model = tiny(**SUPERVISED)
        words, _ = ids_of(6)
        framed = torch.cat([torch.tensor([[0]]), words, torch.tensor([[0]])], 1)
        given = framed[:, 0 if begin else 1 : None if end else -1]
        output = model(framed)
        log_probs = output.logits[0, torch.arange(7), framed[0, 1:]]
        parsed = model.parse(given, decoder=decoder)
        torch.testing.assert_close(parsed.log_probs, log_probs.sum()[None, None])
        expected = torch.cat([torch.zeros(int(begin)), log_probs if end else log_probs[:-1]])
        torch.testing.assert_close(parsed.token_log_probs[0], expected)
        spans = distances_to_spans(output.syd_distances[1, 0, 1:7].tolist(), decoder)
        assert parsed.spans == [[[(i + begin, j + begin) for i, j in spans]]]
        assert (parsed.offsets, parsed.lengths, parsed.actions.shape) == ([int(begin)], [6], (1, 1, 11))
        assert parsed.brackets(list("abcdef")).replace("(", "").replace(")", "") == "a b c d e f"

    @pytest.mark.parametrize("left", [False, True])
    @pytest.mark.parametrize("given", [False, True])
    def test_batches(self, left, given):
        model = tiny().train()
        ids, mask = ids_of(9, 4, 1, width=11, left=left)
        together = model.parse(ids, mask if given else None)
        assert model.training
        for row in range(3):
            keep = mask[row].bool()
            alone = model.parse(ids[row][keep][None])
            torch.testing.assert_close(together.token_log_probs[row][keep], alone.token_log_probs[0])
            torch.testing.assert_close(together.log_probs[row], alone.log_probs[0])
            shift = int(mask[row].argmax())
            assert together.spans[row] == [[(i + shift, j + shift) for i, j in alone.spans[0][0]]]
        assert not together.token_log_probs[mask == 0].any()
        assert together.actions[2, 0].tolist() == [0] + [-1] * 16

    def test_words_of_several_pieces(self):
        model = tiny()
        ids, _ = ids_of(7)
        ends = torch.tensor([[0, 1, 1, 0, 0, 1, 1]]).bool()
        parsed = model.parse(ids, word_ends=ends)
        distances = model(torch.cat([torch.tensor([[0]]), ids], 1)).distances[1, 0, 1:]
        words = distances_to_spans(distances[[0, 2, 3, 6]].tolist())
        assert sorted(fold_tokens(parsed.spans[0][0], ends[0].tolist())) == sorted(words)
        assert parsed.word_ends == [[2, 3, 6, 7]] and len(parsed.spans[0][0]) == 6
        assert len(parsed.brackets(["a", "b", "c", "d"]).split()) == 4

    def test_choice_of_distances(self):
        model = tiny(supervised_layers=[2])
        ids, _ = ids_of(8)
        output = model(torch.cat([torch.tensor([[0]]), ids], 1))
        tree = model.parse(ids).spans[0][0]
        assert tree == distances_to_spans(output.syd_distances[0, 0, 1:].tolist())
        for layer in range(3):
            tree = model.parse(ids, distances="language_model", layer=layer).spans[0][0]
            assert tree == distances_to_spans(output.distances[layer, 0, 1:].tolist())
        assert model.parse(ids, layer=1).spans == model.parse(ids, distances="language_model", layer=1).spans
        assert tiny().parse(ids).spans == tiny().parse(ids, layer=1).spans

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": "search"}, "search"),
            ({"decoder": "left"}, "left"),
            ({"distances": "gold"}, "gold"),
            ({"distances": "supervised"}, "Layer 1 has no supervised distances"),
            ({"layer": 3}, "Layer 3"),
            ({"word_ends": torch.ones(1, 3)}, "word_ends"),
            ({"word_ends": torch.tensor([[1, 0, 1, 0]])}, "last token"),
            ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "holes"),
            ({"attention_mask": torch.zeros(1, 4)}, "Row 0 of input_ids holds no word"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            tiny().parse(ids_of(4)[0], **options)

    def test_needs_a_boundary(self):
        with pytest.raises(ValueError, match="eos_token_id is None"):
            tiny(eos_token_id=None).parse(ids_of(4)[0])


# --------------------------------------------------------------------------------------------------------- cache
class TestCache:
    @pytest.mark.parametrize("split", range(1, 7))
    def test_two_calls_are_one(self, split):
        model = tiny(**SUPERVISED)
        ids, _ = ids_of(7, 7)
        first = model(ids[:, :split], use_cache=True)
        second = model(ids[:, split:], past_key_values=first.past_key_values)
        whole = model(ids)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole.logits)
        for name in ("distances", "syd_distances"):
            torch.testing.assert_close(torch.cat([first[name], second[name]], 2), whole[name])
        assert second.past_key_values.get_seq_length() == 7

    def test_step_by_step(self):
        model = tiny()
        ids, _ = ids_of(7)
        cache, rows = RecurrentCache(), []
        for column in range(7):
            rows.append(model(ids[:, column : column + 1], past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(rows, 1), model(ids).logits)

    @pytest.mark.parametrize("left", [False, True])
    def test_rows_of_unequal_length(self, left):
        # The second row holds no token in one of the two segments.
        model = tiny()
        ids, mask = ids_of(8, 3, 5, left=left)
        first = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True)
        for given in (mask, mask[:, 4:]):
            cache = RecurrentCache()
            cache.store(first.past_key_values.state, 4)
            second = model(ids[:, 4:], attention_mask=given, past_key_values=cache)
            both = torch.cat([first.logits, second.logits], 1)
            torch.testing.assert_close(both[mask == 1], model(ids, attention_mask=mask).logits[mask == 1])
        # A column that is skipped has the state of the column before it, also across the segments.
        if not left:
            torch.testing.assert_close(both[1, 4:], both[1, 2].expand(4, -1))

    def test_training_in_segments(self):
        model = without_dropout().train()
        ids, _ = ids_of(8, 8)
        first = model(ids[:, :4], shift_labels=ids[:, 1:5], use_cache=True)
        second = model(ids[:, 4:7], shift_labels=ids[:, 5:], past_key_values=first.past_key_values)
        whole = model(ids, labels=ids).losses["language_model"]
        joined = (4 * first.losses["language_model"] + 3 * second.losses["language_model"]) / 7
        torch.testing.assert_close(joined, whole)
        assert not any(tensor.requires_grad for tensor in second.past_key_values.state)
        first.loss.backward()
        second.loss.backward()

    def test_rows_are_selected_and_repeated(self):
        model = tiny()
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
        with pytest.raises(ValueError, match="2 rows and input_ids 1"):
            model(following[:1], past_key_values=cache)


# ---------------------------------------------------------------------------------------------------- generation
class OneWord(StoppingCriteria):
    """Ends a sequence after a word."""

    def __init__(self, word):
        self.word = word

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.word


class TestGenerate:
    MODES = ({}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "top_k": 5})

    @pytest.mark.parametrize("options", MODES)
    def test_cache_and_batches_change_nothing(self, options):
        model = tiny()
        ids, mask = ids_of(5, 2, left=True)

        def generate(ids, mask, **more):
            torch.manual_seed(1)
            return model.generate(ids, attention_mask=mask, max_new_tokens=6, eos_token_id=None, **options, **more)

        batch = generate(ids, mask)
        assert torch.equal(batch, generate(ids, mask)) and torch.equal(batch, generate(ids, mask, use_cache=False))
        assert batch.shape == (2 * options.get("num_return_sequences", 1), 11)
        if "do_sample" not in options:
            count = len(batch) // 2
            assert torch.equal(generate(ids[1:, 3:], mask[1:, 3:])[:, 2:], batch[count:, 5:])

    @pytest.mark.parametrize("options", MODES)
    def test_trees_are_those_of_parse(self, options):
        model = tiny()
        ids, mask = ids_of(5, 2, left=True)
        result = model.generate(ids, attention_mask=mask, max_new_tokens=6, return_dict_in_generate=True, **options)
        copies = options.get("num_return_sequences", 1)
        assert len(result.spans) == len(result.sequences) == 2 * copies == len(result.actions)
        for row, sequence in enumerate(result.sequences):
            start = 5 - int(mask[row // copies].sum())
            text = sequence[start:]
            new = text[5 - start :]
            if (new == 0).any():
                text = text[: 5 - start + int((new == 0).long().argmax()) + 1]
            alone = model.parse(text[None])
            assert result.spans[row] == [(i + start, j + start) for i, j in alone.spans[0][0]]
            actions = result.actions[row]
            assert actions[actions >= 0].tolist() == alone.actions[0, 0].tolist()

    def test_sequences_that_a_criterion_ends(self):
        model = tiny()
        ids, _ = ids_of(3, 3)
        options = {
            "max_new_tokens": 5,
            "eos_token_id": 28,
            "suppress_tokens": [0, 28, 29],
            "return_dict_in_generate": True,
        }
        word = model.generate(ids, **options).sequences[0, 4]
        result = model.generate(ids, stopping_criteria=StoppingCriteriaList([OneWord(word)]), **options)
        end = 4 + int((result.sequences[0, 3:] == word).long().argmax())
        assert result.sequences[0, end:].tolist() == [29] * (result.sequences.shape[1] - end)
        assert max(end for _, end in result.spans[0]) == end

    def test_scores_are_log_probabilities(self):
        model = tiny()
        ids, _ = ids_of(4)
        result = model.generate(
            ids, num_beams=30, max_new_tokens=2, eos_token_id=None, length_penalty=0.0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        text = result.sequences
        labels = text.clone()
        labels[:, :4] = -100
        torch.testing.assert_close(result.sequences_scores, model(text, labels=labels).joint_log_prob)
        first = model(ids).logits[0, -1]
        following = [model(torch.cat([ids, torch.tensor([[a]])], 1)).logits[0, -1].max() for a in range(30)]
        best = max((first[a] + following[a]).item() for a in range(30))
        assert result.sequences_scores.item() == pytest.approx(best, abs=1e-5)

    def test_from_the_beginning(self):
        model = tiny()
        started = model.generate(torch.tensor([[0]]), max_new_tokens=5, eos_token_id=None)
        assert torch.equal(model.generate(max_new_tokens=5, eos_token_id=None), started)
        assert started[0, 1] == model(torch.tensor([[0]])).logits[0, -1].argmax()

    def test_sentence_without_words(self):
        model = tiny()
        with torch.no_grad():
            model.lm_head.bias[0] += 100
        result = model.generate(torch.tensor([[0], [0]]), max_new_tokens=5, return_dict_in_generate=True)
        assert result.sequences.tolist() == [[0, 0]] * 2 and result.spans == [[], []]

    def test_unknown_options_are_errors(self):
        with pytest.raises(ValueError, match="not_an_option"):
            tiny().generate(torch.tensor([[5]]), max_new_tokens=2, not_an_option=True)
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            tiny().generate(torch.tensor([[5]]), max_new_tokens=2, assistant_model=tiny())


# ---------------------------------------------------------------------------------------------- saving, types, input
@pytest.mark.parametrize("options", [{}, SUPERVISED, {"supervised_layers": [1], "syntactic_distance_head": "hidden"}])
def test_save_and_load_are_exact(options, tmp_path):
    model = tiny(**options)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is ONLSTMForCausalLM
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    ids, _ = ids_of(7)
    assert torch.equal(model(ids).logits, loaded(ids).logits)
    before, after = model.config.to_dict(), loaded.config.to_dict()
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed <= {"architectures", "dtype", "_name_or_path", "transformers_version"}
    base = ONLSTMModel.from_pretrained(tmp_path).eval()
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_untied_weights(tmp_path):
    model = tiny(tie_word_embeddings=False)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = ONLSTMForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_resize_embeddings():
    model = tiny()
    model.resize_token_embeddings(44)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.bias.shape == (44,) and model.config.vocab_size == 44
    ids = torch.tensor([[43, 7, 42]])
    assert model(ids).logits.shape == (1, 3, 44) and math.isfinite(model.train()(ids, labels=ids).loss.item())


@pytest.mark.parametrize("tied", [True, False])
def test_fresh_parameters(tied):
    config = ONLSTMConfig(vocab_size=2000, embedding_size=64, hidden_size=100, chunk_size=2, tie_word_embeddings=tied)
    model = ONLSTMForCausalLM(config)
    for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
        assert weight.abs().max().item() == pytest.approx(0.1, rel=0.01)
    assert not model.lm_head.bias.any()
    layer = model.model.layers[1]
    for parameter in layer.parameters():
        assert parameter.abs().max().item() == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    model = without_dropout(**SUPERVISED)
    ids, mask = ids_of(9, 4)
    gold = torch.rand(2, 9)
    reference_loss = model(ids, attention_mask=mask, labels=ids, distances=gold).loss.item()
    if dtype == torch.float64:
        model = model.double()
        loss = model(ids, attention_mask=mask, labels=ids, distances=gold).loss.item()
        assert loss == pytest.approx(reference_loss, abs=1e-5)
        assert model(ids).logits.dtype == dtype
        return
    with torch.autocast("cpu", dtype=dtype):
        first = model.train()(ids[:, :5], attention_mask=mask[:, :5], labels=ids[:, :5], use_cache=True)
        second = model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
        loss = model(ids, attention_mask=mask, labels=ids, distances=gold).loss
    loss.backward()
    assert loss.item() == pytest.approx(reference_loss, rel=0.05)
    assert torch.isfinite(second.logits).all() and second.logits.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in model.parameters())
    half = model.to(dtype)
    output = half(ids, attention_mask=mask, use_cache=True)
    assert output.logits.dtype == torch.float32 and torch.isfinite(output.logits).all()
    half(ids, attention_mask=mask, labels=ids, distances=gold).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in half.parameters())
    assert half.eval().generate(ids, attention_mask=mask, max_new_tokens=3).shape == (2, 12)


def test_compiled_model_gives_the_same_numbers():
    model = without_dropout(**SUPERVISED)
    ids, mask = ids_of(6, 4)
    expected = model(ids, attention_mask=mask, labels=ids, distances=torch.ones(2, 6).cumsum(1))
    expected.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    output = compiled(ids, attention_mask=mask, labels=ids, distances=torch.ones(2, 6).cumsum(1))
    torch.testing.assert_close(output.loss, expected.loss)
    output.loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.gpu
def test_gpu_gives_the_same_numbers():
    model = without_dropout(**SUPERVISED)
    ids, mask = ids_of(9, 4, 2, left=True)
    gold = torch.rand(3, 9)
    expected = model(ids, attention_mask=mask)
    loss = model(ids, attention_mask=mask, labels=ids, distances=gold).loss
    model, ids, mask, gold = model.cuda(), ids.cuda(), mask.cuda(), gold.cuda()
    output = model(ids, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(output.logits.cpu(), expected.logits, atol=1e-4, rtol=1e-4)
    trained = model.train()(ids, attention_mask=mask, labels=ids, distances=gold)
    torch.testing.assert_close(trained.loss.cpu(), loss, atol=1e-4, rtol=1e-4)
    trained.loss.backward()
    model.eval()
    result = model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=2, return_dict_in_generate=True)
    assert len(result.spans) == 3
    torch.cuda.set_sync_debug_mode("error")  # a training step waits for nothing
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            half = model.train()(ids, attention_mask=mask, labels=ids, distances=gold).loss
        half.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert half.item() == pytest.approx(loss.item(), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "integers"),
        ({"input_ids": torch.rand(2, 3)}, "integers"),
        ({"input_ids": torch.tensor([[7, 99]])}, "99"),
        ({"input_ids": torch.full((1, 4), 7), "attention_mask": torch.ones(1, 5)}, "attention_mask"),
        ({"input_ids": torch.full((1, 4), 7), "labels": torch.full((1, 3), 7)}, "labels"),
        ({"input_ids": torch.full((1, 4), 7), "labels": torch.full((1, 4), 30)}, "Label 30"),
        ({"input_ids": torch.full((1, 4), 7), "labels": torch.full((1, 4), 7), "logits_to_keep": 1}, "logits_to_keep"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny()(**arguments)
    with pytest.raises(TypeError, match="position_ids"):
        tiny()(torch.tensor([[5]]), position_ids=torch.tensor([[0]]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"chunk_size": 5}, "chunk_size 5 does not divide the width"),
        ({"weight_dropout": 1.0}, "weight_dropout"),
        ({"syntactic_distance_margin": -1.0}, "syntactic_distance_margin"),
        ({"syntactic_distance_head": "two"}, "two"),
        ({"syntactic_distance_scope": "corpus"}, "corpus"),
        ({"syntactic_distance_reduction": "max"}, "max"),
        ({"supervised_layers": [3]}, "below 3"),
        ({"supervised_layers": [1, 1]}, "distinct"),
        ({"supervised_layers": []}, "supervised_layers"),
        ({"pad_token_id": 30}, "pad_token_id 30 is outside"),
    ],
)
def test_bad_configurations_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        ONLSTMConfig(**{**TINY, **fields})


def test_unknown_preset():
    with pytest.raises(ValueError, match="on-lstm-ptb"):
        ONLSTMConfig.from_preset("on-lstm")


# ------------------------------------------------------------------------------------------------- classification
@pytest.mark.parametrize("left", [False, True])
def test_classifier_reads_the_last_token(left, tmp_path):
    model = tiny(ONLSTMForSequenceClassification, num_labels=3)
    ids, mask = ids_of(7, 3, left=left)
    output = model(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    for row in range(2):
        own = ids[row][mask[row].bool()][None]
        torch.testing.assert_close(output.logits[row], model(own).logits[0])
    torch.testing.assert_close(output.loss, -output.logits.log_softmax(-1)[[0, 1], [0, 2]].mean())
    output.loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    tiny().save_pretrained(tmp_path)
    started = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(started.model.layers[2].hh.weight, tiny().model.layers[2].hh.weight)


# ---------------------------------------------------------------------------------------------------------- tools
@pytest.fixture(scope="module")
def tokenizer():
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    vocabulary = {word: index for index, word in enumerate(["</s>", "<unk>", *words])} | {"<pad>": 29}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="</s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="module")
def own_scores(tokenizer):
    rows = [torch.tensor([tokenizer(sentence)["input_ids"]]) for sentence in SENTENCES]
    return [tiny().parse(ids).token_log_probs.sum().item() for ids in rows]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lm_eval_gives_the_own_log_probabilities(tokenizer, own_scores, batch_size):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=tiny(), tokenizer=tokenizer, batch_size=batch_size)
    requests = [Instance("loglikelihood", {}, ("", sentence), x) for x, sentence in enumerate(SENTENCES)]
    assert [score for score, _ in lm.loglikelihood(requests)] == pytest.approx(own_scores, abs=1e-4)
    rolling = [Instance("loglikelihood_rolling", {}, (sentence,), x) for x, sentence in enumerate(SENTENCES)]
    assert lm.loglikelihood_rolling(rolling) == pytest.approx(own_scores, abs=1e-4)


def test_minicons_gives_the_own_log_probabilities(tokenizer, own_scores):
    scorer = pytest.importorskip("minicons.scorer").IncrementalLMScorer(tiny(), "cpu", tokenizer=tokenizer)
    scores = scorer.sequence_score(SENTENCES, reduction=lambda x: x.sum(0).item(), bos_token=True)
    assert scores == pytest.approx(own_scores, abs=1e-4)


def test_pipeline_and_trainer(tokenizer, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = without_dropout()
    rows = [[0, *tokenizer(sentence)["input_ids"], 0] for sentence in SENTENCES]

    def collate(batch):
        return tokenizer.pad({"input_ids": [row["input_ids"] for row in batch]}, return_tensors="pt") | {
            "labels": torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row["input_ids"]) for row in batch], batch_first=True, padding_value=-100
            )
        }

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=60, per_device_train_batch_size=3, gradient_accumulation_steps=2,
        learning_rate=3e-2, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": row} for row in rows]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, data_collator=collate)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 1
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    results = generator(["the keys", "fruit"], max_new_tokens=3, do_sample=False, batch_size=2)
    assert [result[0]["generated_text"] for result in results][1].startswith("fruit")
