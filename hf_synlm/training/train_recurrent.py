"""Train ON-LSTM, PRPN, PaLM or AWD-LSTM as language models, with or without gold trees.

    accelerate launch training/train_recurrent.py --config training/configs/on_lstm_syd_tiny.yaml --output_dir runs/tiny

Text comes from treebanks (default: the embedded one) or from plain files. It is read as one stream, segment by segment
with the state carried along (truncated back-propagation through time), or sentence by sentence. The model that is kept
is the one with the best validation likelihood. Papers: Shen et al. (ICLR 2019), Shen et al. (ICLR 2018), Peng et al.
(EMNLP 2019), Merity et al. (ICLR 2018); supervised distances: Du et al. (ACL 2020).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm import (
    ONLSTMConfig,
    ONLSTMForCausalLM,
    PaLMConfig,
    PaLMForCausalLM,
    PRPNConfig,
    PRPNForCausalLM,
)
from hf_synlm.data.streams import TokenStream
from hf_synlm.evaluation.treebank_parsing import score_numbers, score_table
from hf_synlm.hub.checkpoint import check_model_source
from hf_synlm.training.arguments import check_overrides
from hf_synlm.training.final_report import report_saved_model
from hf_synlm.training.flops import recurrent_flops_per_token
from hf_synlm.training.recipe import Recipe, kept_evaluation, run_recipe
from hf_synlm.training.recurrent_measures import Measures, ParsingArguments, has_trees, make_measures
from hf_synlm.training.recurrent_schedule import (
    EpochControl,
    PhasedOptimizer,
    PhaseSchedule,
    RecurrentTrainingArguments,
    ScheduleArguments,
    make_phased_optimizer,
    schedule_settings,
)
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
from hf_synlm.training.stream_objective import StreamObjective

CONFIGS = {"on_lstm": ONLSTMConfig, "prpn": PRPNConfig, "palm": PaLMConfig, "awd_lstm": PaLMConfig}
MODELS: dict[str, Any] = {
    "on_lstm": ONLSTMForCausalLM,
    "prpn": PRPNForCausalLM,
    "palm": PaLMForCausalLM,
    "awd_lstm": PaLMForCausalLM,
}
DEFAULT_PRESETS = {
    "on_lstm": "on-lstm-ptb",
    "prpn": "prpn-ptb-word",
    "palm": "palm-ptb",
    "awd_lstm": "awd-lstm-ptb",
}
REPORT_SENTENCES = 20


@dataclass
class ModelArguments:
    """The model to train."""

    architecture: str = field(
        default="on_lstm", metadata={"help": "'on_lstm', 'prpn', 'palm', or 'awd_lstm', the baseline without trees."}
    )
    model_preset: str | None = field(
        default=None, metadata={"help": "Published size to start from; default: that of the Penn Treebank's words."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Fields of the configuration that differ from the preset: key=value,key=value or a JSON object; in "
            "a config file a mapping.",
        },
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Continue from the weights and configuration of this model instead."}
    )

    def __post_init__(self):
        """Check the architecture and name its default size."""
        if self.architecture not in CONFIGS:
            raise ValueError(f"architecture is {self.architecture!r}. Choose among {', '.join(CONFIGS)}.")
        if self.model_preset is None:
            self.model_preset = DEFAULT_PRESETS[self.architecture]
        if self.model_name_or_path is not None:
            check_model_source(self.model_name_or_path)


# ---------------------------------------------------------------------------------------------- model
def make_config(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Configuration of a fresh model: preset, overrides, and what the tokenizer decides.

    Args:
        arguments: of the command line.
        tokenizer: whose size and special tokens the configuration takes over.

    Returns:
        The configuration.

    Raises:
        ValueError: for overrides that are no fields, or that the tokenizer decides.
    """
    config_class = CONFIGS[arguments.architecture]
    boundary = tokenizer.eos_token_id
    decided = {
        "vocab_size": len(tokenizer),
        "bos_token_id": boundary,
        "eos_token_id": boundary,
        "pad_token_id": tokenizer.pad_token_id,
    }
    overrides = check_overrides(config_class, arguments.config_overrides)
    for name in decided:
        if name in overrides:
            raise ValueError(f"config_overrides: {name} follows from the tokenizer. Leave it out.")
    return config_class.from_preset(arguments.model_preset, **{**decided, **overrides})


