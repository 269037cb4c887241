"""Train ON-LSTM, PRPN, PaLM or AWD-LSTM as language models, with or without gold trees.

    accelerate launch training/train_recurrent.py --config training/configs/on_lstm_syd_tiny.yaml --output_dir runs/tiny

Text comes from treebanks (default: the embedded one) or from plain files. It is read as one stream, segment by segment
with the state carried along (truncated back-propagation through time), or sentence by sentence. The model that is kept
is the one with the best validation likelihood. Papers: Shen et al. (ICLR 2019), Shen et al. (ICLR 2018), Peng et al.
(EMNLP 2019), Merity et al. (ICLR 2018); supervised distances: Du et al. (ACL 2020).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from hf_synlm import (
    ONLSTMForCausalLM,
    PaLMForCausalLM,
    PRPNForCausalLM,
)
from hf_synlm.data.streams import TokenStream
from hf_synlm.evaluation.treebank_parsing import score_numbers, score_table
from hf_synlm.training.arguments import ModelArguments, check_overrides
from hf_synlm.training.export import hub_facts
from hf_synlm.training.final_report import report_saved_model
from hf_synlm.training.flops import recurrent_flops_per_token
from hf_synlm.training.recipe import Recipe, Splits, kept_evaluation, run_recipe
from hf_synlm.training.run import Run, load_pretrained
from hf_synlm.training.samplers import PaddedBatchSampler, make_loader
from hf_synlm.training.stream_batches import (
    EpochEnds,
    FramedCollator,
    SegmentDataset,
    SegmentSampler,
    SentenceDataset,
    StreamDataArguments,
    describe_stream,
    first_item,
    load_stream,
    make_stream_tokenizer,
    stream_fingerprint,
)
from hf_synlm.training.stream_evaluation import TreeScorer
from hf_synlm.training.stream_measures import Measures, ParsingArguments, has_trees, make_measures
from hf_synlm.training.stream_objective import StreamObjective
from hf_synlm.training.stream_schedule import (
    EpochControl,
    PhasedOptimizer,
    PhaseSchedule,
    RecurrentTrainingArguments,
    ScheduleArguments,
    make_phased_optimizer,
    schedule_settings,
)

MODELS: dict[str, Any] = {
    "on_lstm": ONLSTMForCausalLM,
    "prpn": PRPNForCausalLM,
    "palm": PaLMForCausalLM,
    "awd_lstm": PaLMForCausalLM,
}
REPORT_SENTENCES = 20


@dataclass
class RecurrentModelArguments(ModelArguments):
    """A recurrent model; the default presets are those of the words of the Penn Treebank."""

    presets = {
        "on_lstm": "on-lstm-ptb",
        "prpn": "prpn-ptb-word",
        "palm": "palm-ptb",
        "awd_lstm": "awd-lstm-ptb",
    }

    architecture: str = HfArg(
        default="on_lstm", help="'on_lstm', 'prpn', 'palm', or 'awd_lstm', the baseline without trees."
    )


# ---------------------------------------------------------------------------------------------- model
def make_config(arguments: RecurrentModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Make the configuration of an untrained model: preset, overrides, and what depends on the tokenizer.

    Args:
        arguments: of the command line.
        tokenizer: whose size and special tokens the configuration takes over.

    Returns:
        The configuration.

    Raises:
        ValueError: an override is not a field, or follows from the tokenizer.
    """
    config_class = MODELS[arguments.architecture].config_class
    boundary = tokenizer.eos_token_id
    decided = {
        "vocab_size": len(tokenizer),
        "bos_token_id": boundary,
        "eos_token_id": boundary,
        "pad_token_id": tokenizer.pad_token_id,
    }
    overrides = check_overrides(config_class, arguments.config_overrides, decided)
    return config_class.from_preset(arguments.model_preset, **{**decided, **overrides})


