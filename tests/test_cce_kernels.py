"""The Triton kernels in Triton's interpreter on the CPU: `TRITON_INTERPRET=1 pytest -m interpret` (make test does).

The interpreter truncates where a GPU rounds fp32 to bf16, so bf16 is allowed twice its error here; tests/gpu has the
real one.
"""

import itertools
import math
import os

import pytest
import test_cce_vocab_parallel
import torch
import torch.nn.functional as F
from cce_formula import formula, gradients, inputs, relative
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint

import cce
from cce import function, plans
from cce.targets import IGNORED

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
ITEMSIZE = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
TILE = (16, 32)  # of the filter, in the interpreter


@pytest.fixture(autouse=True)
def interpreter():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("set TRITON_INTERPRET=1 before Python starts: these tests run the kernels in Triton's interpreter")
    from cce.operators import runs_kernels

    assert runs_kernels(torch.zeros(1))


def slices(n, v, dtype, count):
    """workspace_mib of `count` slices of the vocabulary: so little that the backward does walk several."""
    width = math.ceil(math.ceil(v / count) / TILE[1]) * TILE[1]
    return n * width * ITEMSIZE[dtype] / 2**20


def check(e, c, targets, bias, *, upstream=None, impl="cce_kahan_full_c", workspace_mib=None, **options):
    tolerance = TOLERANCE[e.dtype]
    result = cce.linear_cross_entropy(e, c, targets, bias, impl=impl, workspace_mib=workspace_mib, **options)
    with_lse = options.pop("return_lse", False)
    loss, lse = result if with_lse else (result, None)
    expected, expected_lse = formula(e, c, targets, bias, **options)
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=3e-6)
    tensors = [e, c, bias]
    if with_lse:
        torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=3e-6)
        loss, expected = loss.sum() + 0.5 * lse.sum(), expected.sum() + 0.5 * expected_lse.sum()
    ours = torch.autograd.grad(loss, [t for t in tensors if t is not None], upstream)
    theirs = gradients(expected, tensors, None if upstream is None else upstream.double())
    for own, tensor, reference in zip(ours, [t for t in tensors if t is not None], theirs):
        assert own.dtype == tensor.dtype
        assert relative(own, reference) < tolerance


def check_one_pass(e, c, targets, frozen_bias, limit, options):
    loss = cce.linear_cross_entropy(e, c, targets, frozen_bias, **options)
    expected = formula(e, c, targets, frozen_bias, **options)[0]
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=3e-6)
    upstream = torch.tensor(3.0)
    ours = torch.autograd.grad(loss, (e, c), upstream)
    theirs = gradients(expected, [e, c], upstream.double())
    assert all(relative(own, reference) < limit for own, reference in zip(ours, theirs))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("impl", ["cce_kahan_full_c", "cce_exact"])
