"""Small models of all recurrent architectures, for the tests of what they have in common."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import hf_synlm

PADDING, BOUNDARY, WORDS = 29, 0, range(1, 28)

_ON_LSTM = {"embedding_size": 8, "layer_size": 12, "num_layers": 3, "chunk_size": 2}
_PRPN = {"embedding_size": 6, "layer_size": 8, "num_slots": 4, "num_lookback": 2, "resolution": 0.2}
_SOFT = {"gate": "soft", "num_residual_blocks": 2, "tie_word_embeddings": False, "num_layers": 3}
_PALM = {"embedding_size": 10, "layer_size": 12, "num_spans": 4, "rrnn_size": 5, "attention_size": 7}
# Name -> prefix of the classes, fields of the configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "on_lstm": ("ONLSTM", _ON_LSTM),
    "on_lstm, split head": ("ONLSTM", {**_ON_LSTM, "supervised_layers": [2, 0]}),
    "on_lstm, shared": ("ONLSTM", {**_ON_LSTM, "supervised_layers": [1], "syntactic_distance_head": "shared"}),
    "on_lstm, hidden": ("ONLSTM", {**_ON_LSTM, "supervised_layers": [0, 1], "syntactic_distance_head": "hidden"}),
    "prpn": ("PRPN", _PRPN),
    "prpn, soft": ("PRPN", {**_PRPN, **_SOFT}),
    "prpn, no lookback": ("PRPN", {**_PRPN, "num_lookback": 0, "num_slots": 3, "num_layers": 1, "resolution": 1.0}),
    "prpn, syd": ("PRPN", {**_PRPN, "parsing_network": "recurrent", "num_residual_blocks": 1}),
    "prpn, syd, soft": ("PRPN", {**_PRPN, "parsing_network": "recurrent", "num_lookback": 0, "gate": "soft"}),
    "palm": ("PaLM", _PALM),
    "palm, one span": ("PaLM", {**_PALM, "num_layers": 2, "num_spans": 1}),
    "palm, long spans": ("PaLM", {**_PALM, "num_layers": 4, "num_spans": 20}),
    "palm, right branching": ("PaLM", {**_PALM, "span_scores": "right_branching"}),
    "palm, paper": ("PaLM", {**_PALM, "input_activation": "tanh", "output_gate": False}),
    "awd_lstm": ("PaLM", {**_PALM, "span_attention": False}),
    "awd_lstm, one layer": ("PaLM", {**_PALM, "span_attention": False, "num_layers": 1}),
    "ordered_memory": ("OrderedMemory", {"hidden_size": 8, "num_slots": 4}),
    "lstm": ("LSTM", {"embedding_size": 10, "hidden_size": 12}),
}
SENTENCES = ["the keys to the cabinet are on the table", "fruit flies like a banana", "flies like the table"]
# One of each architecture, where variants would add nothing.
ARCHITECTURES = ("on_lstm, split head", "prpn", "prpn, syd", "palm", "ordered_memory", "awd_lstm", "lstm")
WITH_TREES = tuple(name for name in MODELS if not name.startswith(("awd_lstm", "lstm")))


def model_class(name: str, kind: str = "ForCausalLM") -> Any:
    """Class of a model: "Model", "ForCausalLM" or "ForSequenceClassification"."""
    return getattr(hf_synlm, MODELS[name][0] + kind)


def dropouts(name: str) -> list[str]:
    """Fields of the configuration that are rates of dropout."""
    return [field for field in vars(model_class(name).config_class()) if field.endswith("dropout")]


def make_model(name: str, kind: str = "ForCausalLM", rates: float = 0.3, **overrides: Any) -> Any:
    """A model in evaluation mode whose states and scores differ from token to token.

    Args:
        name: key of `MODELS`.
        kind: of the class.
        rates: of all kinds of dropout.
        **overrides: other fields of the configuration.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    cls = model_class(name, kind)
    special = {"vocab_size": 30, "bos_token_id": BOUNDARY, "eos_token_id": BOUNDARY, "pad_token_id": PADDING}
    dropped = dict.fromkeys(dropouts(name), rates)
    model = cls(cls.config_class(**{**special, **dropped, **MODELS[name][1], **overrides}))
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.6)
            if tensor_name.endswith(("norm.weight", "running_var")):
                tensor.abs_().add_(0.3)
    return model.eval()


def without_penalties(name: str) -> dict[str, float]:
    """Overrides by which the loss is the cross entropy alone."""
    fields = vars(model_class(name).config_class())
    return {field: 0.0 for field in fields if field.endswith("activation_regularization")}


def ids_of(
    *lengths: int, width: int | None = None, left: bool = False, padding: int = PADDING, words: range = WORDS
) -> tuple[Tensor, Tensor]:
    """Token ids of random words, padded, and their mask."""
    torch.manual_seed(3)
    width = width or max(lengths)
    ids = torch.full((len(lengths), width), padding)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        where = slice(width - n, width) if left else slice(0, n)
        ids[row, where] = torch.randint(words.start, words.stop, (n,))
        mask[row, where] = 1
    return ids, mask


def words_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words of `SENTENCES`."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    vocabulary = {word: index for index, word in enumerate(["</s>", "<unk>", *words])} | {"<pad>": PADDING}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="</s>", eos_token="</s>", pad_token="<pad>"
    )


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor | None]:
    """Gradients of the parameters by name."""
    model.zero_grad()
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def structures(output: Any) -> dict[str, Tensor]:
    """What an output tells of trees, [B, T, *] each."""
    fields = {name: output.get(name) for name in ("distances", "syd_distances", "span_scores")}
    batch_first = {name: value for name, value in fields.items() if value is not None}
    for name in ("distances", "syd_distances"):
        if name in batch_first:
            batch_first[name] = batch_first[name].movedim(1, 2)
    return batch_first


def state_rows(cache: Any) -> list[Tensor]:
    """The state of a cache with the sentences first."""
    return [tensor.movedim(cache.batch_dim, 0) for tensor in cache.state]
