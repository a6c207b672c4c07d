"""The kernels for Hopper compile for it, on a machine without a GPU, and fit it; tests/gpu runs them."""

import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest
import triton
from test_cce_kernels import TorchKernels
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from cce.kernels import hopper

SHARED_MEMORY = 227 * 1024  # bytes that one program may have
POINTERS = {
    "Bias": "bf16", "Codes": "i32", "TileMaxima": "fp16", "DC": "bf16",
    **dict.fromkeys(("Part", "PartTotal", "Reference", "TileReference", "LastReference", "X"), "fp32"),
    **dict.fromkeys(("Lse", "Expm1", "Dloss", "Dlse", "Shift", "Own"), "fp32"),
}  # fmt: skip
NUMBERS = dict.fromkeys(
    ("N", "V", "left_V", "splits", "first_n", "first_v", "width", "stride_dc"), "i32"
) | dict.fromkeys(("softcap", "smoothing", "uniform", "z_loss"), "fp32")


def signature(kernel, dtype: str, classes: int, constants: dict) -> tuple[dict, dict]:
    """(types of the arguments, constants by position), every optional tensor given."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    depth = constants.get("D", 64)
    blocks = {"E": (64, depth), "C": (classes, depth), "Left": (64, 128), "Right": (64, 128), "G": (64, 128)}
    types = {}
    for name in kernel.arg_names:
        if name in blocks:
            types[name] = f"tensordesc<{dtype}[{blocks[name][0]}, {blocks[name][1]}],{layout!r}>"
        elif name in POINTERS:
            types[name] = "*" + POINTERS[name]
        else:
            types[name] = NUMBERS.get(name, "constexpr")
    return types, {(kernel.arg_names.index(name),): value for name, value in constants.items()}


OPTIONS = ("HAS_BIAS", "HAS_SOFTCAP", "HAS_DLSE", "HAS_SMOOTHING", "HAS_Z_LOSS", "NEED_TOTAL", "NEED_MAXIMA")


@pytest.mark.parametrize("options", [(), OPTIONS])
@pytest.mark.parametrize(
    "name,dtype,hidden",
    [
        ("log_sum_exp", "bf16", 256),
        ("log_sum_exp", "fp16", 2048),
        ("exponentials", "bf16", 2048),
        ("exponentials", "fp16", 256),
        ("hidden_product", "bf16", 256),
        ("logit_gradient", "bf16", 256),
        ("logit_gradient", "fp16", 2048),
        ("vocabulary_gradient", "bf16", 256),
    ],
)
def test_compiles_and_fits(name, dtype, hidden, options, tmp_path):
    kernel = getattr(importlib.import_module(f"cce.kernels.hopper.{name}"), f"_{name}_kernel")
    host = importlib.import_module("cce.kernels.hopper.host")
    keep = hidden <= 256
    flags = {flag: flag in options for flag in kernel.arg_names if flag.startswith(("HAS_", "NEED_"))}
    constants = flags | ({"D": hidden} if "D" in kernel.arg_names else {"STEPS": hidden // 64, "KEEP": keep})
    if "MAXIMA_V" in kernel.arg_names:
        constants["MAXIMA_V"] = 128
    classes = {"log_sum_exp": 256, "hidden_product": 64, "vocabulary_gradient": 64}.get(name, 128 if keep else 256)
    types, positions = signature(kernel, dtype, classes, constants)
    source = GluonASTSource(fn=kernel, signature=types, constexprs=positions)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=host.LAUNCH)
    assert compiled.metadata.shared <= SHARED_MEMORY
    # Of each stage two, and two of what stays for an item. One that nothing waits for would share its word with a buffer.
    stages = 4 if classes == 64 else 1024 // classes
    assert compiled.asm["ptx"].count("mbarrier.init") == 2 * stages + 2 * keep

    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    ptxas = Path(nvidia.__file__).parent / "bin" / "ptxas"
    said = subprocess.run(
        [ptxas, "-v", "-arch=sm_90a", ptx, "-o", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stderr
    # ptxas says so where it cannot keep products in flight, which is what these kernels are for.
    assert "wgmma" not in said, said
    spilled = max(int(count) for count in re.findall(r"(\d+) bytes spill stores", said))
    # Bytes a thread; the softcap's tanh takes many registers.
    assert spilled <= (4096 if "HAS_SOFTCAP" in options else 128), said


@pytest.mark.parametrize("name", ["hidden_product", "vocabulary_gradient"])
def test_stand_ins_take_what_the_kernels_take(name):
    """tests/test_cce_kernels.py walks with kernels of PyTorch's in the place of these."""
    of_kernel = inspect.signature(getattr(hopper, name)).parameters
    assert list(inspect.signature(getattr(TorchKernels, name)).parameters) == list(of_kernel)
