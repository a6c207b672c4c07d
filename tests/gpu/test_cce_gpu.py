"""The Triton kernels on a CUDA GPU: options against fp64, accuracy against the standard path, memory, int64 offsets.

Few distinct shapes and options on purpose: every combination of a kernel's compile-time options costs seconds once.
"""

import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from cce_formula import formula, gradients, inputs, relative

import cce
import cce.kernels
from cce import function

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
TOLERANCE = {torch.float32: 5e-6, torch.float16: 8e-4, torch.bfloat16: 5e-3}
BF16 = torch.bfloat16
MIB = 2**20


def on_gpu(*args, **kwargs):
    return inputs(*args, device="cuda", **kwargs)


def check(e, c, targets, bias, *, impl="cce_kahan_full_c", workspace_mib=None, **options):
    result = cce.linear_cross_entropy(e, c, targets, bias, impl=impl, workspace_mib=workspace_mib, **options)
    with_lse = options.pop("return_lse", False)
    loss, lse = result if with_lse else (result, None)
    expected, expected_lse = formula(e, c, targets, bias, **options)
    assert loss.shape == expected.shape and loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=3e-6, atol=1e-5)
    if with_lse:
        torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=1e-5)
        loss, expected = loss.sum() + 0.5 * lse.sum(), expected.sum() + 0.5 * expected_lse.sum()
    upstream = None if loss.ndim == 0 else torch.rand(loss.shape, device="cuda")
    tensors = [t for t in (e, c, bias) if t is not None]
    ours = torch.autograd.grad(loss, tensors, upstream)
    theirs = gradients(expected, tensors, None if upstream is None else upstream.double())
    for own, tensor, reference in zip(ours, tensors, theirs):
        assert own.dtype == tensor.dtype
        assert relative(own, reference) < TOLERANCE[e.dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("softcap,bias", [(None, False), (3.0, True)])
def test_matrix(dtype, softcap, bias):
    """reduction x shift x ignored x exact preset; remainders in N, D and V; one and several slices."""
    for reduction, shift, ignored, impl in itertools.product(
        ("mean", "sum", "none"), (0, 2), (0.0, 0.3), ("cce_kahan_full_c", "cce_exact")
    ):
        e, c, targets, b = on_gpu((3, 109), 72, 1000, dtype, bias=bias, ignored=ignored)
        options = dict(impl=impl, reduction=reduction, shift=shift, softcap=softcap)
        check(e, c, targets, b, workspace_mib=0.2, **options)
        if reduction == "mean":
            check(e, c, targets, b, **options)


@pytest.mark.parametrize("n,d,v", [(1, 64, 50), (300, 1024, 4000), (257, 1000, 513), (5, 3, 2)])
def test_shapes(n, d, v):
    e, c, targets, b = on_gpu(n, d, v, BF16, bias=True)
    check(e, c, targets, b, workspace_mib=0.5)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_z_loss_label_smoothing_and_lse(dtype, softcap):
    e, c, targets, b = on_gpu(300, 72, 1000, dtype, bias=True, ignored=0.2)
    options = dict(z_loss=1e-2, label_smoothing=0.1, softcap=softcap, return_lse=True)
    check(e, c, targets, b, workspace_mib=0.2, **options)


def test_float64_takes_the_blockwise_path():
    e, c, targets, b = on_gpu(300, 40, 500, torch.float64, bias=True, ignored=0.2)
    loss = cce.linear_cross_entropy(e, c, targets, b)
    expected = formula(e, c, targets, b)[0]
    torch.testing.assert_close(loss, expected)
    assert all(relative(a, r) < 1e-12 for a, r in zip(gradients(loss, [e, c, b]), gradients(expected, [e, c, b])))


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_no_further_off_than_the_standard_path(monkeypatch, scale):
    """Exact presets at N = 3000, D = 1024, V = 16000, several slices, on a flat and on a peaked softmax."""
    e, c, targets, _ = on_gpu(3000, 1024, 16000, BF16, scale=scale)
    # Leaves in fp64: the gradients of bf16 leaves come rounded to bf16.
    exact = [tensor.detach().double().requires_grad_() for tensor in (e, c)]
    expected_loss, _ = formula(*exact, targets)
    expected = gradients(expected_loss, exact)
    standard = gradients(F.cross_entropy(F.linear(e, c).float(), targets), [e, c])
    errors = {}
    for impl in ("cce_kahan_full_c", "cce_exact", "plain"):
        options = dict(impl="cce", filter_eps=None) if impl == "plain" else dict(impl=impl)
        loss = cce.linear_cross_entropy(e, c, targets, workspace_mib=8, **options)
        assert abs(loss.item() / expected_loss.item() - 1) < 1e-6
        errors[impl] = [relative(a, b) for a, b in zip(gradients(loss, [e, c]), expected)]
    for chunk in ((1024, "fp32"), (1024, "kahan"), (3000, "fp32")):  # three chunks of tokens, the last one shorter; one
        monkeypatch.setattr(function, "chunk_of_tokens", lambda *_, chunk=chunk: chunk)
        loss = cce.linear_cross_entropy(e, c, targets, impl="cce_exact")
        assert abs(loss.item() / expected_loss.item() - 1) < 1e-6
        errors[chunk] = [relative(a, b) for a, b in zip(gradients(loss, [e, c]), expected)]
    limit = [1.05 * relative(a, b) for a, b in zip(standard, expected)]
    for impl in errors.keys() - {"plain"}:
        assert all(error < bound for error, bound in zip(errors[impl], limit)), (impl, errors, limit)
    assert errors["cce_kahan_full_c"][0] < 1.1 * errors["cce_exact"][0], errors
    assert errors["plain"][0] > errors["cce_kahan_full_c"][0], errors
    assert errors[1024, "kahan"][1] < 1.1 * errors[1024, "fp32"][1], errors


ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kind", ["confident", "led by one component"])
def test_what_tensor_cores_cut_off_is_made_up_for(kind):
    """Sums of 4096 products lose 4e-6 of a logit, always toward zero: 1e-4 of a small loss, were it not for the gain, and for the
    target's logit from fp32 sums. One large component makes all sums large from their start or at their end: 3e-6 of the loss,
    were it not for every other tile's sum to go backward."""
    n, d, v = 2048, 4096, 8192
    generator = torch.Generator("cuda").manual_seed(0)
    c = torch.randn(v, d, device="cuda", generator=generator) / math.sqrt(d)
    e = 0.7 * torch.randn(n, d, device="cuda", generator=generator)
    targets = torch.randint(0, v, (n,), device="cuda", generator=generator)
    if kind == "confident":
        e += 22 * c[targets]
    else:
        e += 7 * c[targets]
        e[:, 0], c[:, 0] = 4, -3 * torch.rand(v, device="cuda", generator=generator)
    e, c = e.to(BF16), c.to(BF16)
    z = e.double() @ c.double().T
    own = z.gather(1, targets[:, None])
    rest = z.scatter(1, targets[:, None], -math.inf).logsumexp(1, keepdim=True)
    expected = float(torch.logaddexp(rest - own, torch.zeros_like(rest)).mean())
    for workspace_mib in (None, 1000):
        with torch.set_grad_enabled(workspace_mib is not None):  # with gradients and memory in one pass
            inputs = e.clone().requires_grad_(), c.clone().requires_grad_()
            loss = cce.linear_cross_entropy(*inputs, targets, impl="cce_exact", workspace_mib=workspace_mib)
        assert abs(loss.item() / expected - 1) < 1e-6


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_probabilities_add_up_to_1_in_the_gradient_of_a_bias():
    """The bias' gradient of the log-sum-exp is the sum of p over tokens. Its kernel is another than that of the log-sum-exp: where only
    one of the two makes up for what logits of 31 are cut off by, the sum is off by 1e-4. bf16 rounds 8192 of them, 1e-5 of the sum."""
    n, d, v = 1024, 4096, 8192
    e, c, targets, b = on_gpu(n, d, v, BF16, bias=True)
    with torch.no_grad():
        e += 0.087
        c += 0.087
    _, lse = cce.linear_cross_entropy(e, c, targets, b, return_lse=True)
    (of_bias,) = torch.autograd.grad(lse.sum(), [b])
    assert abs(float(of_bias.double().sum()) / n - 1) < 6e-5


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_label_smoothing_takes_the_mean_of_logits_that_nothing_is_cut_off_from():
    """Logits around -20 of 4096 products: cut off they are 8e-5 too large, of which half would be in the loss, 4e-6 of it."""
    e, c, targets, _ = on_gpu(1024, 4096, 8192, BF16)
    with torch.no_grad():
        e += 0.07
        c -= 0.07
    loss = cce.linear_cross_entropy(e, c, targets, label_smoothing=0.5)
    expected, _ = formula(e, c, targets, label_smoothing=0.5)
    assert abs(loss.item() / expected.item() - 1) < 3e-6


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("d", [64, 1000])
@pytest.mark.parametrize("chunk", [(256, "fp32"), (256, "kahan"), (700, "fp32")])
def test_one_pass_where_some_logits_lie_far_above_the_target(monkeypatch, d, chunk):
    """References move in some tiles of tokens and of classes, and not in others; for ignored tokens, too. Exponentials lie in dC's
    memory, beside it, or both."""
    e, c, targets, _ = on_gpu(700, d, 5001, BF16, ignored=0.1)
    with torch.no_grad():
        e[130:200] *= 150
        e[500] *= 1000
        e[targets == -100] *= 50
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: chunk)
    loss = cce.linear_cross_entropy(e, c, targets, impl="cce_exact")
    exact = [tensor.detach().double().requires_grad_() for tensor in (e, c)]
    expected, _ = formula(*exact, targets)
    assert abs(loss.item() / expected.item() - 1) < 1e-6
    for own, reference in zip(gradients(loss, [e, c]), gradients(expected, exact)):
        assert relative(own, reference) < 4e-3


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "n,d,v,softcap,bias",
    [
        (1500, 72, 5001, 3.0, True),
        (1500, 256, 5001, None, False),
        (1500, 1000, 5001, None, False),
        (1500, 1024, 5001, 3.0, True),
        (20000, 256, 1000, None, False),  # more tiles of tokens than multiprocessors: a program takes several items
        (20000, 512, 1000, None, False),
    ],
)
def test_hopper_and_plain_kernels_agree(monkeypatch, n, d, v, softcap, bias):
    """Loss, gradients by slices, in one pass and filtered; tiles of ignored tokens, remainders in N, D and V."""
    e, c, targets, b = on_gpu(n, d, v, BF16, bias=bias, ignored=0.2, scale=3.0)
    targets[:400] = -100
    b = None if b is None else b.detach()
    asking = {name: m for name, m in sys.modules.items() if name.startswith("cce.") and hasattr(m, "architecture")}
    assert asking.keys() >= {f"cce.kernels.{name}" for name in ("forward", "gradient", "kept", "chunked")}
    chunk = 18000 if n > 18000 else 512
    results = {}
    for arch in ("hopper", "other"):
        for module in asking.values():
            monkeypatch.setattr(module, "architecture", lambda device, dtype, arch=arch: arch)
        of_arch = results[arch] = {}
        for way, taken, impl in (
            ("slices", None, "cce_exact"),
            ("one pass", (chunk, "fp32"), "cce_exact"),
            ("filtered", None, "cce"),
        ):
            monkeypatch.setattr(function, "chunk_of_tokens", lambda *_, taken=taken: taken)
            loss = cce.linear_cross_entropy(e, c, targets, b, softcap=softcap, impl=impl, workspace_mib=12)
            of_arch[way] = (loss.detach(), *gradients(loss, [e, c]))
    for way, ours in results["hopper"].items():
        for a, b in zip(ours, results["other"][way]):
            # Sums go through the hidden dimension in another order: some roundings to bf16, of 2e-3 each, turn over.
            assert relative(a, b) < 3e-4, (way, relative(a, b))


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize(
    "n,d,v,chunk,scale,options",
    [
        # A negative lse makes the factor of p negative, 1 + 2 z_loss lse.
        (300, 64, 1001, 128, 1.0, dict(bias=-8.0, z_loss=10.0)),
        (3000, 72, 5003, 1408, 3.0, dict(softcap=3.0, bias=0.0, z_loss=1e-2)),
        (3000, 256, 5003, 16384, 1.0, dict(bias=0.0)),
        (300, 200, 1000, 128, 200.0, {}),  # references move
        (40000, 256, 1000, 33792, 1.0, {}),  # a program takes several items
        (100, 136, 20000, 128, 3.0, dict(reduction="sum")),
        (1, 20, 50, 128, 1.0, {}),
    ],
)
def test_sums_in_registers(monkeypatch, n, d, v, chunk, scale, options, frozen):
    """Both gradients against fp64, repeated bit by bit; tiles of ignored tokens, remainders in N, D and V."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (chunk, "registers"))
    options = dict(options)
    shift = options.pop("bias", None)
    e, c, targets, b = on_gpu(n, d, v, BF16, bias=shift is not None, ignored=0.2, scale=scale)
    targets[: n // 3] = -100
    targets[-1] = v - 1
    b = None if b is None else b.detach() + shift
    expected_loss, _ = formula(e, c, targets, b, **options)
    tensors = [e, c]
    expected = gradients(expected_loss, tensors)
    if frozen is not None:
        tensors[frozen] = tensors[frozen].detach()
    free = [i for i in range(2) if i != frozen]
    loss = cce.linear_cross_entropy(*tensors, targets, b, **options)
    assert abs(loss.item() / expected_loss.item() - 1) < 2e-6
    ours = torch.autograd.grad(loss, [tensors[i] for i in free])
    again = torch.autograd.grad(cce.linear_cross_entropy(*tensors, targets, b, **options), [tensors[i] for i in free])
    for i, own, same in zip(free, ours, again):
        assert relative(own, expected[i]) < 4e-3 and torch.equal(own, same)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_sums_in_registers_of_odd_problems(monkeypatch):
    """fp32 parameters under autocast; no target left; a target out of range touches its own dE and all of dC."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: (128, "registers"))
    e, c, targets, _ = on_gpu(300, 63, 1001, torch.float32)
    expected = gradients(formula(e.bfloat16(), c.bfloat16(), targets)[0], [e, c])
    with torch.autocast("cuda", BF16):
        loss = cce.linear_cross_entropy(e, c, targets)
    for own, reference in zip(torch.autograd.grad(loss, [e, c]), expected):
        assert own.dtype == torch.float32 and relative(own, reference) < 4e-3
    e, c = (matrix.detach().to(BF16).requires_grad_() for matrix in (e, c))
    loss = cce.linear_cross_entropy(e, c, torch.full_like(targets, -100))
    assert math.isnan(loss.item()) and all((g == 0).all() for g in torch.autograd.grad(loss, [e, c]))
    targets[17] = 1001
    loss = cce.linear_cross_entropy(e, c, targets)
    de, dc = torch.autograd.grad(loss, [e, c])
    assert loss.isnan() and de.isnan().any(1).nonzero().flatten().tolist() == [17] and dc.isnan().all()


