# SPDX-License-Identifier: Apache-2.0
"""Running text for recurrent language models: one long stream of tokens, read in rows and segments.

The sentences of a corpus stand one after the other with a boundary token `</s>` before, between and after them:

    </s> the cat sleeps </s> it rains </s>

A stream of N tokens has N - 1 predictions, one for each token after the first. `StreamRows` cuts it into B rows of
equal length that a model reads side by side, segment after segment, with its recurrent state carried along:

    row 0   </s> the | cat sleeps       predicts  the cat | sleeps </s>
    row 1   </s> it  | rains            predicts  it rains | </s>

Shapes: B rows, T columns of a segment, N tokens of the stream, S sentences, M gold spans.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_synlm.data.collate import LABEL_PADDING
from hf_synlm.trees.codecs import pad_inputs
from hf_synlm.trees.spans import Span


@dataclasses.dataclass
class SentenceCode:
    """A sentence as token ids, with its gold structure.

    Attributes:
        input_ids: the n token ids, without `</s>`; n = 0 for an empty line.
        distances: of `gold_distances`, n + 1 values.
        spans: of `gold_spans`, half-open in the sentence's tokens.
    """

    input_ids: Sequence[int]
    distances: Sequence[float] | None = None
    spans: Sequence[Span] | None = None


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """A corpus as one stream; `make_stream` makes it.

    Attributes:
        ids: int32 [N] token ids; the first and the last are the boundary.
        starts: int64 [S + 1] position of the first token of each sentence, and N. Sentence s with the boundary before
            and after it is ids[starts[s] - 1 : starts[s + 1]].
        distances: float32 [N] gold distance of the gap before each token, NaN at the first; `None` without gold trees.
        spans: int64 [M, 2] half-open gold spans in positions of the stream, in the order of their ends; `None` without.
    """

    ids: np.ndarray
    starts: np.ndarray
    distances: np.ndarray | None = None
    spans: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_sentences(self) -> int:
        """Number of sentences."""
        return len(self.starts) - 1


def make_stream(sentences: Iterable[SentenceCode], boundary_id: int) -> TokenStream:
    """Join sentences to a stream.

    Args:
        sentences: the sentences in their order; each kind of gold structure is given for all of them or for none.
        boundary_id: id of `</s>`.

    Returns:
        The stream. The gold distance of the first token of every sentence becomes the largest of all.

    Raises:
        ValueError: there are no sentences.

    Cost: O(N).
    """
    ids, starts = [np.array([boundary_id], dtype=np.int32)], [1]
    distances: list[Any] = []
    spans: list[Any] = []
    for sentence in sentences:
        start, count = starts[-1], len(sentence.input_ids)
        ids.append(np.array([*sentence.input_ids, boundary_id], dtype=np.int32))
        starts.append(start + count + 1)
        if sentence.distances is not None:
            distances.append(np.array(sentence.distances, dtype=np.float32))
        if sentence.spans is not None:
            ordered = sorted(sentence.spans, key=lambda span: (span[1], -span[0]))
            spans.append(np.array(ordered, dtype=np.int64).reshape(-1, 2) + start)
    if len(starts) == 1:
        raise ValueError("there are no sentences. Name other files")
    positions = np.array(starts, dtype=np.int64)
    gold = None
    if distances:
        gold = np.concatenate([np.array([np.nan], dtype=np.float32), *distances])
        gold[positions[:-1]] = np.nanmax(gold)
    return TokenStream(np.concatenate(ids), positions, gold, np.concatenate(spans) if spans else None)


class StreamRows:
    """A stream cut into rows of equal length, to be read segment by segment.

    Row r reads the tokens at offset + r L .. offset + (r + 1) L - 1 and predicts the token after each, so that every
    prediction belongs to exactly one row. The stream has N - 1 = B L + remainder predictions. In training the remainder
    is left out, the first `offset` of it at the beginning; in evaluation (`complete`) rows are long enough for all
    predictions, and the last rows end early.

    Args:
        stream: the stream.
        num_rows: number of rows (B).
        offset: number of predictions to leave out at the beginning.
        complete: leave nothing out at the end.

    Raises:
        ValueError: there are fewer predictions than rows.
    """

    def __init__(self, stream: TokenStream, num_rows: int, *, offset: int = 0, complete: bool = False):
        self.stream, self.num_rows, self.offset = stream, num_rows, offset
        self.remainder, self.length = stream_remainder(len(stream), num_rows)
        if complete:
            self.length = -(-(len(stream) - 1 - offset) // num_rows)
        self._stop = len(stream) - 1 if complete else offset + num_rows * self.length

    def segment(self, start: int, length: int, rows: range | None = None) -> dict[str, Any]:
        """Read columns start .. start + length - 1, up to the end of the rows.

        Args:
            start: first column.
            length: number of columns (T).
            rows: the rows to read; default: all.

        Returns:
            `input_ids` and `shift_labels` (the token after each; -100 at padding) int64 [B, T]; `attention_mask` int64
            [B, T] only if a row ends early; `distances` float32 [B, T] and `spans` (per row the gold spans that end
            right before one of the columns; half-open in columns, the begin is negative where it lies in an earlier
            segment) if the stream has them. Spans that begin before their row does are left out: no state has read
            their words.
        """
        rows = range(self.num_rows) if rows is None else rows
        columns = np.arange(start, min(start + length, self.length))
        position_BT = self.offset + np.array(rows)[:, None] * self.length + columns
        is_token = position_BT < self._stop
        position_BT = np.where(is_token, position_BT, self._stop - 1)
        ids, targets = (torch.from_numpy(self.stream.ids[position_BT + k].astype(np.int64)) for k in (0, 1))
        token_mask = torch.from_numpy(is_token)
        batch: dict[str, Any] = {"input_ids": ids, "shift_labels": targets.masked_fill(~token_mask, LABEL_PADDING)}
        if not is_token.all():
            batch["attention_mask"] = token_mask.long()
        if self.stream.distances is not None:
            distances: Tensor = torch.from_numpy(self.stream.distances[position_BT])
            batch["distances"] = distances.masked_fill(~token_mask, torch.nan)
        if self.stream.spans is not None:
            found = (
                _spans_at(self.stream.spans, int(row[0]), int(row[0]) + int(mask.sum()), origin=int(row[0]))
                for row, mask in zip(position_BT, is_token, strict=True)
            )
            batch["spans"] = [[(i, j) for i, j in spans if i >= -start] for spans in found]
        return batch


def _spans_at(spans_M2: np.ndarray, first: int, stop: int, *, origin: int) -> list[Span]:
    """Spans that end right before the positions first .. stop - 1, counted from `origin`."""
    low, high = np.searchsorted(spans_M2[:, 1], [first, stop])
    return [(i - origin, j - origin) for i, j in spans_M2[low:high].tolist()]


def stream_remainder(num_tokens: int, num_rows: int) -> tuple[int, int]:
    """The predictions left over by rows of equal length, and that length.

    Args:
        num_tokens: length of the stream (N).
        num_rows: number of rows (B).

    Returns:
        (N - 1) mod B and (N - 1) div B.

    Raises:
        ValueError: there are fewer predictions than rows.
    """
    if num_rows < 1 or num_tokens <= num_rows:
        raise ValueError(
            f"a stream of {num_tokens} tokens cannot be cut into {num_rows} rows of at least one. Use fewer rows or "
            "more text"
        )
    length, remainder = divmod(num_tokens - 1, num_rows)
    return remainder, length


def collate_framed(
    stream: TokenStream, sentences: Sequence[int], pad_token_id: int, *, gold: bool = True
) -> dict[str, Any]:
    """Collate single sentences, each with a boundary before and after it, padded on the right.

    Args:
        stream: the stream that contains the sentences.
        sentences: their numbers.
        pad_token_id: fills `input_ids`.
        gold: give the gold structure that the stream has.

    Returns:
        `input_ids`, `attention_mask` and `shift_labels` (the token after each; -100 at padding and at the last
        boundary) int64 [B, T]; `distances` float32 [B, T] (NaN at padding and at the first boundary) and `spans`
        (half-open in columns) if the stream has them.
    """
    frames = [(int(stream.starts[s]) - 1, int(stream.starts[s + 1])) for s in sentences]
    rows = [torch.from_numpy(stream.ids[first:stop].astype(np.int64)) for first, stop in frames]
    following = [torch.cat([row[1:], row.new_tensor([LABEL_PADDING])]) for row in rows]
    batch: dict[str, Any] = {
        **pad_inputs(rows, pad_token_id),
        "shift_labels": pad_sequence(following, batch_first=True, padding_value=LABEL_PADDING),
    }
    if gold and stream.distances is not None:
        found = [torch.from_numpy(stream.distances[first:stop].copy()) for first, stop in frames]
        for distances in found:
            distances[0] = torch.nan
        batch["distances"] = pad_sequence(found, batch_first=True, padding_value=torch.nan)
    if gold and stream.spans is not None:
        # Spans that end right before the first boundary belong to the sentence before.
        batch["spans"] = [_spans_at(stream.spans, first + 1, stop, origin=first) for first, stop in frames]
    return batch
