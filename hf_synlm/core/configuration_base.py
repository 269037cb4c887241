# SPDX-License-Identifier: Apache-2.0
"""Base of all configurations: presets, names of the model classes, and checks of fields."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import transformers

# This code was tested with these, and with all minor versions between them.
OLDEST_TRANSFORMERS = "5.20"
NEWEST_TRANSFORMERS = "5.24"
# Before anything that older versions do not have is used: users of the Hub see this line and not what fails later.
if [int(number) for number in transformers.__version__.split(".")[:2]] < [5, 20]:
    raise ImportError(
        f"This model needs transformers {OLDEST_TRANSFORMERS} or later, and {transformers.__version__} is installed: "
        f'pip install -U "transformers>={OLDEST_TRANSFORMERS}"'
    )
# A file with larger values is damaged, or is an attack on the memory of the machine that reads it.
LARGEST_INTEGER = 2**31 - 1
MOST_LAYERS = 1000


class SyntacticConfig(transformers.PreTrainedConfig):
    """Base of the configurations.

    A configuration `XConfig` lies in a file `configuration_x.py`, its models in `modeling_x.py`. It lists
    the `presets` by which `from_preset` makes it and checks its fields in `validate_architecture`.
    """

    # Published models: name -> the fields that differ from the defaults.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # X + each of these is a class.
    model_classes: ClassVar[Sequence[str]] = ("Model", "ForCausalLM", "ForSequenceClassification")
    # How a sentence ends: by the end token, by its tree (all closed, so that no token says so), or not at all.
    sentence_end: ClassVar[Literal["token", "tree", "none"]] = "token"
    # Whether a beam of derivations scores and generates (`word_search`), whether trees have labels, and words tags,
    # whether the attention to a derivation is measured (`attention_entropy`), and whether large activations are losses.
    searches: ClassVar[bool] = False
    gives_labels: ClassVar[bool] = False
    gives_tags: ClassVar[bool] = False
    measures_attention: ClassVar[bool] = False
    penalizes_activations: ClassVar[bool] = False
    # Whether it is a grammar over words: no token is a piece of a word, and nothing follows the end of a sentence.
    is_grammar: ClassVar[bool] = False
    # How `parse` finds a tree where its `method` is not given.
    parse_method: ClassVar[str] = "search"
    # Ids behind the words of a text that ends, where they are others than the end token.
    closing: ClassVar[Mapping[int, int] | None] = None
    # What divides the loss of given trees; None = every part is a mean over what it counts.
    loss_normalization: ClassVar[str | None] = None
    # How trees are given to `forward`, by a name in `trees/codecs.py`; None = they are not.
    tree_codec: ClassVar[str | None] = None
    # The longest text, in tokens, that every model was tested with. Clients look for it (lm-eval reads longer texts in
    # windows of so many); it is a limit only where `has_positions`.
    max_position_embeddings = 1024
    has_positions: ClassVar[bool] = False
    # Trainer leaves these fields of an output out of its predictions.
    keys_to_ignore_at_inference = (
        "past_key_values cache losses joint_log_prob spans chart action_logits distances syd_distances span_scores"
    ).split()

    # Writes the models' code into a folder (`hf_synlm/hub/flatten.py`); None in code that was loaded from the Hub.
    write_code: ClassVar[Callable[["SyntacticConfig", str | os.PathLike], None] | None] = None

    auto_map: dict | None = None
    # How text was written in training. "natural": words as in ordinary text; "treebank": as a treebank splits them;
    # "no-punctuation": without marks; None: nobody says it. All but "natural": single spaces between words.
    text_style: str | None = None

    @property
    def gives_trees(self) -> bool:
        """Whether the language model has trees, which its `parse` returns."""
        return True

    @property
    def reads_context(self) -> Literal["sentences", "plain text"] | None:
        """What a search reads before a sentence."""
        return None

    def __post_init__(self, **kwargs: Any):
        if self.auto_map is None:
            self.auto_map = self._own_classes()
        if "max_position_embeddings" in kwargs:
            self.max_position_embeddings = kwargs.pop("max_position_embeddings")
            self.check_least(1, "max_position_embeddings")
        self._check_magnitudes()
        self.check_choices(text_style=(None, "natural", "treebank", "no-punctuation"))
        # The decorator would raise its own error type; users catch a plain ValueError.
        self.validate_architecture()
        self._check_dropouts()
        self._check_token_ids()
        super().__post_init__(**kwargs)

    def _own_classes(self) -> dict[str, str]:
        """`auto_map`: names the classes in a repository of the Hub, for users without the library."""
        # A user's subclass loads as the configuration class of this library.
        owner = next(cls for cls in type(self).__mro__ if "model_type" in vars(cls))
        module = owner.__module__.rpartition(".")[2]
        modeling = f"{module.replace('configuration', 'modeling')}.{owner.__name__.removesuffix('Config')}"
        return {
            "AutoConfig": f"{module}.{owner.__name__}",
            **{f"Auto{kind}": f"{modeling}{kind}" for kind in self.model_classes if kind == "Model"},
            **{f"AutoModel{kind}": f"{modeling}{kind}" for kind in self.model_classes if kind != "Model"},
        }

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration, and the code that loads it and its models without hf_synlm."""
        if self.write_code is None:
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
            return
        super().save_pretrained(save_directory)
        # After transformers: where a stub named the class, it copied the class's file as it is.
        self.write_code(save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).resolve().name), **kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Configuration of a published model, by a key of `presets`; `overrides` replace fields of the preset."""
        if name not in cls.presets:
            kind = cls.__name__.removesuffix("Config")
            raise ValueError(f"Unknown {kind} preset {name!r}. Choose one of {sorted(cls.presets)}.")
        return cls(**{**cls.presets[name], **overrides})

    @classmethod
    def from_tokenizer(cls, tokenizer: transformers.PreTrainedTokenizerBase, **fields: Any) -> Self:
        """Configuration for the tokens of a tokenizer: size of the vocabulary and special ids; `fields` replace them.

        Where the tokenizer has no begin token, the end token stands for it, else that of BERT (CLS), else padding; so
        for the end (SEP). Raises ValueError if it lacks another token that the model needs.
        """
        special = {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad", "cls", "sep")}
        special["reduce"] = tokenizer.get_vocab().get("<|REDUCE|>")
        others = {"bos": ("bos", "eos", "cls", "pad"), "eos": ("eos", "bos", "sep", "pad")}
        ids = {
            f"{role}_token_id": next((special[x] for x in others.get(role, [role]) if special[x] is not None), None)
            for role in special
            if hasattr(cls, f"{role}_token_id")
        }
        given = {"vocab_size": len(tokenizer), **ids, **fields}
        if missing := [name for name in ids if given[name] is None and getattr(cls, name) is not None]:
            raise ValueError(
                f"the tokenizer has no {', '.join(missing)}. Load the tokenizer by "
                "hf_synlm.data.tokenizers.load_tokenizer, which adds these tokens, or give their ids"
            )
        return cls(**given)

    # ---------------------------------------------------------------------------------------------- checks
    def _check_magnitudes(self) -> None:
        """Raise ValueError for absurd numbers, before a model is built from them."""
        for name, value in vars(self).items():
            limit = MOST_LAYERS if name.startswith("num_") and name.endswith("layers") else LARGEST_INTEGER
            if isinstance(value, int) and abs(value) > limit:
                raise ValueError(f"{name} is {value}, which is more than {limit}. Is the configuration damaged?")

    def check_least(self, least: int, *names: str) -> None:
        """Raise ValueError unless fields are at least `least`."""
        bound = "must not be negative" if least == 0 else f"must be at least {least}"
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"{name} {bound} and is {getattr(self, name)}.")

    def check_finite(self, *names: str, positive: bool = False) -> None:
        """Raise ValueError unless fields are finite and not negative, or positive."""
        for name in names:
            value = getattr(self, name)
            if not 0 <= value < math.inf or (positive and value == 0):
                kind = "a finite positive number" if positive else "a finite number, not negative,"
                raise ValueError(f"{name} must be {kind} and is {value}.")

    def _check_dropouts(self) -> None:
        """Refuse probabilities of dropping outside [0, 1)."""
        for name, value in vars(self).items():
            if name.endswith("dropout") and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be in [0, 1) and is {value}.")

    def check_choices(self, **choices: Sequence[str]) -> None:
        """Raise ValueError unless fields have one of the values given for them."""
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown. Choose one of {list(values)}.")

    def _check_token_ids(self) -> None:
        """Refuse ids of special tokens, unless they are in the vocabulary, or None."""
        fields = vars(self).items()
        ids = {name: value for name, value in fields if name.endswith("_token_id") and isinstance(value, int)}
        if wrong := {name: value for name, value in ids.items() if not 0 <= value < self.vocab_size}:
            found = ", ".join(f"{name} {value}" for name, value in wrong.items())
            raise ValueError(
                f"{found}: not in the vocabulary of {self.vocab_size} ids. Set {', '.join(wrong)} to ids of the "
                f"tokenizer, below vocab_size ({type(self).__name__}.from_tokenizer(tokenizer, ...) does this)."
            )


def position_limit(config: transformers.PreTrainedConfig) -> int | None:
    """Most tokens of a text, for models of transformers and of this library; None = any number."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")  # the last: MPT
    limits = [getattr(config, name, None) for name in names if getattr(config, "has_positions", True)]
    return next(filter(None, limits), None)


__all__ = ["SyntacticConfig"]
