# SPDX-License-Identifier: Apache-2.0
"""Run a training program: from its command line to the push of its model.

Order: arguments, accelerator, output folder, data and model (`load`), optimizer (`prepare`), checkpoint or first
evaluation, loop, best model, final model, test (`final_results`), `all_results.json`, end of the processes, `report`,
push to the Hub.
"""

import dataclasses
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from huggingface_hub.errors import StrictDataclassFieldValidationError

from hf_synlm.data.files import release_outputs, write_json
from hf_synlm.data.text import PathLike, plural
from hf_synlm.evaluation.results import describe_hardware, library_versions
from hf_synlm.training.arguments.base import TrainingArguments, list_configs, names_config, parse_arguments
from hf_synlm.training.engine.checkpoints import read_state
from hf_synlm.training.engine.export import check_repository, export_run, push_final_model
from hf_synlm.training.engine.loop import TrainingLoop, start_or_resume
from hf_synlm.training.engine.output_folder import ARGUMENTS_FILE, RESULTS_FILE, output_folder
from hf_synlm.training.engine.recipe import Recipe
from hf_synlm.training.engine.run import Run, TrainingState, course_settings, end_run, make_accelerator, set_up_layers

PACKAGE = Path(__file__).parents[2]


def run_recipe(recipe_type: type[Recipe], argv: Sequence[str] | None = None, parsed: Any = None) -> None:
    """Run a training program; `argv` is the command line without the program name (default: the process's).

    `parsed` are the arguments, where the command line has been read. Errors of the user are told as `tells_errors`
    says. After SIGTERM or SIGINT the process saves a checkpoint and exits with status 0.
    """
    with tells_errors(argv):
        _run(recipe_type, argv, parsed)


@contextmanager
def tells_errors(argv: Sequence[str] | None) -> Iterator[None]:
    """Tell an error of the user in one line on stderr, with exit status 2, and give up the locks of outputs.

    With an `argv` that was passed to the program, and with the environment variable HF_SYNLM_TRACEBACK=1, which shows
    where it was raised, the error is raised.
    """
    try:
        yield
    except (ValueError, OSError, FloatingPointError, StrictDataclassFieldValidationError) as error:
        if argv is not None or os.environ.get("HF_SYNLM_TRACEBACK") or not _is_user_error(error):
            raise
        is_of_field = isinstance(error, StrictDataclassFieldValidationError)  # it wraps what is wrong with the field
        print(f"Error: {error.__cause__ if is_of_field else error}", file=sys.stderr)
        sys.exit(2)
    finally:
        release_outputs()


