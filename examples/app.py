# SPDX-License-Identifier: Apache-2.0
"""Demo in the browser: the trees of a sentence, and the surprisals of the words of a sentence or a file.

    pip install '.[demo]'
    python examples/app.py model_cards/gpst-tiny

Only the page needs gradio: `analyse` and `measure` are ordinary functions.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import columns, score_words, word_table
from hf_synlm.evaluation.text.tables import table_text
from hf_synlm.evaluation.text.text_items import describe_table, read_items
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.viz import posteriors, sentence_to_html, surprisals_in_bits

EXAMPLE = "the people of this country agree"
NUM_BEAMS, NUM_TREES = 20, 5
WORD_COLUMNS = ["word", "surprisal (bits)"]
TREE_COLUMNS = ["tree", "log-probability (nats)", "share", "brackets"]


def analyse(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, num_beams: int, num_trees: int
) -> tuple[str, list[list[Any]], list[list[Any]]]:
    """Parse one sentence.

    Args:
        model: a syntactic language model.
        tokenizer: its tokenizer.
        text: words, separated by white space.
        num_beams: width of the search; models without a search ignore it.
        num_trees: number of trees to show; models without a search have one.

    Returns:
        The drawings as HTML, rows of `WORD_COLUMNS`, and rows of `TREE_COLUMNS`.

    Raises:
        ValueError: the text has no words, or the model cannot read them.
    """
    if not text.split():
        raise ValueError("the text has no words: type a sentence")
    options: dict[str, int] = {}
    if hasattr(model, "word_search"):
        options = {"num_beams": num_beams, "num_return_sequences": min(num_trees, num_beams)}
    (sentence,) = parse_sentences(model, tokenizer, [text], **options)
    return sentence_to_html(sentence), _word_rows(sentence), _tree_rows(sentence)


def _word_rows(sentence: ParsedSentence) -> list[list[Any]]:
    bits = surprisals_in_bits(sentence) or [None] * len(sentence.words)
    return [
        [word, None if value is None else round(value, 2)] for word, value in zip(sentence.words, bits, strict=True)
    ]


def _tree_rows(sentence: ParsedSentence) -> list[list[Any]]:
    shares = posteriors(sentence) or [None] * len(sentence.hypotheses)
    return [
        [
            rank + 1,
            None if tree.log_prob is None else round(tree.log_prob, 3),
            None if share is None else f"{100 * share:.1f} %",
            sentence.brackets(rank),
        ]
        for rank, (tree, share) in enumerate(zip(sentence.hypotheses, shares, strict=True))
    ]


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path
) -> tuple[list[str], list[list[Any]]]:
    """Compute the surprisal of every word of a file, as `synlm surprisal` does.

    Args:
        model: a syntactic language model.
        tokenizer: its tokenizer.
        path: plain text in UTF-8, one sentence per line.

    Returns:
        Names of the columns, and one row per word; NaN where the model does not have a measure.

    Raises:
        ValueError: the file is no such text, or the model cannot read it.
    """
    items = read_items(path, kind="txt")
    if problem := describe_table(item.text for item in items):
        raise ValueError(f"{path} {problem[0]}: give plain text, one sentence per line")
    scores = score_words(TextScorer(model, tokenizer, details=True), items)
    return columns("bits", more=scores[0].more), word_table(items, scores)


def build(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Any:
    """Make the page.

    Args:
        model: a syntactic language model.
        tokenizer: its tokenizer.
        name: name of the model, for the title.

    Returns:
        The `gradio.Blocks`.
    """
    import gradio  # the only place that needs it

    def show(text: str, num_beams: float, num_trees: float) -> tuple[str, list[list[Any]], list[list[Any]]]:
        try:
            return analyse(model, tokenizer, text, int(num_beams), int(num_trees))
        except ValueError as error:
            raise gradio.Error(str(error)) from error

    def show_file(file: str) -> tuple[dict[str, Any], str]:
        path = Path(file)
        try:
            names, rows = measure(model, tokenizer, path)
        except ValueError as error:
            raise gradio.Error(str(error).replace(file, path.name)) from error
        table = path.with_suffix(".surprisals.tsv")  # in the folder that gradio made for the upload
        table.write_text(table_text([names, *rows]), encoding="utf-8")
        shown = [[round(value, 3) + 0.0 if isinstance(value, float) else value for value in row] for row in rows]
        return {"headers": names, "data": shown}, str(table)  # + 0.0: no -0

    with gradio.Blocks(title=f"hf_synlm: {name}", analytics_enabled=False) as page:
        gradio.Markdown(f"# {name}\nSentences, their trees, and how surprising their words are.")
        with gradio.Tab("Sentence"):
            text = gradio.Textbox(EXAMPLE, label="Sentence", max_length=1000)
            searches = hasattr(model, "word_search")
            with gradio.Row(visible=searches):
                num_beams = gradio.Slider(1, 100, value=NUM_BEAMS, step=1, label="Beam")
                num_trees = gradio.Slider(1, 20, value=NUM_TREES, step=1, label="Trees")
            button = gradio.Button("Parse", variant="primary")
            found = analyse(model, tokenizer, EXAMPLE, NUM_BEAMS, NUM_TREES)  # which the page shows first
            drawing = gradio.HTML(found[0], label="Trees")
            words = gradio.Dataframe(found[1], headers=WORD_COLUMNS, label="Words", interactive=False)
            trees = gradio.Dataframe(found[2], headers=TREE_COLUMNS, label="Alternatives", interactive=False)
            outputs = [drawing, words, trees]
            gradio.on([button.click, text.submit], show, [text, num_beams, num_trees], outputs, api_name="analyse")
        with gradio.Tab("File"):
            file = gradio.File(label="Text (UTF-8), one sentence per line", file_types=[".txt"])
            table = gradio.Dataframe(headers=columns("bits"), label="Surprisals", interactive=False)
            download = gradio.File(label="Surprisals as TSV", interactive=False)
            file.upload(show_file, file, [table, download], api_name="measure")
    return page


def main(arguments: list[str] | None = None) -> None:
    """Load a model and serve the page: on this machine only, or to all where a Space runs it.

    Args:
        arguments: arguments of the command line; None: those of the process.
    """
    parser = argparse.ArgumentParser(description="Trees and surprisals in the browser.")
    of_space = os.environ.get("SYNLM_MODEL")  # a Space gives no arguments
    parser.add_argument(
        "model",
        nargs=None if of_space is None else "?",
        default=of_space,
        help="folder of a model, or its name on the Hub; default: the environment variable SYNLM_MODEL",
    )
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")
    parser.add_argument("--device", default="cpu", help="a device of torch: cpu (default), cuda, ...")
    parser.add_argument("--port", type=int, default=7860)
    given = parser.parse_args(arguments)
    try:
        model, tokenizer = load_pretrained(
            given.model, revision=given.revision, trust_remote_code=given.trust_remote_code or None
        )
        if not hasattr(model, "parse"):
            raise ValueError(
                f"{given.model} is a {type(model).__name__}, which has no trees: name a syntactic language model"
            )
    except ValueError as error:
        parser.error(str(error))
    page = build(model.to(torch.device(given.device)).eval(), tokenizer, given.model)
    page.launch(server_port=given.port, share=False)  # on 127.0.0.1, unless GRADIO_SERVER_NAME says more, as on Spaces


if __name__ == "__main__":
    main()
