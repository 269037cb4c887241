"""How many bytes a checkout has."""

import subprocess

from tests.helpers.documentation import ROOT

MIB = 2**20


def test_the_tree_stays_small():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in listed.split("\0") if name}
    assert sum(sizes.values()) <= 60 * MIB
    assert (
        sum(size for name, size in sizes.items() if not name.startswith(("model_cards/", "tests/goldens/")))
        <= 6.5 * MIB
    )
