# SPDX-License-Identifier: Apache-2.0
"""Parsing networks of PRPN and PRPN-SYD: syntactic distances of all tokens, and the gates that follow from them.

The slow and obvious versions are `convolutional_distances`, `recurrent_distances` and `gates` in
`tests/reference/prpn.py`.

A parsing network does not read the reading network, so it runs over all tokens at once. Token t has the syntactic
distance d_t of the gap before it, and d'_t, a guess of d_t+1, which the predict network needs before it has seen token
t + 1. Both lie in (0, 1). Time is the first dimension; the state before the first token holds the last entries of the
earlier tokens, the oldest first.

PRPN-SYD is described in an appendix (A.4.2 of Du et al. 2020), and its code was never released.
`RecurrentParsingNetwork` is a reconstruction: the parts and their order are the paper's; sizes, activations,
normalization, dropout, and that d' is kept, are choices made here.

Shapes: T tokens, B sentences, N slots, L lookback, E embedding size, H hidden size, R rows of a batch normalization.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_synlm.core.losses import widened
from hf_synlm.core.matrix_products import linear
from hf_synlm.core.module_tools import is_adapted, saved_whole, unwrapped, weight_of
from hf_synlm.recurrent.layers import keep_mask, lstm_layer

FAR = 1e4
"""Distance of the tokens before the first one: so large that all gates to them are shut."""


class Distances(NamedTuple):
    """Syntactic distances of T tokens."""

    own_TB: Tensor
    """d, the distance of the gap before each token."""
    next_TB: Tensor
    """d', the guess of the distance of the gap after it."""
    supervised_TB: Tensor | None
    """Distances of the gap before each token for supervision (PRPN-SYD)."""
    state: tuple[Tensor, ...]
    """State after the last token: each [*, B, *]."""


# ---------------------------------------------------------------------------------------------- gates
def openness(distance: Tensor, other: Tensor, gate: str, resolution: float) -> Tensor:
    """How far a token sees past a gap, in [0, 1]: 1 where its own distance a is not smaller than b, that of the gap.

    Hard: alpha = clamp((a - b) / resolution + 1, 0, 1). Soft: alpha = sigmoid(10 (a - b) / resolution + 5).

    Source: `ParsingNetwork.py` of the authors' code; Eq. 6 of the paper has another offset.
    """
    difference = (distance - other) / resolution
    if gate == "hard":
        return F.hardtanh(difference + 1, 0.0, 1.0)
    return torch.sigmoid(10 * difference + 5)


def gates_of(
    distances_SB: Tensor, own_TB: Tensor, next_TB: Tensor, gate: str, resolution: float
) -> tuple[Tensor, Tensor]:
    """Gates of reading and of predicting, g and g', each [T, B, N], the oldest slot first.

    g_t[s] = prod_{j = 0..s} alpha(d_t, d_t-j) belongs to the s-th state before token t (s = 0: that of token t - 1),
    and g'_t[s], the same with d'_t for d_t, to the same state. `distances_SB` are those of the N tokens before the
    first one, then of the T tokens. Cost: O(T B N log N).
    """
    slots = len(distances_SB) - len(own_TB)
    passed_TBN = distances_SB.unfold(0, slots, 1)[1:].flip(2)
    reading, predicting = (
        _running_product(openness(values[..., None], passed_TBN, gate, resolution)).flip(2)
        for values in (own_TB, next_TB)
    )
    return reading, predicting


def _running_product(values: Tensor) -> Tensor:
    """`cumprod` of the last dimension N in log N products; that of PyTorch waits for the device in backward."""
    step = 1
    while step < values.shape[-1]:
        values = values * F.pad(values[..., :-step], (step, 0), value=1.0)
        step *= 2
    return values


# ---------------------------------------------------------------------------------------------- parsing networks
def drop(values: Tensor, p: float, training: bool) -> Tensor:
    """Drop every number independently."""
    return values * keep_mask(values.shape, p, values) if training and p else values


