# SPDX-License-Identifier: Apache-2.0
"""Arguments of the programs that read gold trees: grammars, the span parser, and the counted PCFG."""

import math
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hf_synlm.data.arguments import option
from hf_synlm.data.files import check_target, find_model, flag_of
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.data.vocabulary import UnknownRule, subword_tokenizer
from hf_synlm.evaluation.trees.gold_treebank import PUNCTUATION
from hf_synlm.hub.checkpoint import check_model_source, check_tokenizer_source, is_folder
from hf_synlm.training.arguments.base import ModelArguments, refuse
from hf_synlm.training.arguments.sentences import (
    MIN_FREQUENCY,
    UNKNOWN_WORDS,
    VOCAB_SIZE,
    BatchedFileArguments,
    SentenceFileArguments,
    Sentences,
)
from hf_synlm.training.arguments.text import RecurrentTrainingArguments


@dataclass
class TreeDataArguments(BatchedFileArguments):
    """Treebank files, how words become tokens, and how sentences become batches."""

    max_sentence_tokens: int = option(300, "Leave longer sentences out of training.", minimum=1)
    tokenizer_type: Literal["words", "bpe", "unigram"] = option(
        "words", "Tokenizer to make. 'words' has whole words, 'bpe' and 'unigram' have pieces of words."
    )
    tokenizer_vocab_size: int = option(50000, VOCAB_SIZE)
    tokenizer_min_frequency: int = option(2, MIN_FREQUENCY, minimum=1)
    tokenizer_byte_fallback: bool = option(
        False,
        "For 'bpe', add 256 byte tokens for characters that the training sentences lack. Then no word is unknown.",
    )
    unknown_words: UnknownRule = option("berkeley", UNKNOWN_WORDS)
    max_batch_actions: int = option(
        26000, "Largest micro batch: sentences times actions of the longest sentence.", minimum=1
    )
    preprocessing_num_workers: int | None = option(None, "Processes that encode trees.")

    def __post_init__(self):
        """Check the values."""
        if self.tokenizer_type != "bpe":
            refuse(self, "tokenizer_byte_fallback", f"which belongs to 'bpe', not to {self.tokenizer_type!r}")
        if self.tokenizer_type != "words":
            refuse(self, "lowercase replace_numbers", f"which belongs to words, not to {self.tokenizer_type!r}")
        super().__post_init__()

    def make_tokenizer(self, sentences: Sentences, end_token: bool) -> PreTrainedTokenizerBase:
        """Make a tokenizer from sentences: of words, or of pieces of words."""
        if self.tokenizer_type == "words":
            return super().make_tokenizer(sentences, end_token)
        return subword_tokenizer(
            sentences,
            self.tokenizer_vocab_size,
            model=self.tokenizer_type,
            min_frequency=self.tokenizer_min_frequency,
            byte_fallback=self.tokenizer_byte_fallback,
        )


@dataclass
class EvaluationArguments:
    """What is measured on the way and at the end."""

    search_sentences: int = option(
        0,
        "Number of validation sentences to parse in every evaluation after the first. 0 parses none. RNNG only.",
        minimum=0,
    )
    final_search_sentences: int | None = option(
        None,
        "Number of test sentences that the final model parses (default: all). 0 parses none. RNNG only.",
        minimum=0,
    )
    search_batch_size: int = option(10, "Sentences per process in a search batch.", minimum=1)
    num_beams: int | None = option(
        None, "Word beam, the number of derivations kept after each word. Default: the model's.", minimum=1
    )
    action_beam_size: int | None = option(
        None, "Action beam, the number of derivations kept after each action. Default: the model's.", minimum=1
    )
    fast_track_size: int | None = option(
        None, "Number of derivations that always continue to the next word. Default: the model's.", minimum=0
    )
    final_report: bool = option(
        False,
        "At the end, check that the saved model works the same without hf_synlm. Also parse some test sentences, "
        "and generate one. RNNG only.",
    )
    report_punctuation: list[str] = option(
        ["ignore"],
        "Ways in which the final report treats punctuation. Each way has its own baselines. Give 'keep' if the tags "
        "are not Penn Treebank tags.",
        choices=list(PUNCTUATION),
    )

    def beam(self, config: Any) -> dict[str, int]:
        """Widths of the search; default: those of the model, but an action beam of at least the word beam.

        Raises ValueError for a narrower action beam.
        """
        words = self.num_beams or config.scoring_num_beams
        if not config.gives_labels:
            return {"num_beams": words}
        actions = self.action_beam_size or max(config.action_beam_size, words)
        if actions < words:
            raise ValueError(
                f"--action-beam-size is {actions}, less than the word beam of {words}. Raise it, or lower --num-beams"
            )
        track = config.fast_track_size if self.fast_track_size is None else self.fast_track_size
        return {"num_beams": words, "action_beam_size": actions, "fast_track_size": track}


