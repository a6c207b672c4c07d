"""The loss heads: one contract over standard, compiled, chunked, Liger's, FLA's and our cut cross-entropy.

A head takes final hidden states, targets and the classifier weight and returns one scalar:

    head = loss_head("cce")
    loss = head(hidden, targets, weight)            # hidden (..., T, D), targets (..., T), weight (V, D)

- loss = mean over the targets that are not `ignore_index` of  lse(z_n) − z_n[target],  z_n = hidden_n · weightᵀ (+ bias);
  float32, differentiable once in hidden, weight and bias. With no target left it is NaN, as F.cross_entropy has it.
- `shift=1` predicts the next token: hidden at t is scored against the target at t+1 (0: targets are already shifted).
- Under autocast the product runs in the autocast dtype; gradients come back in the dtypes of the inputs.
- Tied embeddings need nothing: the weight is an argument.

The argument order is that of the `criterion` of FLA's models, so a head can be assigned there:
`model = GLAForCausalLM(GLAConfig(fuse_cross_entropy=False, fuse_linear_cross_entropy=True)); model.criterion = loss_head("cce")`.
In evaluation FLA hands over logits instead, criterion(logits, targets): a head without a weight takes its input as logits.
KDA's config has only `fuse_cross_entropy`, which must be True for it.

Shape suffixes: N tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cce
from cce.presets import impl_name

IGNORE_INDEX = -100


class LossHead(nn.Module):
    """What all heads share: checks, shift, flattening and autocast. A head implements `mean_loss` on flat tensors.

    Args:
        ignore_index: a target of this value does not count.
        shift: targets are taken `shift` positions later than the hidden states along T.
    """

    reduction = "mean"  # FLA's models look here, and set "sum" where transformers' Trainer gives num_items_in_batch

    def __init__(self, *, ignore_index: int = IGNORE_INDEX, shift: int = 0):
        super().__init__()
        self.ignore_index = ignore_index
        self.shift = shift

    def forward(
        self, hidden: Tensor, targets: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """hidden (..., T, D), targets (..., T) int64, weight (V, D), bias (V) or None → scalar float32 loss.

        With weight None `hidden` are logits (..., T, V).

        Raises:
            ValueError: shapes that do not fit each other.
        """
        if hidden.shape[:-1] != targets.shape:
            wanted = tuple(hidden.shape[:-1])
            raise ValueError(
                f"hidden {tuple(hidden.shape)} needs targets of shape {wanted}, got {tuple(targets.shape)}"
            )
        if weight is not None and hidden.shape[-1] != weight.shape[-1]:
            raise ValueError(
                f"hidden has D = {hidden.shape[-1]}, the classifier weight {tuple(weight.shape)}: D must agree"
            )
        if self.shift:
            hidden, targets = hidden[..., : -self.shift, :], targets[..., self.shift :]
        hidden_ND, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        loss = (
            self.of_logits(hidden_ND, targets_N)
            if weight is None
            else self.of_hidden(hidden_ND, targets_N, weight, bias)
        )
        if self.reduction == "sum":
            count = (targets_N != self.ignore_index).sum()
            return torch.where(count > 0, loss * count, 0.0)
        return loss

    def of_logits(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=self.ignore_index)

    def of_hidden(self, hidden_ND: Tensor, targets_N: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        device = hidden_ND.device.type
        # Under autocast its dtype; otherwise the weight's (a final norm may return float32 beside bf16 weights).
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return self.mean_loss(hidden_ND.to(dtype), targets_N, weight.to(dtype), bias)

    def mean_loss(self, hidden_ND: Tensor, targets_N: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        raise NotImplementedError


class StandardHead(LossHead):
    """`F.linear` and `F.cross_entropy` on float32 logits: N×V logits are in memory, in several copies."""

    def mean_loss(self, hidden_ND, targets_N, weight_VD, bias_V):
        return materialized(hidden_ND, targets_N, weight_VD, bias_V, self.ignore_index)


def materialized(hidden_ND, targets_N, weight_VD, bias_V, ignore_index):
    return F.cross_entropy(F.linear(hidden_ND, weight_VD, bias_V).float(), targets_N, ignore_index=ignore_index)


class CompiledHead(LossHead):
    """The standard head under `torch.compile`: the float32 copies disappear, the N×V logits stay (proposal, baseline 1)."""

    def __init__(self, **options):
        super().__init__(**options)
        # A program for each shape, and as many as a sweep has; past its limit torch would go on in eager mode, silently.
        torch._dynamo.config.recompile_limit = 128
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        self.compiled = torch.compile(materialized, dynamic=False)

    def mean_loss(self, hidden_ND, targets_N, weight_VD, bias_V):
        return self.compiled(hidden_ND, targets_N, weight_VD, bias_V, self.ignore_index)


class ChunkedHead(LossHead):
    """PyTorch alone: the standard head over chunks of tokens, logits computed again in the backward pass.

    Args:
        tokens_per_chunk: the logits of so many tokens are in memory at a time.
    """

    def __init__(self, *, tokens_per_chunk: int = 1024, **options):
        super().__init__(**options)
        if tokens_per_chunk < 1:
            raise ValueError(f"loss.tokens_per_chunk is {tokens_per_chunk}: give 1 or more")
        self.tokens_per_chunk = tokens_per_chunk

    def mean_loss(self, hidden_ND, targets_N, weight_VD, bias_V):
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for hidden_CD, targets_C in zip(hidden_ND.split(self.tokens_per_chunk), targets_N.split(self.tokens_per_chunk)):
            total = total + checkpoint(self.sum_loss, hidden_CD, targets_C, weight_VD, bias_V, use_reentrant=False)
        return total / (targets_N != self.ignore_index).sum()

    def sum_loss(self, hidden_CD, targets_C, weight_VD, bias_V):
        logits_CV = F.linear(hidden_CD, weight_VD, bias_V).float()
        return F.cross_entropy(logits_CV, targets_C, ignore_index=self.ignore_index, reduction="sum")


def nan_if_none(loss: Tensor, targets_N: Tensor, ignore_index: int) -> Tensor:
    """The loss, or NaN where no target counts: Liger and FLA return 0 there. Without a host synchronization."""
    return torch.where((targets_N != ignore_index).any(), loss, torch.nan)


class LigerHead(LossHead):
    """Liger's fused linear cross-entropy: chunks of tokens, gradients made in the forward pass.

    Args:
        accum_dtype: dtype in which the weight gradient adds up: "float32", or None for the weight's own (Liger's default;
            in bf16 it costs precision in dC).
    """

    def __init__(self, *, accum_dtype: str | None = None, **options):
        super().__init__(**options)
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        if accum_dtype not in (None, "float32"):
            raise ValueError(f"loss.accum_dtype is {accum_dtype}: take float32, or null for the weight's dtype")
        dtype = None if accum_dtype is None else torch.float32
        self.liger = LigerFusedLinearCrossEntropyLoss(ignore_index=self.ignore_index, accum_dtype=dtype)

    def mean_loss(self, hidden_ND, targets_N, weight_VD, bias_V):
        return nan_if_none(self.liger(weight_VD, hidden_ND, targets_N, bias_V), targets_N, self.ignore_index)


class FLAHead(LossHead):
    """FLA's own `FusedLinearCrossEntropyLoss`."""

    def __init__(self, **options):
        super().__init__(**options)
        from fla.modules import FusedLinearCrossEntropyLoss

        self.fla = FusedLinearCrossEntropyLoss(ignore_index=self.ignore_index)

    def mean_loss(self, hidden_ND, targets_N, weight_VD, bias_V):
        return nan_if_none(self.fla(hidden_ND, targets_N, weight_VD, bias_V), targets_N, self.ignore_index)


