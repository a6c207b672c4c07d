"""Every kernel once or more on small shapes with remainders, for compute-sanitizer (`make sanitize`). Not a test module."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from cce_formula import formula, gradients, inputs, relative  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import mbarrier  # noqa: E402

import cce  # noqa: E402
from cce import function  # noqa: E402
from cce.tiles import architecture  # noqa: E402

EXACT = ("cce_exact", "cce_kahan_full_c")


@gluon.jit
def _arrive(bar):
    mbarrier.arrive(bar)


@gluon.jit
def _wait(bar):
    mbarrier.wait(bar, 0)


# Nothing but specialized warps that wait for another: tests/gpu/sanitize.py says what for.
@gluon.jit
def _dispatch_kernel():
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(_wait, (bar,)), (_wait, (bar,)), (_arrive, (bar,))], [4, 1], [232, 40])


def check(
    n, d, v, dtype, impl, *, bias=False, ignored=0.1, scale=1.0, workspace_mib=None, upstream=1.0, chunk=None, **options
):
    function.chunk_of_tokens = lambda *_: chunk  # None: by slices
    e, c, targets, b = inputs(n, d, v, dtype, bias=bias, ignored=ignored, scale=scale, device="cuda")
    loss = cce.linear_cross_entropy(e, c, targets, b, impl=impl, workspace_mib=workspace_mib, **options)
    tensors = [t for t in (e, c, b) if t is not None]
    ours = torch.autograd.grad(loss * upstream, tensors)
    expected, _ = formula(e, c, targets, b, **options)
    errors = [relative(a, r) for a, r in zip(ours, gradients(expected * upstream, tensors))]
    off = abs(float(loss) / float(expected) - 1)
    print(n, d, v, dtype, impl, workspace_mib, f"loss {off:.1e}", *(f"{error:.1e}" for error in errors), flush=True)
    right = off < 1e-5 and all(error < (1e-2 if impl in EXACT else 1.0) for error in errors)
    assert right, [f"{int((~gradient.isfinite()).sum())} of {gradient.numel()} not finite" for gradient in ours]


def main() -> None:
    hopper = architecture(torch.device("cuda"), torch.bfloat16) == "hopper"
    if hopper:
        _dispatch_kernel[(8,)](num_warps=4, maxnreg=168)
    for impl in EXACT:
        check(300, 72, 1000, torch.bfloat16, impl, bias=True, softcap=3.0, workspace_mib=0.3)
        check(300, 256, 1000, torch.bfloat16, impl, workspace_mib=0.3)
    for chunk in ((128, "fp32"), (128, "kahan")):
        check(300, 256, 1000, torch.bfloat16, "cce_exact", chunk=chunk, upstream=3.0)
        check(300, 1024, 1000, torch.bfloat16, "cce_exact", chunk=chunk)  # wide tiles
        check(300, 1024, 1000, torch.bfloat16, "cce_exact", chunk=chunk, scale=200.0)
        check(300, 72, 1001, torch.bfloat16, "cce_exact", chunk=chunk, softcap=3.0, z_loss=1e-2)
        check(300, 64, 1000, torch.bfloat16, "cce_exact", chunk=chunk, scale=200.0)  # references move
    for tokens in (256, 300):  # exponentials in two places: of two chunks, of one
        check(300, 1024, 1000, torch.bfloat16, "cce_exact", chunk=(tokens, "fp32"))
        check(300, 64, 1001, torch.bfloat16, "cce_exact", chunk=(tokens, "fp32"), scale=200.0)
    for d, scale in ((256, 1.0), (72, 1.0), (64, 200.0)):  # sums in registers, on Hopper
        if hopper:
            check(300, d, 1001, torch.bfloat16, "cce_exact", chunk=(256, "registers"), scale=scale, z_loss=1e-2)
    check(300, 64, 1000, torch.float16, "cce_exact", bias=True, workspace_mib=0.3)
    check(300, 64, 1000, torch.float32, "cce_exact", workspace_mib=0.3, label_smoothing=0.1)
    for impl in ("cce", "cce_kahan", "cce_kahan_full_e"):
        check(600, 64, 2000, torch.bfloat16, impl, scale=3.0, workspace_mib=1)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
