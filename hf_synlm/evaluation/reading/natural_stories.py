# SPDX-License-Identifier: Apache-2.0
"""Natural Stories (Futrell et al. 2021), a corpus of reading times that users fetch themselves."""

from pathlib import Path

import numpy as np
import pandas as pd

from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.reading.tables import Predictor, numbers, read_rows, split_given
from hf_synlm.evaluation.text.text_items import TextItem

MOVED = (
    "in processed_wordinfo.tsv, each time stands one row early, so a word gets the time of the row before; if the "
    "folder has processed_RTs.tsv, which is corrected (README of May 2025), that file is read"
)


def find_file(folder: Path, source: str, pattern: str, hint: str = "") -> Path:
    """The file of a folder, or of the folders in it, with the shortest name that fits."""
    found = sorted(folder.rglob(pattern), key=lambda path: (len(path.name), path))
    if not found:
        raise ValueError(f"--data {folder} holds no {pattern}{hint}. Name a clone of {source} by --data")
    return found[0]


STORIES = "github.com/languageMIT/naturalstories"


def read_text(folder: Path) -> tuple[pd.DataFrame, list[Path]]:
    """All words with `document`, `number`, `sentence_id`, `word_id`, `word` and `count`; and the files read."""
    words_file = find_file(folder, STORIES, "all_stories.tok")
    trees_file = find_file(folder, STORIES, "all-parses-aligned.txt.penn")
    counts_file = find_file(folder, STORIES, "freqs-1*.tsv")
    text = read_rows(words_file)
    sentences: dict[tuple[str, str], int] = {}
    for number, tree in enumerate(read_treebank(trees_file), 1):
        for leaf in tree.words:
            place = leaf.rpartition("/")[2].split(".")
            if len(place) > 1:  # a few leaves have no place
                sentences.setdefault((place[0], place[1]), number)
    ids = pd.Series([sentences.get(place) for place in zip(text["document"], text["number"], strict=True)])
    text["sentence_id"] = ids.ffill().astype(int)
    text["word_id"] = text.groupby("sentence_id").cumcount() + 1
    rows = [line.split("\t") for line in counts_file.read_text(encoding="utf-8").splitlines() if ".word\t" in line]
    counts = {code.removesuffix(".word"): float(count) for code, _, _, count, *_ in rows}
    text["count"] = [counts.get(f"{d}.{n}", np.nan) for d, n in zip(text["document"], text["number"], strict=True)]
    text.attrs["name"] = str(words_file)
    return text, [words_file, trees_file, counts_file]


def text_items(text: pd.DataFrame) -> list[TextItem]:
    """The sentences, for a model to read."""
    sentences = [rows for _, rows in text.groupby("sentence_id", sort=False)]
    return [TextItem(str(k), " ".join(r["word"]), int(r["document"].iloc[0])) for k, r in enumerate(sentences, 1)]


def read_times(folder: Path) -> tuple[pd.DataFrame, str, Path, list[str]]:
    """Rows with `document`, `number` and times; the column of the times, the file, and remarks."""
    for by_reader in folder.rglob("processed_RTs.tsv"):
        times = read_rows(by_reader).rename(columns={"WorkerId": "subject", "RT": "rt"})
        wrong = numbers(times, "correct") < 5
        again = times.duplicated(["subject", "document", "number"]).to_numpy()
        remark = f"left out: {wrong.sum():,} times of stories with fewer than 5 of 6 right answers"
        remark += f", and {again.sum():,} of stories read again" if again.any() else ""
        return times[~(wrong | again)].reset_index(drop=True), "rt", by_reader, [remark]
    means = find_file(folder, STORIES, "processed_wordinfo.tsv")
    times = read_rows(means)
    times["number"] = (times["number"].astype(int) + 1).astype(str)
    last = times.groupby("document")["number"].transform(lambda column: column.astype(int).max())
    times = times[times["number"].astype(int) < last].drop(columns="word").reset_index(drop=True)
    times.attrs["name"] = str(means)
    return times, "meanItemRT", means, [MOVED]


def read_gpt3(given: str, text: pd.DataFrame) -> Predictor | None:
    """GPT-3's log-probabilities of tokens (nats) as bits of words, if that is what a file holds.

    A token belongs to the word of its first character.
    """
    name, path, _ = split_given(given)
    if not path.name.endswith("_gpt3.csv"):
        return None
    tokens = read_rows(path)
    tokens["story"] = (tokens["story"].astype(int) + 1).astype(str)
    tokens["bits"] = -numbers(tokens, "logprob") / np.log(2)
    found = []
    for story, words in text.groupby("document", sort=False):
        own = tokens[tokens["story"] == story]
        begins = np.cumsum([0, *(len(token.strip()) for token in own["token"])])[:-1]
        ends = np.cumsum([len(word) for word in words["word"]])
        places = np.searchsorted(ends, begins, side="right").clip(max=len(words) - 1)
        sums = own["bits"].groupby(places).agg(lambda part: part.sum(skipna=False))
        found.append(pd.Series(sums.reindex(range(len(words))).to_numpy(), index=words.index))
    table = text[["document", "number", "word"]].assign(surprisal_bits=pd.concat(found))
    table.attrs["name"] = str(path)
    return Predictor(name, "surprisal_bits", table, path, {"context": "document"})
