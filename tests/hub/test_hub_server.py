"""Publishing on a Hub: the real client against a stand-in on this machine. Every client is a process of its own."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.hub.export import export_model
from hf_synlm.hub.flatten import all_flat_files, flat_files
from tests.helpers import warm_python
from tests.helpers.hub_server import HubServer
from tests.helpers.scoring_models import small_gpst, tokenizer_of

ROOT = Path(__file__).resolve().parents[2]
NAME = "org/gpst-tiny"
# What a user without the package runs; it must come before all other imports.
WITHOUT_PACKAGE = "import sys\nsys.modules['hf_synlm'] = None\n"


COMMANDS = """
import contextlib, io, json, os, sys
from hf_synlm.cli import main
results = []
for login, *words in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if login == "login":
        os.environ["HF_TOKEN"] = sys.argv[2]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(words)
    results.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


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
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **({} if token is None else {"HF_TOKEN": token}),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, *arguments], env=self.environment, text=True, **streams)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        done = warm_python.run([sys.executable, *arguments], env=self.environment, timeout=240)
        return done.returncode, done.stdout, done.stderr

    def code(self, code: str, *arguments: str) -> str:
        status, out, err = self.run("-c", WITHOUT_PACKAGE + code, *arguments)
        assert status == 0, err
        return out

    def synlm(self, *commands: tuple[str, ...], token: str | None = None) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of several commands in one process; a leading "login" uses the token."""
        status, out, err = self.run("-c", COMMANDS, json.dumps(commands), token or "")
        assert status == 0, err
        return [tuple(result) for result in json.loads(out)]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported model, with what must not leave the machine beside it."""
    tokenizer = tokenizer_of("bpe")
    folder = export_model(small_gpst(tokenizer), tokenizer, tmp_path / "gpst-tiny")
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
name, revision = sys.argv[1:]
pinned = {"revision": revision, "trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained(name, **pinned).eval()
tokenizer = AutoTokenizer.from_pretrained(name, **pinned)
batch = tokenizer(["fruit flies like a banana"], return_tensors="pt")
assert type(model).__module__.startswith("transformers_modules."), type(model)
place = Path(snapshot_download(name, revision=revision))
with torch.no_grad():
    before = model(**batch).logits.double().sum().item()
    model.lm_head.weight.mul_(1.5)                       # fine-tuned
model.push_to_hub("org/tuned", commit_message="Fine-tuned")
tokenizer.push_to_hub("org/tuned")
model.push_to_hub(name, revision="tuned")                # beside the model that it comes from
print(json.dumps({
    "logits": before,
    "tuned": model(**batch).logits.double().sum().item(),
    "commit": place.name,
    "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in place.iterdir()},
}))
"""
LOAD = """
import json
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
name, refused = sys.argv[1], None
try:
    AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)
except ValueError as error:
    refused = str(error)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
batch = AutoTokenizer.from_pretrained(name, trust_remote_code=True)(["fruit flies like a banana"], return_tensors="pt")
with torch.no_grad():
    logits = model(**batch).logits.double().sum().item()
