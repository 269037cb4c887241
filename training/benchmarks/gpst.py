"""The sides of the comparisons of GPST with GPT-2 of transformers; `benchmark.py` times them."""

import torch
from benchmarks.clock import Step
from transformers import GPT2Config, GPT2LMHeadModel

from hf_synlm import GPSTConfig, GPSTForCausalLM

SENTENCE_LENGTHS = (8, 45)  # tokens per sentence of the training contexts, half-open
BEAM, PARSE_TOKENS = 20, 30
NO_DROPOUT = dict.fromkeys(
    (
        "embedding_dropout",
        "residual_dropout",
        "attention_dropout",
        "composition_dropout",
        "composition_attention_dropout",
        "parser_dropout",
        "head_dropout",
    ),
    0.0,
)
QUARTER = {
    "vocab_size": 12566,
    "hidden_size": 192,
    "num_attention_heads": 4,
    "composition_size": 64,
    "composition_num_heads": 4,
    "composition_intermediate_size": 256,
    "score_size": 32,
    "parser_size": 32,
    "parser_score_size": 128,
    "parser_num_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "reduce_token_id": 3,
    "cls_token_id": 4,
    "sep_token_id": 5,
}
FIRST_WORD = 10  # ids below are special tokens of the quarter configuration


def _gpt2(config: GPSTConfig) -> GPT2LMHeadModel:
    """GPT-2 of the same width, heads, layers and vocabulary, as transformers has it."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.hidden_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
    )


def packed_contexts(num_contexts: int, num_tokens: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Full contexts of random tokens, cut into sentences of random length.

    Args:
        num_contexts: rows.
        num_tokens: columns.
        vocab_size: ids are drawn from the words of the vocabulary.

    Returns:
        Token ids and sentence numbers, each [rows, columns].
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_WORD, vocab_size, (num_contexts, num_tokens), generator=generator)
    sentence_ids = torch.zeros_like(ids)
    for row in sentence_ids:
        start, number = 0, 1
        while start < num_tokens:
            length = int(torch.randint(*SENTENCE_LENGTHS, (1,), generator=generator))
            row[start : start + length] = number
            start, number = start + length, number + 1
    return ids, sentence_ids


def gpst_train(overrides: dict, num_contexts: int, num_tokens: int) -> tuple[Step, Step, Step]:
    """Forward and backward of the whole objective against GPT-2's language-modeling loss on the same tokens.

    Args:
        overrides: fields of the configuration that differ from the small preset.
        num_contexts: contexts per step.
        num_tokens: tokens per context.

    Returns:
        The measured step, the baseline's step and the check.
    """
    torch.manual_seed(0)
    config = GPSTConfig(**overrides, **NO_DROPOUT, merge_noise=0.0)
    model, baseline = GPSTForCausalLM(config).train(), _gpt2(config).train()
    ids, sentence_ids = packed_contexts(num_contexts, num_tokens, config.vocab_size)

    def ours() -> torch.Tensor:
        model.zero_grad()
        loss = model(ids, sentence_ids=sentence_ids, labels=ids).loss
        loss.backward()
        return loss

    def theirs() -> torch.Tensor:
        baseline.zero_grad()
        loss = baseline(ids, labels=ids).loss
        loss.backward()
        return loss

    def check() -> None:
        # The token loss again from full logits, the whole loss again sentence by sentence in contexts of their own.
        model.eval()
        output = model(ids, sentence_ids=sentence_ids, labels=ids)
        with torch.no_grad():
            given = model(ids, sentence_ids=sentence_ids, output_chart=True)
            log_prob = given.token_logits_given_tree.log_softmax(-1).gather(-1, ids[..., None])
        torch.testing.assert_close(output.losses["token"], -log_prob.mean(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.joint_log_prob, given.joint_log_prob, rtol=1e-4, atol=1e-2)
        first = ids[:1, : int((sentence_ids[0] == 1).sum())]
        alone = [span for span in given.spans[0] if span[1] <= first.shape[1]]
        with torch.no_grad():
            single = model(first, output_chart=True)
        if single.spans[0] != alone:
            raise AssertionError("a sentence has another tree alone than in its context")
        model.train()
        ours()
        unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        if unused or not all(torch.isfinite(parameter.grad).all() for parameter in model.parameters()):
            raise AssertionError(f"parameters without a finite gradient: {unused}")

    return ours, theirs, check


def gpst_parse(overrides: dict) -> tuple[Step, Step, Step]:
    """Word-synchronous parsing of one sentence against GPT-2's beam search for equally many tokens.

    Args:
        overrides: fields of the configuration that differ from the small preset.

    Returns:
        The measured step, the baseline's step and the check.
    """
    torch.manual_seed(0)
    config = GPSTConfig(**overrides)
    model, baseline = GPSTForCausalLM(config).eval(), _gpt2(config).eval()
    ids = torch.randint(FIRST_WORD, config.vocab_size, (1, PARSE_TOKENS))
    prompt = torch.full((1, 1), 1)

    def ours() -> object:
        return model.parse(ids, num_beams=BEAM)

    def theirs() -> object:
        return baseline.generate(
            prompt, num_beams=BEAM, max_new_tokens=PARSE_TOKENS, min_new_tokens=PARSE_TOKENS, do_sample=False
        )

    def check() -> None:
        output = ours()
        with torch.no_grad():  # the score of the found derivation, computed without search and caches
            rescored = model(ids, spans=[output.spans[0][0]]).joint_log_prob
        torch.testing.assert_close(output.log_probs[:, 0], rescored, rtol=1e-5, atol=1e-3)
        if theirs().shape[1] != PARSE_TOKENS + 1:
            raise AssertionError("the baseline did not generate as many tokens as the parser reads")

    return ours, theirs, check
