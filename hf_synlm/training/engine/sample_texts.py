# SPDX-License-Identifier: Apache-2.0
"""Sentences that a model generates during training, with their trees (`--generation-steps`)."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.evaluation.generation import GeneratedText, generate_texts
from hf_synlm.training.engine.run import Run
from hf_synlm.viz import SentenceView

NUM_SENTENCES = 3
NEW_TOKENS = 20


def log_samples(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print and log a few generated sentences; every process calls, the main one generates."""
    accelerator, step = run.accelerator, run.state.step
    if accelerator.is_main_process:
        plain = accelerator.unwrap_model(run.model, keep_torch_compile=False)
        # Training seeds every micro step anew, so that this changes nothing there.
        torch.manual_seed(run.arguments.seed + step)
        texts = sample_texts(plain, tokenizer)
        accelerator.print(f"step {step}: generated\n" + "\n".join(texts))
        accelerator.log({f"generated/{number}": text for number, text in enumerate(texts)}, step=step)
    accelerator.wait_for_everyone()


def sample_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Sample sentences with their trees; the mode of the model does not change."""
    prompts = [""] * NUM_SENTENCES
    found = generate_texts(model, tokenizer, prompts, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=20)
    return [text_with_tree(text) for text in found]


def text_with_tree(generated: GeneratedText) -> str:
    """A generated text, followed by its tree if the model has trees."""
    return f"{generated.text}\n{SentenceView(generated.tree).text()}" if generated.tree.hypotheses else generated.text
