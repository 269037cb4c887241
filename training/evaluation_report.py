"""The scores of a fine-tuned model as a result of `synlm evaluate`, for means over seeds and plots."""

import json
from collections.abc import Mapping
from typing import Any

from common import Run
from output_folder import ARGUMENTS_FILE, EVALUATION_FILE

from hf_synlm.evaluation.results import EvaluationResult, describe_files, describe_hardware

# Arguments that decide where a run works and what it tells, not what comes out.
_PLACES = frozenset(
    """output_dir overwrite_output_dir resume_from_checkpoint with_tracking report_to push_to_hub hub_strategy
    hub_model_id logging_steps checkpointing_steps checkpoints_total_limit dataloader_num_workers
    preprocessing_num_workers peak_flops model_name_or_path tokenizer_name trust_remote_code""".split()
)
# Arguments that name a data set of the Hub or a folder; the names of files end as `_FILES`.
_DATASET = ("dataset_name", "dataset_config_name")
_FILES = ("_file", "_files", "_trees")


def save_evaluation(run: Run, task: str, scores: Mapping[str, float], seconds: float) -> None:
    """Write `evaluation.json` and `evaluation.md`, which `synlm evaluate summary` and `plot` read.

    Options are the arguments that change the scores (those of `arguments.json`), number of processes and precision
    among them; data are the files with their checksums. So runs that differ in more than the seed have no mean.

    Args:
        run: a finished one.
        task: such as "glue/rte".
        scores: flat mapping from names to numbers.
        seconds: wall time of this process.
    """
    arguments = json.loads((run.output_dir / ARGUMENTS_FILE).read_text(encoding="utf-8"))
    files = {name: _listed(value) for name, value in arguments.items() if name.endswith(_FILES) and value}
    data: dict[str, Any] = {name: arguments[name] for name in _DATASET if arguments.get(name)}
    data["files"] = [
        {"argument": name, **described} for name, paths in files.items() for described in describe_files(paths)
    ]
    model = run.accelerator.unwrap_model(run.model)
    EvaluationResult(
        task=task,
        scores=dict(scores),
        model={
            "name": arguments["model_name_or_path"],
            "revision": None,
            "architecture": type(model).__name__,
            "num_parameters": model.num_parameters(),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        options={
            **{k: v for k, v in arguments.items() if k not in (*_PLACES, *_DATASET) and not k.endswith(_FILES)},
            "num_processes": run.accelerator.num_processes,
            "mixed_precision": run.accelerator.mixed_precision,
        },
        data=data,
        seconds=round(seconds, 1),
        hardware=describe_hardware(run.accelerator.device),
    ).save(run.output_dir / EVALUATION_FILE)


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
