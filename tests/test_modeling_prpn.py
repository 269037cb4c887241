"""PRPN and PRPN-SYD as models of transformers: values, gradients, the contract of `forward`, trees, texts, saving."""

import math

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_synlm import layers_prpn, reader_prpn
from hf_synlm.configuration_prpn import PRPNConfig
from hf_synlm.layers_prpn import normalize, normalize_backward, normalize_factors
from hf_synlm.modeling_prpn import PRPNForCausalLM, PRPNForSequenceClassification, PRPNModel
from hf_synlm.reader_prpn import ReadingLayer
from hf_synlm.recurrent_cache import RecurrentCache
from hf_synlm.recurrent_dropout import keep_mask
from hf_synlm.syntactic_distance import distances_to_spans, ranking_loss
from tests.reference.prpn import prpn

TINY = {
    "vocab_size": 30,
    "embedding_size": 6,
    "hidden_size": 8,
    "num_layers": 2,
    "num_slots": 4,
    "num_lookback": 2,
    "resolution": 0.2,
    "dropout": 0.3,
    "input_dropout": 0.2,
    "recurrent_dropout": 0.25,
    "tie_word_embeddings": True,
}
KINDS = {
    "hard": {},
    "soft": {"gate": "soft", "num_residual_blocks": 2, "tie_word_embeddings": False, "num_layers": 3},
    "no lookback": {"num_lookback": 0, "num_slots": 3, "num_layers": 1, "resolution": 1.0},
    "syd": {"parsing_network": "recurrent", "num_residual_blocks": 1},
    "syd, no lookback": {"parsing_network": "recurrent", "num_lookback": 0, "gate": "soft"},
}
NO_DROPOUT = {"dropout": 0.0, "input_dropout": 0.0, "recurrent_dropout": 0.0}
kinds = pytest.mark.parametrize("kind", list(KINDS))


def tiny(kind="hard", cls=PRPNForCausalLM, **overrides):
    """A model whose distances and scores differ from token to token, in evaluation mode."""
    torch.manual_seed(0)
    model = cls(PRPNConfig(**{**TINY, **KINDS[kind], **overrides}))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.7)
            if name.endswith(("norm.weight", "running_var")):
                tensor.abs_().add_(0.3)
    return model.eval()


def ids_of(*lengths, width=None, left=False):
    torch.manual_seed(3)
    width = width or max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        where = slice(width - n, width) if left else slice(0, n)
        ids[row, where] = torch.randint(1, 30, (n,))
        mask[row, where] = 1
    return ids, mask


