# SPDX-License-Identifier: Apache-2.0
"""Tokenizers for syntactic language models: train small tokenizers, and complete existing ones.

All functions return a fast tokenizer of transformers: a saved one loads anywhere with
`AutoTokenizer.from_pretrained(folder)`, without this library. Besides the usual tokens a syntactic language model needs
an id for REDUCE, whose embedding means "compose the top of the stack".
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GPT2Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_synlm.data.text import check_list

END_OF_TEXT_TOKEN = "<|endoftext|>"
REDUCE_TOKEN = "<|REDUCE|>"
GPST_PAD_TOKEN = "<|pad|>"
CLS_TOKEN = "<|CLS|>"
SEP_TOKEN = "<|SEP|>"

# What GPST's vocabulary has after GPT-2's 50,257 types, ids 50257 to 50263.
GPST_EXTRA_TOKENS = (REDUCE_TOKEN, GPST_PAD_TOKEN, CLS_TOKEN, "<CLSTGT1>", "<CLSTGT2>", "<CLSTGT3>", SEP_TOKEN)
MODEL_MAX_LENGTH = 1024  # tokens of an input; longer ones only make a tokenizer warn
_GPT2_VOCAB_SIZE = 50_257
_NUM_BYTES = 256
_FIRST_INNER = 0x100000  # first code point of the last plane, which is for private use


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> GPT2Tokenizer:
    """Train a byte-level BPE tokenizer in the style of GPT-2.

    Ids 0 to 4 are <|endoftext|> (bos and eos), <|REDUCE|>, <|pad|>, <|CLS|> and <|SEP|>; the 256 bytes and the merges
    follow. Encoding adds no special tokens and no leading space.

    Args:
        texts: the training text, e.g. one string per sentence.
        vocab_size: size of the vocabulary, special tokens included. Smaller if the text has too few pairs.
        min_frequency: a pair must occur this often to be merged.

    Returns:
        A GPT-2 tokenizer, padding on the left as generation wants it.

    Raises:
        ValueError: `vocab_size` is too small for the bytes and special tokens, or there is no text.
    """
    special = [END_OF_TEXT_TOKEN, REDUCE_TOKEN, GPST_PAD_TOKEN, CLS_TOKEN, SEP_TOKEN]
    smallest = _NUM_BYTES + len(special)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size is {vocab_size}: byte-level BPE needs at least {smallest} "
            f"({_NUM_BYTES} bytes and {len(special)} special tokens)"
        )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(_some_text(texts), trainer)
    model = json.loads(trained.to_str())["model"]
    return GPT2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=END_OF_TEXT_TOKEN,
        bos_token=END_OF_TEXT_TOKEN,
        eos_token=END_OF_TEXT_TOKEN,
        pad_token=GPST_PAD_TOKEN,
        cls_token=CLS_TOKEN,
        sep_token=SEP_TOKEN,
        extra_special_tokens=[REDUCE_TOKEN],
        model_max_length=MODEL_MAX_LENGTH,
        padding_side="left",
    )


def train_wordpiece_tokenizer(
    texts: Iterable[str], vocab_size: int, *, lowercase: bool = True, min_frequency: int = 2
) -> PreTrainedTokenizerFast:
    """Train a WordPiece tokenizer in the style of BERT: BERT's normalization and splitting, ## before inner pieces.

    Ids 0 to 4 are [PAD], [UNK], [CLS], [SEP] and [MASK] as in BERT, 5 and 6 <|endoftext|> (bos and eos) and <|REDUCE|>.
    Unlike BERT's own, it adds no [CLS] and [SEP], because a language model would have to predict them. It gives no
    token types.

    Args:
        texts: the training text, e.g. one string per sentence.
        vocab_size: size of the vocabulary, special tokens included. Smaller if the text has too few pieces.
        lowercase: lower-case the text and strip accents.
        min_frequency: a pair must occur this often to be merged.

    Returns:
        A fast tokenizer, padding on the left as generation wants it.

    Raises:
        ValueError: `vocab_size` is too small for the special tokens and a piece, or there is no text.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", END_OF_TEXT_TOKEN, REDUCE_TOKEN]
    if vocab_size <= len(special):
        raise ValueError(f"vocab_size is {vocab_size} and must exceed the {len(special)} special tokens")
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    pieces = _learn_pieces(_some_text(texts), vocab_size - len(special), min_frequency, normalizer)
    vocab = {token: index for index, token in enumerate([*special, *pieces])}
    trained = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained.decoder = wordpiece_decoder()
    return fast_tokenizer(
        trained,
        unk_token="[UNK]",
        bos_token=END_OF_TEXT_TOKEN,
        eos_token=END_OF_TEXT_TOKEN,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        extra_special_tokens=[REDUCE_TOKEN],
    )


