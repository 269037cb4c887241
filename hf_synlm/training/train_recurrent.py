"""Train ON-LSTM, PRPN, PaLM or AWD-LSTM as language models, with or without gold trees.

    accelerate launch training/train_recurrent.py --config training/configs/on_lstm_syd_tiny.yaml --output_dir runs/tiny

Text comes from treebanks (default: the embedded one) or from plain files. It is read as one stream, segment by segment
with the state carried along (truncated back-propagation through time), or sentence by sentence. The model that is kept
is the one with the best validation likelihood. Papers: Shen et al. (ICLR 2019), Shen et al. (ICLR 2018), Peng et al.
(EMNLP 2019), Merity et al. (ICLR 2018); supervised distances: Du et al. (ACL 2020).
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import nn
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
from hf_synlm.training.arguments import check_overrides, parse_arguments
from hf_synlm.training.checkpoints import TrainingState, read_state, write_json
from hf_synlm.training.final_report import report_saved_model
from hf_synlm.training.flops import recurrent_flops_per_token
from hf_synlm.training.generation_samples import SampleGenerator
from hf_synlm.training.hub_uploads import CheckpointUploads, push_final_model
from hf_synlm.training.loop import start_or_resume, train
from hf_synlm.training.output_folder import RESULTS_FILE, output_folder
from hf_synlm.training.preflight import preflight
from hf_synlm.training.recurrent_measures import Measures, ParsingArguments, has_trees, make_measures
from hf_synlm.training.recurrent_schedule import (
    EpochControl,
    RecurrentTrainingArguments,
    ScheduleArguments,
    make_phased_optimizer,
    schedule_settings,
)
from hf_synlm.training.run import (
    Run,
    course_settings,
    end_run,
    load_pretrained,
    make_accelerator,
    save_final_model,
    start_tracking,
)
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


def make_batches(
    accelerator: Accelerator,
    arguments: RecurrentTrainingArguments,
    data: StreamDataArguments,
    stream: TokenStream,
    pad_token_id: int,
    consumed: int = 0,
) -> tuple[Any, Any, Any, EpochEnds]:
    """Data set, sampler and collate function of the training batches, and the ends of epochs."""
    rank, world, size = accelerator.process_index, accelerator.num_processes, arguments.per_device_train_batch_size
    if data.batching == "stream":
        segments = SegmentSampler(len(stream), size * world, data.bptt, data.variable_bptt, arguments.seed, consumed)
        dataset = SegmentDataset(stream, size * world, range(rank * size, (rank + 1) * size))
        return dataset, segments, first_item, EpochEnds(segments.num_batches, 1)
    sentences = SentenceDataset(stream)
    sampler = PaddedBatchSampler(
        sentences.lengths, size, data.max_batch_tokens, data.batch_group_size, arguments.seed, rank, world, consumed
    )
    ends = EpochEnds(lambda epoch: len(sampler.epoch_batches(epoch)), world * arguments.gradient_accumulation_steps)
    return sentences, sampler, FramedCollator(stream, pad_token_id), ends


def check_course(accelerator: Accelerator, arguments: RecurrentTrainingArguments, data: StreamDataArguments) -> None:
    """Raise ValueError for what does not go together."""
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("These models are small, and FSDP would shard what parsing needs whole. Use DDP.")
    if accelerator.mixed_precision == "fp16":
        raise ValueError("mixed_precision fp16 scales gradients per optimizer, of which there are two. Use bf16 or no.")
    if data.batching == "stream" and arguments.gradient_accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps is {arguments.gradient_accumulation_steps}, but the segments of a stream "
            "come one after the other. Use a larger per_device_train_batch_size."
        )


# ---------------------------------------------------------------------------------------------- the run
def card_facts(run: Run, data: StreamDataArguments) -> dict[str, Any]:
    """What the card of the final model states about this run."""
    best, num_epochs = run.state.notes["best"]["step"], len(run.state.notes["evaluations"]) - 1
    return {
        "training_data": data.describe(),
        "training_procedure": f"The best of {run.state.step} steps ({num_epochs} epochs) of "
        f"`training/train_recurrent.py` by validation likelihood, that of step {best}; seed {run.arguments.seed}.",
    }


def write_results(run: Run, seconds: float, speed: dict[str, float], test: dict[str, Any] | None) -> None:
    """Write `all_results.json` and print the closing line."""
    notes = run.state.notes
    best = next(item for item in notes["evaluations"] if item["step"] == notes["best"]["step"])
    results = {
        "step": run.state.step,
        "best_step": best["step"],
        "seconds_of_this_process": round(seconds, 1),
        **speed,
        "train": notes.get("train", []),
        "evaluations": notes["evaluations"],
        **({} if test is None else {"test": test}),
    }
    write_json(run.output_dir / RESULTS_FILE, results)
    unit = "bits_per_character" if "bits_per_character" in best["losses"] else "perplexity"
    label = unit.replace("_", " ")
    before, after = notes["evaluations"][0]["losses"][unit], best["losses"][unit]
    line = f"validation {label} {before:.2f} -> {after:.2f} (best at step {best['step']})"
    if test is not None and "losses" in test:
        line += f"; test {label} {test['losses'][unit]:.2f}"
    if test is not None and "trees" in test:
        scores = test["trees"]["model"]
        line += (
            f"; sentence F1 {scores['sentence_f1']:.2f}, right branching {test['trees']['right']['sentence_f1']:.2f}"
        )
    run.accelerator.print(line)


def score_final_trees(run: Run, scorer: TreeScorer) -> dict[str, Any]:
    """F1 of the final model's trees and of those that need no model; every process has to call."""
    scores = {"model": scorer.run(run.accelerator, run.model), **scorer.baselines()}
    run.accelerator.print(score_table(scores, scorer.treebank))
    numbers: dict[str, Any] = score_numbers(scores)
    return {"convention": scores["model"].convention, "punctuation": scorer.treebank.convention, **numbers}


