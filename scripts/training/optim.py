"""AdamW with decoupled weight decay on matrices, and the learning rate: linear warm-up, then cosine to a floor."""

import math

import torch
from omegaconf import DictConfig
from torch import nn


def adamw(model: nn.Module, optim: DictConfig, device: torch.device) -> torch.optim.AdamW:
    """Weight decay on parameters of two and more dimensions; none on norms, biases and decay rates."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps, fused=device.type == "cuda")


def learning_rate(step: int, steps: int, optim: DictConfig) -> float:
    """Rate of the step-th of `steps` optimizer steps (1-based).

    Warm-up: lr · step / warmup over the first `warmup_fraction` of the steps; then
    lr · (floor + (1 − floor) · ½(1 + cos πx)) with x from 0 to 1 over the rest.
    """
    warmup = max(1, round(optim.warmup_fraction * steps))
    if step <= warmup:
        return optim.lr * step / warmup
    x = (step - warmup) / max(1, steps - warmup)
    return optim.lr * (optim.floor + (1 - optim.floor) * 0.5 * (1 + math.cos(math.pi * x)))