def test_ignored_tokens_may_be_anything():
    """By slices: an ignored token whose hidden state is not finite gets no gradient, nor does a bias from it."""
    for dtype, frozen_bias in ((BF16, True), (BF16, False), (torch.float32, False)):
        e, c, targets, b = on_gpu(300, 72, 1000, dtype, bias=True)
        targets[5], targets[130] = -100, -100
        with torch.no_grad():
            e[5], e[130] = float("nan"), float("inf")
        loss = cce.linear_cross_entropy(e, c, targets, b.detach() if frozen_bias else b, label_smoothing=0.1)
        tensors = [e] if frozen_bias else [e, b]
        for gradient in torch.autograd.grad(loss, tensors):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("gap", [5.0, 14.0, 30.0])
def test_confident_target_keeps_its_precision(gap):
    v = 256
    c = torch.eye(v, dtype=BF16, device="cuda", requires_grad=True)
    e = (torch.eye(v, device="cuda") * gap).to(BF16).requires_grad_()
    loss = cce.linear_cross_entropy(e, c, torch.arange(v, device="cuda"), reduction="sum")
    nll = math.log1p((v - 1) * math.exp(-gap))
    assert abs(loss.item() / (v * nll) - 1) < 3e-6
    ours = gradients(loss, [e])[0].diagonal()
    torch.testing.assert_close(ours, torch.full_like(ours, math.expm1(-nll)), rtol=2**-8, atol=0)


