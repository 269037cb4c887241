"""ON-LSTM and ON-LSTM-SYD equal the authors' code on stored cases: values, gradients, dropout, trees; conversion."""

import pytest
import torch

from hf_synlm.conversion import convert_state_dict
from hf_synlm.conversion.on_lstm import RULES
from hf_synlm.conversion.rename import rename_state_dict
from hf_synlm.models.on_lstm.configuration_on_lstm import ONLSTMConfig
from hf_synlm.models.on_lstm.modeling_on_lstm import ONLSTMForCausalLM
from hf_synlm.recurrent import layers as recurrent_layers
from hf_synlm.recurrent.cache import RecurrentCache
from hf_synlm.recurrent.distances import ranking_loss
from tests.helpers.goldens import read_case
from tests.helpers.refusals import refused
from tests.reference.trees import spans_of_words

LANGUAGE_MODELS = ["lm_2layer_nowdrop_untied", "lm_3layer_wdrop_tied", "lm_chunk1_1layer"]
SUPERVISED = ["syd_l4d0_untied_alpha075", "syd_l4d2_tied"]
EVALUATED = [(case, segment) for case in (*LANGUAGE_MODELS, *SUPERVISED) for segment in ("seg1", "seg2")]
TRAINED = [("train_masks_3layer", "train"), ("syd_train_masks", "train")]


def files(case):
    return read_case(f"onlstm/{case}")


def load(case, **options):
    state, io, meta = files(case)
    return convert_state_dict("on_lstm", state, {**meta, "config": {**meta["config"], **options}}), io


def initial_cache(model, io, prefix):
    cache = RecurrentCache()
    layers = range(model.config.num_layers)
    cache.store(tuple(io[f"{prefix}.in.{layer}.{name}"].flatten(1) for layer in layers for name in "hc"), 0)
    return cache


def inputs_of(io, prefix):
    """Token ids, targets and gold distances with the rows first."""
    ids = io[f"{prefix}.input_ids"].t()
    targets = io[f"{prefix}.targets"].view(ids.shape[1], -1).t()
    gold = io.get(f"{prefix}.gold_distance")
    return ids, targets, None if gold is None else gold.t()


def close(mine, theirs, tolerance=1e-5):
    """Within a share of the largest value."""
    scale = theirs.abs().max().item()
    torch.testing.assert_close(mine, theirs.view(mine.shape), rtol=0, atol=tolerance * scale + 1e-12)


def replay(monkeypatch, io, model):
    """Let every mask be the stored one."""
    layers = range(model.config.num_layers)
    wanted = [("embedding_rows_keep", None), ("input_keep", None)]
    for layer in layers:
        wanted.append((f"dropconnect_drop.{layer}.hh", False))
        if layer in (model.config.supervised_layers or []):
            wanted.append((f"dropconnect_drop.{layer}.fwh", False))
        wanted.append((f"hidden_keep.{layer}", None))
    wanted[-1] = ("output_keep", None)
    masks = iter(wanted)

    def stored(shape, p, like, rescale=True):
        name, scaled = next(masks)
        mask = io[f"mask.{name}"].to(like.dtype)
        if scaled is False:
            assert not rescale
            return (1 - mask).view(shape)
        return mask.view(shape) / (1 - p)

    monkeypatch.setattr(recurrent_layers, "keep_mask", stored)
    return masks


@pytest.mark.parametrize(("case", "prefix"), EVALUATED + TRAINED)
def test_values(case, prefix, monkeypatch):
    model, io = load(case)
    model.train(prefix == "train")
    masks = replay(monkeypatch, io, model) if prefix == "train" else iter([])
    ids, _, _ = inputs_of(io, prefix)
    output = model(ids, past_key_values=initial_cache(model, io, prefix))
    assert next(masks, None) is None
    close(output.logits, io[f"{prefix}.logits"].transpose(0, 1).log_softmax(-1))
    close(output.distances, io[f"{prefix}.distance_forget"].permute(2, 0, 1))
    supervised = model.config.supervised_layers
    if supervised is not None:
        close(output.syd_distances, io[f"{prefix}.distance_syd"][supervised].permute(2, 0, 1))
    for place, tensor in enumerate(output.past_key_values.state):
        close(tensor, io[f"{prefix}.out.{place // 2}.{'hc'[place % 2]}"])


@pytest.mark.parametrize(("case", "prefix"), EVALUATED + TRAINED)
def test_losses_and_gradients(case, prefix, monkeypatch):
    model, io = load(case)
    model.train(prefix == "train")
    if prefix == "train":
        replay(monkeypatch, io, model)
    ids, targets, gold = inputs_of(io, prefix)
    cache = initial_cache(model, io, prefix)
    output = model(ids, shift_labels=targets, distances=gold, past_key_values=cache)
    output.loss.backward()
    close(output.loss, io[f"{prefix}.total_loss"])
    close(output.losses["language_model"], io[f"{prefix}.lm_loss"])
    close(model.config.activation_regularization * output.losses["activation"], io[f"{prefix}.ar"])
    close(output.losses["temporal_activation"], io[f"{prefix}.tar"])
    if gold is not None:
        close(output.losses["syntactic_distance"], io[f"{prefix}.syd_loss"])
    start = f"{prefix}.grad."
    gradients = {key.removeprefix(start): value for key, value in io.items() if key.startswith(start)}
    if model.config.tie_word_embeddings:
        gradients.pop("decoder.weight", None)
    gradients = rename_state_dict(gradients, RULES)
    parameters = dict(model.named_parameters())
    assert set(parameters) <= set(gradients)
    for name, gradient in gradients.items():
        if name not in parameters:  # split heads that nothing trains
            assert ".split_head." in name and not gradient.any()
            continue
        mine = parameters[name].grad
        if name == "model.embed_tokens.weight":  # their lookup gives the last row no gradient
            mine, gradient = mine[:-1], gradient[:-1]

        close(mine, gradient)


