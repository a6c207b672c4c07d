"""Floating-point operations of a training step per token, for model FLOPs utilization (MFU).

Counted are matrix products, 2 operations per multiply-add, full squares where a causal mask would allow half (as PaLM,
arXiv:2204.02311, appendix B, and torch.utils.flop_counter do); the backward pass is twice the forward. Not counted:
norms, gates, activations, short convolutions, the embedding's lookup, and anything computed again in the backward pass.

Forward, per token:

    linear layers         2 · (entries of their weights)
    classifier            2 · D · V, tied or not
    and per layer
    softmax attention     4 · T · H · K                                q kᵀ and its product with v
    GLA                   H · (4 K V + 2 C (K + V))                    state read and write; q kᵀ and A v in a chunk
    GatedDeltaNet, KDA    H · (6 K V + 2 C (2 K + V) + 2 C (K + V))    also W h, k kᵀ, and (I + L)⁻¹ times k and v

with H heads of K key and V value dimensions and C positions a chunk; finding (I + L)⁻¹, C² / 3 a token, is left out.
Sources of the chunked forms: GLA arXiv:2312.06635, section 4; delta rule arXiv:2406.06484, section 3.2, as used by
GatedDeltaNet (arXiv:2412.06464) and KDA (arXiv:2510.26692).
"""

from collections.abc import Mapping

import torch
from torch import nn

from models.build import CLASSES, head_dims, model_config

DEFAULT_CHUNK_SIZE = 64  # FLA's


def flops_per_token(model_cfg: Mapping, size_cfg: Mapping, vocab_size: int, seq_len: int) -> float:
    """Training FLOPs (forward and backward) of one token of a sequence of `seq_len`, the classifier included."""
    forward = 2 * linear_entries(model_cfg, size_cfg) + 2 * size_cfg["hidden_size"] * vocab_size
    forward += size_cfg["num_layers"] * mixer_flops(model_cfg, size_cfg["hidden_size"], seq_len)
    return 3.0 * forward


def linear_entries(model_cfg: Mapping, size_cfg: Mapping) -> int:
    """Entries of the weights of all linear layers but the classifier, from a model without storage."""
    config = model_config(model_cfg, size_cfg, vocab_size=1, max_seq_len=1)
    with torch.device("meta"):
        model = CLASSES[model_cfg["name"]][1](config)
    return sum(module.weight.numel() for module in model.model.modules() if isinstance(module, nn.Linear))


def mixer_flops(model_cfg: Mapping, hidden_size: int, seq_len: int) -> float:
    """Forward FLOPs of one layer's sequence mixing, per token, beyond its linear layers."""
    heads = model_cfg["num_heads"]
    if model_cfg["name"] == "transformer":
        return 4 * seq_len * hidden_size
    key, value = head_dims(model_cfg, hidden_size)
    chunk = min(model_cfg["chunk_size"] or DEFAULT_CHUNK_SIZE, seq_len)
    if model_cfg["name"] == "gla":
        return heads * (4 * key * value + 2 * chunk * (key + value))
    return heads * (6 * key * value + 2 * chunk * (2 * key + value) + 2 * chunk * (key + value))
