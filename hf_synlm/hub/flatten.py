# SPDX-License-Identifier: Apache-2.0
"""What saving a model does to its code: from the folders of this package to the flat files of a Hub repository.

The loader of transformers reads remote code from one folder and follows `from .name import thing` only. Our code lies
in folders and imports absolutely. So saving takes the configuration and modeling file of the architecture and all that
they import, and writes each under a flat name: `hf_synlm/models/gpst/chart.py` becomes `gpst_chart.py`. Only the lines
of its imports change, and none is added: the line numbers of a traceback on the Hub are those of this repository.

`SyntacticConfig.save_pretrained` calls `write_code`, and every way of saving a model calls that: `save_pretrained`,
`push_to_hub`, Trainer, `merge_and_unload` of PEFT. Classes of your own are saved with their model if you call their
`register_for_auto_class`, as everywhere in transformers; otherwise a warning says so. What their file imports by `from
hf_synlm.room.module` is saved, too, where the room ships. A model that was loaded from the Hub with its own code has
flat files already, which transformers copies.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version
from transformers.utils import logging

import hf_synlm
from hf_synlm.data.files import write_text
from hf_synlm.hub.checkpoint import code_files
from hf_synlm.models import ARCHITECTURES

if TYPE_CHECKING:
    from hf_synlm.core.configuration_base import SyntacticConfig

logger = logging.get_logger(__name__)

PACKAGE = Path(hf_synlm.__file__).parent
LICENSE = PACKAGE / "hub" / "LICENSE"
# Ends of the names of our models, of which some have no Auto class.
_KINDS = ("Model", "ForCausalLM", "ForSequenceClassification", "PreTrainedModel")
_NEWEST = re.compile(r'^NEWEST_TRANSFORMERS = "([\d.]+)"$', re.MULTILINE)
# Modules that ship; what a user's file imports from others, or from a folder, stays as it is.
_IMPORT = re.compile(
    r"^(\s*from )hf_synlm\.((?:core|trees|search|generation|recurrent|models)\.[\w.]+)( import )", re.MULTILINE
)


def flat_name(module: str) -> str:
    """Name on the Hub of a module: `gpst_chart` for `models.gpst.chart`, `losses` for `core.losses`."""
    *folders, name = [part for part in module.split(".") if part not in ("models", "core")]
    folder = "_".join(folders)
    return name if not folder or name.endswith(folder) else f"{folder}_{name}"


def flat_files(architecture: str) -> dict[str, str]:
    """The code of an architecture (a folder in `hf_synlm/models`) as it ships, shared modules too: text by name."""
    kinds = ("configuration", "modeling")
    return _with_imports({}, [f"models.{architecture}.{kind}_{architecture}" for kind in kinds])


def _with_imports(own: Mapping[str, str], modules: Iterable[str] = ()) -> dict[str, str]:
    """Code of a user (text by name) and modules of this package as they ship, with all that they import."""
    files, agenda = dict[str, str](), [*own, *modules]
    while agenda:
        module = agenda.pop()
        name = module if module in own else f"{flat_name(module)}.py"
        if name not in files:
            text = own[name] if name in own else _file_of(module).read_text(encoding="utf-8")
            files[name], more = _flattened(text)
            agenda += more
    return dict(sorted(files.items()))


def _flattened(text: str) -> tuple[str, list[str]]:
    """Code with flat names of the modules that travel with it, and these modules."""
    modules = []

    def flatten(line: re.Match[str]) -> str:
        if not _file_of(line[2]).is_file():
            return line[0]
        modules.append(line[2])
        return f"{line[1]}.{flat_name(line[2])}{line[3]}"

    return _IMPORT.sub(flatten, text), modules


def _file_of(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def all_flat_files() -> dict[str, str]:
    """The code of all architectures, as `push_code` puts it into one repository: text by name."""
    return {name: text for architecture in ARCHITECTURES for name, text in flat_files(architecture).items()}


def outdated_code(folder: str | os.PathLike) -> str | None:
    """What to say of code in a folder that was written for older transformers than this package's; else None."""
    base = Path(folder) / "configuration_base.py"
    if not base.is_file():
        return None
    newest, here = _newest(base), _newest(PACKAGE / "core" / base.name)
    return f"written for transformers up to {newest}: `synlm export` renews it" if newest < here else None


def _newest(file: Path) -> Version:
    """The newest transformers that code was tested with."""
    found = _NEWEST.search(file.read_text(encoding="utf-8"))
    return Version(found[1] if found else "5.23")  # the last one before the code said so


def write_code(config: "SyntacticConfig", folder: str | os.PathLike) -> None:
    """Write the code of a configuration and its models into a folder; files of the same names are replaced.

    A configuration of a user's subclass loads as the class of this package. Code of an earlier version that has other
    names stays in the folder: it may be the user's, and nothing imports it. Nothing is written if `auto_map` names
    another repository for all of the code.
    """
    references = [reference for reference in (config.auto_map or {}).values() if "--" not in reference]
    if config.auto_map and not references:
        return
    owner = next((cls for cls in type(config).__mro__ if cls.__module__.startswith("hf_synlm.models.")), None)
    files = flat_files(owner.__module__.split(".")[-2]) if owner else {}
    # Where transformers has copied the file of a user's class, that file and what it imports.
    copied = {file for reference in references for file in code_files(Path(folder), reference) if file.is_file()}
    own = {file.name: file.read_text(encoding="utf-8") for file in copied if file.name not in files}
    files |= _with_imports(own)
    for name, text in files.items():
        write_text(Path(folder) / name, text)
    if files and not (Path(folder) / LICENSE.name).exists():  # that of the weights, say
        write_text(Path(folder) / LICENSE.name, LICENSE.read_text(encoding="utf-8"))
    named = [reference.partition(".") for reference in references]
    missing = sorted({f"{file}.py" for file, _, _ in named if not (Path(folder) / f"{file}.py").is_file()})
    known = {name for _, _, name in named}
    known |= {f"{owner.__name__.removesuffix('Config')}{kind}" for kind in _KINDS} if owner else set()
    unsaved = [*missing, *sorted(set(config.architectures or ()) - known)]
    if unsaved:
        logger.warning(
            f"The code of {', '.join(unsaved)} is not saved with the model, so that {folder} does not load "
            "elsewhere as you made it. Before saving, call register_for_auto_class() of your configuration, and "
            'register_for_auto_class("AutoModelForCausalLM") (or another Auto class) of your model.'
        )
