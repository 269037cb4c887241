"""PRPN and PRPN-SYD as models of transformers: values, gradients, the contract of `forward`, trees, texts, saving."""

import functools

import pytest
import torch

from hf_synlm.models.prpn import parser as prpn_parser, reader as prpn_reader
from hf_synlm.models.prpn.configuration_prpn import PRPNConfig
from hf_synlm.models.prpn.modeling_prpn import PRPNForCausalLM
from hf_synlm.models.prpn.reader import ReadingLayer
from hf_synlm.recurrent.layers import keep_mask
from tests.helpers.recurrent_models import MODELS, gradients, ids_of, make_model
from tests.reference.prpn import prpn

tiny = functools.partial(make_model, "prpn")
kinds = pytest.mark.parametrize("kind", [name for name, (prefix, _) in MODELS.items() if prefix == "PRPN"])


def rows_of(ids, mask):
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


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
            torch.testing.assert_close(output.distances[row, 0][keep].double(), theirs[0])
            if model.config.parsing_network == "recurrent":
                torch.testing.assert_close(output.syd_distances[row, 0][keep].double(), theirs[2])
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
        self.compare(make_model(kind).double(), *ids_of(*self.LENGTHS))

    @kinds
    @pytest.mark.parametrize("left", [False, True])
    def test_training_with_dropout(self, kind, left, monkeypatch):
        masks = []

        def recorded(*arguments, **options):
            masks.append(keep_mask(*arguments, **options))
            return masks[-1]

        for module in (prpn_parser, prpn_reader):
            monkeypatch.setattr(module, "keep_mask", recorded)
        self.compare_training(make_model(kind).double().train(), masks, left)

    def compare_training(self, model, masks, left):
        ids, mask = ids_of(*self.LENGTHS, left=left)
        model(ids, attention_mask=mask)
        shift = [len(row) - sum(row) for row in mask.tolist()] if left else [0] * len(ids)
        drawn = list(masks)
        # The last mask is laid out as the input; the reference counts tokens.
        drawn[-1] = torch.stack([row.roll(-places, 0) for row, places in zip(drawn[-1], shift, strict=True)])
        replayed = iter(list(masks))
        for module in (prpn_parser, prpn_reader):
            module.keep_mask = lambda *_, **__: next(replayed)
        self.compare(model, ids, mask, drawn, training=True)

    def test_soft_distances_are_float32_at_least(self):
        assert make_model("prpn, soft")(ids_of(4)[0]).distances.dtype == torch.float32


class TestLayers:
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
        if slots == 1:  # nearly shut gates: the constant in the denominator of the attention counts
            assert torch.autograd.gradcheck(run, (x, 1e-8 * gate.detach(), *layer.parameters()))


# ------------------------------------------------------------------------------------------------- the contract
class TestForward:
    def test_padding_counts_where_asked_for(self):
        ids, mask = ids_of(9, 4)
        losses = [
            tiny(pad_aware_batch_norm=aware, rates=0.0).train()(ids, attention_mask=mask, labels=ids).loss.item()
            for aware in (True, False)
        ]
        assert losses[0] != losses[1]
        everything = tiny(rates=0.0).train()(ids, labels=ids.masked_fill(mask == 0, -100))
        assert everything.loss.item() == pytest.approx(losses[1], rel=1e-5)

    def test_one_token_trains_nothing(self):
        with pytest.raises(ValueError, match="at least two tokens in training, but the batch has 1"):
            tiny().train()(torch.tensor([[5, 6]]), attention_mask=torch.tensor([[1, 0]]))


# ------------------------------------------------------------------------------------------------------- PRPN-SYD
# ------------------------------------------------------------------------------------------------ trees and texts
# ------------------------------------------------------------------------------------------------------ the model
class TestModel:
    def test_fresh_parameters(self):
        torch.manual_seed(0)
        model = PRPNForCausalLM(PRPNConfig(vocab_size=500, embedding_size=40, layer_size=60, num_residual_blocks=1))
        weights, base = model.state_dict(), model.model
        assert weights["lm_head.weight"].abs().max().item() == pytest.approx(0.01, rel=0.01)
        assert not weights["lm_head.bias"].any()
        assert base.layers[0].key.weight.abs().max().item() == pytest.approx(0.1, rel=0.01)
        assert base.parser.features.convolution.bias.abs().max().item() == pytest.approx(240**-0.5, rel=0.1)
        scales = torch.cat([weights[n] for n in weights if n.endswith("norm.weight") and "layers" not in n])
        assert 0.4 < scales.mean() < 0.6 and 0 <= scales.min() < 0.05 and 0.95 < scales.max() <= 1
        ones = PRPNForCausalLM(PRPNConfig(vocab_size=30, embedding_size=6, layer_size=8, batch_norm_init="ones"))
        assert (ones.model.predictor.output_norm.weight == 1).all()
