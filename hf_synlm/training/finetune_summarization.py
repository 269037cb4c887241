"""Fine-tune a causal language model to summarize: XSum, CNN/DailyMail, Gigaword, or any table of texts and summaries.

    accelerate launch training/finetune_summarization.py --config training/configs/gpst_xsum.yaml \
        --model_name_or_path runs/gpst_small_owt/model --output_dir runs/xsum

A context is document, prompt, summary, end token. GPST gets a tree for every sentence of the document, one for the
prompt and one for the whole summary, as in the paper; other models read the same as running text. Summaries are
written by the model's `generate` and scored by ROUGE. Paper: Hu et al., "Generative Pretrained Structured Transformers"
(ACL 2024), sections 4.2.1 and A.5.
"""

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.evaluation.rouge import rouge_scores
from hf_synlm.training.arguments import TrainingArguments, parse_arguments
from hf_synlm.training.checkpoints import PARTIAL_SUFFIX, write_json
from hf_synlm.training.evaluation_report import save_evaluation
from hf_synlm.training.example_tables import ExampleDataset, describe_table
from hf_synlm.training.finetuning import (
    CourseArguments,
    ModelArguments,
    best_evaluation,
    card_facts,
    check_length,
    check_run,
    fine_tune,
    learning_rates,
    load_model,
    map_rows,
    mean_losses,
    prepare_run,
    read_config,
    read_tokenizer,
    run_results,
    set_steps,
)
from hf_synlm.training.hub_uploads import push_final_model
from hf_synlm.training.output_folder import RESULTS_FILE, output_folder
from hf_synlm.training.run import Run, end_run, make_accelerator, save_final_model, start_tracking
from hf_synlm.training.samplers import seed_micro_step
from hf_synlm.training.steps import to_device
from hf_synlm.training.summary_contexts import (
    ContextCollator,
    ContextLayout,
    SummaryArguments,
    encode_tables,
    make_layout,
    read_tables,
)


@dataclass
class DecodingArguments:
    """How summaries are written, and when."""

    generation_options: str | None = field(
        default=None,
        metadata={
            "help": "For `generate`: key=value,key=value or a JSON object, in a config file a mapping. Default, the "
            "paper's: do_sample=true,top_k=2; for GPST do_sample=true,num_beams=2,top_k=0 (word-level search, one of "
            "two hypotheses drawn at every word). Its baseline w/o sync: num_beams=2,synchronous=false.",
        },
    )
    max_new_tokens: int | None = field(
        default=None, metadata={"help": "Longest summary in tokens; default: max_target_length."}
    )
    num_validation_summaries: int = field(
        default=0,
        metadata={
            "help": "Summaries written at every evaluation, whose ROUGE chooses the best model; 0: the loss does."
        },
    )
    use_stemmer: bool = field(default=False, metadata={"help": "ROUGE of stemmed words. The authors do not stem."})

    def __post_init__(self):
        """Check the values."""
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1 and is {self.max_new_tokens}.")
        if self.num_validation_summaries < 0:
            raise ValueError(f"num_validation_summaries must not be negative and is {self.num_validation_summaries}.")

    def options(self, model: PreTrainedModel) -> dict[str, Any]:
        """Options of `generate`: those given, or the paper's for the model."""
        if self.generation_options:
            return dict(self.generation_options)
        if model.config.model_type == "gpst":
            return {"do_sample": True, "num_beams": 2, "top_k": 0}
        return {"do_sample": True, "top_k": 2}


