"""Slow, obvious versions: documents of sentences of token ids -> contexts of whole sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class PackedContexts:
    """Per context its token ids and the number of the sentence of each (1, 2, ...); what was cut and left out."""

    input_ids: list[list[int]] = field(default_factory=list)
    sentence_ids: list[list[int]] = field(default_factory=list)
    num_cut: int = 0
    num_left_out: int = 0


def pack_contexts(
    documents: Sequence[Sequence[Sequence[int]]],
    context_length: int,
    max_sentence_tokens: int | None = None,
    end_of_document_id: int | None = None,
) -> PackedContexts:
    """Pack sentences into contexts, in order; a sentence that does not fit into the open context opens the next.

    Sentences longer than `max_sentence_tokens` are left out; those longer than a context are cut into pieces. The end
    token of a document that has a sentence left is a sentence of its own, but opens no context.
    """
    packed = PackedContexts()

    def append(ids: list[int]) -> None:
        number = packed.sentence_ids[-1][-1] + 1 if packed.sentence_ids[-1] else 1
        packed.input_ids[-1] += ids
        packed.sentence_ids[-1] += [number] * len(ids)

    for document in documents:
        kept = [list(ids) for ids in document if max_sentence_tokens is None or len(ids) <= max_sentence_tokens]
        packed.num_left_out += len(document) - len(kept)
        for ids in kept:
            packed.num_cut += len(ids) > context_length
            for start in range(0, len(ids), context_length):
                piece = ids[start : start + context_length]
                if not packed.input_ids or len(packed.input_ids[-1]) + len(piece) > context_length:
                    packed.input_ids.append([])
                    packed.sentence_ids.append([])
                append(piece)
        if kept and end_of_document_id is not None and len(packed.input_ids[-1]) < context_length:
            append([end_of_document_id])
    return packed
