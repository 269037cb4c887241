"""Every option that a message names exists, and is one of the command that shows the message."""

import ast
import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import typer

import hf_synlm
from hf_synlm.cli.app import app
from hf_synlm.data.files import flag_of
from hf_synlm.training.arguments.base import TrainingArguments
from hf_synlm.training.arguments.command_lines import COMMAND_LINES
from hf_synlm.training.engine.recipe import Recipe

PACKAGE = Path(hf_synlm.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
OTHERS = {"--version", "--help", "--config", "--list-configs", "--list_configs"}
OTHERS |= {"--fixed_stack", "--multi_gpu"}  # of other programs
WITH_PROPOSALS = ("perplexity", "blimp", "pairs")
# Modules that few commands use: what they name, each of these commands must have.
USED_BY = {
    "evaluation/suites/blimp.py": ("pairs",),
    "evaluation/suites/syntaxgym.py": ("syntaxgym",),
    "evaluation/text/given_trees.py": ("surprisal",),
    "evaluation/text/tree_files.py": WITH_PROPOSALS,
    "evaluation/text/text_items.py": (),  # some messages are of `surprisal` alone, some of `perplexity`
    "conversion/files.py": ("convert",),
}


def flags_of_commands(group: typer.core.TyperGroup) -> Iterator[tuple[str, set[str]]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from flags_of_commands(command)
        else:
            yield name, {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}


COMMANDS = dict(flags_of_commands(typer.main.get_command(app)))


@functools.cache
def flags_of_module(name: str) -> set[str]:
    """Options of the dataclasses that a program knows by name, or that its recipe takes."""
    name = {"train_tree_planting": "train_treereg"}.get(name, name)  # the one takes the options of the other
    module = importlib.import_module(f"hf_synlm.training.programs.{name}")
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    kinds = {TrainingArguments, *classes}
    for recipe in classes:
        kinds.update(recipe.parts.values() if hasattr(recipe, "parts") and issubclass(recipe, Recipe) else ())
    return {
        flag_of(field.name) for kind in filter(dataclasses.is_dataclass, kinds) for field in dataclasses.fields(kind)
    }


PROGRAMS = [file.stem for file in (PACKAGE / "training" / "programs").glob("[a-z]*.py")]
EVERYWHERE = OTHERS.union(*COMMANDS.values(), *map(flags_of_module, PROGRAMS))


def texts(tree: ast.AST, command: str | None = None) -> Iterator[tuple[ast.Constant, str | None]]:
    """The strings of a module but for its docstrings, each with the command whose function holds it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name in COMMANDS:
            yield from texts(node, node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node, command
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield from texts(node, command)


def test_options_that_messages_name_exist() -> None:
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        place = str(file.relative_to(PACKAGE))
        allowed = [EVERYWHERE, *(COMMANDS[name] for name in USED_BY.get(place, ()))]
        if file.parent.name == "arguments":
            module = f"hf_synlm.training.arguments.{file.stem}"
            programs = [
                program
                for program, parts in COMMAND_LINES.items()
                if any(kind.__module__ == module for part in parts.values() for kind in part.__mro__)
            ]
            allowed.append(OTHERS.union(*map(flags_of_module, programs)))
        if file.parent.name == "programs" and file.stem in PROGRAMS:
            allowed.append(flags_of_module(file.stem) | OTHERS)
        for node, command in texts(ast.parse(file.read_text(encoding="utf-8"))):
            of_command = [COMMANDS[command]] if command and file.parent.name == "cli" else []
            # A message may name another command: `synlm export FOLDER --out OTHER`.
            for flag in FLAG.findall(re.sub(r"`synlm [^`]*`?", "", node.value)):
                if not all(flag in flags for flags in (*allowed, *of_command)):
                    wrong.append(f"{place}:{node.lineno} names {flag}")
    assert not wrong
