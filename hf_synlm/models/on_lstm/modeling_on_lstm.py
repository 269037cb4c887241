# SPDX-License-Identifier: Apache-2.0
"""ON-LSTM, a language model with ordered neurons (Shen et al., ICLR 2019), and ON-LSTM-SYD (Du et al., ACL 2020).

A stack of LSTM layers whose cells forget in a fixed order (models/on_lstm/layer.py). How much of a cell is forgotten
before a word is the syntactic distance of the gap before it, and the distances of a sentence define its tree.
ON-LSTM-SYD has a second set of distances in some layer, which learns from gold trees by a ranking loss.

Where the losses are: the SYD loss is `ranking_loss` in recurrent/distances.py; `distance_losses` there sums it over the
supervised layers, and `DistanceLanguageModel.forward` (recurrent/distance_model.py) adds it to the loss of the words.
AR and TAR are in recurrent/language_model.py.

Shapes: B sentences, T tokens, L layers, S supervised layers, H hidden size, E embedding size, V vocabulary. Losses are
in nats.

Source: `model.py` and `main.py` of Ordered-Neurons, and of SDLM, its fork with supervision. There the lookup of the
embedding gives the last vocabulary row no gradient, by accident (`padding_idx=-1`); here it gets one.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin

from hf_synlm.core.hidden_states import state_at_columns
from hf_synlm.core.rows import after_columns
from hf_synlm.models.on_lstm.configuration_on_lstm import ONLSTMConfig
from hf_synlm.models.on_lstm.layer import LayerStates, ONLSTMLayer, ONLSTMLayers
from hf_synlm.recurrent.distance_model import DistanceLanguageModel
from hf_synlm.recurrent.distances import at_columns
from hf_synlm.recurrent.language_model import (
    RecurrentModelOutput,
    RecurrentNetwork,
    RecurrentPreTrainedModel,
    RecurrentSequenceClassifier,
    Segment,
    WeightedLoss,
    activation_losses,
)
from hf_synlm.recurrent.layers import embedding_dropout


class ONLSTMPreTrainedModel(RecurrentPreTrainedModel):
    """Loading, saving and initialization shared by the ON-LSTM models."""

    config: ONLSTMConfig
    _no_split_modules = ["ONLSTMLayers"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the authors do: words from U(-0.1, 0.1), the rest as PyTorch does."""
        if isinstance(module, nn.Embedding):
            init.uniform_(module.weight, -0.1, 0.1)
        elif isinstance(module, nn.Linear):
            is_output = module.out_features == self.config.vocab_size and module is self.get_output_embeddings()
            limit = 0.1 if is_output else module.in_features**-0.5
            init.uniform_(module.weight, -limit, limit)
            init.zeros_(module.bias) if is_output else init.uniform_(module.bias, -limit, limit)


class ONLSTMModel(RecurrentNetwork, ONLSTMPreTrainedModel):
    """Embedding and layers: token ids in, states and distances out.

    The output holds `distances` [B, L, T] and, of a supervised model, `syd_distances` [B, S, T] in the order of
    `config.supervised_layers`; 0 at masked columns. Cost: T steps of L cells for the whole batch.
    """

    def __init__(self, config: ONLSTMConfig):
        super().__init__(config)
        sizes, supervised = config.layer_sizes, config.supervised_layers or []
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        self.layers = ONLSTMLayers(
            ONLSTMLayer(
                config.embedding_size if layer == 0 else config.layer_size,
                sizes[layer],
                config.chunk_size,
                split_head=layer in supervised and config.syntactic_distance_head == "split",
            )
            for layer in range(config.num_layers)
        )
        if supervised and config.syntactic_distance_head == "hidden":
            self.distance_heads = nn.ModuleList(nn.Linear(sizes[layer], 1) for layer in supervised)
        self.post_init()

    def initial_state(self, embedded: Tensor) -> tuple[Tensor, ...]:
        """Zeros: h and c of every layer."""
        dtype = torch.promote_types(embedded.dtype, torch.float32)
        shapes = [(len(embedded), size) for size in self.config.layer_sizes for _ in "hc"]
        return tuple(torch.zeros(shape, dtype=dtype, device=embedded.device) for shape in shapes)

    def read(self, segment: Segment, state: tuple[Tensor, ...]) -> tuple[RecurrentModelOutput, tuple[Tensor, ...]]:
        """Run the layers over a segment; see `RecurrentNetwork`."""
        config, mask = self.config, segment.mask
        rate = config.embedding_dropout
        embedded = embedding_dropout(segment.embedded, segment.ids, config.vocab_size, rate, self.training)
        last = None if mask is None else (mask.sum(1), torch.arange(len(mask), device=mask.device))
        dropout = [config.input_dropout, *[config.hidden_dropout] * (config.num_layers - 1)]
        results = self.layers(embedded.transpose(0, 1), state, dropout, config.weight_dropout)
        # The state after the last token of each row.
        new = (part[-1] if last is None else part[last] for states, cells, _, _ in results for part in (states, cells))
        shown = results if segment.record else results[-1:]
        after = [after_columns(result.states.transpose(0, 1), mask) for result in shown]
        supervised = [self._syd_distance(number, results[number]) for number in config.supervised_layers or []]
        output = RecurrentModelOutput(
            last_hidden_state=after[-1],
            hidden_states=(state_at_columns(embedded, mask), *after) if segment.record else None,
            distances=torch.stack([at_columns(result.distances_TB.t(), mask) for result in results], 1),
            syd_distances=torch.stack([at_columns(x.t(), mask) for x in supervised], 1) if supervised else None,
        )
        return output, tuple(new)

    def _syd_distance(self, number: int, result: LayerStates) -> Tensor:
        """What learns from gold trees in a layer, [T, B]."""
        head = self.config.syntactic_distance_head
        if head == "hidden":
            return self.distance_heads[self.config.supervised_layers.index(number)](result.states[1:]).squeeze(-1)
        return result.distances_TB if head == "shared" else result.split_distances_TB


class ONLSTMForCausalLM(DistanceLanguageModel, ONLSTMPreTrainedModel, GenerationMixin):
    """ON-LSTM language model: next-token log-probabilities, training loss, generation, trees."""

    network_class = ONLSTMModel
    supervision_remedy = "set config.supervised_layers"

    @property
    def learns_from_trees(self) -> bool:
        """Whether some layers have supervised distances (ON-LSTM-SYD)."""
        return bool(self.config.supervised_layers)

    def penalties(self, output: RecurrentModelOutput, features: Tensor) -> dict[str, WeightedLoss]:
        """AR and TAR of the last layer before its dropout; see `RecurrentLanguageModel`."""
        states = output.last_hidden_state
        return activation_losses(self.config, states, states, output.token_mask)

    @property
    def distance_layers(self) -> dict[str, list[int]]:
        """Numbers of the layers that have distances."""
        return {
            "supervised": self.config.supervised_layers or [],
            "language_model": list(range(self.config.num_layers)),
        }


class ONLSTMForSequenceClassification(RecurrentSequenceClassifier, ONLSTMPreTrainedModel):
    """ON-LSTM with a classifier on the state after the last token."""

    network_class = ONLSTMModel
