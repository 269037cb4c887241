"""Make the pictures of README.md and docs/: run `python docs/build_hooks/pictures.py` in the checkout.

docs/assets/tree.svg shows a sentence with the tree and the surprisals of `rnng-mini`; docs/assets/speed.svg compares
the times of the authors' programs with ours; docs/assets/gpst-learning.svg and free-text.svg show the csv files beside
them.
"""

import csv
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.hub.checkpoint import load_pretrained
from hf_synlm.viz import plot_bars, surprisals_in_bits, tree_to_svg

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "model_cards" / "rnng-mini"
SENTENCE = "the men and women who serve our nation deserve our thanks ."
NUM_BEAMS = 10

# Time of the authors' program divided by ours: the smallest ratio of several measurements, from docs/speed.md.
SPEED = {
    "RNNG: training step, 32 sentences": 4.0,
    "RNNG: training step, 128 sentences": 6.4,
    "RNNG: search, action beam 100": 2.2,
    "GPST: training step, 0.6 M parameters": 1.3,
    "GPST: training step, 144 M parameters": 1.1,
    "GPST: parsing, 144 M parameters, beam 20": 3.0,
    "ON-LSTM: training step": 1.9,
    "PRPN: training step": 1.6,
    "PaLM: training step": 1.2,
}
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


def speed_picture(path: Path) -> None:
    """Draw how much faster hf_synlm is than the authors' programs.

    Args:
        path: the file to write.
    """
    title = "Smallest ratio measured; float32 on one CPU thread, torch 2.13, November 2026"
    axis = "time of the authors' program / time of hf_synlm"
    plot_bars(path, list(SPEED), {axis: list(SPEED.values())}, title=title, axis=axis, digits=1)


def learning_picture(path: Path) -> None:
    """Draw how good the trees of `gpst_mini` are after how much text, a line for each run.

    Args:
        path: the file to write.
    """
    runs: dict[str, list[tuple[float, float]]] = {}
    with (ROOT / "docs" / "assets" / "gpst-learning.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            runs.setdefault(row["run"], []).append((float(row["million_tokens"]), float(row["f1"])))
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        axes = figure.subplots()
        for name, points in runs.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        for name, value in (("right branching", 39.8), ("balanced", 24.3)):
            axes.axhline(value, color="gray", linestyle="--", linewidth=1)
            axes.annotate(name, (0, value), xytext=(2, 3), textcoords="offset points", color="gray")
        axes.set(xlabel="million tokens read", ylabel="sentence F1 (chart)")
        axes.legend(loc="lower right", frameon=False)
        figure.savefig(path, metadata={"Date": None})


def free_text_picture(path: Path) -> None:
    """Draw SyntaxGym against words of training: lines join published means, dots are runs of ours.

    Args:
        path: the file to write.
    """
    scores: dict[str, dict[float, list[float]]] = {}
    with (ROOT / "docs" / "assets" / "free-text.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
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


def main() -> None:
    """Write the pictures."""
    folder = ROOT / "docs" / "assets"
    folder.mkdir(exist_ok=True)
    opening, rest = tree_picture().split("\n", 1)
    (folder / "tree.svg").write_text(f"{opening}\n{STYLE}\n{rest}\n", encoding="utf-8")
    speed_picture(folder / "speed.svg")
    learning_picture(folder / "gpst-learning.svg")
    free_text_picture(folder / "free-text.svg")


if __name__ == "__main__":
    main()
