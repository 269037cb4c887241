"""Train ON-LSTM, PRPN, PaLM, Ordered Memory or AWD-LSTM as language models, with or without gold trees.

    accelerate launch training/train_recurrent.py --config on_lstm_syd_tiny --output_dir runs/tiny

Text comes from treebanks (default: the embedded one) or from plain files. It is read as one stream, segment by segment
with the state carried along (truncated back-propagation through time), or sentence by sentence. The model that is kept
is the one with the best validation likelihood. Papers: Shen et al. (ICLR 2019), Shen et al. (ICLR 2018), Peng et al.
(EMNLP 2019), Shen et al. (NeurIPS 2019), Merity et al. (ICLR 2018); supervised distances: Du et al. (ACL 2020).
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm import ONLSTMForCausalLM, OrderedMemoryForCausalLM, PaLMForCausalLM, PRPNForCausalLM
from hf_synlm.data.arguments import option
from hf_synlm.data.streams import TokenStream
from hf_synlm.evaluation.trees.treebank_parsing import score_baselines, score_numbers, score_table
from hf_synlm.training.engine.arguments import ModelArguments
from hf_synlm.training.engine.export import hub_facts
from hf_synlm.training.engine.final_report import report_saved_model
from hf_synlm.training.engine.recipe import Recipe, Splits, improvement
from hf_synlm.training.engine.run import Run, new_or_pretrained
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import EpochEnds, EpochSampler
from hf_synlm.training.tasks.stream_batches import (
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
from hf_synlm.training.tasks.stream_evaluation import ParsingArguments, TextEvaluator, TreeScorer
from hf_synlm.training.tasks.stream_schedule import (
    EpochControl,
    PhasedOptimizer,
    PhaseSchedule,
    RecurrentTrainingArguments,
    ScheduleArguments,
    StreamObjective,
    make_phased_optimizer,
)

MODELS: dict[str, Any] = {
    "on_lstm": ONLSTMForCausalLM,
    "prpn": PRPNForCausalLM,
    "palm": PaLMForCausalLM,
    "ordered_memory": OrderedMemoryForCausalLM,
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
        "ordered_memory": "ordered-memory",
        "awd_lstm": "awd-lstm-ptb",
    }

    architecture: str = option(
        "on_lstm", "'on_lstm', 'prpn', 'palm', 'ordered_memory', or 'awd_lstm', the baseline without trees."
    )


# ---------------------------------------------------------------------------------------------- model
def make_model(arguments: RecurrentModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Make an untrained model, or load the one to continue from; PaLM and AWD-LSTM are not mixed up."""
    boundary = tokenizer.eos_token_id
    ids = {"bos_token_id": boundary, "eos_token_id": boundary, "pad_token_id": tokenizer.pad_token_id}
    model = new_or_pretrained(MODELS[arguments.architecture], arguments, tokenizer, ids)
    if model.config.gives_trees != (arguments.architecture != "awd_lstm"):
        raise ValueError(
            f"architecture is {arguments.architecture!r}, but the model has "
            f"span_attention={model.config.span_attention}. Choose 'palm' with it, 'awd_lstm' without."
        )
    return model


def gold_structure(config: PreTrainedConfig, tree_supervision: bool) -> str | None:
    """What a model learns from gold trees: "distances" or "spans"; `None` without supervision."""
    if not tree_supervision:
        return None
    if config.model_type == "on_lstm":
        learns, name, remedy = bool(config.supervised_layers), "distances", "Set supervised_layers"
    elif config.model_type == "prpn":
        learns, name, remedy = config.parsing_network == "recurrent", "distances", "Set parsing_network=recurrent"
    elif config.model_type == "ordered_memory":
        learns, name, remedy = False, "distances", "Use ON-LSTM-SYD or PRPN-SYD"
    else:
        learns = config.span_attention and config.span_scores == "learned"
        name, remedy = "spans", "Use span_attention and learned span_scores"
    if not learns:
        raise ValueError(f"tree_supervision is set, but this model does not learn from trees. {remedy}.")
    return name


