"""Models from a config: FLA's own GLA, GatedDeltaNet and KDA classes and transformers' Llama.

The size says how large (hidden_size, layers, heads, …), the model says which architecture; `model_config` turns both
into the library's config. A trainer calls the decoder and the classifier apart, so the libraries' own losses are off:

    model = build_model(cfg.model, cfg.size, vocab_size=32768, max_seq_len=1024)
    hidden = final_hidden(model, input_ids)              # (B, T, D)
    loss = head(hidden, targets, *classifier(model))     # weight (V, D), bias or None
"""

import inspect
from collections.abc import Mapping
from importlib.util import find_spec

import fla.backends
import torch
import triton
from fla.models import (
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    GLAConfig,
    GLAForCausalLM,
    KDAConfig,
    KDAForCausalLM,
)
from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

from models.chunk_size import check_chunk_size, set_chunk_size
from models.initialization import built_with_late_fills

CLASSES = {
    "gla": (GLAConfig, GLAForCausalLM),
    "gated_deltanet": (GatedDeltaNetConfig, GatedDeltaNetForCausalLM),
    "kda": (KDAConfig, KDAForCausalLM),
    "transformer": (LlamaConfig, LlamaForCausalLM),
}
RECURRENT_UP_TO = 64  # T up to which FLA's GLA layer takes its recurrent kernel, in training too
MAX_KEY_DIM = 256  # of a head, in FLA's delta-rule kernels (chunk_gated_delta_rule_fwd_h, chunk_kda)
# Decided here or by `size`, so not an option of the model.
RESERVED = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "num_attention_heads", "num_key_value_heads",
    "head_dim", "expand_k", "expand_v", "intermediate_size", "max_position_embeddings", "tie_word_embeddings",
    "use_cache", "fuse_cross_entropy", "fuse_linear_cross_entropy", "attn", "kwargs", "self",
}  # fmt: skip


def check_model(model_cfg: Mapping, size_cfg: Mapping, *, device_type: str, seq_len: int) -> None:
    """Raise ValueError, in one line that names the value and the fix, if this model cannot be built or run.

    Args:
        model_cfg: name, num_heads, chunk_size, options, and for FLA's models expand_k and expand_v.
        size_cfg: hidden_size, num_layers, intermediate_size, num_heads, vocab_size, tie_embeddings.
        device_type: "cuda" or "cpu".
        seq_len: T of the training batches.
    """
    name = model_cfg["name"]
    if name not in CLASSES:
        raise ValueError(f"model={name} does not exist: take one of {', '.join(CLASSES)}")
    for key in ("hidden_size", "num_layers", "intermediate_size"):
        if not isinstance(size_cfg[key], int) or size_cfg[key] < 1:
            raise ValueError(f"size.{key} is {size_cfg[key]}: give a whole number, 1 or more")
    if not isinstance(model_cfg["num_heads"], int) or model_cfg["num_heads"] < 1:
        raise ValueError(f"model.num_heads is {model_cfg['num_heads']}: give a whole number, 1 or more")
    check_hopper(name, device_type)
    check_heads(name, model_cfg, size_cfg["hidden_size"])
    check_chunk_size(name, model_cfg["chunk_size"])
    if name == "gla" and model_cfg["chunk_size"] is not None and seq_len <= RECURRENT_UP_TO:
        raise ValueError(
            f"model.chunk_size is {model_cfg['chunk_size']}, but at train.seq_len={seq_len} FLA's GLA takes its "
            f"recurrent kernel: take model.chunk_size=null, or train.seq_len above {RECURRENT_UP_TO}"
        )
    known = set(inspect.signature(CLASSES[name][0].__init__).parameters) - RESERVED
    for key in model_cfg["options"]:
        if key not in known:
            raise ValueError(
                f"model.options.{key} is no option of model={name}: take one of {', '.join(sorted(known))}"
            )
    if name != "transformer" and device_type == "cpu" and fla.backends._DISPATCH_DISABLED:
        raise ValueError(
            f"model={name} runs on a CPU through FLA's backends, but FLA_DISABLE_BACKEND_DISPATCH=1 is set: unset it, "
            "or take model=transformer"
        )


def check_hopper(name: str, device_type: str) -> None:
    """Raise ValueError where FLA refuses a gated backward kernel that Triton miscompiles (FLA issue 640)."""
    miscompiled = IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1
    if name == "gated_deltanet" and device_type == "cuda" and miscompiled and find_spec("tilelang") is None:
        raise ValueError(
            f"model=gated_deltanet cannot train on a Hopper GPU with Triton {triton.__version__}, which miscompiles one of "
            "its kernels: install triton>=3.7.1 (requirements.lock has it), or take model=kda"
        )


