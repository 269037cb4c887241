"""Continue to train GPST on the sentences of a treebank, without its trees, and score the trees that it induces.

    accelerate launch training/finetune_grammar_induction.py --config training/configs/gpst_induction_ptb.yaml \
        --model_name_or_path runs/gpst_small_wikitext103/model --output_dir runs/gpst_induction

Every sentence is a context of its own, and word pieces stay together. Trees come from the inside pass, from parsing
left to right with and without synchronization by words, and from the parser's merges; they are scored next to trees
that need no model. The model that is kept is the one with the best F1 on the validation trees. Paper: Hu et al.,
"Generative Pretrained Structured Transformers" (ACL 2024), section 4.3.
"""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.collate import collate_contexts, encode_words
from hf_synlm.data.samples import sample_path
from hf_synlm.data.text import read_lines
from hf_synlm.evaluation.parsing import PUNCTUATION_WORDS, ParsingScores, resolve_convention
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.treebank_parsing import (
    PUNCTUATION,
    Treebank,
    load_treebank,
    parse_words,
    score_baselines,
    score_numbers,
    score_table,
    score_trees,
)
from hf_synlm.training.arguments import TrainingArguments, parse_arguments
from hf_synlm.training.checkpoints import write_json
from hf_synlm.training.evaluation_report import save_evaluation
from hf_synlm.training.example_tables import ExampleDataset
from hf_synlm.training.finetuning import (
    CourseArguments,
    ModelArguments,
    best_evaluation,
    card_facts,
    check_length,
    check_run,
    fine_tune,
    learning_rates,
    load_model,
    map_rows,
    mean_losses,
    prepare_run,
    read_config,
    read_tokenizer,
    run_results,
    set_steps,
)
from hf_synlm.training.hub_uploads import push_final_model
from hf_synlm.training.output_folder import RESULTS_FILE, output_folder
from hf_synlm.training.run import Run, end_run, make_accelerator, save_final_model, start_tracking

# Name of a kind of trees -> (what it is called in tables, options of `parse`); `beam` is filled in.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "inside": ("inside", {"method": "inside"}),
    "generative": ("left to right", {"num_beams": 0}),
    "generative_nosync": ("left to right w/o sync", {"num_beams": 0, "synchronous": False}),
    "parser": ("merges of the parser", {"method": "merge_order"}),
}


