"""The README's examples run as a reader would type them, on the checkpoints that lie in the repository.

Every block marked `python` is executed, in one session, and every line of `bash` blocks that begins with `synlm` or
`echo`; but for blocks after a comment `<!-- not run: REASON -->`. Commands must name files that exist.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import pytest

from hf_synlm.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
CARDS = ROOT / "model_cards"
BLOCK = re.compile(r"(?P<marker><!-- not run: [^\n]+ -->\n)?```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S)


def blocks(kind: str) -> list[re.Match[str]]:
    return [match for match in BLOCK.finditer(README.read_text(encoding="utf-8")) if match["kind"] == kind]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that looks like the checkout and may be written to."""
    for folder in ("hf_synlm", "model_cards"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_run(checkout: Path, capsys: pytest.CaptureFixture[str]):
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


def test_synlm_commands_run(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    lines = [line for block in blocks("bash") if not block["marker"] for line in block["code"].splitlines()]
    lines = [line for line in lines if line.startswith(("synlm ", "echo "))]
    assert len(lines) >= 6
    for line in lines:
        text = ""
        for words in (shlex.split(part) for part in line.split(" | ")):
            monkeypatch.setattr("sys.stdin", io.StringIO(text))
            if words[0] == "echo":
                text = f"{words[1]}\n"
                if words[2:3] == [">"]:
                    Path(words[3]).write_text(text)
                continue
            assert main(words[1:]) == 0, f"{line}\n{capsys.readouterr().err}"
            text = capsys.readouterr().out
            written = words[words.index("--out") + 1] if "--out" in words else None
            assert text.strip() if written is None else (checkout / written).exists(), line


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
    assert all((ROOT / word).is_dir() for word in words if re.fullmatch(r"model_cards/[\w-]+", word)), command
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), command
    if words[:2] == ["python", "-m"]:
        module = ROOT.joinpath(*words[2].split("."))
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), command


def test_numbers_of_the_checkpoints_are_those_measured():
    """Each row: name, size of the weights, F1 (with its method), word perplexity (with its estimator)."""
    rows = re.findall(r"^\| `([\w-]+-tiny)` \|(.*)\|$", README.read_text(encoding="utf-8"), re.M)
    assert {name for name, _ in rows} == {folder.name for folder in CARDS.iterdir() if folder.is_dir()}
    for name, row in rows:
        results = {file.stem: json.loads(file.read_text()) for file in (CARDS / name / "results").glob("*.json")}
        size = (CARDS / name / "model.safetensors").stat().st_size
        numbers = [
            results[result]["scores"][score]
            for result in sorted(results)
            for score in ("f1", "word_perplexity")
            if result != "training" and score in results[result]["scores"]
        ]
        for text in (f"{size / 1e6:.2f} MB", *(f"{number:.1f}" for number in numbers)):
            assert text in row, (name, text)


def test_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.M)}
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            assert (ROOT / target).exists(), target
