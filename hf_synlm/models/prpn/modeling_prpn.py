# SPDX-License-Identifier: Apache-2.0
"""PRPN: the Parsing-Reading-Predict Network (Shen et al., ICLR 2018), and PRPN-SYD (Du et al., ACL 2020).

Three networks. The parsing network gives every token a syntactic distance from its embedding and a few before it. The
distances open and shut gates. A token sees past the gaps whose distance is smaller than its own, and so sees its
constituent. The reading network is an LSTM that attends to its last N states under these gates. The predict network
guesses the next distance, attends once more under its gates, and predicts the next token. Trees are read off the
distances.

In PRPN-SYD (`parsing_network="recurrent"`) the parsing network has recurrence and a second set of distances, which is
trained on gold trees. Its code was never released; it is a reconstruction from the paper (see models/prpn/parser.py).

Shapes: B sentences, T tokens, N slots, L lookback, H hidden size, E embedding size, V vocabulary. Inside, time comes
before the sentences. Losses are in nats.

Source: `model_PRPN.py` of the authors' code (yikangshen/PRPN).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin

from hf_synlm.core.hidden_states import state_at_columns
from hf_synlm.core.rows import after_columns, tokens_first
from hf_synlm.models.prpn.configuration_prpn import PRPNConfig
from hf_synlm.models.prpn.parser import (
    FAR,
    ConvolutionalParsingNetwork,
    RecurrentParsingNetwork,
    TokenRows,
    drop,
    gates_of,
    last_entries,
)
from hf_synlm.models.prpn.predictor import PredictNetwork
from hf_synlm.models.prpn.reader import ReadingLayer, UnbiasedLayerNorm
from hf_synlm.recurrent.distance_model import DistanceLanguageModel
from hf_synlm.recurrent.distances import at_columns
from hf_synlm.recurrent.language_model import (
    RecurrentModelOutput,
    RecurrentNetwork,
    RecurrentPreTrainedModel,
    RecurrentSequenceClassifier,
    Segment,
)


@dataclass
class PRPNModelOutput(RecurrentModelOutput):
    """Output of the bare PRPN.

    Fields, besides those of `RecurrentModelOutput`:
        last_hidden_state: [B, T, E] features of the next token: the output of the predict network after each column.
        distances: [B, 1, T] in (0, 1).
        syd_distances: [B, 1, T], without bounds; None for `parsing_network="convolution"`.
        hidden_states: with `output_hidden_states`, the embeddings, the output of every reading layer, and that of the
            predict network [B, T, *], which is `last_hidden_state`.
        next_distances: [B, T] guess of the distance of the gap after each token.
        attentions: with `output_attentions`, attention weights [B, T, N] of each reading layer, then of the predict
            network, the oldest slot first. The last slot of a row is the token right before it.
    """

    next_distances: Tensor | None = None


class PRPNPreTrainedModel(RecurrentPreTrainedModel):
    """Loading, saving and initialization shared by the PRPN models."""

    config: PRPNConfig
    _no_split_modules = ["ReadingLayer", "PredictNetwork", "ConvolutionalParsingNetwork", "RecurrentParsingNetwork"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the authors do: embeddings from U(-0.01, 0.01), the rest by PyTorch's defaults of the time."""
        if isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            init.uniform_(module.weight, -0.01, 0.01)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            bound = module.weight[0].numel() ** -0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.LSTM):
            for parameter in module.parameters():
                init.uniform_(parameter, -(module.hidden_size**-0.5), module.hidden_size**-0.5)
        elif isinstance(module, UnbiasedLayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm1d):
            # PyTorch before 1.2 drew the scales, and the authors trained with 0.3.
            uniform = self.config.batch_norm_init == "uniform"
            init.uniform_(module.weight) if uniform else init.ones_(module.weight)
            init.zeros_(module.bias)
            init.zeros_(module.running_mean)
            init.ones_(module.running_var)
            init.zeros_(module.num_batches_tracked)


