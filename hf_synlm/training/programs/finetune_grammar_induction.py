# SPDX-License-Identifier: Apache-2.0
"""Continue to train GPST on the sentences of a treebank, without its trees, and score the trees that it induces.

    accelerate launch training/finetune_grammar_induction.py --config induction_ptb \
        --model-name-or-path runs/gpst_small_wikitext103/model --output-dir runs/gpst_induction

Every sentence is a separate context, and word pieces stay together. Trees come from the inside pass, from left-to-right
parsing with and without word synchronization, and from the parser's merges. Baseline trees are scored, too. The final
model is the one with the best F1 on the validation trees. Paper: Hu et al., "Generative Pretrained Structured
Transformers" (ACL 2024), section 4.3.
"""

from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.collate import collate_contexts, encode_words
from hf_synlm.data.text import plural
from hf_synlm.evaluation.trees.gold_treebank import Treebank, score_baselines, score_numbers, score_table
from hf_synlm.evaluation.trees.parsing import ParsingScores
from hf_synlm.training.arguments.finetuning import InductionArguments
from hf_synlm.training.engine.run import Run, check_length
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.tasks.example_tables import ExampleDataset
from hf_synlm.training.tasks.finetuning import FineTuning


# ---------------------------------------------------------------------------------------------- examples
def encode_sentences(
    sentences: list[list[str]], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> ExampleDataset:
    """Encode sentences as contexts with `input_ids` and `word_ends`; those of more than `max_tokens` are left out."""
    encoded = [encode_words(tokenizer, words) for words in sentences]
    kept = [(ids, ends) for ids, ends in encoded if max_tokens is None or len(ids) <= max_tokens]
    return ExampleDataset(Dataset.from_dict({"input_ids": [i for i, _ in kept], "word_ends": [e for _, e in kept]}))


# ---------------------------------------------------------------------------------------------- the run
class InductionRecipe(FineTuning):
    """GPST on single sentences; the trees that it induces are scored."""

    program = "finetune_grammar_induction"
    score = "sentence_f1"
    data: InductionArguments
    treebanks: dict[str, Treebank]
    held_out: ExampleDataset

    def load(self) -> PreTrainedModel:
        """Read and encode the sentences, load the model."""
        data, accelerator = self.data, self.accelerator
        self.treebanks = {"validation": data.treebank(data.validation_trees), "test": data.treebank(data.test_trees)}
        self.baselines = {part: score_baselines(treebank) for part, treebank in self.treebanks.items()}
        self.sources = data.describe_sources()
        config = self.read_config()
        if config.model_type != "gpst":
            raise ValueError(
                f"{self.model_arguments.model_name_or_path} is a {config.model_type}, and this program fine-tunes "
                "GPST. Use train_recurrent.py to train and score the trees of ON-LSTM, PRPN and PaLM."
            )
        self.choose_tokenizer(config)
        self.collate = partial(collate_contexts, pad_token_id=self.tokenizer.pad_token_id)
        self.examples = encode_sentences(list(data.sentences()), self.tokenizer, data.max_sentence_tokens)
        encoded = {part: encode_sentences(bank.words, self.tokenizer, None) for part, bank in self.treebanks.items()}
        for part, sentences in {"training": self.examples, **encoded}.items():
            remedy = f"Lower --{'max-sentence-tokens' if part == 'training' else 'max-tree-words'}."
            check_length(config, max(sentences.lengths), f"The longest {part} sentence", remedy)
        model = self.load_model(config)
        self.held_out = encoded["validation"]
        names = ", ".join((*data.train_trees, *data.train_files))
        accelerator.print(f"train data ({names}): {self.examples.describe()}")
        for part, path in (("validation", data.validation_trees), ("test", data.test_trees)):
            accelerator.print(f"{part} data ({path}): {plural(len(self.treebanks[part].words), 'sentence')}")
        return model

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Data, and the choice of the best model."""
        selection = self.data.method(self.data.selection_method)
        return {**super().settings(model), "selection": selection}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure the objective on validation sentences, and F1 of induced trees."""
        losses = self.mean_losses(model, self.held_out)
        scores = self._score(model, "validation", [self.data.selection_method])
        self.tell(step, "validation", f", {plural(len(self.held_out), 'sentence')}", losses, ".4f")
        return {"step": step, "losses": losses, "trees": self.tell_trees(scores, self.treebanks["validation"], step)}

    def _score(self, model: nn.Module, part: str, methods: list[str]) -> dict[str, ParsingScores]:
        """Scores of several tree types and of the baselines; the processes share the sentences."""
        named, size = dict(map(self.data.method, methods)), self.arguments.per_device_eval_batch_size
        return self.score_methods(model, self.treebanks[part], named, size) | self.baselines[part]

    def score_of(self, evaluation: dict[str, Any]) -> float:
        """The sentence F1 that chooses the model."""
        return evaluation["trees"][self.data.method(self.data.selection_method)[0]]["sentence_f1"]

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Parse the test treebank and score all tree types."""
        treebank = self.treebanks["test"]
        scores = self._score(run.model, "test", self.data.methods)
        self.accelerator.print("test trees:\n" + score_table(scores, treebank))
        test = {
            "trees": score_numbers(scores),
            "num_sentences": len(treebank.words),
            "convention": f"{treebank.convention}; {next(iter(scores.values())).convention}",
        }
        return {**super().final_results(run, step), "test": test}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> None:
        """Write `evaluation.json`."""
        kinds = ("sentence_f1", "corpus_f1")
        trees = results["test"]["trees"].items()
        flat = {f"{kind} {name}": numbers[kind] for name, numbers in trees for kind in kinds}
        self.save_scores(run, "grammar_induction", flat, results)


main = partial(run_recipe, InductionRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
