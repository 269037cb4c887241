"""Training programs and what they share.

`recipe.py` runs a program from its command line to its pushed model; the programs are `Recipe`s: `pretrain_gpst`,
`train_rnng`, `train_recurrent`, `finetune_glue`, `finetune_summarization` and `finetune_grammar_induction`.

    recipe.py          what a program adds, and the order of a run
    arguments.py       flags and configuration files
    output_folder.py   which folder a run may use, and what is resumed
    run.py             accelerator, model, optimizer, settings of a run
    loop.py, steps.py  training loop; optimizer steps over micro steps and processes
    samplers.py        which samples a micro step reads
    checkpoints.py     checkpoints and best weights
    export.py          final model, pushes to the Hub
    final_report.py    trees of the saved model
    flops.py, speed.py operations of a model, and how many a second
    tree_batches.py    data of RNNG and Tree LM; tree_evaluation.py: their evaluation
    tree_loss.py       losses on trees in `Trainer`: treereg.py, tree_planting.py
    stream_*.py        data, schedule and evaluation of the recurrent models
    finetuning.py      shared by the fine-tuning programs; their tables are in example_tables.py
    configs/           shipped configurations, which `--config NAME` finds
    accelerate/        configurations of `accelerate launch`

Resuming: `output_folder` chooses the checkpoint, `loop.start_or_resume` loads it (`checkpoints`), and the `loader` of
the recipe continues after `state.consumed`.
"""
