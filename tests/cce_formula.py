"""The fp64 formula that every test of cce compares with, and random inputs for it. Not a test module."""

import torch
import torch.nn.functional as F


def inputs(n, d, v, dtype, *, bias=False, ignored=0.0, scale=1.0, seed=0, device="cpu", ignore_index=-100):
    """(e [n, d], c [v, d], targets [n], bias [v] or None) with gradients on; n may be a tuple of axes."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = n if isinstance(n, tuple) else (n,)

    def normal(*size, factor=1.0):
        values = torch.randn(*size, generator=generator, device=device, dtype=torch.float32) * factor
        return values.to(dtype).requires_grad_()

    e, c = normal(*shape, d), normal(v, d, factor=scale * d**-0.5)
    targets = torch.randint(0, v, shape, generator=generator, device=device)
    if ignored:
        targets[torch.rand(shape, generator=generator, device=device) < ignored] = ignore_index
    return e, c, targets, normal(v) if bias else None


def formula(
    e, c, targets, bias=None, *,
    ignore_index=-100, softcap=None, reduction="mean", shift=0, z_loss=0.0, label_smoothing=0.0,
):  # fmt: skip
    """(loss, lse) in fp64 from logits in memory, differentiable."""
    logits = e.double() @ c.double().T
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        logits, targets = logits[..., :-shift, :], targets[..., shift:]
    used = targets != ignore_index
    lse = logits.logsumexp(-1).masked_fill(~used, 0)
    logits, flat = logits.flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(
        logits, flat, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    ).view(targets.shape)
    loss = loss + z_loss * lse.square()
    if reduction == "mean":
        loss = loss.sum() / used.sum()
    elif reduction == "sum":
        loss = loss.sum()
    return loss, lse


def gradients(output, tensors, upstream=None):
    """Gradients in fp64 of output (weighted by upstream) for the tensors that are not None."""
    wanted = [tensor for tensor in tensors if tensor is not None]
    return [g.double() for g in torch.autograd.grad(output, wanted, upstream)]


def relative(a, b):
    """|a - b| / |b| in the Frobenius norm; 0 when both are 0, NaN where either holds one."""
    difference = (a.double() - b.double()).norm()
    return 0.0 if difference == 0 else float(difference / b.double().norm())