def test_matrix(dtype, impl):
    """softcap x shift x bias, each with the next reduction, ignored tokens, remainders in N, D and V, three slices."""
    reductions = itertools.cycle(("mean", "none", "sum"))
    for softcap, shift, bias in itertools.product((None, 3.0), (0, 2), (False, True)):
        reduction = next(reductions)
        e, c, targets, b = inputs((2, 19), 24, 101, dtype, bias=bias, ignored=0.2)
        upstream = torch.rand(2, 19 - shift) if reduction == "none" else None
        check(
            e, c, targets, b, impl=impl, upstream=upstream, reduction=reduction, softcap=softcap, shift=shift,
            workspace_mib=slices(38, 101, dtype, 3),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("n,d,v", [(1, 16, 5), (37, 48, 300), (16, 32, 128), (40, 1, 33), (3, 20, 1)])
def test_shapes(dtype, n, d, v):
    e, c, targets, b = inputs(n, d, v, dtype, bias=True)
    if v > 1:
        check(e, c, targets, b)
    else:
        assert cce.linear_cross_entropy(e, c, targets, b).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss,label_smoothing", [(1e-2, 0.0), (0.0, 0.1), (1e-2, 0.2)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_z_loss_label_smoothing_and_lse(dtype, z_loss, label_smoothing, softcap):
    e, c, targets, b = inputs(37, 24, 150, dtype, bias=True, ignored=0.2)
    options = dict(z_loss=z_loss, label_smoothing=label_smoothing, softcap=softcap, return_lse=True)
    check(e, c, targets, b, workspace_mib=slices(37, 150, dtype, 2), **options)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 40),
    hidden=st.integers(1, 40),
    vocabulary=st.integers(2, 150),
    dtype=st.sampled_from(list(TOLERANCE)),
    softcap=st.sampled_from([None, 2.0]),
    ignored=st.sampled_from([0.0, 0.5]),
    bias=st.booleans(),
    z_loss=st.sampled_from([0.0, 1e-3]),
    label_smoothing=st.sampled_from([0.0, 0.3]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    count=st.integers(1, 4),
    chunk=st.sampled_from([None, (16, "fp32"), (32, "kahan")]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_option(
    tokens, hidden, vocabulary, dtype, softcap, ignored, bias, z_loss, label_smoothing, scale, count, chunk, seed
):
    """By slices, and in one pass (chunk) where that has kernels."""
    if chunk is not None:
        dtype, label_smoothing = torch.bfloat16, 0.0
    e, c, targets, b = inputs(tokens, hidden, vocabulary, dtype, bias=bias, ignored=ignored, scale=scale, seed=seed)
    if chunk is not None and b is not None:
        b = b.detach()
    tensors = [t for t in (e, c, b) if t is not None and t.requires_grad]
    options = dict(softcap=softcap, reduction="sum", z_loss=z_loss, label_smoothing=label_smoothing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "chunk_of_tokens", lambda *_: chunk)
        workspace = slices(tokens, vocabulary, dtype, count)
        loss = cce.linear_cross_entropy(e, c, targets, b, workspace_mib=workspace, **options)
    expected = formula(e, c, targets, b, **options)[0]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=2e-5)
    # Terms of a gradient may cancel: what they are rounded by is measured by their magnitudes.
    z = (e.double() @ c.double().T + (0 if b is None else b.double())).detach().requires_grad_()
    of_logits = formula(z, torch.eye(vocabulary), targets, **options)[0]
    (g,) = (gradient.abs() for gradient in gradients(of_logits, [z]))
    terms = (g @ c.abs().double(), g.T @ e.abs().double(), g.sum(0))
    for own, reference, magnitude in zip(gradients(loss, tensors), gradients(expected, tensors), terms):
        bound = 5 * TOLERANCE[dtype] * max(1e-3, float(magnitude.detach().max())) + 1e-7
        assert float((own - reference).abs().max()) <= bound


@pytest.mark.parametrize("accumulation", ["plain", "kahan", "fp32"])
def test_kahan_accumulation_beats_plain(accumulation):
    """Eight slices in fp16 (rounded to nearest here): Kahan is within 10 % of the error of fp32, plain is not."""
    e, c, targets, _ = inputs(32, 32, 256, torch.float16, scale=0.2)
    options = {
        "plain": dict(impl="cce", filter_eps=None),
        "kahan": dict(impl="cce_kahan_full_c"),
        "fp32": dict(impl="cce_exact"),
    }
    expected = gradients(formula(e, c, targets)[0], [e])[0]

    def error(name):
        loss = cce.linear_cross_entropy(e, c, targets, workspace_mib=slices(32, 256, torch.float16, 8), **options[name])
        return relative(gradients(loss, [e])[0], expected)

    best = error("fp32")
    if accumulation == "plain":
        assert error("plain") > 1.2 * best
    else:
        assert error(accumulation) < 1.1 * best


@pytest.mark.parametrize("gap", [5.0, 14.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confident_target_keeps_its_precision(gap, dtype):
    v = 40
    c = torch.eye(v, dtype=dtype, requires_grad=True)
    e = (torch.eye(v) * gap).to(dtype).requires_grad_()
    loss = cce.linear_cross_entropy(e, c, torch.arange(v), reduction="sum")
    nll = math.log1p((v - 1) * math.exp(-gap))
    assert abs(loss.item() / (v * nll) - 1) < 2e-6
    ours = gradients(loss, [e])[0].diagonal()
    rtol = 5e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours, torch.full_like(ours, math.expm1(-nll)), rtol=rtol, atol=0)


@pytest.mark.parametrize("filter_e,filter_c", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_filter_equals_its_definition(filter_e, filter_c, dtype):
    n, d, v, eps = 45, 20, 200, 0.03
    e, c, targets, _ = inputs(n, d, v, dtype, scale=0.5)
    with torch.no_grad():
        e[16:32] *= 8
    targets = targets % 40
    loss = cce.linear_cross_entropy(
        e, c, targets, impl="cce", filter_eps=eps, filter_e_grad=filter_e, filter_c_grad=filter_c, reduction="sum",
        workspace_mib=slices(n, v, dtype, 3),
    )  # fmt: skip
    de, dc = gradients(loss, [e, c])
    y = (e.double() @ c.double().T).softmax(1).detach() - F.one_hot(targets, v)
    kept = torch.zeros_like(y)
    for i, j in itertools.product(range(0, n, TILE[0]), range(0, v, TILE[1])):
        tile = (slice(i, i + TILE[0]), slice(j, j + TILE[1]))
        kept[tile] = bool((y[tile].abs() >= eps).any())
    assert 0.1 < kept.mean() < 0.9
    assert relative(de, (y * kept if filter_e else y) @ c.detach().double()) < TOLERANCE[dtype]
    assert relative(dc, (y * kept if filter_c else y).T @ e.detach().double()) < TOLERANCE[dtype]


def test_frozen_inputs():
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        whole = inputs(20, 16, 70, torch.float32, bias=True)
        e, c, targets, b = whole
        expected = gradients(formula(e, c, targets, b)[0], [e, c, b])
        tensors = [t.detach().requires_grad_(need) for t, need in zip((e, c, b), needs)]
        cce.linear_cross_entropy(tensors[0], tensors[1], targets, tensors[2]).backward()
        for tensor, need, reference in zip(tensors, needs, expected):
            assert (tensor.grad is not None) == need
            assert not need or relative(tensor.grad, reference) < 3e-6


def test_strides_and_no_tokens_and_all_ignored():
    e, c, targets, _ = inputs((4, 9), 12, 50, torch.float32)
    strange = [
        e.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        c.detach().t().contiguous().t().requires_grad_(),
    ]
    ours = gradients(cce.linear_cross_entropy(*strange, targets, shift=1), strange)
    assert all(relative(a, b) < 3e-6 for a, b in zip(ours, gradients(formula(e, c, targets, shift=1)[0], [e, c])))
    padded = torch.randn(9, 40, requires_grad=True)  # rows at a distance that is not their length
    classifier = torch.randn(30, 64)[:, 5:17].requires_grad_()
    check(padded[:, :12].detach().requires_grad_(), classifier, torch.arange(9), None)

    none = torch.zeros(0, 12, requires_grad=True)
    loss = cce.linear_cross_entropy(none, c, torch.zeros(0, dtype=torch.int64), reduction="sum")
    assert loss.item() == 0 and all((g == 0).all() for g in gradients(loss, [none, c]))
    loss = cce.linear_cross_entropy(e, c, torch.full_like(targets, -100))
    assert math.isnan(loss.item()) and all((g == 0).all() for g in gradients(loss, [e, c]))


def test_autocast_returns_the_inputs_dtypes():
    e, c, targets, b = inputs(20, 16, 70, torch.float32, bias=True)
    rounded = [t.detach().bfloat16().requires_grad_() for t in (e, c)]
    expected = gradients(formula(*rounded, targets, b)[0], [*rounded, b])
    for impl in ("cce_kahan_full_c", "cce_exact"):
        with torch.autocast("cpu", torch.bfloat16):
            workspace = slices(20, 70, torch.bfloat16, 3)
            loss = cce.linear_cross_entropy(e, c, targets, b, impl=impl, workspace_mib=workspace)
        ours = torch.autograd.grad(loss, (e, c, b))
        assert all(g.dtype == torch.float32 for g in ours)
        assert all(relative(g, r) < 1e-2 for g, r in zip(ours, expected))


def test_out_of_range_code_gives_nan():
    """On a GPU a target out of range is not looked at by the host: its loss and gradients are NaN."""
    from cce.kernels import forward_parts
    from cce.targets import encode_targets

    e, c, targets, _ = inputs(6, 8, 20, torch.float32)
    targets[2], targets[4] = 20, -7
    codes = encode_targets(targets, -100, 0, 20, sharded=False)
    _, own, _, _ = forward_parts(e.detach(), c.detach(), None, codes, None, False, False)
    assert own.isnan().tolist() == [False, False, True, False, True, False]


def test_repeats_are_bit_identical():
    e, c, targets, b = inputs(37, 24, 150, torch.bfloat16, bias=True)
    runs = []
    for _ in range(2):
        loss = cce.linear_cross_entropy(e, c, targets, b, workspace_mib=slices(37, 150, torch.bfloat16, 3))
        runs.append((loss.detach(), *torch.autograd.grad(loss, (e, c, b))))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_two_ranks_agree_with_the_whole_vocabulary(tmp_path):
    spawn(test_cce_vocab_parallel.work, args=(str(tmp_path), torch.float32, 3e-6), nprocs=2, join=True)


@pytest.mark.parametrize(
    "options,scale",
    [
        ({}, 1.0),
        (dict(reduction="sum", shift=2), 60.0),
        (dict(z_loss=1e-2), 150.0),
        (dict(softcap=3.0, z_loss=1e-2), 1.0),
    ],
)
@pytest.mark.parametrize(
    "accumulation,chunk", [("kahan", 16), ("fp32", 16), ("plain", 16), ("fp32", 32), ("fp32", 39), ("kahan", 64)]
)
def test_one_pass(monkeypatch, options, scale, accumulation, chunk):
    """Three chunks of tokens; two, and one, whose exponentials lie in part in dC's memory. At large scales the references of
    exponentials move (a logit is hundreds above the target's)."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (chunk, accumulation))
    bias = "softcap" in options
    e, c, targets, b = inputs((3, 13), 24, 101, torch.bfloat16, bias=bias, ignored=0.2, scale=scale)
    limit = 5e-2 if accumulation == "plain" else TOLERANCE[torch.bfloat16]
    check_one_pass(e, c, targets, None if b is None else b.detach(), limit, options)


@pytest.mark.parametrize("splits", [1, 3, 6])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_numbers_of_tokens_from_parts_of_the_vocabulary(splits, z_loss):
    """nll, lse, dE and what dC is made of, of tokens 16 on, from w C of each split in units of its own reference."""
    from cce.kernels.kept import streamed_tokens
    from cce.kernels.problem import Problem

    (n, d, v), first = (37, 24, 101), 16
    e, c, targets, _ = inputs(n, d, v, torch.bfloat16, ignored=0.2, scale=30.0)
    e, c = e.detach().double().requires_grad_(), c.detach()
    loss, lse = formula(e, c, targets, reduction="none", z_loss=z_loss)
    dloss = torch.tensor(0.3)
    expected = gradients(loss.sum() * dloss, [e])[0]
    e = e.detach()
    codes = torch.where(targets < 0, IGNORED, targets).int()
    z = e @ c.double().T
    target_N = z.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()
    z = torch.where(F.one_hot(codes.clamp(min=0).long(), v).bool(), -math.inf, z) / math.log(2)
    of_split = torch.arange(v) * splits // v
    references = torch.stack([z[first:, of_split == split].amax(1).float().round() for split in range(splits)])
    w = torch.exp2(z[first:] - references[of_split].T)
    of_splits = [(w * (of_split == split)).float() for split in range(splits)]
    x = torch.stack([part @ c.float() for part in of_splits])
    parts = torch.stack([reference + part.sum(1).log2() for reference, part in zip(references, of_splits)])
    de, tokens = torch.full((n, d), 7.0, dtype=c.dtype), torch.full((4, n), 7.0)
    problem = Problem(e.to(c.dtype), c, None, codes, dloss, None, z_loss)
    streamed_tokens(problem, target_N, x, parts, references, tuple(tokens), de)(first)
    nll, own_lse, shift, own = tokens[:, first:].double()
    used = codes[first:] != IGNORED
    torch.testing.assert_close(nll + z_loss * own_lse**2, loss[first:].detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own_lse, lse[first:].detach(), rtol=1e-5, atol=1e-5)
    assert relative(de[first:], expected[first:]) < TOLERANCE[torch.bfloat16]
    g = torch.exp2(z[first:] - shift[:, None]) + F.one_hot(codes[first:].clamp(min=0).long(), v) * own[:, None]
    assert relative(dloss * (g * used[:, None]) @ c.double(), expected[first:]) < 1e-4
    assert (de[:first] == 7).all() and (tokens[:, :first] == 7).all() and (de[first:][~used] == 0).all()
    assert shift[~used].isinf().all() and (own[~used] == 0).all()


class TorchKernels:
    """What cce/kernels/hopper's streaming kernels compute, in PyTorch and fp64: no interpreter runs Gluon."""

    @staticmethod
    def logits(problem):
        z = problem.e_ND.double() @ problem.c_VD.double().T + (0 if problem.bias_V is None else problem.bias_V.double())
        cap = problem.softcap
        return (z, 1.0) if cap is None else (cap * torch.tanh(z / cap), 1 - torch.tanh(z / cap) ** 2)

    @classmethod
    def hidden_product(cls, problem, target_N, x_snD, parts, references):
        splits, n, _ = x_snD.shape
        z, slope = cls.logits(problem)
        own = F.one_hot(problem.codes_N.clamp(min=0).long(), z.shape[1]).bool() & (problem.codes_N >= 0)[:, None]

        def launch(first):
            at = slice(first, first + n)
            reference = target_N[at].double() / math.log(2)
            w = torch.exp2(torch.where(own[at], -math.inf, z[at]) / math.log(2) - reference[:, None])
            of_split = torch.arange(z.shape[1]) * splits // z.shape[1]
            # As where a reference has moved: each split has its own.
            for split in range(splits):
                part = w * (of_split == split) * 2.0**-split
                x_snD[split] = (part * (slope if isinstance(slope, float) else slope[at])) @ problem.c_VD.double()
                references.view(-1)[split * n : (split + 1) * n] = reference + split
                parts.view(-1)[split * n : (split + 1) * n] = part.sum(1).log2() + reference + split

        return launch

    @classmethod
    def vocabulary_gradient(cls, problem, lse_N, shift_N, own_N, dc_VD):
        z, slope = cls.logits(problem)
        sign = torch.sign(1 + 2 * problem.z_loss * lse_N.double())
        g = torch.exp2(z / math.log(2) - shift_N.double()[:, None]) * slope * sign[:, None]
        used = problem.codes_N >= 0
        g[used, problem.codes_N[used].long()] = own_N[used].double()
        dc_VD.copy_(problem.dloss * g.T @ problem.e_ND.double())


@pytest.mark.parametrize("chunk", [16, 128])  # three, of which the last has 7 tokens, or one
@pytest.mark.parametrize(
    "options", [{}, dict(softcap=3.0), dict(z_loss=1e-2, bias=0.0), dict(z_loss=10.0, bias=-8.0)], ids=str
)
def test_one_pass_with_sums_in_registers(monkeypatch, chunk, options):
    """The walk, its memory and the tokens' kernel around kernels of PyTorch's. The last lse is negative: so is 1 + 2 z_loss lse."""
    import cce.kernels

    monkeypatch.setattr(cce.kernels, "hopper", TorchKernels, raising=False)
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (chunk, "registers"))
    shift = options.get("bias")
    options = {name: value for name, value in options.items() if name != "bias"}
    e, c, targets, b = inputs((3, 13), 24, 101, torch.bfloat16, bias=shift is not None, ignored=0.2)
    check_one_pass(e, c, targets, None if b is None else b.detach() + shift, TOLERANCE[torch.bfloat16], options)


def test_one_pass_keeps_the_precision_of_confident_targets(monkeypatch):
    """p -> 1: the entry p - 1 of dE is e^-gap small, and right to the rounding of dE."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (16, "fp32"))
    v, gap = 40, 14.0
    c = torch.eye(v, dtype=torch.bfloat16, requires_grad=True)
    e = (torch.eye(v) * gap).bfloat16().requires_grad_()
    loss = cce.linear_cross_entropy(e, c, torch.arange(v), reduction="sum")
    de, dc = torch.autograd.grad(loss, (e, c))
    expected = math.expm1(-math.log1p((v - 1) * math.exp(-gap)))
    torch.testing.assert_close(de.diagonal(), torch.full((v,), expected, dtype=de.dtype), rtol=2**-7, atol=0)
    torch.testing.assert_close(dc.diagonal(), torch.full((v,), gap * expected, dtype=de.dtype), rtol=2**-7, atol=0)


@pytest.mark.parametrize("chunk", [(48, "fp32"), (48, "kahan"), (120, "fp32")])
def test_one_pass_adds_up_long_runs_of_a_target(monkeypatch, chunk):
    """Runs of one target that begin and end within, at, and beyond blocks of sorted tokens."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: chunk)
    e, c, _, _ = inputs(120, 24, 40, torch.bfloat16)
    for lengths in ((3, 29, 64, 24), (8, 8, 104), (120,), (1, 7, 9, 15, 17, 71)):
        targets = torch.repeat_interleave(torch.arange(len(lengths)) * 5, torch.tensor(lengths))
        targets = targets[torch.randperm(120, generator=torch.Generator().manual_seed(0))]
        ours = torch.autograd.grad(cce.linear_cross_entropy(e, c, targets), (e, c))
        theirs = gradients(formula(e, c, targets)[0], [e, c])
        assert all(relative(own, reference) < TOLERANCE[torch.bfloat16] for own, reference in zip(ours, theirs))


@pytest.mark.parametrize("n,d,v", [(1, 16, 5), (3, 20, 7), (9, 16, 5), (40, 24, 101)])
@pytest.mark.parametrize("ignored", [0.0, 1.0])
def test_one_pass_of_one_chunk_with_fp32_gradients(monkeypatch, n, d, v, ignored):
    """Autocast: dC is fp32, in whose memory exponentials lie in bf16. Few tokens and classes; no target at all."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (n, "fp32"))
    e, c, targets, _ = inputs(n, d, v, torch.float32, ignored=ignored)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cce.linear_cross_entropy(e, c, targets, reduction="sum")
    ours = torch.autograd.grad(loss, (e, c))
    rounded = [matrix.detach().bfloat16().requires_grad_() for matrix in (e, c)]
    theirs = gradients(formula(*rounded, targets, reduction="sum")[0], rounded)
    for own, reference in zip(ours, theirs):
        assert own.dtype == torch.float32
        assert (own == 0).all() if ignored else relative(own, reference) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kahan", [False, True])
def test_rows_of_dc_take_the_compensation_and_the_targets(kahan):
    """round(x - comp + own e of the targets), for classes 30 to 70 of 101."""
    from cce.kernels.finishing import TokensByTarget

    generator = torch.Generator().manual_seed(0)
    e, own, codes = (
        torch.randn(40, 24, generator=generator).bfloat16(),
        torch.randn(40, generator=generator),
        torch.arange(40) + 25,
    )
    x, comp = torch.randn(2, 40, 24, generator=generator)
    expected = x.double() - (comp.bfloat16().double() if kahan else 0)
    expected[:35] += (own.double()[:, None] * e.double())[5:]  # classes 25 to 29 are not among the rows
    dc = torch.empty(40, 24)
    by_target = TokensByTarget(e, own, codes.int(), 101)
    by_target.class_rows(x, comp.bfloat16() if kahan else None, 30, dc)
    torch.testing.assert_close(dc.double(), expected, rtol=1e-6, atol=1e-6)


def test_one_pass_backward_again_and_again(monkeypatch):
    """.grad may be the saved gradient itself; it is written to between the passes."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (16, "fp32"))
    e, c, targets, _ = inputs(40, 24, 101, torch.bfloat16)
    expected = gradients(formula(e, c, targets)[0], [e, c])
    loss = cce.linear_cross_entropy(e, c, targets)
    for passes in (1, 2, 3):
        loss.backward(retain_graph=True)
        for tensor, reference in zip((e, c), expected):
            assert relative(tensor.grad, passes * reference) < 2 * TOLERANCE[torch.bfloat16]
    e.grad.zero_()
    loss.backward()
    assert relative(e.grad, expected[0]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("chunk", [None, (16, "fp32"), (40, "fp32")])
def test_impossible_targets(monkeypatch, chunk):
    """A target whose logit is -inf: its loss is inf, as in F.cross_entropy, and the gradients are finite."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: chunk)
    e, c, targets, bias = inputs(40, 24, 101, torch.bfloat16, bias=True)
    bias = bias.detach()
    bias[50:] = -math.inf
    targets %= 50
    targets[0] = 60
    loss = cce.linear_cross_entropy(e, c, targets, bias)
    assert loss.item() == math.inf
    ours = torch.autograd.grad(loss, (e, c))
    theirs = gradients(formula(e, c, targets, bias)[0], [e, c])
    assert all(relative(a, b) < TOLERANCE[torch.bfloat16] for a, b in zip(ours, theirs))


def test_filter_below_the_range_of_its_maxima():
    """Logits under -65504, which fp16 maxima cannot tell: nothing may be dropped for it."""
    e, c, targets, bias = inputs(40, 24, 101, torch.float32, bias=True)
    loss = cce.linear_cross_entropy(e, c, targets, bias.detach() - 1e5, impl="cce", filter_eps=1e-4)
    ours = torch.autograd.grad(loss, (e, c))
    theirs = gradients(formula(e, c, targets, bias.detach() - 1e5)[0], [e, c])
    assert all(relative(a, b) < 2e-2 for a, b in zip(ours, theirs))


# In eager mode a kernel divides, in the interpreter, which truncates.
@pytest.mark.parametrize("divisor,rounding", [(4, 0.0), (3, 2**-7)])
def test_one_pass_compiles_for_changing_lengths(divisor, rounding):
    """No graph break where the plan looks at N, also once torch.compile takes N as a symbol."""

    def loss(e, c, targets):
        return cce.linear_cross_entropy(e, c, targets) / divisor

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for n in (40, 41, 57):
        assert plans.one_pass_chunk(n, 24, 101, "kahan", None, (True, True), "interpreter") is not None
        e, c, targets, _ = inputs(n, 24, 101, torch.bfloat16)
        ours = torch.autograd.grad(compiled(e, c, targets), (e, c))
        for own, eager in zip(ours, torch.autograd.grad(loss(e, c, targets), (e, c))):
            torch.testing.assert_close(own, eager, rtol=rounding, atol=0)


def test_one_pass_twice_through_one_graph(monkeypatch):
    """The upstream gradient is multiplied in place once; a second backward pass makes the gradients anew."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (16, "fp32"))
    e, c, targets, _ = inputs(40, 24, 101, torch.bfloat16)
    loss = cce.linear_cross_entropy(e, c, targets, z_loss=1e-2)
    expected = gradients(formula(e, c, targets, z_loss=1e-2)[0], [e, c])
    for factor in (2.0, 5.0):
        ours = torch.autograd.grad(loss, (e, c), torch.tensor(factor), retain_graph=True)
        assert all(relative(a, factor * b) < TOLERANCE[torch.bfloat16] for a, b in zip(ours, expected))


def test_one_pass_within_a_checkpoint_and_twice_in_one_loss(monkeypatch):
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (16, "fp32"))
    e, c, targets, _ = inputs(40, 24, 101, torch.bfloat16)

    def head(e, c):
        return cce.linear_cross_entropy(torch.tanh(e), c, targets)

    plain = torch.autograd.grad(head(e, c), (e, c))
    again = torch.autograd.grad(checkpoint(head, e, c, use_reentrant=False), (e, c))
    assert all(torch.equal(a, b) for a, b in zip(plain, again))
    both = torch.autograd.grad(head(e, c) + 2 * head(e, c), (e, c))
    assert all(relative(a, 3 * b.double()) < 2 * TOLERANCE[torch.bfloat16] for a, b in zip(both, plain))
    (de,) = torch.autograd.grad(head(e, c), e, create_graph=True)
    assert torch.equal(de, plain[0])
    with pytest.raises(RuntimeError, match="differentiable once"):
        de.sum().backward()


@pytest.mark.parametrize("tokens", [16, 40])
def test_one_pass_with_a_frozen_side(monkeypatch, tokens):
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (tokens, "fp32"))
    for frozen in (0, 1):
        tensors = list(inputs(40, 24, 101, torch.bfloat16)[:3])
        expected = gradients(formula(*tensors)[0], tensors[:2])
        tensors[frozen] = tensors[frozen].detach()
        cce.linear_cross_entropy(*tensors).backward()
        assert tensors[frozen].grad is None
        assert relative(tensors[1 - frozen].grad, expected[1 - frozen]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_ignored_tokens_may_be_anything(label_smoothing):
    """By slices: an ignored token whose hidden state is not finite gets no gradient, nor does the bias from it."""
    e, c, targets, b = inputs(40, 24, 101, torch.float32, bias=True)
    targets[5], targets[33] = -100, -100
    with torch.no_grad():
        e[5], e[33] = float("nan"), float("inf")
    loss = cce.linear_cross_entropy(e, c, targets, b, label_smoothing=label_smoothing, softcap=3.0)
    assert loss.isfinite()
    de, db = torch.autograd.grad(loss, (e, b))
    assert de.isfinite().all() and (de[5] == 0).all() and db.isfinite().all()


def test_operators_and_fakes_agree():
    e, c, targets, _ = inputs(40, 24, 101, torch.bfloat16)
    e, c, codes = e.detach(), c.detach(), targets.int()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cce.forward_parts, (e, c, None, codes, None, False, True), test_utils=tests)
    for needs in ((True, True), (False, True)):
        call = (e, c, None, codes, torch.ones(()), None, 0.0, 16, "fp32", *needs, torch.float32, torch.bfloat16)
        torch.library.opcheck(torch.ops.cce.one_pass, call, test_utils=tests)
