"""GPST's training equals the authors' program step by step: losses, trees, gradient norms and weights, with dropout."""

import pytest
import torch

from hf_synlm.conversion import convert_state_dict
from hf_synlm.conversion.gpst import RULES
from hf_synlm.conversion.rename import rename_state_dict
from hf_synlm.models.gpst import composition
from hf_synlm.training.arguments.base import TrainingArguments
from hf_synlm.training.engine.run import make_optimizer
from tests.helpers.goldens import read_case, read_tensors
from tests.models.gpst.test_parity_gpst import LOSSES


class RecordedDropout:
    """Replaces `dropout` by the authors' masks, which are asked for in the order in which our model drops."""

    def __init__(self, model, meta, masks):
        self.rates = {entry["place"]: entry["p"] for entry in meta["dropout_places"]}
        self.masks, self.types = masks, meta["gpt_config"]["action_layer_num"]
        self.tokens = meta["gpt_config"]["n_layer"] - self.types
        self.plans = []
        make_plan = model.model._plan
        model.model._plan = lambda *args: self.plans.append(make_plan(*args)) or self.plans[-1]

    def begin(self, step, rows, sentence_ids):
        """Prepare for a step: rows [R, 6] describe the compositions of the masks."""
        self.keep = {k.split("/keep/")[1]: v for k, v in self.masks.items() if k.startswith(f"step{step}/")}
        own = rows[rows[:, 0] == step][:, 1:5].tolist()
        self.row_of = {tuple(row): number for number, row in enumerate(own)}
        self.sentence_ids = sentence_ids
        self.next = self.places()

    def places(self):
        """Places and masks in our order."""
        yield "r2d2.parser.score_mlp.2", lambda keep: keep
        for layer in range(2):
            yield from self.pairs("inside_enc", layer, lambda keep, rows: keep[rows])
        slots = 1 + max(self.plans[-1].nodes_B)
        yield from self.decoder("action_layers", self.types, lambda keep: keep[:, :slots])
        # Our token layers also read the slot after the last token, which no loss sees.
        longer = lambda keep: torch.nn.functional.pad(keep, (0, 0, 0, 1), value=1)  # noqa: E731
        yield from self.decoder("generation_layers", self.tokens, longer)
        # The authors number the two messages of a split by the child that receives, we by the one that sends.
        yield from self.pairs("outside_enc", 0, lambda keep, rows: keep[rows].flip(1).transpose(0, 1).flatten(0, 1))
        yield "dense.2", lambda keep: keep[self.sentence_ids != 0]
        yield "insideoutside_dense.2", lambda keep: keep
        yield "action_mlp.3", lambda keep: keep[:, :slots]

    def pairs(self, encoder, layer, select):
        """One pair layer in all levels: the attention weights, its branch, the hidden layer, its branch."""
        prefix = f"r2d2.{encoder}.layers.{layer}."
        levels = [self.compositions(level).flatten() for level in range(len(self.plans[-1].levels))]
        chosen = lambda keep: torch.cat([select(keep, rows) for rows in levels])  # noqa: E731
        yield prefix + "self_attn.dropout", lambda keep: chosen(keep).permute(3, 2, 0, 1)
        for part in ("dropout1", "dropout", "dropout2"):
            yield prefix + part, lambda keep: chosen(keep).transpose(0, 1)

    def decoder(self, name, num_layers, fit):
        """A GPT-2 stack: its input, then attention weights and both branches of every layer."""
        yield f"{name}.drop", fit
        for layer in range(num_layers):
            prefix = f"{name}.h.{layer}."
            square = lambda keep: fit(fit(keep.flatten(0, 1)).mT).mT.unflatten(0, keep.shape[:2])  # noqa: E731
            yield prefix + "attn.attn_dropout", square
            yield prefix + "attn.resid_dropout", fit
            yield prefix + "mlp.dropout", fit

    def compositions(self, level):
        """Rows [C, M] of the masks for the splits of the cells of a level."""
        plan = self.plans[-1]
        first, last, width = plan.levels[level]
        inner = slice(plan.num_leaves + first, plan.num_leaves + last)
        cells = zip(
            plan.context_N[inner].tolist(), plan.start_N[inner].tolist(), plan.end_N[inner].tolist(), strict=True
        )
        splits = plan.split_CM[first:last, :width].tolist()
        rows = [[self.row_of[c, i, j - 1, k - 1] for k in ks] for (c, i, j), ks in zip(cells, splits, strict=True)]
        return torch.tensor(rows)

    def __call__(self, tensor, p=0.5, training=True, inplace=False):
        """Drop with the next mask."""
        assert training
        return tensor * self.draw(tensor.shape, p) / (1 - p)

    def draw(self, shape, rate, device=None):
        """The next mask; the rate must be the authors' at this place."""
        place, fit = next(self.next)
        assert rate == self.rates[place], place
        keep = fit(self.keep[place])
        assert keep.shape == shape, place
        return keep.bool()


