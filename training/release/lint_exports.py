# SPDX-License-Identifier: Apache-2.0
"""Check the code of exported folders by mlinter, transformers' linter of models: `make lint` runs it.

    python training/release/lint_exports.py

`NOT_FOLLOWED` lists all that we do not follow, with the reason. A rule of this list that finds nothing is an error too.
"""

import sys
import tempfile
from pathlib import Path

from mlinter import DEFAULT_ENABLED_TRF_RULES, analyze_file, format_violation, iter_modeling_files

from hf_synlm.hub.flatten import flat_files
from hf_synlm.models import ARCHITECTURES

NOT_FOLLOWED = {
    "TRF004": "labels of a TreeLMForCausalLM stay tied where only its words were untied: no class attribute says so",
    "TRF010": "SyntacticConfig is not strict: it is never made itself, and every configuration that is made is strict",
    "TRF018": "weights begin as in the authors' programs; what super() draws would be drawn again, with other numbers",
    "TRF022": "the layer of LSTMForCausalLM that must not be split is torch's nn.LSTM, a class of no file here",
    "TRF028": "a line names the licence (SPDX), and LICENSE lies beside the code",
    "TRF036": "the projection of LSTMForCausalLM is nn.Sequential: other names would not load older weights",
    "TRF041": "branches on the configuration are options of users, which tests cover; no list of checkpoints is known",
    "TRF057": "docstrings are written by hand and checked by pydoclint; the decorator would add a second description",
}


def find_violations(folder: Path) -> dict[str, list[str]]:
    """What mlinter finds in the code of all architectures.

    Args:
        folder: an empty folder, in which the code is written as it is exported.

    Returns:
        Lines for a reader, by rule.
    """
    found: dict[str, list[str]] = {}
    for name in ARCHITECTURES:
        (folder / name).mkdir()
        for file, text in flat_files(name).items():
            (folder / name / file).write_text(text, encoding="utf-8")
    for file in iter_modeling_files(search_paths=[folder]):
        for violation in analyze_file(file, file.read_text(encoding="utf-8"), set(DEFAULT_ENABLED_TRF_RULES)):
            rule = violation.message.partition(":")[0]
            found.setdefault(rule, []).append(format_violation(violation).replace(f"{folder}/", ""))
    return found


def main() -> int:
    """Print what is wrong; returns 1 if something is."""
    with tempfile.TemporaryDirectory(prefix="hf_synlm_lint_") as folder:
        found = find_violations(Path(folder))
    wrong = [line for rule, lines in found.items() if rule not in NOT_FOLLOWED for line in lines]
    wrong += [f"{rule} is followed everywhere: take it out of NOT_FOLLOWED" for rule in NOT_FOLLOWED.keys() - found]
    print("\n".join(wrong) or f"mlinter: the code of {len(ARCHITECTURES)} architectures is in order")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