@dataclass
class InductionArguments:
    """Sentences to train on, treebanks to evaluate on, and which trees are scored."""

    train_trees: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Treebank files whose words are trained on, or 'embedded' (the default without train_files)."
        },
    )
    train_files: list[str] = field(
        default_factory=list, metadata={"help": "Text files: a sentence per line, words between white space."}
    )
    validation_trees: str = field(default="embedded", metadata={"help": "Treebank file that chooses the best model."})
    test_trees: str = field(default="embedded", metadata={"help": "Treebank file of the final scores."})
    punctuation: str = field(
        default="remove",
        metadata={"help": "Remove it before training and parsing (paper), ignore it in the score only, or keep it."},
    )
    lowercase: bool = field(default=True, metadata={"help": "Lower-case all words, as in the paper."})
    max_sentence_tokens: int | None = field(default=None, metadata={"help": "Leave longer training sentences out."})
    max_tree_sentences: int | None = field(default=None, metadata={"help": "Read only so many trees of a treebank."})
    max_tree_words: int | None = field(
        default=None, metadata={"help": "Leave longer sentences of the scored treebanks out (10 for WSJ10, 40)."}
    )
    methods: list[str] = field(
        default_factory=lambda: list(METHODS), metadata={"help": f"Trees of the final scores: {', '.join(METHODS)}."}
    )
    selection_method: str = field(
        default="inside", metadata={"help": "Trees scored during training, whose sentence F1 chooses the best model."}
    )
    search_num_beams: int = field(default=20, metadata={"help": "Beam of parsing left to right."})

    def __post_init__(self):
        """Resolve the names of the embedded treebanks and check the values."""
        if not self.train_trees and not self.train_files:
            self.train_trees = ["embedded"]
        self.train_trees = [_resolve(name, "trees.train.txt") for name in self.train_trees]
        self.validation_trees = _resolve(self.validation_trees, "trees.valid.txt")
        self.test_trees = _resolve(self.test_trees, "trees.test.txt")
        for path in (*self.train_trees, *self.train_files, self.validation_trees, self.test_trees):
            if not Path(path).is_file():
                raise ValueError(f"There is no file {path!r}.")
        if self.punctuation not in PUNCTUATION:
            raise ValueError(f"punctuation {self.punctuation!r} is unknown. Choose among {', '.join(PUNCTUATION)}.")
        for name in (*self.methods, self.selection_method):
            if name not in METHODS:
                raise ValueError(f"There is no kind of trees {name!r}. Choose among {', '.join(METHODS)}.")
        for name in ("search_num_beams", "max_sentence_tokens", "max_tree_sentences", "max_tree_words"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 and is {getattr(self, name)}.")

    def method(self, name: str) -> tuple[str, dict[str, Any]]:
        """How a kind of trees is called in tables, and its options of `parse`."""
        label, options = METHODS[name]
        if "num_beams" not in options:
            return label, options
        return f"{label} (beam {self.search_num_beams})", {**options, "num_beams": self.search_num_beams}

    def treebank(self, path: str) -> Treebank:
        """A treebank, its words in lower case if asked for."""
        treebank = load_treebank(path, self.punctuation, self.max_tree_sentences)
        if self.max_tree_words is not None:
            short = resolve_convention("gpst", max_length=self.max_tree_words)
            treebank = treebank.select(treebank.numbers_scored(short))
        if not self.lowercase:
            return treebank
        sentences = [
            dataclasses.replace(sentence, words=tuple(map(str.lower, sentence.words)))
            for sentence in treebank.sentences
        ]
        return dataclasses.replace(treebank, sentences=sentences, convention=f"{treebank.convention}; lower case")

    def sentences(self) -> Iterator[list[str]]:
        """Words of the training sentences."""
        for path in self.train_trees:
            yield from dataclasses.replace(self, max_tree_sentences=None, max_tree_words=None).treebank(path).words
        for path in self.train_files:
            for line in read_lines(path):
                words = line.lower().split() if self.lowercase else line.split()
                if self.punctuation == "remove":
                    words = [word for word in words if word not in PUNCTUATION_WORDS]
                if words:
                    yield words

    def describe_sources(self) -> list[dict[str, Any]]:
        """Role, path, size and checksum of every file."""
        files = {name: getattr(self, name) for name in ("train_trees", "train_files")}
        files |= {name: [getattr(self, name)] for name in ("validation_trees", "test_trees")}
        return [{"role": role, **found} for role, paths in files.items() for found in describe_files(paths)]

    def describe(self) -> str:
        """One sentence for the model card."""
        names = [*(f"the words of {Path(path).name}" for path in self.train_trees), *map(str, self.train_files)]
        return f"{', '.join(names)}; no trees. The best model was chosen on the trees of {self.validation_trees}."


def _resolve(name: str, sample: str) -> str:
    return str(sample_path(sample)) if name == "embedded" else name


# ---------------------------------------------------------------------------------------------- examples
def encode_sentences(
    sentences: list[list[str]], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> ExampleDataset:
    """Sentences as contexts with `input_ids` and `word_ends`; those of more than `max_tokens` tokens are left out."""
    encoded = [encode_words(tokenizer, words) for words in sentences]
    kept = [(ids, ends) for ids, ends in encoded if max_tokens is None or len(ids) <= max_tokens]
    return ExampleDataset(Dataset.from_dict({"input_ids": [i for i, _ in kept], "word_ends": [e for _, e in kept]}))


# ---------------------------------------------------------------------------------------------- evaluation
@dataclass
class Evaluator:
    """Measures the objective on held-out sentences, and F1 of induced trees."""

    accelerator: Accelerator
    data: InductionArguments
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    treebank: Treebank
    examples: ExampleDataset

    def __post_init__(self):
        """Score the trees that need no model."""
        self.baselines = score_baselines(self.treebank)

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A padded batch."""
        return collate_contexts(rows, self.tokenizer.pad_token_id)

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Evaluate; the main process prints the result. Every process has to call."""
        losses = mean_losses(self.accelerator, model, self.examples, self.collate, self.batch_size)
        scores = self.score(model, self.treebank, [self.data.selection_method])
        text = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self.accelerator.print(f"step {step}: validation, {len(self.examples)} sentences: {text}")
        self.accelerator.print(score_table({**scores, **self.baselines}, self.treebank))
        numbers = score_numbers({**scores, **self.baselines})
        flat = {f"validation_f1/{name}": value["sentence_f1"] for name, value in numbers.items()}
        self.accelerator.log({**flat, **{f"validation/{k}": v for k, v in losses.items()}}, step=step)
        return {"step": step, "losses": losses, "trees": numbers}

    def score(self, model: nn.Module, treebank: Treebank, methods: list[str]) -> dict[str, ParsingScores]:
        """Scores of several kinds of trees; the processes share the sentences."""
        plain = self.accelerator.unwrap_model(model)
        scores = {}
        for name in methods:
            label, options = self.data.method(name)

            def parse(rows: list[int], options: dict[str, Any] = options) -> list[Any]:
                return parse_words(plain, self.tokenizer, [treebank.words[row] for row in rows], **options)

            trees = map_rows(self.accelerator, treebank.lengths, self.batch_size, parse, label)
            scores[label] = score_trees(trees, treebank)
        return scores

    def metric(self, evaluation: dict[str, Any]) -> float:
        """What the best model minimises: minus the sentence F1."""
        return -evaluation["trees"][self.data.method(self.data.selection_method)[0]]["sentence_f1"]


# ---------------------------------------------------------------------------------------------- the run
def make_model(arguments: ModelArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The pretrained GPST, with the ablations of `config_overrides`, and its tokenizer.

    Raises:
        ValueError: for another architecture.
    """
    config = read_config(arguments)
    if config.model_type != "gpst":
        raise ValueError(
            f"{arguments.model_name_or_path} is a {config.model_type}, and this script fine-tunes GPST. The trees of "
            "ON-LSTM, PRPN and PaLM are trained and scored by train_recurrent.py."
        )
    tokenizer = read_tokenizer(arguments, config, [])
    return load_model(AutoModelForCausalLM, arguments, config, tokenizer), tokenizer


def write_results(
    run: Run,
    seconds: float,
    speed: dict[str, float],
    evaluator: Evaluator,
    treebank: Treebank,
    scores: dict,
    sources: list[dict[str, Any]],
) -> None:
    """Write `evaluation.json` and `all_results.json`, and print the final table and the closing line."""
    every = {**scores, **score_baselines(treebank)}
    run.accelerator.print("test trees:\n" + score_table(every, treebank))
    test = {
        "trees": score_numbers(every),
        "num_sentences": len(treebank.words),
        "convention": f"{treebank.convention}; {next(iter(every.values())).convention}",
    }
    kinds = ("sentence_f1", "corpus_f1")
    flat = {f"{kind} {name}": numbers[kind] for name, numbers in test["trees"].items() for kind in kinds}
    write_json(run.output_dir / RESULTS_FILE, {**run_results(run, seconds, speed), "test": test})
    save_evaluation(run, "grammar_induction", flat, sources, seconds)
    label = evaluator.data.method(evaluator.data.selection_method)[0]
    before, best = run.state.notes["evaluations"][0], best_evaluation(run)
    found = "; ".join(f"{name} {100 * score.sentence_f1:.2f}" for name, score in scores.items())
    run.accelerator.print(
        f"validation sentence F1 ({label}) {before['trees'][label]['sentence_f1']:.2f} -> "
        f"{best['trees'][label]['sentence_f1']:.2f} (best at step {best['step']}); test sentence F1: {found}; right "
        f"branching {100 * every['right'].sentence_f1:.2f}"
    )


def main(argv: list[str] | None = None) -> None:
    """Run the script."""
    model_arguments, data, course, arguments = parse_arguments(
        (ModelArguments, InductionArguments, CourseArguments, TrainingArguments), argv, mappings=["config_overrides"]
    )
    started = time.monotonic()
    accelerator = make_accelerator(arguments)
    check_run(accelerator, arguments)
    with output_folder(accelerator, arguments, model_arguments, data, course) as checkpoint:
        validation, test = data.treebank(data.validation_trees), data.treebank(data.test_trees)
        sources = data.describe_sources()

        set_seed(arguments.seed)
        model, tokenizer = make_model(model_arguments)
        examples = encode_sentences(list(data.sentences()), tokenizer, data.max_sentence_tokens)
        held_out = encode_sentences(validation.words, tokenizer, None)
        every = {"training": examples, "validation": held_out, "test": encode_sentences(test.words, tokenizer, None)}
        for part, sentences in every.items():
            check_length(model.config, max(sentences.lengths), f"The longest {part} sentence")
        accelerator.print(f"training: {examples.describe()}\nvalidation: {held_out.describe()}")
        set_steps(arguments, course, len(examples), accelerator.num_processes)
        run = prepare_run(accelerator, arguments, model, learning_rates(model_arguments, model.config))
        evaluator = Evaluator(accelerator, data, tokenizer, arguments.per_device_eval_batch_size, validation, held_out)
        settings = {"validation": held_out.fingerprint(), "selection": data.method(data.selection_method)}
    start_tracking(accelerator, "finetune_grammar_induction", model_arguments, data, course, arguments)

    def facts() -> dict[str, Any]:
        return card_facts(run, "finetune_grammar_induction.py", data.describe())

    speed = fine_tune(
        run,
        checkpoint,
        course,
        settings,
        examples,
        evaluator.collate,
        evaluator.run,
        evaluator.metric,
        tokenizer,
        facts,
    )
    save_final_model(run, tokenizer, facts())
    scores = evaluator.score(run.model, test, data.methods)
    if accelerator.is_main_process:
        write_results(run, time.monotonic() - started, speed, evaluator, test, scores, sources)
    end_run(run)
    push_final_model(run)


if __name__ == "__main__":
    main()
