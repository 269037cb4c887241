# SPDX-License-Identifier: Apache-2.0
"""Trees of a neural parser for text that has none, by Stanza (Qi et al. 2020): "silver" trees to train on."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

INSTALL = "pip install '.[silver]'"


def load_parser(
    language: str = "en",
    package: str | None = None,
    folder: Path | None = None,
    *,
    split_words: bool = True,
    device: str | None = None,
) -> Any:
    """Load a pipeline of Stanza that splits words, tags and parses; models that are missing are downloaded.

    Args:
        language: code of the language, such as en, de, zh-hans.
        package: parser among those that Stanza has for the language; default: Stanza's own choice.
        folder: where Stanza's models are; default: ~/stanza_resources, or what STANZA_RESOURCES_DIR names.
        split_words: split words and punctuation as the treebank of the parser does; False: white space separates them.
        device: of torch; default: a GPU if there is one.

    Returns:
        `stanza.Pipeline`; a line of text is a sentence.

    Raises:
        ImportError: Stanza is not installed.
        ValueError: Stanza has no parser for the language, or its models can be neither found nor downloaded.
    """
    try:
        import stanza
    except ImportError as error:
        raise ImportError(f"silver trees are made by Stanza: {INSTALL}") from error
    try:
        parser = stanza.Pipeline(
            language,
            processors={"tokenize": "default", "pos": "default", "constituency": package or "default"},
            package=None,
            **({} if folder is None else {"dir": str(folder)}),
            download_method=stanza.DownloadMethod.REUSE_RESOURCES,
            tokenize_no_ssplit=True,
            tokenize_pretokenized=not split_words,
            device=device,
            verbose=False,
        )
        if "constituency" not in parser.processors:  # Stanza only warns of unknown packages
            raise ValueError(f"it has no package {package or 'default'} that parses.")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Stanza cannot load a parser of {language!r}: {' '.join(str(error).split())} Its parsers are listed on "
            "https://stanfordnlp.github.io/stanza/constituency.html. Without a network, copy the folder "
            "stanza_resources from another machine, and name it by --models."
        ) from error
    return parser


def silver_trees(parser: Any, lines: Iterable[str], batch_size: int = 50) -> Iterator[str]:
    """Parse sentences.

    Args:
        parser: of `load_parser`.
        lines: one sentence each, none blank.
        batch_size: sentences that are parsed together.

    Yields:
        A line of brackets per sentence, such as `(ROOT (S (NP (PRP We)) (VP (VBP agree)) (. .)))`.

    Raises:
        ValueError: a line from which the parser reads no word.
    """
    for document in parser.stream(lines, batch_size=batch_size):
        if not document.sentences:
            raise ValueError(f"the parser finds no word in {document.text!r}. Leave the line out")
        yield str(document.sentences[0].constituency)
