"""Train RNNG on a treebank, or the LSTM language model on the words of the same treebank.

    accelerate launch training/train_rnng.py --config training/configs/rnng_tiny.yaml --output_dir runs/rnng_tiny

Trees come from files of bracketed trees, or (default) from the embedded treebank. Gold derivations are learned by
teacher forcing. Both architectures read the same tokens in the same batches, drawn among sentences with similar
numbers of actions under a budget of padded actions. The model that is kept is the one with the best validation
likelihood. Paper: Noji and Oseki, "Effective Batching for Recurrent Neural Network Grammars" (Findings of ACL 2021).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from hf_synlm import LSTMConfig, LSTMForCausalLM, RNNGConfig, RNNGForCausalLM
from hf_synlm.data.vocabulary import word_final_ids
from hf_synlm.evaluation.treebank_parsing import PUNCTUATION, Treebank
from hf_synlm.training.arguments import ModelArguments, TrainingArguments, check_choice, check_minimum, check_overrides
from hf_synlm.training.checkpoints import BestModel
from hf_synlm.training.export import hub_facts
from hf_synlm.training.final_report import load_report_treebanks, report_saved_model
from hf_synlm.training.flops import recurrent_flops_per_token, rnng_flops_per_token
from hf_synlm.training.recipe import Recipe, Splits, kept_evaluation, run_recipe
from hf_synlm.training.run import Run, load_pretrained
from hf_synlm.training.samplers import PaddedBatchSampler, make_loader
from hf_synlm.training.tree_batches import (
    TreeCollator,
    TreeDataArguments,
    TreeDataset,
    collect_labels,
    encode_treebank,
    load_trees,
    make_tree_tokenizer,
)
from hf_synlm.training.tree_evaluation import Objective, add_perplexities, evaluate_given_trees, search_trees, spread

MODELS: dict[str, Any] = {"rnng": RNNGForCausalLM, "lstm": LSTMForCausalLM}
REPORT_SENTENCES = 20


@dataclass
class RNNGModelArguments(ModelArguments):
    """RNNG, or the LSTM baseline."""

    presets = {"rnng": "rnng-15m", "lstm": "lstm-15m"}

    architecture: str = HfArg(default="rnng", help="'rnng', or 'lstm' for the baseline without trees.")


@dataclass
class CourseArguments:
    """How long to train, which model to keep, and what is measured on the way."""

    num_train_epochs: int = HfArg(
        default=0, help="Epochs; 0: max_train_steps decides. With both, the smaller number of steps."
    )
    early_stopping_patience: int = HfArg(default=0, help="Early-stopping patience in evaluations; 0 disables.")
    search_sentences: int = HfArg(
        default=0, help="Validation sentences to parse in every evaluation but the first; 0 disables. RNNG only."
    )
    final_search_sentences: int | None = HfArg(
        default=None, help="Test sentences that the final model parses; default: all; 0 disables. RNNG only."
    )
    search_batch_size: int = HfArg(default=10, help="Sentences per process in a search batch.")
    num_beams: int | None = HfArg(
        default=None, help="Word beam: derivations kept after each word. Default: the model's."
    )
    action_beam_size: int | None = HfArg(
        default=None, help="Action beam: derivations kept after each action. Default: the model's."
    )
    fast_track_size: int | None = HfArg(
        default=None, help="Fast-track derivations, which reach the next word in any case. Default: the model's."
    )
    final_report: bool = HfArg(
        default=False,
        help="At the end, load the saved model in a process without hf_synlm, parse some test sentences and generate "
        "one. RNNG only.",
    )
    report_punctuation: list[str] = HfArg(
        default_factory=lambda: ["ignore"],
        help="How the final report treats punctuation, one or more of: 'remove', 'ignore', 'keep' (for tags that are "
        "not the Penn Treebank's). Each has its own baselines.",
    )

    def __post_init__(self):
        """Check the values."""
        check_minimum(self, 1, "num_beams action_beam_size search_batch_size")
        check_minimum(
            self,
            0,
            "num_train_epochs early_stopping_patience search_sentences final_search_sentences fast_track_size",
        )
        for treatment in self.report_punctuation:
            check_choice("report_punctuation", treatment, PUNCTUATION)

    def check_architecture(self, architecture: str) -> None:
        """Refuse options of the search for the LSTM, which has no trees."""
        names = (
            "search_sentences final_search_sentences num_beams action_beam_size fast_track_size final_report"
        ).split()
        given = [name for name in names if getattr(self, name)]
        if architecture == "lstm" and given:
            raise ValueError(f"{given[0]} is {getattr(self, given[0])}, but an LSTM has no trees. Leave it out.")

    def report_treebanks(self, data: TreeDataArguments) -> dict[str, Treebank]:
        """Trees of the final report by treatment of punctuation; empty without a report."""
        if not self.final_report or not data.test_files:
            return {}
        return load_report_treebanks(data.test_files[0], self.report_punctuation, REPORT_SENTENCES, data.split_leaves)

    def beam(self, config: PreTrainedConfig) -> dict[str, int]:
        """Widths of the search; default: those of the model."""
        return {
            "num_beams": config.scoring_num_beams if self.num_beams is None else self.num_beams,
            "action_beam_size": config.action_beam_size if self.action_beam_size is None else self.action_beam_size,
            "fast_track_size": config.fast_track_size if self.fast_track_size is None else self.fast_track_size,
        }


# ---------------------------------------------------------------------------------------------- model
def make_config(
    arguments: RNNGModelArguments, tokenizer: PreTrainedTokenizerBase, labels: list[str], subwords: bool
) -> PreTrainedConfig:
    """Make the configuration of an untrained model: preset, overrides, and what depends on tokenizer and trees.

    Args:
        arguments: of the command line.
        tokenizer: whose size and special tokens the configuration takes over.
        labels: of the nonterminals.
        subwords: whether tokens are pieces of words.

    Returns:
        The configuration.

    Raises:
        ValueError: an override is not a field, or follows from tokenizer and trees.
    """
    config_class = MODELS[arguments.architecture].config_class
    pad = tokenizer.pad_token_id
    decided: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": pad}
    if arguments.architecture == "rnng":
        decided.update(nonterminals=labels, subwords=subwords)
    overrides = check_overrides(config_class, arguments.config_overrides, decided)
    begin = {
        "bos_token_id": pad if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        "eos_token_id": pad if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
    }
    return config_class.from_preset(arguments.model_preset, **{**begin, **decided, **overrides})


def make_model(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Make an untrained model.

    Args:
        config: of `make_config`.
        tokenizer: of subwords; tells RNNG which tokens are an end of word.

    Returns:
        The model.
    """
    if isinstance(config, LSTMConfig):
        return LSTMForCausalLM(config)
    model = RNNGForCausalLM(config)
    if config.subwords:
        model.model.word_final.copy_(torch.tensor(word_final_ids(tokenizer)))
    return model