print(json.dumps({"logits": logits, "class": type(model).__module__, "refused": refused}))
"""


def own_logits(folder: Path) -> float:
    """What `LOAD` should give."""
    batch = AutoTokenizer.from_pretrained(folder)(["fruit flies like a banana"], return_tensors="pt")
    with torch.no_grad():
        return GPSTForCausalLM.from_pretrained(folder).eval()(**batch).logits.double().sum().item()


def pushed_files(folder: Path) -> dict[str, bytes]:
    """Files of a folder, whose card names the repository."""
    files = public_files(folder)
    renamed = {
        "README.md": (f'from_pretrained("{folder.name}"', f'from_pretrained("{NAME}"'),
        "card.yaml": (f"repo_id: {folder.name}\n", f"repo_id: {NAME}\n"),
    }
    return files | {name: files[name].replace(*map(str.encode, names)) for name, names in renamed.items()}


def test_push_pull_tune_push_pull(hub: HubServer, folder: Path, tmp_path: Path):
    author = Client(hub, tmp_path / "author", hub.token)
    push = ("login", "push", str(folder), NAME, "--no-verify", "--message", "First")
    [(status, out, err)] = author.synlm(push, token=hub.token)
    assert status == 0, err
    first = out.strip()
    repository = hub.repositories[NAME]
    assert repository.branches["main"] == first and repository.files() == pushed_files(folder)
    card = repository.files()["README.md"].decode()
    assert "custom_code" in card and card.count(f'from_pretrained("{NAME}"') == 2

    # Another commit on main: who pins the first one does not see it.
    newer = {**repository.files(), "modeling_gpst.py": b"raise RuntimeError('newer code')\n"}
    repository.commit("main", newer)
    found = json.loads(author.code(PULL, NAME, first))
    assert found["commit"] == first and found["logits"] == own_logits(folder) != found["tuned"]
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in pushed_files(folder).items()}
    assert found["files"] == hashes

    # The fine-tuned copy brings the code of the revision that it was loaded from.
    tuned = hub.repositories["org/tuned"].files()
    code = {name: content for name, content in public_files(folder).items() if name.endswith(".py")}
    assert {name: content for name, content in tuned.items() if name.endswith(".py")} == code
    assert not any(name.endswith((".bin", ".pt")) for name in tuned)
    assert hub.token.encode() not in b"".join(tuned.values())
    branch = repository.files("tuned")
    assert branch["README.md"] == repository.commits[first]["README.md"]  # our card stays
    assert branch["model.safetensors"] == tuned["model.safetensors"] and branch["modeling_gpst.py"] in code.values()
    assert repository.files("main") == newer

    again = json.loads(Client(hub, tmp_path / "reader", None).code(LOAD, "org/tuned"))
    assert again["logits"] == found["tuned"] and again["class"].startswith("transformers_modules.org.tuned")
    assert "trust_remote_code=True" in again["refused"]


PUSH = """
import sys
import hf_synlm
model = hf_synlm.GPSTForCausalLM.from_pretrained(sys.argv[1])
model.push_to_hub("org/pushed")
model.save_pretrained(sys.argv[2], push_to_hub=True, repo_id="org/saved")
model.config.push_to_hub("org/config-pushed")
model.config.save_pretrained(sys.argv[2], push_to_hub=True, repo_id="org/config-saved")
"""


def test_every_way_of_pushing_takes_the_code_along(hub: HubServer, folder: Path, tmp_path: Path):
    status, _, err = Client(hub, tmp_path / "home", hub.token).run("-c", PUSH, str(folder), str(tmp_path / "saved"))
    assert status == 0, err
    pushed = {name: repository.files() for name, repository in hub.repositories.items()}
    assert set(pushed) == {"org/pushed", "org/saved", "org/config-pushed", "org/config-saved"}
    for name, files in pushed.items():
        code = {file: content.decode() for file, content in files.items() if file.endswith(".py")}
        assert code == flat_files("gpst") and "config.json" in files
        assert ("model.safetensors" in files) == ("config" not in name), sorted(files)


def test_one_push_of_code_repairs_the_models_that_name_it(hub: HubServer, folder: Path, tmp_path: Path):
    light, again = tmp_path / "light", tmp_path / "again"
    author, reader = Client(hub, tmp_path / "author", hub.token), Client(hub, tmp_path / "reader", None)
    push_code = ("login", "push-code", "org/code")
    results = author.synlm(
        push_code,
        ("login", "export", str(folder), "--out", str(light), "--code-repo", "org/code"),
        ("login", "push", str(light), "org/light", "--no-verify"),
        ("login", "push", str(light), "org/light"),
        ("login", "info", str(light), "--format", "json"),
        ("login", "verify", str(light)),
        ("login", "verify", str(light), "--trust-remote-code", "--max-new-tokens", "2"),
        ("login", "export", "org/light", "--out", str(again)),
        token=hub.token,
    )
    assert [status for status, _, _ in results] == [0, 0, 0, 2, 0, 2, 0, 0], [err for _, _, err in results]
    described, refused, verified = results[4:7]
    assert json.loads(described[1])["problems"] == ["Its code lies in the repository 'org/code' of the Hub."]
    assert "runs code of org/code" in refused[2] and "runs code of org/code" in results[3][2]
    assert "equal to the package's" in verified[1]
    code = hub.repositories["org/code"]
    assert {*all_flat_files(), "LICENSE", "requirements.txt", "README.md"} == set(code.files())
    assert not list(light.glob("*.py")) and "`org/code`" in (light / "README.md").read_text()
    config = json.loads((light / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "org/code--modeling_gpst.GPSTForCausalLM"
    # A copy holds its code again.
    assert {file.name: file.read_text() for file in again.glob("*.py")} == flat_files("gpst")
    assert json.loads((again / "config.json").read_text())["auto_map"] == GPSTConfig().auto_map

    broken = {**code.files(), "gpst_chart.py": b"raise RuntimeError('broken by a new version')\n"}
    code.commit("main", broken)
    status, _, err = reader.run("-c", WITHOUT_PACKAGE + LOAD, "org/light")
    assert status and "broken by a new version" in err
    [(status, out, err)] = author.synlm(push_code, token=hub.token)
    assert status == 0 and out.strip() == code.branches["main"], err
    found = json.loads(reader.code(LOAD, "org/light"))
    assert found["class"].startswith("transformers_modules.org.code.") and found["logits"] == own_logits(folder)


def test_interruption_refusals_and_private_repositories(hub: HubServer, folder: Path, tmp_path: Path):
    push = ("push", str(folder), NAME, "--no-verify")
    hub.hold = True
    process = Client(hub, tmp_path / "killed", hub.token).start("-m", "hf_synlm.cli", *push)
    assert hub.held.wait(120), process.communicate(timeout=5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    started = hub.repositories.pop(NAME)
    assert started.files() == {} and len(started.commits) == 1
    hub.hold = False

    client = Client(hub, tmp_path / "home", None)
    results = client.synlm(
        ("stranger", *push),
        ("login", *push, "--private", "--revision", "draft"),
        ("stranger", "info", NAME, "--revision", "draft"),
        ("login", "info", NAME, "--revision", "draft", "--format", "json"),
        ("login", "info", NAME, "--revision", "nowhere"),
        ("login", "verify", NAME, "--revision", "draft"),
        token=hub.token,
    )
    refused, pushed, hidden, described, missing, untrusted = results
    assert all("Traceback" not in err and hub.token not in out + err for _, out, err in results)
    for status, _, err in (refused, hidden, missing, untrusted):
        assert status == 2 and err.count("Error: ") == 1
    assert "was not pushed" in refused[2] and "401" in refused[2]
    repository = hub.repositories[NAME]
    assert pushed[0] == 0 and repository.private and repository.files("main") == {}
    assert repository.files("draft") == pushed_files(folder) and repository.branches["draft"] == pushed[1].strip()
    assert "nowhere" in missing[2] and "--trust-remote-code" in untrusted[2]
    found = json.loads(described[1])
    assert described[0] == 0 and found["self_contained"] and found["revision"] == pushed[1].strip()
    with safe_open(folder / "model.safetensors", "pt") as weights:
        sizes = [weights.get_tensor(name).numel() for name in weights.keys()]  # noqa: SIM118
    assert found["num_parameters"] == sum(sizes)
    # The weights stayed on the Hub: only their header was read.
    assert not list((tmp_path / "home").rglob("model.safetensors"))
