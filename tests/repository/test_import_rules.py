"""What keeps the package in order and exportable: modules that ship are written to the Hub as flat files.

R1 what ships imports the standard library, torch, transformers, huggingface_hub.dataclasses and its own closure only
R2 imports are absolute; no other line of what ships looks like one to the scanners; flat names are unique
R3 an architecture imports another one only where BUILDS_ON says so
R4 no `isinstance` against classes of shared modules or of other architectures (a remotely loaded class is another
   class); an architecture may recognise its own parts, as `_init_weights` does
R5 rooms import downwards only, and no modules import each other in a circle
R6 what ships with each architecture is a known set of files of a known size
R7 a listing of a folder fits a screen
R8 every source that is given away says its licence in its first line
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from hf_synlm.hub.flatten import flat_files, flat_name
from hf_synlm.models import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_synlm"
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}
ROOMS = "trees core search generation recurrent models data hub conversion evaluation viz training cli".split()
# What users of the Hub get, and what lies in the same rooms but is for makers of inputs.
UNSHIPPED = {"hf_synlm.trees.codecs"}
SHIPPING_ROOMS = ROOMS[: ROOMS.index("models") + 1]
SHIPPING = {
    name: file
    for name, file in MODULES.items()
    if name.count(".") > 1 and name.split(".")[1] in SHIPPING_ROOMS and file.name != "__init__.py"
    if name not in UNSHIPPED
}
ALLOWED_TOP = {"torch", "transformers", "safetensors", "hf_synlm", *sys.stdlib_module_names}

# URNNG has RNNG's LSTM over stacks.
BUILDS_ON = {"urnng": {"rnng"}}
# What ships with each architecture, besides its own files; the lines of all, at most.
SHARED = (
    "cache configuration_base hidden_states losses matrix_products module_tools outputs rows token_batch trees_spans "
)
SEARCH = "generation_given_trees generation_joint generation_mixin generation_base "
SEARCH += "search_outputs search_parsing search_next_tokens search_stack search_state search_token_head "
SEARCH += "search_synchronous search_beliefs "
BINARY = "trees_actions generation_action_decoder search_action_beam search_level_machine "
STATES = "trees_given generation_tree_states "
RECURRENT = "trees_actions generation_base recurrent_cache recurrent_generation recurrent_language_model "
RECURRENT += "recurrent_sentences "
LABELED = (
    "trees_transitions search_labeled_configuration search_labeled_machine search_labeled_fast_track "
    "search_labeled_best_first search_labeled_decoder generation_labeled_mixin generation_labeled_classification "
)
DISTANCES = "trees_binary configuration_recurrent recurrent_configuration_distances recurrent_distance_model "
DISTANCES += "recurrent_layers recurrent_distances "
SHIPPED = {
    "gpst": (SHARED + SEARCH + BINARY + "compiled_levels trees_prefixes", 8770),
    "rnng": (SHARED + SEARCH + STATES + LABELED + "compiled_levels", 8930),
    "urnng": (SHARED + SEARCH + BINARY + STATES + "compiled_levels rnng_forest_lstm", 6510),
    "on_lstm": (SHARED + RECURRENT + DISTANCES + "recurrent_running_sum", 4040),
    "prpn": (SHARED + RECURRENT + DISTANCES, 4470),
    "palm": (SHARED + RECURRENT + "configuration_recurrent recurrent_layers", 3590),
    "ordered_memory": (SHARED + RECURRENT + DISTANCES + "recurrent_running_sum", 3730),
    "tree_lm": (SHARED + SEARCH + STATES + LABELED + "backbone_adapter search_tree_attention trees_prefixes", 8992),
    "pushdown": (SHARED + SEARCH + STATES + "search_tree_attention trees_prefixes", 6270),
    "pcfg": (
        SHARED + "binary_trees generation_base recurrent_generation recurrent_sentences trees_actions trees_given",
        4490,
    ),
    "lstm": (SHARED + RECURRENT + "recurrent_layers", 3200),
    "span_parser": (
        "backbone_adapter binary_trees cache configuration_base module_tools outputs rows token_batch trees_spans",
        1970,
    ),
}


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


@cache
def imports(file: Path) -> tuple[str, ...]:
    """Dotted names of all modules that are imported, inside functions, `try` and TYPE_CHECKING too."""
    names = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} must write `from hf_synlm.room.name import thing`"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            # `from hf_synlm.room import module` imports the module, too.
            names += [name for name in whole if name in MODULES]
            if node.module not in MODULES or any(name not in MODULES for name in whole):
                names.append(node.module or "")
    return tuple(names)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def architecture(module: str) -> str | None:
    """`gpst` for `hf_synlm.models.gpst.chart`; None for shared modules."""
    parts = module.split(".")
    return parts[2] if len(parts) > 3 and parts[:2] == ["hf_synlm", "models"] else None


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


def test_architectures_are_the_folders_of_models():
    folders = {path.name for path in (PACKAGE / "models").iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(ARCHITECTURES) == set(SHIPPED)
    for name in ARCHITECTURES:
        assert {f"hf_synlm.models.{name}.{kind}_{name}" for kind in ("configuration", "modeling")} < set(SHIPPING)


def test_r1_what_ships_imports_only_what_every_user_has():
    for name, file in SHIPPING.items():
        wrong = {
            module
            for module in imports(file)
            if module.split(".")[0] not in ALLOWED_TOP and module not in ("huggingface_hub.dataclasses", "peft")
        }
        assert not wrong, f"{name} imports {sorted(wrong)}: a Hub repository would demand them of every user"
        assert {module for module in imports(file) if module.startswith("hf_synlm")} <= set(SHIPPING), name
        # PEFT is imported where it is installed; transformers sees this and asks nobody for it.
        assert set(get_imports(file)) <= ALLOWED_TOP | {"huggingface_hub"}, name


def test_r2_the_scanners_see_the_imports_and_nothing_else(tmp_path: Path):
    flat = {name: flat_name(name.removeprefix("hf_synlm.")) for name in SHIPPING}
    assert len(set(flat.values())) == len(flat), "two modules have one flat name"
    for name in ARCHITECTURES:
        for file, text in flat_files(name).items():
            (tmp_path / file).write_text(text, encoding="utf-8")
    for name, file in SHIPPING.items():
        nodes = [node for node in ast.walk(parse(file)) if isinstance(node, ast.Import | ast.ImportFrom)]
        own = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_synlm")]
        lines = file.read_text(encoding="utf-8").splitlines()
        found = {number for number, line in enumerate(lines, 1) if re.match(r"\s*(from|import)\s+(\.|hf_synlm)", line)}
        assert found == {node.lineno for node in own}, f"{name}: write `from hf_synlm.x import y`, in code only"
        copy = tmp_path / f"{flat[name]}.py"
        assert set(get_relative_imports(copy)) == {flat[str(node.module)] for node in own}, name
        assert len(copy.read_text(encoding="utf-8").splitlines()) == len(lines), "lines of tracebacks move"


def test_r3_architectures_are_independent():
    for name, file in SHIPPING.items():
        for module in imports(file):
            own, other = architecture(name), architecture(module)
            assert other in {None, own} | BUILDS_ON.get(own or "", set()), f"{name} imports {module}"


def test_r4_no_isinstance_against_shared_classes():
    for name, file in SHIPPING.items():
        others = [
            other for other in SHIPPING if architecture(other) is None or architecture(other) != architecture(name)
        ]
        foreign = set().union(*(classes(SHIPPING[other]) for other in others)) - classes(file)
        for line, tested in isinstance_checks(file):
            assert not tested & foreign, f"{name}:{line}: isinstance is false for remotely loaded models"


def test_r5_nothing_points_up_and_there_is_no_circle():
    assert {room(name) for name in MODULES} == {"", *ROOMS}
    graph = {}
    for name, file in MODULES.items():
        own = [module for module in imports(file) if module.split(".")[0] == "hf_synlm"]
        if name == "hf_synlm":
            continue  # its public names come from above
        for module in own:
            if module != "hf_synlm":
                assert ROOMS.index(room(module)) <= ROOMS.index(room(name)), f"{name} imports {module}, which is above"
        graph[name] = {module for module in own if module not in {"hf_synlm", name}}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a circle
    for file in MODULES.values():
        assert not {module.split(".")[0] for module in imports(file)} & {"training", "tests"}, f"{file} imports scripts"
    for file in [*(ROOT / "training").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        imports(file)  # absolute


@pytest.mark.parametrize("name", SHIPPED)
def test_r6_what_ships_with_each_architecture(name):
    shared, most_lines = SHIPPED[name]
    own = {flat_name(module.removeprefix("hf_synlm.")) for module in SHIPPING if architecture(module) == name}
    files = flat_files(name)
    assert {file.removesuffix(".py") for file in files} == own | set(shared.split())
    num_lines = sum(len(text.splitlines()) for text in files.values())
    assert num_lines <= most_lines, f"{name} ships {num_lines} lines: what does it not need?"


def test_r7_a_listing_fits_a_screen():
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries == {"__init__.py", "py.typed", *ROOMS}
    for folder in {file.parent for file in MODULES.values()}:
        modules = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(modules) <= 18, f"{folder} has {len(modules)} modules"


def test_r8_every_source_names_its_licence():
    """The copies on the Hub have the same lines; LICENSE has the text."""
    folders = ("hf_synlm", "training", "examples", "docs", "model_cards")
    sources = [ROOT / "synlm.py", *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    for file in sources:
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        assert first == "# SPDX-License-Identifier: Apache-2.0", file
