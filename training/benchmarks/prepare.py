"""Preparing a corpus against tokenizing its sentences."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from benchmarks.sides import Sides

from hf_synlm.data.samples import sample_path
from hf_synlm.data.text import split_sentences
from hf_synlm.data.tokenizers import load_tokenizer, train_bpe_tokenizer
from hf_synlm.training.programs.prepare_text import CorpusArguments, prepare

COPIES = 8
SENTENCES_PER_CALL = 1000


def prepare_corpus(num_processes: int) -> Sides:
    """Text files to shards, next to the tokenizer alone on sentences that are split already.

    Args:
        num_processes: processes that encode.

    Returns:
        Both sides.
    """
    temporary = tempfile.TemporaryDirectory(prefix="benchmark_prepare_")
    folder = Path(temporary.name)
    text = sample_path("raw.train.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line]
    train_bpe_tokenizer(lines, 8192).save_pretrained(folder / "tokenizer")
    # Running text, so that there is something to split; every copy gets another number, so that no cache helps.
    paragraphs = [" ".join(lines[k : k + 5]) + f" {copy}." for copy in range(COPIES) for k in range(0, len(lines), 5)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    (folder / "validation.txt").write_text("One sentence.", encoding="utf-8")
    tokenizer = load_tokenizer(folder / "tokenizer")
    sentences = [sentence for paragraph in paragraphs for sentence in split_sentences(paragraph)]
    arguments = CorpusArguments(
        train_files=[str(folder / "text.txt")],
        validation_files=[str(folder / "validation.txt")],
        tokenizer_name=str(folder / "tokenizer"),
        preprocessing_num_workers=num_processes,
    )

    def ours() -> np.ndarray:
        shutil.rmtree(Path(temporary.name) / "out", ignore_errors=True)  # keeps the folder alive as long as this step
        return np.asarray(prepare(arguments, folder / "out").train.shard(0).tokens)

    def theirs() -> list[int]:
        ids: list[int] = []
        for first in range(0, len(sentences), SENTENCES_PER_CALL):
            some = sentences[first : first + SENTENCES_PER_CALL]
            for encoded in tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]:
                ids += encoded
        return ids

    def check() -> None:
        assert ours().tolist() == theirs(), "the shards differ from the tokens of the sentences"

    return Sides(ours, theirs, check)
