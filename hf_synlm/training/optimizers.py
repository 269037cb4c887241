"""AdamW with parameter groups, and its schedule."""

from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from hf_synlm.training.arguments import TrainingArguments


def parameter_groups(
    model: nn.Module, learning_rate: float, module_rates: dict[str, float], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups by learning rate and weight decay.

    Args:
        model: the model.
        learning_rate: of everything that `module_rates` does not name.
        module_rates: module name (a component of the parameter's name, such as "parser") -> its learning rate.
        weight_decay: of matrices; biases, norms and single vectors are never decayed.

    Returns:
        Groups for a torch optimizer.

    Raises:
        ValueError: when a named module has no parameters.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    unused = set(module_rates)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = next((module for module in module_rates if module in name.split(".")), None)
        unused.discard(owner)
        rate = learning_rate if owner is None else module_rates[owner]
        groups.setdefault((rate, weight_decay if parameter.dim() > 1 else 0.0), []).append(parameter)
    if unused:
        raise ValueError(f"No parameter of the model belongs to a module named {sorted(unused)[0]!r}.")
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def make_optimizer(
    model: nn.Module, arguments: TrainingArguments, module_rates: dict[str, float] | None = None
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with parameter groups, and its schedule: linear warm-up, then decay to 0 at `max_train_steps`."""
    groups = parameter_groups(model, arguments.learning_rate, module_rates or {}, arguments.weight_decay)
    optimizer = torch.optim.AdamW(
        groups, betas=(arguments.adam_beta1, arguments.adam_beta2), eps=arguments.adam_epsilon
    )
    name = "constant_with_warmup" if arguments.lr_scheduler_type == "constant" else arguments.lr_scheduler_type
    schedule = get_scheduler(name, optimizer, arguments.warmup_steps, arguments.max_train_steps)
    return optimizer, schedule
