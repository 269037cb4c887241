"""Fine-tune a causal language model to summarize: XSum, CNN/DailyMail, Gigaword, or any table of texts and summaries.

    accelerate launch training/finetune_summarization.py --config training/configs/summarization_xsum.yaml \
        --model_name_or_path runs/gpst_small_owt/model --output_dir runs/xsum

A context is document, prompt, summary, end token. GPST gets a tree for every sentence of the document, one for the
prompt and one for the whole summary, as in the paper; other models read the same as running text. The model's
`generate` writes the summaries, and ROUGE scores them.
Paper: Hu et al., "Generative Pretrained Structured Transformers" (ACL 2024), sections 4.2.1 and A.5.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.hf_argparser import HfArg

from hf_synlm.data.files import write_text
from hf_synlm.evaluation.rouge import rouge_scores
from hf_synlm.module_tools import evaluation_mode
from hf_synlm.training.arguments import TrainingArguments, check_minimum
from hf_synlm.training.example_tables import ExampleDataset, describe_table, encode_table
from hf_synlm.training.finetuning import (
    CourseArguments,
    FineTuning,
    ModelArguments,
    check_length,
    load_model,
    map_rows,
    mean_losses,
    read_config,
    read_tokenizer,
)
from hf_synlm.training.recipe import kept_evaluation, run_recipe
from hf_synlm.training.run import Run
from hf_synlm.training.samplers import seed_micro_step
from hf_synlm.training.steps import to_device
from hf_synlm.training.summary_contexts import ContextCollator, SummaryArguments, make_layout, read_tables


@dataclass
class DecodingArguments:
    """How summaries are generated, and when."""

    generation_options: str | None = HfArg(
        default=None,
        help="Options of `generate`: key=value,key=value or a JSON object, in a config file a mapping. Default, "
        "as in the paper: do_sample=true,top_k=2; for GPST do_sample=true,num_beams=2,top_k=0 (word-synchronous "
        "search that draws one of two hypotheses at every word). The paper's baseline w/o sync: "
        "num_beams=2,synchronous=false.",
    )
    max_new_tokens: int | None = HfArg(default=None, help="Longest summary in tokens; default: max_target_length.")
    num_validation_summaries: int = HfArg(
        default=0,
        help="Summaries generated at each evaluation; the best ROUGE selects the model. 0: the lowest loss.",
    )
    use_stemmer: bool = HfArg(default=False, help="ROUGE on stemmed words. The authors do not stem.")

    def __post_init__(self):
        """Check the values."""
        check_minimum(self, 1, "max_new_tokens")
        check_minimum(self, 0, "num_validation_summaries")

    def options(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Options of `generate`: those given, or the paper's for the model of `config`."""
        if self.generation_options:
            return dict(self.generation_options)  # type: ignore[arg-type]  # a mapping, once the command line is parsed
        if config.model_type == "gpst":
            return {"do_sample": True, "num_beams": 2, "top_k": 0}
        return {"do_sample": True, "top_k": 2}


def rouge_line(scores: dict[str, float]) -> str:
    """The `scores` for a terminal."""
    return "  ".join(f"{name} {value:.2f}" for name, value in scores.items())


