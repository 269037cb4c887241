"""The folder of a run: what is refused and resumed, and that a run is replaced only by one that begins."""

import subprocess
import sys
from pathlib import Path

import pytest

from hf_synlm.data.files import PARTIAL_SUFFIX
from hf_synlm.training.engine import arguments as run_arguments
from hf_synlm.training.engine import checkpoints
from hf_synlm.training.engine import output_folder as folders
from hf_synlm.training.engine import run as common
from hf_synlm.training.programs import finetune_glue, finetune_grammar_induction
from hf_synlm.training.tasks import finetuning


def prepare(folder: Path, read_by: object = None, **options: object) -> object:
    """The block in which a run is prepared."""
    arguments = run_arguments.TrainingArguments(output_dir=str(folder), **options)
    others = [] if read_by is None else [read_by]
    return folders.output_folder(common.make_accelerator(arguments), arguments, *others)


def finished_run(folder: Path) -> dict[str, str]:
    """Write a run, and return its files."""
    (folder / "model").mkdir(parents=True)
    for name in (folders.ARGUMENTS_FILE, folders.RESULTS_FILE, "model/config.json"):
        (folder / name).write_text(name)
    return files(folder)


def files(folder: Path) -> dict[str, str]:
    """Text of all files but the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != folders.LOCK_FILE]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def names(folder: Path) -> set[str]:
    """What lies in a folder, but for the lock."""
    return {path.name for path in folder.iterdir()} - {folders.LOCK_FILE}


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    for options in ({}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "latest"}):
        message = r"not empty \(something\) and does not hold a run .*Choose another --output_dir, or empty"
        with pytest.raises(ValueError, match=message), prepare(tmp_path, **options):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["something"]
    before = finished_run(tmp_path / "done")
    with pytest.raises(ValueError, match="holds a finished run.*--overwrite_output_dir"), prepare(tmp_path / "done"):
        pass
    with (
        pytest.raises(ValueError, match="not a complete checkpoint"),
        prepare(tmp_path / "done", resume_from_checkpoint=str(tmp_path / "done" / "step_7")),
    ):
        pass
    assert files(tmp_path / "done") == before
    for folder, why in ((tmp_path / "something", "exists"), (tmp_path / "something/run", ""), (Path("/proc/run"), "")):
        message = f"cannot be written to .*{why}.*Choose another --output_dir"
        with pytest.raises(ValueError, match=message), prepare(folder):
            pass


def test_an_unfinished_run_is_resumed_and_a_finished_one_refused(tmp_path: Path) -> None:
    def start(**options: object) -> Path | None:
        with prepare(tmp_path, **options) as checkpoint:
            return checkpoint

    assert start() is None and (tmp_path / "arguments.json").is_file()
    assert start() is None  # nothing has been saved yet
    for name in ("step_3", "step_12", "step_20.partial", "step_5.deleted.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoints.STATE_FILE).write_text("{}")
    (tmp_path / "step_30").mkdir()
    assert start() == tmp_path / "step_12"
    assert not list(tmp_path.glob("*.partial"))
    assert start(resume_from_checkpoint=str(tmp_path / "step_3")) == tmp_path / "step_3"
    (tmp_path / "all_results.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a finished run"):
        start()
    assert start(resume_from_checkpoint="latest") == tmp_path / "step_12"
    assert start(overwrite_output_dir=True) is None and not list(tmp_path.glob("step_*"))


def test_logs_of_others_stay_where_they_are(tmp_path: Path) -> None:
    kept = {"slurm-1.out": "a", "train.log": "b"}
    tmp_path.mkdir(exist_ok=True)
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    for options in ({}, {"overwrite_output_dir": True}):
        with prepare(tmp_path, **options) as checkpoint:
            assert checkpoint is None
        assert kept.items() <= files(tmp_path).items()
        folders.release(tmp_path)
    finished_run(tmp_path)
    with pytest.raises(KeyError), prepare(tmp_path, overwrite_output_dir=True):
        raise KeyError
    assert kept.items() <= files(tmp_path).items()


def test_a_run_is_replaced_when_the_new_one_is_prepared(tmp_path: Path) -> None:
    before = finished_run(tmp_path)
    with prepare(tmp_path, overwrite_output_dir=True) as checkpoint:
        assert checkpoint is None
        assert names(tmp_path) == {folders.ARGUMENTS_FILE, folders.REPLACED_FOLDER}
        assert files(tmp_path / folders.REPLACED_FOLDER) == before
        (tmp_path / "tokenizer").mkdir()
    assert names(tmp_path) == {folders.ARGUMENTS_FILE, "tokenizer"}


def test_a_run_comes_back_when_the_new_one_is_refused(tmp_path: Path) -> None:
    before = finished_run(tmp_path)
    with pytest.raises(KeyError), prepare(tmp_path, overwrite_output_dir=True):
        (tmp_path / "tokenizer").mkdir()
        raise KeyError("refused")
    assert files(tmp_path) == before and not (tmp_path / "tokenizer").exists()


@pytest.mark.parametrize("moved", ["none", "some", "all", "half back"])
def test_a_run_comes_back_after_a_kill(moved: str, tmp_path: Path) -> None:
    """Whenever the preparation of the one that should replace it was cut off."""
    before = finished_run(tmp_path)
    if moved in ("some", "half back"):
        (tmp_path / folders.MOVING_FOLDER).mkdir()
        (tmp_path / "model").rename(tmp_path / folders.MOVING_FOLDER / "model")
    elif moved == "all":
        folders._set_aside(tmp_path)
        (tmp_path / folders.ARGUMENTS_FILE).write_text("{}")
        (tmp_path / "tokenizer").mkdir()
    with pytest.raises(ValueError, match="holds a finished run"), prepare(tmp_path):
        pass
    assert files(tmp_path) == before


def test_one_process_at_a_time(tmp_path: Path) -> None:
    script = (
        f"import filelock, sys\nlock = filelock.FileLock({str(tmp_path / folders.LOCK_FILE)!r})\nlock.acquire()\n"
        "print('locked', flush=True)\nsys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"locked\n"
    (tmp_path / f"step_3{PARTIAL_SUFFIX}").mkdir()
    with pytest.raises(ValueError, match="Another process trains in .*choose another --output_dir"), prepare(tmp_path):
        pass
    assert (tmp_path / f"step_3{PARTIAL_SUFFIX}").is_dir()
    other.kill()
    other.wait()
    with prepare(tmp_path):
        pass
    folders.release(tmp_path)


def test_a_checkpoint_of_another_run_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    before = finished_run(tmp_path / "done")
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / checkpoints.STATE_FILE).write_text("{}")
    wanted = {"resume_from_checkpoint": str(tmp_path / "step_2")}
    with pytest.raises(ValueError, match="holds another run"), prepare(tmp_path / "done", **wanted):
        pass
    assert files(tmp_path / "done") == before
    with prepare(tmp_path / "new", **wanted) as checkpoint:
        assert checkpoint == tmp_path / "step_2"


def test_a_run_is_not_replaced_by_one_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = finished_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    model = finetuning.ModelArguments(model_name_or_path="run/model", tokenizer_name="elsewhere")
    induction = finetune_grammar_induction.InductionArguments(
        train_trees=["embedded", "run/all_results.json"], validation_trees="embedded", test_trees="embedded"
    )
    inputs = {"model_name_or_path 'run/model' lies": model, "train_trees 'run/all_results.json' lies": induction}
    for message, given in inputs.items():
        with pytest.raises(ValueError, match=f"would delete 'run', in which {message}"):
            with prepare(Path("run"), overwrite_output_dir=True, read_by=given):
                pass
        assert files(tmp_path / "run") == before
        with prepare(Path("new"), overwrite_output_dir=True, read_by=given):
            pass
    # A repository may have the name of a folder, and a data set that of the output folder.
    glue = finetune_glue.GlueArguments(dataset_name="run")
    with prepare(Path("run"), overwrite_output_dir=True, hub_model_id="run/model", read_by=glue):
        pass


def test_a_refused_start_does_not_stand_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(KeyError), prepare(tmp_path):
        (tmp_path / folders.TOKENIZER_FOLDER).mkdir()
        raise KeyError("refused")
    (tmp_path / f"cut{PARTIAL_SUFFIX}").touch()
    with prepare(tmp_path) as checkpoint:
        # Without a checkpoint, the tokenizer is made anew: it may stem from other options.
        assert checkpoint is None and not (tmp_path / folders.TOKENIZER_FOLDER).exists()
        (tmp_path / folders.TOKENIZER_FOLDER).mkdir()
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / checkpoints.STATE_FILE).write_text("{}")
    with prepare(tmp_path) as checkpoint:
        assert checkpoint == tmp_path / "step_3" and (tmp_path / folders.TOKENIZER_FOLDER).is_dir()


def test_only_runs_are_replaced(tmp_path: Path) -> None:
    before = finished_run(tmp_path / "run")
    (tmp_path / "run" / ".git").mkdir()
    with (
        pytest.raises(ValueError, match="would delete the repository"),
        prepare(tmp_path / "run", overwrite_output_dir=True),
    ):
        pass
    (tmp_path / "run" / ".git").rmdir()
    assert files(tmp_path / "run") == before
    foreign = tmp_path / "foreign"
    (foreign / "step_1").mkdir(parents=True)
    (foreign / "step_1" / checkpoints.STATE_FILE).write_text("{}")
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="does not hold a run"), prepare(foreign, overwrite_output_dir=True):
        pass
    assert (foreign / "thesis.txt").exists()