@pytest.mark.parametrize("filter_e,filter_c", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("d", [64, 1024])
def test_filter_equals_its_definition(d, filter_e, filter_c):
    n, v, eps = 1000, 4000, 0.01
    e, c, targets, _ = on_gpu(n, d, v, BF16, scale=0.5)
    with torch.no_grad():
        e[128:256] *= 8
    targets = targets % 500
    loss = cce.linear_cross_entropy(
        e, c, targets, impl="cce", filter_eps=eps, filter_e_grad=filter_e, filter_c_grad=filter_c, reduction="sum",
        workspace_mib=2, accum_e_fp32=True,
    )  # fmt: skip
    de, dc = gradients(loss, [e, c])
    y = (e.double() @ c.double().T).softmax(1).detach() - F.one_hot(targets, v)
    kept = torch.zeros_like(y)
    for i, j in itertools.product(range(0, n, 128), range(0, v, 128)):
        tile = (slice(i, i + 128), slice(j, j + 128))
        kept[tile] = bool((y[tile].abs() >= eps).any())
    assert 0.1 < kept.mean() < 0.9
    assert relative(de, (y * kept if filter_e else y) @ c.detach().double()) < 5e-3
    assert relative(dc, (y * kept if filter_c else y).T @ e.detach().double()) < 5e-3


def test_filtered_presets_run():
    e, c, targets, _ = on_gpu(500, 64, 4000, BF16, scale=3.0)
    expected = gradients(formula(e, c, targets)[0], [e, c])
    for impl in ("cce", "cce_kahan", "cce_kahan_full_e"):
        ours = gradients(cce.linear_cross_entropy(e, c, targets, impl=impl, workspace_mib=1), [e, c])
        assert all(relative(a, b) < 0.2 for a, b in zip(ours, expected))


def test_autocast_returns_the_inputs_dtypes():
    e, c, targets, b = on_gpu(500, 64, 4000, torch.float32, bias=True)
    rounded = [t.detach().to(BF16).requires_grad_() for t in (e, c)]
    expected = gradients(formula(*(t.double() for t in rounded), targets, b)[0], [*rounded, b])
    for impl in ("cce_kahan_full_c", "cce_exact"):
        with torch.autocast("cuda", BF16):
            loss = cce.linear_cross_entropy(e, c, targets, b, impl=impl, workspace_mib=1)
        ours = torch.autograd.grad(loss, (e, c, b))
        assert all(g.dtype == torch.float32 for g in ours)
        assert all(relative(g, r) < 5e-3 for g, r in zip(ours, expected))


def test_frozen_inputs():
    e, c, targets, b = on_gpu(300, 72, 1000, BF16, bias=True)
    expected = gradients(formula(e, c, targets, b)[0], [e, c, b])
    for needs in itertools.product((False, True), repeat=3):
        if not any(needs):
            continue
        tensors = [t.detach().requires_grad_(need) for t, need in zip((e, c, b), needs)]
        cce.linear_cross_entropy(tensors[0], tensors[1], targets, tensors[2], workspace_mib=0.2).backward()
        for tensor, need, reference in zip(tensors, needs, expected):
            assert (tensor.grad is not None) == need
            assert not need or relative(tensor.grad, reference) < 5e-3


def test_empty_ignored_and_strided():
    e, c, targets, b = on_gpu((4, 64), 72, 1000, BF16, bias=True)
    strange = [
        e.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        c.detach().t().contiguous().t().requires_grad_(),
    ]
    expected = gradients(formula(e, c, targets, b)[0], [e, c])
    ours = gradients(cce.linear_cross_entropy(*strange, targets, b), strange)
    assert all(relative(x, y) < 5e-3 for x, y in zip(ours, expected))
    loss = cce.linear_cross_entropy(e, c, torch.full_like(targets, -100), b)
    assert math.isnan(loss.item()) and all((g == 0).all() for g in gradients(loss, [e, c, b]))
    none = torch.zeros(0, 72, dtype=BF16, device="cuda", requires_grad=True)
    loss = cce.linear_cross_entropy(none, c, targets.new_zeros(0), reduction="sum")
    assert loss.item() == 0 and all((g == 0).all() for g in gradients(loss, [none, c]))


def test_target_out_of_range_is_nan():
    e, c, targets, _ = on_gpu(300, 72, 1000, BF16)
    targets[17] = 1000
    loss = cce.linear_cross_entropy(e, c, targets, reduction="none")
    assert loss.isnan().nonzero().flatten().tolist() == [17]
    assert gradients(loss.sum(), [c])[0].isnan().all()


def test_no_host_synchronization():
    e, c, targets, b = on_gpu(300, 72, 1000, BF16, bias=True, ignored=0.2)
    for options in ({}, dict(z_loss=0.1, label_smoothing=0.1), dict(impl="cce"), dict(impl="cce_exact", shift=1)):
        cce.linear_cross_entropy(e, c, targets, b, workspace_mib=0.2, **options).backward()  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            cce.linear_cross_entropy(e, c, targets, b, workspace_mib=0.2, **options).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("impl", ["cce_kahan_full_c", "cce_exact"])
def test_repeats_are_bit_identical(impl):
    e, c, targets, b = on_gpu(5000, 256, 20000, BF16, bias=True)
    runs = []
    for _ in range(4):
        loss = cce.linear_cross_entropy(e, c, targets, b, impl=impl, workspace_mib=32)
        runs.append((loss.detach(), *torch.autograd.grad(loss, (e, c, b))))
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run))