def rows_of(ids, mask):
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------------- the definition
class TestDefinition:
    LENGTHS = (7, 3, 1, 5)

    def compare(self, model, ids, mask, masks=(), training=False):
        """Scores, distances and gradients of the model and of the reference, on tokens only."""
        output = model(ids, attention_mask=mask)
        expected, distances = prpn(model, rows_of(ids, mask), masks, training)
        for row, keep in enumerate(mask.bool()):
            torch.testing.assert_close(output.logits[row][keep], torch.stack(expected[row]))
            theirs = torch.stack([torch.stack(token) for token in distances[row]], 1)
            torch.testing.assert_close(output.distances[0, row][keep].double(), theirs[0])
            if model.config.parsing_network == "recurrent":
                torch.testing.assert_close(output.syd_distances[0, row][keep].double(), theirs[2])
        weight = torch.randn(*output.logits.shape, dtype=torch.double)
        mine = gradients(model, (output.logits * weight)[mask.bool()].sum())
        summed = sum(
            (value * weight[row][mask[row].bool()][t]).sum()
            for row, values in enumerate(expected)
            for t, value in enumerate(values)
        )
        theirs = gradients(model, summed)
        for name, gradient in mine.items():
            if theirs[name] is None:
                assert "supervised_head" in name and (gradient is None or not gradient.any())
            else:
                torch.testing.assert_close(
                    gradient, theirs[name], rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
                )

    @kinds
    def test_evaluation(self, kind):
        self.compare(tiny(kind).double(), *ids_of(*self.LENGTHS))

    @kinds
    @pytest.mark.parametrize("left", [False, True])
    def test_training_with_dropout(self, kind, left, monkeypatch):
        masks = []

        def recorded(*arguments, **options):
            masks.append(keep_mask(*arguments, **options))
            return masks[-1]

        for module in (layers_prpn, reader_prpn):
            monkeypatch.setattr(module, "keep_mask", recorded)
        model = tiny(kind).double().train()
        self.compare_training(model, masks, left)

    def compare_training(self, model, masks, left):
        ids, mask = ids_of(*self.LENGTHS, left=left)
        model(ids, attention_mask=mask)
        shift = [len(row) - sum(row) for row in mask.tolist()] if left else [0] * len(ids)
        drawn = list(masks)
        # The last mask is laid out as the input; the reference counts tokens.
        drawn[-1] = torch.stack([row.roll(-places, 0) for row, places in zip(drawn[-1], shift, strict=True)])
        replayed = iter(list(masks))
        for module in (layers_prpn, reader_prpn):
            module.keep_mask = lambda *_, **__: next(replayed)
        self.compare(model, ids, mask, drawn, training=True)

    def test_soft_distances_are_float32_at_least(self):
        model = tiny("soft")
        assert model(ids_of(4)[0]).distances.dtype == torch.float32


class TestLayers:
    @pytest.mark.parametrize("scale", [1.0, 1e-6])
    def test_normalization(self, scale):
        x = (scale * torch.randn(3, 2, 5, dtype=torch.double)).requires_grad_()
        expected = (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-6)
        normalized = torch.empty_like(expected)
        inverse = normalize(x.detach(), out=normalized)
        torch.testing.assert_close(normalized, expected)
        grad = torch.randn_like(expected)
        mine = normalize_backward(grad, normalized, *normalize_factors(inverse, 5))
        torch.testing.assert_close(mine, torch.autograd.grad(expected, x, grad)[0])

    def test_normalization_of_constant_rows(self):
        normalized = torch.empty(2, 4)
        inverse = normalize(torch.full((2, 4), 3.0), out=normalized)
        assert not normalized.any()
        gradient = normalize_backward(torch.randn(2, 4), normalized, *normalize_factors(inverse, 4))
        assert torch.isfinite(gradient).all()

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize(("steps", "slots"), [(6, 3), (2, 4), (1, 1)])
    def test_gradients_of_a_reading_layer(self, training, steps, slots):
        torch.manual_seed(1)
        layer = ReadingLayer(2, 4, 0.3, 0.4, 0.5).double().train(training)
        names = [name for name, _ in layer.named_parameters()]
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, 0, 0.5)
        x = torch.randn(steps, 2, 2, dtype=torch.double, requires_grad=True)
        gate = torch.rand(steps, 2, slots, dtype=torch.double, requires_grad=True)
        tape = torch.randn(slots, 2, 8, dtype=torch.double)

        def run(x, gate, *parameters):
            torch.manual_seed(5)
            return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, gate, tape))[0]

        assert torch.autograd.gradcheck(run, (x, gate, *layer.parameters()))


