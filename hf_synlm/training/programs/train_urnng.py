# SPDX-License-Identifier: Apache-2.0
"""Train an unsupervised recurrent neural network grammar (URNNG) on the words of a treebank.

    accelerate launch training/train_urnng.py --config urnng_tiny --output-dir runs/urnng_tiny

The model learns from trees that an inference network proposes (see `variational.py`); gold trees only serve to score
the network's trees. With `--objective supervised` both learn from the gold trees, made binary; a run that continues
from such a model (`--model-name-or-path`) is the paper's RNNG -> URNNG. The network is written beside the model. Paper:
Kim et al., "Unsupervised Recurrent Neural Network Grammars" (NAACL 2019).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.hub.abilities import tree_codec
from hf_synlm.training.arguments.base import refuse
from hf_synlm.training.arguments.treebank import (
    URNNGModelArguments,
    URNNGTrainingArguments,
    VariationalArguments,
)
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.run import Run, new_or_pretrained
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import PaddedBatchSampler
from hf_synlm.training.engine.steps import map_rows, to_device
from hf_synlm.training.tasks.inference_network import InferenceNetwork
from hf_synlm.training.tasks.stream_schedule import PhaseSchedule
from hf_synlm.training.tasks.tree_batches import TreeCollator, TreeDataset
from hf_synlm.training.tasks.tree_evaluation import induction_scores
from hf_synlm.training.tasks.treebank_recipe import TreebankRecipe
from hf_synlm.training.tasks.variational import (
    attach_network,
    estimate,
    load_network,
    read_trees,
    save_network,
    supervised_loss,
    variational_loss,
)
from hf_synlm.trees.binary import actions_to_spans
from hf_synlm.trees.codecs import LabeledCodec

NETWORK = "inference_network"


# ---------------------------------------------------------------------------------------------- batches
class ChartCollator(TreeCollator):
    """Batches with the chart of each tree, which the inference network learns."""

    def __call__(self, rows: Sequence[dict[str, list]]) -> dict[str, Any]:
        """Collate rows: the arguments of `variational_loss` or `supervised_loss`."""
        batch = super().__call__(rows)
        size = batch["input_ids"].shape[1] - 1
        batch["trees"] = torch.eye(size, dtype=torch.bool) & batch["attention_mask"][:, 1:, None].bool()
        for chart, actions in zip(batch["trees"], batch["actions"].tolist(), strict=True):
            for first, end in actions_to_spans(actions)[:-1]:
                chart[first, end - 1] = True
        return batch


# ---------------------------------------------------------------------------------------------- optimization
def count_halvings(losses: Sequence[float], decay_epoch: int) -> int:
    """How often the rates have been halved after epochs with these validation losses (see `VariationalArguments`)."""
    best, decays, count = math.inf, False, 0
    for epoch, loss in enumerate(losses, start=1):
        decays = decays or (loss >= best and epoch > decay_epoch)
        best = min(best, loss)
        count += decays
    return count


class TwoOptimizers:
    """SGD for the model and Adam for the inference network, each with its own clipping.

    It replaces a torch optimizer in `optimizer_steps`; accelerate writes both to checkpoints. `scale` is a factor of
    all rates, `trains_network` says whether the network learns in this step.
    """

    def __init__(self, accelerator: Accelerator, model: Any, network: Any, arguments: VariationalArguments):
        self.accelerator, self.parts = accelerator, (model, network)
        self.limits = (arguments.model_grad_norm, arguments.network_grad_norm)
        self.rates = [[group["lr"] for group in part.param_groups] for part in self.parts]
        self.scale, self.trains_network = 1.0, True

    def step(self) -> None:
        """Clip, and update the weights."""
        for part, limit, rates in zip(self.parts[: 1 + self.trains_network], self.limits, self.rates, strict=False):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * self.scale
            if self.accelerator.sync_gradients:
                parameters = [parameter for group in part.param_groups for parameter in group["params"]]
                nn.utils.clip_grad_norm_(parameters, limit)
            part.step()

    def zero_grad(self) -> None:
        """Reset the gradients."""
        for part in self.parts:
            part.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All groups."""
        return [group for part in self.parts for group in part.param_groups]

    def get_last_lr(self) -> list[float]:
        """Rates of all groups."""
        return [rate * self.scale for rates in self.rates for rate in rates]