def test_compiles_without_graph_break():
    torch._dynamo.reset()
    e, c, targets, _ = on_gpu(300, 72, 1000, BF16)

    def head(e, c):
        return cce.linear_cross_entropy(torch.tanh(e), c, targets, z_loss=0.1)

    compiled = torch.compile(head, fullgraph=True)
    torch.testing.assert_close(compiled(e, c), head(e, c), rtol=1e-4, atol=1e-4)
    ours, plain = (torch.autograd.grad(f(e, c), (e, c)) for f in (compiled, head))
    assert all(relative(x, y) < 1e-2 for x, y in zip(ours, plain))


def beyond(function, *tensors):
    """Peak MiB of function().backward() less what stood before and the gradients themselves."""
    function().backward()
    for tensor in tensors:
        tensor.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function().backward()
    torch.cuda.synchronize()
    own = sum(t.grad.numel() * t.grad.element_size() for t in tensors)
    return (torch.cuda.max_memory_allocated() - before - own) / MIB


@pytest.mark.parametrize("impl,least", [("cce_exact", 32 + 2), ("cce_kahan_full_c", 16 + 16 + 2), ("cce", 8 + 2)])
@pytest.mark.parametrize("workspace", [16, 48, 96, 512, 2048])
def test_memory_stays_within_the_workspace(impl, least, workspace):
    """By slices, with G in dC's memory or not, and in one pass; least: dE's sum (or the filter's maxima) and 128 classes of G."""
    n, d, v = 8192, 1024, 65536
    e, c, targets, _ = on_gpu(n, d, v, BF16)
    used = beyond(lambda: cce.linear_cross_entropy(e, c, targets, impl=impl, workspace_mib=workspace), e, c)
    # 6 MiB: partial log-sum-exps (at most 4), numbers per token, rounding of the allocator
    assert used <= max(workspace, least) + 6
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cce.linear_cross_entropy(e, c, targets)
        assert (torch.cuda.max_memory_allocated() - before) / MIB <= 4


