# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of README.md and docs/: run `python docs/build_hooks/pictures.py` in the checkout.

tree.svg in docs/assets/ shows a sentence with the tree and the surprisals of `rnng-mini`; speed.svg the ratios of
docs/speed.md; gpst-learning.svg, pcfg-growth.svg and free-text.svg the tables beside them. Look at each picture after
it is made.
"""

import csv
import re
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.viz import plot_bars, surprisals_in_bits, tree_to_svg

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "docs" / "assets"
MODEL = ROOT / "model_cards" / "rnng-mini"
SENTENCE = "the men and women who serve our nation deserve our thanks ."
NUM_BEAMS = 10

LOOK = {"svg.fonttype": "none", "svg.hashsalt": "hf_synlm", "font.size": 9}
# A picture that a page loads as a file does not know the colors of the page, but it knows if the reader prefers dark.
STYLE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


def tree_picture() -> str:
    """Parse the sentence and draw it.

    Returns:
        An `<svg>` element.
    """
    model, tokenizer = load_pretrained(str(MODEL))
    (parsed,) = parse_sentences(model, tokenizer, [SENTENCE.split()], num_beams=NUM_BEAMS)
    best = parsed.hypotheses[0]
    return tree_to_svg(parsed.words, best.spans, best.labels, surprisals=surprisals_in_bits(parsed))


def read_table(path: Path) -> list[dict[str, str]]:
    """Read a table with commas.

    Args:
        path: the file.

    Returns:
        The cells of each row by column.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    return [dict(zip(header, row, strict=True)) for row in rows]


def speed_ratios() -> dict[str, float]:
    """Read the tables of the authors' programs in docs/speed.md.

    Returns:
        For each kind of work the smallest ratio, which is the first number of its cell.
    """
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    section = page.partition("## Beside the authors' programs\n")[2].partition("\n## ")[0]
    ratios = {}
    for table in re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        for cells in rows:
            row = dict(zip(header, cells, strict=True))
            ratios[row["work"]] = float(row["ratio"].split()[0])
    return ratios


def speed_picture(path: Path) -> None:
    """Draw how much faster hf_synlm is than the authors' programs.

    Args:
        path: the file to write.
    """
    ratios = speed_ratios()
    title = "Smallest ratio measured, one CPU thread, November 2026"
    axis = "time of the authors' program / time of hf_synlm"
    plot_bars(path, list(ratios), {axis: list(ratios.values())}, title=title, axis=axis, digits=1)


def draw_lines(axes: Axes, rows: list[dict[str, str]], name: str, x: str, y: str) -> None:
    """Draw a line for each name.

    Args:
        axes: where to draw.
        rows: rows of a table.
        name: column of the names.
        x: column of the places to the right.
        y: column of the heights.
    """
    for line in dict.fromkeys(row[name] for row in rows):
        points = [(float(row[x]), float(row[y])) for row in rows if row[name] == line]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=line)


def learning_picture(path: Path) -> None:
    """Draw how good the trees of `gpst_mini` are after how much text, a line for each run.

    Args:
        path: the file to write.
    """
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        axes = figure.subplots()
        draw_lines(axes, read_table(ASSETS / "gpst-learning.csv"), "run", "million_tokens", "f1")
        for name, value in (("right branching", 39.8), ("balanced", 24.3)):
            axes.axhline(value, color="gray", linestyle="--", linewidth=1)
            place = {"xytext": (-3, -3), "textcoords": "offset points", "ha": "right", "va": "top"}
            axes.annotate(name, (1, value), xycoords=("axes fraction", "data"), color="gray", **place)
        axes.set(xlabel="million tokens read", ylabel="sentence F1 (chart)")
        axes.legend(loc="lower right", frameon=False)
        figure.savefig(path, metadata={"Date": None})


def free_text_picture(path: Path) -> None:
    """Draw SyntaxGym against words of training: lines join published means, dots are runs of ours.

    Args:
        path: the file to write.
    """
    scores: dict[str, dict[float, list[float]]] = {}
    for row in read_table(ASSETS / "free-text.csv"):
        of_model = scores.setdefault(row["model"], {})
        of_model.setdefault(float(row["million_words"]), []).append(float(row["syntaxgym_31_suites"]))
    colors = {"RNNG": "C0", "LSTM": "C1", "GPT-2": "C2", "3-gram": "C4", "5-gram": "C3"}
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        axes = figure.subplots()
        for name, runs in scores.items():
            model, _, published = name.partition(", ")
            if published:
                means = {words: sum(found) / len(found) for words, found in runs.items()}
                axes.plot(*zip(*means.items(), strict=True), "o--", color=colors[model], mfc="none", label=name)
            else:
                for words, found in runs.items():
                    axes.plot([words] * len(found), found, "o", color=colors[model], label=name)
        axes.set(xscale="log", xlabel="million words", ylabel="SyntaxGym, 31 suites", ylim=(0, 80))
        axes.set_xticks([1, 5, 14, 42], ["1", "5", "14", "42"], minor=False)
        axes.set_xticks([], minor=True)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        figure.savefig(path, metadata={"Date": None})


def growth_picture(path: Path) -> None:
    """Draw how the time of a training step of PCFGs grows, on logarithmic axes, a panel for each cause.

    Args:
        path: the file to write.
    """
    rows = read_table(ASSETS / "pcfg-growth.csv")
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        causes = list(dict.fromkeys(row["cause"] for row in rows))
        for axes, cause in zip(figure.subplots(1, len(causes), sharey=True), causes, strict=True):
            panel = [row for row in rows if row["cause"] == cause]
            draw_lines(axes, panel, "grammar", "size", "time")
            axes.set(xscale="log", yscale="log", xlabel=cause)
            sizes = [row["size"] for row in panel if row["grammar"] == panel[-1]["grammar"]]
            axes.set_xticks([int(size) for size in sizes], sizes)
            axes.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
            axes.minorticks_off()
            axes.legend(loc="upper left", frameon=False)
        figure.supylabel("time of a step (dense 30/60, 20 words: 1)", fontsize=9)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Write the pictures."""
    opening, rest = tree_picture().split("\n", 1)
    (ASSETS / "tree.svg").write_text(f"{opening}\n{STYLE}\n{rest}\n", encoding="utf-8")
    speed_picture(ASSETS / "speed.svg")
    learning_picture(ASSETS / "gpst-learning.svg")
    growth_picture(ASSETS / "pcfg-growth.svg")
    free_text_picture(ASSETS / "free-text.svg")


if __name__ == "__main__":
    main()