def check_heads(name: str, model_cfg: Mapping, hidden_size: int) -> None:
    """Raise ValueError if the heads do not divide their width, or are too wide for FLA's kernels."""
    heads = model_cfg["num_heads"]
    if name == "transformer":
        if hidden_size % (2 * heads):
            raise ValueError(
                f"size.hidden_size = {hidden_size} is not a multiple of 2 · model.num_heads = {2 * heads} "
                "(rotary embeddings need heads of an even size): change size.num_heads or size.hidden_size"
            )
        return
    for key in ("expand_k", "expand_v"):
        width = hidden_size * model_cfg[key]
        if width <= 0 or width % heads:
            raise ValueError(
                f"size.hidden_size · model.{key} = {width:g} is not a multiple of model.num_heads = {heads}: "
                f"change size.num_heads, size.{key} or size.hidden_size"
            )
    key_dim, _ = head_dims(model_cfg, hidden_size)
    if name in ("gated_deltanet", "kda") and key_dim > MAX_KEY_DIM:
        raise ValueError(
            f"a head of model={name} has {key_dim} key dimensions, FLA's kernels take at most {MAX_KEY_DIM}: "
            "give more size.num_heads or a smaller size.expand_k"
        )


def head_dims(model_cfg: Mapping, hidden_size: int) -> tuple[int, int]:
    """Key and value dimension of a head of one of FLA's models."""
    heads = model_cfg["num_heads"]
    return round(hidden_size * model_cfg["expand_k"]) // heads, round(hidden_size * model_cfg["expand_v"]) // heads


def model_config(model_cfg: Mapping, size_cfg: Mapping, *, vocab_size: int, max_seq_len: int) -> PretrainedConfig:
    """The library's config: everything not named here is the library's default."""
    name, heads, hidden_size = model_cfg["name"], model_cfg["num_heads"], size_cfg["hidden_size"]
    shared = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=size_cfg["num_layers"],
        intermediate_size=size_cfg["intermediate_size"],
        max_position_embeddings=max_seq_len,
        tie_word_embeddings=size_cfg["tie_embeddings"],
        use_cache=False,
        # Token ids are the data's business; no row of the embedding is special.
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **model_cfg["options"],
    )
    if name == "transformer":
        return LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads, attn_implementation="sdpa", **shared)
    key_dim, value_dim = head_dims(model_cfg, hidden_size)
    if name == "gla":
        dims = dict(expand_k=model_cfg["expand_k"], expand_v=model_cfg["expand_v"])
    else:
        dims = dict(head_dim=key_dim, expand_v=value_dim / key_dim)
    if name != "kda":  # its config has no such field
        shared["fuse_linear_cross_entropy"] = False
    return CLASSES[name][0](num_heads=heads, fuse_cross_entropy=False, **dims, **shared)


def build_model(
    model_cfg: Mapping,
    size_cfg: Mapping,
    *,
    vocab_size: int,
    max_seq_len: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """A causal language model with random weights, for training.

    The weights follow from torch's CPU seed alone: they are drawn in float32 on the CPU, then moved. The decay
    parameters A_log and dt_bias of GatedDeltaNet and KDA stay float32 in any `dtype`, as FLA's layers make them.
    """
    config = model_config(model_cfg, size_cfg, vocab_size=vocab_size, max_seq_len=max_seq_len)
    model = built_with_late_fills(lambda: CLASSES[model_cfg["name"]][1](config))
    if model_cfg["chunk_size"] is not None:
        set_chunk_size(model, model_cfg["name"], model_cfg["chunk_size"])
    decays = {name: p.data for name, p in model.named_parameters() if name.endswith((".A_log", ".dt_bias"))}
    model.to(device=device, dtype=dtype)
    for name, values in decays.items():
        model.get_parameter(name).data = values.to(device)
    return model.train()


def final_hidden(model: nn.Module, input_ids: Tensor) -> Tensor:
    """input_ids (B, T) int64 → hidden states (B, T, D) after the final norm: what the classifier takes."""
    return model.model(input_ids=input_ids, use_cache=False).last_hidden_state


def classifier(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The classifier's weight (V, D) and bias (V) or None; with tied embeddings the weight is the embedding's."""
    return model.lm_head.weight, model.lm_head.bias
