"""PRPN equals the authors' code on the stored cases: scores, distances, gates, attention, states, gradients, trees."""

import pytest
import torch

from hf_synlm.conversion.prpn import RULES, convert_prpn
from hf_synlm.conversion.rename import rename_state_dict
from hf_synlm.models.prpn.parser import FAR
from hf_synlm.recurrent.cache import RecurrentCache
from hf_synlm.recurrent.distances import distances_to_spans
from tests.helpers.goldens import cases_of, read_case
from tests.helpers.refusals import refused
from tests.reference.trees import spans_of_words

CASES = cases_of("prpn")
STREAMS = [case for case in CASES if case.startswith("lm_")]
SENTENCES = [case for case in CASES if case.startswith("up_")]
SEGMENTS = [(case, segment) for case in CASES for segment in ("seg1", "seg2") if (case, segment[-1]) in
            {(name, number) for name in CASES for number in ("12" if name in STREAMS else "1")}]  # fmt: skip
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def files(case):
    return read_case(f"prpn/{case}")


def load(case):
    state, _, meta = files(case)
    return convert_prpn(state, meta)


class Segment:
    """Inputs and results of one segment, in the layout of this package."""

    def __init__(self, case, name, model):
        self.io, self.prefix, config = files(case)[1], name, model.config
        self.ids = self["input_ids"].t()
        mask = self.io.get(f"{name}.mask")
        targets = self["targets"].view(self["input_ids"].shape)
        self.labels = (targets if mask is None else targets.masked_fill(mask == 0, -100)).t()
        self.layers, self.size = config.num_layers, config.layer_size

    def __getitem__(self, key):
        return self.io[f"{self.prefix}.{key}"]

    def state(self, when):
        """The authors' state as parts of ours, without the features that they do not keep."""
        distances = self[f"{when}.parser.cum_gate"].t()
        distances = torch.where(distances.isinf(), torch.full_like(distances, FAR), distances)
        tapes = [
            torch.cat([self[f"{when}.reader.{layer}.memory_{part}"] for part in "hc"], 2).flip(1).transpose(0, 1)
            for layer in range(self.layers)
        ]
        return (distances, *tapes, self[f"{when}.parser.emb_last"])

    def cache(self, width):
        cache = RecurrentCache()
        state = self.state("in")
        cache.store((torch.zeros(1, len(self.ids), width), *state), 1, batch_dim=1)
        return cache


def newest_first(weights_BTN):
    return weights_BTN.flip(2).transpose(0, 1)


def test_all_cases_are_there():
    assert len(CASES) == 5 and len(SEGMENTS) == 8
    assert {files(case)[2]["config"]["res"] for case in CASES} == {0, 1, 2}
    assert {files(case)[2]["config"]["hard"] for case in CASES} == {True, False}


