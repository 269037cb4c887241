"""The README's Python code runs, in its order and in one session, as a reader would type it.

Every block marked `python` is executed, but for those after a comment `<!-- not run: REASON -->`. A tiny untrained
model stands where `make demo` writes its own. Commands must name files that exist.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hf_synlm import GPSTConfig, GPSTForCausalLM, ONLSTMConfig, ONLSTMForCausalLM, RNNGConfig, RNNGForCausalLM
from hf_synlm.data.tokenizers import train_bpe_tokenizer
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.hub.export import export_model

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"(?P<marker><!-- not run: [^\n]+ -->\n)?```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S)


def blocks(kind: str) -> list[re.Match[str]]:
    return [match for match in BLOCK.finditer(README.read_text(encoding="utf-8")) if match["kind"] == kind]


@pytest.fixture
def demo_folder(tiny_gpst_config: GPSTConfig, tiny_rnng_config: RNNGConfig, tmp_path: Path) -> Path:
    """What the commands leave behind, with models too small to be good."""
    tokenizer = train_bpe_tokenizer(["the people of this country"], vocab_size=270)
    fields = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
    ids = {name: getattr(tokenizer, name) for name in fields}
    settings = {**tiny_gpst_config.to_dict(), **ids, "reduce_token_id": 1, "vocab_size": len(tokenizer)}
    model = GPSTForCausalLM(GPSTConfig(**settings))
    sentence = "the people of this country agree .".split()
    export_model(
        RNNGForCausalLM(tiny_rnng_config), word_tokenizer([sentence]), tmp_path / "runs" / "rnng_tiny" / "model"
    )
    words = word_tokenizer([sentence], end_token=True)
    sizes = {"vocab_size": len(words), "embedding_size": 8, "hidden_size": 8, "chunk_size": 2}
    recurrent = ONLSTMForCausalLM(ONLSTMConfig(**sizes, bos_token_id=2, eos_token_id=2, pad_token_id=0))
    export_model(recurrent, words, tmp_path / "runs" / "on_lstm_syd_tiny" / "model")
    return export_model(model, tokenizer, tmp_path / "runs" / "gpst_tiny" / "model")


def test_python_blocks_run(demo_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(demo_folder.parents[2])
    namespace: dict[str, object] = {}
    ran = 0
    for block in blocks("python"):
        if not block["marker"]:
            line = README.read_text(encoding="utf-8")[: block.start("code")].count("\n")
            # Leading newlines make the line numbers of a traceback those of the README.
            exec(compile("\n" * line + block["code"], str(README), "exec"), namespace)
            ran += 1
    assert ran >= 4
    printed = capsys.readouterr().out
    for comment in re.findall(r"# (?:.*: )?(\[.*\])$", "".join(block["code"] for block in blocks("python")), re.M):
        assert comment in printed, f"the README promises {comment}"


def test_drawing_is_what_the_code_prints():
    from hf_synlm.trees import brackets_to_tree, tree_to_spans
    from hf_synlm.viz import tree_to_text

    tree, words = brackets_to_tree("((fruit flies) (like (a banana)))")
    drawing = tree_to_text(words, tree_to_spans(tree))
    shown = "\n".join(block["code"] for block in blocks("text"))
    assert all(line.strip() in shown for line in drawing.splitlines())


@pytest.mark.parametrize("command", [line for block in blocks("bash") for line in block["code"].splitlines()])
def test_commands_name_existing_files(command: str):
    words = shlex.split(command, comments=True)
    files = [word for word in words if word.endswith((".py", ".yaml", ".txt")) and "/" in word]
    assert all((ROOT / file).is_file() for file in files), command
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), command
    if words[:2] == ["python", "-m"]:
        module = ROOT.joinpath(*words[2].split("."))
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), command


def test_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.M)}
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            assert (ROOT / target).exists(), target