# ---------------------------------------------------------------------------------------------- data
def load_data(
    accelerator: Accelerator, model_arguments: RecurrentModelArguments, data: StreamDataArguments, output_dir: Path
) -> tuple[Splits, PreTrainedTokenizerBase, PreTrainedModel]:
    """Make or load tokenizer and model, and encode the text for them; every process calls."""
    source = data.tokenizer_name or model_arguments.model_name_or_path
    tokenizer = make_stream_tokenizer(accelerator, data, source, output_dir)
    model = make_model(model_arguments, tokenizer)
    gold = gold_structure(model.config, data.tree_supervision)
    held_out = [load_stream(data, files, tokenizer) for files in (data.validation_files, data.test_files) if files]
    return Splits(load_stream(data, data.train_files, tokenizer, gold), *held_out), tokenizer, model


class RecurrentRecipe(Recipe):
    """Train ON-LSTM, PRPN, PaLM or AWD-LSTM as language models; keep the best validation likelihood."""

    program = "train_recurrent"
    parts = ("model_arguments", "data", "parsing", "schedule", "arguments")
    mappings = ("config_overrides", "parse_options")
    model_arguments: RecurrentModelArguments
    data: StreamDataArguments
    parsing: ParsingArguments
    schedule: ScheduleArguments
    arguments: RecurrentTrainingArguments
    streams: Splits
    validation: TextEvaluator
    test: TextEvaluator | None = None
    final_trees: TreeScorer | None
    objective: StreamObjective
    control: EpochControl

    def check(self) -> None:
        """Complete the arguments about trees; refuse what two optimizers and segments in their order do not allow."""
        self.parsing.complete(self.data, self.model_arguments.architecture)
        if self.accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("FSDP shards the model, and parsing needs the whole model. Use DDP.")
        if self.accelerator.mixed_precision == "fp16":
            raise ValueError(
                "mixed_precision fp16 scales gradients per optimizer, of which there are two. Use bf16 or no."
            )
        accumulation = self.arguments.gradient_accumulation_steps
        if self.data.batching == "stream" and accumulation > 1:
            raise ValueError(
                f"gradient_accumulation_steps is {accumulation}, but the segments of a stream are read in order. Use a "
                "larger per_device_train_batch_size."
            )

    def load(self) -> PreTrainedModel:
        """Make or load tokenizer and model, encode the text, and try what will be measured."""
        accelerator, data, parsing = self.accelerator, self.data, self.parsing
        self.streams, tokenizer, model = self.load_data()
        self.tokenizer = tokenizer
        accelerator.print(data.describe_splits(self.streams, describe_stream))
        rows = self.accelerator.num_processes * self.arguments.per_device_train_batch_size
        if data.batching == "stream":
            self.examples, self.collate = SegmentDataset(self.streams.train, rows, self._rows()), first_item
        else:
            self.examples = SentenceDataset(self.streams.train)
            self.collate = self.collator()
        sampler = self.sampler()
        per_step = sampler.consumed_per_micro_step * self.arguments.gradient_accumulation_steps
        self.ends = EpochEnds(sampler, per_step)
        self.ends.step(0)  # refuses steps longer than an epoch
        size = self.arguments.per_device_eval_batch_size
        trees = self._scorer(model, parsing.parsing_files, parsing.parse_sentences)
        self.validation = self._evaluator("validation", self.streams.validation, size, trees)
        if self.streams.test is not None:
            self.test = self._evaluator("test", self.streams.test, data.test_batch_size or size)
        self.final_trees = self._scorer(model, parsing.final_parsing_files)
        return model

    def load_data(self) -> tuple[Splits, PreTrainedTokenizerBase, PreTrainedModel]:
        """Encoded text, tokenizer and model."""
        return load_data(self.accelerator, self.model_arguments, self.data, Path(self.arguments.output_dir))

    def collator(self) -> Any:
        """What makes batches of sentences."""
        return FramedCollator(self.streams.train, self.tokenizer.pad_token_id)

    def _rows(self) -> range:
        """Rows of the stream that this process reads."""
        rank, size = self.accelerator.process_index, self.arguments.per_device_train_batch_size
        return range(rank * size, (rank + 1) * size)

    def _evaluator(self, name: str, stream: TokenStream, size: int, trees: TreeScorer | None = None) -> TextEvaluator:
        return TextEvaluator(self.accelerator, name, stream, self.data, self.tokenizer.pad_token_id, size, trees)

    def _scorer(self, model: PreTrainedModel, paths: list[str], limit: int | None = None) -> TreeScorer | None:
        """The scorer of a treebank, tried on one sentence."""
        parsing = self.parsing
        if not model.config.gives_trees or not paths or limit == 0:
            return None
        bank, size = parsing.treebank(paths, self.data.reading), parsing.parse_batch_size
        options: Any = parsing.parse_options  # a mapping, once the command line is parsed
        scorer = TreeScorer(bank, self.tokenizer, parsing.parsing_convention, options, size, limit)
        scorer.rehearse(model)
        return scorer

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Fingerprints of the text, how it is read, and the schedule."""
        names = "batching bptt variable_bptt max_batch_tokens batch_group_size".split()
        return {
            "training_data": stream_fingerprint(self.streams.train),
            "validation": stream_fingerprint(self.streams.validation),
            **{f"schedule_{name}": value for name, value in asdict(self.schedule).items()},
            **{name: getattr(self.data, name) for name in names},
            "per_device_eval_batch_size": self.arguments.per_device_eval_batch_size,
        }

    def prepare(self, model: PreTrainedModel) -> tuple[nn.Module, PhasedOptimizer, PhaseSchedule]:
        """Both optimizers of the schedule; the state of the stream becomes part of checkpoints."""
        prepared, optimizer, schedule = make_phased_optimizer(self.accelerator, model, self.schedule, self.arguments)
        self.objective = StreamObjective(self.accelerator, optimizer, carry=self.data.batching == "stream")
        self.accelerator.register_for_checkpointing(self.objective)
        self.control = EpochControl(optimizer, self.schedule, self.arguments)
        return prepared, optimizer, schedule

    def sampler(self, consumed: int = 0) -> EpochSampler:
        """Segments of the stream, or sentences of similar length."""
        data, arguments = self.data, self.arguments
        if data.batching == "sentences":
            return self.padded_sampler(self.examples.lengths, data.max_batch_tokens, consumed)
        rows = self.accelerator.num_processes * arguments.per_device_train_batch_size
        length, seed = len(self.streams.train), arguments.seed
        return SegmentSampler(length, rows, data.bptt, data.variable_bptt, seed, consumed)

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective, with the state of the batch before."""
        return self.objective(model, batch)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure validation text and trees with the averaged weights, if there are some."""
        with self.control.optimizer.averaged_weights():
            return self.validation.run(model, step)

    def evaluation_due(self, step: int) -> bool:
        """At the end of every epoch."""
        return step in self.ends

    def best_model(self) -> EpochControl:
        """The epoch with the lowest validation loss; it decides about the phases of the schedule, too."""
        return self.control

    def card_facts(self, run: Run) -> dict[str, Any]:
        """Files, steps and epochs."""
        best, num_epochs = run.state.notes["best"]["step"], len(run.state.notes["evaluations"]) - 1
        return {
            **hub_facts(self.model_arguments.model_name_or_path),
            "training_data": self.data.describe(),
            "training_procedure": f"The best of {run.state.step} steps ({num_epochs} epochs) of "
            f"`training/{self.program}.py` by validation likelihood, that of step {best}; seed {self.arguments.seed}.",
        }

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Likelihood of the test text and F1 of the induced trees."""
        test: dict[str, Any] = {} if self.test is None else self.test.run(run.model, step)
        scorer = self.final_trees
        if scorer is not None:
            bank = scorer.treebank
            scores = {"model": scorer.run(run.accelerator, run.model), **score_baselines(bank, scorer.convention)}
            run.accelerator.print(f"final trees, all {len(bank.words):,} sentences:\n{score_table(scores, bank)}")
            used = {"convention": scores["model"].convention, "punctuation": bank.convention}
            test["trees"] = {**used, **score_numbers(scores)}
        return {"test": test} if test else {}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Parse the first test sentences with the saved model, as its users will, and generate one."""
        parsing, test = self.parsing, results.get("test", {})
        if parsing.final_report:
            bank = parsing.treebank(parsing.report_files, self.data.reading, REPORT_SENTENCES)
            methods: dict[str, Any] = {"model": parsing.parse_options}
            banks, convention = {str(parsing.punctuation): bank}, parsing.parsing_convention
            seed = self.arguments.seed
            test["saved_model"] = report_saved_model(folder, banks, methods, seed, convention)
        unit = "bits_per_character" if self.data.tokenizer_type == "characters" else "perplexity"
        line = improvement(results, unit)
        if "losses" in test:
            line += f"; test {unit.replace('_', ' ')} {test['losses'][unit]:.2f}"
        if "trees" in test:
            model, right = (test["trees"][name]["sentence_f1"] for name in ("model", "right"))
            line += f"; sentence F1 {model:.2f}, right branching {right:.2f}"
        return line


main = partial(run_recipe, RecurrentRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
