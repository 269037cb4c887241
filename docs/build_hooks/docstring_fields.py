# SPDX-License-Identifier: Apache-2.0
"""Lists of fields in docstrings become lists on the page.

griffe does not know sections such as `Sizes:` or `Fields:`, with one field per entry, and would show each as one
paragraph in a box. This extension writes them as Markdown before griffe reads the docstring:

    Sizes:                                        **Sizes:**
        vocab_size: number of token ids (V).
        hidden_size: width                   ->   * `vocab_size`: number of token ids (V).
            (D).                                  * `hidden_size`: width (D).

It also joins paragraphs such as `Cost: ...` whose later lines are indented.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object

KNOWN = {"Args", "Attributes", "Raises", "Returns", "Yields"}
SECTION = re.compile(r"^(?P<name>[A-Z][^:\n]*):(?P<title>(?: .*)?)\n(?P<body>(?: {4,}\S[^\n]*(?:\n|$))+)", re.M)
ENTRY = re.compile(r" {4}(?P<names>[\w*]+(?:, (?:and )?[\w*]+)*):(?P<text> .*|$)")


def to_markdown(section: re.Match[str]) -> str:
    """Write one section of a docstring as Markdown.

    Args:
        section: a match of `SECTION`.

    Returns:
        A list of fields, or a paragraph. A section that griffe knows, or that is neither, stays unchanged.
    """
    lines, name = section["body"].splitlines(), section["name"]
    if name in KNOWN:
        return section[0]
    if section["title"]:
        return " ".join([f"{name}:{section['title']}", *(line.strip() for line in lines)]) + "\n\n"
    if not ENTRY.match(lines[0]):
        return section[0]
    items: list[str] = []
    for line in lines:
        entry = ENTRY.match(line)
        if entry is None:
            items[-1] += f" {line.strip()}"
        else:
            items.append(f"* {', '.join(f'`{field}`' for field in entry['names'].split(', '))}:{entry['text']}")
    return "\n".join([f"**{name}:**", "", *items, "", ""])


class FieldLists(Extension):
    """Rewrite the lists of fields in every docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite one docstring.

        Args:
            obj: a module, class, function or attribute.
            **kwargs: not used.
        """
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = SECTION.sub(to_markdown, obj.docstring.value)
