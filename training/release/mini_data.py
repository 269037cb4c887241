# SPDX-License-Identifier: Apache-2.0
"""Compose the text and the trees that the minis of `model_cards/` are trained and measured on, in `runs/data`.

    python training/release/mini_data.py SOURCES

SOURCES holds the corpora, which come from their owners, as one text or tree per row or line:

    text/novels_pd/{train,validation}.parquet            novels out of copyright: ELTeC-eng and 100_english_novels
    text/masc_brown_speeches/{train,validation}.parquet  with a column `source`, see FREE_SOURCES
    treebanks/gum_ccby, gum, dickens_benepar, craft      train.txt, valid.txt, test.txt
    restricted/ptb_sample                                the sample of the Penn Treebank that NLTK has; measuring only
    syntactic_eval/syntaxgym/suites, blimp/data          SyntaxGym's suites and BLiMP's paradigms; measuring only

`trees.train.txt` has 2,400 sentences of CRAFT, for rnng-mini; `trees.all.txt` has all of them, for tree-lm-smollm2.
`flat.*.txt` are the same words without their trees, (X w1 ... wn): its control. `gold.*.txt` are `trees.*.txt` without
the speeches, to be read beside trees of a parser.
`free.1m.txt`, `free.5m.txt` and `free.valid.txt` are tokenized sentences, one per line, of 1 M, 5 M and 50,000 words
of the text of gpst-mini, for a parser to give them trees; the 1 M begin the 5 M, and `tokenizer` holds their pieces of
words. `free.masc.txt` are all such sentences of MASC.
"""

import random
import re
import shutil
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.punctuation import drop_edge_punctuation, is_punctuation
from hf_synlm.data.samples import sample_path
from hf_synlm.data.text import split_sentences
from hf_synlm.data.treebank import read_treebank
from hf_synlm.data.vocabulary import subword_tokenizer
from hf_synlm.evaluation.text.words import split_as_treebank

OUT = Path("runs/data")
PIECE = 20_000  # characters of a document that sentences are taken from
FREE_SOURCES = ("masc_tagged", "state_union", "inaugural")
FREE_WORDS = {"train": (5_000_000, 100_000), "validation": (50_000, 12_500)}  # of all authors, and at most of one
_HYPHENS = str.maketrans({"\u2010": "-", "\u2011": "-", "\xad": None})
_SENTENCE = re.compile(r"""["“(]*[A-Z](?:[^\W_]|[ ,;:?!."“”'’()$%&£—–…/-])*[.?!]["”)]*""")
# A single quotation mark, which the tokenizer takes for an apostrophe; a hyphen or period on one word only; a heading.
_DAMAGE = re.compile(r"(?<!\w)['’]|(?<!\w)[.-]\w|(?<!s)['’](?!\w)|\w-(?!\w)|[A-Z]{2} [A-Z]{2}")
_ABBREVIATION = re.compile(r"\.+|(Mr|Mrs|Ms|Messrs|Dr|St|Jr|Sr|Prof|Rev|Hon|Gen|Col|Capt|Lt|Sgt|No|vs|etc|(\w\.)*\w)\.")
_LEAF = re.compile(r"\(\S+ [^()\s]+\)")


def read_prose(sources: Path, split: str, of: Sequence[str] = FREE_SOURCES) -> Dataset:
    """Documents of MASC and speeches: `text` and `author`, which is the document's id."""
    prose = Dataset.from_parquet(str(sources / "text" / "masc_brown_speeches" / f"{split}.parquet"))
    prose = prose.filter(lambda row: row["source"] in of).rename_column("id", "author")
    return prose.select_columns(["text", "author"])


def read_text(sources: Path, split: str) -> Dataset:
    """Documents of novels, MASC and speeches."""
    novels = Dataset.from_parquet(str(sources / "text" / "novels_pd" / f"{split}.parquet"))
    return concatenate_datasets([novels.select_columns(["text", "author"]), read_prose(sources, split)])


def write_text(sources: Path) -> None:
    """Text of gpst-mini."""
    for split, name in (("train", "text"), ("validation", "text.valid")):
        read_text(sources, split).select_columns("text").to_parquet(OUT / f"{name}.parquet")


def write_sentences() -> None:
    """Sentences of pcfg-mini, from the text of gpst-mini: 2 to 25 words in lower case, without punctuation."""
    for source, name, count in (("text", "sentences", 40_000), ("text.valid", "sentences.valid", 1_000)):
        texts = list(Dataset.from_parquet(str(OUT / f"{source}.parquet"))["text"])
        random.Random(0).shuffle(texts)
        found: list[str] = []
        for text in texts:
            # A piece of every document, so that no author has more than a share.
            start = random.Random(len(text)).randrange(max(1, len(text) - PIECE))
            for sentence in split_sentences(text[start : start + PIECE].replace("\n", " "))[1:-1]:
                kept = (drop_edge_punctuation(word) for word in sentence.split() if not is_punctuation(word))
                words = " ".join(kept).lower().split()
                if 2 <= len(words) <= 25:
                    found.append(" ".join(words))
            if len(found) >= 2 * count:
                break
        random.Random(1).shuffle(found)
        (OUT / f"{name}.txt").write_text("\n".join(found[:count]) + "\n", encoding="utf-8")


