# SPDX-License-Identifier: Apache-2.0
"""Ordered Memory as a language model (Shen et al., NeurIPS 2019), a baseline with trees.

Embedding, one `OrderedMemoryLayer`, and an output layer that shares the matrix of the embedding:

    p(x_t+1 | x_1..t) = softmax(E M^_N-1 + b)

The slot at which a token joins says how high the constituent is that ends before it. Its expected value is the
syntactic distance of the gap before the token, and the distances of a sentence define its tree.

Shapes: B sentences, T tokens, N slots, D width, V vocabulary. Losses are in nats.

Source: `ordered_memory.py` of the authors' code, which has classifiers only. The language model follows table 5 of Hu
et al. 2024, as far as that describes it. The authors build a tree from the most probable slots. Here distances are
expected values, so that other probable slots count, too.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin

from hf_synlm.core.hidden_states import state_at_columns
from hf_synlm.core.rows import after_columns
from hf_synlm.models.ordered_memory.configuration_ordered_memory import OrderedMemoryConfig
from hf_synlm.models.ordered_memory.layer import MemoryState, OrderedMemoryLayer
from hf_synlm.recurrent.distance_model import DistanceLanguageModel
from hf_synlm.recurrent.distances import at_columns
from hf_synlm.recurrent.language_model import (
    RecurrentModelOutput,
    RecurrentNetwork,
    RecurrentPreTrainedModel,
    RecurrentSequenceClassifier,
    Segment,
)
from hf_synlm.recurrent.layers import locked_dropout


class OrderedMemoryPreTrainedModel(RecurrentPreTrainedModel):
    """Loading, saving and initialization shared by the Ordered Memory models."""

    config: OrderedMemoryConfig
    _no_split_modules = ["OrderedMemoryLayer"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw words from U(-0.1, 0.1), the rest as PyTorch does."""
        if isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            init.uniform_(module.weight, -0.1, 0.1)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            for parameter in module.parameters(recurse=False):
                init.uniform_(parameter, -(module.in_features**-0.5), module.in_features**-0.5)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)


class OrderedMemoryModel(RecurrentNetwork, OrderedMemoryPreTrainedModel):
    """Embedding and memory: token ids in, states and distances out.

    The output holds `distances` [B, 1, T] in [0, 1]; 0 at masked columns. Cost: T steps of up to N cells for the whole
    batch.
    """

    num_states = 2

    def __init__(self, config: OrderedMemoryConfig):
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layer = OrderedMemoryLayer(width, width, config.num_slots, config.cell_dropout, config.attention_dropout)
        self.post_init()

    def initial_state(self, embedded: Tensor) -> tuple[Tensor, ...]:
        """An empty memory."""
        return self.layer.start(embedded)

    def read(self, segment: Segment, state: tuple[Tensor, ...]) -> tuple[RecurrentModelOutput, tuple[Tensor, ...]]:
        """Run the layer over a segment; see `RecurrentNetwork`."""
        config, mask = self.config, segment.mask
        inputs = locked_dropout(segment.embedded, config.input_dropout, self.training)
        states = self.layer(inputs, MemoryState(*state))
        last = after_columns(torch.stack([state.candidate[:, -1] for state in states], 1), mask)
        heights = torch.arange(1, config.num_slots + 1, device=inputs.device) / config.num_slots
        distances = torch.stack([state.probs @ heights.to(state.probs) for state in states[1:]], 1)
        output = RecurrentModelOutput(
            last_hidden_state=last,
            hidden_states=(state_at_columns(segment.embedded, mask), last) if segment.record else None,
            distances=at_columns(distances, mask)[:, None],
        )
        return output, _final(states, mask)


def _final(states: list[MemoryState], mask: Tensor | None) -> tuple[Tensor, ...]:
    """The state after the last token of each row, of states whose tokens stand first."""
    if mask is None:
        return tuple(states[-1])
    count, row = mask.sum(1), torch.arange(len(mask), device=mask.device)
    return tuple(torch.stack(parts)[count, row] for parts in zip(*states, strict=True))


class OrderedMemoryForCausalLM(DistanceLanguageModel, OrderedMemoryPreTrainedModel, GenerationMixin):
    """Ordered Memory language model: next-token log-probabilities, training loss, generation, trees."""

    network_class = OrderedMemoryModel
    language_model_weight = 1.0
    supervision_remedy = "train ON-LSTM-SYD or PRPN-SYD"


class OrderedMemoryForSequenceClassification(RecurrentSequenceClassifier, OrderedMemoryPreTrainedModel):
    """Ordered Memory with a classifier on the state after the last token."""

    network_class = OrderedMemoryModel
