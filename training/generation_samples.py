"""A few sentences that the model of a run generates, with their trees: for the eyes, during training."""

import torch
from common import Run
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.viz import tree_to_text

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


@torch.no_grad()
def generate_trees(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Sample sentences from the beginning of a text on.

    Args:
        model: a causal language model of the library; it is left in the mode that it is in.
        tokenizer: of the model.

    Returns:
        Each sentence, followed by its tree, if the model has trees.
    """
    was_training = model.training
    model.eval()
    begin = torch.full((NUM_SENTENCES, 1), model.config.bos_token_id, device=model.device)
    output = model.generate(
        begin,
        attention_mask=torch.ones_like(begin),
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=20,
        return_dict_in_generate=True,
    )
    model.train(was_training)
    # GPST and RNNG count tokens from the first word on, the recurrent models columns.
    offset = 0 if model.config.model_type in ("gpst", "rnng") else 1
    trees, labels = getattr(output, "spans", None), getattr(output, "labels", None)
    texts = []
    for row, ids in enumerate(output.sequences[:, 1:].tolist()):
        spans = [] if trees is None else [(i - offset, j - offset) for i, j in trees[row]]
        ends = [k for k, token in enumerate(ids) if token in (model.config.eos_token_id, model.config.pad_token_id)]
        ids = ids[: max(ends[0] if ends else len(ids), max((j for _, j in spans), default=0))]
        lines = [tokenizer.decode(ids)]
        if trees is not None and ids:
            tokens = [tokenizer.decode([token]).strip() or "_" for token in ids]
            lines.append(tree_to_text(tokens, spans, labels[row] if labels else None))
        texts.append("\n".join(lines))
    return texts