# ---------------------------------------------------------------------------------------------- summaries
@dataclass
class Summarizer:
    """Writes summaries by `generate`, the same whatever the number of processes."""

    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    collate: ContextCollator
    options: dict[str, Any]
    batch_size: int
    seed: int

    @torch.no_grad()
    def write(self, model: nn.Module, examples: ExampleDataset, count: int) -> list[str]:
        """Summaries of the first `count` examples, on every process."""
        plain = self.accelerator.unwrap_model(model)
        was_training = plain.training
        plain.eval()

        def summarize(rows: list[int]) -> list[str]:
            seed_micro_step(self.seed, min(rows), 0)
            batch = to_device(self.collate.prompts([examples[row] for row in rows]), self.accelerator.device)
            output = plain.generate(**batch, **self.options)
            texts = self.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            return [text.strip() for text in texts]

        texts = map_rows(self.accelerator, examples.lengths[:count], self.batch_size, summarize, "summarizing")
        plain.train(was_training)
        return texts

    def rehearse(self, model: nn.Module, examples: ExampleDataset) -> None:
        """Write two tokens of one summary, so that a wrong option fails before training."""
        short = Summarizer(**{**vars(self), "options": {**self.options, "max_new_tokens": 2}})
        short.write(model, examples, 1)


@dataclass
class Evaluator:
    """Measures the loss on validation examples, and ROUGE of some summaries."""

    accelerator: Accelerator
    examples: ExampleDataset
    references: list[list[str]]
    summarizer: Summarizer
    batch_size: int
    num_summaries: int
    use_stemmer: bool

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Evaluate; the main process prints the result. Every process has to call."""
        losses = mean_losses(self.accelerator, model, self.examples, self.summarizer.collate, self.batch_size)
        result: dict[str, Any] = {"step": step, "losses": losses}
        text = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        # The model of step 0 has seen no summary.
        if self.num_summaries and step:
            count = min(self.num_summaries, len(self.examples))
            summaries = self.summarizer.write(model, self.examples, count)
            result["rouge"] = rouge_scores(summaries, self.references[:count], use_stemmer=self.use_stemmer)
            text += "  " + rouge_line(result["rouge"])
        self.accelerator.print(f"step {step}: validation, {len(self.examples)} examples: {text}")
        self.accelerator.log({f"validation/{k}": v for k, v in result["losses"].items()}, step=step)
        self.accelerator.log({f"validation/{k}": v for k, v in result.get("rouge", {}).items()}, step=step)
        return result

    def metric(self, evaluation: dict[str, Any]) -> float:
        """What the best model minimises: minus the mean ROUGE, or the loss."""
        return -evaluation["rouge"]["rouge_average"] if "rouge" in evaluation else evaluation["losses"]["loss"]


def rouge_line(scores: dict[str, float]) -> str:
    """Scores for a terminal."""
    return "  ".join(f"{name} {value:.2f}" for name, value in scores.items())


# ---------------------------------------------------------------------------------------------- the run
def make_model(arguments: ModelArguments, end_token: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The pretrained language model and its tokenizer.

    Raises:
        ValueError: for models that cannot learn from text alone, or that are no decoders.
    """
    config = read_config(arguments)
    if config.model_type == "rnng":
        raise ValueError("RNNG learns from trees, and documents have none. Choose another architecture.")
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} has an encoder of its own. Choose a causal language model.")
    if config.model_type == "gpst" and end_token:
        config = read_config(arguments, document_end_token=True)
    tokenizer = read_tokenizer(arguments, config, [])
    return load_model(AutoModelForCausalLM, arguments, config, tokenizer), tokenizer


def make_summarizer(
    run: Run, tokenizer: PreTrainedTokenizerBase, collate: ContextCollator, layout: ContextLayout,
    data: SummaryArguments, decoding: DecodingArguments,
) -> Summarizer:  # fmt: skip
    """Writer of summaries with the options of the command line.

    Raises:
        ValueError: when the summaries do not fit the model.
    """
    length = data.max_target_length if decoding.max_new_tokens is None else decoding.max_new_tokens
    ends = {"eos_token_id": tokenizer.eos_token_id if data.end_token else None}
    model = run.accelerator.unwrap_model(run.model)
    options = {"max_new_tokens": length, **ends, **decoding.options(model)}
    longest = layout.longest(tokenizer) - layout.max_target + options["max_new_tokens"]
    check_length(model.config, longest, f"A document with a summary of max_new_tokens {options['max_new_tokens']}")
    arguments = run.arguments
    return Summarizer(
        run.accelerator, tokenizer, collate, options, arguments.per_device_eval_batch_size, arguments.seed
    )