class TokenRows:
    """The positions of a [T, B] grid that a batch normalization sees, as rows; with `every`, padding too."""

    def __init__(self, tokens_TB: Tensor, every: bool) -> None:
        self.shape = tokens_TB.shape
        self.places = None if every else tokens_TB.nonzero(as_tuple=True)

    def __len__(self) -> int:
        return self.shape.numel() if self.places is None else len(self.places[0])

    def take(self, values: Tensor) -> Tensor:
        """Rows [R, ...] of values [T, B, ...], time by time."""
        return values.flatten(0, 1) if self.places is None else values[self.places]

    def put(self, rows: Tensor) -> Tensor:
        """Rows [R, ...] at their places in [T, B, ...]; 0 elsewhere."""
        if self.places is None:
            return rows.unflatten(0, self.shape)
        return rows.new_zeros(*self.shape, *rows.shape[1:]).index_put(self.places, rows)


class LookbackFeatures(nn.Module):
    """Features of every token and the L before it: drop(ReLU(BN(W [x_t-L ; ... ; x_t] + b)))."""

    def __init__(self, input_size: int, hidden_size: int, lookback: int, dropout: float) -> None:
        super().__init__()
        # Holds the parameters; it is applied as one multiplication of the rows that count.
        self.convolution = nn.Conv1d(input_size, hidden_size, lookback + 1)
        self.norm = nn.BatchNorm1d(hidden_size)
        self.lookback, self.dropout = lookback, dropout

    def forward(self, inputs_SBE: Tensor, rows: TokenRows) -> Tensor:
        """Features [R, H] of inputs [L + T, B, E]."""
        windows_TBEL = inputs_SBE.unfold(0, self.lookback + 1, 1)
        weight = weight_of(self.convolution).flatten(1)
        features = linear(rows.take(windows_TBEL).flatten(1), weight, self.convolution.bias)
        return drop(F.relu(self.norm(features)), self.dropout, self.training)


class ConvolutionalParsingNetwork(nn.Module):
    """The parsing network of PRPN: features of L + 1 embeddings, d from one half of them, d' from the other.

    (d_t, d'_t) = sigmoid of two linear maps of the halves of drop(ReLU(BN(W [drop(e_t-L) ; ... ; drop(e_t)] + b)))

    Source: Shen et al. 2018, section 4.2, and `ParsingNetwork.py` of the authors' code, which has a sigmoid where the
    paper has a ReLU, and takes d' from here and not from the reading network.
    """

    def __init__(self, embedding_size: int, hidden_size: int, lookback: int, dropout: float) -> None:
        super().__init__()
        self.features = LookbackFeatures(embedding_size, hidden_size, lookback, dropout)
        self.score = nn.Conv1d(hidden_size, 2, 1, groups=2)  # holds the parameters of the two maps
        self.dropout = dropout

    def start(self, like_BE: Tensor) -> tuple[Tensor, ...]:
        """State before the first token, of the type and the sentences of `like_BE`."""
        return (like_BE.new_zeros(self.features.lookback, *like_BE.shape),)

    def forward(self, embeddings_TBE: Tensor, rows: TokenRows, state: tuple[Tensor, ...], count_B: Tensor) -> Distances:
        """Distances of all tokens; the state [L, B, E] are the embeddings of the L tokens before the first one.

        The first `count_B` tokens of a sentence count; the new state is that after the last of them. `rows` are the
        positions that the batch normalization sees. Cost: T B (L + 1) E H multiplications.
        """
        embeddings_SBE = torch.cat([state[0].to(embeddings_TBE), embeddings_TBE])
        features_RH = self.features(drop(embeddings_SBE, self.dropout, self.training), rows)
        halves = features_RH.unflatten(1, (2, -1))
        score_R2 = torch.einsum("rgh,gh->rg", halves, weight_of(self.score).squeeze(2)) + self.score.bias
        own, following = rows.put(widened(score_R2).sigmoid()).unbind(2)
        return Distances(own, following, None, (last_entries(embeddings_SBE, count_B, len(state[0])),))