class RateControl(BestModel):
    """After every epoch: keep the best weights, and stop when the rate is too low."""

    def __init__(self, recipe: "URNNGRecipe"):
        super().__init__(lambda evaluation: evaluation["losses"]["nats"], recipe.arguments.early_stopping_patience)
        self.recipe = recipe

    def update(self, run: Run) -> bool:
        """Look at the newest evaluation; every process has to call. Return whether to stop."""
        rate = self.recipe.arguments.learning_rate * self.recipe.rate_scale(run)
        return super().update(run) or rate < self.recipe.variational.min_learning_rate


# ---------------------------------------------------------------------------------------------- the run
class URNNGRecipe(TreebankRecipe):
    """Train a URNNG on words alone, or on gold trees; keep the best evidence lower bound of the validation text."""

    program = "train_urnng"
    repeated = "max_batch_actions batch_group_size network_hidden_size"
    needs_whole = "the inference network"
    num_optimizers = 2
    special_tokens = ("pad_token", "eos_token")
    choice = "the evidence lower bound of the validation text"
    model_arguments: URNNGModelArguments
    variational: VariationalArguments
    arguments: URNNGTrainingArguments
    run: Run

    def check(self) -> None:
        """Refuse pieces of words, joint clipping, and what two optimizers do not allow."""
        super().check()
        refuse(self.data, "tokenizer_type", "but URNNG reads words")
        refuse(self.arguments, "max_grad_norm", "but --model-grad-norm and --network-grad-norm clip here")

    def make_model(self, labels: list[str]) -> PreTrainedModel:
        """Make an untrained model, or load the one to continue from."""
        ids = {key: getattr(self.tokenizer, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
        if ids["eos_token_id"] == ids["pad_token_id"]:
            raise ValueError("The tokenizer's end token is also its padding token. Choose another --tokenizer-name.")
        return new_or_pretrained(self.model_arguments, self.tokenizer, ids)

    def load(self) -> PreTrainedModel:
        """Read and encode the sentences, make or load tokenizer, model and inference network."""
        model, given = super().load(), self.model_arguments
        self.count_epochs()
        if given.model_name_or_path is not None:
            network = load_network(Path(given.model_name_or_path))
        else:
            config, longest = model.config, max(int(x.lengths("input_ids").max()) for x in filter(None, self.splits))
            sizes = (config.hidden_size, given.network_hidden_size, longest)
            network = InferenceNetwork(*sizes, config.dropout, config.initializer_range)
        attach_network(model, network)
        return model

    def collator(self, source: LabeledCodec) -> ChartCollator:
        """Batches with the charts of the trees."""
        return ChartCollator(self.tokenizer.pad_token_id, tree_codec(self.config), source)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Those of all treebanks, and the objective."""
        objective = {f"variational_{name}": value for name, value in asdict(self.variational).items()}
        return {**super().settings(model), **objective}

    def prepare(self, model: PreTrainedModel) -> tuple[nn.Module, Any, Any]:
        """SGD for the model, with another rate for its action head, and Adam for the network."""
        rates = self.variational
        named = dict(model.named_parameters())
        network = [named.pop(name) for name in list(named) if name.startswith(NETWORK)]
        head = [named.pop(name) for name in list(named) if name.startswith("action_head")]
        groups: list[dict[str, Any]] = [
            {"params": list(named.values())},
            {"params": head, "lr": rates.action_learning_rate, "name": "action_head"},
        ]
        sgd = torch.optim.SGD(groups, lr=self.arguments.learning_rate, weight_decay=self.arguments.weight_decay)
        of_network = {"params": network, "name": NETWORK}
        adam = torch.optim.Adam([of_network], lr=rates.network_learning_rate)
        prepared, sgd, adam = self.accelerator.prepare(model, sgd, adam)
        self.optimizer: Any = TwoOptimizers(self.accelerator, sgd, adam, rates)
        return prepared, self.optimizer, PhaseSchedule(self.optimizer)

    def sampler(self, consumed: int = 0) -> PaddedBatchSampler:
        """Batches of sentences of similar length."""
        lengths = 2 * self.examples.lengths("input_ids") + 1
        return self.padded_sampler(lengths, self.data.max_batch_actions, consumed)

    def loader(self, run: Run) -> DataLoader:
        """Training batches; the objective follows the step of the run."""
        self.run = run
        return super().loader(run)

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The evidence lower bound, or the likelihood of gold trees."""
        plain, step, rates = self.accelerator.unwrap_model(model), self.run.state.step, self.variational
        self.optimizer.scale = self.rate_scale(self.run)
        if rates.objective == "supervised":
            return supervised_loss(model, plain, batch)
        weight = min(1.0, step / self.ends.step(rates.kl_epochs - 1)) if rates.kl_epochs else 1.0
        trains = bool(rates.network_epochs) and step < self.ends.step(rates.network_epochs - 1)
        self.optimizer.trains_network = trains
        return variational_loss(model, plain, batch, rates.num_samples, weight, trains)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """The parts, and what the evidence lower bound says of the perplexity."""
        nats = means["word_nats"] + means["action_nats"] - means["entropy"]
        return {**means, "perplexity_bound": perplexity_of(nats / means["tokens"])}

    # -------------------------------------------------------------------------------------------- evaluation
    def best_model(self) -> RateControl:
        """The epoch with the best evidence lower bound; it decides about the rates, too."""
        return RateControl(self)

    def rate_scale(self, run: Run) -> float:
        """Factor of all rates after the evaluations of a run; that of the untrained model does not count."""
        losses = [evaluation["losses"]["nats"] for evaluation in run.state.notes["evaluations"][1:]]
        return 0.5 ** count_halvings(losses, self.variational.decay_epoch)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure bounds of the perplexity and the network's trees."""
        return self._measure("validation", self.splits.validation, model, step, self.variational.num_samples, 1.0)

    def _measure(
        self, name: str, dataset: TreeDataset, model: nn.Module, step: int, samples: int, temperature: float
    ) -> dict[str, Any]:
        """Bounds from `samples` trees per sentence, and F1 of the best trees of the network; every process calls."""
        plain = self.accelerator.unwrap_model(model)

        def work(rows: list[int]) -> list[Any]:
            batch = to_device(self.collate(dataset.__getitems__(rows)), self.accelerator.device)
            # Samples do not depend on the order of the batches.
            torch.manual_seed(self.arguments.seed + rows[0])
            bounds = estimate(plain, plain.inference_network, batch, samples, temperature)
            trees = read_trees(plain, plain.inference_network, batch).argmax().cpu()
            spans = [[(i, j + 1) for i, j in tree.nonzero().tolist() if i < j] for tree in trees]
            return list(zip(bounds.evidence.tolist(), bounds.importance.tolist(), spans, strict=True))

        lengths = dataset.lengths("input_ids")
        with evaluation_mode(plain), torch.no_grad():
            found = map_rows(self.accelerator, lengths.tolist(), self.arguments.per_device_eval_batch_size, work, name)
        evidence, importance, spans = zip(*found, strict=True)
        tokens = int(lengths.sum()) + len(lengths)  # with the end tokens
        losses = {
            "nats": -sum(evidence),
            "nats_per_sentence": -sum(evidence) / len(dataset),
            "perplexity_bound": perplexity_of(-sum(evidence) / tokens),
            "importance_perplexity": perplexity_of(-sum(importance) / tokens),
        }
        gold = [dataset.sentence(row) for row in range(len(dataset))]
        own, right = induction_scores(spans, gold, dataset.punctuation_by)
        trees = {"sentence_f1": 100 * own.sentence_f1, "right_branching": 100 * right.sentence_f1}
        self.tell(step, name, f" of {len(dataset)} sentences, {samples} trees each", {**losses, **trees})
        return {"step": step, "losses": losses, "trees": trees, "samples": samples, "temperature": temperature}

    # -------------------------------------------------------------------------------------------- after training
    def card_facts(self, run: Run) -> dict[str, Any]:
        """Files, steps and epochs, and what was learned from."""
        trees = "gold trees" if self.variational.objective == "supervised" else "words alone"
        facts = super().card_facts(run)
        return {**facts, "training_procedure": facts["training_procedure"].replace(".py`", f".py` on {trees}")}

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Perplexity of the test text by importance sampling, and F1 of the network's trees."""
        if self.splits.test is None:
            return {}
        samples, temperature = self.variational.importance_samples, self.variational.importance_temperature
        return {"test": self._measure("test", self.splits.test, run.model, step, samples, temperature)}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> None:
        """Write the inference network beside the model."""
        model: Any = run.model
        save_network(model.inference_network, folder)


main = partial(run_recipe, URNNGRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