# ------------------------------------------------------------------------------------------------- the contract
class TestForward:
    @kinds
    def test_later_tokens_change_nothing_before_them(self, kind):
        model = tiny(kind)
        ids, _ = ids_of(9)
        changed = ids.clone()
        changed[0, 5:] = torch.tensor([1, 2, 3, 4])
        first, second = model(ids), model(changed)
        assert torch.equal(first.logits[:, :5], second.logits[:, :5])
        assert not torch.equal(first.logits[:, 5:], second.logits[:, 5:])
        assert torch.equal(first.distances[..., :5], second.distances[..., :5])

    @kinds
    @pytest.mark.parametrize("left", [False, True])
    def test_padding_and_batching_change_nothing(self, kind, left):
        model = tiny(kind)
        ids, mask = ids_of(9, 4, 1, width=12, left=left)
        together = model(ids, attention_mask=mask, use_cache=True)
        scores = model(ids, attention_mask=mask, labels=ids).joint_log_prob
        attentions = model.model(ids, attention_mask=mask, output_attentions=True).attentions
        for row, keep in enumerate(mask.bool()):
            own = ids[row][keep][None]
            alone = model(own, use_cache=True)
            torch.testing.assert_close(together.logits[row][keep], alone.logits[0])
            torch.testing.assert_close(together.distances[:, row][:, keep], alone.distances[:, 0])
            torch.testing.assert_close(scores[row], model(own, labels=own).joint_log_prob[0])
            for mine, theirs in zip(together.past_key_values.state, alone.past_key_values.state, strict=True):
                torch.testing.assert_close(mine[:, row], theirs[:, 0])
            own_attentions = model.model(own, output_attentions=True).attentions
            for mine, theirs in zip(attentions, own_attentions, strict=True):
                torch.testing.assert_close(mine[row][keep], theirs[0])
        assert torch.isfinite(together.logits).all()

    @kinds
    def test_padding_changes_no_training(self, kind):
        """Loss, gradients and batch statistics, with batch normalization of tokens only."""
        results = []
        for width, left in ((9, False), (13, False), (13, True)):
            model = tiny(kind, **NO_DROPOUT).train()
            ids, mask = ids_of(9, 4, 1, width=width, left=left)
            ids = ids.masked_fill(mask == 0, 7 if width == 13 else 0)
            loss = model(ids, attention_mask=mask, labels=ids).loss
            results.append((loss, gradients(model, loss), {n: b.clone() for n, b in model.named_buffers()}))
        for loss, grads, buffers in results[1:]:
            torch.testing.assert_close(loss, results[0][0])
            for name, gradient in grads.items():
                torch.testing.assert_close(gradient, results[0][1][name], rtol=1e-4, atol=1e-5)
            for name, buffer in buffers.items():
                torch.testing.assert_close(buffer, results[0][2][name])

    def test_padding_counts_where_asked_for(self):
        ids, mask = ids_of(9, 4)
        losses = [
            tiny(pad_aware_batch_norm=aware, **NO_DROPOUT).train()(ids, attention_mask=mask, labels=ids).loss.item()
            for aware in (True, False)
        ]
        assert losses[0] != losses[1]
        everything = tiny(**NO_DROPOUT).train()(ids, labels=ids.masked_fill(mask == 0, -100))
        assert everything.loss.item() == pytest.approx(losses[1], rel=1e-5)

    def test_columns_out_of_the_mask_do_not_exist(self):
        model = tiny()
        ids, _ = ids_of(6)
        mask = torch.tensor([[0, 1, 1, 0, 1, 1]])
        with_holes, without = model(ids, attention_mask=mask), model(ids[:, mask[0] == 1])
        torch.testing.assert_close(with_holes.logits[:, mask[0] == 1], without.logits)
        assert torch.equal(with_holes.logits[:, 3], with_holes.logits[:, 2])
        assert with_holes.distances[0, 0, 3] == 0

    def test_labels_and_loss(self):
        model = tiny()
        ids, mask = ids_of(8, 5)
        log_probs = model(ids, attention_mask=mask).logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        counted = mask[:, 1:].bool()
        output = model(ids, attention_mask=mask, labels=ids)
        torch.testing.assert_close(output.loss, -log_probs[counted].mean())
        torch.testing.assert_close(output.joint_log_prob, (log_probs * counted).sum(1))
        assert set(output.losses) == {"language_model"} and output.logits is None
        weighted = tiny(language_model_weight=0.5)(ids, attention_mask=mask, labels=ids)
        torch.testing.assert_close(2 * weighted.loss, output.loss)
        shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1).masked_fill(mask == 0, -100)
        shifted[1, 4] = -100
        torch.testing.assert_close(model(ids, attention_mask=mask, shift_labels=shifted).loss, output.loss)

    def test_logits_to_keep(self):
        model = tiny()
        ids, _ = ids_of(7)
        logits = model(ids).logits
        torch.testing.assert_close(logits.exp().sum(-1), torch.ones(1, 7))
        torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])

    @kinds
    def test_every_parameter_learns(self, kind):
        model = tiny(kind).train()
        ids, mask = ids_of(9, 4, 6)
        grads = gradients(model, model(ids, attention_mask=mask, labels=ids).loss)
        assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in grads.values())
        assert all(gradient.any() for name, gradient in grads.items() if "supervised" not in name)
        nothing = model(ids, labels=torch.full_like(ids, -100))
        grads = gradients(model, nothing.loss)
        assert nothing.loss.item() == 0 and all(gradient is not None for gradient in grads.values())

    @pytest.mark.parametrize("name", list(NO_DROPOUT))
    def test_dropout_in_training_only(self, name):
        model = tiny(**{**NO_DROPOUT, name: 0.5})
        ids, _ = ids_of(9, 9)
        assert len({model(ids, labels=ids).loss.item() for _ in range(3)}) == 1
        assert len({model.train()(ids, labels=ids).loss.item() for _ in range(3)}) == 3

    def test_one_token_trains_nothing(self):
        with pytest.raises(ValueError, match="1 tokens: batch normalization"):
            tiny().train()(torch.tensor([[5, 6]]), attention_mask=torch.tensor([[1, 0]]))

    @kinds
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_is_finite(self, kind, dtype):
        model = tiny(kind, **NO_DROPOUT)
        ids, mask = ids_of(9, 4)
        reference = model(ids, attention_mask=mask, labels=ids).loss.item()
        with torch.autocast("cpu", dtype=dtype):
            first = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
            second = model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
            evaluated = model(ids, attention_mask=mask, labels=ids).loss
            loss = model.train()(ids, attention_mask=mask, labels=ids).loss
        assert evaluated.item() == pytest.approx(reference, rel=0.1)
        assert torch.isfinite(second.logits).all() and second.logits.dtype == torch.float32
        grads = gradients(model, loss)
        assert all(torch.isfinite(gradient).all() for gradient in grads.values())
        assert all(gradient.dtype == torch.float32 for gradient in grads.values())

    @kinds
    def test_half_precision(self, kind):
        ids, mask = ids_of(9, 4)
        model = tiny(kind, **NO_DROPOUT).to(torch.bfloat16)
        first = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        assert model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values).logits.isfinite().all()
        loss = model.train()(ids, attention_mask=mask, labels=ids).loss
        assert all(torch.isfinite(gradient).all() for gradient in gradients(model, loss).values())

    def test_compiled(self):
        model = tiny(**NO_DROPOUT)
        ids, mask = ids_of(9, 4)
        compiled = torch.compile(model, backend="aot_eager")
        expected = model(ids, attention_mask=mask, labels=ids).loss
        loss = compiled(ids, attention_mask=mask, labels=ids).loss
        torch.testing.assert_close(loss, expected)
        theirs = gradients(model, expected)
        for name, gradient in gradients(model, loss).items():
            torch.testing.assert_close(gradient, theirs[name])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "integers"),
            ({"input_ids": torch.rand(2, 3)}, "integers"),
            ({"input_ids": torch.tensor([[7, 99]])}, "99"),
            ({"input_ids": torch.full((1, 4), 7), "attention_mask": torch.ones(1, 5)}, "attention_mask"),
            ({"input_ids": torch.full((1, 4), 7), "labels": torch.full((1, 3), 7)}, "labels"),
            ({"input_ids": torch.full((1, 4), 7), "labels": torch.full((1, 4), 30)}, "Label 30"),
            ({"input_ids": torch.full((1, 4), 7), "distances": torch.ones(1, 4)}, "distances are for training"),
        ],
    )
    def test_bad_input_is_named(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            tiny()(**arguments)
        with pytest.raises(TypeError, match="position_ids"):
            tiny()(torch.tensor([[5]]), position_ids=torch.tensor([[0]]))


class TestCache:
    @kinds
    @pytest.mark.parametrize("split", [1, 2, 5, 8])
    def test_two_calls_are_one(self, kind, split):
        model = tiny(kind)
        ids, _ = ids_of(9, 9)
        first = model(ids[:, :split], use_cache=True)
        second = model(ids[:, split:], past_key_values=first.past_key_values)
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), model(ids).logits)
        whole = model(ids, use_cache=True).past_key_values
        assert second.past_key_values.get_seq_length() == 9
        for mine, theirs in zip(second.past_key_values.state, whole.state, strict=True):
            torch.testing.assert_close(mine, theirs)

    @kinds
    def test_step_by_step(self, kind):
        model = tiny(kind)
        ids, _ = ids_of(7, 7)
        cache, logits = RecurrentCache(), []
        for column in ids.split(1, 1):
            logits.append(model(column, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits)

    @kinds
    @pytest.mark.parametrize("left", [False, True])
    def test_rows_of_unequal_length(self, kind, left):
        # The second row holds no token in one of the two segments.
        model = tiny(kind)
        ids, mask = ids_of(8, 3, 5, left=left)
        whole = model(ids, attention_mask=mask).logits
        first = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True)
        for given in (mask, mask[:, 4:]):
            cache = RecurrentCache()
            cache.store(first.past_key_values.state, 4, batch_dim=1)
            second = model(ids[:, 4:], attention_mask=given, past_key_values=cache)
            both = torch.cat([first.logits, second.logits], 1)
            torch.testing.assert_close(both[mask == 1], whole[mask == 1])
            if not left:  # a column that is skipped has the features of the last token
                torch.testing.assert_close(second.logits[1], whole[1, 4:])

    def test_training_in_segments(self):
        model = tiny(**NO_DROPOUT).train()
        ids, _ = ids_of(8, 8)
        first = model(ids[:, :4], labels=ids[:, :4], use_cache=True)
        second = model(ids[:, 4:], labels=ids[:, 4:], past_key_values=first.past_key_values)
        assert not any(tensor.requires_grad for tensor in second.past_key_values.state)
        first.loss.backward()
        second.loss.backward()

    def test_rows_are_selected_and_repeated(self):
        model = tiny()
        ids, mask = ids_of(6, 3)
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0]))
        following = torch.tensor([[7], [7]])
        mine = model(following, past_key_values=cache).logits[:, 0]
        for row, length in ((0, 3), (1, 6)):
            text = torch.cat([ids[1 - row, :length], following[0]])[None]
            torch.testing.assert_close(mine[row], model(text).logits[0, -1])
        with pytest.raises(ValueError, match="2 rows and input_ids 1"):
            model(following[:1], past_key_values=cache)