@pytest.mark.parametrize("workspace,chunk", [(None, None), (6000, None), (None, (40960, "fp32"))])
def test_more_than_2_31_logits(monkeypatch, workspace, chunk):
    """N V = 2.6e9: the loss of the last tokens and dC of the last classes, also with G as one slice of that size, and with as many
    exponentials."""
    monkeypatch.setattr(function, "chunk_of_tokens", lambda *_: chunk)
    n, d, v = 40960, 64, 65536
    e, c, targets, _ = on_gpu(n, d, v, BF16)
    targets[-1] = v - 1
    reduction = "none" if chunk is None else "sum"
    loss = cce.linear_cross_entropy(e, c, targets, reduction=reduction, workspace_mib=workspace)
    last = formula(e[-64:], c, targets[-64:], reduction="none")[0]
    if chunk is None:
        torch.testing.assert_close(loss[-64:].double(), last, rtol=2e-6, atol=1e-5)
    de, dc = torch.autograd.grad(loss.sum(), (e, c))
    expected_de = gradients(last.sum(), [e])[0][-64:]
    assert relative(de[-64:], expected_de) < 5e-3
    expected_dc, total = torch.zeros(64, d, dtype=torch.float64, device="cuda"), 0.0
    for rows in torch.arange(n, device="cuda").split(2048):
        logits = e[rows].detach().double() @ c.detach().double().T
        lse = logits.logsumexp(1, keepdim=True)
        total += float((lse - logits.gather(1, targets[rows, None])).sum())
        y = (logits[:, -64:] - lse).exp()
        y -= (targets[rows, None] == torch.arange(v - 64, v, device="cuda")).double()
        expected_dc += y.T @ e[rows].detach().double()
    assert relative(dc[-64:], expected_dc) < 5e-3
    assert abs(loss.double().sum().item() / total - 1) < 2e-6