# ---------------------------------------------------------------------------------------------- base model
class PRPNModel(RecurrentNetwork, PRPNPreTrainedModel):
    """Parsing, reading and predict network: token ids in, features of the next tokens out (`PRPNModelOutput`).

    In training the batch normalizations use the statistics of all tokens of the batch, at least two. Otherwise nothing
    depends on other rows, or on later tokens. The state holds the last features of every sentence, its last N
    distances, the states and cells of its last N tokens, layer by layer, and the state of the parsing network. Cost: T
    steps of each layer, one layer after the other; the other networks take all tokens at once.
    """

    batch_dim = 1

    def __init__(self, config: PRPNConfig):
        super().__init__(config)
        size, width = config.layer_size, config.embedding_size
        kinds = {"convolution": ConvolutionalParsingNetwork, "recurrent": RecurrentParsingNetwork}
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.parser = kinds[config.parsing_network](width, size, config.num_lookback, config.input_dropout)
        self.layers = nn.ModuleList(
            ReadingLayer(
                size if layer else width,
                size,
                dropout=config.input_dropout if layer else config.dropout,
                key_dropout=config.input_dropout,
                recurrent_dropout=config.recurrent_dropout,
            )
            for layer in range(config.num_layers)
        )
        self.predictor = PredictNetwork(size, width, config.num_residual_blocks, config.input_dropout)
        self.post_init()

    @property
    def num_states(self) -> int:
        """Number of hidden states: the embeddings, the reading layers, and the features."""
        return self.config.num_layers + 2

    def initial_state(self, embedded: Tensor) -> tuple[Tensor, ...]:
        """State before any token; every part has the sentences in its second dimension."""
        config = self.config
        like_BE = self.embed_tokens.weight.new_zeros(len(embedded), config.embedding_size)
        distances = torch.full((config.num_slots, len(embedded)), FAR, device=like_BE.device)
        tape = like_BE.new_zeros(config.num_slots, len(embedded), 2 * config.layer_size)
        return (like_BE[None], distances, *[tape] * config.num_layers, *self.parser.start(like_BE))

    def read(self, segment: Segment, state: tuple[Tensor, ...]) -> tuple[PRPNModelOutput, tuple[Tensor, ...]]:
        """Run the three networks over a segment; see `RecurrentNetwork`."""
        config, mask_BT = self.config, segment.mask
        embeddings_TBE = segment.embedded.transpose(0, 1)
        tokens_BT = torch.ones(segment.embedded.shape[:2], dtype=torch.bool, device=embeddings_TBE.device)
        if mask_BT is not None:
            tokens_BT = tokens_first(mask_BT, mask_BT)
        count_B = tokens_BT.sum(1)
        # In training the batch normalizations see tokens only, unless asked for otherwise.
        rows = TokenRows(tokens_BT.t(), mask_BT is None or not (self.training and config.pad_aware_batch_norm))
        if self.training and len(rows) < 2:
            raise ValueError(
                f"Batch normalization needs at least two tokens in training, but the batch has {len(rows)}. Give "
                "more tokens, or call eval()."
            )
        features_before, distances_before, *rest = state
        tapes, parser_state = rest[: config.num_layers], tuple(rest[config.num_layers :])
        distances = self.parser(embeddings_TBE, rows, parser_state, count_B)
        distances_SB = torch.cat([distances_before.to(distances.own_TB), distances.own_TB])
        read_gate, predict_gate = gates_of(
            distances_SB, distances.own_TB, distances.next_TB, config.gate, config.resolution
        )
        hidden, attentions, new_tapes = embeddings_TBE, [], []
        recorded = [state_at_columns(segment.embedded, mask_BT)] if segment.record else []
        for layer, tape in zip(self.layers, tapes, strict=True):
            hidden, tape_SBD, weights = layer(hidden, read_gate, tape)
            attentions.append(weights)
            if segment.record:
                recorded.append(state_at_columns(hidden.transpose(0, 1), mask_BT, tape[-1, :, : config.layer_size]))
            new_tapes.append(last_entries(tape_SBD, count_B, config.num_slots))
        past = tapes[-1][..., : config.layer_size].to(hidden.dtype)
        features_TBE, weights = self.predictor(torch.cat([past, hidden]), predict_gate, rows)
        features_SBE = torch.cat([features_before.to(features_TBE), features_TBE])
        features, supervised_TB = after_columns(features_SBE.transpose(0, 1), mask_BT), distances.supervised_TB
        attentions_BT = [w.transpose(0, 1) for w in (*attentions, weights)]
        output = PRPNModelOutput(
            last_hidden_state=features,
            hidden_states=(*recorded, features) if segment.record else None,
            distances=at_columns(distances.own_TB.t(), mask_BT)[:, None],
            next_distances=at_columns(distances.next_TB.t(), mask_BT),
            syd_distances=None if supervised_TB is None else at_columns(supervised_TB.t(), mask_BT)[:, None],
            attentions=tuple(at_columns(w, mask_BT) for w in attentions_BT) if segment.attend else None,
        )
        last_distances = last_entries(distances_SB, count_B, config.num_slots)
        return output, (last_entries(features_SBE, count_B, 1), last_distances, *new_tapes, *distances.state)


# ---------------------------------------------------------------------------------------------- language model
class PRPNForCausalLM(DistanceLanguageModel, PRPNPreTrainedModel, GenerationMixin):
    """PRPN with its output layer: next-token log-probabilities, training objective, trees, generation."""

    network_class = PRPNModel
    supervision_remedy = "set parsing_network='recurrent'"

    @property
    def learns_from_trees(self) -> bool:
        """Whether the parsing network has supervised distances (PRPN-SYD)."""
        return self.config.parsing_network == "recurrent"

    def output_features(self, output: RecurrentModelOutput) -> Tensor:
        """Features of the predict network with dropout [B, T, E]; see `RecurrentLanguageModel`."""
        return drop(output.last_hidden_state, self.config.dropout, self.training)


class PRPNForSequenceClassification(RecurrentSequenceClassifier, PRPNPreTrainedModel):
    """PRPN with a classifier on the features after the last token."""

    network_class = PRPNModel
    dropout_field = "dropout"
