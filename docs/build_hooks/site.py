# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: equations as MathML, the modules of packages, pages outside the navigation, generated tables."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from hf_synlm.hub.info import shipped_files
from hf_synlm.models import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
EQUATION = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.S)
MODULE = re.compile(r"^::: (?P<module>[\w.]+)$", re.M)
MINIS = re.compile(r"<!-- begin of the table: [^\n]+ -->\n(.*?)<!-- end of the table -->", re.S)
CARD = re.compile(r"\[(`[\w-]+`)\]\(model_cards/[^)]+\)")
PACKAGE = re.compile(r"^::: (?P<package>[\w.]+)\.\*$", re.M)


def on_config(config: Any) -> Any:
    """Add the pages that the navigation does not name after the others.

    Args:
        config: the configuration of mkdocs.

    Returns:
        The configuration.
    """
    named = set(_pages(config.nav))
    others = sorted(page.name for page in Path(config.docs_dir).glob("*.md") if page.name not in named)
    if others:
        config.nav.append({"More": others})
    return config


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _pages(entry)


def on_page_markdown(markdown: str, *, config: Any, **kwargs: Any) -> str:
    """Replace `::: package.*` with the public modules that no page of the reference names; fill in tables.

    Args:
        markdown: the text of the page.
        config: the configuration of mkdocs.
        **kwargs: not used.

    Returns:
        The text, with one line per module.
    """
    pages = [page.read_text(encoding="utf-8") for page in Path(config.docs_dir, "api").glob("*.md")]
    named = {match["module"] for page in pages for match in MODULE.finditer(page)}

    def modules(match: re.Match[str]) -> str:
        folder = ROOT.joinpath(*match["package"].split("."))
        names = sorted(
            f"{match['package']}.{file.stem}" for file in folder.glob("*.py") if not file.stem.startswith("_")
        )
        return "\n\n".join(f"::: {name}" for name in names if name not in named)

    markdown = markdown.replace("<!-- what ships with each model -->", shipped_table())
    minis = MINIS.search((ROOT / "README.md").read_text(encoding="utf-8"))[1]
    markdown = markdown.replace("<!-- table of the minis -->", CARD.sub(r"\1", minis))  # the site has no cards to link
    return PACKAGE.sub(modules, markdown)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Replace the equations of a page with MathML.

    Args:
        content: HTML of the page.
        **kwargs: not used.

    Returns:
        HTML that shows the equations without a script.
    """
    return EQUATION.sub(_to_mathml, content)


def _to_mathml(equation: re.Match[str]) -> str:
    display = "block" if equation["tag"] == "div" else "inline"
    return convert(html.unescape(equation["latex"].strip()), display=display)


def shipped_table() -> str:
    """What ships with each model, as a Markdown table: a row per file, a column per architecture.

    Returns:
        The table; the last row has the number of files and lines of each architecture.
    """
    shipped = {name: shipped_files(name) for name in ARCHITECTURES}
    lines = {file: count for files in shipped.values() for file, count in files.items()}
    rows = ["| file | lines | " + " | ".join(ARCHITECTURES) + " |", "| --- | ---: |" + " :---: |" * len(ARCHITECTURES)]
    for file in sorted(lines):
        marks = " | ".join("x" if file in files else "" for files in shipped.values())
        rows.append(f"| {file} | {lines[file]} | {marks} |")
    totals = " | ".join(f"{len(files)} files, {sum(files.values()):,} lines" for files in shipped.values())
    return "\n".join([*rows, f"| total | | {totals} |"])