def make_trainer(state, meta, tmp_path):
    """The model before its first step, and the authors' optimizer."""
    model = convert_state_dict("gpst", state, meta).train()
    model.config.bos_token_id = None  # in these contexts the id is a word like any other
    model.set_attn_implementation("eager")  # whose dropout can be replaced
    for module in model.modules():
        if meta["case"] == "01_dropout0" and isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the rate of the heads is no field of the authors' files
    rates = meta["optimizer"]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), learning_rate=rates["lr"], adam_bias_correction=False, adam_epsilon=rates["eps"]
    )
    arguments.limit_steps()
    optimizer, _ = make_optimizer(model, arguments, {"parser": rates["lr_parser"]})
    for group in optimizer.param_groups:
        group["is_parser"] = group["initial_lr"] == rates["lr_parser"]
    return model, optimizer


def compare_weights(model, names, expected):
    """Norms of the weights after a step; the last bias of the parser has no gradient but rounding noise."""
    weights = {**dict(model.named_parameters()), "lm_head.weight": model.lm_head.weight}
    norms = {name: weights[name].norm().item() for name in names}
    for name, norm in zip(names, expected.tolist(), strict=True):
        if name != "model.parser.score.3.bias":
            assert norms[name] == pytest.approx(norm, abs=1e-5, rel=1e-6), name


@pytest.mark.parametrize("case", ["01_dropout0", "02_dropout"])
def test_training_trace(case, tmp_path, monkeypatch):
    state, io, meta = read_case(f"gpst_trace/{case}")
    model, optimizer = make_trainer(state, meta, tmp_path)
    renamed = rename_state_dict(dict.fromkeys(meta["parameter_names"]), RULES)
    structures = []
    model.model.register_forward_hook(lambda module, args, output: structures.append(output.structure))
    recorded = case == "02_dropout"
    if recorded:
        dropout = RecordedDropout(model, meta, read_tensors(f"gpst_trace/{case}", "masks"))
        monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
        monkeypatch.setattr(composition, "keep_mask", dropout.draw)
    for step in range(meta["steps"]):
        ids, sentences = io["batch/chunk_input_ids"][step].long(), io["batch/chunk_masks"][step].long()
        if recorded:
            dropout.begin(step, io["chart/rows"], sentences)
        uniform = (-io["noise/exponential"][step]).exp()  # -log(-log(u)) is the noise of the merge order
        monkeypatch.setattr(torch, "rand_like", lambda scores, uniform=uniform: uniform)
        output = model(ids.clamp_min(0), sentence_ids=sentences, labels=ids)
        nodes = structures[-1].nodes
        trees = torch.stack([nodes.context_A, nodes.start_A, nodes.end_A - 1], 1)[nodes.end_A - nodes.start_A > 1]
        theirs = io["tree/spans"][io["tree/spans"][:, 0] == step][:, 1:]
        assert sorted(trees.tolist()) == sorted(theirs.tolist()), step
        for mine, name in LOSSES.items():
            assert output.losses[mine].item() == pytest.approx(io[f"loss/{name}"][step].item(), abs=1e-5), (step, mine)
        assert output.loss.item() == pytest.approx(io["loss/total"][step].item(), abs=1e-5), step
        optimizer.zero_grad()
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), meta["optimizer"]["clip_norm"])
        assert norm.item() == pytest.approx(io["loss/grad_norm"][step].item(), abs=1e-5), step
        for group in optimizer.param_groups:
            group["lr"] = io["optim/rates"][step, int(group["is_parser"])].item()
        optimizer.step()
        compare_weights(model, list(renamed), io["weights/norms"][step])
    assert not recorded or next(dropout.next, None) is None  # every mask was used
