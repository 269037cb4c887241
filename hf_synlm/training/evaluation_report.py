"""Write the scores of a fine-tuned model as a result of `synlm evaluate`, for means over seeds and plots."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hf_synlm.evaluation.results import EvaluationResult, describe_hardware, library_versions
from hf_synlm.training.output_folder import ARGUMENTS_FILE, EVALUATION_FILE
from hf_synlm.training.run import Run

# Arguments that do not change the scores, or whose content is described elsewhere in the result.
_PLACES = frozenset(
    """output_dir overwrite_output_dir resume_from_checkpoint with_tracking report_to push_to_hub hub_strategy
    hub_model_id logging_steps checkpointing_steps checkpoints_total_limit dataloader_num_workers
    preprocessing_num_workers peak_flops model_name_or_path trust_remote_code dataset_name
    dataset_config_name""".split()
)
# Suffixes of the arguments that name files.
_FILES = ("_file", "_files", "_trees")


def save_evaluation(
    run: Run, task: str, scores: Mapping[str, float], sources: Sequence[Mapping[str, Any]], seconds: float
) -> None:
    """Write `evaluation.json` and `evaluation.md`, which `synlm evaluate summary` and `plot` read.

    Options are the arguments of `arguments.json` that change the scores, number of processes, and precision. Runs that
    differ in them, in the data, or in architecture and size of the model are not averaged. The weights they begin with
    may differ: the seed of pretraining varies, too.

    Args:
        run: ended.
        task: such as "glue/rte".
        scores: flat mapping from names to numbers.
        sources: what was read: `role` (an argument), `path`, and a checksum of the content.
        seconds: wall time of this process.
    """
    arguments = json.loads((run.output_dir / ARGUMENTS_FILE).read_text(encoding="utf-8"))
    model = run.accelerator.unwrap_model(run.model)
    EvaluationResult(
        task=task,
        scores=dict(scores),
        model={
            "name": arguments["model_name_or_path"],
            "revision": getattr(model.config, "_commit_hash", None),
            "architecture": type(model).__name__,
            "num_parameters": model.num_parameters(),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        options={
            **{k: v for k, v in arguments.items() if k not in _PLACES and not k.endswith(_FILES)},
            "num_processes": run.accelerator.num_processes,
            "mixed_precision": run.accelerator.mixed_precision,
        },
        data={"files": [dict(source) for source in sources]},
        seconds=round(seconds, 1),
        versions=library_versions("accelerate", "datasets", "scikit-learn", "rouge-score"),
        hardware=describe_hardware(run.accelerator.device),
    ).save(run.output_dir / EVALUATION_FILE)
