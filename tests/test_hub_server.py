"""Publishing on a Hub: the real client against a stand-in on this machine. Every client is a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.data.tokenizers import train_bpe_tokenizer
from hf_synlm.hub.export import export_model
from tests.hub_server import HubServer

ROOT = Path(__file__).resolve().parents[1]
NAME = "org/gpst-tiny"
# What a user without the package runs; it must come before all other imports.
WITHOUT_PACKAGE = "import sys\nsys.modules['hf_synlm'] = None\n"


class Client:
    """Runs code or `synlm` as a user of the Hub, with a cache of its own.

    Args:
        hub: to talk to.
        home: folder of the cache.
        token: None = not logged in.
    """

    def __init__(self, hub: HubServer, home: Path, token: str | None) -> None:
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1" if token is None else "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **({} if token is None else {"HF_TOKEN": token}),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    def code(self, code: str, *arguments: str) -> str:
        status, out, err = self.run("-c", WITHOUT_PACKAGE + code, *arguments)
        assert status == 0, err
        return out

    def synlm(self, *arguments: str) -> tuple[int, str, str]:
        return self.run("-m", "hf_synlm.cli", *arguments)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def folder(tiny_gpst_config: GPSTConfig, tmp_path: Path) -> Path:
    """An exported model, with what must not leave the machine beside it."""
    tokenizer = train_bpe_tokenizer(["fruit flies like a banana"], vocab_size=270)
    fields = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
    ids = {name: getattr(tokenizer, name) for name in fields}
    settings = {**tiny_gpst_config.to_dict(), **ids, "reduce_token_id": 1, "vocab_size": len(tokenizer)}
    folder = export_model(GPSTForCausalLM(GPSTConfig(**settings)), tokenizer, tmp_path / "gpst-tiny")
    (folder / ".env").write_text("HF_TOKEN=hf_private")
    return folder


def public_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}


PULL = """
import hashlib, json
from pathlib import Path
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
name, revision, target = sys.argv[1:]
pinned = {"revision": revision, "trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained(name, **pinned).eval()
tokenizer = AutoTokenizer.from_pretrained(name, **pinned)
batch = tokenizer(["fruit flies like a banana"], return_tensors="pt")
assert type(model).__module__.startswith("transformers_modules."), type(model)
files = {}
for home in ("one", "two"):
    place = Path(snapshot_download(name, revision=revision, cache_dir=Path(target) / home))
    files[home] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in place.iterdir()}
assert files["one"] == files["two"]
with torch.no_grad():
    model.lm_head.weight.mul_(1.5)                       # fine-tuned
model.push_to_hub("org/tuned", commit_message="Fine-tuned")
tokenizer.push_to_hub("org/tuned")
print(json.dumps({
    "logits": model.from_pretrained(name, **pinned).eval()(**batch).logits.double().sum().item(),
    "tuned": model(**batch).logits.double().sum().item(),
    "commit": place.name,
    "files": files["one"],
}))
"""
PULL_AGAIN = """
import json
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
old, tuned, pinned_code = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained("org/tuned", trust_remote_code=True)
batch = tokenizer(["fruit flies like a banana"], return_tensors="pt")
model = AutoModelForCausalLM.from_pretrained("org/tuned", trust_remote_code=True).eval()
elsewhere = AutoModelForCausalLM.from_pretrained("org/weights", trust_remote_code=True, code_revision=pinned_code)
main = AutoModelForCausalLM.from_pretrained("org/weights", trust_remote_code=True)
refused = None
try:
    AutoModelForCausalLM.from_pretrained("org/tuned", trust_remote_code=False)
except ValueError as error:
    refused = str(error)
