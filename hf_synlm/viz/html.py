# SPDX-License-Identifier: Apache-2.0
"""Parsed sentences as HTML: trees, their probabilities in the beam, and surprisals of the words.

The pages contain no scripts and load nothing. The markup is well-formed XML, so that it can be checked and
embedded anywhere.
"""

import math
from collections.abc import Iterable, Iterator

from hf_synlm.data.parsed import ParsedSentence, posteriors
from hf_synlm.data.text import plural
from hf_synlm.viz.svg import escape_xml, tree_to_svg

_STYLE = """
.synlm { font-family: 'DejaVu Sans', 'Noto Sans', Arial, sans-serif; line-height: 1.4 }
.synlm .tree { overflow-x: auto }
.synlm table { border-collapse: collapse; margin: 0.8em 0 }
.synlm th, .synlm td { padding: 0.15em 0.8em; text-align: left; border-bottom: 1px solid #8884 }
.synlm td.number { text-align: right; font-variant-numeric: tabular-nums }
.synlm summary { cursor: pointer }
.synlm code { overflow-wrap: anywhere }
"""
_PAGE = "body { margin: 1.5em auto; max-width: 72em; padding: 0 1em; color-scheme: light dark }"


def surprisals_in_bits(sentence: ParsedSentence) -> list[float] | None:
    """Surprisal of each word, -log2 p(word | words before it); None if the sentence has no log-probabilities."""
    if sentence.word_log_probs is None:
        return None
    return [-value / math.log(2) for value in sentence.word_log_probs]


def sentence_to_html(sentence: ParsedSentence) -> str:
    """Write a sentence as a `<div>` with its own style.

    Args:
        sentence: a sentence with its trees, the best one first.

    Returns:
        The element.

    Raises:
        ValueError: a tree does not fit the words.
    """
    return f'<div class="synlm">\n<style>{_STYLE}</style>\n{_body(sentence)}\n</div>'


def sentence_to_page(sentence: ParsedSentence, *, title: str | None = None) -> str:
    """Write a sentence as a complete HTML document, which needs no other file.

    Args:
        sentence: a sentence with its trees, the best one first.
        title: title of the document; None: the words.

    Returns:
        The document.

    Raises:
        ValueError: a tree does not fit the words.
    """
    return "".join(page_parts([sentence], title or " ".join(sentence.words)))


def page_parts(sentences: Iterable[ParsedSentence], title: str) -> Iterator[str]:
    """An HTML document of several sentences, which needs no other file, in parts; those without words are left out."""
    yield (
        '<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape_xml(title)}</title>\n<style>{_PAGE}{_STYLE}</style>\n</head>\n<body>\n"
    )
    for sentence in sentences:
        if sentence.words:
            yield f'<div class="synlm">\n{_body(sentence)}\n</div>\n'
    yield "</body>\n</html>\n"


def _body(sentence: ParsedSentence) -> str:
    bits = surprisals_in_bits(sentence)
    parts = [f'<h2 dir="auto">{escape_xml(" ".join(sentence.words))}</h2>']
    if bits is not None:
        parts.append(f"<p>{plural(len(bits), 'word')}, surprisal {math.fsum(bits):.2f} bits in all</p>")
    if sentence.unknown_words:
        words = ", ".join(sentence.words[place] for place in sentence.unknown_words)
        parts.append(f'<p>Unknown to the model: <em dir="auto">{escape_xml(words)}</em></p>')
    if not sentence.hypotheses:
        parts.append("<p>The search found no complete tree. A wider beam may find one.</p>")
        if sentence.words:
            parts.append(_tree(tree_to_svg(sentence.words, (), surprisals=bits)))
    elif len(sentence.hypotheses) > 1 or sentence.hypotheses[0].log_prob is not None:
        parts.append(_table(sentence))
    for rank, tree in enumerate(sentence.hypotheses):
        opened = ' open="open"' if rank == 0 else ""
        log_prob = "" if tree.log_prob is None else f", log-probability {tree.log_prob:.3f} nats"
        summary = f"<summary>tree {rank + 1}{log_prob}</summary>"
        picture = tree_to_svg(sentence.words, *sentence.drawn(rank), surprisals=bits)
        parts.append(f"<details{opened}>{summary}{_tree(picture)}</details>")
    return "\n".join(parts)


def _tree(picture: str) -> str:
    return f'\n<div class="tree">{picture}</div>\n'


def _table(sentence: ParsedSentence) -> str:
    shares = posteriors(sentence)
    head = "<tr><th>tree</th><th>log-probability (nats)</th><th>share of these trees</th><th>brackets</th></tr>"
    rows = []
    for rank, tree in enumerate(sentence.hypotheses):
        log_prob = "" if tree.log_prob is None else f"{tree.log_prob:.3f}"
        share = "" if shares is None else f"{100 * shares[rank]:.1f} %"
        rows.append(
            f'<tr><td class="number">{rank + 1}</td><td class="number">{log_prob}</td><td class="number">{share}</td>'
            f'<td><code dir="auto">{escape_xml(sentence.brackets(rank))}</code></td></tr>'
        )
    body = "\n".join([head, *rows])
    return f"<table>\n{body}\n</table>"
