"""PRPN: the Parsing-Reading-Predict Network (Shen et al., ICLR 2018), and PRPN-SYD (Du et al., ACL 2020).

Three networks. The parsing network gives every token a syntactic distance from its embedding and a few before it. The
distances open and shut gates: a token sees the tokens of its own constituent, and past the gaps that are narrower than
its own. The reading network is an LSTM that attends to its last N states under these gates, and the predict network
attends once more, under the gates that a guess of the next distance gives, and predicts the next token. Trees are read
off the distances.

In PRPN-SYD (`parsing_network="recurrent"`) the parsing network has recurrence and a second set of distances, which is
trained on gold trees. Its code was never released; it is a reconstruction from the paper (see models/prpn/parser.py).

Shapes: B sentences, T tokens, N slots, L lookback, H hidden size, E embedding size, V vocabulary. Inside, time comes
before the sentences. Losses are in nats.

Source: `model_PRPN.py` of the authors' code (yikangshen/PRPN).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.utils import can_return_tuple

from hf_synlm.core.hidden_states import (
    HiddenStateChoice,
    kept_states,
    refuse_arguments,
    state_at_columns,
    wanted_states,
    wants_attentions,
)
from hf_synlm.core.outputs import ParseOutput
from hf_synlm.core.token_batch import after_columns, tokens_first
from hf_synlm.models.prpn.configuration_prpn import PRPNConfig
from hf_synlm.models.prpn.parser import (
    FAR,
    ConvolutionalParsingNetwork,
    Distances,
    RecurrentParsingNetwork,
    TokenRows,
    drop,
    gates_of,
    last_entries,
)
from hf_synlm.models.prpn.predictor import PredictNetwork
from hf_synlm.models.prpn.reader import ReadingLayer, UnbiasedLayerNorm
from hf_synlm.recurrent.cache import RecurrentCache, store_state
from hf_synlm.recurrent.distance_model import DistanceLanguageModel
from hf_synlm.recurrent.distances import Decoder
from hf_synlm.recurrent.language_model import (
    RecurrentModelOutput,
    RecurrentPreTrainedModel,
    RecurrentSequenceClassifier,
)


@dataclass
class PRPNModelOutput(RecurrentModelOutput):
    """Output of the bare PRPN.

    Fields, besides those of `RecurrentModelOutput`:
        last_hidden_state: [B, T, E] features of the next token: what the predict network says after each column.
        distances: [B, 1, T] in (0, 1).
        syd_distances: [B, 1, T], without bounds; None for `parsing_network="convolution"`.
        hidden_states: with `output_hidden_states`, the embeddings, the output of every reading layer, and that of the
            predict network [B, T, *], which is `last_hidden_state`.
        next_distances: [B, T] guess of the distance of the gap after each token.
        attentions: with `output_attentions`, attention weights [B, T, N] of each reading layer, then of the predict
            network, the oldest slot first: the last slot of a row is the token right before it.
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
class PRPNModel(PRPNPreTrainedModel):
    """Parsing, reading and predict network: token ids in, features of the next tokens out."""

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

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: HiddenStateChoice = None,
        output_attentions: bool | None = None,
        inputs_embeds: Tensor | None = None,
        **others: None,
    ) -> PRPNModelOutput:
        """Read token ids from left to right.

        In training the batch normalizations use the statistics of all tokens of the batch. Otherwise nothing depends on
        other rows, or on later tokens.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 1 = token; masked columns are skipped, wherever they are. With a cache, a mask over
                all columns read so far will do. Default: every column is a token.
            past_key_values: state to continue from; it is updated in place, and no gradient flows through it.
            use_cache: return the state; default: only if one is given.
            output_hidden_states: also return `hidden_states`, all or those at the places given.
            output_attentions: also return `attentions`.
            inputs_embeds: [B, T, E] instead of `input_ids`.
            **others: arguments of other models, which must be None.

        Returns:
            `PRPNModelOutput`. A masked column has the features of the column before it. The state holds the
            last features of every sentence, its last N distances, the states and cells of its last N tokens, layer by
            layer, and the state of the parsing network.

        Raises:
            ValueError: for wrong shapes, types, ids outside the vocabulary, a cache of another batch, or training on
                less than two tokens.

        Cost: T steps of each layer, one layer after the other; the two other networks take all tokens at once.
        """
        cache = past_key_values
        wanted = wanted_states(self.config, output_hidden_states, self.config.num_layers + 2)
        refuse_arguments(others)
        embedded, _, mask_BT = self.embed_first(input_ids, inputs_embeds, attention_mask, cache)
        tokens_BT = torch.ones(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
        if mask_BT is not None:
            tokens_BT = tokens_first(mask_BT, mask_BT)
        state = self._initial_state(len(embedded))
        if cache is not None and cache.is_initialized:
            state = cache.read([part.shape for part in state], embedded.device)
        # In training the batch normalizations see tokens only, unless asked for otherwise.
        every = mask_BT is None or not (self.training and self.config.pad_aware_batch_norm)
        rows = TokenRows(tokens_BT.t(), every)
        read = self._read(embedded.transpose(0, 1), tokens_BT.sum(1), rows, state, bool(wanted))
        own_TB, next_TB, supervised_TB = read.distances[:3]
        features = after_columns(read.features_SBE.transpose(0, 1), mask_BT)
        recorded = [state_at_columns(states.transpose(0, 1), mask_BT, before) for states, before in read.states]
        attend = wants_attentions(self.config, output_attentions)
        return PRPNModelOutput(
            last_hidden_state=features,
            hidden_states=kept_states([*recorded, features], wanted),
            past_key_values=store_state(cache, use_cache, read.state, embedded.shape[1], batch_dim=1),
            token_mask=mask_BT,
            distances=_at_tokens(own_TB, mask_BT)[:, None],
            next_distances=_at_tokens(next_TB, mask_BT),
            syd_distances=None if supervised_TB is None else _at_tokens(supervised_TB, mask_BT)[:, None],
            attentions=tuple(_at_tokens(w, mask_BT) for w in read.attentions) if attend else None,
        )

    def _initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """State before any token; every part has the sentences in its second dimension."""
        config, like_BE = self.config, self.embed_tokens.weight.new_zeros(batch_size, self.config.embedding_size)
        distances = torch.full((config.num_slots, batch_size), FAR, device=like_BE.device)
        tape = like_BE.new_zeros(config.num_slots, batch_size, 2 * config.layer_size)
        return (like_BE[None], distances, *[tape] * config.num_layers, *self.parser.start(like_BE))

    def _read(
        self, embeddings_TBE: Tensor, count_B: Tensor, rows: TokenRows, state: tuple[Tensor, ...], record: bool
    ) -> "_Read":
        """Run the three networks over rows whose tokens stand first."""
        config = self.config
        if self.training and len(rows) < 2:
            raise ValueError(
                f"Batch normalization needs at least two tokens in training, and there are {len(rows)}. Give more, or "
                "call eval()."
            )
        features_before, distances_before, *rest = state
        tapes, parser_state = rest[: config.num_layers], tuple(rest[config.num_layers :])
        distances = self.parser(embeddings_TBE, rows, parser_state, count_B)
        distances_SB = torch.cat([distances_before.to(distances.own_TB), distances.own_TB])
        read_gate, predict_gate = gates_of(
            distances_SB, distances.own_TB, distances.next_TB, config.gate, config.resolution
        )
        hidden, attentions, new_tapes = embeddings_TBE, [], []
        recorded: list[tuple[Tensor, Tensor | None]] = [(hidden, None)] if record else []
        for layer, tape in zip(self.layers, tapes, strict=True):
            hidden, tape_SBD, weights = layer(hidden, read_gate, tape)
            attentions.append(weights)
            if record:
                recorded.append((hidden, tape[-1, :, : config.layer_size]))
            new_tapes.append(last_entries(tape_SBD, count_B, config.num_slots))
        past = tapes[-1][..., : config.layer_size].to(hidden.dtype)
        features_TBE, weights = self.predictor(torch.cat([past, hidden]), predict_gate, rows)
        features_SBE = torch.cat([features_before.to(features_TBE), features_TBE])
        new_state = (
            last_entries(features_SBE, count_B, 1),
            last_entries(distances_SB, count_B, config.num_slots),
            *new_tapes,
            *distances.state,
        )
        return _Read(features_SBE, distances, (*attentions, weights), recorded, new_state)


def _at_tokens(values_TB: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Values [T, B, ...] of tokens that stand first, at the columns of the input [B, T, ...]; 0 where no token is."""
    values_BT = values_TB.transpose(0, 1)
    if mask_BT is None:
        return values_BT
    # The column before the first is only read at columns that get 0.
    columns = after_columns(torch.cat([values_BT[:, :1], values_BT], 1), mask_BT)
    return columns.masked_fill(~mask_BT.view(*mask_BT.shape, *[1] * (columns.dim() - 2)), 0)


class _Read(NamedTuple):
    """What the three networks say of T tokens."""

    features_SBE: Tensor
    """[1 + T, B, E] before the first token, and after every token."""
    distances: Distances
    attentions: tuple[Tensor, ...]
    """[T, B, N] each."""
    states: list[tuple[Tensor, Tensor | None]]
    """Of the embeddings and every reading layer: outputs [T, B, *], and what was before the first one."""
    state: tuple[Tensor, ...]


# ---------------------------------------------------------------------------------------------- language model
class PRPNForCausalLM(DistanceLanguageModel, PRPNPreTrainedModel, GenerationMixin):
    """PRPN with its output layer: next-token log-probabilities, training objective, trees, stock generation."""

    network_class = PRPNModel
    supervision_remedy = "set parsing_network='recurrent'"

    @property
    def learns_from_trees(self) -> bool:
        """Whether the parsing network has supervised distances (PRPN-SYD)."""
        return self.config.parsing_network == "recurrent"

    def output_features(self, output: RecurrentModelOutput) -> Tensor:
        """Features of the predict network with dropout [B, T, E]; see `RecurrentLanguageModel`."""
        return drop(output.last_hidden_state, self.config.dropout, self.training)

    def parse(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        word_ends: Tensor | None = None,
        method: str = "distance",
        decoder: Decoder = "unbiased",
        distances: str | None = None,
        num_beams: int | None = None,
    ) -> ParseOutput:
        """Trees of given sentences, and their probabilities as text.

        The surprisal of token t is `-token_log_probs[:, t]`, in nats.

        Args:
            input_ids: [B, T], one sentence per row; missing begin and end tokens are added.
            attention_mask: [B, T], 1 = token; None: everything but runs of `pad_token_id` at both ends.
            word_ends: [B, T], True at the last piece of every word: the distances at the beginnings of words count.
            method: only "distance" is possible.
            decoder: "unbiased", or "biased" to the right, as the authors of PRPN decode (see `distances_to_spans`).
            distances: "supervised" (those of PRPN-SYD that learn from gold trees) or "language_model"; default: the
                first where there are any.
            num_beams: has no effect: the words alone determine the distances, and so the tree.

        Returns:
            `ParseOutput` with one tree per sentence; `log_probs` [B, 1] is log p(sentence and its end), and
            `token_log_probs` [B, T] log p(token | beginning, tokens before).

        Raises:
            ValueError: for unknown options, distances that the model does not have, and bad input.

        Cost: one pass over the text.
        """
        fields = {"language_model": "distances"}
        if self.learns_from_trees:
            fields = {"supervised": "syd_distances", **fields}
        distances = next(iter(fields)) if distances is None else distances
        if distances not in fields:
            raise ValueError(f"There are no distances {distances!r}. This model has {list(fields)}.")
        return self._parse_distances(input_ids, attention_mask, word_ends, method, decoder, fields[distances], layer=0)


class PRPNForSequenceClassification(RecurrentSequenceClassifier, PRPNPreTrainedModel):
    """PRPN with a classifier on the features after the last token."""

    network_class = PRPNModel
    dropout_field = "dropout"