def make_model(arguments: RecurrentModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Make an untrained model, or load the one to continue from.

    Args:
        arguments: of the command line.
        tokenizer: of the model.

    Returns:
        The model.

    Raises:
        ValueError: see `make_config` and `load_pretrained`; or PaLM and AWD-LSTM were mixed up.
    """
    model_class, name = MODELS[arguments.architecture], arguments.model_name_or_path
    if name is None:
        model = model_class(make_config(arguments, tokenizer))
    else:
        model = load_pretrained(model_class, name, arguments.config_overrides, tokenizer)
    if has_trees(model.config) != (arguments.architecture != "awd_lstm"):
        raise ValueError(
            f"architecture is {arguments.architecture!r}, but the model has "
            f"span_attention={model.config.span_attention}. Choose 'palm' with it, 'awd_lstm' without."
        )
    return model


def gold_structure(config: PreTrainedConfig, tree_supervision: bool) -> str | None:
    """What a model learns from gold trees.

    Args:
        config: of the model.
        tree_supervision: whether it is trained on gold trees.

    Returns:
        "distances" or "spans"; `None` without supervision.

    Raises:
        ValueError: this model does not learn from trees.
    """
    if not tree_supervision:
        return None
    if config.model_type == "on_lstm":
        learns, name, remedy = bool(config.supervised_layers), "distances", "Set supervised_layers"
    elif config.model_type == "prpn":
        learns, name, remedy = config.parsing_network == "recurrent", "distances", "Set parsing_network=recurrent"
    else:
        learns = config.span_attention and config.span_scores == "learned"
        name, remedy = "spans", "Use span_attention and learned span_scores"
    if not learns:
        raise ValueError(f"tree_supervision is set, but this model does not learn from trees. {remedy}.")
    return name


# ---------------------------------------------------------------------------------------------- data
def load_data(
    accelerator: Accelerator, model_arguments: RecurrentModelArguments, data: StreamDataArguments, output_dir: Path
) -> tuple[Splits[TokenStream], PreTrainedTokenizerBase, PreTrainedModel]:
    """Make or load tokenizer and model, and encode the text for them.

    Args:
        accelerator: of the run. Every process has to call.
        model_arguments: the model.
        data: files and tokenizer.
        output_dir: of the run; its tokenizer is saved there.

    Returns:
        Encoded text, tokenizer and model.

    Raises:
        ValueError: a file, the tokenizer or the model cannot be used.
    """
    source = data.tokenizer_name or model_arguments.model_name_or_path
    tokenizer = make_stream_tokenizer(accelerator, data, source, output_dir)
    model = make_model(model_arguments, tokenizer)
    gold = gold_structure(model.config, data.tree_supervision)
    limit = data.max_sentence_words
    parts = Splits(
        train=load_stream(data, data.train_files, tokenizer, gold, limit),
        validation=load_stream(data, data.validation_files, tokenizer, None, limit),
        test=load_stream(data, data.test_files, tokenizer, None, limit) if data.test_files else None,
    )
    return parts, tokenizer, model


class RecurrentRecipe(Recipe):
    """Train ON-LSTM, PRPN, PaLM or AWD-LSTM as language models; keep the best validation likelihood."""

    program = "train_recurrent"
    argument_types = (
        RecurrentModelArguments,
        StreamDataArguments,
        ParsingArguments,
        ScheduleArguments,
        RecurrentTrainingArguments,
    )
    mappings = ("config_overrides", "parse_options")
    streams: Splits[TokenStream]
    measures: Measures
    objective: StreamObjective
    control: EpochControl

    def __init__(
        self,
        accelerator: Accelerator,
        model_arguments: RecurrentModelArguments,
        data: StreamDataArguments,
        parsing: ParsingArguments,
        schedule: ScheduleArguments,
        arguments: RecurrentTrainingArguments,
    ):
        super().__init__(accelerator, arguments)
        self.model_arguments, self.data, self.parsing, self.schedule = model_arguments, data, parsing, schedule
        parsing.complete(data, model_arguments.architecture)
        if accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("FSDP shards the model, and parsing needs the whole model. Use DDP.")
        if accelerator.mixed_precision == "fp16":
            raise ValueError(
                "mixed_precision fp16 scales gradients per optimizer, of which there are two. Use bf16 or no."
            )
        if data.batching == "stream" and arguments.gradient_accumulation_steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps is {arguments.gradient_accumulation_steps}, but the segments of a stream "
                "are read in order. Use a larger per_device_train_batch_size."
            )

    def load(self) -> PreTrainedModel:
        """Make or load tokenizer and model, encode the text, and try what will be measured."""
        accelerator, arguments, data = self.accelerator, self.arguments, self.data
        streams, tokenizer, model = load_data(accelerator, self.model_arguments, data, Path(arguments.output_dir))
        self.streams, self.tokenizer = streams, tokenizer
        accelerator.print(data.describe_splits(streams, describe_stream))
        epochs = self.schedule.num_train_epochs
        self.ends = self._batches()[-1]
        arguments.limit_steps(self.ends.step(epochs - 1) if epochs else None)
        whole = self.ends.count(arguments.num_steps)
        accelerator.print(f"{arguments.num_steps:,} steps, {whole} whole epochs")
        held_out, size = (streams.validation, streams.test), arguments.per_device_eval_batch_size
        self.measures = make_measures(accelerator, *held_out, data, self.parsing, model, tokenizer, size)
        return model

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Fingerprints of the text, how it is read, and the schedule."""
        names = "batching bptt variable_bptt max_batch_tokens batch_group_size".split()
        return {
            "training_data": stream_fingerprint(self.streams.train),
            "validation": stream_fingerprint(self.streams.validation),
            **schedule_settings(self.schedule),
            **{name: getattr(self.data, name) for name in names},
            "per_device_eval_batch_size": self.arguments.per_device_eval_batch_size,
        }

    def prepare(self, model: PreTrainedModel) -> tuple[nn.Module, PhasedOptimizer, PhaseSchedule]:
        """Both optimizers of the schedule; the state of the stream becomes part of checkpoints."""
        prepared, optimizer, schedule = make_phased_optimizer(self.accelerator, model, self.schedule, self.arguments)
        self.objective = StreamObjective(self.accelerator, optimizer, carry=self.data.batching == "stream")
        self.accelerator.register_for_checkpointing(self.objective)
        self.control = EpochControl(optimizer, self.schedule, self.arguments.learning_rate)
        return prepared, optimizer, schedule

    def _batches(self, consumed: int = 0) -> tuple[Dataset, Sampler, Callable[[list[Any]], dict[str, Any]], EpochEnds]:
        """Data set, sampler and collate function of the training batches, and the ends of epochs."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        data, stream, seed = self.data, self.streams.train, self.arguments.seed
        size = self.arguments.per_device_train_batch_size
        if data.batching == "stream":
            segments = SegmentSampler(len(stream), size * world, data.bptt, data.variable_bptt, seed, consumed)
            dataset = SegmentDataset(stream, size * world, range(rank * size, (rank + 1) * size))
            return dataset, segments, first_item, EpochEnds(segments.num_batches, 1)
        sentences = SentenceDataset(stream)
        sampler = PaddedBatchSampler(
            sentences.lengths, size, data.max_batch_tokens, data.batch_group_size, seed, rank, world, consumed
        )
        per_step = world * self.arguments.gradient_accumulation_steps
        ends = EpochEnds(lambda epoch: len(sampler.epoch_batches(epoch)), per_step)
        return sentences, sampler, FramedCollator(stream, self.tokenizer.pad_token_id), ends

    def loader(self, run: Run) -> DataLoader:
        """Segments of the stream, or sentences of similar length."""
        dataset, sampler, collate, _ = self._batches(run.state.consumed)
        return make_loader(self.accelerator, dataset, collate, self.arguments, sampler)

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective, with the state of the batch before."""
        return self.objective(model, batch)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure validation text and trees with the averaged weights, if there are some."""
        with self.control.optimizer.averaged_weights():
            return self.measures.validation.run(model, step)

    def evaluation_due(self, step: int) -> bool:
        """At the end of every epoch."""
        return step in self.ends

    def best_model(self) -> EpochControl:
        """The epoch with the lowest validation loss; it decides about the phases of the schedule, too."""
        return self.control

    def flops_per_token(self, model: PreTrainedModel) -> float:
        """By the number of parameters."""
        return recurrent_flops_per_token(model)

    def card_facts(self, run: Run) -> dict[str, Any]:
        """Files, steps and epochs."""
        best, num_epochs = run.state.notes["best"]["step"], len(run.state.notes["evaluations"]) - 1
        return {
            **hub_facts(self.model_arguments.model_name_or_path),
            "training_data": self.data.describe(),
            "training_procedure": f"The best of {run.state.step} steps ({num_epochs} epochs) of "
            f"`training/train_recurrent.py` by validation likelihood, that of step {best}; seed {self.arguments.seed}.",
        }

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Likelihood of the test text and F1 of the induced trees."""
        test: dict[str, Any] = {}
        if self.measures.test is not None:
            test.update(self.measures.test.run(run.model, step))
        if self.measures.final_trees is not None:
            test["trees"] = score_final_trees(run, self.measures.final_trees)
        return {"test": test} if test else {}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Parse the first test sentences with the saved model, as its users will, and generate one."""
        parsing, test = self.parsing, results.get("test", {})
        if parsing.final_report:
            bank = parsing.treebank(parsing.final_parsing_files, self.data.split_leaves, REPORT_SENTENCES)
            methods: dict[str, Any] = {"model": parsing.parse_options}
            banks, convention = {str(parsing.punctuation): bank}, parsing.parsing_convention
            report = report_saved_model(folder, self.tokenizer, banks, methods, self.arguments.seed, convention)
            test["saved_model"] = report.numbers()
        before, best = results["evaluations"][0]["losses"], kept_evaluation(results)["losses"]
        unit = "bits_per_character" if "bits_per_character" in best else "perplexity"
        label = unit.replace("_", " ")
        line = f"validation {label} {before[unit]:.2f} -> {best[unit]:.2f} (best at step {results['best_step']})"
        if "losses" in test:
            line += f"; test {label} {test['losses'][unit]:.2f}"
        if "trees" in test:
            model, right = (test["trees"][name]["sentence_f1"] for name in ("model", "right"))
            line += f"; sentence F1 {model:.2f}, right branching {right:.2f}"
        return line


def score_final_trees(run: Run, scorer: TreeScorer) -> dict[str, Any]:
    """F1 of the final model's trees and of those that need no model; every process calls.

    Args:
        run: of this process.
        scorer: of the final treebank.

    Returns:
        Convention, treatment of punctuation, and scores by kind of tree.
    """
    scores = {"model": scorer.run(run.accelerator, run.model), **scorer.baselines()}
    count = len(scorer.treebank.words)
    run.accelerator.print(f"final trees, all {count:,} sentences:\n{score_table(scores, scorer.treebank)}")
    numbers: dict[str, Any] = score_numbers(scores)
    return {"convention": scores["model"].convention, "punctuation": scorer.treebank.convention, **numbers}


main = partial(run_recipe, RecurrentRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