def run_settings(
    accelerator: Accelerator,
    streams: Data,
    data: StreamDataArguments,
    schedule: ScheduleArguments,
    arguments: RecurrentTrainingArguments,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """What a resumed run must have in common with its first part."""
    names = "batching bptt variable_bptt max_batch_tokens batch_group_size".split()
    return {
        **course_settings(arguments, config, accelerator, tokenizer),
        "training_data": stream_fingerprint(streams.train),
        **schedule_settings(schedule),
        **{name: getattr(data, name) for name in names},
        "validation": stream_fingerprint(streams.validation),
        "per_device_eval_batch_size": arguments.per_device_eval_batch_size,
    }


def main(argv: list[str] | None = None) -> None:
    """Run the script."""
    model_arguments, data, parsing, schedule, arguments = parse_arguments(
        (ModelArguments, StreamDataArguments, ParsingArguments, ScheduleArguments, RecurrentTrainingArguments),
        argv,
        mappings=["config_overrides", "parse_options"],
    )
    parsing.complete(data, model_arguments.architecture)
    started = time.monotonic()
    accelerator = make_accelerator(arguments)
    check_course(accelerator, arguments, data)
    with output_folder(accelerator, arguments, model_arguments, data, parsing, schedule) as checkpoint:
        set_seed(arguments.seed)
        streams, tokenizer, model = load_data(accelerator, model_arguments, data, Path(arguments.output_dir))
        accelerator.print(
            f"training: {describe_stream(streams.train)}\nvalidation: {describe_stream(streams.validation)}"
        )
        accelerator.print(f"model: {model.num_parameters():,} parameters, vocabulary {model.config.vocab_size}")
        ends = make_batches(accelerator, arguments, data, streams.train, tokenizer.pad_token_id)[-1]
        epochs = schedule.num_train_epochs
        arguments.limit_steps(ends.step(epochs - 1) if epochs else None)
        accelerator.print(f"{arguments.max_train_steps:,} steps, {ends.count(arguments.max_train_steps)} whole epochs")
        settings = run_settings(accelerator, streams, data, schedule, arguments, model.config, tokenizer)
        if checkpoint is not None:
            read_state(checkpoint, settings)  # refuses other settings
        size = arguments.per_device_eval_batch_size
        held_out = (streams.validation, streams.test)
        measures = make_measures(accelerator, *held_out, data, parsing, model, tokenizer, size)
        preflight(accelerator, arguments, model)
        parts = make_phased_optimizer(accelerator, model, schedule, arguments)
        run = Run(accelerator, arguments, *parts, TrainingState())
        del parts  # the wrapper of the model belongs to the run alone, which ends with it
    start_tracking(accelerator, "train_recurrent", model_arguments, data, parsing, schedule, arguments)
    run_training(run, checkpoint, settings, streams.train, measures, data, parsing, schedule, tokenizer, started)
    end_run(run)
    push_final_model(run)


def run_training(
    run: Run,
    checkpoint: Path | None,
    settings: dict[str, Any],
    stream: TokenStream,
    measures: Measures,
    data: StreamDataArguments,
    parsing: ParsingArguments,
    schedule: ScheduleArguments,
    tokenizer: PreTrainedTokenizerBase,
    started: float,
) -> None:
    """Train, go back to the best model, save it and measure it on the test text and trees."""
    accelerator, arguments, optimizer = run.accelerator, run.arguments, run.optimizer

    def evaluate(model: nn.Module, step: int) -> dict[str, Any]:
        with optimizer.averaged_weights():
            return measures.validation.run(model, step)

    objective = StreamObjective(accelerator, optimizer, carry=data.batching == "stream")
    accelerator.register_for_checkpointing(objective)
    control = EpochControl(optimizer, schedule, arguments.learning_rate)
    start_or_resume(run, checkpoint, settings, evaluate, control)
    optimizer.phase = control.next_phase(run)
    pad, consumed = tokenizer.pad_token_id, run.state.consumed
    dataset, sampler, collate, ends = make_batches(accelerator, arguments, data, stream, pad, consumed)
    loader = make_loader(accelerator, dataset, collate, arguments, sampler)
    uploads = CheckpointUploads(run, tokenizer, lambda: card_facts(run, data))
    speed = train(
        run, loader, objective, evaluate, control, evaluation_due=ends.__contains__,
        generate=SampleGenerator(run, tokenizer), after_checkpoint=uploads,
        flops_per_token=recurrent_flops_per_token(accelerator.unwrap_model(run.model)),
    )  # fmt: skip
    uploads.finish()
    step = control.restore(run)
    folder = save_final_model(run, tokenizer, card_facts(run, data))
    test: dict[str, Any] = {}
    if measures.test is not None:
        test.update(measures.test.run(run.model, step))
    if measures.final_trees is not None:
        test["trees"] = score_final_trees(run, measures.final_trees)
    if accelerator.is_main_process:
        if parsing.final_report:
            bank = parsing.treebank(parsing.final_parsing_files, data.split_leaves, REPORT_SENTENCES)
            options, convention = {"model": parsing.parse_options}, parsing.parsing_convention
            report = report_saved_model(
                folder, tokenizer, {parsing.punctuation: bank}, options, arguments.seed, convention
            )
            test["saved_model"] = report.numbers()
        write_results(run, time.monotonic() - started, speed, test or None)


if __name__ == "__main__":
    main()
