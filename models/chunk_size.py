"""chunk_size: how many positions FLA's chunked kernels work on at a time. A model option that FLA's layers do not have.

FLA 0.6.0's kernels take it (GatedDeltaNet and KDA as an argument, GLA in `chunk_gla_fwd` and `chunk_gla_bwd`), its
layers never pass it. So a layer of this model gets a copy of its own `forward` in which the name of the kernel stands
for the kernel with the chunk size; FLA's classes and modules, and other models, stay as they are. The output does not
depend on it.

GLA's layer takes its recurrent kernel up to T = 64, and all layers do for evaluation up to T = 64: no chunks there.
"""

import functools
import types
from collections.abc import Callable

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gla.chunk import chunk_gla_bwd, chunk_gla_fwd
from fla.ops.kda import chunk_kda
from fla.ops.utils.index import prepare_chunk_indices
from fla.utils import input_guard
from torch import Tensor, nn

# FLA checks the first two. For GLA, kernels of 256 positions did not compile within two minutes on an H200.
ALLOWED = {"gated_deltanet": (16, 32, 64), "kda": (32, 64), "gla": (16, 32, 64, 128)}


def check_chunk_size(name: str, chunk_size: int | None) -> None:
    """Raise ValueError if the model `name` cannot run with this chunk size; None (FLA's default) always runs."""
    if chunk_size is None:
        return
    if name not in ALLOWED:
        raise ValueError(
            f"model.chunk_size is {chunk_size}, but model={name} has no chunks: take model.chunk_size=null"
        )
    if chunk_size not in ALLOWED[name]:
        allowed = ", ".join(map(str, ALLOWED[name]))
        raise ValueError(
            f"model.chunk_size is {chunk_size}: model={name} takes one of {allowed}, or null for FLA's default"
        )


def set_chunk_size(model: nn.Module, name: str, chunk_size: int) -> None:
    """Let every layer of `model`, one of FLA's causal language models, run its kernel with `chunk_size`."""
    check_chunk_size(name, chunk_size)
    kernel_name, kernel = KERNELS[name]
    for block in model.model.layers:
        block.attn.forward = with_global(
            block.attn.forward, kernel_name, functools.partial(kernel, chunk_size=chunk_size)
        )


def with_global(method: types.MethodType, name: str, value: Callable) -> types.MethodType:
    """A copy of a bound method that sees `value` under the module-level name `name`."""
    function = method.__func__
    if name not in function.__code__.co_names:
        raise RuntimeError(
            f"{function.__qualname__} does not call {name}: chunk_size needs flash-linear-attention 0.6.0"
        )
    scope = {**function.__globals__, name: value}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(functools.update_wrapper(copy, function), method.__self__)


class ChunkGLA(torch.autograd.Function):
    """FLA's ChunkGLAFunction with the chunk size as an argument (there it is min(64, …))."""

    @staticmethod
    @input_guard
    def forward(ctx, q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens, chunk_size):
        indices = None if cu_seqlens is None else prepare_chunk_indices(cu_seqlens, chunk_size)
        ctx.options = dict(scale=scale, state_v_first=state_v_first, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
        g_cumsum, A, _, final_state, o = chunk_gla_fwd(
            q, k, v, g, None, initial_state=initial_state, output_final_state=output_final_state,
            chunk_indices=indices, **ctx.options,
        )  # fmt: skip
        # The running sum is float32: kept if the decays are, too; beside half-precision decays it is done again.
        kept = (None, g_cumsum) if g.dtype == torch.float32 else (g, None)
        ctx.save_for_backward(q, k, v, *kept, initial_state, A, indices)
        return o, final_state

    @staticmethod
    @input_guard
    def backward(ctx, do, dht):
        q, k, v, g, g_cumsum, initial_state, A, indices = ctx.saved_tensors
        dq, dk, dv, dg, dh0 = chunk_gla_bwd(
            q, k, v, g, g_cumsum, initial_state=initial_state, h=None, A=A, do=do, dht=dht,
            chunk_indices=indices, **ctx.options,
        )  # fmt: skip
        return dq.to(q), dk.to(k), dv.to(v), dg, None, dh0, None, None, None, None


@torch.compiler.disable
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """FLA's `chunk_gla` with a chunk size: q, k, g (B, T, H, K), v (B, T, H, V) → o (B, T, H, V), final state."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return ChunkGLA.apply(q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens, chunk_size)


KERNELS = {
    "gla": ("chunk_gla", chunk_gla),
    "gated_deltanet": ("chunk_gated_delta_rule", chunk_gated_delta_rule),
    "kda": ("chunk_kda", chunk_kda),
}
