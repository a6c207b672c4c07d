"""A process that takes this machine for one with an H200: Triton compiles for it in earnest, and launches nothing.

    PYTHONPATH=scripts python tests/stand_in_h200.py tune FOLDER    # writes FOLDER/<kernel>.json by scripts/tune_fla.py
    PYTHONPATH=scripts python tests/stand_in_h200.py read ROOT      # what FLA's kernel takes from ROOT/configs/fla
"""

import importlib.util
import json
import sys
import types
from argparse import Namespace
from pathlib import Path

import torch

import tune_fla

ROOT = Path(__file__).resolve().parents[1]


def pretend_h200(benchmark) -> None:
    """Triton, torch and FLA find an H200; `benchmark` takes the place of Triton's do_bench."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Launcher:
        def __init__(self, src, metadata):
            pass

        def __call__(self, *args):
            pass

    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132}
    loaded = (1, 1, 32, 0, 1024)  # module, function, registers, spills, threads
    driver.set_active(
        types.SimpleNamespace(
            launcher_cls=Launcher,
            utils=types.SimpleNamespace(get_device_properties=lambda device: properties, load_binary=lambda *a: loaded),
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_benchmarker=lambda: benchmark,
        )
    )
    torch.cuda.get_device_name = lambda *device: "NVIDIA H200"
    torch.cuda.get_device_capability = lambda *device: (9, 0)


def normalize(features: int, dtype: torch.dtype) -> None:
    """FLA's RMSNorm: its kernel is decorated with plain triton.autotune, with 9 candidates."""
    from fla.modules import RMSNorm

    RMSNorm(features, dtype=dtype)(torch.ones(4, features, dtype=dtype))


def tune(folder: Path) -> None:
    times = iter([3.0, 1.0, 2.0])

    def benchmark(kernel_call, quantiles, warmup, rep):
        kernel_call()
        return [next(times)] * 3

    pretend_h200(benchmark)
    options = Namespace(workers=2, compile_timeout=60.0, max_candidates=3)
    with tune_fla.TuningRun(folder, options, note=lambda kernels: print(json.dumps(kernels))):
        normalize(64, torch.float32)


def read(root: Path) -> None:
    class Autotuned(Exception):
        pass

    def benchmark(*args, **kwargs):
        raise Autotuned

    pretend_h200(benchmark)
    torch.cuda.is_available = lambda: True
    # Not as a part of `models`, whose CPU backend would take the place of the kernels.
    spec = importlib.util.spec_from_file_location("tuned", ROOT / "models" / "tuned.py")
    tuned = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tuned)
    folder = tuned.use_tuned_kernels(root)
    assert tuned.use_tuned_kernels(root) == folder, "asked again"
    import triton
    from fla.modules.norm.layernorm import layer_norm_fwd_kernel as kernel

    assert triton.autotune.__module__ == "triton.runtime.autotuner", "the decorator must be Triton's own again"
    chosen = {}
    asked = {"equal": (64, "float32"), "other size": (32, "float32"), "other dtype": (64, "bfloat16")}
    for name, (features, dtype) in asked.items():
        try:
            normalize(features, getattr(torch, dtype))
            chosen[name] = kernel.best_config.all_kwargs()
        except Autotuned:
            chosen[name] = "autotuned"
    print(json.dumps({"folder": str(folder), "chosen": chosen}))


if __name__ == "__main__":
    {"tune": tune, "read": read}[sys.argv[1]](Path(sys.argv[2]))
