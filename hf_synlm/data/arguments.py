"""Command lines made of dataclasses: flags, and config files in YAML or JSON."""

from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` whose lists may be empty: `--train_trees` without a value is the empty list."""

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Add an argument."""
        if options.get("nargs") == "+":
            options["nargs"] = "*"
        return super().add_argument(*names, **options)


def read_yaml(text: str, where: str) -> Any:
    """Read YAML, of which JSON is a part.

    Args:
        text: the YAML.
        where: what it is, for the message.

    Returns:
        Its value.

    Raises:
        ValueError: it is no YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is no YAML: {error}") from error


def read_config_file(path: str) -> dict[str, Any]:
    """Read a YAML or JSON file of arguments.

    Args:
        path: the file.

    Returns:
        Argument name -> value.

    Raises:
        ValueError: there is no such file, or it holds no mapping.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no config file {path!r}.")
    values = read_yaml(Path(path).read_text(encoding="utf-8"), path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a mapping of argument names to values.")
    return values


def config_flags(values: dict[str, Any]) -> list[str]:
    """Flags that say the same as `values`; a value may stand for a list of one, and null for the default."""
    flags: list[str] = []
    for key, value in values.items():
        if value is not None:
            items = value if isinstance(value, list) else [value]
            flags += [f"--{key}", *(str(item) for item in items)]
    return flags
