"""Pictures: right places and numbers, well-formed markup, everything escaped."""

import dataclasses
import math
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given, strategies as st

from hf_synlm import GPSTForCausalLM, viz
from hf_synlm.core.outputs import ParseOutput
from hf_synlm.data.parsed import Hypothesis, ParsedSentence
from hf_synlm.evaluation.trees.baseline_trees import random_tree
from hf_synlm.trees.spans import right_branching
from hf_synlm.viz.layout import build_nodes, display_width, place_nodes
from hf_synlm.viz.plots import plot_lines
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import model_and_tokenizer
from tests.helpers.search_models import rnng

CAT = ("the cat sat down".split(), [(0, 2), (3, 4), (2, 4), (0, 4)], ["NP", "PRT", "VP", "S"])
NASTY = '<b>&amp; "q" it\'s ]]> שלום! 猫 na\u0308ive a\x00\ud800\uffffb {x_1}$%#~^\\ -- \u202e'.split()
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    """What the text elements of a picture say."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


# ------------------------------------------------------------------------------------------------------------- text
def test_sideways():
    assert viz.tree_to_text(*CAT).splitlines() == [
        "S ─┬─ NP ─┬─ the",
        "   │      └─ cat",
        "   └─ VP ─┬─ sat",
        "          └─ PRT ─── down",
    ]
    assert viz.tree_to_text(list("abcd"), [(1, 3), (0, 4)]) == "─┬─ a\n ├─┬─ b\n │ └─ c\n └─ d"
    assert viz.tree_to_text(["hello"], []) == "─ hello"
    assert viz.tree_to_text(["hello"], [(0, 1), (0, 1)], ["NP", "S"]) == "S ─── NP ─── hello"


def test_upright():
    lines = viz.tree_to_text(*CAT, style="upright").splitlines()
    assert [lines[0], *lines[-3:]] == ["   ┌────S──┐", " ┌─NP┐   │   PRT", " │   │   │    │", "the cat sat down"]
    assert viz.tree_to_text(["hello"], [], style="upright") == "hello"
    wide = viz.tree_to_text(["猫", "が", "寝る"], [(0, 2), (0, 3)], ["名詞句", "S"], style="upright").splitlines()
    assert wide[-1] == "猫  が 寝る" and display_width(wide[-1]) == 11
    # A label wider than its word pushes the next word away.
    assert (
        viz.tree_to_text(["a", "b"], [(0, 1), (0, 2)], ["WHADVP", "S"], style="upright").splitlines()[-1] == "   a   b"
    )


def test_words_that_disturb_a_terminal():
    lines = viz.tree_to_text(["a\nb", "שלום", "x\x1b[2J"], [(0, 3)]).splitlines()
    assert lines == ["─┬─ a b", " ├─ \u2068שלום\u2069", " └─ x\ufffd[2J"]


def test_very_long_sentences():
    words = [str(k) for k in range(1200)]
    assert viz.tree_to_text(words, right_branching(1200)).count("\n") == 1199
    assert len(texts(viz.tree_to_svg(words, right_branching(1200)))) == 1200
    assert viz.tree_to_latex(words, right_branching(1200)).count("coordinate") == 1199


# ------------------------------------------------------------------------------------------------------------ layout
@given(st.integers(1, 15), st.integers(0, 999))
def test_nothing_overlaps_and_parents_stand_above_their_words(length, seed):
    generator = random.Random(seed)
    words = ["w" * generator.randint(1, 8) for _ in range(length)]
    spans = random_tree(length, generator) + [(k, k + 1) for k in range(length) if generator.random() < 0.3]
    labels = ["L" * generator.randint(1, 20) for _ in spans]
    nodes, width = place_nodes(build_nodes(words, spans, labels), len, 2)
    assert len(nodes) == length + len(spans)
    assert sorted((node.label, node.start, node.end) for node in nodes if not node.is_word) == sorted(
        (label, *span) for label, span in zip(labels, spans, strict=True)
    )
    for node in nodes:
        left, right = node.column - len(node.label) / 2, node.column + len(node.label) / 2
        assert left >= -1e-9 and right <= width + 1e-9
        assert all(node.height > child.height for child in node.children)
        for other in nodes:
            if other.start >= node.end:
                assert other.column - len(other.label) / 2 >= right + 2 - 1e-9


def test_trees_that_cannot_be_drawn():
    for draw in (viz.tree_to_text, viz.tree_to_svg, viz.tree_to_latex):
        refused("cross", draw, list("abc"), [(0, 2), (1, 3)])
        refused("at least one token", draw, [], [])
    for surprisals in ([1.0], [1.0, math.nan, 2.0]):
        refused("one number per word", viz.tree_to_svg, list("abc"), [(0, 3)], surprisals=surprisals)


# --------------------------------------------------------------------------------------------------------------- SVG
def test_svg_says_what_the_tree_says():
    svg = viz.tree_to_svg(*CAT, surprisals=[4.0, 2.0, math.inf, -1.0])
    assert texts(svg) == [*"S NP the cat VP sat PRT down 4.0 2.0 ∞ -1.0".split(), "surprisal (bits)"]
    heights = [float(bar.get("height")) for bar in ElementTree.fromstring(svg).iter(f"{SVG}rect")]
    assert heights == [60, 30, 60, 0]
    # Words stand on one line from left to right, and S above its children.
    places = {e.text: (float(e.get("x")), float(e.get("y"))) for e in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert [places[word][0] for word in CAT[0]] == sorted(places[word][0] for word in CAT[0])
    assert len({places[word][1] for word in CAT[0]}) == 1
    assert places["S"][1] < places["VP"][1] < places["PRT"][1] < places["down"][1]
    assert texts(viz.tree_to_svg(*CAT[:2])) == CAT[0]
    assert texts(viz.tree_to_svg(CAT[0], [(0, 2)], ["NP"])) == ["NP", *CAT[0]]


@pytest.mark.parametrize("word", NASTY)
def test_nasty_words_survive_as_text(word):
    shown = re.sub("[\x00\ud800\uffff]", "\ufffd", word)
    svg = viz.tree_to_svg([word, "b"], [(0, 2)], [word], surprisals=[1, 2])
    assert texts(svg)[:2] == [shown, shown]
    assert ElementTree.fromstring(svg).find(f"{SVG}title").text == f"{shown} b"
    svg.encode("utf-8")
    sentence = ParsedSentence((word, "b"), (Hypothesis(((0, 2),), None, -1.0),), (-1.0, -2.0))
    for markup in (viz.sentence_to_page(sentence, title=word), viz.sentence_to_html(sentence)):
        assert shown in "".join(ElementTree.fromstring(markup).itertext())
    maps = (
        viz.heatmap_to_svg([[1.0, 2.0]], [word], [word, "b"], title=word),
        viz.chart_to_svg({(0, 2): 1.0}, [word, "b"]),
    )
    for svg in maps:
        assert shown in texts(svg)


# ------------------------------------------------------------------------------------------------------------- LaTeX
def test_latex():
    head, body = viz.tree_to_latex(*CAT).split("  [", 1)
    assert head.startswith("\\begin{forest}") and "tier=word" in head
    tree = "".join(body.removesuffix("\\end{forest}").split())
    assert tree == "{S}[{NP}[{the}][{cat}]][{VP}[{sat}][{PRT}[{down}]]]]"
    assert "  [,coordinate\n    [{a,b}]\n    [{c]}]\n  ]" in viz.tree_to_latex(["a,b", "c]"], [(0, 2)])
    assert "[,phantom\n    [{a}]\n    [{b}]\n  ]" in viz.tree_to_latex(["a", "b"], [])


def test_latex_escapes():
    assert viz.escape_latex("50% of $x_1 & {#2}") == r"50\% of \$x\_1 \& \{\#2\}"
    assert viz.escape_latex('\\~^<>|"') == (
        r"\textbackslash{}\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\textbar{}\char34{}"
    )
    assert viz.escape_latex("--- ?` ``a''") == r"-\kern0pt{}-\kern0pt{}- ?\kern0pt{}` ``a''"
    for word in NASTY:
        escaped = viz.escape_latex(word)
        assert escaped.count("{") == escaped.count("}") and "\x00" not in escaped


# -------------------------------------------------------------------------------------------------------------- HTML
def test_page_of_a_sentence():
    trees = (Hypothesis(((0, 2), (0, 3)), None, -2.0), Hypothesis(((1, 3), (0, 3)), None, -2.0 - math.log(3)))
    sentence = ParsedSentence(("a", "b", "c"), trees, tuple(-math.log(2) * k for k in (1, 2, 3)))
    assert viz.surprisals_in_bits(sentence) == pytest.approx([1, 2, 3])
    assert viz.posteriors(sentence) == pytest.approx([0.75, 0.25])
    page = viz.sentence_to_page(sentence)
    said = " ".join("".join(ElementTree.fromstring(page).itertext()).split())
    for part in ("6.00 bits in all", "-2.000 75.0 % ((a b) c)".replace(" ", ""), "-3.09925.0%(a(bc))"):
        assert part.replace(" ", "") in said.replace(" ", "")
    assert page.count("<svg") == 2 and page.count('open="open"') == 1
    # Self-contained: nothing is fetched, nothing runs.
    assert not re.search(r"<script|<link|\ssrc=|href=.(?!#)|url\((?!#)|@import", page)
    without = ParsedSentence(("a", "b"), ())
    assert viz.posteriors(without) is None and viz.surprisals_in_bits(without) is None
    impossible = dataclasses.replace(sentence.hypotheses[0], log_prob=-math.inf)
    assert viz.posteriors(dataclasses.replace(sentence, hypotheses=(impossible, sentence.hypotheses[1]))) == [0, 1]
    assert viz.posteriors(dataclasses.replace(sentence, hypotheses=(impossible,))) is None
    assert "no complete tree" in viz.sentence_to_page(without)


def test_views_of_parse_output(tiny_gpst_config):
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    words = ["<a>", "b", "c", "d", "e"]
    output = GPSTForCausalLM(tiny_gpst_config).eval().parse(input_ids=ids, num_beams=6, num_return_sequences=3)
    view = viz.show(output, words)
    assert len(view.sentence.hypotheses) == 3
    assert view.sentence.brackets() == output.brackets(words)
    assert sum(view.sentence.word_log_probs) == pytest.approx(output.token_log_probs.sum().item())
    assert view.text().count("\n") == 4 and str(view) == view.text()
    assert texts(view.svg())[:5] == words
    assert ElementTree.fromstring(view._repr_html_()).attrib["class"] == "synlm"
    assert ElementTree.fromstring(view._repr_svg_()).tag == SVG + "svg"
    assert "\\textless{}a\\textgreater{}" in view.latex(1)
    assert view.html("title").count("<svg") == 3
    for call, message in (
        (lambda: view.text(3), "there is no tree 3"),
        (lambda: viz.show(output), "words are missing"),
        (lambda: viz.show(output, words[:4]), "has 5 tokens, but 4 words"),
    ):
        refused(message, call)

    # Labels, and words of several tokens.
    ends = torch.tensor([[False, True, True, True, True]])
    output = rnng(vocab_size=23).parse(input_ids=ids, word_ends=ends, num_beams=8)
    view = viz.show(output, words[:4])
    assert view.sentence.brackets() == output.brackets(words[:4])
    assert len(view.sentence.word_log_probs) == 4
    drawn = texts(view.svg())
    assert sorted(drawn[: len(drawn) - 5]) == sorted([*words[:4], *view.sentence.hypotheses[0].labels])


# --------------------------------------------------------------------------------------------------------- heat maps
def cell_values(svg: str) -> list[float]:
    """The numbers in the cells."""
    return [float(text) for text in texts(svg) if re.fullmatch(r"-?\d+\.\d{3}", text)]


def test_heatmap():
    values, names = [[0.0, 1.0], [None, 4.0], [math.nan, 2.0]], (["a", "b", "c"], ["x", "$y_1$"])
    svg = viz.heatmap_to_svg(values, *names, title="T")
    assert svg == viz.heatmap_to_svg(values, *names, title="T") and cell_values(svg) == [0, 1, 4, 2]
    assert {"x", "$y_1$", "a", "b", "c", "T (0.000 to 4.000)"} <= set(texts(svg))
    # The larger, the darker: the smallest value has no color, the largest is opaque.
    assert re.findall(r"fill: #4c78a8; fill-opacity: ([\d.]+)", svg) == ["0.25", "0.5"]
    assert svg.count("fill: #4c78a8") == 3
    assert cell_values(viz.heatmap_to_svg(torch.ones(1, 2), ["r"], ["x", "y"], title="T")) == [1, 1]


def test_chart_of_gpst(tiny_gpst_config):
    model = GPSTForCausalLM(tiny_gpst_config).eval()
    output = model(input_ids=torch.tensor([[7, 8, 9, 10], [7, 8, 9, 0]]), output_chart=True, output_spans=True)
    scores, spans = viz.chart_scores(output.chart, 1), output.spans[1]
    assert (0, 3) in scores and all(j <= 3 for _, j in scores)
    svg = viz.chart_to_svg(scores, ["a", "b", "c"], spans=spans)
    assert cell_values(svg) == pytest.approx(list(scores.values()), abs=1e-3)
    assert svg.count("stroke-width: 2;") == len(spans)
    refused(r"span \(., 3\)", viz.chart_to_svg, scores, ["a", "b"])


def test_distances_and_span_attention():
    layers = model_and_tokenizer("on_lstm")[0](torch.tensor([[4, 5, 6], [7, 8, 9]])).distances
    svg = viz.distances_to_svg(layers[1], ["a", "b", "c"])
    assert cell_values(svg) == pytest.approx(layers[1].flatten().tolist(), abs=1e-3)
    assert {f"layer {k + 1}" for k in range(layers.shape[1])} <= set(texts(svg))
    scores = model_and_tokenizer("palm")[0](torch.tensor([[4, 5, 6, 7]])).span_scores[..., -2:]
    weights = scores[0].softmax(-1)
    # Row t, column s: the span [s, t), of one or two tokens; slot 0 is the longest.
    expected = [weights[1, 1], weights[2, 0], weights[2, 1], weights[3, 0], weights[3, 1]]
    svg = viz.span_attention_to_svg(scores[0], list("abcd"))
    assert cell_values(svg) == pytest.approx([value.item() for value in expected], abs=1e-3)


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_bars(tmp_path, ending):
    path, again = tmp_path / f"bars.{ending}", tmp_path / f"again.{ending}"
    series = {"a <b>": [0.5, 0.25, None], "c": [1.0, math.nan, -0.25]}
    options = {"deviations": {"a <b>": [0.1, None, None]}, "title": "t & u", "axis": "accuracy", "chance": 0.5}
    for file in (path, again):
        viz.plot_bars(file, ["x", "y", "z"], series, limit=1.2, **options)
    signature = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(signature) and (ending == "pdf" or path.read_bytes() == again.read_bytes())
    if ending == "svg":
        texts = {text.strip() for text in ElementTree.parse(path).getroot().itertext()}
        assert {"x", "y", "z", "a <b>", "c", "t & u", "accuracy", "chance", "0.500", "-0.250", "none"} <= texts
        viz.plot_bars(path, ["x"], {"no legend": [1.0]}, title="t", axis="a")
        assert "no legend" not in path.read_text(encoding="utf-8")


def drawn_numbers(path):
    return re.findall(r">(\d[.\d]*)</text>", path.read_text(encoding="utf-8"))


def test_numbers_of_an_axis_have_room(tmp_path):
    path = tmp_path / "p.svg"
    viz.plot_effects(path, {"a": (0.003, 0.0, 0.015)}, {"a": [(7.0, 0.1)]}, title="t", axes_titles=("gain", "b"))
    assert 2 < sum(number.startswith("0.0") for number in drawn_numbers(path)) < 7


def test_many_places_stay_a_figure(tmp_path):
    names = [f"word{number}" for number in range(500)]
    plot_lines(tmp_path / "p.svg", names, {"a": [(1.0, 0.1)] * 500}, title="t", axes_titles=("word", "bits"))
    drawn = (tmp_path / "p.svg").read_text(encoding="utf-8")
    assert float(re.search(r'width="([\d.]+)pt"', drawn)[1]) < 3000 and 40 < len(re.findall(r">word\d+<", drawn)) <= 60


def test_output_of_parse_in_a_notebook():
    """The bare output knows no words: a table of its trees, with labels escaped."""
    output = ParseOutput(
        spans=[[[(1, 3), (1, 4)], [(2, 4), (1, 4)]], []],
        labels=[[["<b>&", "S"], ["VP", "S"]], []],
        log_probs=torch.tensor([[-1.5, -2.25], [-math.inf, -math.inf]]),
        offsets=[1, 0],
        lengths=[3, 2],
    )
    table = ElementTree.fromstring(output._repr_html_())
    rows = [["".join(cell.itertext()) for cell in row] for row in table]
    assert rows[1] == ["0", "0", "-1.500", "(S (<b>& 1 2) 3)"]
    assert rows[2] == ["0", "1", "-2.250", "(S 1 (VP 2 3))"]
    assert rows[3][0] == "1" and "no complete tree" in rows[3][3]
    assert "(0 1)" in ParseOutput(spans=[[[(0, 2)]]], offsets=[0], lengths=[2])._repr_html_()
    assert viz.show(ParsedSentence(("a", "b")))._repr_svg_() is None
