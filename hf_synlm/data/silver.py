"""Trees of a parser for text that has none, "silver" trees to train on: by our span parser, or by Stanza."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_synlm.data.collate import collate_contexts, word_ends_from_offsets
from hf_synlm.data.treebank import TreebankSentence

# What treebanks write otherwise than other text.
_PLAIN = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
_PLAIN |= {"``": '"', "''": '"', "\\/": "/"}
_NOT = Regex(r"(?<!\S)n't(?!\S)")
# Batches of a window are sentences of similar length.
_BATCHES_IN_WINDOW = 64
INSTALL = "pip install 'hf_synlm[silver]'"


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
            "stanza_resources from a machine that has one, and name it by --models."
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
            raise ValueError(f"the parser finds no word in {document.text!r}: leave the line out")
        yield str(document.sentences[0].constituency)


def tokenizer_of_treebanks(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """A tokenizer that reads words as treebanks write them (-LRB-, ``, n't) as this one reads (, " and not."""
    backend = tokenizer.backend_tokenizer
    rules = [normalizers.Replace(mark, plain) for mark, plain in _PLAIN.items()] + [normalizers.Replace(_NOT, "not")]
    backend.normalizer = normalizers.Sequence([*rules, *([backend.normalizer] if backend.normalizer else [])])
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=tokenizer.model_max_length, **special)


def parse_words(
    model: Any, codes: Sequence[tuple[list[int], list[bool]]], sentences: Sequence[Sequence[str]]
) -> list[tuple[TreebankSentence, float]]:
    """Trees of sentences, and the log-probability of each tree divided by its words; `codes` are of `encode_words`."""
    rows = [{"input_ids": ids, "word_ends": ends} for ids, ends in codes]
    batch = collate_contexts(rows, model.config.pad_token_id)
    output = model.parse(
        **{name: batch[name].to(model.device) for name in ("input_ids", "attention_mask", "word_ends")}
    )
    found = []
    for row, (words, log_prob) in enumerate(zip(sentences, output.log_probs[:, 0].tolist(), strict=True)):
        place = {0: 0} | {end: number for number, end in enumerate(output.word_ends[row], 1)}
        spans = zip(output.labels[row][0], output.spans[row][0], strict=True)
        tree = tuple((label, place[i], place[j]) for label, (i, j) in spans)
        found.append((TreebankSentence(tuple(words), tuple(output.tags[row]), tree, ""), log_prob / len(words)))
    return found


@torch.no_grad()
def span_parser_trees(
    model: Any, tokenizer: PreTrainedTokenizerBase, sentences: Iterable[Sequence[str]], batch_size: int = 50
) -> Iterator[tuple[TreebankSentence, float] | None]:
    """Parse sentences with a span parser.

    Args:
        model: `SpanParserForTokenClassification`.
        tokenizer: its tokenizer.
        sentences: their words, at least one each.
        batch_size: sentences that are parsed together.

    Yields:
        A tree per sentence, in their order, and the log-probability of the tree in nats per word: how sure the parser
        is. None for a sentence that has more tokens than the encoder reads, or a word without one.
    """
    most = model.config.max_position_embeddings
    limit = math.inf if most is None else most - 2
    left = iter(sentences)
    while window := list(islice(left, batch_size * _BATCHES_IN_WINDOW)):
        codes = _encode(tokenizer, window, limit)
        order = sorted(codes, key=lambda row: len(codes[row][0]))
        found: dict[int, tuple[TreebankSentence, float]] = {}
        for rows in (order[first : first + batch_size] for first in range(0, len(order), batch_size)):
            trees = parse_words(model, [codes[row] for row in rows], [window[row] for row in rows])
            found |= dict(zip(rows, trees, strict=True))
        yield from (found.get(row) for row in range(len(window)))


def _encode(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]], limit: float
) -> dict[int, tuple[list[int], list[bool]]]:
    """`encode_words` of many sentences, by their numbers; without those that have too many tokens, or words of none."""
    texts = [" ".join(words) for words in sentences]
    batch = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    found = {}
    for row, (words, ids, offsets) in enumerate(
        zip(sentences, batch["input_ids"], batch["offset_mapping"], strict=True)
    ):
        if len(ids) <= limit:
            with suppress(ValueError):  # a word of characters that the tokenizer leaves out
                found[row] = ids, word_ends_from_offsets(offsets, words)
    return found