print(json.dumps({
    "tuned": model(**batch).logits.double().sum().item(),
    "class": type(model).__module__,
    "pinned": getattr(type(elsewhere), "MARK", None),
    "newest": getattr(type(main), "MARK", None),
    "refused": refused,
}))
"""


class TestPublishing:
    def test_push_pull_tune_push_pull(self, hub: HubServer, folder: Path, tmp_path: Path):
        author = Client(hub, tmp_path / "author", hub.token)
        status, out, err = author.synlm("push", str(folder), NAME, "--no-verify", "--message", "First")
        assert status == 0, err
        first = out.strip()
        repository = hub.repositories[NAME]
        assert repository.branches["main"] == first and repository.files() == public_files(folder)
        assert "custom_code" in repository.files()["README.md"].decode()

        # Another commit on main: who pins the first one does not see it.
        newer = {**repository.files(), "modeling_gpst.py": b"raise RuntimeError('newer code')\n"}
        repository.commit("main", newer)
        found = json.loads(author.code(PULL, NAME, first, str(tmp_path)))
        with torch.no_grad():
            own = GPSTForCausalLM.from_pretrained(folder).eval()
            ids = train_bpe_tokenizer(["fruit flies like a banana"], vocab_size=270)(
                ["fruit flies like a banana"], return_tensors="pt"
            )
            expected = own(**ids).logits.double().sum().item()
        assert found["commit"] == first and found["logits"] == expected != found["tuned"]
        assert set(found["files"]) == set(public_files(folder))

        # The fine-tuned copy brings the code of the revision that it was loaded from.
        tuned = hub.repositories["org/tuned"].files()
        code = {name: content for name, content in public_files(folder).items() if name.endswith(".py")}
        assert {name: content for name, content in tuned.items() if name.endswith(".py")} == code
        assert not any(name.endswith((".bin", ".pt")) for name in tuned)
        assert hub.token.encode() not in b"".join(tuned.values())

        # Code in another repository, which can be pinned apart from the weights.
        marked = {**tuned, "modeling_gpst.py": tuned["modeling_gpst.py"] + b'\nGPSTForCausalLM.MARK = "newest"\n'}
        pinned = hub.repositories["org/tuned"].branches["main"]
        code_repository = hub.repositories.setdefault("org/code", type(repository)())
        pinned = code_repository.commit("main", tuned)
        code_repository.commit("main", marked)
        config = json.loads(tuned["config.json"])
        config["auto_map"] = {kind: f"org/code--{reference}" for kind, reference in config["auto_map"].items()}
        weights = {name: content for name, content in tuned.items() if not name.endswith(".py")}
        weights["config.json"] = json.dumps(config).encode()
        hub.repositories["org/weights"] = type(repository)()
        hub.repositories["org/weights"].commit("main", weights)
        reader = Client(hub, tmp_path / "reader", None)
        again = json.loads(reader.code(PULL_AGAIN, first, NAME, pinned))
        assert again["tuned"] == found["tuned"] and again["class"].startswith("transformers_modules.org.tuned")
        assert again["pinned"] is None and again["newest"] == "newest"
        assert "trust_remote_code=True" in again["refused"]
        # `info` reads the weights' header from the Hub, and tells what pulls code from elsewhere.
        status, out, err = reader.synlm("info", "org/tuned", "--format", "json")
        described = json.loads(out)
        assert status == 0 and described["self_contained"], err
        assert described["num_parameters"] == sum(own.state_dict()[key].numel() for key in saved_names(folder))
        assert not any("model.safetensors" in str(file) for file in (tmp_path / "reader" / "hub").rglob("*tuned*/blobs"))


def saved_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        return list(weights.keys())


class TestRefusals:
    def test_private_repositories_and_tokens(self, hub: HubServer, folder: Path, tmp_path: Path):
        stranger, author = (Client(hub, tmp_path / name, token) for name, token in (("s", None), ("a", hub.token)))
        status, _, err = stranger.synlm("push", str(folder), NAME, "--no-verify")
        assert status == 2 and "was not pushed" in err and "401" in err and "Traceback" not in err
        assert not hub.repositories
        status, out, err = author.synlm("push", str(folder), NAME, "--no-verify", "--private", "--revision", "draft")
        assert status == 0, err
        repository = hub.repositories[NAME]
        assert repository.private and repository.files("main") == {} and repository.files("draft")
        assert hub.token not in out + err
        status, _, err = stranger.synlm("info", NAME, "--revision", "draft")
        assert status == 2 and err.count("error: ") == 1 and "Traceback" not in err
        status, out, err = author.synlm("info", NAME, "--revision", "draft")
        assert status == 0 and "self-contained" in out, err
        status, _, err = author.synlm("info", NAME, "--revision", "nowhere")
        assert status == 2 and "nowhere" in err and hub.token not in err

    def test_interrupted_upload_leaves_no_commit(self, hub: HubServer, folder: Path, tmp_path: Path):
        author = Client(hub, tmp_path / "author", hub.token)
        hub.hold = True
        process = author.start("-m", "hf_synlm.cli", "push", str(folder), NAME, "--no-verify")
        assert hub.held.wait(120), process.communicate(timeout=5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        repository = hub.repositories[NAME]
        assert repository.files() == {} and len(repository.commits) == 1
        hub.hold = False
        status, out, err = author.synlm("push", str(folder), NAME, "--no-verify")
        assert status == 0 and repository.files() == public_files(folder), err
        assert list(repository.commits) == [next(iter(repository.commits)), out.strip()]
