# SPDX-License-Identifier: Apache-2.0
"""Prepare a corpus for training: text -> sentences -> token ids -> shards on disk.

    python training/prepare_text.py --output-dir shards/owt \
        --dataset-name Skylion007/openwebtext --streaming --validation-split none \
        --tokenizer-name openai-community/gpt2 --preprocessing-num-workers 16
    python training/prepare_text.py --output-dir shards/owt --config gpst_small_owt

Text comes from files (text, parquet, json, csv, treebanks) or from a data set of the Hub. If none is named, it is the
embedded corpus: its raw text and the words of its trees. The
output folder contains `tokenizer/`, `train/` and `validation/`; `PreparedCorpus` reads the latter two. After a run was
killed, the same command resumes it, and makes the same shards.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from hf_synlm.data import shards, sources as sources_of_text
from hf_synlm.data.arguments import ArgumentParser, config_flags, read_config_file
from hf_synlm.data.encoding import block_sentences, tokenizer_sha256
from hf_synlm.data.files import folder_writer, write_json
from hf_synlm.data.shards import (
    MADE_FROM_FILE,
    PreparedCorpus,
    check_made_from,
    differences,
    read_record,
    write_corpus,
)
from hf_synlm.data.sources import TreebankFiles, read_blocks
from hf_synlm.data.text import PathLike, errors_at
from hf_synlm.data.tokenizers import load_tokenizer, save_tokenizer, train_bpe_tokenizer, train_wordpiece_tokenizer
from hf_synlm.hub.checkpoint import check_tokenizer_source
from hf_synlm.training.arguments.base import find_config
from hf_synlm.training.arguments.corpus import SPLITS, CorpusArguments, PrepareArguments, is_prepared

TRAINED_BY = ("tokenizer_type", "tokenizer_vocab_size", "tokenizer_min_frequency")  # how a tokenizer is trained


@dataclass
class PreparedText:
    """What `prepare` makes: both corpora, and a tokenizer with the special tokens of a syntactic language model."""

    tokenizer: PreTrainedTokenizerBase
    train: PreparedCorpus
    validation: PreparedCorpus

    def describe(self) -> str:
        """A line per split: sources and counts."""
        splits = {name: getattr(self, name) for name in SPLITS}
        return "\n".join(
            f"{name} text ({', '.join(corpus.source_names())}): {corpus.describe()}" for name, corpus in splits.items()
        )


def prepare(arguments: CorpusArguments, folder: PathLike, *, verify: bool = False) -> PreparedText:
    """Prepare training and validation text, or open what was prepared before.

    One process at a time works on a folder; others wait and then find the result. Shards that a killed run has finished
    are kept. If the arguments name no text, a complete folder is used as it is. A folder that was prepared from other
    text or with other options is refused, and so is a damaged shard; `verify` compares checksums, not only sizes.

    Cost: O(characters). Memory: text and token ids of one shard, independent of the size of the corpus; but a trainer
    of tokenizers keeps every distinct word.
    """
    folder = Path(folder)
    if not is_prepared(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not is_prepared(folder):  # by another process
                trees = [*arguments.train_trees, *arguments.validation_words]
                TreebankFiles(trees, arguments.drop_punctuation).check()
                _check_documents(arguments)
                _prepare_tokenizer(arguments, folder / "tokenizer")
                tokenizer = load_tokenizer(folder / "tokenizer")
                for split in SPLITS:
                    _prepare_split(arguments, split, tokenizer, folder / split)
    elif arguments.takes_finished:
        _check_given(arguments, folder)
    else:
        _prepare_tokenizer(arguments, folder / "tokenizer")
    prepared = PreparedText(
        load_tokenizer(folder / "tokenizer"),
        PreparedCorpus(folder / "train", verify),
        PreparedCorpus(folder / "validation", verify),
    )
    for split in SPLITS:
        made_from = getattr(prepared, split).made_from
        if arguments.takes_finished:
            expected = {**made_from, "tokenizer": _describe_tokenizer(prepared.tokenizer)}
        else:
            expected = {"format": made_from["format"], **_made_from(arguments, split, prepared.tokenizer)}
        check_made_from(folder / split, expected)
    return prepared


def _made_from(arguments: CorpusArguments, split: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Everything that determines the shards of a split, as JSON."""
    sources, limits = arguments.sources(split)
    return {
        "sources": [source.describe() for source in sources],
        "documents": limits,
        "text": asdict(arguments.text_options),
        "tokenizer": _describe_tokenizer(tokenizer),
        "cuts": [shards.SHARD_CHARACTERS, sources_of_text.BLOCK_CHARACTERS, sources_of_text.LINE_LIMIT],
    }


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {"sha256": tokenizer_sha256(tokenizer), "vocab_size": len(tokenizer)}


