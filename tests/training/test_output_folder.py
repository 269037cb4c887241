"""The folder of a run: what is refused, resumed and deleted."""

import json
from pathlib import Path

import pytest

from hf_synlm.data.files import PARTIAL_SUFFIX
from hf_synlm.training.arguments import base as run_arguments
from hf_synlm.training.engine import checkpoints, output_folder as folders, run as common
from hf_synlm.training.programs import finetune_glue, finetune_grammar_induction
from hf_synlm.training.tasks import finetuning
from tests.helpers.refusals import raised, refused


def take(folder: Path, read_by: object = None, **options: object) -> Path | None:
    """Take the folder for a run; the checkpoint to resume from."""
    arguments = run_arguments.TrainingArguments(output_dir=str(folder), **options)
    others = [] if read_by is None else [read_by]
    with folders.output_folder(common.make_accelerator(arguments), arguments, *others) as found:
        return found


def finished_run(folder: Path) -> dict[str, str]:
    """Write a run, and return its files."""
    (folder / "model").mkdir(parents=True)
    for name in (folders.ARGUMENTS_FILE, folders.RESULTS_FILE, "model/config.json"):
        (folder / name).write_text(json.dumps({"file": name, "step": 12}))
    return files(folder)


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / checkpoints.STATE_FILE).write_text("{}")
    return folder


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    for options in ({}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "latest"}):
        refused(r"not empty \(something\)", take, tmp_path, **options)
        assert [path.name for path in tmp_path.iterdir()] == ["something"]
    before = finished_run(tmp_path / "done")
    refused("finished run.*--overwrite-output-dir", take, tmp_path / "done")
    with pytest.raises(ValueError, match="step_7.* is not a complete checkpoint"):
        take(tmp_path / "done", resume_from_checkpoint=str(tmp_path / "done" / "step_7"))
    assert files(tmp_path / "done") == before
    for folder in (tmp_path / "something", tmp_path / "something/run", Path("/proc/run")):
        raised(OSError, str(folder), take, folder)


def test_an_unfinished_run_is_resumed_and_a_finished_one_refused(tmp_path: Path) -> None:
    assert take(tmp_path) is None and (tmp_path / "arguments.json").is_file()
    assert take(tmp_path) is None  # nothing has been saved yet
    for name in ("step_3", "step_12", "step_20.partial", "step_5.deleted.partial"):
        checkpoint(tmp_path / name)
    (tmp_path / "step_30").mkdir()
    assert take(tmp_path) == tmp_path / "step_12"
    assert not list(tmp_path.glob("*.partial"))
    assert take(tmp_path, resume_from_checkpoint=str(tmp_path / "step_3")) == tmp_path / "step_3"
    (tmp_path / "all_results.json").write_text('{"step": 30}')
    refused("finished run without step_30", take, tmp_path, resume_from_checkpoint="latest")
    (tmp_path / "all_results.json").write_text('{"step": 12}')
    refused("finished run. .*repeat the steps after training", take, tmp_path)
    assert take(tmp_path, resume_from_checkpoint="latest") == tmp_path / "step_12"
    assert take(tmp_path, overwrite_output_dir=True) is None
    assert [path.name for path in tmp_path.iterdir()] == ["arguments.json"]


def test_a_run_is_replaced_only_by_one_that_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = finished_run(tmp_path)

    def replace(error: type[BaseException]) -> None:
        arguments = run_arguments.TrainingArguments(output_dir=str(tmp_path), overwrite_output_dir=True)
        with folders.output_folder(common.make_accelerator(arguments), arguments) as found:
            assert found is None and {*files(tmp_path)} == {
                "arguments.json", "replaced.partial/all_results.json", "replaced.partial/model/config.json"
            }  # fmt: skip
            for name in ("model", folders.TOKENIZER_FOLDER):
                (tmp_path / name).mkdir()
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            replace(error)
        assert files(tmp_path) == before
    with monkeypatch.context() as patch:  # a process that is killed puts nothing back
        patch.setattr(folders, "_put_back", lambda folder: None)
        with pytest.raises(ValueError):
            replace(ValueError)
    assert files(tmp_path) != before
    refused("nothing to resume. Leave out", take, tmp_path, overwrite_output_dir=True, resume_from_checkpoint="latest")
    assert files(tmp_path) == before
    refused("finished run.*--overwrite-output-dir", take, tmp_path)
    assert take(tmp_path, overwrite_output_dir=True) is None and {*files(tmp_path)} == {"arguments.json"}


def test_logs_of_others_stay_where_they_are(tmp_path: Path) -> None:
    kept = {"slurm-1.out": "a", "train.log": "b"}
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    for options in ({}, {"overwrite_output_dir": True}):
        assert take(tmp_path, **options) is None
        assert kept.items() <= files(tmp_path).items()


def test_a_checkpoint_of_another_run_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    before = finished_run(tmp_path / "done")
    wanted = {"resume_from_checkpoint": str(checkpoint(tmp_path / "step_2"))}
    refused("holds another run", take, tmp_path / "done", **wanted)
    assert files(tmp_path / "done") == before
    assert take(tmp_path / "new", **wanted) == tmp_path / "step_2"


def test_a_run_is_not_replaced_by_one_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = finished_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    model = finetuning.ModelArguments(model_name_or_path="run/model", tokenizer_name="elsewhere")
    induction = finetune_grammar_induction.InductionArguments(
        train_trees=["embedded", "run/all_results.json"], validation_trees="embedded", test_trees="embedded"
    )
    inputs = {"model_name_or_path 'run/model'": model, "train_trees 'run/all_results.json'": induction}
    for message, given in inputs.items():
        refused(f"would delete 'run', .*{message}", take, Path("run"), overwrite_output_dir=True, read_by=given)
        assert files(tmp_path / "run") == before
        take(Path("new"), overwrite_output_dir=True, read_by=given)
    # A repository may have the name of a folder, and a data set that of the output folder.
    glue = finetune_glue.GlueArguments(dataset_name="run")
    take(Path("run"), overwrite_output_dir=True, hub_model_id="run/model", read_by=glue)


def test_a_start_that_failed_does_not_stand_in_the_way(tmp_path: Path) -> None:
    assert take(tmp_path) is None
    (tmp_path / folders.TOKENIZER_FOLDER).mkdir()
    (tmp_path / f"cut{PARTIAL_SUFFIX}").touch()
    # Without a checkpoint, the tokenizer is made anew: it may stem from other options.
    assert take(tmp_path) is None and not (tmp_path / folders.TOKENIZER_FOLDER).exists()
    (tmp_path / folders.TOKENIZER_FOLDER).mkdir()
    checkpoint(tmp_path / "step_3")
    assert take(tmp_path) == tmp_path / "step_3" and (tmp_path / folders.TOKENIZER_FOLDER).is_dir()


def test_only_runs_are_replaced(tmp_path: Path) -> None:
    before = finished_run(tmp_path / "run")
    (tmp_path / "run" / ".git").mkdir()
    refused("would delete the repository", take, tmp_path / "run", overwrite_output_dir=True)
    assert files(tmp_path / "run") == before
    foreign = tmp_path / "foreign"
    checkpoint(foreign / "step_1")
    (foreign / "thesis.txt").write_text("years of work")
    refused("does not hold a run", take, foreign, overwrite_output_dir=True)
    assert (foreign / "thesis.txt").exists()