# ------------------------------------------------------------------------------------------------------- PRPN-SYD
class TestSupervision:
    def test_loss(self):
        model = tiny("syd", language_model_weight=0.5, syntactic_distance_weight=2.0, syntactic_distance_scale=3.0)
        ids, mask = ids_of(8, 5)
        gold = torch.randint(0, 4, ids.shape).float()
        gold[0, 0] = torch.nan
        output = model(ids, attention_mask=mask, labels=ids, distances=gold)
        predicted = model(ids, attention_mask=mask).syd_distances[0]
        expected = ranking_loss(3 * predicted, gold.masked_fill(mask == 0, torch.nan), margin=1.0)
        torch.testing.assert_close(output.losses["syntactic_distance"], expected)
        torch.testing.assert_close(output.loss, 0.5 * output.losses["language_model"] + 2 * expected)
        grads = gradients(model, output.loss)
        assert all(grads[name].any() for name in grads if "supervised_head" in name)

    def test_sentences_of_a_stream_are_compared_by_themselves(self):
        ids, _ = ids_of(9)
        ids[0, [3, 6]] = 0  # the end of a sentence
        gold = torch.tensor([[2.0, 1, 3, 9, 5, 1, 8, 2, 7]])
        model = tiny("syd", syntactic_distance_reduction="sum")
        loss = model(ids, labels=ids, distances=gold).losses["syntactic_distance"]
        predicted = model(ids).syd_distances
        parts = [
            ranking_loss(predicted[0, :, part], gold[:, part], margin=1.0, reduction="sum")
            for part in (slice(0, 4), slice(4, 7), slice(7, 9))
        ]
        torch.testing.assert_close(loss, sum(parts))

    def test_supervision_learns_trees(self):
        model = tiny("syd", syntactic_distance_scale=8.0, **NO_DROPOUT).train()
        ids, _ = ids_of(8, 8)
        gold = torch.stack([torch.randperm(8), torch.randperm(8)]).float()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            model(ids, labels=ids, distances=gold).loss.backward()
            optimizer.step()
        predicted = model(ids).syd_distances[0]
        assert all(
            distances_to_spans(mine, "biased") == distances_to_spans(theirs, "biased")
            for mine, theirs in zip(predicted.tolist(), gold.tolist(), strict=True)
        )

    @pytest.mark.parametrize(
        ("kind", "options", "message"),
        [
            ("hard", {"labels": True}, "parsing_network='recurrent'"),
            ("syd", {}, "Pass labels"),
            ("syd", {"labels": True, "width": 3}, "Align"),
        ],
    )
    def test_bad_distances_are_named(self, kind, options, message):
        ids, _ = ids_of(4)
        gold = torch.ones(1, options.get("width", 4))
        with pytest.raises(ValueError, match=message):
            tiny(kind)(ids, labels=ids if "labels" in options else None, distances=gold)


