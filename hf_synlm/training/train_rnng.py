"""Train RNNG on a treebank, or the LSTM language model on the words of the same treebank.

    accelerate launch training/train_rnng.py --config training/configs/rnng_tiny.yaml --output_dir runs/rnng_tiny

Trees come from files of bracketed trees, or (default) from the embedded treebank. Gold derivations are learned by
teacher forcing. Both architectures read the same tokens in the same batches, drawn among sentences with similar
numbers of actions under a budget of padded actions. The model that is kept is the one with the best validation
likelihood. Paper: Noji and Oseki, "Effective Batching for Recurrent Neural Network Grammars" (Findings of ACL 2021).
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm import LSTMConfig, LSTMForCausalLM, RNNGConfig, RNNGForCausalLM
from hf_synlm.data.vocabulary import word_final_ids
from hf_synlm.evaluation.treebank_parsing import PUNCTUATION, Treebank
from hf_synlm.hub.checkpoint import check_model_source
from hf_synlm.training.arguments import TrainingArguments, check_overrides, parse_arguments
from hf_synlm.training.best_model import BestModel
from hf_synlm.training.checkpoints import TrainingState, read_state, write_json
from hf_synlm.training.final_report import load_report_treebanks, report_saved_model
from hf_synlm.training.flops import recurrent_flops_per_token, rnng_flops_per_token
from hf_synlm.training.generation_samples import SampleGenerator
from hf_synlm.training.hub_uploads import CheckpointUploads, push_final_model
from hf_synlm.training.labeled_evaluation import Objective, add_perplexities, evaluate_given_trees, search_trees, spread
from hf_synlm.training.loop import start_or_resume, train
from hf_synlm.training.optimizers import make_optimizer
from hf_synlm.training.output_folder import RESULTS_FILE, output_folder
from hf_synlm.training.preflight import preflight
from hf_synlm.training.run import (
    Run,
    course_settings,
    end_run,
    load_pretrained,
    make_accelerator,
    save_final_model,
    set_up_layers,
    start_tracking,
)
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

CONFIGS = {"rnng": RNNGConfig, "lstm": LSTMConfig}
REPORT_SENTENCES = 20
MODELS: dict[str, Any] = {"rnng": RNNGForCausalLM, "lstm": LSTMForCausalLM}


@dataclass
class ModelArguments:
    """The model to train."""

    architecture: str = field(default="rnng", metadata={"help": "'rnng', or 'lstm' for the baseline without trees."})
    model_preset: str | None = field(
        default=None, metadata={"help": "Published size to start from; default: rnng-15m or lstm-15m."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Fields of RNNGConfig or LSTMConfig that differ from the preset: key=value,key=value or a JSON "
            "object; in a config file a mapping.",
        },
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Continue from the weights and configuration of this model instead."}
    )

    def __post_init__(self):
        """Check the architecture and name its default size."""
        if self.architecture not in CONFIGS:
            raise ValueError(f"architecture is {self.architecture!r}. Choose 'rnng' or 'lstm'.")
        if self.model_preset is None:
            self.model_preset = f"{self.architecture}-15m"
        if self.model_name_or_path is not None:
            check_model_source(self.model_name_or_path)


@dataclass
class CourseArguments:
    """How long to train, which model to keep, and what is measured on the way."""

    num_train_epochs: int = field(
        default=0,
        metadata={"help": "Passes through the trees; 0: max_train_steps counts. With both, the smaller of the two."},
    )
    early_stopping_patience: int = field(
        default=0, metadata={"help": "Stop after so many evaluations without a better likelihood; 0: never."}
    )
    search_sentences: int = field(
        default=0,
        metadata={"help": "Validation sentences parsed in every evaluation but the first; 0: none. RNNG only."},
    )
    final_search_sentences: int | None = field(
        default=None, metadata={"help": "Test sentences that the final model parses; default: all; 0: none. RNNG only."}
    )
    search_batch_size: int = field(default=10, metadata={"help": "Sentences per process that are searched together."})
    num_beams: int | None = field(
        default=None, metadata={"help": "Word beam: derivations kept after each word. Default: the model's."}
    )
    action_beam_size: int | None = field(
        default=None, metadata={"help": "Action beam: derivations kept after each action. Default: the model's."}
    )
    fast_track_size: int | None = field(
        default=None, metadata={"help": "Derivations that reach the next word in any case. Default: the model's."}
    )
    final_report: bool = field(
        default=False,
        metadata={
            "help": "At the end, load the saved model in a process without hf_synlm; parse some of the test sentences "
            "and generate one there. RNNG only."
        },
    )
    report_punctuation: list[str] = field(
        default_factory=lambda: ["ignore"],
        metadata={
            "help": "Treatments of punctuation that the final report scores, each with its own baselines: 'remove', "
            "'ignore', 'keep' (for tags that are not the Penn Treebank's)."
        },
    )

    def __post_init__(self):
        """Check the values."""
        for name in ("num_beams", "action_beam_size", "search_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 and is {value}.")
        names = "num_train_epochs early_stopping_patience search_sentences final_search_sentences fast_track_size"
        for name in names.split():
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative and is {value}.")
        for treatment in self.report_punctuation:
            if treatment not in PUNCTUATION:
                raise ValueError(f"punctuation {treatment!r} is unknown. Choose among {', '.join(PUNCTUATION)}.")

    def check_architecture(self, architecture: str) -> None:
        """Refuse options of the search for a model that has none."""
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
        """Widths of the search, the model's where none are given."""
        return {
            "num_beams": config.scoring_num_beams if self.num_beams is None else self.num_beams,
            "action_beam_size": config.action_beam_size if self.action_beam_size is None else self.action_beam_size,
            "fast_track_size": config.fast_track_size if self.fast_track_size is None else self.fast_track_size,
        }


