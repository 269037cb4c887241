"""Sentences that a model generates during training, with their trees (`--generation_steps`)."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.evaluation.generation import generate_texts
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
    """Sample sentences, each followed by its tree if the model has trees; the mode of the model does not change."""
    texts = []
    prompts = [""] * NUM_SENTENCES
    for generated in generate_texts(model, tokenizer, prompts, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=20):
        lines = [generated.text]
        if generated.tree.hypotheses:
            lines.append(SentenceView(generated.tree).text())
        texts.append("\n".join(lines))
    return texts
