"""Base of all configurations: presets, names of the model classes, and checks of fields."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import transformers

OLDEST_TRANSFORMERS = "5.20"
# Before anything that older versions do not have is used: users of the Hub see this line and not what fails later.
if [int(number) for number in transformers.__version__.split(".")[:2]] < [5, 20]:
    raise ImportError(
        f"This model needs transformers {OLDEST_TRANSFORMERS} or later, and {transformers.__version__} is installed: "
        f'pip install -U "transformers>={OLDEST_TRANSFORMERS}"'
    )
SYNTACTIC_DISTANCE_SCOPES = ("sentence", "batch")
SYNTACTIC_DISTANCE_REDUCTIONS = ("mean", "sum")
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
    # Trainer leaves these fields of an output out of its predictions.
    keys_to_ignore_at_inference = (
        "past_key_values losses joint_log_prob spans chart action_logits distances syd_distances span_scores"
    ).split()

    auto_map: dict | None = None

    @property
    def gives_trees(self) -> bool:
        """Whether the language model has trees, which its `parse` returns."""
        return True

    def __post_init__(self, **kwargs: Any):
        if self.auto_map is None:
            self.auto_map = self._own_classes()
        self._check_magnitudes()
        # The decorator would raise its own error type; users catch a plain ValueError.
        self.validate_architecture()
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

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Configuration of a published model.

        Args:
            name: a key of `presets`.
            **overrides: fields that replace the preset's values.

        Returns:
            The configuration.

        Raises:
            ValueError: for unknown presets.
        """
        if name not in cls.presets:
            kind = cls.__name__.removesuffix("Config")
            raise ValueError(f"Unknown {kind} preset {name!r}. Choose one of {sorted(cls.presets)}.")
        return cls(**{**cls.presets[name], **overrides})

    # ---------------------------------------------------------------------------------------------- checks
    def _check_magnitudes(self) -> None:
        """Raise ValueError for absurd numbers, before a model is built from them."""
        for name, value in vars(self).items():
            if not isinstance(value, int):
                continue
            if abs(value) > LARGEST_INTEGER:
                raise ValueError(f"{name} is {value}, more than {LARGEST_INTEGER}. Is the configuration damaged?")
            if name.startswith("num_") and name.endswith("layers") and value > MOST_LAYERS:
                raise ValueError(f"{name} is {value}, more than {MOST_LAYERS}. Is the configuration damaged?")

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

    def check_dropout(self, *names: str) -> None:
        """Raise ValueError unless fields are probabilities of dropping, in [0, 1)."""
        for name in names:
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1) and is {getattr(self, name)}.")

    def check_choices(self, **choices: Sequence[str]) -> None:
        """Raise ValueError unless fields have one of the values given for them."""
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown. Choose one of {list(values)}.")

    def check_token_ids(self, *names: str) -> None:
        """Raise ValueError unless fields are ids of the vocabulary, or None."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, int) and not 0 <= value < self.vocab_size:
                raise ValueError(
                    f"{name} {value} is outside the vocabulary of {self.vocab_size} ids. "
                    f"Set {name} to an id below vocab_size."
                )


class RecurrentConfig(SyntacticConfig):
    """Base of the configurations of ON-LSTM, PRPN and PaLM.

    `hidden_size` is the width of `last_hidden_state`, as elsewhere in transformers: another name of `embedding_size`.
    Earlier versions called the width of the layers so: where no `layer_size` is given, as in their files, it is the
    `hidden_size` that is.

    Fields:
        vocab_size: number of token ids (V).
        embedding_size: width of the token embedding and of what the words are predicted from (E).
        layer_size: width of the other layers (H); None = that of the published model.
        num_layers: number of layers (L).
        bos_token_id, eos_token_id: the one boundary between sentences; it is read and predicted like other tokens.
    """

    attribute_map = {"num_hidden_layers": "num_layers", "hidden_size": "embedding_size"}
    published_layer_size: ClassVar[int] = 1150

    vocab_size: int = 10000
    embedding_size: int = 400
    layer_size: int | None = None
    num_layers: int = 3
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | None = 0
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        earlier = kwargs.pop("hidden_size", None)
        if self.layer_size is None:
            self.layer_size = self.published_layer_size if earlier is None else earlier
        elif earlier not in (None, self.embedding_size):
            raise ValueError(
                f"hidden_size is {earlier}, embedding_size {self.embedding_size}, layer_size {self.layer_size}: "
                "hidden_size is another name of embedding_size. Set embedding_size and layer_size alone."
            )
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Self:
        """Configuration of a published model; `hidden_size` alone replaces its `layer_size`, as in earlier versions.

        Args:
            name: a key of `presets`.
            **overrides: fields that replace the preset's values.

        Returns:
            The configuration.

        Raises:
            ValueError: for unknown presets.
        """
        if "hidden_size" in overrides and "layer_size" not in overrides:
            overrides["layer_size"] = overrides.pop("hidden_size")
        return super().from_preset(name, **overrides)

    def to_dict(self) -> dict[str, Any]:
        """The fields, and `hidden_size` for those that read files (PEFT)."""
        return {**super().to_dict(), "hidden_size": self.embedding_size}

    def check_sizes(self, *names: str) -> None:
        """Raise ValueError for bad sizes, the fields `names` included, and bad special tokens."""
        self.check_least(1, "vocab_size", "embedding_size", "layer_size", "num_layers", *names)
        self.check_token_ids("bos_token_id", "eos_token_id", "pad_token_id")


class AWDConfig(RecurrentConfig):
    """Base of the configurations of ON-LSTM and PaLM: the regularization of AWD-LSTM (Merity et al., ICLR 2018).

    Fields:
        embedding_dropout: of whole rows of the embedding.
        input_dropout: of the embedded tokens; here and below the same mask at all positions.
        hidden_dropout: between the layers.
        output_dropout: of the states that the words are predicted from.
        weight_dropout: of the recurrent weights.
        activation_regularization: weight of the mean square of the output.
        temporal_activation_regularization: weight of the mean square of the difference of neighbouring outputs.
    """

    embedding_dropout: float | int = 0.1
    input_dropout: float | int = 0.5
    hidden_dropout: float | int = 0.3
    output_dropout: float | int = 0.45
    weight_dropout: float | int = 0.45
    activation_regularization: float | int = 2.0
    temporal_activation_regularization: float | int = 1.0

    @property
    def layer_sizes(self) -> list[int]:
        """Width of every layer; the last one is as wide as the embedding, which the words are predicted with."""
        return [self.layer_size] * (self.num_layers - 1) + [self.embedding_size]

    def check_regularization(self) -> None:
        """Raise ValueError for bad rates of dropout and weights of penalties."""
        self.check_dropout(*(f"{name}_dropout" for name in ("embedding", "input", "hidden", "output", "weight")))
        self.check_finite("activation_regularization", "temporal_activation_regularization")


class SyntacticDistanceConfig(RecurrentConfig):
    """Base of the configurations of models with syntactic distances, which gold trees may train (see `ranking_loss`).

    Fields:
        language_model_weight: weight of the language model's loss, regularization included.
        syntactic_distance_weight: weight of the ranking loss.
        syntactic_distance_margin: smallest difference of two distances without a loss.
        syntactic_distance_scope: pairs inside a "sentence" (the paper), or across the "batch" (the released code).
        syntactic_distance_reduction: "mean" or "sum" over the pairs.
        syntactic_distance_scale: factor of the distances before they are compared (those of ON-LSTM lie in [0, 1)).
    """

    language_model_weight: float | int = 1.0
    syntactic_distance_weight: float | int = 0.75
    syntactic_distance_margin: float | int = 1.0
    syntactic_distance_scope: str = "sentence"
    syntactic_distance_reduction: str = "mean"
    syntactic_distance_scale: float | int = 1.0

    def check_supervision(self) -> None:
        """Raise ValueError for bad `syntactic_distance_*`."""
        self.check_finite("language_model_weight", "syntactic_distance_weight", "syntactic_distance_margin")
        self.check_finite("syntactic_distance_scale", positive=True)
        self.check_choices(
            syntactic_distance_scope=SYNTACTIC_DISTANCE_SCOPES,
            syntactic_distance_reduction=SYNTACTIC_DISTANCE_REDUCTIONS,
        )


__all__ = ["AWDConfig", "RecurrentConfig", "SyntacticConfig", "SyntacticDistanceConfig"]