def make_model(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A fresh model, or the one to continue from, checked against the tokenizer."""
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
    """What of the gold trees a model is trained on: "distances", "spans", or `None`.

    Raises:
        ValueError: when there is supervision and the model has nothing to supervise.
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
@dataclass
class Data:
    """Encoded text; `test` may be missing."""

    train: TokenStream
    validation: TokenStream
    test: TokenStream | None


def load_data(
    accelerator: Accelerator, model_arguments: ModelArguments, data: StreamDataArguments, output_dir: Path
) -> tuple[Data, PreTrainedTokenizerBase, PreTrainedModel]:
    """Make or load tokenizer and model, and encode the text for them."""
    source = data.tokenizer_name or model_arguments.model_name_or_path
    tokenizer = make_stream_tokenizer(accelerator, data, source, output_dir)
    model = make_model(model_arguments, tokenizer)
    gold = gold_structure(model.config, data.tree_supervision)
    limit = data.max_sentence_words
    parts = Data(
        train=load_stream(data, data.train_files, tokenizer, gold, limit),
        validation=load_stream(data, data.validation_files, tokenizer, None, limit),
        test=load_stream(data, data.test_files, tokenizer, None, limit) if data.test_files else None,
    )
    return parts, tokenizer, model


class RecurrentRecipe(Recipe):
    """A stream of text, or sentences; optimizers and evaluations follow the epochs."""

    program = "train_recurrent"
    argument_types = (
        ModelArguments,
        StreamDataArguments,
        ParsingArguments,
        ScheduleArguments,
        RecurrentTrainingArguments,
    )
    mappings = ("config_overrides", "parse_options")
    streams: Data
    measures: Measures
    objective: StreamObjective
    control: EpochControl

    def __init__(
        self,
        accelerator: Accelerator,
        model_arguments: ModelArguments,
        data: StreamDataArguments,
        parsing: ParsingArguments,
        schedule: ScheduleArguments,
        arguments: RecurrentTrainingArguments,
    ):
        super().__init__(accelerator, arguments)
        self.model_arguments, self.data, self.parsing, self.schedule = model_arguments, data, parsing, schedule
        parsing.complete(data, model_arguments.architecture)
        if accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("These models are small, and FSDP would shard what parsing needs whole. Use DDP.")
        if accelerator.mixed_precision == "fp16":
            raise ValueError(
                "mixed_precision fp16 scales gradients per optimizer, of which there are two. Use bf16 or no."
            )
        if data.batching == "stream" and arguments.gradient_accumulation_steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps is {arguments.gradient_accumulation_steps}, but the segments of a stream "
                "come one after the other. Use a larger per_device_train_batch_size."
            )

    def load(self) -> PreTrainedModel:
        """Make or load tokenizer and model, encode the text, and try what will be measured."""
        accelerator, arguments, data = self.accelerator, self.arguments, self.data
        streams, tokenizer, model = load_data(accelerator, self.model_arguments, data, Path(arguments.output_dir))
        self.streams, self.tokenizer = streams, tokenizer
        accelerator.print(
            f"training: {describe_stream(streams.train)}\nvalidation: {describe_stream(streams.validation)}"
        )
        epochs = self.schedule.num_train_epochs
        self.ends = self._batches()[-1]
        arguments.limit_steps(self.ends.step(epochs - 1) if epochs else None)
        whole = self.ends.count(arguments.max_train_steps)
        accelerator.print(f"{arguments.max_train_steps:,} steps, {whole} whole epochs")
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
            banks, convention = {parsing.punctuation: bank}, parsing.parsing_convention
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
    run.accelerator.print(score_table(scores, scorer.treebank))
    numbers: dict[str, Any] = score_numbers(scores)
    return {"convention": scores["model"].convention, "punctuation": scorer.treebank.convention, **numbers}


def main(argv: list[str] | None = None) -> None:
    """Run the program.

    Args:
        argv: command line without the program name; default: the process's.
    """
    run_recipe(RecurrentRecipe, argv)


if __name__ == "__main__":
    main()
