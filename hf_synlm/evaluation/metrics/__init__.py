"""Modules of the package `evaluate`: `evaluate.load(metric_path("unlabeled_parsing_f1"))`.

Each folder is what a Space of the Hub holds: the module, its card, a demo, and what they need. They load from disk
without a network.
"""

from pathlib import Path
from typing import Any

NAMES = ("labeled_parsing_f1", "surprisal", "syntaxgym", "unlabeled_parsing_f1")


class ListInputs:
    """Mixin of the modules: a single text where they take a list is an error, not a list of characters."""

    def add_batch(self, **inputs: Any) -> None:
        """Add inputs.

        Args:
            **inputs: lists by name.

        Raises:
            ValueError: an input is a text, not a list.
        """
        for name, value in inputs.items():
            if isinstance(value, (str, bytes)):
                raise ValueError(f"{name} is {value[:40]!r}, a single text: give a list, {name}=[...]")
        super().add_batch(**inputs)  # type: ignore[misc]  # of evaluate.Metric, which a module names second


def metric_path(name: str) -> str:
    """Folder of a module.

    Args:
        name: one of `NAMES`.

    Returns:
        The path, for `evaluate.load` and for `huggingface_hub.upload_folder`.

    Raises:
        ValueError: there is no such module.
    """
    if name not in NAMES:
        raise ValueError(f"there is no metric {name!r}: choose one of {', '.join(NAMES)}")
    return str(Path(__file__).parent / name)
