"""One LSTM layer over rows of unequal length, with the state after the last token of each row.

Shapes: B rows, T inputs, I input size, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


def lstm_layer(
    inputs_BTI: Tensor, state: tuple[Tensor, Tensor], weights: Sequence[Tensor], lengths_B: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run one layer.

    Args:
        inputs_BTI: inputs; those of a row stand first.
        state: h and c before the first input, [B, H] each.
        weights: of the inputs [4 H, I], of h [4 H, H], and two biases [4 H]: gates in the order of `nn.LSTM`.
        lengths_B: how many inputs each row has, perhaps none; None = T.

    Returns:
        Outputs [B, T, H], and the state (h, c), each [B, H], after the last input of each row.

    Cost: T steps of one cell for all rows.
    """
    options = (True, 1, 0.0, torch.is_grad_enabled(), False)  # biases, layers, dropout, train, bidirectional
    old = tuple(tensor[None].to(inputs_BTI) for tensor in state)
    if lengths_B is None or inputs_BTI.shape[1] == 1:
        outputs, *new = torch.lstm(inputs_BTI, old, list(weights), *options, True)
        if lengths_B is not None:
            new = [torch.where(lengths_B[:, None] > 0, *pair) for pair in zip(new, old, strict=True)]
        return outputs, (new[0][0], new[1][0])
    # A row may hold no token at all; packing does not know that: such rows read one input and keep their state.
    lengths = lengths_B.clamp_min(1).cpu()
    packed = pack_padded_sequence(inputs_BTI, lengths, batch_first=True, enforce_sorted=False)
    begin = tuple(tensor[:, packed.sorted_indices] for tensor in old)
    data, *new = torch.lstm(packed.data, packed.batch_sizes, begin, list(weights), *options)
    packed = PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    outputs, _ = pad_packed_sequence(packed, batch_first=True, total_length=inputs_BTI.shape[1])
    has_token = (lengths_B > 0)[:, None]
    pairs = zip(new, old, strict=True)
    hidden, cell = (torch.where(has_token, n[0, packed.unsorted_indices], o[0]) for n, o in pairs)
    return outputs, (hidden, cell)


__all__ = ["lstm_layer"]