def clean_sentences(documents: Dataset, of_author: int) -> list[str]:
    """Different sentences without damaged marks, about `of_author` words of each author, in an order that is drawn."""
    found: dict[str, None] = {}
    counts = Counter[str]()
    for row in random.Random(0).sample(range(len(documents)), len(documents)):
        document = documents[row]
        author = document["author"].partition(",")[0]  # "Dickens, Charles" is "Dickens"
        if counts[author] >= of_author or "wsj" in author:  # MASC has articles of the Penn Treebank's sample
            continue
        for paragraph in document["text"].translate(_HYPHENS).split("\n"):
            for line in split_sentences(paragraph):
                if _SENTENCE.fullmatch(line) and not _DAMAGE.search(line) and line not in found:
                    found[line] = None
                    counts[author] += len(line.split())
    return random.Random(1).sample(list(found), len(found))


def tokenized_sentences(lines: Sequence[str], splitter: PreTrainedTokenizerBase, limit: int) -> list[list[str]]:
    """The first sentences of 3 to 60 words, of up to `limit` words; where a period stayed on a word, none."""
    kept: list[list[str]] = []
    for parts in split_as_treebank(splitter, [line.split() for line in lines]):
        words = list(chain.from_iterable(parts))
        periods = (word for word in words if word.endswith("."))
        if 3 <= len(words) <= 60 and all(map(_ABBREVIATION.fullmatch, periods)):
            kept.append(words)
    return kept[: bisect_right(list(accumulate(map(len, kept))), limit)]


def write_free_text(sources: Path) -> None:
    """Sentences with punctuation, and the pieces of words of the first million words."""
    splitter = subword_tokenizer((tree.words for tree in read_treebank(OUT / "trees.train.txt")), 8192)
    train, valid = (
        tokenized_sentences(clean_sentences(read_text(sources, split), of_author), splitter, limit)
        for split, (limit, of_author) in FREE_WORDS.items()
    )
    million = train[: bisect_right(list(accumulate(map(len, train))), 1_000_000)]
    masc = clean_sentences(read_prose(sources, "train", ["masc_tagged"]), sys.maxsize)
    masc_train = tokenized_sentences(masc, splitter, sys.maxsize)
    for name, sentences in (("1m", million), ("5m", train), ("valid", valid), ("masc", masc_train)):
        (OUT / f"free.{name}.txt").write_text("".join(f"{' '.join(words)}\n" for words in sentences), encoding="utf-8")
    pieces = subword_tokenizer(million, 8192, min_frequency=8, byte_fallback=True)
    pieces.save_pretrained(OUT / "tokenizer")


def read_trees(*paths: Path | str) -> list[str]:
    """Trees of files, one per line."""
    lines = [line for path in paths for line in Path(path).read_text(encoding="utf-8").split("\n")]
    return [line for line in lines if line.strip()]


def write_trees(name: str, trees: Sequence[str]) -> None:
    """Write trees, one per line."""
    (OUT / name).write_text("\n".join(trees) + "\n", encoding="utf-8")


def without_structure(tree: str) -> str:
    """The words of a tree under one label."""
    return f"(X {' '.join(_LEAF.findall(tree))})"


def draw_trees(draw: random.Random, others: Sequence[str], banks: Path) -> tuple[list[str], list[str]]:
    """Trees for training, `others` and some of CRAFT, and for validation."""
    trees = [*others, *draw.sample(read_trees(banks / "craft" / "train.txt"), 2400)]
    draw.shuffle(trees)
    valid = read_trees(*(banks / name / "valid.txt" for name in ("gum_ccby", "dickens_benepar")))
    return trees, valid + draw.sample(read_trees(banks / "craft" / "valid.txt"), 150)


def main(sources: Path) -> None:
    """Write all files."""
    OUT.mkdir(parents=True, exist_ok=True)
    write_text(sources)
    write_sentences()
    banks, sample = sources / "treebanks", sources / "restricted" / "ptb_sample"
    gum, dickens, craft = (read_trees(banks / name / "train.txt") for name in ("gum_ccby", "dickens_benepar", "craft"))
    gold = gum * 2 + dickens
    others = gold + read_trees(sample_path("trees.train.txt"))
    draw = random.Random(0)
    for name, own, of in (("gold", random.Random(0), gold), ("trees", draw, others)):
        for split, trees in zip(("train", "valid"), draw_trees(own, of, banks), strict=True):
            write_trees(f"{name}.{split}.txt", trees)
    write_trees("flat.valid.txt", [without_structure(tree) for tree in trees])
    every = others + craft
    draw.shuffle(every)
    write_trees("trees.all.txt", every)
    write_trees("flat.all.txt", [without_structure(tree) for tree in every])
    write_free_text(sources)
    test = read_trees(banks / "gum" / "test.txt")
    write_trees("gum.test.txt", test)
    write_trees("gum100.txt", [tree for tree in test if 5 <= len(_LEAF.findall(tree)) <= 20][:100])
    write_trees("ptb.txt", read_trees(sample / "test.txt", sample / "valid.txt"))
    write_trees("ptb.train.txt", read_trees(sample / "train.txt"))
    write_trees("ptb.test.txt", read_trees(sample / "test.txt"))
    for bank in ("gum_ccby", "dickens_benepar", "craft"):  # of span-parser-mini
        for split in ("train", "valid"):
            write_trees(f"{bank}.{split}.txt", read_trees(banks / bank / f"{split}.txt"))
    write_trees("craft.test.txt", read_trees(banks / "craft" / "test.txt")[::9])
    for name, folder in (("syntaxgym", "syntaxgym/suites"), ("blimp", "blimp/data")):
        shutil.copytree(sources / "syntactic_eval" / folder, OUT / name, dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
