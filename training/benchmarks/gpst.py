"""GPST against GPT-2 of transformers."""

from typing import Any

import torch
from benchmarks.sides import Sides, check_gradients, place, training_step, without_dropout
from transformers import GPT2Config, GPT2LMHeadModel

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.core.outputs import ParseOutput

SENTENCE_LENGTHS = (8, 45)  # tokens per sentence of the training contexts, half-open
BEAM, PARSE_TOKENS = 20, 30
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
NO_DROPOUT = without_dropout(GPSTConfig, "gpst-small")
FIRST_WORD = 10  # smaller ids may be special tokens


def gpt2(config: Any) -> GPT2LMHeadModel:
    """GPT-2 of transformers with the width, heads, layers, positions and tokens of a configuration."""
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
            pad_token_id=config.pad_token_id,
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


def gpst_train(overrides: dict, num_contexts: int, num_tokens: int) -> Sides:
    """Forward and backward of the whole objective against GPT-2's language-modeling loss on the same tokens.

    Args:
        overrides: fields of the configuration that differ from the small preset.
        num_contexts: contexts per step.
        num_tokens: tokens per context.

    Returns:
        Both sides.
    """
    torch.manual_seed(0)
    config = GPSTConfig(**overrides, **NO_DROPOUT, merge_noise=0.0)
    model, baseline = place(GPSTForCausalLM(config).train()), place(gpt2(config).train())
    ids, sentence_ids = (place(x) for x in packed_contexts(num_contexts, num_tokens, config.vocab_size))

    ours = training_step(model, lambda: model(ids, sentence_ids=sentence_ids, labels=ids).loss)
    theirs = training_step(baseline, lambda: baseline(ids, labels=ids).loss)

    def check() -> None:
        # Compute the token loss again from full logits, and the tree of the first sentence in a context without others.
        model.eval()
        output = model(ids, sentence_ids=sentence_ids, labels=ids)
        with torch.no_grad():
            given = model(ids, sentence_ids=sentence_ids, output_chart=True, output_spans=True)
            log_prob = given.token_logits_given_tree.log_softmax(-1).gather(-1, ids[..., None])
        torch.testing.assert_close(output.losses["token"], -log_prob.mean(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.joint_log_prob, given.joint_log_prob, rtol=1e-4, atol=1e-2)
        first = ids[:1, : int((sentence_ids[0] == 1).sum())]
        alone = [span for span in given.spans[0] if span[1] <= first.shape[1]]
        with torch.no_grad():
            single = model(first, output_chart=True, output_spans=True)
        if single.spans[0] != alone:
            raise AssertionError("a sentence has another tree alone than in its context")
        model.train()
        ours()
        check_gradients(model)

    return Sides(ours, theirs, check, model)


def gpst_parse(overrides: dict, num_rows: int = 1) -> Sides:
    """Word-synchronous parsing of sentences against GPT-2's beam search for equally many tokens.

    Args:
        overrides: fields of the configuration that differ from the small preset.
        num_rows: sentences.

    Returns:
        Both sides.
    """
    torch.manual_seed(0)
    config = GPSTConfig(**overrides)
    model, baseline = place(GPSTForCausalLM(config).eval()), place(gpt2(config).eval())
    ids = place(torch.randint(FIRST_WORD, config.vocab_size, (num_rows, PARSE_TOKENS)))
    prompt = torch.ones_like(ids[:, :1])

    def ours() -> ParseOutput:
        return model.parse(ids, num_beams=BEAM)

    def theirs() -> torch.Tensor:
        return baseline.generate(
            prompt, num_beams=BEAM, max_new_tokens=PARSE_TOKENS, min_new_tokens=PARSE_TOKENS, do_sample=False
        )

    def check() -> None:
        output = ours()
        with torch.no_grad():  # the score of the found derivation, computed without search and caches
            rescored = model(ids, spans=[beams[0] for beams in output.spans]).joint_log_prob
        torch.testing.assert_close(output.log_probs[:, 0], rescored, rtol=1e-5, atol=1e-3)
        if theirs().shape[1] != PARSE_TOKENS + 1:
            raise AssertionError("the baseline did not generate as many tokens as the parser reads")

    return Sides(ours, theirs, check)
