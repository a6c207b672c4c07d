"""The blockwise path against the fp64 formula: the matrix of options, blocks of every shape, special softmaxes."""

import itertools
import math
import os

import pytest
import torch
import torch.nn.functional as F
from cce_formula import formula, gradients, inputs, relative
from hypothesis import given, settings
from hypothesis import strategies as st

import cce
from cce import blockwise

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="under TRITON_INTERPRET=1 CPU tensors take the kernels"
)
# Relative error of a gradient: the rounding of its own dtype. The loss itself is fp32 (fp64 for fp64).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}
EXACT = ("cce_kahan_full_c", "cce_exact")
SHAPES = {(2, 19): (24, 301), (1, 1): (8, 5), (3, 50): (33, 257)}  # tokens: (D, V)


def check(e, c, targets, bias, tolerance, *, impl="cce_kahan_full_c", upstream=None, **options):
    loss = cce.linear_cross_entropy(e, c, targets, bias, impl=impl, **options)
    expected, _ = formula(e, c, targets, bias, **options)
    assert loss.dtype == (torch.float64 if e.dtype == torch.float64 else torch.float32)
    assert loss.shape == expected.shape
    torch.testing.assert_close(loss.double(), expected, rtol=max(2e-6, tolerance * 1e-3), atol=2e-6)
    upstream = None if upstream is None else upstream.to(loss.dtype)
    tensors = [e, c, bias]
    ours = torch.autograd.grad(loss, [t for t in tensors if t is not None], upstream)
    theirs = gradients(expected, tensors, upstream)
    for own, tensor, reference in zip(ours, [t for t in tensors if t is not None], theirs):
        assert own.dtype == tensor.dtype and own.shape == tensor.shape
        assert relative(own, reference) < tolerance


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_matrix(dtype, reduction):
    impl = itertools.cycle(EXACT)
    for tokens, (d, v) in SHAPES.items():
        for softcap, shift, ignored, bias in itertools.product((None, 3.0), (0, 2), (0.0, 0.3), (False, True)):
            if shift >= tokens[-1]:
                continue
            e, c, targets, b = inputs(tokens, d, v, dtype, bias=bias, ignored=ignored)
            targets[0, -1] = 1  # at least one token counts, whatever the shift
            upstream = torch.randn(tokens[0], tokens[1] - shift) if reduction == "none" else None
            check(
                e, c, targets, b, TOLERANCE[dtype], impl=next(impl), upstream=upstream, softcap=softcap, shift=shift,
                reduction=reduction,
            )  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("z_loss,label_smoothing", [(1e-2, 0.0), (0.0, 0.1), (1e-2, 0.1), (0.0, 1.0)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_z_loss_and_label_smoothing(softcap, z_loss, label_smoothing, reduction):
    e, c, targets, b = inputs(40, 16, 130, torch.float64, bias=True, ignored=0.2)
    options = dict(softcap=softcap, z_loss=z_loss, label_smoothing=label_smoothing, reduction=reduction)
    check(e, c, targets, b, 1e-12, upstream=torch.randn(40) if reduction == "none" else None, **options)


def test_label_smoothing_agrees_with_pytorch():
    e, c, targets, _ = inputs(40, 16, 130, torch.float64, ignored=0.2)
    ours = cce.linear_cross_entropy(e, c, targets, label_smoothing=0.1)
    torch.testing.assert_close(ours, F.cross_entropy(e @ c.T, targets, label_smoothing=0.1))


@pytest.mark.parametrize("tokens,block_bytes", [(1, 64), (16, 64), (9, 4096), (64, 2**20)])
def test_any_block_shape(monkeypatch, tokens, block_bytes):
    """Many blocks of tokens and of classes, with remainders, add up to the same."""
    monkeypatch.setattr(blockwise, "TOKENS", tokens)
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", block_bytes)
    e, c, targets, b = inputs(45, 12, 203, torch.float64, bias=True, ignored=0.1)
    codes = torch.where(targets == -100, -3, targets).int()
    whole = formula(e, c, targets, b, reduction="none")
    used = targets != -100
    rest, own, mean = blockwise.forward_parts(e.detach(), c.detach(), b.detach(), codes, None, True, tile=(4, 16))
    logits = (e @ c.T + b).detach()
    torch.testing.assert_close(torch.logaddexp(rest, own)[used], whole[1][used].detach())
    torch.testing.assert_close(mean[used], logits.mean(1)[used])
    torch.testing.assert_close(own[used], logits[used].gather(1, targets[used, None]).squeeze(1))
    check(e, c, targets, b, 1e-12, softcap=4.0, z_loss=0.01, label_smoothing=0.2)


def test_never_holds_all_logits():
    """Largest allocation of forward and backward at N V = 2^23 fp32 numbers (32 MiB): a block, not the logits."""
    e, c, targets, _ = inputs(1024, 8, 8192, torch.float32)
    with torch.profiler.profile(profile_memory=True) as profile:
        cce.linear_cross_entropy(e, c, targets).backward()
    assert max(event.cpu_memory_usage for event in profile.events()) <= blockwise.BLOCK_BYTES


def test_return_lse_and_its_gradient():
    for shift in (0, 3):
        e, c, targets, b = inputs((2, 20), 16, 90, torch.float64, bias=True, ignored=0.2)
        loss, lse = cce.linear_cross_entropy(e, c, targets, b, return_lse=True, shift=shift, softcap=3.0)
        expected, expected_lse = formula(e, c, targets, b, shift=shift, softcap=3.0)
        torch.testing.assert_close(lse, expected_lse)
        weights = torch.randn_like(lse)
        ours = gradients(loss + (weights * lse).sum(), [e, c, b])
        theirs = gradients(expected + (weights * expected_lse).sum(), [e, c, b])
        only = gradients(cce.linear_cross_entropy(e, c, targets, b, return_lse=True, shift=shift)[1].sum(), [e])
        only_expected = gradients(formula(e, c, targets, b, shift=shift)[1].sum(), [e])
        for own, reference in zip(ours + only, theirs + only_expected):
            assert relative(own, reference) < 1e-12


def test_gradcheck():
    e, c, targets, b = inputs(7, 5, 11, torch.float64, bias=True, ignored=0.2)

    def loss(e, c, b):
        return cce.linear_cross_entropy(
            e, c, targets, b, softcap=3.0, reduction="none", z_loss=0.1, label_smoothing=0.1, return_lse=True
        )

    assert torch.autograd.gradcheck(loss, (e, c, b))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    hidden=st.integers(1, 40),
    vocabulary=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    softcap=st.sampled_from([None, 1.0, 30.0]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    bias=st.booleans(),
    reduction=st.sampled_from(["sum", "none"]),
    z_loss=st.sampled_from([0.0, 1e-3]),
    label_smoothing=st.sampled_from([0.0, 0.3]),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_option(
    tokens, hidden, vocabulary, dtype, softcap, ignored, bias, reduction, z_loss, label_smoothing, scale, seed
):
    e, c, targets, b = inputs(tokens, hidden, vocabulary, dtype, bias=bias, ignored=ignored, scale=scale, seed=seed)
    options = dict(softcap=softcap, reduction=reduction, z_loss=z_loss, label_smoothing=label_smoothing)
    loss = cce.linear_cross_entropy(e, c, targets, b, **options)
    expected, _ = formula(e, c, targets, b, **options)
    close = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(loss.double(), expected, **close)
    upstream = torch.rand(tokens) if reduction == "none" else None
    ours = gradients(loss, [e, c, b], None if upstream is None else upstream.to(loss))
    theirs = gradients(expected, [e, c, b], None if upstream is None else upstream.double())
    for own, reference in zip(ours, theirs):
        scale_of = max(1.0, float(reference.abs().max())) if reference.numel() else 1.0
        error = float((own - reference).abs().max()) if own.numel() else 0.0
        assert error <= (1e-11 if dtype == torch.float64 else 3e-5) * scale_of


@pytest.mark.parametrize("gap", [5.0, 12.0, 16.0, 30.0])
def test_confident_target_keeps_its_precision(gap):
    """p -> 1: loss and gradient of the true class are right to fp32's relative precision, not to its absolute one."""
    v = 64
    c = torch.eye(v, requires_grad=True)
    e = torch.zeros(v, v)
    e.fill_diagonal_(gap)
    e.requires_grad_()
    targets = torch.arange(v)
    loss = cce.linear_cross_entropy(e, c, targets, reduction="sum")
    nll = math.log1p((v - 1) * math.exp(-gap))  # closed form: fp64 logits would cancel
    assert abs(loss.item() / (v * nll) - 1) < 1e-6
    ours = gradients(loss, [e])[0].diagonal()
    torch.testing.assert_close(ours, torch.full_like(ours, math.expm1(-nll)), rtol=3e-6, atol=0)


@pytest.mark.parametrize("filter_e,filter_c", [(True, True), (True, False), (False, True), (False, False)])
def test_filter_equals_its_definition(filter_e, filter_c):
    """A gradient that is filtered lacks exactly the 128 x 128 tiles in which every |p - onehot| < eps."""
    n, d, v, eps = 300, 10, 500, 0.03
    e, c, targets, _ = inputs(n, d, v, torch.float64, scale=0.5)
    with torch.no_grad():
        e[128:256] *= 8  # peaked tokens: their tiles stay; those of the others only where the targets are
    targets = targets % 100
    loss = cce.linear_cross_entropy(
        e, c, targets, impl="cce", filter_eps=eps, filter_e_grad=filter_e, filter_c_grad=filter_c, reduction="sum"
    )
    de, dc = torch.autograd.grad(loss, (e, c))
    y = (e @ c.T).softmax(1).detach() - F.one_hot(targets, v)
    kept = torch.zeros_like(y)
    for i in range(0, n, 128):
        for j in range(0, v, 128):
            kept[i : i + 128, j : j + 128] = bool((y[i : i + 128, j : j + 128].abs() >= eps).any())
    assert 0.1 < kept.mean() < 0.9
    torch.testing.assert_close(de, (y * kept if filter_e else y) @ c.detach())
    torch.testing.assert_close(dc, (y * kept if filter_c else y).T @ e.detach())


def test_filter_drops_tiles():
    """Tiles far from any target, with small probabilities, are left out: their rows of dC are exactly zero."""
    e, c, targets, _ = inputs(128, 16, 512, torch.float64, scale=0.1)
    targets = targets % 128
    dc = torch.autograd.grad(cce.linear_cross_entropy(e, c, targets, impl="cce", filter_eps=0.05), c)[0]
    assert (dc[128:] == 0).all() and (dc[:128] != 0).any()
    kept = torch.autograd.grad(cce.linear_cross_entropy(e, c, targets), c)[0]
    assert (kept[128:] != 0).all()


def test_pretraining_default_filters_nothing():
    """The default preset's gradient is the exact one where apple's presets drop tiles (all p below 2^-12)."""
    e, c, targets, _ = inputs(16, 8, 5000, torch.bfloat16, scale=0.01)
    exact = gradients(formula(e, c, targets)[0], [e, c])
    for impl in ("cce_kahan_full_c", "cce_exact", cce.LinearCrossEntropyImpl.CCE_KAHAN_FULL):
        ours = gradients(cce.linear_cross_entropy(e, c, targets, impl=impl), [e, c])
        assert all(relative(own, reference) < 4e-3 for own, reference in zip(ours, exact))
    filtered = gradients(cce.linear_cross_entropy(e, c, targets % 100, impl="cce_kahan"), [c])[0]
    assert (filtered[128:] == 0).all()


def test_repeats_are_bit_identical():
    for dtype in (torch.float32, torch.bfloat16):
        e, c, targets, b = inputs(200, 32, 700, dtype, bias=True)
        runs = []
        for _ in range(3):
            loss = cce.linear_cross_entropy(e, c, targets, b)
            runs.append((loss.detach(), *torch.autograd.grad(loss, (e, c, b))))
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