def test_split_heads_of_all_layers():
    # The authors compute them all, and train some.
    state, io, _ = files("syd_l4d2_tied")
    fields = load("syd_l4d2_tied")[0].config.to_diff_dict()
    model = ONLSTMForCausalLM(ONLSTMConfig.from_dict({**fields, "supervised_layers": [2, 0, 1]})).eval()
    model.load_state_dict(rename_state_dict(state, RULES))
    output = model(inputs_of(io, "seg1")[0])
    close(output.syd_distances, io["seg1.distance_syd"][[2, 0, 1]].permute(2, 0, 1))


@pytest.mark.parametrize(("case", "prefix"), [(case, segment) for case in SUPERVISED for segment in ("seg1", "seg2")])
def test_ranking_loss_inside_rows(case, prefix):
    model, io = load(case)
    layer, margin = model.config.supervised_layers[0], model.config.syntactic_distance_margin
    predicted, gold = io[f"{prefix}.distance_syd"][layer].t(), inputs_of(io, prefix)[2]
    close(ranking_loss(predicted, gold, margin=margin), io[f"{prefix}.derived.syd_loss_within_stream"])
    # Eq. 18: distances times the number of chunks, unit margin, a constant 1 for every pair of equal distances.
    chunks = model.model.layers[layer].num_chunks
    equal = (gold[:, :, None] == gold[:, None, :]).triu(1).sum()
    loss = ranking_loss(predicted.double() * chunks, gold, margin=1.0, reduction="sum") + equal
    close(loss, io[f"{prefix}.derived.syd_loss_paper_eq18_sum"])


@pytest.mark.parametrize("case", LANGUAGE_MODELS + SUPERVISED)
@pytest.mark.parametrize("framed", [False, True])
def test_trees(case, framed):
    _, _, meta = files(case)
    model, _ = load(case, eos_token_id=2)
    layers = model.config.supervised_layers or []
    for example in meta["trees"]:
        ids = torch.tensor([example["ids"] if framed else example["ids"][1:-1]])
        for name, stored in example["trees"].items():
            kind, layer, decoder = name.split(".")
            number = int(layer.removeprefix("layer"))
            if kind == "syd" and number not in layers:
                continue
            distances = "supervised" if kind == "syd" else "language_model"
            parsed = model.parse(ids, decoder=decoder, distances=distances, layer=number)
            leaves = ids.shape[1] - 2 * framed
            expected = [(i + framed, j + framed) for i, j in spans_of_words(stored["tree"])]
            assert parsed.spans == [[expected]] and parsed.lengths == [leaves]


class TestConversion:
    def test_fields(self):
        config = load("syd_l4d2_tied", eos_token_id=25)[0].config
        assert (config.supervised_layers, config.syntactic_distance_head) == ([2], "split")
        assert (config.syntactic_distance_scope, config.eos_token_id, config.bos_token_id) == ("batch", 25, 25)
        assert load("syd_l4d2_tied", l4d=-1)[0].config.supervised_layers == [0, 2]
        assert load("lm_3layer_wdrop_tied")[0].config.weight_dropout == 0.45

    def test_one_set_of_trees(self):
        state, _, meta = files("syd_l4d2_tied")
        state = {name: tensor for name, tensor in state.items() if ".fwh." not in name}
        model = convert_state_dict("on_lstm", state, {**meta, "config": {**meta["config"], "wds": "no"}})
        assert model.config.syntactic_distance_head == "shared"
        plain = convert_state_dict("on_lstm", state, {**meta, "config": {**meta["config"], "un": True}})
        assert plain.config.supervised_layers is None

    @pytest.mark.parametrize(
        ("change", "options", "message"),
        [
            (lambda s: s.pop("decoder.bias"), {}, "lm_head.bias"),
            (lambda s: s.update({"decoder.weight": s["decoder.weight"] + 1}), {}, "differ"),
            (lambda s: None, {"nhid": 99}, "nhid is 99"),
            (lambda s: None, {"wds": "no"}, "wds = 'no'"),
        ],
    )
    def test_checkpoints_that_do_not_fit(self, change, options, message):
        state, _, meta = files("syd_l4d2_tied")
        state = {name: tensor.clone() for name, tensor in state.items()}
        change(state)
        refused(message, convert_state_dict, "on_lstm", state, {**meta, "config": {**meta["config"], **options}})

    def test_options_that_no_tensor_tells(self):
        state, _, meta = files("lm_3layer_wdrop_tied")
        for name in ("chunk_size", "wdrop"):
            options = {key: value for key, value in meta["config"].items() if key != name}
            refused(f"lacks .*'{name}'", convert_state_dict, "on_lstm", state, options)
        state, _, meta = files("syd_l4d2_tied")
        options = {key: value for key, value in meta["config"].items() if key != "l4d"}
        refused("Add .l4d. to the configuration", convert_state_dict, "on_lstm", state, options)