def wordpiece_decoder() -> decoders.Decoder:
    """Make a decoder that writes a space before each word, also the first, as that of GPT-2 does.

    So `prompt + decode(continuation)` of a pipeline is the text; the decoder of BERT omits the first space, and leaves
    ## before a piece at the beginning. BERT's splitting forgets where a text has spaces. An apostrophe or a hyphen is
    taken as part of a word (can't, rock-climber; climbers' rope), a period or comma between digits of a number.

    Returns:
        The decoder.
    """
    # What comes later never takes away a space that a streamer has already written.
    inside = r"(?<=\w-|[^\Ws]['’]|\d[.,]) (?=\w)|(?<=\w['’]) (?=(?:[tsmd]|re|ve|ll)\b)"
    return decoders.Sequence(
        [
            decoders.Replace(Regex(r"\A(?!##|[.?!,'’-])"), " "),
            decoders.Replace(Regex(r"\A##"), ""),
            decoders.Fuse(),
            decoders.Replace(Regex(inside), ""),
        ]
    )


def _learn_pieces(
    texts: Iterable[str], num_pieces: int, min_frequency: int, normalizer: normalizers.Normalizer
) -> list[str]:
    """Learn the pieces of a WordPiece vocabulary by BPE, inner ones with ## before them.

    The WordPiece trainer of tokenizers numbers inner characters in the order of a hash table and breaks ties by that
    number, so its result differs from run to run. Here every inner character is replaced by a character of a private
    use plane; then plain BPE is deterministic.
    """
    inner_of: dict[str, str] = {}
    splitter = pre_tokenizers.BertPreTokenizer()

    def marked_words() -> Iterator[str]:
        for text in texts:
            for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)):
                inner = (inner_of.setdefault(char, chr(_FIRST_INNER + len(inner_of))) for char in word[1:])
                yield word[0] + "".join(inner)

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=num_pieces, min_frequency=min_frequency, show_progress=False)
    trained.train_from_iterator(marked_words(), trainer)
    char_of = {inner: char for char, inner in inner_of.items()}
    vocab = trained.get_vocab()
    return [
        ("##" if piece[0] in char_of else "") + "".join(char_of.get(char, char) for char in piece)
        for piece in sorted(vocab, key=vocab.__getitem__)
    ]


def _some_text(texts: Iterable[str]) -> Iterable[str]:
    """Pass texts on, and raise ValueError if all are blank."""
    check_list("texts", texts)
    is_empty = True
    for text in texts:
        is_empty = is_empty and not text.strip()
        yield text
    if is_empty:
        raise ValueError("there is no text to train a tokenizer on. Name other files")


def character_tokenizer(texts: Iterable[str], *, min_count: int = 1) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are single characters, the space among them.

    Ids 0 to 2 are `<|pad|>`, `<|unk|>` and `</s>`, which begins and ends a text; the characters follow, the most
    frequent first, ties by code point. The special token is not named `<unk>`, because the Penn Treebank of character
    models spells `<unk>` in five characters.

    Args:
        texts: the texts.
        min_count: characters that occur less often are unknown.

    Returns:
        A fast tokenizer, padding on the left as generation wants it.

    Raises:
        ValueError: no character is frequent enough.
    """
    check_list("texts", texts)
    counts = Counter(chain.from_iterable(texts))
    known = sorted((c for c, count in counts.items() if count >= min_count), key=lambda c: (-counts[c], c))
    if not known:
        raise ValueError(
            f"none of {len(counts)} characters occurs at least {min_count} times (min_count). Lower min_count"
        )
    pad_token, unknown_token, boundary = special = ("<|pad|>", "<|unk|>", "</s>")
    vocabulary = {token: index for index, token in enumerate([*special, *known])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown_token))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return fast_tokenizer(made, pad_token=pad_token, unk_token=unknown_token, bos_token=boundary, eos_token=boundary)


def fast_tokenizer(backend: Tokenizer, **settings: str | list[str] | int) -> PreTrainedTokenizerFast:
    """Wrap a trained tokenizer for a language model: padding on the left, no token types.

    Args:
        backend: the tokenizer.
        **settings: its special tokens by role, e.g. `pad_token="<pad>"`; `num_model_tokens`: number of ids of the
            model, if it refuses some of the tokenizer's.

    Returns:
        A fast tokenizer of transformers.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=MODEL_MAX_LENGTH,
        padding_side="left",
        **settings,
    )