def write_results(
    run: Run,
    seconds: float,
    speed: dict[str, float],
    summaries: list[str],
    references: list[list[str]],
    decoding: DecodingArguments,
    options: dict[str, Any],
    sources: list[dict[str, Any]],
) -> None:
    """Write the summaries, `evaluation.json` and `all_results.json`, and print the closing line."""
    file = run.output_dir / "summaries.jsonl"
    partial = file.with_name(file.name + PARTIAL_SUFFIX)
    with partial.open("w", encoding="utf-8") as stream:
        for row, (summary, several) in enumerate(zip(summaries, references, strict=True)):
            line = {"row": row, "summary": summary, "references": several}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(partial, file)
    scores = rouge_scores(summaries, references, use_stemmer=decoding.use_stemmer)
    test = {"rouge": scores, "num_summaries": len(summaries), "options": options, "use_stemmer": decoding.use_stemmer}
    write_json(run.output_dir / RESULTS_FILE, {**run_results(run, seconds, speed), "test": test})
    save_evaluation(run, "summarization", scores, sources, seconds)
    before, best = run.state.notes["evaluations"][0]["losses"], best_evaluation(run)
    run.accelerator.print(
        f"validation loss {before['loss']:.4f} -> {best['losses']['loss']:.4f} (best at step {best['step']}); "
        f"{len(summaries)} summaries: {rouge_line(scores)}"
    )


def main(argv: list[str] | None = None) -> None:
    """Run the script."""
    model_arguments, data, decoding, course, arguments = parse_arguments(
        (ModelArguments, SummaryArguments, DecodingArguments, CourseArguments, TrainingArguments),
        argv,
        mappings=["config_overrides", "generation_options"],
    )
    started = time.monotonic()
    accelerator = make_accelerator(arguments)
    check_run(accelerator, arguments)
    with output_folder(accelerator, arguments, model_arguments, data, decoding, course) as checkpoint:
        tables = read_tables(accelerator, data)
        sources = [
            describe_table(part, data.source(part), table, ["text", "references"]) for part, table in tables.items()
        ]

        set_seed(arguments.seed)
        model, tokenizer = make_model(model_arguments, data.end_token)
        layout = make_layout(data, model, tokenizer)
        examples = encode_tables(accelerator, tables, layout, tokenizer, data.preprocessing_num_workers)
        for part, encoded in examples.items():
            accelerator.print(f"{part}: {encoded.describe()}")
        set_steps(arguments, course, len(examples["train"]), accelerator.num_processes)
        run = prepare_run(accelerator, arguments, model, learning_rates(model_arguments, model.config))
        collate = ContextCollator(tokenizer.pad_token_id, layout.by_sentences, data.summary_loss_only)
        summarizer = make_summarizer(run, tokenizer, collate, layout, data, decoding)
        summarizer.rehearse(run.model, examples["validation"])
        evaluator = Evaluator(
            accelerator,
            examples["validation"],
            tables["validation"]["references"],
            summarizer,
            arguments.per_device_eval_batch_size,
            decoding.num_validation_summaries,
            decoding.use_stemmer,
        )
        settings = {
            "validation": examples["validation"].fingerprint(),
            "summary_loss_only": data.summary_loss_only,
            "choice": [
                decoding.num_validation_summaries,
                summarizer.options if decoding.num_validation_summaries else {},
            ],
        }
    start_tracking(accelerator, "finetune_summarization", model_arguments, data, decoding, course, arguments)

    def facts() -> dict[str, Any]:
        return card_facts(run, "finetune_summarization.py", data.describe())

    speed = fine_tune(
        run, checkpoint, course, settings, examples["train"], collate, evaluator.run, evaluator.metric, tokenizer, facts
    )
    save_final_model(run, tokenizer, facts())
    summaries = summarizer.write(run.model, examples["test"], len(examples["test"]))
    if accelerator.is_main_process:
        references = list(tables["test"]["references"])
        write_results(
            run, time.monotonic() - started, speed, summaries, references, decoding, summarizer.options, sources
        )
    end_run(run)
    push_final_model(run)


if __name__ == "__main__":
    main()
