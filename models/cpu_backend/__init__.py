"""FLA's operations on the CPU, in PyTorch, registered at FLA's own extension point.

FLA 0.6.0 has Triton kernels only; they need a GPU and do not run in Triton's interpreter. Its functions are dispatched,
though: `fla.backends.register` adds an implementation that is tried before the kernel if its verifier accepts the call.
Ours accepts a call whose tensors are all on the CPU, so tensors on a GPU take FLA's kernels as before. Importing this
package registers every function that GLA, GatedDeltaNet and KDA reach in training and evaluation.

Two functions on that path are not dispatched in FLA 0.6.0: the recurrent forms that GLA's layer takes up to T = 64 and
GatedDeltaNet's for evaluation up to T = 64. They get FLA's own `dispatch` here, in the modules that call them.

Packed sequences (`cu_seqlens`, or an attention mask with padding) are a GPU's: they end in NotImplementedError.
"""

import functools
import importlib
from collections.abc import Callable

import torch
from fla.backends import BaseBackend, dispatch, register
from fla.modules.activations import ops as fla_activations
from fla.modules.causal_conv1d import ops as fla_conv
from fla.modules.norm import fused_norm_gate, layernorm
from fla.ops.kda.chunk import chunk_kda as fla_chunk_kda
from fla.ops.utils import cumsum as fla_cumsum

from models.cpu_backend import activations, delta_rule, gla, norms, short_conv


class TorchCPU(BaseBackend):
    """A backend of FLA's dispatcher; the lowest number goes first."""

    backend_type = "torch_cpu"
    priority = -1


def on_cpu(*args, **kwargs) -> tuple[bool, str]:
    """FLA's verifier: does this backend take the call? Only if all its tensors are on the CPU."""
    devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)}
    return devices == {"cpu"}, "torch_cpu takes CPU tensors only"


def in_full_precision(function: Callable) -> Callable:
    """Run `function` outside autocast, which would round its products; refuse packed sequences."""

    @functools.wraps(function)
    def wrapped(*args, cu_seqlens=None, **kwargs):
        if cu_seqlens is not None:
            raise NotImplementedError(
                f"{function.__name__} got cu_seqlens: packed or padded sequences need a GPU; here, no attention mask"
            )
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return wrapped


def register_function(entry_point: Callable, implementation: Callable) -> None:
    register(entry_point, backend=TorchCPU, verifier=on_cpu)(implementation)


def register_operation(operation: str, *implementations: Callable) -> None:
    """FLA dispatches some functions by operation: one backend, whose methods have the functions' names."""
    methods = {f.__name__: staticmethod(in_full_precision(f)) for f in implementations}
    register(operation, backend=TorchCPU, verifier=on_cpu)(type("TorchCPU", (TorchCPU,), methods))


def dispatch_and_register(module: str, implementation: Callable) -> None:
    """Give a module's undispatched function FLA's dispatcher, then register its CPU form."""
    module, name = importlib.import_module(module), implementation.__name__
    setattr(module, name, dispatch(getattr(module, name)))
    register_function(getattr(module, name), in_full_precision(implementation))


for fla_module, implementations in {
    layernorm: (norms.layer_norm_fwd, norms.layer_norm_bwd),
    fused_norm_gate: (norms.layer_norm_gated_fwd, norms.layer_norm_gated_bwd),
    fla_activations: (
        activations.swish_fwd,
        activations.swish_bwd,
        activations.swiglu_fwd,
        activations.swiglu_fwdbwd,
    ),
    fla_conv: (short_conv.causal_conv1d_fwd, short_conv.causal_conv1d_bwd, short_conv.causal_conv1d_update),
    fla_cumsum: (gla.chunk_local_cumsum,),
}.items():
    for implementation in implementations:
        register_function(getattr(fla_module, implementation.__name__), in_full_precision(implementation))

# A linear layer: autocast is its business.
register_function(fla_activations.swiglu_linear, activations.swiglu_linear)
register_function(fla_chunk_kda, in_full_precision(delta_rule.chunk_kda))
register_operation("kda", delta_rule.fused_recurrent_kda_fwd)
register_operation("gated_delta_rule", delta_rule.chunk_gated_delta_rule)
register_operation("common", gla.chunk_fwd_h, gla.chunk_bwd_dh)
register_operation(
    "gla",
    gla.chunk_gla_fwd_intra_gk,
    gla.chunk_gla_fwd_o_gk,
    gla.chunk_gla_bwd_dA,
    gla.chunk_gla_bwd_dv,
    gla.chunk_gla_bwd_dqk_intra,
    gla.chunk_gla_bwd_dqkg,
)
dispatch_and_register("fla.ops.common.fused_recurrent", gla.fused_recurrent_fwd)
dispatch_and_register("fla.ops.common.fused_recurrent", gla.fused_recurrent_bwd)
dispatch_and_register("fla.ops.gated_delta_rule.fused_recurrent", delta_rule.fused_recurrent_gated_delta_rule_fwd)
