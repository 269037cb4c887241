# SPDX-License-Identifier: Apache-2.0
"""Train an unsupervised recurrent neural network grammar (URNNG) on the words of a treebank.

    accelerate launch training/train_urnng.py --config urnng_tiny --output-dir runs/urnng_tiny

The model learns from trees that an inference network proposes (see `variational.py`); gold trees serve to measure the
network's. With `--objective supervised` both learn from the gold trees, made binary; a run that continues from such a
model (`--model-name-or-path`) is the paper's RNNG -> URNNG. The network is written beside the model. Paper: Kim et al.,
"Unsupervised Recurrent Neural Network Grammars" (NAACL 2019).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_synlm import URNNGForCausalLM
from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.arguments import option
from hf_synlm.data.punctuation import keep_words
from hf_synlm.evaluation.trees.parsing import branching_baselines, unlabeled_f1
from hf_synlm.hub.abilities import tree_codec
from hf_synlm.training.engine.arguments import ModelArguments, check_minimum
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.export import hub_facts
from hf_synlm.training.engine.recipe import Recipe, improvement
from hf_synlm.training.engine.run import Run, new_or_pretrained
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import EpochEnds, PaddedBatchSampler
from hf_synlm.training.engine.steps import map_rows, to_device
from hf_synlm.training.tasks.inference_network import InferenceNetwork
from hf_synlm.training.tasks.sentence_files import load_or_make_tokenizer
from hf_synlm.training.tasks.stream_schedule import PhaseSchedule, RecurrentTrainingArguments
from hf_synlm.training.tasks.tree_batches import (
    TreeCollator,
    TreeDataArguments,
    TreeDataset,
    collect_labels,
    encode_treebanks,
    load_trees,
    tree_words,
)
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
from hf_synlm.trees.spans import Span

NETWORK = "inference_network"


@dataclass
class URNNGModelArguments(ModelArguments):
    """The model, and the network that proposes its trees."""

    presets = {"urnng": "urnng-ptb"}

    architecture: str = option("urnng", "'urnng'.")
    network_hidden_size: int = option(256, "Width of the inference network's LSTM in each direction.")


@dataclass
class VariationalArguments:
    """What is learned from which trees; the defaults are those of the paper."""

    objective: Literal["unsupervised", "supervised"] = option(
        "unsupervised", "'unsupervised': trees that the inference network draws; 'supervised': gold trees, binarized."
    )
    num_samples: int = option(8, "Trees drawn for a sentence, in training and in evaluations.")
    kl_epochs: int = option(2, "Epochs in which the weight of the KL divergence rises from 0 to 1.")
    network_epochs: int = option(
        2, "Epochs in which the inference network learns, too. (The authors' program stops one earlier than it says.)"
    )
    action_learning_rate: float = option(0.1, "SGD: rate of the action head.")
    network_learning_rate: float = option(1e-4, "Adam: rate of the inference network.")
    model_grad_norm: float = option(5.0, "Gradients of the model are clipped to this norm.")
    network_grad_norm: float = option(1.0, "Gradients of the inference network are clipped to this norm.")
    decay_epoch: int = option(
        8, "After the first later epoch that is not better than all before it, start to halve the rates every epoch."
    )
    min_learning_rate: float = option(0.03, "Stop when learning_rate has fallen below this.")
    importance_samples: int = option(1000, "Trees per test sentence for the perplexity of the final model.")
    importance_temperature: float = option(2.0, "Divides the network's scores for them; above 1, they differ more.")

    def __post_init__(self):
        """Check the values."""
        check_minimum(self, 1, "num_samples importance_samples")
        check_minimum(self, 0, "kl_epochs network_epochs decay_epoch min_learning_rate")
        for name in "action_learning_rate network_learning_rate model_grad_norm network_grad_norm".split():
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive and is {getattr(self, name)}.")


@dataclass
class URNNGTrainingArguments(RecurrentTrainingArguments):
    """The arguments of all programs; epochs decide about rates and evaluations here."""

    per_device_train_batch_size: int = option(16, "Sentences per process and micro step.")
    learning_rate: float = option(1.0, "SGD: rate of the model but for the action head.")
    weight_decay: float = option(0.0, "L2 penalty, added to the gradients after the clipping.")
    max_grad_norm: float = option(0.0, "Not used here: see model_grad_norm and network_grad_norm.")


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

    def get_last_lr(self) -> list[float]:
        """Rates of all groups."""
        return [rate * self.scale for rates in self.rates for rate in rates]


class RateControl(BestModel):
    """After every epoch: keep the best weights, and halve the rates."""

    def __init__(self, optimizer: TwoOptimizers, variational: VariationalArguments, arguments: URNNGTrainingArguments):
        super().__init__(lambda evaluation: evaluation["losses"]["nats"], arguments.early_stopping_patience)
        self.optimizer, self.variational, self.learning_rate = optimizer, variational, arguments.learning_rate

    def update(self, run: Run) -> bool:
        """Look at the newest evaluation; every process has to call. Return whether to stop."""
        stop = super().update(run)
        self._set_scale(run)
        return stop or self.learning_rate * self.optimizer.scale < self.variational.min_learning_rate

    def adopt(self, run: Run, checkpoint: Path) -> None:
        """Take over the best weights and the rates of a resumed run; every process has to call."""
        super().adopt(run, checkpoint)
        self._set_scale(run)

    def _set_scale(self, run: Run) -> None:
        losses = list(map(self.metric, run.state.notes["evaluations"][1:]))  # without that of the untrained model
        self.optimizer.scale = 0.5 ** count_halvings(losses, self.variational.decay_epoch)


# ---------------------------------------------------------------------------------------------- the run
def score_trees(spans: Sequence[list[Span]], dataset: TreeDataset) -> dict[str, float]:
    """Sentence F1 in percent of trees and of right-branching ones (convention "gpst", punctuation not counted)."""
    gold = [dataset.sentence(row) for row in range(len(dataset))]
    sizes, correct = [len(sentence.words) for sentence in gold], [sentence.spans for sentence in gold]
    keep = [keep_words(sentence.words, sentence.tags, dataset.punctuation_by) for sentence in gold]
    return {
        "sentence_f1": 100 * unlabeled_f1(spans, correct, sizes, keep=keep).sentence_f1,
        "right_branching": 100 * branching_baselines(correct, sizes, keep=keep)["right"].sentence_f1,
    }


class URNNGRecipe(Recipe):
    """Train a URNNG on words alone, or on gold trees; keep the best evidence lower bound of the validation text."""

    program = "train_urnng"
    parts = ("model_arguments", "data", "variational", "arguments")
    model_arguments: URNNGModelArguments
    data: TreeDataArguments
    variational: VariationalArguments
    arguments: URNNGTrainingArguments
    examples: TreeDataset
    collate: ChartCollator
    run: Run

    def check(self) -> None:
        """Refuse pieces of words, joint clipping, and what two optimizers do not allow."""
        if self.data.tokenizer_type != "words":
            raise ValueError(f"tokenizer_type is {self.data.tokenizer_type!r}, but URNNG reads words. Leave it out.")
        if self.arguments.max_grad_norm:
            raise ValueError("max_grad_norm clips model and network together. Set model_grad_norm, network_grad_norm.")
        if self.accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("FSDP shards the model, and the inference network reads its embeddings. Use DDP.")
        if self.accelerator.mixed_precision == "fp16":
            raise ValueError("mixed_precision fp16 scales gradients per optimizer, and there are two. Use bf16 or no.")

    def load(self) -> PreTrainedModel:
        """Read and encode the sentences, make or load tokenizer, model and inference network."""
        data = self.data
        trees = [load_trees(self.accelerator, files, data.reading) for files in data.splits]
        output_dir, words = Path(self.arguments.output_dir), partial(tree_words, trees[0])
        name = data.tokenizer_name or self.model_arguments.model_name_or_path
        self.tokenizer = load_or_make_tokenizer(
            self.accelerator, data, name, output_dir, words, "pad_token", "eos_token"
        )
        if self.tokenizer.eos_token_id == self.tokenizer.pad_token_id:
            raise ValueError("End token and padding of the tokenizer are one token. Choose another tokenizer_name.")
        source = LabeledCodec("top_down", tuple(collect_labels(*trees)))
        self.splits = encode_treebanks(self.accelerator, data, trees, self.tokenizer, source)
        self.examples = self.splits.train
        self.accelerator.print(data.describe_splits(self.splits, TreeDataset.describe))
        per_step = self.accelerator.num_processes * self.arguments.gradient_accumulation_steps
        self.ends = EpochEnds(self.sampler(), per_step)
        self.ends.step(0)  # refuses steps longer than an epoch
        longest = max(int(part.lengths("input_ids").max()) for part in filter(None, self.splits))
        model = self._load_model(longest)
        self.collate = ChartCollator(self.tokenizer.pad_token_id, tree_codec(model.config), source)
        return model

    def _load_model(self, longest: int) -> PreTrainedModel:
        """The model with its network, which reads sentences of up to `longest` words."""
        arguments, tokenizer = self.model_arguments, self.tokenizer
        ids = {key: getattr(tokenizer, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
        model = new_or_pretrained(URNNGForCausalLM, arguments, tokenizer, ids)
        if arguments.model_name_or_path is not None:
            network = load_network(Path(arguments.model_name_or_path))
        else:
            config = model.config
            sizes = (config.hidden_size, arguments.network_hidden_size, longest)
            network = InferenceNetwork(*sizes, config.dropout, config.initializer_range)
        attach_network(model, network)
        return model

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Fingerprints of the sentences, how batches are drawn, and the objective."""
        return {
            "training_data": self.examples.fingerprint(),
            "validation": self.splits.validation.fingerprint(),
            "max_batch_actions": self.data.max_batch_actions,
            "batch_group_size": self.data.batch_group_size,
            "network_hidden_size": self.model_arguments.network_hidden_size,
            **{f"variational_{name}": value for name, value in asdict(self.variational).items()},
        }

    def prepare(self, model: PreTrainedModel) -> tuple[nn.Module, Any, Any]:
        """SGD for the model, with another rate for its action head, and Adam for the network."""
        rates = self.variational
        named = dict(model.named_parameters())
        network = [named.pop(name) for name in list(named) if name.startswith(NETWORK)]
        head = [named.pop(name) for name in list(named) if name.startswith("action_head")]
        groups: list[dict[str, Any]] = [
            {"params": list(named.values())},
            {"params": head, "lr": rates.action_learning_rate},
        ]
        sgd = torch.optim.SGD(groups, lr=self.arguments.learning_rate, weight_decay=self.arguments.weight_decay)
        adam = torch.optim.Adam(network, lr=rates.network_learning_rate)
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
        if rates.objective == "supervised":
            return supervised_loss(model, plain, batch)
        weight = min(1.0, step / self.ends.step(rates.kl_epochs - 1)) if rates.kl_epochs else 1.0
        trains = bool(rates.network_epochs) and step < self.ends.step(rates.network_epochs - 1)
        self.optimizer.trains_network = trains
        return variational_loss(model, plain, batch, rates.num_samples, weight, trains)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """The parts, and what the evidence lower bound says of the perplexity."""
        nats = means["word_nats"] + means["action_nats"] - means["entropy"]
        return {**means, "perplexity_bound": math.exp(min(nats / means["tokens"], 700))}

    # -------------------------------------------------------------------------------------------- evaluation
    def evaluation_due(self, step: int) -> bool:
        """At the end of every epoch."""
        return step in self.ends

    def best_model(self) -> RateControl:
        """The epoch with the best evidence lower bound; it decides about the rates, too."""
        return RateControl(self.optimizer, self.variational, self.arguments)

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
            "perplexity_bound": math.exp(min(-sum(evidence) / tokens, 700)),
            "importance_perplexity": math.exp(min(-sum(importance) / tokens, 700)),
        }
        trees = score_trees(spans, dataset)
        text = "  ".join(f"{key} {value:.4g}" for key, value in {**losses, **trees}.items())
        self.accelerator.print(f"step {step}: {name} of {len(dataset)} sentences, {samples} trees each: {text}")
        self.accelerator.log({f"{name}/{key}": value for key, value in {**losses, **trees}.items()}, step=step)
        return {"step": step, "losses": losses, "trees": trees, "samples": samples, "temperature": temperature}

    # -------------------------------------------------------------------------------------------- after training
    def card_facts(self, run: Run) -> dict[str, Any]:
        """Files, steps and epochs."""
        best, num_epochs = run.state.notes["best"]["step"], len(run.state.notes["evaluations"]) - 1
        trees = "gold trees" if self.variational.objective == "supervised" else "words alone"
        return {
            **hub_facts(self.model_arguments.model_name_or_path),
            "training_data": self.data.describe(),
            "training_procedure": f"The best of {run.state.step} steps ({num_epochs} epochs) of "
            f"`training/train_urnng.py` on {trees} by the evidence lower bound of the validation text, that of step "
            f"{best}; seed {self.arguments.seed}.",
        }

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Perplexity of the test text by importance sampling, and F1 of the network's trees."""
        if self.splits.test is None:
            return {}
        samples, temperature = self.variational.importance_samples, self.variational.importance_temperature
        return {"test": self._measure("test", self.splits.test, run.model, step, samples, temperature)}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Write the inference network beside the model."""
        model: Any = run.model
        save_network(model.inference_network, folder)
        line = improvement(results, "nats_per_sentence")
        if "test" in results:
            losses, trees = results["test"]["losses"], results["test"]["trees"]
            line += f"; test perplexity {losses['importance_perplexity']:.2f}, sentence F1 {trees['sentence_f1']:.2f}"
        return line


main = partial(run_recipe, URNNGRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