@dataclass
class GrammarModelArguments(ModelArguments):
    """A model of words and trees, or a baseline."""

    word_vectors: str | None = option(
        None,
        "Folder or Hub name of a model. Word vectors begin with those of this model, which are fitted to the tokens "
        "and reduced to the size of this run.",
    )

    def __post_init__(self):
        """Check that word vectors belong to an untrained model, and exist."""
        super().__post_init__()
        if self.model_name_or_path is not None:
            refuse(self, "word_vectors", f"but {self.model_name_or_path!r} has word vectors of its own")
        elif self.word_vectors is not None:
            self.word_vectors = find_model(self.word_vectors)
            check_model_source(self.word_vectors)
            check_tokenizer_source(self.word_vectors)


@dataclass
class RNNGModelArguments(GrammarModelArguments):
    """RNNG, or a baseline without trees."""

    program = "train_rnng"

    architecture: str = option(
        "rnng",
        "Model to train: 'rnng' (left-corner with --config-overrides transition_system=in_order), or a baseline "
        "without trees: 'lstm', or 'gpt2', which has no preset.",
    )


LORA_OPTIONS = "lora_alpha lora_target_modules"


@dataclass
class TreeLMModelArguments(GrammarModelArguments):
    """Tree LM; `--config-overrides structure_attention=stack_compose` makes it a Transformer Grammar."""

    program = "train_tree_lm"

    architecture: str = option("tree_lm", "'tree_lm'.")
    backbone: str | None = option(
        None,
        "Folder or Hub name of a decoder (GPT-2, Llama, Qwen, ...). Training begins with its weights and tokenizer. "
        "If --model-name-or-path names an adapter, this decoder is its backbone.",
    )
    backbone_name: str | None = option(
        None, "Hub name of the backbone, if --backbone is a folder. Other machines load it from there."
    )
    lora_r: int | None = option(
        None,
        "Train LoRA of this rank instead of all weights of the backbone. The table of the labels and their biases "
        "are trained in full. The saved model is an adapter of the backbone. With --model-name-or-path, an adapter of "
        "this rank is trained further.",
        minimum=1,
    )
    lora_alpha: int | None = option(None, "Scale of LoRA. By default, the scale is twice the rank.", minimum=1)
    lora_target_modules: list[str] | None = option(
        None, "Layers of the backbone that get LoRA, such as q_proj v_proj. By default, all linear layers get LoRA."
    )

    def __post_init__(self):
        """Check that options of LoRA stand beside a rank and a backbone, and word vectors beside none."""
        super().__post_init__()
        if self.backbone is not None:
            refuse(self, "word_vectors", "but a backbone has word vectors of its own")
        if self.lora_r is None:
            refuse(self, LORA_OPTIONS, "which needs --lora-r")
        elif self.model_name_or_path is not None:
            refuse(self, LORA_OPTIONS, "which the adapter decides")
        elif self.backbone is None:
            raise ValueError("--lora-r needs the weights of a backbone. Pass --backbone.")
        if self.backbone_name is not None:
            if self.backbone is None or is_folder(self.backbone_name):
                raise ValueError(
                    f"--backbone-name {self.backbone_name!r} must be OWNER/NAME on the Hub, and --backbone the "
                    "folder of the same backbone. Pass both, or neither."
                )


@dataclass
class PushdownModelArguments(GrammarModelArguments):
    """Pushdown Layers."""

    program = "train_pushdown"

    architecture: str = option("pushdown", "'pushdown'.")


@dataclass
class URNNGModelArguments(ModelArguments):
    """The model, and the network that proposes its trees."""

    program = "train_urnng"

    architecture: str = option("urnng", "'urnng'.")
    network_hidden_size: int = option(256, "Width of the inference network's LSTM in each direction.")


@dataclass
class VariationalArguments:
    """What is learned from which trees; the defaults are those of the paper."""

    objective: Literal["unsupervised", "supervised"] = option(
        "unsupervised",
        "'unsupervised' learns from trees of the inference network, 'supervised' from binarized gold trees.",
    )
    num_samples: int = option(8, "Number of trees drawn for a sentence, in training and in evaluations.", minimum=1)
    kl_epochs: int = option(2, "Epochs in which the weight of the KL divergence rises from 0 to 1.", minimum=0)
    network_epochs: int = option(
        2,
        "Epochs in which the inference network learns, too (one less than train_q_epochs of the authors' program).",
        minimum=0,
    )
    action_learning_rate: float = option(0.1, "Learning rate of the action head (SGD).")
    network_learning_rate: float = option(1e-4, "Learning rate of the inference network (Adam).")
    model_grad_norm: float = option(5.0, "Gradients of the model are clipped to this norm.")
    network_grad_norm: float = option(1.0, "Gradients of the inference network are clipped to this norm.")
    decay_epoch: int = option(
        8,
        "After this epoch, wait for an epoch without a new best loss. From then on, halve the rates in every epoch.",
        minimum=0,
    )
    min_learning_rate: float = option(0.03, "Stop when --learning-rate has fallen below this.", minimum=0)
    importance_samples: int = option(1000, "Trees per test sentence for the final perplexity.", minimum=1)
    importance_temperature: float = option(
        2.0, "For --importance-samples, the network's scores are divided by this. Above 1, the trees differ more."
    )

    def __post_init__(self):
        """Check the values."""
        for name in "action_learning_rate network_learning_rate model_grad_norm network_grad_norm".split():
            if getattr(self, name) <= 0:
                raise ValueError(f"{flag_of(name)} must be positive and is {getattr(self, name)}.")