class CCEHead(LossHead):
    """Our cut cross-entropy (`cce/`): no N×V logits in either pass.

    Args:
        impl: a preset of `cce.linear_cross_entropy`: "cce_kahan_full_c" for pretraining, "cce" (drops small gradients)
            for fine-tuning.
        workspace_mib: bound of its memory beyond inputs and gradients in MiB; None takes the default of `cce`.
    """

    def __init__(self, *, impl: str = "cce_kahan_full_c", workspace_mib: int | None = None, **options):
        super().__init__(**options)
        self.impl = impl_name(impl)  # raises for one that does not exist, before anything is built
        self.workspace_mib = workspace_mib

    def mean_loss(self, hidden_ND, targets_N, weight_VD, bias_V):
        return cce.linear_cross_entropy(
            hidden_ND,
            weight_VD,
            targets_N,
            bias_V,
            ignore_index=self.ignore_index,
            impl=self.impl,
            workspace_mib=self.workspace_mib,
        )


HEADS: dict[str, Callable[..., LossHead]] = {
    "standard": StandardHead,
    "compile": CompiledHead,
    "chunked": ChunkedHead,
    "liger": LigerHead,
    "fla": FLAHead,
    "cce": CCEHead,
    "cce_filter": CCEHead,
}


def check_loss_head(name: str, device_type: str) -> None:
    """Raise ValueError, in one line, if this head does not exist or cannot run on this kind of device."""
    if name not in HEADS:
        raise ValueError(f"loss={name} does not exist: take one of {', '.join(HEADS)}")
    if name in ("liger", "fla") and device_type != "cuda":
        raise ValueError(
            f"loss={name} needs a CUDA GPU (its Triton kernels do not run on a CPU): take loss=cce or loss=chunked"
        )
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    if (
        name == "compile"
        and device_type == "cpu"
        and not (headers and any(map(shutil.which, ("g++", "clang++", "c++"))))
    ):
        raise ValueError(
            "loss=compile needs a C++ compiler and Python.h on the CPU: install g++ and python3-dev, or take loss=standard"
        )


def loss_head(name: str, **options) -> LossHead:
    """Build a head by its name in HEADS, with the options of its class."""
    if name not in HEADS:
        raise ValueError(f"loss={name} does not exist: take one of {', '.join(HEADS)}")
    if name == "cce_filter":
        options = {"impl": "cce", **options}
    return HEADS[name](**options)
