"""What saving a model does to its code: from the folders of this package to the flat files of a Hub repository.

The loader of transformers reads remote code from one folder and follows `from .name import thing` only. Our code lies
in folders and imports absolutely. So saving takes the configuration and modeling file of the architecture and all that
they import, and writes each under a flat name: `hf_synlm/models/gpst/chart.py` becomes `gpst_chart.py`. Only the lines
of its imports change, and none is added: the line numbers of a traceback on the Hub are those of this repository.

`SyntacticConfig.save_pretrained` calls `write_code`, and every way of saving a model calls that: `save_pretrained`,
`push_to_hub`, Trainer, `merge_and_unload` of PEFT. A model that was loaded from the Hub with its own code has flat
files already, which transformers copies.
"""

import os
import re
from pathlib import Path

import hf_synlm
from hf_synlm.core.configuration_base import SyntacticConfig

PACKAGE = Path(hf_synlm.__file__).parent
_IMPORT = re.compile(r"^(\s*from )hf_synlm\.([\w.]+)( import )", re.MULTILINE)


def flat_name(module: str) -> str:
    """Name on the Hub of a module: `gpst_chart` for `models.gpst.chart`, `losses` for `core.losses`."""
    *folders, name = [part for part in module.split(".") if part not in ("models", "core")]
    folder = "_".join(folders)
    return name if not folder or name.endswith(folder) else f"{folder}_{name}"


def flat_files(architecture: str) -> dict[str, str]:
    """The code of an architecture (a folder in `hf_synlm/models`) as it ships, shared modules too: text by name."""
    files: dict[str, str] = {}
    agenda = [f"models.{architecture}.{kind}_{architecture}" for kind in ("configuration", "modeling")]
    while agenda:
        module = agenda.pop()
        name = f"{flat_name(module)}.py"
        if name not in files:
            text = PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
            agenda += [found[1] for found in _IMPORT.findall(text)]
            files[name] = _IMPORT.sub(lambda found: f"{found[1]}.{flat_name(found[2])}{found[3]}", text)
    return dict(sorted(files.items()))


def write_code(config: SyntacticConfig, folder: str | os.PathLike) -> None:
    """Write the code of a configuration and its models into a folder; files of the same names are replaced.

    A configuration of a user's subclass loads as the class of this package.
    """
    owner = next(cls for cls in type(config).__mro__ if cls.__module__.startswith("hf_synlm.models."))
    for name, text in flat_files(owner.__module__.split(".")[-2]).items():
        (Path(folder) / name).write_text(text, encoding="utf-8")
