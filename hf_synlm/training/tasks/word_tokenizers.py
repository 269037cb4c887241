# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a run on sentences: named, or made from the words of the training sentences."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_synlm.data.files import folder_writer, read_json, write_json
from hf_synlm.data.text import errors_at
from hf_synlm.data.tokenizers import save_tokenizer
from hf_synlm.hub.checkpoint import check_tokenizer_source
from hf_synlm.training.arguments.sentences import SentenceFileArguments, Sentences

MADE_FROM = "made_from.json"


def load_or_make_tokenizer(
    accelerator: Accelerator,
    data: SentenceFileArguments,
    name: str | None,
    output_dir: Path,
    read_words: Callable[[], Sentences],
    *special_tokens: str,
) -> PreTrainedTokenizerBase:
    """Load a fast tokenizer, or make one (`name` is `None`) and keep it in `output_dir/tokenizer` for a resumed run.

    The main process makes it from the words of the training sentences, the others load it. One that lacks a special
    token (such as "pad_token"), or was made from something else, is refused.
    """
    source = name
    if source is None:
        source = str(output_dir / "tokenizer")
        made_from = {option: getattr(data, option) for option in data.tokenizer_options.split()}
        made_from["training_words"] = words_fingerprint(read_words())
        if accelerator.is_main_process and not Path(source).is_dir():
            with folder_writer(Path(source)) as partial:
                sentences = tqdm(read_words(), desc="making the tokenizer", unit=" sentences")
                with errors_at(", ".join(data.train_files)):
                    tokenizer = data.make_tokenizer(sentences, end_token="eos_token" in special_tokens)
                save_tokenizer(tokenizer, partial)
                write_json(partial / MADE_FROM, made_from)
        accelerator.wait_for_everyone()
        known = read_json(Path(source, MADE_FROM), "Delete the folder. The tokenizer is then made again.")
        changed = {option: value for option, value in made_from.items() if known.get(option) != value}
        if changed:
            raise ValueError(
                f"The tokenizer in {source} was made with { ({name: known.get(name) for name in changed}) }, but now "
                f"{changed} is asked for. Repeat the old values, pass this tokenizer as --tokenizer-name, or choose "
                "another --output-dir."
            )
    check_tokenizer_source(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    for kind in special_tokens:
        if getattr(tokenizer, kind) is None:
            raise ValueError(f"The tokenizer {source!r} has no {kind}. Set this token and save the tokenizer.")
    return tokenizer


def words_fingerprint(sentences: Sentences) -> str:
    """Hash the words of `sentences`; names of files do not count."""
    digest = hashlib.sha256()
    for words in sentences:
        digest.update("\0".join(words).encode() + b"\n")
    return digest.hexdigest()[:16]
