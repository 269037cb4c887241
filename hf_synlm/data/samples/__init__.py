# SPDX-License-Identifier: Apache-2.0
"""The embedded default corpus: State of the Union addresses as raw text and with silver constituency trees.

`raw.{train,valid,test}.txt` hold one sentence per line and a blank line between addresses, and
`trees.{train,valid,test}.txt` one bracketed tree per line, of other addresses. `NOTICE.txt` is the licence: public
domain, CC0.
"""

from importlib import resources
from pathlib import Path

EMBEDDED = "embedded"


def resolve_embedded(name: str, sample: str) -> str:
    """Resolve a name of a file that may be "embedded".

    Args:
        name: a path, or "embedded".
        sample: the file that "embedded" stands for.

    Returns:
        The path.
    """
    return str(sample_path(sample)) if name == EMBEDDED else name


def sample_path(name: str) -> Path:
    """Return where a file of the embedded corpus lies.

    Args:
        name: e.g. "raw.train.txt".

    Returns:
        The path of the installed file.
    """
    return Path(str(resources.files(__name__).joinpath(name)))