def num_model_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of ids that a model needs for a tokenizer, without those that the model refuses."""
    needed = tokenizer.init_kwargs.get("num_model_tokens", len(tokenizer))
    return max(needed, *(index + 1 for index in tokenizer.get_added_vocab().values()), 0)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, remedy: str) -> None:
    """Raise ValueError with a remedy if a tokenizer has more tokens than a model."""
    if (count := num_model_tokens(tokenizer)) > vocab_size:
        raise ValueError(f"The tokenizer has {count} tokens and the model {vocab_size}. {remedy}")


def load_tokenizer(name_or_path: str | os.PathLike[str], **kwargs: object) -> PreTrainedTokenizerBase:
    """Load a tokenizer and add the special tokens that a syntactic language model needs.

    The GPT-2 tokenizer (50,257 types) gets GPST's vocabulary: <|REDUCE|> 50257, <|pad|> 50258, <|CLS|> 50259,
    <CLSTGT1> to <CLSTGT3> 50260 to 50262, <|SEP|> 50263, 50,264 types in all. Any other tokenizer gets <|REDUCE|> and
    those of <|pad|>, <|CLS|>, <|SEP|>, <|endoftext|> (bos and eos) whose role is free. A tokenizer that was
    completed and saved loads unchanged. Padding is on the left, as generation wants it.

    Args:
        name_or_path: a folder, or a name on the Hub.
        **kwargs: for `AutoTokenizer.from_pretrained`, e.g. `padding_side="right"`.

    Returns:
        The tokenizer; the model's `vocab_size` is its `len()`, its token ids those of
        `GPSTConfig.from_tokenizer`.

    Raises:
        ValueError: it is not a fast tokenizer, or its ids are not 0 to `len()` - 1, the rows of an embedding.
    """
    # As a name of this module, it would import torch.
    tokenizer = transformers.AutoTokenizer.from_pretrained(name_or_path, **{"padding_side": "left", **kwargs})
    if not tokenizer.is_fast:
        raise ValueError(
            f"{name_or_path} is a {type(tokenizer).__name__}, which has no word boundaries. Choose a fast tokenizer, "
            "with a tokenizer.json"
        )
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= len(tokenizer):
        raise ValueError(
            f"{name_or_path} has {len(tokenizer)} tokens, but its largest id is {largest}. Number its tokens from 0 to "
            f"{len(tokenizer) - 1} without gaps in its tokenizer.json, or choose another tokenizer"
        )
    if len(tokenizer) == _GPT2_VOCAB_SIZE and tokenizer.eos_token == END_OF_TEXT_TOKEN:
        added = list(GPST_EXTRA_TOKENS)
        roles = {"pad_token": GPST_PAD_TOKEN, "cls_token": CLS_TOKEN, "sep_token": SEP_TOKEN}
    else:
        defaults = {
            "pad_token": GPST_PAD_TOKEN,
            "cls_token": CLS_TOKEN,
            "sep_token": SEP_TOKEN,
            "bos_token": tokenizer.eos_token or END_OF_TEXT_TOKEN,
            "eos_token": tokenizer.bos_token or END_OF_TEXT_TOKEN,
        }
        roles = {role: token for role, token in defaults.items() if getattr(tokenizer, role) is None}
        vocabulary = tokenizer.get_vocab()
        added = [token for token in dict.fromkeys((REDUCE_TOKEN, *roles.values())) if token not in vocabulary]
    # Added first, so that the ids have this order and not that of the roles.
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added], special_tokens=True)
    others = [token for token in added if token not in roles.values()]
    tokenizer.add_special_tokens({**roles, "extra_special_tokens": others}, replace_extra_special_tokens=False)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike[str]) -> None:
    """Save a tokenizer without the record of where it was loaded from.

    Args:
        tokenizer: the tokenizer; it is changed.
        folder: where to write its files.
    """
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def add_classification_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a tokenizer encode a text as `a CLS` and a pair of texts as `a SEP b CLS`, the inputs of a classifier.

    The template is saved in tokenizer.json, so pipelines and Trainer give a model the inputs it was trained on. A
    tokenizer that marks both texts of a pair already (BERT, RoBERTa, a classifier's own) is left as it is.

    Args:
        tokenizer: a fast tokenizer with a CLS and a SEP token; it is changed.
    """
    if tokenizer.num_special_tokens_to_add(pair=True) > 1:
        return
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {cls}",
        pair=f"$A {sep} $B {cls}",
        special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
    )


def begin_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that begins the texts of a pretrained decoder: its begin token, unless that marks the turns of a chat.

    SmolLM2-Instruct, for example, calls <|im_start|> its begin token, but its texts begin with <|endoftext|>.
    """
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    chat = tokenizer.apply_chat_template(turns, tokenize=False) if tokenizer.chat_template else ""
    candidates = (tokenizer.bos_token, END_OF_TEXT_TOKEN, tokenizer.eos_token)
    known = [token for token in candidates if token in tokenizer.get_vocab()]
    plain = [token for token in known if chat.count(token) < 2]
    return tokenizer.convert_tokens_to_ids((plain or known)[0])