# ---------------------------------------------------------------------------------------------- model
def make_config(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, labels: list[str], subwords: bool
) -> PreTrainedConfig:
    """Configuration of a fresh model: preset, overrides, and what depends on tokenizer and trees.

    Args:
        arguments: of the command line.
        tokenizer: whose size and special tokens the configuration takes over.
        labels: of the nonterminals.
        subwords: whether tokens are pieces of words.

    Returns:
        The configuration.

    Raises:
        ValueError: for overrides that are no fields, or that only tokenizer and trees decide.
    """
    config_class = CONFIGS[arguments.architecture]
    pad = tokenizer.pad_token_id
    decided: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": pad}
    if arguments.architecture == "rnng":
        decided.update(nonterminals=labels, subwords=subwords)
    overrides = check_overrides(config_class, arguments.config_overrides)
    for name in decided:
        if name in overrides:
            raise ValueError(f"config_overrides: {name} follows from the tokenizer and the trees. Leave it out.")
    begin = {
        "bos_token_id": pad if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        "eos_token_id": pad if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
    }
    return config_class.from_preset(arguments.model_preset, **{**begin, **decided, **overrides})


def load_model(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | None:
    """The model to continue from, checked against the tokenizer; `None` for a fresh start."""
    if arguments.model_name_or_path is None:
        return None
    model_class = MODELS[arguments.architecture]
    return load_pretrained(model_class, arguments.model_name_or_path, arguments.config_overrides, tokenizer)


def make_model(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A fresh model; one over pieces of words is told which of them end a word."""
    if isinstance(config, LSTMConfig):
        return LSTMForCausalLM(config)
    model = RNNGForCausalLM(config)
    if config.subwords:
        model.model.word_final.copy_(torch.tensor(word_final_ids(tokenizer)))
    return model


# ---------------------------------------------------------------------------------------------- evaluation
@dataclass
class Evaluator:
    """Measures likelihood on held-out trees, and parsing accuracy on some or all of them.

    Fields:
        accelerator: of the run.
        name: of the data, for messages.
        dataset: the held-out trees.
        collate: makes batches.
        objective: of the model.
        arguments: of the run; sizes of batches.
        max_batch_actions: bound on the padded size of a batch.
        rows: sentences to parse; may be none.
        search: batch size and widths of the search.
        from_scratch: the model of step 0 is untrained.
    """

    accelerator: Accelerator
    name: str
    dataset: TreeDataset
    collate: TreeCollator
    objective: Objective
    arguments: TrainingArguments
    max_batch_actions: int
    rows: list[int]
    search: dict[str, Any]
    from_scratch: bool

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Evaluate; the main process prints the result. Every process has to call.

        An untrained model is not searched: it would open and close constituents at random.
        """
        sizes = (self.arguments.per_device_eval_batch_size, self.max_batch_actions)
        losses = evaluate_given_trees(self.accelerator, model, self.dataset, self.collate, self.objective, *sizes)
        result: dict[str, Any] = {"step": step, "losses": losses}
        text = "  ".join(f"{name} {value:.4g}" for name, value in losses.items())
        self.accelerator.print(f"step {step}: {self.name} of {len(self.dataset)} sentences: {text}")
        flat = {f"{self.name}/{name}": value for name, value in losses.items()}
        if self.rows and step == 0 and self.from_scratch:
            self.accelerator.print("step 0: no sentence is parsed with an untrained model")
        elif self.rows:
            scores = search_trees(self.accelerator, model, self.dataset, self.rows, self.collate, **self.search)
            self.accelerator.print(f"step {step}: {self.name}: {scores}")
            result["search"] = scores.numbers()
            flat.update({f"{self.name}/{k}": v for k, v in result["search"].items() if not isinstance(v, dict)})
        self.accelerator.log(flat, step=step)
        return result


def validation_loss(evaluation: dict[str, Any]) -> float:
    """What early stopping and the choice of the best model go by: nats of all held-out trees."""
    return evaluation["losses"]["nats"]


# ---------------------------------------------------------------------------------------------- the run
@dataclass
class Data:
    """Encoded trees; `test` may be missing."""

    train: TreeDataset
    validation: TreeDataset
    test: TreeDataset | None


def load_data(
    accelerator: Accelerator, model_arguments: ModelArguments, data: TreeDataArguments, output_dir: Path
) -> tuple[Data, PreTrainedTokenizerBase, PreTrainedModel]:
    """Read the trees, make or load tokenizer and model, and encode the trees for them."""
    parts = (data.train_files, data.validation_files, data.test_files)
    trees = [load_trees(accelerator, files, data.split_leaves) for files in parts if files]
    source = data.tokenizer_name or model_arguments.model_name_or_path
    tokenizer = make_tree_tokenizer(accelerator, data, trees[0], source, output_dir)
    model = load_model(model_arguments, tokenizer)
    labels = collect_labels(*trees)
    if model is None:
        subwords = not all(word_final_ids(tokenizer))
        model = make_model(make_config(model_arguments, tokenizer, labels, subwords), tokenizer)
    elif model_arguments.architecture == "rnng":
        labels = model.config.nonterminals
    system = getattr(model.config, "transition_system", "top_down")
    encoded = [
        encode_treebank(
            accelerator, part, tokenizer, system, labels, data.preprocessing_num_workers,
            data.max_sentence_tokens if part is trees[0] else None,
        )
        for part in trees
    ]  # fmt: skip
    return Data(encoded[0], encoded[1], encoded[2] if len(encoded) > 2 else None), tokenizer, model


def make_sampler(
    accelerator: Accelerator,
    arguments: TrainingArguments,
    data: TreeDataArguments,
    trees: TreeDataset,
    consumed: int = 0,
) -> PaddedBatchSampler:
    """Batches of sentences with similar numbers of actions; for both architectures the same."""
    return PaddedBatchSampler(
        trees.lengths("actions"),
        arguments.per_device_train_batch_size,
        data.max_batch_actions,
        data.batch_group_size,
        arguments.seed,
        accelerator.process_index,
        accelerator.num_processes,
        consumed,
    )


def steps_of_epochs(sampler: PaddedBatchSampler, num_epochs: int, accumulation: int) -> int:
    """Optimizer steps that it takes to read the data so many times."""
    return -(-sampler.num_batches(num_epochs) // (sampler.world_size * accumulation))


def flops_per_token(run: Run, trees: TreeDataset) -> float:
    """FLOPs of training per token of these trees."""
    model = run.accelerator.unwrap_model(run.model)
    if not isinstance(model.config, RNNGConfig):
        return recurrent_flops_per_token(model)
    return rnng_flops_per_token(model.config, trees.lengths("actions").sum() / trees.lengths("input_ids").sum())


def card_facts(run: Run, data: TreeDataArguments, num_sentences: int) -> dict[str, Any]:
    """What the card of the final model states about this run."""
    best = run.state.notes["best"]["step"]
    return {
        "training_data": data.describe(),
        "training_procedure": f"The best of {run.state.step} steps of `training/train_rnng.py` by validation "
        f"likelihood, that of step {best}; {num_sentences} sentences read, seed {run.arguments.seed}.",
    }


def write_results(
    run: Run, seconds: float, speed: dict[str, float], num_sentences: int, test: dict[str, Any] | None
) -> None:
    """Write `all_results.json` and print the closing line."""
    notes = run.state.notes
    best = next(item for item in notes["evaluations"] if item["step"] == notes["best"]["step"])
    results = {
        "step": run.state.step,
        "best_step": best["step"],
        "sentences": num_sentences,
        "seconds_of_this_process": round(seconds, 1),
        **speed,
        "train": notes.get("train", []),
        "evaluations": notes["evaluations"],
        **({} if test is None else {"test": test}),
    }
    write_json(run.output_dir / RESULTS_FILE, results)
    before, after = notes["evaluations"][0]["losses"], best["losses"]
    line = (
        f"validation nats per sentence {before['nats_per_sentence']:.2f} -> {after['nats_per_sentence']:.2f} "
        f"(best at step {best['step']})"
    )
    if test is not None:
        line += f"; test nats per sentence {test['losses']['nats_per_sentence']:.2f}"
        if "search" in test:
            search = test["search"]
            line += f", labeled F1 {search['labeled_f1']:.2f}, word perplexity {search['word_perplexity']:.2f}"
        elif "word_perplexity" in test["losses"]:
            line += f", word perplexity {test['losses']['word_perplexity']:.2f}"
    run.accelerator.print(line)


def report(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    treebanks: dict[str, Treebank],
    beam: dict[str, int],
    seed: int,
) -> dict[str, Any]:
    """Load the saved model as its users will, parse the first test sentences and generate one; for JSON."""
    methods = {f"search (beams {beam['num_beams']} and {beam['action_beam_size']})": beam}
    return report_saved_model(folder, tokenizer, treebanks, methods, seed).numbers()


def main(argv: list[str] | None = None) -> None:
    """Run the script."""
    model_arguments, data, course, arguments = parse_arguments(
        (ModelArguments, TreeDataArguments, CourseArguments, TrainingArguments), argv, mappings=["config_overrides"]
    )
    course.check_architecture(model_arguments.architecture)
    started = time.monotonic()
    accelerator = make_accelerator(arguments)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("These models are small, and FSDP would shard what the search needs whole. Use DDP.")
    with output_folder(accelerator, arguments, model_arguments, data, course) as checkpoint:
        report_treebanks = course.report_treebanks(data)
        set_seed(arguments.seed)
        trees, tokenizer, model = load_data(accelerator, model_arguments, data, Path(arguments.output_dir))
        accelerator.print(f"training trees: {trees.train.describe()}\nvalidation trees: {trees.validation.describe()}")
        accelerator.print(f"model: {model.num_parameters():,} parameters, vocabulary {model.config.vocab_size}")
        set_up_layers(model, arguments)
        epochs, sampler = course.num_train_epochs, make_sampler(accelerator, arguments, data, trees.train)
        accumulation = arguments.gradient_accumulation_steps
        arguments.limit_steps(steps_of_epochs(sampler, epochs, accumulation) if epochs else None)
        accelerator.print(f"{arguments.max_train_steps:,} steps")
        settings = course_settings(arguments, model.config, accelerator, tokenizer)
        settings.update(
            training_data=trees.train.fingerprint(),
            max_batch_actions=data.max_batch_actions,
            batch_group_size=data.batch_group_size,
            patience=course.early_stopping_patience,
            evaluation_steps=arguments.evaluation_steps,
            validation=trees.validation.fingerprint(),
        )
        if checkpoint is not None:
            read_state(checkpoint, settings)  # refuses other settings
        optimizer, schedule = make_optimizer(model, arguments)
        preflight(accelerator, arguments, model)
        run = Run(accelerator, arguments, *accelerator.prepare(model, optimizer, schedule), TrainingState())
    start_tracking(accelerator, "train_rnng", model_arguments, data, course, arguments)
    from_scratch = model_arguments.model_name_or_path is None
    run_training(run, checkpoint, settings, trees, report_treebanks, data, course, tokenizer, started, from_scratch)
    end_run(run)
    push_final_model(run)


def run_training(
    run: Run,
    checkpoint: Path | None,
    settings: dict[str, Any],
    trees: Data,
    report_treebanks: dict[str, Treebank],
    data: TreeDataArguments,
    course: CourseArguments,
    tokenizer: PreTrainedTokenizerBase,
    started: float,
    from_scratch: bool,
) -> None:
    """Train, go back to the best model, save it and measure it on the test trees."""
    accelerator, arguments = run.accelerator, run.arguments
    config = accelerator.unwrap_model(run.model).config
    is_grammar = isinstance(config, RNNGConfig)
    collate = TreeCollator(tokenizer.pad_token_id, config if is_grammar else None)
    objective = Objective(config)
    search = {"batch_size": course.search_batch_size, "beam": course.beam(config)} if is_grammar else {}

    def evaluator(name: str, dataset: TreeDataset, limit: int | None) -> Evaluator:
        rows = spread(len(dataset), limit) if is_grammar else []
        return Evaluator(
            accelerator, name, dataset, collate, objective, arguments, data.max_batch_actions, rows, search,
            from_scratch,
        )  # fmt: skip

    validation = evaluator("validation", trees.validation, course.search_sentences)
    best = BestModel(validation_loss, course.early_stopping_patience)
    start_or_resume(run, checkpoint, settings, validation.run, best)
    sampler = make_sampler(accelerator, arguments, data, trees.train, run.state.consumed)
    loader = make_loader(accelerator, trees.train, collate, arguments, sampler)

    def facts() -> dict[str, Any]:
        return card_facts(run, data, sampler.num_samples(run.state.consumed))

    uploads = CheckpointUploads(run, tokenizer, facts)
    speed = train(
        run, loader, objective, validation.run, best, add_perplexities, generate=SampleGenerator(run, tokenizer),
        after_checkpoint=uploads, flops_per_token=flops_per_token(run, trees.train),
    )  # fmt: skip
    uploads.finish()
    step = best.restore(run)
    folder = save_final_model(run, tokenizer, facts())
    test = None
    if trees.test is not None:
        test = evaluator("test", trees.test, course.final_search_sentences).run(run.model, step)
    if accelerator.is_main_process:
        if report_treebanks:
            test["saved_model"] = report(folder, tokenizer, report_treebanks, course.beam(config), arguments.seed)
        num_sentences = sampler.num_samples(run.state.consumed)
        write_results(run, time.monotonic() - started, speed, num_sentences, test)


if __name__ == "__main__":
    main()
