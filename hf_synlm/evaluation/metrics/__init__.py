"""Modules of the package `evaluate`: `evaluate.load(metric_path("unlabeled_parsing_f1"))`.

Each folder is what a Space of the Hub holds: the module, its card, a demo, and what they need. They load from disk
without a network.
"""

from pathlib import Path

NAMES = ("labeled_parsing_f1", "surprisal", "syntaxgym", "unlabeled_parsing_f1")


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
