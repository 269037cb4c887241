# SPDX-License-Identifier: Apache-2.0
"""Predict network of PRPN: features of the next token, from an attention to the states whose gates are open.

The slow and obvious version is `predict` in `tests/reference/prpn.py`. The network has no recurrence: the attention of
all tokens is a band of one matrix product.

Shapes: T tokens, B sentences, N slots, S = N + T entries of the tape, H hidden size, E embedding size, R rows of a
batch normalization.

Source: Shen et al. 2018, section 5.2; `PredictNetwork.py` and `blocks.py` of the authors' code.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_synlm.core.matrix_products import OneDNNLinear
from hf_synlm.models.prpn.parser import TokenRows, drop
from hf_synlm.models.prpn.reader import ATTENTION_EPSILON


def gated_softmax(logits: Tensor, gate: Tensor) -> Tensor:
    """Attention weights [..., N] under gates in [0, 1].

    u_s = gate_s exp(logit_s - max logit);    weight_s = u_s / (sum u + 1e-8)

    The maximum is that of all slots, open or not. Where all gates are shut, all weights are about 0.
    """
    weights = (logits - logits.max(-1, keepdim=True).values).exp() * gate
    return weights / (weights.sum(-1, keepdim=True) + ATTENTION_EPSILON)


class ResidualBlock(nn.Module):
    """u -> ReLU(BN(W_2 drop(ReLU(BN(W_1 u)))) + u)."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.inner, self.inner_norm = OneDNNLinear(size, size), nn.BatchNorm1d(size)
        self.outer, self.outer_norm = OneDNNLinear(size, size), nn.BatchNorm1d(size)
        self.dropout = dropout

    def forward(self, rows_RD: Tensor) -> Tensor:
        """Rows [R, size] of the same shape."""
        inner = drop(F.relu(self.inner_norm(self.inner(rows_RD))), self.dropout, self.training)
        return F.relu(self.outer_norm(self.outer(inner)) + rows_RD)


class PredictNetwork(nn.Module):
    """Features of the next token.

    key = drop(W_k drop(h_t) + b_k);    z_t = attention of the key over the N states before h_t, under the gates g'
    features = tanh(BN(W_o drop(blocks([h_t ; z_t])) + b_o))
    """

    def __init__(self, hidden_size: int, feature_size: int, num_blocks: int, dropout: float) -> None:
        super().__init__()
        self.key = OneDNNLinear(hidden_size, hidden_size)
        self.blocks = nn.ModuleList(ResidualBlock(2 * hidden_size, dropout) for _ in range(num_blocks))
        self.output = OneDNNLinear(2 * hidden_size, feature_size)
        self.output_norm = nn.BatchNorm1d(feature_size)
        self.dropout = dropout

    def forward(self, tape_SBH: Tensor, gate_TBN: Tensor, rows: TokenRows) -> tuple[Tensor, Tensor]:
        """Features [T, B, E] after every token (0 at positions that do not count) and attention weights [T, B, N].

        `tape_SBH` are states of the N tokens before the first one, then of the T tokens, oldest first, as in the gates
        g'.
        Cost: T B (H^2 + S H + 2 H E), and 8 H^2 for each block, multiplications.
        """
        hidden_TBH = tape_SBH[gate_TBN.shape[2] :]
        read_TBH, attention_TBN = self._attend(hidden_TBH, tape_SBH, gate_TBN)
        features = rows.take(torch.cat([hidden_TBH, read_TBH.to(hidden_TBH.dtype)], 2))
        for block in self.blocks:
            features = block(features)
        features = self.output(drop(features, self.dropout, self.training))
        features = self.output_norm(features).tanh()
        return rows.put(features), attention_TBN

    def _attend(self, hidden_TBH: Tensor, tape_SBH: Tensor, gate_TBN: Tensor) -> tuple[Tensor, Tensor]:
        """Read the states before each token [T, B, H]; attention weights [T, B, N]."""
        key_TBH = self.key(drop(hidden_TBH, self.dropout, self.training))
        key_BTH = drop(key_TBH, self.dropout, self.training).transpose(0, 1)
        tape_BSH = tape_SBH.transpose(0, 1)
        steps, batch, slots = gate_TBN.shape
        # Slot n of token t is entry t + n of the tape.
        time, slot = (torch.arange(length, device=gate_TBN.device) for length in (steps, slots))
        band_BTN = (time[:, None] + slot).expand(batch, -1, -1)
        products_BTS = torch.bmm(key_BTH, tape_BSH.transpose(1, 2)) * hidden_TBH.shape[2] ** -0.5
        attention_BTN = gated_softmax(products_BTS.gather(2, band_BTN), gate_TBN.transpose(0, 1))
        weights_BTS = torch.zeros_like(products_BTS).scatter(2, band_BTN, attention_BTN.to(products_BTS.dtype))
        return torch.bmm(weights_BTS, tape_BSH).transpose(0, 1), attention_BTN.transpose(0, 1)
