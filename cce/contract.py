"""The public function and module."""

import torch
from torch import nn

from cce import function, operators, standard
from cce.presets import LinearCrossEntropyImpl, gradient_mode, impl_name
from cce.targets import IGNORED, shift_targets
from cce.validation import check_options, check_tensors, compute_dtype
from cce.vocab_parallel import VocabParallelOptions

IGNORE_INDEX = -100
DEFAULT_IMPL = "cce_kahan_full_c"


def linear_cross_entropy(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str | LinearCrossEntropyImpl = DEFAULT_IMPL,
    vocab_parallel_options: VocabParallelOptions | None = None,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    workspace_mib: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of the logits e @ c.T + bias, computed tile by tile so that they never exist as a whole.

    loss = F.cross_entropy(softcap * tanh((e @ c.T + bias).float() / softcap), targets), after Wijmans et al., "Cut Your
    Losses in Large-Vocabulary Language Models" (ICLR 2025), section 4: indexed dot product (4.1), fused linear
    log-sum-exp (4.2), backward from recomputed logits (4.3).

    Args:
        e: hidden states (..., D), bf16, fp16, fp32 or fp64. Any strides.
        c: classifier (V, D), e's dtype (any float dtype under autocast; the gradients have the inputs' dtypes).
        targets: class indices (...), integers in [0, V) or ignore_index. One outside raises ValueError for CPU tensors;
            on a GPU, where looking would stall the stream, that token's loss and all gradients it touches are NaN.
        bias: (V,) or None. Added before the softcap.
        ignore_index: targets of this value count neither in the loss nor in the mean; their loss and lse are 0.
        softcap: cap > 0 of the logits, or None.
        reduction: "mean" over the tokens that are not ignored (NaN with zero gradients if there is none, as in
            F.cross_entropy), "sum", or "none", which returns one loss per target.
        shift: e[..., t, :] predicts targets[..., t + shift]; True is 1. With "none" the result has T - shift losses.
        return_lse: return (loss, lse) with lse of the targets' shape (T - shift); differentiable.
        filter_eps, filter_e_grad, filter_c_grad: impl="cce" only. Tiles of 128 tokens x 128 classes in which every
            |p - onehot| is below filter_eps are left out of dE and dC. "auto" is finfo(dtype).eps / 32 (2^-12 for
            bf16); None filters nothing.
        accum_e_fp32: impl="cce" only. dE adds up over slices of the vocabulary in fp32 instead of in its own dtype.
        accum_c_fp32: accepted for compatibility; dC comes from one product, or adds up in fp32 or with compensation.
        impl: a preset, see cce/presets.py. The default, cce_kahan_full_c, filters nothing. apple/ml-cross-entropy's
            default is `cce`, which filters both gradients, and its cce_kahan_full_c filters dE: neither is exact, and
            neither is what a pretraining run should take (see cce/README.md).
        vocab_parallel_options: this rank's shard of the vocabulary; c and bias hold its rows.
        z_loss: adds z_loss * lse^2 to each token's loss.
        label_smoothing: as in F.cross_entropy: the target distribution is (1 - x) onehot + x / V. Not with
            vocab_parallel_options.
        workspace_mib: MiB that the kernels may take beyond inputs and gradients; cce/plans.py: what they do with it. The least
            possible is taken where that is more (a sum of dE and 128 classes x N tokens), and by default about that and 64 MiB.
            For a mean or sum of bf16 losses gradients are made in the forward pass: given enough, with 3 products instead of 4;
            for D <= 256 on Hopper with 4, and next to no workspace. The torch_compile preset and CPU tensors do not read it.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (...) for reduction="none"; with return_lse also the lse.
        Differentiable once; differentiating the gradients raises RuntimeError.

    Raises:
        ValueError, TypeError: before any work, naming the argument, its value and what would be right.
    """
    shift = int(shift)
    check_tensors(e, c, targets, bias)
    check_options(
        e, c, targets, ignore_index=ignore_index, softcap=softcap, reduction=reduction, shift=shift, impl=impl,
        filter_eps=filter_eps, vocab_parallel_options=vocab_parallel_options, z_loss=z_loss,
        label_smoothing=label_smoothing, workspace_mib=workspace_mib,
    )  # fmt: skip
    impl = impl_name(impl)
    targets = targets.to(torch.int64)  # a narrow type cannot be compared with V or ignore_index
    shard = vocab_parallel_options
    start, stop = (0, c.shape[0]) if shard is None else (shard.start, shard.stop)
    shifted = shift_targets(targets, shift, ignore_index)
    codes_N = operators.called(operators.encode, operators.encode_op)(
        shifted, ignore_index, start, stop, shard is not None
    )
    e_ND = e.reshape(-1, e.shape[-1])
    with_lse = return_lse or z_loss > 0

    lse_N = None
    if impl == "torch_compile":
        loss_N, lse_N = standard.token_losses(e_ND, c, bias, codes_N, softcap, label_smoothing, with_lse, shard)
    else:
        dtype = compute_dtype(e)
        mode = gradient_mode(impl, dtype, filter_eps, accum_e_fp32, filter_e_grad, filter_c_grad)
        options = (mode.filter_eps, mode.filter_e, mode.filter_c, mode.accumulation)
        # Gradients can be made in the forward pass where the one thing missing then, the upstream gradient, is a factor.
        one_number = reduction != "none" and not return_lse and label_smoothing == 0 and shard is None
        chunk = function.chunk_of_tokens(e_ND, c, bias, dtype, mode, workspace_mib) if one_number else None
        if chunk is not None:
            weight = torch.ones((), dtype=torch.float32, device=e.device)
            if reduction == "mean":
                weight = weight / (codes_N != IGNORED).sum()
            return function.SummedLoss.apply(
                e_ND, c, bias, codes_N, weight, dtype, softcap, float(z_loss), options, workspace_mib, chunk
            )
        loss_N = function.TokenLosses.apply(
            e_ND, c, bias, codes_N, dtype, softcap, float(label_smoothing), with_lse,
            options, workspace_mib, shard,
        )  # fmt: skip
        if with_lse:
            loss_N, lse_N = loss_N

    if z_loss > 0:
        loss_N = loss_N + z_loss * lse_N.square()
    length = targets.shape[-1] - shift
    if reduction == "mean":
        loss = loss_N.sum() / (codes_N != IGNORED).sum()
    elif reduction == "sum":
        loss = loss_N.sum()
    else:
        loss = loss_N.view(targets.shape)[..., :length]
    return (loss, lse_N.view(targets.shape)[..., :length]) if return_lse else loss


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options fixed; forward(e, c, targets, bias=None)."""

    def __init__(
        self,
        ignore_index: int = IGNORE_INDEX,
        softcap: float | None = None,
        reduction: str = "mean",
        shift: bool | int = 0,
        filter_eps: float | str | None = "auto",
        accum_e_fp32: bool = False,
        accum_c_fp32: bool = False,
        filter_e_grad: bool = True,
        filter_c_grad: bool = True,
        impl: str | LinearCrossEntropyImpl = DEFAULT_IMPL,
        return_lse: bool = False,
        vocab_parallel_options: VocabParallelOptions | None = None,
        *,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        workspace_mib: float | None = None,
    ):
        super().__init__()
        self.ignore_index = ignore_index
        self.softcap = softcap
        self.reduction = reduction
        self.shift = shift
        self.filter_eps = filter_eps
        self.accum_e_fp32 = accum_e_fp32
        self.accum_c_fp32 = accum_c_fp32
        self.filter_e_grad = filter_e_grad
        self.filter_c_grad = filter_c_grad
        self.impl = impl_name(impl)
        self.return_lse = return_lse
        self.vocab_parallel_options = vocab_parallel_options
        self.z_loss = z_loss
        self.label_smoothing = label_smoothing
        self.workspace_mib = workspace_mib

    def forward(
        self, e: torch.Tensor, c: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return linear_cross_entropy(
            e,
            c,
            targets,
            bias=bias,
            ignore_index=self.ignore_index,
            softcap=self.softcap,
            reduction=self.reduction,
            shift=self.shift,
            return_lse=self.return_lse,
            filter_eps=self.filter_eps,
            accum_e_fp32=self.accum_e_fp32,
            accum_c_fp32=self.accum_c_fp32,
            filter_e_grad=self.filter_e_grad,
            filter_c_grad=self.filter_c_grad,
            impl=self.impl,
            vocab_parallel_options=self.vocab_parallel_options,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            workspace_mib=self.workspace_mib,
        )

    def extra_repr(self) -> str:
        return f"impl={self.impl}, reduction={self.reduction}, shift={int(self.shift)}, softcap={self.softcap}"
