"""What keeps the package exportable: the flat files must be loadable from a Hub repository that holds nothing else.

R1 flat files import the standard library, torch, transformers, huggingface_hub.dataclasses and siblings only
R2 siblings are imported exactly as `from .name import thing`
R3 no other line of a flat file, docstrings included, begins with `from .` or `import .`
R4 no modeling file imports another modeling file
R5 flat files never import a folder; folders, training and tests import absolutely
R6 no `isinstance` against classes of shared files or of other architectures (a remotely loaded class is another
   class); an architecture may recognise its own parts, as `_init_weights` does
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_synlm"
FLAT = sorted(file for file in PACKAGE.glob("*.py") if file.name != "__init__.py")
MODELING = [file for file in FLAT if file.name.startswith("modeling_")]
ARCHITECTURES = [file.stem.removeprefix("modeling_") for file in MODELING]
SIBLINGS = {file.stem for file in FLAT}
OUTSIDE = sorted(
    file
    for folder in (*(path for path in PACKAGE.iterdir() if path.is_dir()), ROOT / "training", ROOT / "tests")
    for file in folder.rglob("*.py")
)
ALLOWED_TOP = {"torch", "transformers", *sys.stdlib_module_names}
ALLOWED_EXACT = {"huggingface_hub.dataclasses"}
# Optional kernels behind a PyTorch reference: only inside `try`, which the loader of remote code skips.
OPTIONAL = {"triton"}

flat = pytest.mark.parametrize("file", FLAT, ids=lambda file: file.name)
outside = pytest.mark.parametrize("file", OUTSIDE, ids=lambda file: file.relative_to(ROOT).as_posix())


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def absolute_imports(tree: ast.AST) -> set[str]:
    """Dotted names of all modules that are imported absolutely, inside functions and `try` blocks too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return names


def relative_imports(tree: ast.AST) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 0]


def imported_in_try(tree: ast.AST) -> set[str]:
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    return {name for block in blocks for name in absolute_imports(block)}


def architecture(file: Path) -> str | None:
    """`gpst` for `modeling_gpst.py`, `configuration_gpst.py` and `gpst_*.py`; None for shared files."""
    for name in ARCHITECTURES:
        if file.stem in (f"modeling_{name}", f"configuration_{name}") or file.stem.startswith(f"{name}_"):
            return name
    return None


def classes(file: Path) -> set[str]:
    return {node.name for node in ast.walk(parse(file)) if isinstance(node, ast.ClassDef)}


def test_there_are_flat_files():
    assert {"trees", "actions", "modeling_gpst", "configuration_gpst"} <= SIBLINGS


@flat
def test_r1_flat_files_import_only_what_every_user_has(file: Path):
    tree = parse(file)
    optional = {name for name in imported_in_try(tree) if name.split(".")[0] in OPTIONAL}
    names = absolute_imports(tree) - optional
    wrong = {name for name in names if name not in ALLOWED_EXACT and name.split(".")[0] not in ALLOWED_TOP}
    assert not wrong, f"{file.name} imports {sorted(wrong)}: a Hub repository would demand them of every user"


@flat
def test_r1_loader_demands_nothing_else(file: Path):
    assert set(get_imports(file)) <= ALLOWED_TOP | {"huggingface_hub"}


@flat
def test_r2_siblings_are_imported_by_name(file: Path):
    for node in relative_imports(parse(file)):
        assert node.level == 1 and node.module and "." not in node.module, (
            f"{file.name}:{node.lineno} must read `from .name import thing`, or the file is not copied to the Hub"
        )
        assert node.module in SIBLINGS, f"{file.name}:{node.lineno} imports {node.module}, which is no flat file"
        assert node.names[0].name != "*", f"{file.name}:{node.lineno} imports everything; name what is used"


@flat
def test_r2_every_file_the_scanner_sees_exists(file: Path):
    missing = [path for path in get_relative_import_files(file) if not Path(path).exists()]
    assert not missing, f"saving a model would fail: {file.name} leads to {missing}"


@flat
def test_r3_scanner_and_python_agree(file: Path):
    by_python = {node.module for node in relative_imports(parse(file))}
    assert set(get_relative_imports(file)) == by_python


@flat
def test_r3_no_other_line_looks_like_a_relative_import(file: Path):
    lines = file.read_text(encoding="utf-8").splitlines()
    code = {node.lineno for node in relative_imports(parse(file))}
    wrong = [number for number, line in enumerate(lines, 1) if re.match(r"\s*(from|import)\s+\.", line)]
    assert set(wrong) == code, f"{file.name}: lines {sorted(set(wrong) - code)} look like imports to the Hub's scanner"


@pytest.mark.parametrize("file", MODELING, ids=lambda file: file.name)
def test_r4_modeling_files_are_independent(file: Path):
    modules = {node.module for node in relative_imports(parse(file))}
    others = {name for name in modules if name and name.startswith("modeling_")}
    assert not others, f"{file.name} imports {sorted(others)}; share algorithms through a file of their own"


@flat
def test_r5_flat_files_do_not_import_the_package(file: Path):
    names = absolute_imports(parse(file))
    assert not {name for name in names if name.split(".")[0] == "hf_synlm"}


@outside
def test_r5_everything_else_imports_absolutely(file: Path):
    lines = [node.lineno for node in relative_imports(parse(file))]
    assert not lines, f"{file.name}: relative imports in lines {lines}; write `from hf_synlm.name import thing`"


@flat
def test_r5_no_flat_file_shares_its_name_with_a_folder(file: Path):
    assert not (PACKAGE / file.stem).is_dir()


@flat
def test_r6_no_isinstance_against_shared_classes(file: Path):
    others = [other for other in FLAT if architecture(other) is None or architecture(other) != architecture(file)]
    foreign = set().union(*map(classes, others)) - classes(file)
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"isinstance", "issubclass"}:
            tested = node.args[1]
            kinds = tested.elts if isinstance(tested, ast.Tuple) else [tested]
            names = {getattr(kind, "id", getattr(kind, "attr", None)) for kind in kinds}
            wrong = names & foreign
            assert not wrong, f"{file.name}:{node.lineno} tests for {sorted(wrong)}: false for remotely loaded models"


def test_training_scripts_are_not_imported_by_the_package():
    for file in PACKAGE.rglob("*.py"):
        assert not {name for name in absolute_imports(parse(file)) if name.split(".")[0] in {"training", "tests"}}
