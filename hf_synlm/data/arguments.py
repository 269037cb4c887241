# SPDX-License-Identifier: Apache-2.0
"""Command lines made of dataclasses: flags, and config files in YAML or JSON."""

from argparse import Action, ArgumentTypeError
from collections import Counter
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from hf_synlm.data.files import flag_of
from hf_synlm.data.text import PathLike


def option(default: Any, help: str, **limits: Any) -> Any:
    """Make a field of a dataclass of arguments.

    Args:
        default: its default; a list is copied. `dataclasses.MISSING` makes the option required.
        help: its text in `--help`.
        **limits: on a command line, the `minimum` of a number, or the `choices` of a text.

    Returns:
        What `dataclasses.field` returns.
    """
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help, **limits})
    return field(default=default, metadata={"help": help, **limits})


def _at_least(minimum: float, kind: type) -> Any:
    """Type of an option for argparse, which reads a number and refuses a smaller one."""

    def read(text: str) -> Any:
        value = kind(text)
        if value < minimum:
            rule = f"be at least {minimum}" if minimum else "not be negative"
            raise ArgumentTypeError(f"must {rule} and is {value}")
        return value

    read.__name__ = kind.__name__
    return read


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` that allows empty lists, takes `--train-file` for `--train-files`, and raises its errors.

    `--train-trees` without a value is the empty list. Any option of files may be written in the singular or the plural.

    Fields:
        names: of all options.
    """

    def __init__(self, *args: Any, **options: Any):
        self.names: list[str] = []
        super().__init__(*args, **options)

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Add an argument, with `_files` besides `_file` and the reverse; help and errors show it with dashes."""
        if options.get("nargs") == "+":
            options["nargs"] = "*"
        long = names[0].removeprefix("--")
        if (minimum := options.pop("minimum", None)) is not None:
            options["type"] = _at_least(minimum, options["type"])
        other = f"{long}s" if long.endswith("_file") else long.removesuffix("s") if long.endswith("_files") else None
        self.names += [long] if other is None else [long, other]
        others = [] if other is None else dict.fromkeys((f"--{other}", flag_of(other)))
        action = super().add_argument(*names, *others, **options)
        if names[0].startswith("--"):
            action.option_strings = [flag_of(long)]  # what is shown; what is parsed stands in a table of the parser
        return action

    def counts(self, words: Iterable[str]) -> Counter[Action]:
        """How often the words of a command line name each option, in any of its spellings."""
        known = (self._option_string_actions.get(word.partition("=")[0]) for word in words)
        return Counter(action for action in known if action is not None)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError instead of printing all options."""
        raise ValueError(f"{message}.")


def read_yaml(text: str, where: str) -> Any:
    """Read YAML, of which JSON is a part.

    Args:
        text: the YAML.
        where: what it is, for the message.

    Returns:
        Its value.

    Raises:
        ValueError: it is not valid YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {error}") from error


def read_config_file(path: PathLike, what: str = "argument names to values") -> dict[str, Any]:
    """Read a YAML or JSON file of a mapping.

    Args:
        path: the file.
        what: what it should map, for the message.

    Returns:
        Name -> value.

    Raises:
        ValueError: the file is missing, or does not contain a mapping.
    """
    values = read_yaml(Path(path).read_text(encoding="utf-8"), str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not contain a mapping of {what}.")
    return values


def config_flags(values: dict[str, Any]) -> list[str]:
    """Write `values` as flags; a single value may stand for a list of one, and null for the default."""
    flags: list[str] = []
    for key, value in values.items():
        if value is not None:
            items = value if isinstance(value, list) else [value]
            flags += [f"--{key}", *(str(item) for item in items)]
    return flags
