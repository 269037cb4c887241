"""Hashes of tokenizers, also of a process of its own: `python -m tests.helpers.tokenizer_hashes`."""

import hashlib
import sys

from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.data.vocabulary import subword_tokenizer, word_tokenizer

NUM_SENTENCES = 1000


def sample_words():
    """The sentences of the embedded treebank, as words."""
    return [sentence.words for sentence in read_treebank(sample_path("trees.train.txt"))]


def hashes(sentences):
    """Hashes of tokenizers of these sentences."""
    made = [word_tokenizer(sentences, unknown="berkeley2", min_count=2)]
    made += [subword_tokenizer(sentences, 600, model=model) for model in ("bpe", "unigram")]
    return [hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest() for tokenizer in made]


if __name__ == "__main__":
    sys.stdout.write(" ".join(hashes(sample_words()[:NUM_SENTENCES])))
