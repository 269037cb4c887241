"""Compose the text and the trees that the minis of `model_cards/` are trained and measured on, in `runs/data`.

    python training/release/mini_data.py SOURCES

SOURCES holds the corpora, which come from their owners, as one text or tree per row or line:

    text/novels_pd/{train,validation}.parquet            novels out of copyright: ELTeC-eng and 100_english_novels
    text/masc_brown_speeches/{train,validation}.parquet  with a column `source`, see FREE_SOURCES
    treebanks/gum_ccby, gum, dickens_benepar, craft      train.txt, valid.txt, test.txt
    restricted/ptb_sample                                the sample of the Penn Treebank that NLTK has; measuring only
    syntactic_eval/syntaxgym/suites, blimp/data          SyntaxGym's suites and BLiMP's paradigms; measuring only

`flat.*.txt` are the same words without their trees, (X w1 ... wn): the control of tree-lm-smollm2.
"""

import random
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset, concatenate_datasets

from hf_synlm.data.punctuation import drop_edge_punctuation, is_punctuation
from hf_synlm.data.samples import sample_path
from hf_synlm.data.text import split_sentences

OUT = Path("runs/data")
PIECE = 20_000  # characters of a document that sentences are taken from
FREE_SOURCES = ("masc_tagged", "state_union", "inaugural")
_LEAF = re.compile(r"\(\S+ [^()\s]+\)")


def write_text(sources: Path) -> None:
    """Text of gpst-mini: documents of novels, MASC and speeches."""
    for split, name in (("train", "text"), ("validation", "text.valid")):
        novels, prose = (
            Dataset.from_parquet(str(sources / "text" / corpus / f"{split}.parquet"))
            for corpus in ("novels_pd", "masc_brown_speeches")
        )
        prose = prose.filter(lambda row: row["source"] in FREE_SOURCES)
        both = concatenate_datasets([corpus.select_columns(["text"]) for corpus in (novels, prose)])
        both.to_parquet(OUT / f"{name}.parquet")


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


def main(sources: Path) -> None:
    """Write all files."""
    OUT.mkdir(parents=True, exist_ok=True)
    write_text(sources)
    write_sentences()
    banks, sample = sources / "treebanks", sources / "restricted" / "ptb_sample"
    gum, dickens, craft = (read_trees(banks / name / "train.txt") for name in ("gum_ccby", "dickens_benepar", "craft"))
    draw = random.Random(0)
    trees = gum * 2 + dickens + read_trees(sample_path("trees.train.txt")) + draw.sample(craft, 2400)
    draw.shuffle(trees)
    write_trees("trees.train.txt", trees)
    write_trees("flat.train.txt", [without_structure(tree) for tree in trees])
    valid = read_trees(*(banks / name / "valid.txt" for name in ("gum_ccby", "dickens_benepar")))
    valid += draw.sample(read_trees(banks / "craft" / "valid.txt"), 150)
    write_trees("trees.valid.txt", valid)
    write_trees("flat.valid.txt", [without_structure(tree) for tree in valid])
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