# ---------------------------------------------------------------------------------------------- the run
class SummarizationRecipe(FineTuning):
    """A language model of documents that end with their summaries."""

    program = "finetune_summarization"
    argument_types = (ModelArguments, SummaryArguments, DecodingArguments, CourseArguments, TrainingArguments)
    mappings = ("config_overrides", "generation_options")
    collate: ContextCollator
    options: dict[str, Any]
    references: dict[str, list[list[str]]]
    held_out: dict[str, ExampleDataset]

    def __init__(
        self,
        accelerator: Accelerator,
        model_arguments: ModelArguments,
        data: SummaryArguments,
        decoding: DecodingArguments,
        course: CourseArguments,
        arguments: TrainingArguments,
    ):
        super().__init__(accelerator, model_arguments, data, course, arguments)
        self.decoding = decoding

    def dataset(self) -> str | None:
        """Of the option."""
        return self.data.dataset_name

    def load(self) -> PreTrainedModel:
        """Read and encode the tables, load the model, and try the options of `generate`."""
        data, accelerator = self.data, self.accelerator
        tables = read_tables(accelerator, data)
        self.sources = [
            describe_table(part, data.source(part), table, ["text", "references"]) for part, table in tables.items()
        ]
        self.references = {part: list(tables[part]["references"]) for part in ("validation", "test")}
        model = self._load_language_model()
        layout = make_layout(data, model, self.tokenizer)
        encode = partial(layout.encode, tokenizer=self.tokenizer)
        self.held_out = {
            part: encode_table(accelerator, table, encode, data.preprocessing_num_workers)
            for part, table in tables.items()
        }
        for part, encoded in self.held_out.items():
            accelerator.print(f"{part}: {encoded.describe()}")
        self.examples = self.held_out.pop("train")
        self.collate = ContextCollator(self.tokenizer.pad_token_id, layout.by_sentences, data.summary_loss_only)
        self.settle_steps()
        length = data.max_target_length if self.decoding.max_new_tokens is None else self.decoding.max_new_tokens
        end_id = self.tokenizer.eos_token_id if data.end_token else None
        self.options = {"max_new_tokens": length, "eos_token_id": end_id, **self.decoding.options(model.config)}
        length = self.options["max_new_tokens"]
        longest = layout.longest(self.tokenizer) - layout.max_target + length
        what = f"A document with a summary of max_new_tokens {length}"
        check_length(model.config, longest, what, "Lower --max_source_length or --max_new_tokens.")
        # A wrong option fails here, before training.
        self._summarize(model, "validation", 1, max_new_tokens=2)
        return model

    def _load_language_model(self) -> PreTrainedModel:
        arguments = self.model_arguments
        config = read_config(arguments)
        if config.model_type == "rnng":
            raise ValueError("RNNG learns from trees, and documents have none. Choose another architecture.")
        if config.is_encoder_decoder:
            raise ValueError(f"{config.model_type} has a separate encoder. Choose a causal language model.")
        if config.model_type == "gpst" and self.data.end_token:
            config = read_config(arguments, document_end_token=True)
        self.tokenizer = read_tokenizer(arguments, config, [])
        return load_model(AutoModelForCausalLM, arguments, config, self.tokenizer)

    @torch.no_grad()
    def _summarize(self, model: nn.Module, part: str, count: int, **changes: Any) -> list[str]:
        """Summaries of the first `count` examples, on every process; the number of processes does not change them."""
        plain, examples = self.accelerator.unwrap_model(model), self.held_out[part]

        def summarize(rows: list[int]) -> list[str]:
            seed_micro_step(self.arguments.seed, min(rows), 0)
            batch = to_device(self.collate.prompts([examples[row] for row in rows]), plain.device)
            output = plain.generate(**batch, **{**self.options, **changes})
            texts = self.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            return [text.strip() for text in texts]

        batch_size = self.arguments.per_device_eval_batch_size
        with evaluation_mode(plain):
            return map_rows(self.accelerator, examples.lengths[:count], batch_size, summarize, "summarizing")

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Data, loss, and the choice of the best model."""
        count = self.decoding.num_validation_summaries
        return {
            **super().settings(model),
            "validation": self.held_out["validation"].fingerprint(),
            "summary_loss_only": self.data.summary_loss_only,
            "choice": [count, self.options if count else {}],
        }

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure the loss on validation examples, and ROUGE of some summaries."""
        examples = self.held_out["validation"]
        batch_size = self.arguments.per_device_eval_batch_size
        losses = mean_losses(self.accelerator, model, examples, self.collate, batch_size)
        result: dict[str, Any] = {"step": step, "losses": losses}
        text = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
        # The model of step 0 has seen no summaries.
        count = min(self.decoding.num_validation_summaries, len(examples)) if step else 0
        if count:
            summaries, references = self._summarize(model, "validation", count), self.references["validation"][:count]
            result["rouge"] = rouge_scores(summaries, references, use_stemmer=self.decoding.use_stemmer)
            text += "  " + rouge_line(result["rouge"])
        self.accelerator.print(f"step {step}: validation, {len(examples)} examples: {text}")
        flat = {f"validation/{name}": value for name, value in {**losses, **result.get("rouge", {})}.items()}
        self.accelerator.log(flat, step=step)
        return result

    def metric(self, evaluation: dict[str, Any]) -> float:
        """Minus the mean ROUGE of `evaluation`, or its loss."""
        return -evaluation["rouge"]["rouge_average"] if "rouge" in evaluation else evaluation["losses"]["loss"]

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Summarize the test documents and score the summaries; the main process writes them."""
        references = self.references["test"]
        summaries = self._summarize(run.model, "test", len(references))
        results = super().final_results(run, step)
        if not self.accelerator.is_main_process:
            return results
        rows = [
            {"row": row, "summary": summary, "references": several}
            for row, (summary, several) in enumerate(zip(summaries, references, strict=True))
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(run.output_dir / "summaries.jsonl", lines)
        stem = self.decoding.use_stemmer
        scores = rouge_scores(summaries, references, use_stemmer=stem)
        test = {"rouge": scores, "num_summaries": len(rows), "options": self.options, "use_stemmer": stem}
        return {**results, "test": test}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Write `evaluation.json`."""
        before, best, test = results["evaluations"][0], kept_evaluation(results), results["test"]
        self.save_scores(run, "summarization", test["rouge"], results)
        return (
            f"validation loss {before['losses']['loss']:.4f} -> {best['losses']['loss']:.4f} (best at step "
            f"{best['step']}); {test['num_summaries']} summaries: {rouge_line(test['rouge'])}"
        )


main = partial(run_recipe, SummarizationRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
