"""Vocabularies of characters, for language models that read and write letters."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "</s>")


def character_tokenizer(
    texts: Iterable[str], *, min_count: int = 1, model_max_length: int = 1024
) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are single characters, the space among them.

    Ids 0 to 2 are `<|pad|>`, `<|unk|>` and `</s>`, which begins and ends a text; the characters follow, the most
    frequent first, equally frequent ones by code point. The names of the special tokens leave a text that spells
    `<unk>` in five characters, as the Penn Treebank of character models does, as it is.

    Args:
        texts: the texts.
        min_count: characters that occur less often are unknown.
        model_max_length: longest input in tokens that users are not warned about.

    Returns:
        A fast tokenizer, padding on the left as generation wants it.

    Raises:
        ValueError: there are no characters, or none is frequent enough.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    known = sorted((c for c, count in counts.items() if count >= min_count), key=lambda c: (-counts[c], c))
    if not known:
        raise ValueError(f"no character is left of {len(counts)} with min_count {min_count}: check the files")
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *known])}
    pad_token, unknown_token, boundary = SPECIAL_TOKENS
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown_token))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=pad_token,
        unk_token=unknown_token,
        bos_token=boundary,
        eos_token=boundary,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=model_max_length,
        padding_side="left",
    )
