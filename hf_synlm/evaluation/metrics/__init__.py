# SPDX-License-Identifier: Apache-2.0
"""Modules of the package `evaluate`: `evaluate.load(metric_path("unlabeled_parsing_f1"))`.

Each folder is the content of a Space on the Hub: the module, its card, a demo, and their requirements. They load from
disk without a network.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_synlm.data.text import check_list

NAMES = ("labeled_parsing_f1", "surprisal", "syntaxgym", "unlabeled_parsing_f1")


class ListInputs:
    """Mixin of the modules, whose inputs are lists of texts."""

    _compute: Callable[..., Any]

    def _text_info(self, description: str | None, citation: str, *inputs: str, **more: Any) -> Any:
        """The `evaluate.MetricInfo` of a module, documented by its `_compute`."""
        import datasets
        import evaluate

        return evaluate.MetricInfo(
            description=description,
            citation=citation,
            inputs_description=self._compute.__doc__,
            features=datasets.Features({name: datasets.Value("string") for name in inputs}),
            **more,
        )

    def add_batch(self, **inputs: Any) -> None:
        """Add inputs; a single text raises ValueError, because it would count as a list of characters."""
        for name, value in inputs.items():
            check_list(name, value)
        super().add_batch(**inputs)  # type: ignore[misc]  # of evaluate.Metric, which a module names second


def metric_path(name: str) -> str:
    """Folder of a module, for `evaluate.load` and `huggingface_hub.upload_folder`."""
    return str(Path(__file__).parent / name)
