# SPDX-License-Identifier: Apache-2.0
"""A view of a parsed sentence: a picture in notebooks, text elsewhere.

>>> from hf_synlm import viz
>>> out = model.parse(**batch, num_beams=20, num_return_sequences=5)
>>> viz.show(out, tokens)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.viz.html import sentence_to_html, sentence_to_page, surprisals_in_bits
from hf_synlm.viz.latex import tree_to_latex
from hf_synlm.viz.svg import tree_to_svg
from hf_synlm.viz.text import TextStyle, tree_to_text


@dataclasses.dataclass(frozen=True)
class SentenceView:
    """A sentence in every format; `hypothesis` is the rank of a tree, and 0 is the best one.

    Attributes:
        sentence: a sentence with its trees.
    """

    sentence: ParsedSentence

    def text(self, hypothesis: int = 0, style: TextStyle = "sideways") -> str:
        """Draw a tree in characters; see `tree_to_text`."""
        return tree_to_text(self.sentence.words, *self.sentence.drawn(hypothesis), style=style)

    def svg(self, hypothesis: int = 0) -> str:
        """Draw a tree with the surprisals of its words as SVG; see `tree_to_svg`."""
        bits = surprisals_in_bits(self.sentence)
        return tree_to_svg(self.sentence.words, *self.sentence.drawn(hypothesis), surprisals=bits)

    def latex(self, hypothesis: int = 0) -> str:
        """Write a tree for the LaTeX package forest; see `tree_to_latex`."""
        return tree_to_latex(self.sentence.words, *self.sentence.drawn(hypothesis))

    def html(self, title: str | None = None) -> str:
        """Write an HTML document with all trees; see `sentence_to_page`."""
        return sentence_to_page(self.sentence, title=title)

    def _repr_html_(self) -> str:
        return sentence_to_html(self.sentence)

    def _repr_svg_(self) -> str | None:
        return self.svg() if self.sentence.hypotheses else None

    def __str__(self) -> str:
        return self.text() if self.sentence.hypotheses else " ".join(self.sentence.words)


def show(parsed: Any, words: Sequence[str] | None = None, sentence: int = 0) -> SentenceView:
    """Show one sentence of the output of `model.parse`; a notebook draws the last line of a cell.

    Args:
        parsed: a `ParseOutput`, or a `ParsedSentence`.
        words: the words of a `ParseOutput`: one per token, or one per word if `parse` was given `word_ends`.
            Not read for a `ParsedSentence`, which has its own.
        sentence: the row of a `ParseOutput`.

    Returns:
        The view.

    Raises:
        ValueError: `words` do not fit, or are missing.
    """
    if isinstance(parsed, ParsedSentence):
        return SentenceView(parsed)
    if words is None:
        raise ValueError(
            "words are missing, because the output of parse does not hold them. Pass one word per token. If parse "
            "was given word_ends, pass the words of the text"
        )
    return SentenceView(ParsedSentence.from_output(parsed, words, sentence))
