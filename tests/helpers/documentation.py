"""Code blocks of Markdown pages: finding them, running them in order, checking commands.

On a page every block marked `python` runs, and all of them in one session, as a reader would type them, and every
line of blocks marked `bash` that begins with `synlm` or `echo`; but for blocks after a comment
`<!-- not run: REASON -->`. Commands must name files and options that exist. The models are the checkpoints that lie in
the repository.
"""

import contextlib
import io
import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import typer

from hf_synlm.cli.app import app, main
from hf_synlm.data.samples import sample_path
from tests.evaluation.test_syntaxgym import suite_data

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(?P<marker><!-- not run: [^\n]+ -->\n)?```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S)


def blocks(page: Path, kind: str) -> list[re.Match[str]]:
    """Code blocks of a kind, in order."""
    return [match for match in BLOCK.finditer(page.read_text(encoding="utf-8")) if match["kind"] == kind]


def command_lines(block: re.Match[str]) -> list[str]:
    """Commands of a block; a backslash at the end of a line continues it."""
    return block["code"].replace("\\\n", " ").splitlines()


def commands(page: Path) -> list[str]:
    """Lines of the blocks of commands."""
    return [line for block in blocks(page, "bash") for line in command_lines(block)]


def run_python(page: Path, block: re.Match[str], namespace: dict[str, Any]) -> None:
    """Run one block; leading newlines make the line numbers of a traceback those of the page."""
    line = page.read_text(encoding="utf-8")[: block.start("code")].count("\n")
    exec(compile("\n" * line + block["code"], str(page), "exec"), namespace)


def run_command(line: str) -> str:
    """Run a line of `echo` and `synlm`, with pipes and redirection; returns what it prints."""
    text = ""
    for part in line.split(" | "):
        before, _, target = part.partition(" > ")
        words = shlex.split(before, comments=True)
        if words[0] == "echo":
            text = " ".join(words[1:]) + "\n"
        else:
            printed = io.StringIO()
            given = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
            with mock.patch("sys.stdin", given), contextlib.redirect_stdout(printed):
                assert main(words[1:]) == 0, line
            text = printed.getvalue()
            written = words[words.index("--out") + 1] if "--out" in words else None
            assert text.strip() if written is None else Path(written).exists(), f"{line} gives nothing"
        if target:
            Path(target.strip()).write_text(text, encoding="utf-8")
            text = ""
    return text


def run_page(page: Path) -> int:
    """Run the Python blocks of a page and its commands `echo` and `synlm`, in order; returns how many ran."""
    namespace: dict[str, Any] = {}
    ran = 0
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["marker"]:
            continue
        if block["kind"] == "python":
            run_python(page, block, namespace)
            ran += 1
        for line in command_lines(block) if block["kind"] == "bash" else ():
            if line.startswith(("echo ", "synlm ")):
                print(run_command(line))
                ran += 1
    return ran


def check_command(line: str) -> None:
    """A line names files of the repository, targets of the Makefile and options that exist."""
    for part in line.split(" | "):
        _check_words(shlex.split(part.partition(" > ")[0], comments=True), line)


def _check_words(words: list[str], line: str) -> None:
    # what lies in runs/ was written by commands before
    files = [word for word in words if re.fullmatch(r"(?!runs/).*/.*\.(py|yaml|txt)", word)]
    assert all((ROOT / file).is_file() for file in files), line
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line
    if words[:2] == ["python", "-m"]:
        module = ROOT.joinpath(*words[2].split("."))
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), line
    if words[0] == "synlm":
        check_options(words[1:])


def check_options(words: list[str]) -> None:
    """Parse the words of a command of synlm without running it; an unknown option or value raises.

    Files of the examples need not exist.
    """
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        # Inputs must exist. Longer names first: a file makes the folders that it lies in.
        for file in (Path(word) for word in sorted(words, key=len, reverse=True) if not word.startswith(("-", "/"))):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        command.make_context(command.name, list(words))


def make_inputs(folder: Path) -> None:
    """What the examples read: checkpoints, texts, trees, pairs and suites."""
    for name in ("examples", "hf_synlm", "model_cards"):
        (folder / name).symlink_to(ROOT / name)
    sentences = ["the people of this country agree .", "we agree ."]
    for name in ("in.txt", "stories.txt", "valid.txt"):
        (folder / name).write_text("\n".join(sentences) + "\n", encoding="utf-8")
    trees = sample_path("trees.test.txt").read_text(encoding="utf-8").splitlines()
    for name in ("gold.mrg", "own.mrg"):
        (folder / name).write_text("\n".join(sorted(trees, key=len)[:30]) + "\n", encoding="utf-8")
    (folder / "pairs.tsv").write_text("sentence_good\tsentence_bad\tconstruction\nwe agree .\tagree we .\torder\n")
    (folder / "blimp").mkdir()
    pair = {"sentence_good": "We agree.", "sentence_bad": "Agree we.", "UID": "order", "linguistics_term": "word_order"}
    (folder / "blimp" / "order.jsonl").write_text(json.dumps(pair) + "\n", encoding="utf-8")
    (folder / "suites").mkdir()
    (folder / "suites" / "number.json").write_text(json.dumps(suite_data()), encoding="utf-8")
