# SPDX-License-Identifier: Apache-2.0
"""Configuration of the Ordered Memory language model (Shen et al., NeurIPS 2019)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_synlm.core.configuration_base import SyntacticConfig

# There is no published language model. Its sizes make it comparable with the 28 M parameters of table 5 of the GPST
# paper; dropout is that of the authors' classifier of sentiment.
PRESETS: dict[str, dict[str, Any]] = {"ordered-memory": {}}


@strict
class OrderedMemoryConfig(SyntacticConfig):
    """Sizes and regularization of an Ordered Memory language model.

    Sizes:
        vocab_size: number of token ids (V).
        hidden_size: width of embeddings and slots (D); `embedding_size` is the same.
        num_slots: slots of the memory (N): trees are at most this high.
    Regularization (in training):
        input_dropout: drops features of the embedded tokens; one mask for all positions.
        cell_dropout: inside the cell that composes.
        attention_dropout: inside the network that chooses a slot.
        output_dropout: drops features of the states that predict the words; one mask for all positions.
    Special tokens: bos_token_id and eos_token_id are the one boundary between sentences; it is read and predicted like
        every other token.
    Preset: "ordered-memory".

    Raises:
        ValueError: when a field is out of range; the message names the value. (A value of the wrong type raises the
            `StrictDataclassFieldValidationError` of huggingface_hub.)
    """

    model_type = "ordered_memory"
    parse_method = "distance"
    presets = PRESETS
    attribute_map = {"embedding_size": "hidden_size"}
    # Clients of transformers ask for it; there is one layer.
    num_hidden_layers = 1

    vocab_size: int = 10000
    hidden_size: int = 850
    num_slots: int = 15
    input_dropout: float | int = 0.3
    cell_dropout: float | int = 0.2
    attention_dropout: float | int = 0.2
    output_dropout: float | int = 0.4

    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | None = 0
    pad_token_id: int | None = None

    def validate_architecture(self) -> None:
        """Check that the fields are in range (called at construction and before saving)."""
        self.check_least(1, "vocab_size", "hidden_size")
        self.check_least(2, "num_slots")
