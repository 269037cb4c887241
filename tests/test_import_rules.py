"""What keeps the package exportable: a flat file ships to the Hub with every model that needs it.

R1 flat files import the standard library, torch, transformers, huggingface_hub.dataclasses and siblings only
R2 siblings are imported exactly as `from .name import thing`
R3 no other line of a flat file, docstrings included, begins with `from .` or `import .`
R4 a file of one architecture is imported by this architecture only, and by those that build on it; so shared files
   import shared files only
R5 flat files never import a folder; folders, training and tests import absolutely; the package imports neither
R6 no `isinstance` against classes of shared files or of other architectures (a remotely loaded class is another
   class); an architecture may recognise its own parts, as `_init_weights` does
R7 folders of the package import each other downwards only, from `cli` to `data`
R8 what ships with each architecture is a known set of files of a known size
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_synlm"
FLAT = {file.stem: file for file in sorted(PACKAGE.glob("*.py")) if file.name != "__init__.py"}
FOLDERS = (*(path for path in PACKAGE.iterdir() if path.is_dir()), ROOT / "training", ROOT / "tests")
OUTSIDE = sorted(file for folder in FOLDERS for file in folder.rglob("*.py"))
ARCHITECTURES = [name.removeprefix("modeling_") for name in FLAT if name.startswith("modeling_")]
ALLOWED_TOP = {"torch", "transformers", *sys.stdlib_module_names}
# Optional kernels behind a PyTorch reference: only inside `try`, which the loader of remote code skips.
OPTIONAL = {"triton"}

# From the bottom to the top, and the two imports that go up.
FOLDER_ORDER = ("data", "hub", "conversion", "evaluation", "viz", "training", "cli")
UPWARDS = {
    ("data/prepare.py", "hub"),  # is told a tokenizer as everything else that loads one
    ("data/sources.py", "evaluation"),  # leaves out punctuation as evaluation does
}

# What ships with each architecture, besides `configuration_base` and its own files; the lines of all, at most.
MODULES = "hidden_states losses matrix_products module_tools outputs token_batch trees "
SEARCH = "actions generation_actions generation_joint generation_mixin generation_words "
SEARCH += "search_actions search_outputs search_parsing search_proposals search_stack search_state search_word_head "
SEARCH += "search_words "
RECURRENT = "actions generation_words recurrent_cache recurrent_generation recurrent_language_model "
RECURRENT += "recurrent_sentences "
# Tree LM has RNNG's derivations: its actions, its search and what calls it.
# URNNG has GPST's actions and search, and an LSTM over stacks.
BUILDS_ON = {"tree_lm": {"rnng"}, "urnng": {"gpst", "rnng"}}
LABELED_SEARCH = "configuration_rnng rnng_actions rnng_composition rnng_fast_track rnng_fast_track_generation "
LABELED_SEARCH += "rnng_forest_lstm rnng_generation rnng_particles rnng_plan rnng_stack_machine "
DISTANCES = "binary_trees configuration_recurrent configuration_syntactic_distance recurrent_distances "
DISTANCES += "recurrent_layers syntactic_distance "
SHIPPED = {
    "gpst": (MODULES + SEARCH, 8080),
    "rnng": (MODULES + SEARCH + "given_trees", 8910),
    "urnng": (MODULES + SEARCH + "given_trees gpst_stack_machine rnng_forest_lstm", 6310),
    "on_lstm": (MODULES + RECURRENT + DISTANCES + "recurrent_running_sum", 4080),
    "prpn": (MODULES + RECURRENT + DISTANCES, 4680),
    "palm": (MODULES + RECURRENT + "configuration_recurrent recurrent_layers", 3600),
    "ordered_memory": (MODULES + RECURRENT + DISTANCES + "recurrent_running_sum", 3750),
    "tree_lm": (MODULES + SEARCH + LABELED_SEARCH + "given_trees tree_attention", 9540),
    "pushdown": (MODULES + SEARCH + "given_trees tree_attention", 6320),
    "lstm": (MODULES + RECURRENT + "recurrent_layers", 3120),
}


@cache
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


def top_names(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in absolute_imports(tree)}


def relative_imports(file: Path) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(parse(file)) if isinstance(node, ast.ImportFrom) and node.level > 0]


def architecture(name: str) -> str | None:
    """`gpst` for `modeling_gpst`, `configuration_gpst` and `gpst_*`; None for shared files."""
    for known in ARCHITECTURES:
        if name in (f"modeling_{known}", f"configuration_{known}") or name.startswith(f"{known}_"):
            return known
    return None


def closure(*names: str) -> set[str]:
    """The flat files that some of them need, themselves included."""
    found, agenda = set(), list(names)
    while agenda:
        name = agenda.pop()
        if name not in found:
            found.add(name)
            agenda += [node.module for node in relative_imports(FLAT[name])]
    return found


@cache
def classes(file: Path) -> set[str]:
    return {node.name for node in ast.walk(parse(file)) if isinstance(node, ast.ClassDef)}


def isinstance_checks(file: Path) -> Iterator[tuple[int, set[str]]]:
    """Line and names of the classes of every `isinstance` and `issubclass`."""
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"isinstance", "issubclass"}:
            tested = node.args[1]
            kinds = tested.elts if isinstance(tested, ast.Tuple) else [tested]
            yield node.lineno, {getattr(kind, "id", getattr(kind, "attr", "")) for kind in kinds}


def test_files_belong_to_architectures_by_their_first_word():
    assert set(SHIPPED) == set(ARCHITECTURES)
    cases = {"rnng_forest_lstm": "rnng", "on_lstm_layer": "on_lstm", "recurrent_layers": None, "modeling_lstm": "lstm"}
    assert {name: architecture(name) for name in cases} == cases
    assert not {name for name in FLAT if (PACKAGE / name).is_dir()}, "a file and a folder of one name"


def test_r1_flat_files_import_only_what_every_user_has():
    for name, file in FLAT.items():
        tree = parse(file)
        optional = set().union(*(top_names(node) for node in ast.walk(tree) if isinstance(node, ast.Try))) & OPTIONAL
        wrong = {
            module
            for module in absolute_imports(tree) - {"huggingface_hub.dataclasses"}
            if module.split(".")[0] not in ALLOWED_TOP | optional
        }
        assert not wrong, f"{name} imports {sorted(wrong)}: a Hub repository would demand them of every user"
        assert set(get_imports(file)) <= ALLOWED_TOP | {"huggingface_hub"}, name


def test_r2_siblings_are_imported_by_name():
    for name, file in FLAT.items():
        for node in relative_imports(file):
            assert node.level == 1 and node.module in FLAT and node.names[0].name != "*", (
                f"{name}:{node.lineno} must read `from .name import thing`, or the file is not copied to the Hub"
            )
        missing = [path for path in get_relative_import_files(file) if not Path(path).exists()]
        assert not missing, f"saving a model would fail: {name} leads to {missing}"


def test_r3_the_scanner_of_the_hub_sees_the_imports_and_nothing_else():
    for name, file in FLAT.items():
        nodes = relative_imports(file)
        assert set(get_relative_imports(file)) == {node.module for node in nodes}, name
        lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        found = {number for number, line in lines if re.match(r"\s*(from|import)\s+\.", line)}
        assert found == {node.lineno for node in nodes}, f"{name}: some lines only look like imports"


def test_r4_files_of_an_architecture_are_its_own():
    for name, file in FLAT.items():
        for node in relative_imports(file):
            owner = architecture(node.module)
            own = architecture(name)
            assert owner in {None, own} | BUILDS_ON.get(own, set()), (
                f"{name}:{node.lineno} imports {node.module}, a file of {owner}"
            )


def test_r5_nothing_points_up():
    for name, file in FLAT.items():
        assert "hf_synlm" not in top_names(parse(file)), f"{name} imports the package"
    for file in OUTSIDE:
        assert not relative_imports(file), f"{file} must write `from hf_synlm.name import thing`"
    for file in PACKAGE.rglob("*.py"):
        assert not top_names(parse(file)) & {"training", "tests"}, f"{file} imports scripts or tests"


def test_r6_no_isinstance_against_shared_classes():
    for name, file in FLAT.items():
        others = [other for other in FLAT if architecture(other) is None or architecture(other) != architecture(name)]
        foreign = set().union(*(classes(FLAT[other]) for other in others)) - classes(file)
        for line, tested in isinstance_checks(file):
            assert not tested & foreign, f"{name}:{line}: isinstance is false for remotely loaded models"


def test_r7_folders_import_downwards():
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(FOLDER_ORDER)
    rank = {name: place for place, name in enumerate(FOLDER_ORDER)}
    upwards = set()
    for file in PACKAGE.glob("*/**/*.py"):
        name = file.relative_to(PACKAGE)
        modules = {module.split(".")[1] for module in absolute_imports(parse(file)) if module.startswith("hf_synlm.")}
        upwards |= {(str(name), top) for top in modules if rank.get(top, -1) > rank[name.parts[0]]}
    assert upwards == UPWARDS


@pytest.mark.parametrize("name", SHIPPED)
def test_r8_what_ships_with_each_architecture(name):
    shared, most_lines = SHIPPED[name]
    own = {other for other in FLAT if architecture(other) == name}
    files = closure(f"modeling_{name}", f"configuration_{name}")
    assert files == own | {"configuration_base", *shared.split()}
    num_lines = sum(len(FLAT[file].read_text(encoding="utf-8").splitlines()) for file in files)
    assert num_lines <= most_lines, f"{name} ships {num_lines} lines: what does it not need?"
