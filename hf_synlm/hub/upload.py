# SPDX-License-Identifier: Apache-2.0
"""Upload a folder, or code, to the Hub as one commit. What is refused is refused without torch."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from hf_synlm.hub.checkpoint import PICKLES, check_complete

# Refusals of the Hub, and what its client's HTTP library raises where nobody answers.
_HUB_ERRORS = HfHubHTTPError.__bases__
# Not pushed: settings of editors and environments (.env), and what Python left behind.
_LEFT_OUT = [".*", "*/.*", "__pycache__/*", "*/__pycache__/*"]


def push_to_hub(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Upload an exported folder as one commit, hidden files left out.

    All files arrive or none: the commit is made on the Hub once the last of them is there.

    Args:
        folder: a folder that `export_model` wrote. The example on its card gets the name of the repository.
        repo_id: name on the Hub, as in "organization/name"; the repository is made if it does not exist.
        private: visibility of a new repository.
        revision: branch, made if it does not exist; by default the main one.
        token: access token; by default the one that `hf auth login` stored.
        commit_message: message of the commit.

    Returns:
        The hash of the commit, for `from_pretrained(..., revision=...)`.

    Raises:
        ValueError: if `repo_id` is not a valid name, or the folder is incomplete or holds pickled files. Nothing is
            uploaded then.
        OSError: if the Hub refuses the upload or cannot be reached.
    """
    check_repo_id(repo_id)
    files: dict[str, Any] = {name: Path(folder) / name for name in files_to_push(folder)} | _named_card(folder, repo_id)
    return commit_files(repo_id, files, private, revision, token, commit_message)


def commit_files(
    repo_id: str, files: Mapping[str, Any], private: bool, revision: str | None, token: str | None, message: str
) -> str:
    """Make one commit of files (a path or bytes by name), and the repository and branch if needed; returns its hash."""
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        commit = api.create_commit(repo_id, operations, commit_message=message, revision=revision)
    except _HUB_ERRORS as error:
        raise ConnectionError(f"{repo_id!r} was not pushed: {error}") from error
    return str(commit.oid)


def _named_card(folder: str | os.PathLike, repo_id: str) -> dict[str, bytes]:
    """Files of a card that names another repository, with this one."""
    from hf_synlm.hub.card import FACTS_FILE, facts_text, saved_card  # imports torch

    facts, text = saved_card(os.fspath(folder))
    if facts is None or text is None or facts["repo_id"] == repo_id:
        return {}
    old = re.escape(facts["repo_id"])
    text = re.sub(rf'(from_pretrained\("|huggingface\.co/|--model ){old}(?=["#\s])', rf"\g<1>{repo_id}", text)
    return {"README.md": text.encode(), FACTS_FILE: facts_text({**facts, "repo_id": repo_id}).encode()}


def check_repo_id(repo_id: str) -> None:
    """Check that a name can be one of a repository on the Hub.

    Args:
        repo_id: the name.

    Raises:
        ValueError: it is not OWNER/NAME.
    """
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id!r} has no owner. Name the repository OWNER/NAME.")


def files_to_push(folder: str | os.PathLike) -> dict[str, int]:
    """Files that `push_to_hub` uploads.

    Args:
        folder: a folder that `export_model` wrote.

    Returns:
        Size in bytes by name, sorted by name.

    Raises:
        ValueError: when the folder is not complete, holds pickled files, or links to files outside of it.
    """
    check_complete(folder)
    root = Path(folder)
    sizes = {str(path.relative_to(root)): path.stat().st_size for path in sorted(root.rglob("*")) if path.is_file()}
    names = list(filter_repo_objects(sizes, ignore_patterns=_LEFT_OUT))
    outside = [name for name in names if not (root / name).resolve().is_relative_to(root.resolve())]
    if outside:
        raise ValueError(f"{os.fspath(folder)!r} links to files outside of it, {outside}. Copy these files into it.")
    pickled = [name for name in names if any(Path(name).match(pattern) for pattern in PICKLES)]
    if pickled:
        raise ValueError(
            f"{os.fspath(folder)!r} holds pickled files, {pickled}. Pickled files can run code when they are loaded. "
            "Remove these files, or export the model again to get safetensors."
        )
    return {name: sizes[name] for name in names}


def check_login() -> None:
    """Check that the Hub can be reached and knows the user's token.

    Raises:
        OSError: the Hub cannot be reached, or refuses the token.
    """
    try:
        HfApi().whoami()
    except _HUB_ERRORS as error:
        reason = str(error).partition("\n")[0]
        raise ConnectionError(f"no login on the Hub: {reason} Log in by `hf auth login`, or set HF_TOKEN.") from error
