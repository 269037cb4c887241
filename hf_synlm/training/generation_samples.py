"""A few sentences that the model of a run generates, with their trees: for the eyes, during training."""

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.evaluation.generation import generate_texts
from hf_synlm.training.run import Run
from hf_synlm.viz import SentenceView

NUM_SENTENCES = 3
NEW_TOKENS = 20


class SampleGenerator:
    """Prints and logs generated sentences; `loop.train` calls it every `generation_steps`.

    Args:
        run: of this process.
        tokenizer: of the model.
    """

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase):
        self.run, self.tokenizer = run, tokenizer

    def __call__(self, model: nn.Module, step: int) -> None:
        """Generate on the main process; every process has to call."""
        accelerator = self.run.accelerator
        if accelerator.is_main_process:
            plain = accelerator.unwrap_model(model, keep_torch_compile=False)
            # Training seeds every micro step anew, so that this changes nothing there.
            torch.manual_seed(self.run.arguments.seed + step)
            texts = generate_trees(plain, self.tokenizer)
            accelerator.print(f"step {step}: generated\n" + "\n".join(texts))
            accelerator.log({f"generated/{number}": text for number, text in enumerate(texts)}, step=step)
        accelerator.wait_for_everyone()


def generate_trees(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Sample sentences from the beginning of a text on.

    Args:
        model: a causal language model of the library; it is left in the mode that it is in.
        tokenizer: of the model.

    Returns:
        Each sentence, followed by its tree, if the model has trees.
    """
    texts = []
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 20}
    for generated in generate_texts(model, tokenizer, [""] * NUM_SENTENCES, **options):
        lines = [generated.text]
        if generated.tree.hypotheses:
            lines.append(SentenceView(generated.tree).text())
        texts.append("\n".join(lines))
    return texts