# ---------------------------------------------------------------------------------------------- the run
def load_data(
    accelerator: Accelerator, model_arguments: RNNGModelArguments, data: TreeDataArguments, output_dir: Path
) -> tuple[Splits[TreeDataset], PreTrainedTokenizerBase, PreTrainedModel]:
    """Read the trees, make or load tokenizer and model, and encode the trees for them.

    Args:
        accelerator: of the run. Every process has to call.
        model_arguments: the model.
        data: files and tokenizer.
        output_dir: of the run; its tokenizer is saved there.

    Returns:
        Encoded trees, tokenizer and model.

    Raises:
        ValueError: a file, the tokenizer or the model cannot be used.
    """
    parts = (data.train_files, data.validation_files, data.test_files)
    trees = [load_trees(accelerator, files, data.split_leaves) for files in parts if files]
    source = data.tokenizer_name or model_arguments.model_name_or_path
    tokenizer = make_tree_tokenizer(accelerator, data, trees[0], source, output_dir)
    labels = collect_labels(*trees)
    architecture, name = model_arguments.architecture, model_arguments.model_name_or_path
    if name is None:
        subwords = not all(word_final_ids(tokenizer))
        model = make_model(make_config(model_arguments, tokenizer, labels, subwords), tokenizer)
    else:
        model = load_pretrained(MODELS[architecture], name, model_arguments.config_overrides, tokenizer)
        labels = getattr(model.config, "nonterminals", labels)
    system: Any = getattr(model.config, "transition_system", "top_down")
    encoded = [
        encode_treebank(
            accelerator, part, tokenizer, system, labels, data.preprocessing_num_workers,
            data.max_sentence_tokens if part is trees[0] else None,
        )
        for part in trees
    ]  # fmt: skip
    return Splits(encoded[0], encoded[1], encoded[2] if len(encoded) > 2 else None), tokenizer, model


