# SPDX-License-Identifier: Apache-2.0
"""Train RNNG on a treebank, or an LSTM or GPT-2 language model on the words of the same treebank.

    accelerate launch training/train_rnng.py --config rnng_tiny --output-dir runs/rnng_tiny

Trees come from files of bracketed trees, or (default) from the embedded treebank. Gold derivations are learned by
teacher forcing. All architectures read the same tokens in the same batches, drawn among sentences with similar
numbers of actions under a budget of padded actions. The model that is kept is the one with the best validation
likelihood. Paper: Noji and Oseki, "Effective Batching for Recurrent Neural Network Grammars" (Findings of ACL 2021).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm import LSTMForCausalLM, PushdownForCausalLM, RNNGForCausalLM, TreeLMForCausalLM
from hf_synlm.data.arguments import option
from hf_synlm.data.text import NATURAL, plural
from hf_synlm.data.tokenizers import begin_token_id
from hf_synlm.data.vocabulary import word_final_ids
from hf_synlm.evaluation.trees.gold_treebank import PUNCTUATION, load_treebank
from hf_synlm.hub.abilities import declared, tree_codec
from hf_synlm.training.engine.arguments import ModelArguments, check_choice, check_minimum, check_overrides
from hf_synlm.training.engine.export import hub_facts
from hf_synlm.training.engine.final_report import report_saved_model
from hf_synlm.training.engine.recipe import Recipe, Splits, improvement
from hf_synlm.training.engine.run import Run, load_pretrained
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import PaddedBatchSampler
from hf_synlm.training.programs.pretrain_gpst import REPORT_REMEDY, make_baseline
from hf_synlm.training.tasks.sentence_files import load_or_make_tokenizer
from hf_synlm.training.tasks.tree_batches import (
    TreeCollator,
    TreeDataArguments,
    TreeDataset,
    WordCollator,
    collect_labels,
    encode_treebanks,
    load_trees,
    tree_words,
)
from hf_synlm.training.tasks.tree_evaluation import (
    Objective,
    add_perplexities,
    evaluate_given_trees,
    search_trees,
    spread,
)
from hf_synlm.trees.codecs import LabeledCodec, TreeCodec

MODELS: dict[str, Any] = {
    "rnng": RNNGForCausalLM,
    "lstm": LSTMForCausalLM,
    "tree_lm": TreeLMForCausalLM,
    "pushdown": PushdownForCausalLM,
}
REPORT_SENTENCES = 20


@dataclass
class RNNGModelArguments(ModelArguments):
    """RNNG, or a baseline without trees."""

    presets = {"rnng": "rnng-15m", "lstm": "lstm-15m", "gpt2": ""}

    architecture: str = option(
        "rnng",
        "'rnng' (left-corner with --config-overrides transition_system=in_order), or a baseline without trees: 'lstm', "
        "or 'gpt2', which has no preset.",
    )

    def __post_init__(self):
        """Check that a GPT-2 is trained from scratch."""
        if self.architecture == "gpt2" and (self.model_name_or_path or self.model_preset):
            raise ValueError(
                "A gpt2 is trained from scratch, by the sizes of its configuration. Leave --model-name-or-path and "
                "--model-preset out, and give --config-overrides."
            )
        super().__post_init__()


@dataclass
class EvaluationArguments:
    """What is measured on the way and at the end."""

    search_sentences: int = option(
        0, "Validation sentences to parse in every evaluation but the first; 0 disables. RNNG only."
    )
    final_search_sentences: int | None = option(
        None, "Test sentences that the final model parses; default: all; 0 disables. RNNG only."
    )
    search_batch_size: int = option(10, "Sentences per process in a search batch.")
    num_beams: int | None = option(None, "Word beam: derivations kept after each word. Default: the model's.")
    action_beam_size: int | None = option(
        None, "Action beam: derivations kept after each action. Default: the model's."
    )
    fast_track_size: int | None = option(
        None, "Fast-track derivations, which reach the next word in any case. Default: the model's."
    )
    final_report: bool = option(
        False,
        "At the end, compare the saved model with and without hf_synlm, parse some test sentences and generate one. "
        "RNNG only.",
    )
    report_punctuation: list[str] = option(
        ["ignore"],
        "How the final report treats punctuation, one or more of: 'remove', 'ignore', 'keep' (for tags that are not "
        "the Penn Treebank's). Each has its own baselines.",
    )

    def __post_init__(self):
        """Check the values."""
        check_minimum(self, 1, "num_beams action_beam_size search_batch_size")
        check_minimum(self, 0, "search_sentences final_search_sentences fast_track_size")
        for treatment in self.report_punctuation:
            check_choice("report_punctuation", treatment, PUNCTUATION)

    def check_architecture(self, architecture: str) -> None:
        """Refuse options of the search for a baseline, which has no trees."""
        names = "search_sentences final_search_sentences num_beams action_beam_size fast_track_size final_report"
        given = [name for name in names.split() if getattr(self, name)]
        if architecture in ("lstm", "gpt2") and given:
            raise ValueError(f"{given[0]} is {getattr(self, given[0])}, but {architecture} has no trees. Leave it out.")

    def beam(self, config: PreTrainedConfig) -> dict[str, int]:
        """Widths of the search; default: those of the model."""
        widths = {"num_beams": config.scoring_num_beams}
        if config.gives_labels:
            widths |= {"action_beam_size": config.action_beam_size, "fast_track_size": config.fast_track_size}
        return {name: width if getattr(self, name) is None else getattr(self, name) for name, width in widths.items()}


# ---------------------------------------------------------------------------------------------- model
def make_config(
    arguments: RNNGModelArguments, tokenizer: PreTrainedTokenizerBase, labels: list[str], subwords: bool
) -> PreTrainedConfig:
    """Configuration of an untrained model: preset, overrides, and what depends on tokenizer and trees.

    `subwords` says whether tokens are pieces of words.
    """
    config_class = MODELS[arguments.architecture].config_class
    pad = tokenizer.pad_token_id
    decided: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": pad}
    if config_class.gives_labels:
        decided.update(nonterminals=labels, subwords=subwords)
    overrides = check_overrides(config_class, arguments.config_overrides, decided)
    begin = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    begin = {name: pad if token is None else token for name, token in begin.items()}
    return config_class.from_preset(arguments.model_preset, **{**begin, **decided, **overrides})


def make_model(
    arguments: RNNGModelArguments, tokenizer: PreTrainedTokenizerBase, labels: list[str], longest: int
) -> PreTrainedModel:
    """Make an untrained model, or load the one to continue from; the tokenizer tells RNNG which tokens end a word.

    A GPT-2 must have positions for `longest` tokens.
    """
    if arguments.architecture == "gpt2":
        return make_baseline("gpt2", arguments.config_overrides, tokenizer, longest)
    model_class, name = MODELS[arguments.architecture], arguments.model_name_or_path
    backbone = getattr(arguments, "backbone", None)
    if name is not None:
        options = {} if backbone is None else {"backbone": backbone}
        return load_pretrained(model_class, name, arguments.config_overrides, tokenizer, **options)
    if backbone is not None:
        given = ("backbone_config", "nonterminals", "vocab_size")
        overrides = check_overrides(model_class.config_class, arguments.config_overrides, given)
        decided = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": begin_token_id(tokenizer)}
        fields = {"text_style": NATURAL, **decided, **overrides}
        model = model_class.from_backbone(backbone, labels, **fields)
        # Clients that read the tokenizer begin texts with the same token.
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(model.config.bos_token_id)
        return model
    word_final = word_final_ids(tokenizer)
    model = model_class(make_config(arguments, tokenizer, labels, subwords=not all(word_final)))
    if getattr(model.config, "subwords", False):
        model.model.word_final.copy_(torch.tensor(word_final))
    return model


# ---------------------------------------------------------------------------------------------- the run
def load_data(
    accelerator: Accelerator, model_arguments: RNNGModelArguments, data: TreeDataArguments, output_dir: Path
) -> tuple[Splits, LabeledCodec, PreTrainedTokenizerBase, PreTrainedModel]:
    """Read and encode the trees; make or load tokenizer and model. Returns trees, their codec, tokenizer and model."""
    trees = [load_trees(accelerator, files, data.reading) for files in data.splits]
    backbone = getattr(model_arguments, "backbone", None)
    source = data.tokenizer_name or model_arguments.model_name_or_path or backbone
    ends = backbone is not None or model_arguments.architecture == "pushdown"
    needed = "eos_token" if ends else "pad_token"
    words = partial(tree_words, trees[0])
    tokenizer = load_or_make_tokenizer(accelerator, data, source, output_dir, words, needed)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # GPT-2 and Llama have none
    fields: Any = model_arguments.config_overrides or {}
    labels = collect_labels(*trees, system=fields.get("linearization", "top_down"))
    model = make_model(model_arguments, tokenizer, labels, data.max_sentence_tokens)
    config = model.config
    codec: Any = tree_codec(config) if declared(config, "gives_labels") else LabeledCodec("top_down", tuple(labels))
    encoded = encode_treebanks(accelerator, data, trees, tokenizer, codec, getattr(config, "text_style", None))
    return encoded, codec, tokenizer, model


class RNNGRecipe(Recipe):
    """Train RNNG on gold trees by teacher forcing, or a baseline on their words; the best validation loss wins."""

    program = "train_rnng"
    parts = ("model_arguments", "data", "evaluation", "arguments")
    model_arguments: RNNGModelArguments
    data: TreeDataArguments
    evaluation: EvaluationArguments
    trees: Splits
    examples: TreeDataset
    objective: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, dict[str, Tensor]]]

    def check(self) -> None:
        """Refuse trees of a baseline, and shards of FSDP."""
        self.evaluation.check_architecture(self.model_arguments.architecture)
        if self.accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("FSDP shards the model, and the search needs the whole model. Use DDP.")

    def load(self) -> PreTrainedModel:
        """Read and encode the trees, make or load tokenizer and model."""
        output_dir = Path(self.arguments.output_dir)
        files = self.data.test_files[:1] if self.evaluation.final_report else []
        self.report_treebanks = {
            name: load_treebank(file, name, REPORT_SENTENCES, remedy=REPORT_REMEDY, **self.data.reading)
            for file, name in product(files, self.evaluation.report_punctuation)
        }
        loaded = load_data(self.accelerator, self.model_arguments, self.data, output_dir)
        self.trees, source, self.tokenizer, model = loaded
        self.examples = self.trees.train
        self.config = model.config
        codec = tree_codec(self.config) if self._is_grammar else None
        self.collate, self.objective = self.collator(codec, source), Objective(self.config, codec)
        self.accelerator.print(self.data.describe_splits(self.trees, TreeDataset.describe))
        return model

    def collator(self, codec: TreeCodec | None, source: LabeledCodec) -> TreeCollator | WordCollator:
        """What makes a batch of encoded sentences, for a model with this codec; None = of words alone."""
        architecture, pad = self.model_arguments.architecture, self.tokenizer.pad_token_id
        if codec is None:
            # A GPT-2 does not put the begin token before its input, as our models do.
            return WordCollator(pad, self.config.bos_token_id if architecture == "gpt2" else None)
        return TreeCollator(pad, codec, source, self.config if architecture == "rnng" else None)

    @property
    def _is_grammar(self) -> bool:
        return declared(self.config, "tree_codec") is not None

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Fingerprints of the trees, how batches are drawn, and how the model is chosen."""
        return {
            "training_data": self.examples.fingerprint(),
            "validation": self.trees.validation.fingerprint(),
            "max_batch_actions": self.data.max_batch_actions,
            "batch_group_size": self.data.batch_group_size,
            "evaluation_steps": self.arguments.evaluation_steps,
        }

    def sampler(self, consumed: int = 0) -> PaddedBatchSampler:
        """Batches of sentences with similar numbers of actions; for all architectures the same."""
        return self.padded_sampler(self.examples.lengths("actions"), self.data.max_batch_actions, consumed)

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
        rows = self._rows(self.trees.validation, self.evaluation.search_sentences)
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
        self.accelerator.print(f"step {step}: {name} of {plural(len(dataset), 'sentence')}: {text}")
        flat = {f"{name}/{key}": value for key, value in losses.items()}
        if rows:
            size, beam = self.evaluation.search_batch_size, self.evaluation.beam(self.config)
            result["search"], text = search_trees(self.accelerator, model, dataset, rows, size, beam)
            self.accelerator.print(f"step {step}: {name}: {text}")
            flat.update({f"{name}/{k}": v for k, v in result["search"].items() if not isinstance(v, dict)})
        self.accelerator.log(flat, step=step)
        return result

    def card_facts(self, run: Run) -> dict[str, Any]:
        """Files, steps and sentences."""
        return {
            **hub_facts(self.model_arguments.model_name_or_path),
            "training_data": self.data.describe(),
            "training_procedure": f"The best of {run.state.step} steps of `training/{self.program}.py` by validation "
            f"likelihood, that of step {run.state.notes['best']['step']}; {self._num_sentences(run)} sentences read, "
            f"seed {self.arguments.seed}.",
        }

    def _num_sentences(self, run: Run) -> int:
        one_process = self.sampler()
        one_process.rank, one_process.consumed_per_micro_step = 0, 1
        return sum(map(len, islice(one_process, run.state.consumed)))

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Number of sentences read; likelihood and search on the test trees."""
        results: dict[str, Any] = {"sentences": self._num_sentences(run)}
        if self.trees.test is not None:
            rows = self._rows(self.trees.test, self.evaluation.final_search_sentences)
            results["test"] = self._measure("test", self.trees.test, rows, run.model, step)
        return results

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Parse the first test sentences with the saved model, as its users will, and generate one."""
        if self.report_treebanks:
            beam = self.evaluation.beam(self.config)
            widths = [str(beam[name]) for name in ("num_beams", "action_beam_size") if name in beam]
            methods = {f"search (beams {' and '.join(widths)})": beam}
            is_adapter = getattr(run.model, "adapts_backbone", False)
            backbone = getattr(self.model_arguments, "backbone", None) if is_adapter else None
            report = report_saved_model(folder, self.report_treebanks, methods, self.arguments.seed, "gpst", backbone)
            results["test"]["saved_model"] = report
        line, test = improvement(results, "nats_per_sentence"), results.get("test")
        if test is None:
            return line
        line += f"; test nats per sentence {test['losses']['nats_per_sentence']:.2f}"
        if "search" in test:
            search = test["search"]
            kind = "labeled" if "labeled_f1" in search else "unlabeled"
            line += f", {kind} F1 {search[f'{kind}_f1']:.2f}, word perplexity {search['word_perplexity']:.2f}"
        elif "word_perplexity" in test["losses"]:
            line += f", word perplexity {test['losses']['word_perplexity']:.2f}"
        return line


main = partial(run_recipe, RNNGRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