class RecurrentParsingNetwork(nn.Module):
    """The parsing network of PRPN-SYD (a reconstruction), with distances for reading and others for supervision.

        h = LSTM_w(drop(e));    g = drop(ReLU(BN(W [drop(h_t-L) ; ... ; drop(h_t)] + b)));    s = drop(LSTM_d(g))
        (d, d') = sigmoid(FF_lm(s));    d_syd = FF_syd(s);    FF = linear, ReLU, linear

    Both LSTMs run from left to right: a language model must not see later tokens. Gates need distances in (0, 1). The
    supervised distances have no bounds: a ranking loss with a margin would drive bounded ones to the bounds, where
    they are equal and get no gradient.

    Source: Du et al. 2020, appendix A.4.2.
    """

    def __init__(self, embedding_size: int, hidden_size: int, lookback: int, dropout: float) -> None:
        super().__init__()
        self.word_lstm = saved_whole(nn.LSTM(embedding_size, hidden_size))
        self.features = LookbackFeatures(hidden_size, hidden_size, lookback, dropout)
        self.distance_lstm = saved_whole(nn.LSTM(hidden_size, hidden_size))
        self.language_model_head, self.supervised_head = (
            nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, outputs))
            for outputs in (2, 1)
        )
        self.dropout = dropout

    def start(self, like_BE: Tensor) -> tuple[Tensor, ...]:
        """State before the first token, of the type and the sentences of `like_BE`."""
        for name in ("word_lstm", "distance_lstm"):
            _refuse_adapters(getattr(self, name), name)
        size = self.word_lstm.hidden_size
        lengths = (1, 1, self.features.lookback, 1, 1)
        return tuple(like_BE.new_zeros(length, len(like_BE), size) for length in lengths)

    def forward(self, embeddings_TBE: Tensor, rows: TokenRows, state: tuple[Tensor, ...], count_B: Tensor) -> Distances:
        """Distances of all tokens; see `ConvolutionalParsingNetwork.forward`.

        The state: of LSTM_w state and cell [1, B, H], states of the last L tokens [L, B, H]; state and cell of LSTM_d.
        Cost: T sequential steps of two LSTM cells, and T B (L + 1) H^2 multiplications.
        """
        embedded = drop(embeddings_TBE, self.dropout, self.training)
        words_TBH, word_state = run_lstm(self.word_lstm, embedded, state[:2], count_B)
        words_SBH = torch.cat([state[2].to(words_TBH), words_TBH])
        features_RH = self.features(drop(words_SBH, self.dropout, self.training), rows)
        local_TBH = rows.put(features_RH)
        states_TBH, distance_state = run_lstm(self.distance_lstm, local_TBH, state[3:], count_B)
        states_TBH = drop(states_TBH, self.dropout, self.training)
        own, following = widened(self.language_model_head(states_TBH)).sigmoid().unbind(2)
        supervised = widened(self.supervised_head(states_TBH)).squeeze(2)
        lookback = last_entries(words_SBH, count_B, len(state[2]))
        return Distances(own, following, supervised, (*word_state, lookback, *distance_state))


def run_lstm(
    lstm: nn.LSTM, inputs_TBE: Tensor, state: tuple[Tensor, ...], count_B: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run an LSTM of one layer over sentences of `count_B` tokens each, from a state and a cell [1, B, H].

    Returns states [T, B, H] (0 after the last token), and state and cell after the last token of each sentence.
    """
    before = state[0][0], state[1][0]
    states_BTH, final = lstm_layer(inputs_TBE.transpose(0, 1), before, list(lstm.parameters()), count_B)
    return states_BTH.transpose(0, 1), tuple(part[None] for part in final)


def last_entries(values_SB: Tensor, count_B: Tensor, length: int) -> Tensor:
    """The `length` entries [length, B, ...] before the first position after each sentence, oldest first.

    `values_SB` are `length` entries from before, and then those of T tokens, `count_B` of which belong to the sentence.
    """
    entry = count_B + torch.arange(length, device=count_B.device)[:, None]
    return values_SB[entry, torch.arange(len(count_B), device=count_B.device)]


def _refuse_adapters(layer: Any, name: str) -> None:
    """Raise ValueError if a layer, called `name` in the message, has an adapter: it would have no effect."""
    if is_adapted(layer):
        raise ValueError(
            f"{name} has an adapter, but {type(unwrapped(layer)).__name__} reads the weights directly, so the "
            "adapter has no effect. Leave this layer out of target_modules and target_parameters."
        )