def steps_of_epochs(sampler: PaddedBatchSampler, num_epochs: int, accumulation: int) -> int:
    """Optimizer steps that `num_epochs` passes through the data take.

    Args:
        sampler: of the training batches.
        num_epochs: number of passes.
        accumulation: micro steps per optimizer step.

    Returns:
        The number, rounded up.
    """
    return -(-sampler.num_batches(num_epochs) // (sampler.world_size * accumulation))


class RNNGRecipe(Recipe):
    """Train RNNG on gold trees by teacher forcing, or the LSTM on their words; keep the best validation likelihood."""

    program = "train_rnng"
    argument_types = (RNNGModelArguments, TreeDataArguments, CourseArguments, TrainingArguments)
    trees: Splits[TreeDataset]
    collate: TreeCollator
    objective: Objective

    def __init__(
        self,
        accelerator: Accelerator,
        model_arguments: RNNGModelArguments,
        data: TreeDataArguments,
        course: CourseArguments,
        arguments: TrainingArguments,
    ):
        super().__init__(accelerator, arguments)
        self.model_arguments, self.data, self.course = model_arguments, data, course
        course.check_architecture(model_arguments.architecture)
        if accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("FSDP shards the model, and the search needs the whole model. Use DDP.")
        self.report_treebanks: dict[str, Treebank] = {}

    def load(self) -> PreTrainedModel:
        """Read and encode the trees, make or load tokenizer and model."""
        arguments, output_dir = self.arguments, Path(self.arguments.output_dir)
        self.report_treebanks = self.course.report_treebanks(self.data)
        self.trees, self.tokenizer, model = load_data(self.accelerator, self.model_arguments, self.data, output_dir)
        self.config = model.config
        self.collate = TreeCollator(self.tokenizer.pad_token_id, self.config if self._is_grammar else None)
        self.objective = Objective(self.config)
        self.accelerator.print(self.data.describe_splits(self.trees, TreeDataset.describe))
        epochs, accumulation = self.course.num_train_epochs, arguments.gradient_accumulation_steps
        arguments.limit_steps(steps_of_epochs(self._sampler(), epochs, accumulation) if epochs else None)
        self.accelerator.print(f"{arguments.num_steps:,} steps")
        return model

    @property
    def _is_grammar(self) -> bool:
        return isinstance(self.config, RNNGConfig)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Fingerprints of the trees, how batches are drawn, and how the model is chosen."""
        return {
            "training_data": self.trees.train.fingerprint(),
            "validation": self.trees.validation.fingerprint(),
            "max_batch_actions": self.data.max_batch_actions,
            "batch_group_size": self.data.batch_group_size,
            "patience": self.course.early_stopping_patience,
            "evaluation_steps": self.arguments.evaluation_steps,
        }

    def _sampler(self, consumed: int = 0) -> PaddedBatchSampler:
        """Batches of sentences with similar numbers of actions; for both architectures the same."""
        return PaddedBatchSampler(
            self.trees.train.lengths("actions"),
            self.arguments.per_device_train_batch_size,
            self.data.max_batch_actions,
            self.data.batch_group_size,
            self.arguments.seed,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            consumed,
        )

    def loader(self, run: Run) -> DataLoader:
        """Batches under a budget of padded actions."""
        sampler = self._sampler(run.state.consumed)
        return make_loader(self.accelerator, self.trees.train, self.collate, self.arguments, sampler)

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective with the nats that perplexities are made of."""
        return self.objective(model, batch)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Losses and perplexities."""
        return add_perplexities(means)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure the likelihood of the validation trees, and parse some of them.

        An untrained model is not searched: it would open and close constituents at random.
        """
        rows = self._rows(self.trees.validation, self.course.search_sentences)
        if rows and step == 0 and self.model_arguments.model_name_or_path is None:
            self.accelerator.print("step 0: no sentence is parsed with an untrained model")
            rows = []
        return self._measure("validation", self.trees.validation, rows, model, step)

    def _rows(self, dataset: TreeDataset, limit: int | None) -> list[int]:
        """Sentences to parse."""
        return spread(len(dataset), limit) if self._is_grammar else []

    def _measure(self, name: str, dataset: TreeDataset, rows: list[int], model: nn.Module, step: int) -> dict[str, Any]:
        """Likelihood of held-out trees and, for `rows`, parsing accuracy; every process calls."""
        sizes = (self.arguments.per_device_eval_batch_size, self.data.max_batch_actions)
        losses = evaluate_given_trees(self.accelerator, model, dataset, self.collate, self.objective, *sizes)
        result: dict[str, Any] = {"step": step, "losses": losses}
        text = "  ".join(f"{key} {value:.4g}" for key, value in losses.items())
        self.accelerator.print(f"step {step}: {name} of {len(dataset)} sentences: {text}")
        flat = {f"{name}/{key}": value for key, value in losses.items()}
        if rows:
            size, beam = self.course.search_batch_size, self.course.beam(self.config)
            scores = search_trees(self.accelerator, model, dataset, rows, self.collate, batch_size=size, beam=beam)
            self.accelerator.print(f"step {step}: {name}: {scores}")
            result["search"] = scores.numbers()
            flat.update({f"{name}/{k}": v for k, v in result["search"].items() if not isinstance(v, dict)})
        self.accelerator.log(flat, step=step)
        return result

    def best_model(self) -> BestModel:
        """The evaluation with the lowest negative log-likelihood of all validation trees, in nats."""
        return BestModel(lambda evaluation: evaluation["losses"]["nats"], self.course.early_stopping_patience)

    def flops_per_token(self, model: PreTrainedModel) -> float:
        """By the formula of the architecture."""
        if not self._is_grammar:
            return recurrent_flops_per_token(model)
        train = self.trees.train
        return rnng_flops_per_token(model.config, train.lengths("actions").sum() / train.lengths("input_ids").sum())

    def card_facts(self, run: Run) -> dict[str, Any]:
        """Files, steps and sentences."""
        return {
            **hub_facts(self.model_arguments.model_name_or_path),
            "training_data": self.data.describe(),
            "training_procedure": f"The best of {run.state.step} steps of `training/train_rnng.py` by validation "
            f"likelihood, that of step {run.state.notes['best']['step']}; {self._num_sentences(run)} sentences read, "
            f"seed {self.arguments.seed}.",
        }

    def _num_sentences(self, run: Run) -> int:
        return self._sampler().num_samples(run.state.consumed)

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Number of sentences read; likelihood and search on the test trees."""
        results: dict[str, Any] = {"sentences": self._num_sentences(run)}
        if self.trees.test is not None:
            rows = self._rows(self.trees.test, self.course.final_search_sentences)
            results["test"] = self._measure("test", self.trees.test, rows, run.model, step)
        return results

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Parse the first test sentences with the saved model, as its users will, and generate one."""
        if self.report_treebanks:
            beam = self.course.beam(self.config)
            methods = {f"search (beams {beam['num_beams']} and {beam['action_beam_size']})": beam}
            report = report_saved_model(folder, self.tokenizer, self.report_treebanks, methods, self.arguments.seed)
            results["test"]["saved_model"] = report.numbers()
        before, after = results["evaluations"][0]["losses"], kept_evaluation(results)["losses"]
        line = (
            f"validation nats per sentence {before['nats_per_sentence']:.2f} -> {after['nats_per_sentence']:.2f} "
            f"(best at step {results['best_step']})"
        )
        test = results.get("test")
        if test is None:
            return line
        line += f"; test nats per sentence {test['losses']['nats_per_sentence']:.2f}"
        if "search" in test:
            search = test["search"]
            line += f", labeled F1 {search['labeled_f1']:.2f}, word perplexity {search['word_perplexity']:.2f}"
        elif "word_perplexity" in test["losses"]:
            line += f", word perplexity {test['losses']['word_perplexity']:.2f}"
        return line


main = partial(run_recipe, RNNGRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
