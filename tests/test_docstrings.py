"""Every public name says what it is, what it takes and what it gives back.

ruff checks the form (rules D, Google convention) and that an `Args:` section names all arguments; here: that the
sections are there. Public is what has no leading underscore, in a module without one. Sections are asked of functions
and of the methods of the classes that `hf_synlm` itself offers; the methods of inner parts need a docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_synlm"
FILES = sorted(file for file in PACKAGE.rglob("*.py") if not re.match(r"_(?!_)", file.name))
Function = ast.FunctionDef | ast.AsyncFunctionDef
NO_VALUE = {None, "None", "NoReturn"}
PROPERTIES = {"property", "cached_property", "setter"}


@dataclass
class Definition:
    """A public function or class, and whether its docstring needs sections."""

    name: str
    node: Function | ast.ClassDef
    complete: bool

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def arguments(self) -> list[str]:
        if isinstance(self.node, ast.ClassDef):
            return []
        arguments = self.node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return [arg.arg for arg in every if arg.arg not in {"self", "cls"} and not has_help(arg)]

    @property
    def returns(self) -> bool:
        if isinstance(self.node, ast.ClassDef) or self.node.name == "__init__":
            return False
        return (ast.unparse(self.node.returns) if self.node.returns else None) not in NO_VALUE


def has_help(argument: ast.arg) -> bool:
    """Whether an option of a command says itself what it is, here or where commands share it."""
    annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
    return "help=" in annotation or annotation.startswith(("options.", "drawing.")) or annotation.endswith("Options")


def decorators(node: Function) -> set[str]:
    return {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}


def exported(tree: ast.Module) -> set[str] | None:
    """Names in the module's `__all__`, or None."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            return set(ast.literal_eval(node.value))
    return None


def package_names() -> set[str]:
    file = PACKAGE / "__init__.py"
    return exported(ast.parse(file.read_text(encoding="utf-8"))) or set()


def definitions(file: Path) -> Iterator[Definition]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    offered = package_names()
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        yield Definition(node.name, node, complete=True)
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and not method.name.startswith("_"):
                complete = node.name in offered and not decorators(method) & PROPERTIES
                yield Definition(f"{node.name}.{method.name}", method, complete)


def problems(definition: Definition) -> Iterator[str]:
    text = definition.docstring
    if not text:
        yield "has no docstring"
        return
    if not definition.complete:
        return
    # A short function may name its arguments and value in its one sentence, as in "Spans [B, N] of `trees`."
    inline = "\n" not in text and all(re.search(rf"\b{name}\b", text) for name in definition.arguments)
    if definition.arguments and "Args:" not in text and not inline:
        yield f"takes {definition.arguments} and has no `Args:` section"
    if definition.returns and not re.search(r"(Returns|Yields):", text) and "\n" in text:
        yield "returns a value and has no `Returns:` section"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_public_names_are_documented(file: Path):
    found = [f"{item.name} {problem}" for item in definitions(file) for problem in problems(item)]
    assert not found, f"{file.relative_to(ROOT)}:\n  " + "\n  ".join(found)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_files_say_what_they_are(file: Path):
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), f"{file.name} has no docstring"
