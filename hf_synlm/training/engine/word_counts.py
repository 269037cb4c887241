# SPDX-License-Identifier: Apache-2.0
"""Words of training batches, for checkpoints at numbers of words (`keep_at_words`)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.vocabulary import word_final_ids
from hf_synlm.evaluation.text.words import unknown_ids, word_starts


class WordCounter:
    """Counts the words of a batch on the host: `num_words` where the batch has it, else tokens that begin or end one.

    Where the vocabulary marks beginnings, the first token after a special one, of a row, or of a sentence of
    `sentence_ids` begins a word, too. In a vocabulary of characters a white space lies between words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        vocabulary = tokenizer.get_vocab()
        size, has_spaces = max(vocabulary.values()) + 1, " " in vocabulary
        starts_V = torch.zeros(size, dtype=torch.bool) if has_spaces else word_starts(tokenizer, size, [])
        self.marks_starts = starts_V is not None
        self.words_V = torch.tensor(word_final_ids(tokenizer)) if starts_V is None else starts_V
        self.apart_V = torch.zeros(size, dtype=torch.bool)  # no part of a word
        spaces = {index for token, index in vocabulary.items() if token.isspace()}
        self.apart_V[list({*tokenizer.all_special_ids, *spaces} - unknown_ids(tokenizer))] = True

    def __call__(self, batch: Mapping[str, Any]) -> int:
        """Count."""
        if "num_words" in batch:
            return int(batch["num_words"])
        ids_BT = batch["input_ids"]
        words_BT, apart_BT = self.words_V[ids_BT], self.apart_V[ids_BT]
        if self.marks_starts:
            words_BT |= F.pad(apart_BT[:, :-1], (1, 0), value=True)
            if "sentence_ids" in batch:
                words_BT[:, 1:] |= batch["sentence_ids"].diff() != 0
        return int((words_BT & ~apart_BT & batch.get("attention_mask", torch.ones_like(ids_BT)).bool()).sum())
