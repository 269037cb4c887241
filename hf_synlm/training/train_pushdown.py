"""Train Pushdown Layers on a treebank, by `Trainer`.

    python training/train_pushdown.py --config training/configs/pushdown_tiny.yaml --output_dir runs/pushdown_tiny

All options of `transformers.TrainingArguments` hold. At the end validation sentences are searched: perplexity of their
words, trees summed out, and the F1 of their trees. Paper: Murty et al., "Pushdown Layers: Encoding Recursive Structure
in Transformer Language Models" (EMNLP 2023).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

import hf_synlm.hub.architectures  # noqa: F401  # registers them
from hf_synlm.data.arguments import option
from hf_synlm.data.collate import LABEL_PADDING, encode_words
from hf_synlm.data.gold_trees import gold_attachments
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.parsing import unlabeled_f1
from hf_synlm.evaluation.treebank_parsing import best_trees, parse_sentences
from hf_synlm.training.arguments import check_minimum, parse_arguments
from hf_synlm.training.train_treereg import ModelAndDataArguments, check_output_folder


@dataclass
class PushdownArguments(ModelAndDataArguments):
    """The model and the treebanks."""

    config_name: str | None = option("pushdown", "'pushdown': a new model.")
    search_sentences: int = option(100, "Validation sentences to search at the end.")
    num_beams: int = option(10, "Derivations kept after each word of that search.")

    def __post_init__(self):
        """Check the values."""
        check_minimum(self, 1, "search_sentences num_beams")
        super().__post_init__()


def encode_sentence(tokenizer: PreTrainedTokenizerBase, sentence: TreebankSentence) -> dict[str, list[int]]:
    """Encode a sentence and its tree.

    Args:
        tokenizer: fast, with a begin and an end token.
        sentence: of a treebank.

    Returns:
        `input_ids` and `attachments`, for `collate`.
    """
    ids, is_end = encode_words(tokenizer, sentence.words)
    attachments = gold_attachments(sentence.spans, is_end)
    return {
        "input_ids": [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id],
        "attachments": [LABEL_PADDING, *attachments, LABEL_PADDING],
    }


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Right-padded batch of encoded sentences: the arguments of `forward`."""
    ids, attachments = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "attachments"))
    return {
        "input_ids": pad_sequence(ids, True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True),
        "attachments": pad_sequence(attachments, True, LABEL_PADDING),
        "labels": pad_sequence(ids, True, LABEL_PADDING),
    }


def search_scores(trainer: Trainer, sentences: Sequence[TreebankSentence], num_beams: int) -> dict[str, float]:
    """Perplexity of words and F1 of trees, by a search.

    Args:
        trainer: with model and tokenizer.
        sentences: with their gold trees.
        num_beams: of the search.

    Returns:
        Numbers by name; F1 in percent.
    """
    words = [sentence.words for sentence in sentences]
    found = parse_sentences(trainer.model, trainer.processing_class, words, num_beams=num_beams)
    total, lengths = sum(sum(sentence.word_log_probs or ()) for sentence in found), [len(row) for row in words]
    scores = unlabeled_f1(best_trees(found), [sentence.spans for sentence in sentences], lengths)
    return {"eval_word_perplexity": math.exp(-total / sum(lengths)), "eval_f1": 100 * scores.f1}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with a command line (default: the process's)."""
    description = "Train Pushdown Layers on a treebank."
    types = (PushdownArguments, TrainingArguments)
    data, arguments = parse_arguments(types, argv, ["config_overrides"], description)
    check_output_folder(arguments)
    set_seed(arguments.seed)
    train, validation = data.read(data.train_files), data.read(data.validation_files)
    model, tokenizer = data.load(train)
    examples = [[encode_sentence(tokenizer, tree) for tree in trees] for trees in (train, validation)]
    trainer = Trainer(
        model, arguments, collate, train_dataset=examples[0], eval_dataset=examples[1], processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate() | search_scores(trainer, validation[: data.search_sentences], data.num_beams)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
