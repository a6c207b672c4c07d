"""Tuned kernel configurations for FLA, so that a fresh machine does not spend its first minutes on autotuning.

FLA 0.6.0 reads one JSON file a kernel, `<FLA_CONFIG_DIR>/<kernel>.json`, if FLA_CACHE_MODE lets it
(ops/utils/cache.py). This repository ships such files in configs/fla/<GPU>/, written by scripts/tune_fla.py. In the
mode `fuzzy` a kernel takes the entry whose autotune key is equal, else the first one whose key differs in numbers
only (dtypes and booleans must be equal), else it autotunes as it would without files.

About half of the candidates belong to kernels that FLA decorates with plain `triton.autotune` (norms, SwiGLU, GLA's
state recurrence), which read no files. FLA has a switch for them, `configure_fla_cache_autotune()`, to be thrown
before their modules are imported; but it lies in a package whose import imports them. `import_fla` does it in the
right order.

Whatever is autotuned nevertheless stays in Triton's own cache: FLA asks for that by default (FLA_CACHE_RESULTS=1),
and TRITON_CACHE_AUTOTUNING=1 asks it for every other autotuned kernel. Those results lie in TRITON_CACHE_DIR; their
keys hold hashes of Triton's installation, of ptxas and of the kernel's source, so they serve a second run, not
another machine.

A variable that the user has set stays as it is: FLA_CACHE_MODE=disabled autotunes everything, FLA_CACHE_MODE=strict
takes equal keys only (for heads larger than the tuned ones, where a fuzzy match may ask for more shared memory than
there is).
"""

import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[1]
CACHE_MODULE = "fla.ops.utils.cache"

_in_use: Path | None = None


def gpu_folder(device_name: str) -> str:
    """'NVIDIA H200' → 'NVIDIA_H200': FLA's rule for the folder of a GPU; FLA_GPU_NAME, if set, replaces the name."""
    return re.sub(r"[^0-9A-Za-z]+", "_", os.environ.get("FLA_GPU_NAME", device_name)).strip("_") or "unknown_gpu"


def use_tuned_kernels(root: Path = ROOT) -> Path | None:
    """Import FLA such that its kernels take their configurations from `root`/configs/fla/<this GPU>/.

    Call it before anything imports FLA, which fixes FLA's mode; a later call warns and changes nothing. Calling it
    again is free. It costs the import of FLA on a machine whose GPU has a folder, and nothing elsewhere.

    Returns:
        The folder in use, or None: no CUDA GPU, no folder for this one, FLA_CACHE_MODE=disabled, or too late.
    """
    global _in_use
    if _in_use is not None or not torch.cuda.is_available():
        return _in_use
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    shipped = Path(root) / "configs" / "fla" / gpu_folder(torch.cuda.get_device_name())
    if not ("FLA_CONFIG_DIR" in os.environ or shipped.is_dir()) or os.environ.get("FLA_CACHE_MODE") == "disabled":
        return None
    if "fla" in sys.modules:
        warnings.warn(
            f"FLA is imported already, so it will not read {shipped} and autotunes its kernels: "
            "call use_tuned_kernels() before anything that imports fla",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    os.environ.setdefault("FLA_CONFIG_DIR", str(shipped))
    os.environ.setdefault("FLA_CACHE_MODE", "fuzzy")
    import_fla()
    _in_use = Path(os.environ["FLA_CONFIG_DIR"])
    return _in_use


def import_fla() -> ModuleType:
    """Import FLA with `triton.autotune` replaced by FLA's config-reading one while its modules load, and only then.

    The module that holds the switch imports nothing of FLA, so it is loaded first, alone, under its own name.
    Returns it: fla.ops.utils.cache.
    """
    if "fla" in sys.modules:
        raise RuntimeError("fla is imported already: its kernels are decorated, import_fla() comes too late")
    package = importlib.util.find_spec("fla")
    if package is None:
        raise ModuleNotFoundError("fla is not installed: pip install flash-linear-attention==0.6.0")
    files = [Path(folder, "ops", "utils", "cache.py") for folder in package.submodule_search_locations]
    spec = importlib.util.spec_from_file_location(CACHE_MODULE, next(file for file in files if file.is_file()))
    cache = importlib.util.module_from_spec(spec)
    sys.modules[CACHE_MODULE] = cache
    try:
        spec.loader.exec_module(cache)
        cache.configure_fla_cache_autotune()
        try:
            importlib.import_module("fla.models")
        finally:
            cache.restore_autotune_backend()
    except BaseException:
        sys.modules.pop(CACHE_MODULE, None)
        raise
    sys.modules["fla.ops.utils"].cache = cache
    return cache