@pytest.mark.parametrize(("case", "segment"), SEGMENTS)
def test_values(case, segment):
    model = load(case)
    gold = Segment(case, segment, model)
    cache = gold.cache(model.config.embedding_size)
    with torch.no_grad():
        output = model.model(gold.ids, past_key_values=cache, output_attentions=True)
        logits = model(gold.ids, past_key_values=gold.cache(model.config.embedding_size)).logits
    torch.testing.assert_close(output.distances[:, 0], gold["distance"], **CLOSE)
    torch.testing.assert_close(output.next_distances, gold["distance_next"], **CLOSE)
    torch.testing.assert_close(output.last_hidden_state.transpose(0, 1), gold["features"], **CLOSE)
    torch.testing.assert_close(logits.transpose(0, 1), gold["logits"].log_softmax(-1), **CLOSE)
    attentions = torch.stack([newest_first(weights) for weights in output.attentions], 2)
    torch.testing.assert_close(attentions[:, :, :-1], gold["attentions"][:, :, 1:-2], **CLOSE)
    torch.testing.assert_close(attentions[:, :, -1], gold["attentions"][:, :, -1], **CLOSE)
    for mine, theirs in zip(cache.state[1:], gold.state("out"), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    assert torch.equal(cache.state[0][0], output.last_hidden_state[:, -1])
    # The authors' third tape is the one of the last layer.
    assert torch.equal(gold["in.predictor.memory"], gold[f"in.reader.{model.config.num_layers - 1}.memory_h"])


@pytest.mark.parametrize("case", STREAMS)
def test_second_segment_follows_the_first(case):
    model = load(case)
    first, second = (Segment(case, name, model) for name in ("seg1", "seg2"))
    with torch.no_grad():
        cache = model(first.ids, use_cache=True).past_key_values
        output = model(second.ids, past_key_values=cache)
        whole = model(torch.cat([first.ids, second.ids], 1))
    torch.testing.assert_close(output.logits.transpose(0, 1), second["logits"].log_softmax(-1), **CLOSE)
    torch.testing.assert_close(whole.logits[:, first.ids.shape[1] :], output.logits, **CLOSE)
    for mine, theirs in zip(cache.state[1:], second.state("out"), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    # The authors' evaluation divides the sum by one row more than there are predictions.
    lengths = [segment.ids.shape[1] for segment in (first, second)]
    losses = [model(first.ids, shift_labels=first.labels, use_cache=True)]
    losses.append(model(second.ids, shift_labels=second.labels, past_key_values=losses[0].past_key_values))
    total = sum(length * part.loss.item() for length, part in zip(lengths, losses, strict=True))
    assert total / (sum(lengths) + 1) == pytest.approx(files(case)[2]["evaluate_total_upstream"], rel=1e-5)


def check_loss_and_gradients(model, gold, tolerance):
    cache = gold.cache(model.config.embedding_size)
    output = model(gold.ids, shift_labels=gold.labels, past_key_values=cache)
    torch.testing.assert_close(output.loss, gold["loss"].squeeze(), rtol=1e-5, atol=1e-6)
    output.loss.backward()
    prefix = f"{gold.prefix}.grad."
    theirs = {key.removeprefix(prefix): value for key, value in gold.io.items() if key.startswith(prefix)}
    if model.config.tie_word_embeddings:
        theirs.pop("decoder.weight", None)
    theirs = rename_state_dict(theirs, RULES)
    mine = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set(mine) == set(theirs)
    for name, gradient in mine.items():
        scale = max(theirs[name].abs().max().item(), 0.1)  # biases before a batch normalization have none
        near = {"rtol": tolerance, "atol": tolerance * scale}
        torch.testing.assert_close(gradient, theirs[name], **near, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("case", "segment"), SEGMENTS)
def test_gradients(case, segment):
    model = load(case)
    check_loss_and_gradients(model, Segment(case, segment, model), 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_batch_statistics(case):
    """Training without dropout; in the padded batches the authors count padding, too."""
    model = load(case)
    for part in model.modules():
        for name in ("dropout", "key_dropout", "recurrent_dropout"):
            if isinstance(getattr(part, name, None), float | int):
                setattr(part, name, 0.0)
    model.config.dropout, model.config.pad_aware_batch_norm = 0.0, False
    gold = Segment(case, "train0", model)
    check_loss_and_gradients(model.train(), gold, 1e-4)
    prefix = "train0.buffers_after."
    theirs = {key.removeprefix(prefix): value for key, value in gold.io.items() if key.startswith(prefix)}
    counters = {key for key in theirs if key.endswith("num_batches_tracked")}
    theirs = rename_state_dict({key: value for key, value in theirs.items() if key not in counters}, RULES)
    buffers = dict(model.named_buffers())
    assert set(theirs) == {name for name in buffers if not name.endswith("num_batches_tracked")}
    for name, value in theirs.items():
        torch.testing.assert_close(buffers[name], value, **CLOSE)


@pytest.mark.parametrize("case", SENTENCES)
def test_sentences_of_a_batch_are_those_alone(case):
    model = load(case)
    gold = Segment(case, "seg1", model)
    sentences = files(case)[2]["sentences"]
    mask = torch.tensor([[1] * len(row) + [0] * (gold.ids.shape[1] - len(row)) for row in sentences])
    with torch.no_grad():
        output = model.model(gold.ids, attention_mask=mask, output_attentions=True)
    for row, sentence in enumerate(sentences):
        steps = len(sentence)
        torch.testing.assert_close(output.distances[row, 0, :steps], gold.io[f"single.{row}.distance"], **CLOSE)
        attentions = torch.stack([newest_first(weights) for weights in output.attentions], 2)[:steps, row]
        theirs = gold.io[f"single.{row}.attentions"][:, 0]
        torch.testing.assert_close(attentions[:, :-1], theirs[:, 1:-2], **CLOSE)
        torch.testing.assert_close(attentions[:, -1], theirs[:, -1], **CLOSE)


@pytest.mark.parametrize("case", SENTENCES)
def test_trees_of_sentences(case):
    model, meta = load(case), files(case)[2]
    model.config.bos_token_id, model.config.eos_token_id = 1, 2
    for tree in meta["trees"]:
        words = torch.tensor([meta["sentences"][tree["sentence"]]])
        for ids in (words, words[:, 1:-1]):
            output = model.parse(ids, decoder="biased")
            offset, length = output.offsets[0], output.lengths[0]
            spans = {(i - offset, j - offset) for i, j in output.spans[0][0]}
            assert spans - {(0, length)} == {tuple(span) for span in tree["brackets_no_root"]}
            assert output.brackets([f"w{place}" for place in range(length)]) == brackets(tree["tree_prpn_biased"])


def brackets(tree):
    return tree if isinstance(tree, str) else "(" + " ".join(map(brackets, tree)) + ")"


@pytest.mark.parametrize("case", STREAMS)
def test_trees_of_streams(case):
    _, io, meta = files(case)
    (trees,) = (value for key, value in meta["trees"].items() if key.startswith("biased"))
    for row, tree in enumerate(trees):
        assert distances_to_spans(io["seg1.distance"][row].tolist(), "biased") == spans_of_words(tree)


class TestConversion:
    def state(self, **changes):
        tensors, _, meta = files("lm_word_hard_tied_res0")
        return tensors, {**meta["config"], **changes}

    def test_old_checkpoints_have_no_counters(self):
        tensors, config = self.state()
        tensors["parser.gate.2.num_batches_tracked"] += 7
        model = convert_prpn({key: value for key, value in tensors.items() if "num_batches" not in key}, config)
        counted, ids = convert_prpn(tensors, config), torch.tensor([[3, 5, 4, 7]])
        torch.testing.assert_close(model(ids).logits, counted(ids).logits)
        assert model.model.parser.features.norm.num_batches_tracked == 0
        assert counted.model.parser.features.norm.num_batches_tracked == 7

    @pytest.mark.parametrize(("changes", "message"), [({"nhid": 26}, "nhid is 26"), ({"nslots": None}, "nslots")])
    def test_what_does_not_fit_is_named(self, changes, message):
        tensors, config = self.state()
        config = {name: value for name, value in {**config, **changes}.items() if value is not None}
        refused(message, convert_prpn, tensors, config)