# ------------------------------------------------------------------------------------------------ trees and texts
class TestParse:
    @pytest.mark.parametrize("kind", ["hard", "syd"])
    @pytest.mark.parametrize("decoder", ["unbiased", "biased"])
    def test_trees_are_those_of_the_distances(self, kind, decoder):
        model = tiny(kind)
        ids, mask = ids_of(7, 3, 1, left=True)
        choices = {"language_model": "distances"} | ({"supervised": "syd_distances"} if kind == "syd" else {})
        for distances, name in choices.items():
            parsed = model.parse(ids, mask, decoder=decoder, distances=distances)
            for row, tokens in enumerate(rows_of(ids, mask)):
                framed = torch.tensor([[0, *tokens, 0]])
                values = model(framed)[name][0, 0, 1:-1].tolist()
                shift = 7 - len(tokens)
                expected = [(i + shift, j + shift) for i, j in distances_to_spans(values, decoder)]
                assert parsed.spans[row] == [expected]
                scores = model(framed).logits[0, :-1].gather(1, framed[0, 1:, None])[:, 0]
                torch.testing.assert_close(parsed.token_log_probs[row, shift:], scores[:-1])
                torch.testing.assert_close(parsed.log_probs[row, 0], scores.sum())
        default = model.parse(ids, mask, decoder=decoder)
        chosen = model.parse(ids, mask, decoder=decoder, distances=list(choices)[-1])
        assert default.spans == chosen.spans

    def test_words_of_pieces(self):
        model = tiny()
        ids, _ = ids_of(6)
        ends = torch.tensor([[0, 1, 1, 0, 0, 1]])
        parsed = model.parse(ids, word_ends=ends)
        values = model(torch.tensor([[0, *ids[0].tolist(), 0]])).distances[0, 0, 1:-1][[0, 2, 3]].tolist()
        words = {0: 0, 1: 2, 2: 3, 3: 6}
        outer = {(words[i], words[j]) for i, j in distances_to_spans(values)}
        assert outer <= set(parsed.spans[0][0]) and len(parsed.spans[0][0]) == 5
        assert parsed.brackets(["a", "b", "c"]) in {"((a b) c)", "(a (b c))"}

    def test_bad_options_are_named(self):
        ids, _ = ids_of(4)
        for options, message in (
            ({"method": "search"}, "method 'search'"),
            ({"decoder": "left"}, "decoder 'left'"),
            ({"distances": "supervised"}, "no distances 'supervised'"),
        ):
            with pytest.raises(ValueError, match=message):
                tiny().parse(ids, **options)


