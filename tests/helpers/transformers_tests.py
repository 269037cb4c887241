"""The test suite of transformers itself, as far as its source distribution holds it: found, imported, told our names.

`make` downloads the source distribution of the installed version and unpacks its `tests` folder; nothing of it is part
of this project. Three modules that the tests import are not in the distribution and stand in here, almost empty.
"""

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import transformers

# Where else to look than in the virtual environment.
VARIABLE = "TRANSFORMERS_TESTS"
FOLDER = "transformers_tests"
PACKAGE = "tests_of_transformers"

# The kinds of our models, by the mappings that the tests look a class's name up in.
MAPPINGS = {
    "MODEL_MAPPING_NAMES": "Model",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "ForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "ForSequenceClassification",
}

# Fields that every configuration has to take, with values that are not their defaults.
COMMON_FIELDS = {
    "return_dict": False, "output_hidden_states": True, "output_attentions": True, "dtype": "float16",
    "chunk_size_feed_forward": 5, "architectures": ["SomeModel"], "id2label": {0: "no", 1: "yes", 2: "perhaps"},
    "label2id": {"no": 0, "yes": 1, "perhaps": 2}, "problem_type": "regression",
}  # fmt: skip


def folder() -> Path:
    """Where the tests of the installed version of transformers lie, or should."""
    root = Path(os.environ.get(VARIABLE) or Path(sys.prefix) / FOLDER)
    return root / f"transformers-{transformers.__version__}" / "tests"


def missing() -> str | None:
    """What to do about it if they are not there."""
    if (folder() / "test_modeling_common.py").is_file():
        return None
    return (
        f"The tests of transformers {transformers.__version__} are not in {folder()}. `make transformers_tests` "
        f"fetches them into the virtual environment .venv; or unpack the source distribution and set {VARIABLE} to the "
        f"folder that holds transformers-{transformers.__version__}."
    )


def load(prefixes: tuple[str, ...]) -> tuple[Any, Any]:
    """Import `test_modeling_common` and `test_configuration_common`.

    Args:
        prefixes: of the names of our classes.

    Returns:
        The modules; the first takes our classes for models of transformers.
    """
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(folder())]
    sys.modules[PACKAGE] = package
    _stand_in("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
    _stand_in("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
    _stand_in("utils.test_configuration_utils", config_common_kwargs=COMMON_FIELDS)
    modeling = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    for mapping, kind in MAPPINGS.items():
        setattr(modeling, mapping, {**getattr(modeling, mapping), **{p.lower(): p + kind for p in prefixes}})
    # It imports transformers a second time, from the folder above the tests, which is not there.
    real, transformers.utils.direct_transformers_import = transformers.utils.direct_transformers_import, _installed
    try:
        return modeling, importlib.import_module(f"{PACKAGE}.test_configuration_common")
    finally:
        transformers.utils.direct_transformers_import = real


def _installed(path: Any) -> Any:
    return transformers


def _stand_in(name: str, **contents: Any) -> None:
    """Put a module, and the package that it would be in, where the tests import it from."""
    parent = f"{PACKAGE}.{name.partition('.')[0]}"
    for full in (parent, f"{PACKAGE}.{name}"):
        sys.modules[full] = types.ModuleType(full)
        sys.modules[full].__path__ = []
    vars(sys.modules[f"{PACKAGE}.{name}"]).update(contents)