def _is_user_error(error: Exception) -> bool:
    """Whether the cause is input, not a bug: a ValueError of another library (a wrong shape) is one of our bugs."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return not isinstance(error, ValueError) or raised_in.is_relative_to(PACKAGE)


def _run(recipe_type: type[Recipe], argv: Sequence[str] | None, parsed: Any) -> None:
    """Run the program; errors are raised."""
    started = time.monotonic()
    description = (inspect.getdoc(recipe_type) or "").partition("\n")[0]
    words = list(sys.argv[1:] if argv is None else argv)
    if list_configs(recipe_type.program, words):
        return
    parse = partial(parse_arguments, recipe_type.parts.values(), description=description)
    parsed = parsed or parse(words)
    accelerator = make_accelerator(parsed[-1])
    chosen = recipe_type.default_config(accelerator.device.type, *parsed)
    if chosen is not None:
        why = f"--config names no size: {chosen} sets the missing options" if names_config(words) else ""
        why = why or f"no --config: {chosen} is used"
        accelerator.print(f"{why}, for this device and text. --list-configs shows others.")
        parsed = parse(words, base=chosen)
    *others, arguments = parsed
    recipe = recipe_type(accelerator, *parsed)
    recipe.check()
    if accelerator.is_main_process:
        check_repository(arguments)
    accelerator.wait_for_everyone()
    with output_folder(accelerator, arguments, *others) as checkpoint:
        run, settings = _begin(recipe, accelerator, arguments, checkpoint)
    _start_tracking(accelerator, recipe.program, *parsed)
    step, speed = _train(recipe, run, checkpoint, settings)
    folder = run.output_dir / "model"
    export_run(run, recipe.tokenizer, recipe.card_facts(run), folder)
    results = {
        "step": run.state.step,
        **({"best_step": step} if "best" in run.state.notes else {}),
        **speed,
        "train": run.state.notes.get("train", []),
        "evaluations": run.state.notes["evaluations"],
        **recipe.final_results(run, step),
        "seconds_of_this_process": round(time.monotonic() - started, 1),
        "versions": library_versions(),
        "hardware": describe_hardware(accelerator.device),
    }
    if accelerator.is_main_process:
        write_json(run.output_dir / RESULTS_FILE, results)
    end_run(run)
    if accelerator.is_main_process:
        recipe.report(run, folder, results)
        write_json(run.output_dir / RESULTS_FILE, results)
        print(f"{recipe.improvement(results)}\n{next_command(run.model, folder)}")
    push_final_model(run)


def next_command(model: Any, folder: PathLike) -> str:
    """Where a trained model lies, and what to do with it."""
    kind = "parse FILE" if getattr(model.config, "gives_trees", False) else "surprisal FILE"
    scores = model.can_generate() or type(model).__name__.endswith("CausalLM")
    return f"The model is in {folder}. Next: synlm {f'{kind} --model' if scores else 'info'} {folder}"


def end_counting(model: Any, folder: PathLike, results: dict[str, Any]) -> None:
    """Write the results of a program that counts, and say where its model lies."""
    write_json(Path(folder) / RESULTS_FILE, {**results, "versions": library_versions()})
    print(next_command(model, folder))


def _begin(
    recipe: Recipe, accelerator: Accelerator, arguments: TrainingArguments, checkpoint: Path | None
) -> tuple[Run, dict[str, Any]]:
    """Load data and model, and prepare the run; also the settings that a resumed run must share."""
    set_seed(arguments.seed)
    model = recipe.load()
    overrides = getattr(recipe.model_arguments, "config_overrides", None) or {}
    if recipe.text_style and getattr(model.config, "text_style", None) is None and "text_style" not in overrides:
        model.config.text_style = recipe.text_style
    wanted = arguments.max_train_steps or 0
    recipe.settle_steps()
    ends = f": --num-train-epochs {arguments.num_train_epochs} ends before --max-train-steps {wanted}"
    accelerator.print(plural(arguments.num_steps, "step") + ends * (arguments.num_steps < wanted))
    accelerator.print(
        f"model: {type(model).__name__}, {model.num_parameters():,} parameters, vocabulary {model.config.vocab_size}"
    )
    set_up_layers(model, arguments, recipe.layers_to_compile(model))
    settings = {**course_settings(arguments, model.config, accelerator, recipe.tokenizer), **recipe.settings(model)}
    if checkpoint is None:
        recipe.begin(model)
    else:
        read_state(checkpoint, settings)  # refuses other settings
    return Run(accelerator, arguments, *recipe.prepare(model), TrainingState()), settings


def _start_tracking(accelerator: Accelerator, name: str, *arguments: Any) -> None:
    """Write all arguments to `output_dir/arguments.json` and to the trackers, if there are any."""
    settings = {key: value for item in arguments for key, value in dataclasses.asdict(item).items()}
    if accelerator.is_main_process:
        write_json(Path(settings["output_dir"]) / ARGUMENTS_FILE, settings)
    if accelerator.log_with:
        simple = {k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for k, v in settings.items()}
        accelerator.init_trackers(name, config=simple)


def _train(recipe: Recipe, run: Run, checkpoint: Path | None, settings: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Train, starting from the checkpoint if there is one.

    Returns the step whose weights became the final model, and the speed.
    """
    best = recipe.best_model()
    start_or_resume(run, checkpoint, settings, recipe.evaluate, best)
    speed = TrainingLoop(run, recipe, best).train()
    if best is None:
        return run.state.step, speed
    step = best.restore(run)
    run.accelerator.print(f"the best model is that of step {step}")
    return step, speed