class TestGenerate:
    MODES = ({}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "top_k": 5})

    @pytest.mark.parametrize("kind", ["hard", "syd"])
    @pytest.mark.parametrize("options", MODES)
    def test_cache_and_batches_change_nothing(self, kind, options):
        model = tiny(kind)
        ids, mask = ids_of(5, 2, left=True)

        def generate(ids, mask, **more):
            torch.manual_seed(1)
            return model.generate(ids, attention_mask=mask, max_new_tokens=6, eos_token_id=None, **options, **more)

        batch = generate(ids, mask)
        assert torch.equal(batch, generate(ids, mask)) and torch.equal(batch, generate(ids, mask, use_cache=False))
        if "do_sample" not in options:
            count = len(batch) // 2
            assert torch.equal(generate(ids[1:, 3:], mask[1:, 3:])[:, 2:], batch[count:, 5:])

    def test_trees_of_what_is_generated(self):
        model = tiny()
        ids, mask = ids_of(5, 2, left=True)
        result = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, eos_token_id=None, return_dict_in_generate=True
        )
        text_mask = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], 1)
        assert result.spans == [row[0] for row in model.parse(result.sequences, text_mask).spans]


# ------------------------------------------------------------------------------------------------------ the model
class TestModel:
    @kinds
    def test_save_and_load_are_exact(self, kind, tmp_path):
        model = tiny(kind)
        model.save_pretrained(tmp_path)
        loaded = PRPNForCausalLM.from_pretrained(tmp_path)
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
        tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
        assert tied == model.config.tie_word_embeddings
        ids, _ = ids_of(7)
        # The last bit depends on where in memory the weights lie.
        torch.testing.assert_close(model(ids).logits, loaded(ids).logits, rtol=0, atol=5e-6)
        before, after = model.config.to_dict(), loaded.config.to_dict()
        changed = {key for key in before if before[key] != after.get(key)}
        assert changed <= {"architectures", "dtype", "_name_or_path", "transformers_version"}
        base = PRPNModel.from_pretrained(tmp_path)
        torch.testing.assert_close(base(ids).last_hidden_state, model.model(ids).last_hidden_state, rtol=0, atol=5e-6)

    def test_auto_classes(self, tmp_path):
        tiny().save_pretrained(tmp_path)
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is PRPNForCausalLM
        assert type(AutoModel.from_pretrained(tmp_path)) is PRPNModel
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
        assert type(classifier) is PRPNForSequenceClassification

    @kinds
    def test_classification(self, kind):
        model = tiny(kind, cls=PRPNForSequenceClassification, num_labels=3)
        ids, mask = ids_of(7, 3)
        output = model(ids, attention_mask=mask, labels=torch.tensor([0, 2]))
        torch.testing.assert_close(output.logits[1], model(ids[1:, :3]).logits[0])
        assert output.logits.shape == (2, 3) and set(output.losses) == {"classification"}
        output.loss.backward()

    def test_resize_embeddings(self):
        for tied in (True, False):
            model = tiny(tie_word_embeddings=tied)
            model.resize_token_embeddings(44)
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
            assert model.lm_head.bias.shape == (44,) and model.config.vocab_size == 44
            ids = torch.tensor([[43, 7, 42]])
            assert model(ids).logits.shape == (1, 3, 44) and math.isfinite(model(ids, labels=ids).loss.item())

    def test_fresh_parameters(self):
        torch.manual_seed(0)
        model = PRPNForCausalLM(PRPNConfig(vocab_size=500, embedding_size=40, hidden_size=60, num_residual_blocks=1))
        weights, base = model.state_dict(), model.model
        assert weights["lm_head.weight"].abs().max().item() == pytest.approx(0.01, rel=0.01)
        assert not weights["lm_head.bias"].any()
        assert base.layers[0].key.weight.abs().max().item() == pytest.approx(0.1, rel=0.01)
        convolution = base.parser.features.convolution
        assert convolution.bias.abs().max().item() == pytest.approx(240**-0.5, rel=0.1)
        scales = torch.cat([weights[n] for n in weights if n.endswith("norm.weight") and "layers" not in n])
        assert 0.4 < scales.mean() < 0.6 and 0 <= scales.min() < 0.05 and 0.95 < scales.max() <= 1
        ones = PRPNForCausalLM(PRPNConfig(**TINY, batch_norm_init="ones"))
        assert (ones.model.predictor.output_norm.weight == 1).all()

    def test_presets(self):
        with torch.device("meta"):
            model = PRPNForCausalLM(PRPNConfig.from_preset("prpn-ptb-word"))
            assert model.num_parameters() == 43_603_202
            for name in ("prpn-ptb-character", "prpn-text8", "prpn-wsj10", "prpn-syd"):
                PRPNForCausalLM(PRPNConfig.from_preset(name, vocab_size=50))
        with pytest.raises(ValueError, match="prpn-wsj10"):
            PRPNConfig.from_preset("prpn")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"hidden_size": 7}, "hidden_size must be even"),
            ({"num_slots": 0}, "num_slots must be at least 1"),
            ({"num_lookback": -1}, "num_lookback must not be negative"),
            ({"dropout": 1.0}, "dropout"),
            ({"resolution": 0.0}, "resolution"),
            ({"resolution": 1000.0}, "resolution"),
            ({"gate": "wide"}, "gate 'wide'"),
            ({"parsing_network": "lstm"}, "parsing_network 'lstm'"),
            ({"syntactic_distance_scope": "row"}, "syntactic_distance_scope 'row'"),
            ({"pad_token_id": 30}, "pad_token_id 30 is outside"),
        ],
    )
    def test_bad_configurations_are_named(self, fields, message):
        with pytest.raises(ValueError, match=message):
            PRPNConfig(**{**TINY, **fields})


@pytest.mark.gpu
@kinds
def test_gpu_gives_the_same_numbers(kind):
    model = tiny(kind, **NO_DROPOUT)
    ids, mask = ids_of(9, 4, 6, left=True)
    expected, loss = model(ids, attention_mask=mask).logits, model.train()(ids, attention_mask=mask, labels=ids).loss
    expected_gradients = gradients(model, loss)
    model = tiny(kind, **NO_DROPOUT).cuda()
    ids, mask = ids.cuda(), mask.cuda()
    output = model(ids, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(output.logits.cpu(), expected, atol=1e-4, rtol=1e-4)
    trained = model.train()(ids, attention_mask=mask, labels=ids).loss
    torch.testing.assert_close(trained.cpu(), loss.detach(), atol=1e-4, rtol=1e-4)
    for name, gradient in gradients(model, trained).items():
        torch.testing.assert_close(gradient.cpu(), expected_gradients[name], atol=1e-3, rtol=1e-3)
    generated = model.eval().generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=2)
    assert generated.shape[0] == 3
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half = model.train()(ids, attention_mask=mask, labels=ids).loss
    half.backward()
    assert half.item() == pytest.approx(loss.item(), rel=0.1)