@dataclass
class URNNGTrainingArguments(RecurrentTrainingArguments):
    """The arguments of all programs; epochs decide about rates and evaluations here."""

    without_layers = "gradient_checkpointing"

    per_device_train_batch_size: int = option(16, "Sentences per process and micro step.", minimum=1)
    learning_rate: float = option(1.0, "Learning rate (SGD) of all weights except the action head.", minimum=0)
    weight_decay: float = option(0.0, "L2 penalty. It is added to the gradients after clipping.", minimum=0)
    max_grad_norm: float = option(0.0, "Not used here. Set --model-grad-norm and --network-grad-norm.", minimum=0)


@dataclass
class SpanParserModelArguments(ModelArguments):
    """The encoder, and which of its weights are trained."""

    program = "train_span_parser"

    architecture: str = option("span_parser", "'span_parser'.")
    encoder: str | None = option(None, "Encoder whose weights and tokenizer are taken: folder or Hub name.")
    encoder_name: str | None = option(
        None, "Hub name of the encoder, if --encoder is a folder. Other machines load it from there."
    )
    lora_r: int = option(
        0, "Train LoRA of this rank, and save an adapter. With 0, train all weights of the encoder.", minimum=0
    )

    def __post_init__(self):
        """Check that there is an encoder to begin with."""
        super().__post_init__()
        if self.encoder is None or self.model_name_or_path is not None:
            raise ValueError("A span parser begins with an encoder. Pass --encoder, and no --model-name-or-path.")


@dataclass
class SpanDataArguments(BatchedFileArguments):
    """Treebanks, how often each is read, and the size of batches."""

    train_weights: list[float] = option(
        [], "How many times each file of --train-files is read per epoch, such as 3 1 0.35. By default, once."
    )
    max_batch_tokens: int = option(4096, "Largest padded size of a micro batch in tokens.", minimum=1)
    evaluation_sentences: int | None = option(
        None, "Number of sentences to read from each of --validation-files. By default, all are read.", minimum=1
    )

    def __post_init__(self):
        """Check the values."""
        super().__post_init__()
        self.train_weights = self.train_weights or [1.0] * len(self.train_files)
        wrong = [weight for weight in self.train_weights if not 0 < weight < math.inf]
        if wrong or len(self.train_weights) != len(self.train_files):
            raise ValueError(
                f"--train-weights are {self.train_weights}. Give a positive number for each file of --train-files."
            )

    def read(self, files: list[str]) -> list[list[TreebankSentence]]:
        """The sentences of each file."""
        return [list(read_treebank(path, **self.reading)) for path in files]


@dataclass(kw_only=True)
class TreebankPCFGArguments(SentenceFileArguments):
    """The trees, and how they become rules."""

    output_dir: str = option(MISSING, "Folder for the model.")
    overwrite_output_dir: bool = option(False, "Replace the model in the output folder.")
    horizontal_order: int = option(
        1, "Horizontal order, which is the number of siblings in the label of a binarized part.", minimum=0
    )
    parent_annotation: bool = option(True, "Add to each constituent's label the label of its parent.")
    lexicon_smoothing: float = option(
        1.0,
        "Smoothing: count of words that is added to each preterminal and to each tag. A preterminal gets the words "
        "in the proportions of its tag, a tag in those of the text.",
    )
    tokenizer_min_frequency: int = option(2, MIN_FREQUENCY, minimum=1)
    unknown_words: UnknownRule = option("berkeley2", UNKNOWN_WORDS)

    def __post_init__(self):
        """Check the values."""
        super().__post_init__()
        if not 0 < self.lexicon_smoothing < math.inf:
            raise ValueError(f"--lexicon-smoothing is {self.lexicon_smoothing} and must be finite and above 0.")
        if Path(self.output_dir).exists() and not self.overwrite_output_dir:
            raise ValueError(
                f"{self.output_dir!r} exists. Choose another --output-dir, or pass --overwrite-output-dir."
            )
        check_target(self.output_dir, overwrite=True, inputs=self.files)

    def read(self, split: str) -> list[TreebankSentence]:
        """Trees of two or more words."""
        files = getattr(self, f"{split}_files")
        return [tree for path in files for tree in read_treebank(path, **self.reading) if len(tree.words) > 1]
