# SPDX-License-Identifier: Apache-2.0
"""Training programs and what they share.

    architectures.py   the table: what is trained, on what, and how
    arguments/  options of the programs, by what they read; they import no torch, so that help and errors are quick
        base.py            flags and configuration files; options of all programs
        command_lines.py   which program takes which
    programs/   one module per program: `Recipe`s, which `engine/runner.py` runs; two programs use `Trainer` instead
    tasks/      data, objectives and evaluation that several programs share
    engine/     from the command line to the pushed model:
        runner.py          the order of a run
        recipe.py          what a program adds to it
        output_folder.py   which folder a run may use, and what is resumed
        run.py             accelerator, model, optimizer, settings of a run
        loop.py, steps.py  training loop; optimizer steps over micro steps and processes
        speed.py           tokens and operations per second, memory, traces of steps
        samplers.py        which samples a micro step reads
        checkpoints.py     checkpoints and best weights
        export.py          final model, push to the Hub
        final_report.py    trees of the saved model
    configs/    shipped configurations, which `--config NAME` finds
    accelerate/ configurations of `accelerate launch`

`--resume-from-checkpoint`: `output_folder.output_folder` chooses the checkpoint, `loop.start_or_resume` restores
it (`checkpoints.load_checkpoint`), and the loader of the recipe continues after `state.consumed`.
"""
