"""A user with torch and transformers alone: every architecture comes from the Hub, scores, generates and parses."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_synlm.hub.export import export_model
from tests.helpers.hub_server import HubServer, Repository
from tests.helpers.scoring_models import model_and_tokenizer

ARCHITECTURES = ("gpst", "rnng", "tree_lm", "urnng", "on_lstm", "prpn", "palm", "ordered_memory", "lstm")
TEXT = "We ask for peace"

# Runs in the clean environment; every call of it has a cache of its own.
USE = """
import hashlib, importlib.util, json, sys
from pathlib import Path
names, revisions, text, strangers = json.loads(sys.argv[1])
present = [name for name in strangers if importlib.util.find_spec(name) is not None]
assert not present, present
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
report = {}
for name in names:
    where = {"revision": revisions[name], "trust_remote_code": True}
    tokenizer = AutoTokenizer.from_pretrained(f"org/{name}", **where)
    model = AutoModelForCausalLM.from_pretrained(f"org/{name}", code_revision=revisions[name], **where).eval()
    batch = tokenizer([text], return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
    written = model.generate(**batch, max_new_tokens=4, do_sample=False)
    trees = []
    if hasattr(model, "parse"):
        parsed = model.parse(**batch)
        trees = [parsed.spans, parsed.brackets(tokenizer.convert_ids_to_tokens(batch["input_ids"][0]))
                 if len(batch["input_ids"][0]) == parsed.lengths[0] else "", parsed.token_log_probs.tolist()]
        assert parsed.spans[0]
    folder = Path(snapshot_download(f"org/{name}", revision=revisions[name]))
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
    report[name] = {
        "class": type(model).__module__.split(".")[0] + "." + type(model).__name__,
        "files": files,
        "logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "ids": written.tolist(),
        "trees": trees,
    }
print(json.dumps(report))
"""


def required(*roots: str) -> set[str]:
    """Names of the distributions that these need, themselves included; extras left out."""
    found: set[str] = set()
    todo = list(roots)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        found.add(name)
        todo += [re.split(r"[^\w.-]", line)[0] for line in requirements if "extra ==" not in line]
    return found


def clean_environment(folder: Path) -> tuple[Path, set[str]]:
    """An environment that sees nothing but torch, transformers and what they require; and the names of the rest."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    wanted = required("torch", "transformers")
    tops: dict[bool, set[str]] = {True: set(), False: set()}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        for file in distribution.files or ():
            if ".." in file.parts or file.parts[0] in ("bin", "__pycache__"):
                continue
            tops[name in wanted].add(file.parts[0])
            source = Path(str(distribution.locate_file(file.parts[0])))
            target = packages / file.parts[0]
            if name in wanted and not target.exists() and source.exists():
                target.symlink_to(source)
    strangers = {top for top in tops[False] - tops[True] if top.isidentifier()} | {"hf_synlm", "accelerate"}
    return folder / "bin" / "python", strangers - set(sys.stdlib_module_names) - {"test"}  # of Python itself


def publish(hub: HubServer, folder: Path) -> dict[str, str]:
    """Put a model of every architecture on the Hub; revisions by name."""
    revisions = {}
    for name in ARCHITECTURES:
        model, tokenizer = model_and_tokenizer(name)
        exported = export_model(model, tokenizer, folder / name)
        repository = hub.repositories[f"org/{name}"] = Repository()
        files = {str(file.relative_to(exported)): file.read_bytes() for file in exported.rglob("*") if file.is_file()}
        revisions[name] = repository.commit("main", files)
        repository.commit("main", {"README.md": b"A later commit has nothing else."})
    return revisions


@pytest.mark.slow
def test_torch_and_transformers_are_enough(tmp_path: Path) -> None:
    python, strangers = clean_environment(tmp_path / "environment")
    with HubServer() as hub:
        revisions = publish(hub, tmp_path / "models")
        reports = []
        for number in (1, 2):
            environment = {
                **{
                    key: value
                    for key, value in os.environ.items()
                    if not key.startswith(("HF_", "TRANSFORMERS_", "PY"))
                },
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(tmp_path / f"cache{number}"),
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
            }
            given = json.dumps([ARCHITECTURES, revisions, TEXT, sorted(strangers)])
            done = subprocess.run(
                [str(python), "-I", "-c", USE, given], env=environment, cwd=tmp_path, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[-3000:]
            reports.append(done.stdout.strip().splitlines()[-1])
    assert reports[0] == reports[1]  # byte by byte
    report = json.loads(reports[0])
    for name in ARCHITECTURES:
        model, _ = model_and_tokenizer(name)
        assert report[name]["class"] == f"transformers_modules.{type(model).__name__}"
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / name)
        batch = tokenizer([TEXT], return_tensors="pt")
        expected = model.generate(**batch, max_new_tokens=4, do_sample=False)
        assert report[name]["ids"] == expected.tolist()
        if name != "lstm":
            assert report[name]["trees"][0] == json.loads(json.dumps(model.parse(**batch).spans))
