"""ON-LSTM and PRPN against LSTMs, PaLM against AWD-LSTM."""

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.sides import Sides, check_gradients, place, training_step, without_dropout
from torch import Tensor, nn
from torch.nn import functional as F

from hf_synlm import ONLSTMConfig, ONLSTMForCausalLM, PaLMConfig, PaLMForCausalLM, PRPNConfig, PRPNForCausalLM

STEPWISE_TOKENS = 5  # that the check reads one by one, in two rows


class LSTMs(nn.Module):
    """Embedding, one `nn.LSTM` per layer, and the embedding again as output layer: all from PyTorch.

    Args:
        vocab_size: number of token ids.
        embedding_size: width of the embedding; a last layer of another width is projected to it.
        layer_sizes: widths of the layers.
    """

    def __init__(self, vocab_size: int, embedding_size: int, layer_sizes: list[int]) -> None:
        super().__init__()
        sizes = [embedding_size, *layer_sizes]
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.layers = nn.ModuleList(nn.LSTM(*pair, batch_first=True) for pair in zip(sizes, sizes[1:], strict=False))
        self.projection = nn.Linear(sizes[-1], embedding_size) if sizes[-1] != embedding_size else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        """Mean cross entropy of the next tokens."""
        hidden = self.embedding(ids[:, :-1])
        for layer in self.layers:
            hidden, _ = layer(hidden)
        logits = F.linear(self.projection(hidden), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _preset(config_class: Any, preset: str, dropout: bool) -> Any:
    """Configuration of a preset, with or without its dropout."""
    return config_class.from_preset(preset, **({} if dropout else without_dropout(config_class, preset)))


def _text(rows: int, columns: int, vocab_size: int) -> Tensor:
    """Random token ids."""
    return place(torch.randint(vocab_size, (rows, columns), generator=torch.Generator().manual_seed(1)))


def _compare(model: Any, ids: Tensor, baseline: nn.Module, baseline_loss: Callable[[], Tensor]) -> Sides:
    """Training step of a model on a segment against that of a baseline, and the check of the model."""
    model, baseline = place(model), place(baseline)
    ours = training_step(model.train(), lambda: model(ids, labels=ids).loss)

    def check() -> None:
        head, cache, logits = ids[:2, :STEPWISE_TOKENS], None, []
        model.eval()
        with torch.no_grad():
            together = model(head).logits
            for column in head.split(1, 1):
                output = model(column, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits.append(output.logits)
            scored = model(head, labels=head).joint_log_prob
        torch.testing.assert_close(torch.cat(logits, 1), together, rtol=1e-4, atol=1e-4)
        expected = together[:, :-1].gather(2, head[:, 1:, None]).sum((1, 2))
        torch.testing.assert_close(scored, expected, rtol=1e-4, atol=1e-4)
        model.train()
        ours()
        check_gradients(model)

    return Sides(ours, training_step(baseline, baseline_loss), check, model)


def on_lstm_train(dropout: bool) -> Sides:
    """ON-LSTM of the Penn Treebank's size on 20 rows of 70 tokens against LSTMs of the same sizes.

    Args:
        dropout: with the dropout of the preset; the baseline has none.

    Returns:
        Both sides.
    """
    torch.manual_seed(0)
    config = _preset(ONLSTMConfig, "on-lstm-ptb", dropout)
    ids = _text(20, 70, config.vocab_size)
    baseline = LSTMs(config.vocab_size, config.embedding_size, config.layer_sizes)
    return _compare(ONLSTMForCausalLM(config), ids, baseline, lambda: baseline(ids))


def prpn_train(dropout: bool) -> Sides:
    """PRPN of the Penn Treebank's size on 64 rows of 35 tokens against LSTMs as wide and deep as its reading network.

    Args:
        dropout: with the dropout of the preset; the baseline has none.

    Returns:
        Both sides.
    """
    torch.manual_seed(0)
    config = _preset(PRPNConfig, "prpn-ptb-word", dropout)
    ids = _text(64, 35, config.vocab_size)
    baseline = LSTMs(config.vocab_size, config.embedding_size, [config.layer_size] * config.num_layers)
    return _compare(PRPNForCausalLM(config), ids, baseline, lambda: baseline(ids))


def palm_train() -> Sides:
    """PaLM of the Penn Treebank's size on 20 rows of 70 tokens against the same without span attention (AWD-LSTM).

    Returns:
        Both sides, with the dropout of the preset.
    """
    torch.manual_seed(0)
    config = PaLMConfig.from_preset("palm-ptb")
    ids = _text(20, 70, config.vocab_size)
    baseline = PaLMForCausalLM(PaLMConfig.from_preset("palm-ptb", span_attention=False)).train()
    return _compare(PaLMForCausalLM(config), ids, baseline, lambda: baseline(ids, labels=ids).loss)
