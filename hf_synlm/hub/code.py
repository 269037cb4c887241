# SPDX-License-Identifier: Apache-2.0
"""One repository of the Hub with the code of all architectures: a push to it repairs every model that names it."""

import yaml

import hf_synlm
from hf_synlm.hub.card import TAGS
from hf_synlm.hub.export import requirements
from hf_synlm.hub.flatten import LICENSE, all_flat_files
from hf_synlm.hub.upload import check_repo_id, commit_files

_CARD = """---
{front_matter}---

# Code of syntactic language models

The code of the models that were exported by `synlm export --code-repo {repo_id}`, as hf_synlm {version} has it.
Their configurations name it (`auto_map`), and `from_pretrained(..., trust_remote_code=True)` loads it from here: a
commit here changes all of them. `code_revision` pins a commit. `requirements.txt` says which versions the code needs.

The licence of the code is Apache-2.0 (`LICENSE`). `synlm push-code {repo_id}` wrote this repository.
"""


def code_repository(repo_id: str) -> dict[str, str]:
    """Files of a repository of code.

    Args:
        repo_id: its name on the Hub, for its card.

    Returns:
        Text by name: the code of all architectures, its licence, its requirements, and a card.

    Raises:
        ValueError: `repo_id` is not OWNER/NAME.
    """
    check_repo_id(repo_id)
    facts = {"license": "apache-2.0", "library_name": "transformers", "tags": list(TAGS)}
    card = _CARD.format(front_matter=yaml.safe_dump(facts), repo_id=repo_id, version=hf_synlm.__version__)
    return {
        **all_flat_files(),
        "LICENSE": LICENSE.read_text(encoding="utf-8"),
        "requirements.txt": requirements(),
        "README.md": card,
    }


def push_code(
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str = "Upload code",
) -> str:
    """Upload the code of all architectures as one commit, for models that were exported with `code_repo`.

    Args:
        repo_id: name on the Hub, as in "organization/name"; the repository is made if it does not exist.
        private: visibility of a new repository.
        revision: branch, made if it does not exist; by default the main one, which models load.
        token: access token; by default the one that `hf auth login` stored.
        commit_message: message of the commit.

    Returns:
        The hash of the commit, for `from_pretrained(..., code_revision=...)`.

    Raises:
        ValueError: `repo_id` is not OWNER/NAME.
        OSError: the Hub refuses the upload or cannot be reached.
    """
    files = {name: text.encode() for name, text in code_repository(repo_id).items()}
    return commit_files(repo_id, files, private, revision, token, commit_message)