def _check_given(arguments: CorpusArguments, folder: Path) -> None:
    """If no text is named, refuse options of text and tokenizer that differ from those of the finished folder."""
    made_with = read_record(folder / "tokenizer" / MADE_FROM_FILE)
    # A tokenizer that was named has not been trained, so a configuration may say how it would have been.
    untrained = {name for name in TRAINED_BY if name not in made_with}
    made_with |= PreparedCorpus(folder / "train").made_from["text"]
    if arguments.tokenizer_name is not None:
        _prepare_tokenizer(arguments, folder / "tokenizer")
    for item in fields(CorpusArguments):
        value = getattr(arguments, item.name)
        default = item.default if item.default is not MISSING else []
        free = {"tokenizer_name", "preprocessing_num_workers", "streaming"} | untrained
        if item.name not in free and value != default and value != made_with.get(item.name):
            known = f"was prepared with {made_with[item.name]!r}" if item.name in made_with else "is used as it is"
            raise ValueError(f"{item.name} is {value!r}, but {folder} {known}. Leave the option out, or name the text.")


# ---------------------------------------------------------------------------------------------- tokenizer
def _prepare_tokenizer(arguments: CorpusArguments, folder: Path) -> None:
    """Save the named tokenizer, or train one on the training text; check a tokenizer that exists already."""
    if arguments.tokenizer_name is not None:
        check_tokenizer_source(arguments.tokenizer_name)
        tokenizer = load_tokenizer(arguments.tokenizer_name)
        made_from: dict[str, Any] = _describe_tokenizer(tokenizer)
        if folder.is_dir():
            changed = differences(_describe_tokenizer(load_tokenizer(folder)), made_from)
            if changed:
                raise ValueError(
                    f"The text in {folder.parent} is encoded with another tokenizer than {arguments.tokenizer_name}: "
                    f"{'; '.join(changed)}. Use {folder} as tokenizer, or another folder for the text."
                )
            return
    else:
        sources, limits = arguments.sources("train")
        made_from = {name: getattr(arguments, name) for name in TRAINED_BY}
        made_from |= {"sources": [x.describe() for x in sources], "documents": limits, **asdict(arguments.text_options)}
        if folder.is_dir():
            check_made_from(folder, made_from)
            return
        train = train_bpe_tokenizer if arguments.tokenizer_type == "bpe" else train_wordpiece_tokenizer
        size, frequency = arguments.tokenizer_vocab_size, arguments.tokenizer_min_frequency
        sentences = tqdm(_sentences(arguments), desc="training the tokenizer", unit=" sentences")
        named = (path for source in sources for path in getattr(source, "paths", [str(arguments.dataset_name)]))
        with errors_at(", ".join(named)):
            tokenizer = train(sentences, size, min_frequency=frequency)
    with folder_writer(folder) as partial:
        save_tokenizer(tokenizer, partial)
        write_json(partial / MADE_FROM_FILE, made_from)


def _sentences(arguments: CorpusArguments) -> Iterator[str]:
    """Sentences of the training text."""
    sources, limits = arguments.sources("train")
    for block in read_blocks(sources, **limits):
        yield from filter(None, block_sentences(block.text, block.is_split, arguments.text_options))


# ---------------------------------------------------------------------------------------------- shards
def _check_documents(arguments: CorpusArguments) -> None:
    """Raise ValueError if validation would take all documents, before a tokenizer is trained on none."""
    sources, limits = arguments.sources("train")
    skipped = limits.get("skip_documents", 0)
    texts = [source for source in sources if not isinstance(source, TreebankFiles)]
    if skipped and not any(block.text for block in read_blocks(texts, skip_documents=skipped)):
        raise ValueError(
            f"There are too few documents to take {skipped} for validation. Pass --validation-files, or leave out "
            "--num-validation-documents to take a tenth of the sentences."
        )


def _prepare_split(arguments: CorpusArguments, split: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the shards of a split."""
    sources, limits = arguments.sources(split)
    write_corpus(
        folder,
        read_blocks(sources, **limits),
        tokenizer,
        arguments.text_options,
        _made_from(arguments, split, tokenizer),
        arguments.preprocessing_num_workers,
    )


# ---------------------------------------------------------------------------------------------- command line
def main(argv: Sequence[str] | None = None) -> int:
    """Prepare a corpus, or check a prepared one; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = ArgumentParser((PrepareArguments,), prog="prepare_text.py", allow_abbrev=False)
    text = "YAML file of a training script, or the name of a shipped one. Its text options are used unless given here."
    parser.add_argument("--config", help=text)
    try:
        path = parser.parse_known_args(argv)[0].config
        if path is not None:
            values = read_config_file(find_config(path))
            known = [*(item.name for item in fields(PrepareArguments)), "shard_tokens"]  # which the parser refuses
            argv = [*config_flags({name: values[name] for name in known if name in values}), *argv]
        arguments = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)[0]
        prepared = prepare(arguments, arguments.output_dir, verify=arguments.verify)
    except (ValueError, OSError, RuntimeError) as error:
        parser.exit(2, f"Error: {error}\n")
    sys.stdout.write(prepared.describe() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
