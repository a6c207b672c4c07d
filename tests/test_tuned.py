"""models/tuned.py and scripts/tune_fla.py: which folder is used when, and a file written by the one is read by FLA.

What needs a GPU runs in a process of stand_in_h200.py, where Triton compiles for an H200 and launches nothing.
"""

import importlib
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import models.tuned as tuned
import tune_fla

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = ROOT / "tests" / "stand_in_h200.py"
SHIPPED = sorted((ROOT / "configs" / "fla").glob("*/provenance.json"))
FLA_SETTINGS = ("FLA_CONFIG_DIR", "FLA_CACHE_MODE", "FLA_GPU_NAME", "TRITON_CACHE_AUTOTUNING")


def on_h200(what: str, folder: Path, **settings: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in (*FLA_SETTINGS, "TRITON_INTERPRET")}
    environment |= {"PYTHONPATH": str(ROOT / "scripts"), "OMP_NUM_THREADS": "1", **settings}
    command = [sys.executable, str(STAND_IN), what, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- writing and reading


@pytest.fixture(scope="module")
def tuned_root(tmp_path_factory) -> Path:
    """A root with configs/fla/NVIDIA_H200/ as scripts/tune_fla.py writes it."""
    root = tmp_path_factory.mktemp("root")
    settings = {"TRITON_CACHE_DIR": str(root / "triton"), "FLA_CACHE_MODE": "disabled"}
    on_h200("tune", root / "configs/fla/NVIDIA_H200", **settings)
    return root


def test_the_best_candidate_is_written(tuned_root):
    content = json.loads((tuned_root / "configs/fla/NVIDIA_H200/layer_norm_fwd_kernel.json").read_text())
    assert content["module"] == "fla.modules.norm.layernorm"
    (entry,) = content["autotune_entries"].values()
    # The candidates are BT in 32, 64, 128 by warps in 2, 4, 8: of 9, three evenly spread are tried; the second won.
    assert (entry["config"]["kwargs"], entry["config"]["num_warps"]) == ({"BT": 64}, 2)
    assert entry["best_timing"] == [1.0, 1.0, 1.0]
    assert entry["autotune_key"][:2] == [64, 1] and content["key_names"][:2] == ["D", "NB"]
    assert not list(tuned_root.rglob("*.partial"))


@pytest.mark.parametrize(
    "mode, other_size",
    [("fuzzy", {"BT": 64, "num_warps": 2}), ("strict", "autotuned")],
)
def test_fla_takes_the_written_configuration(tuned_root, mode, other_size):
    """Without a benchmark for an equal key; for other numbers in the default mode alone; for another dtype in none."""
    settings = {} if mode == "fuzzy" else {"FLA_CACHE_MODE": mode}
    out = on_h200("read", tuned_root, TRITON_CACHE_DIR=str(tuned_root / "triton"), **settings)
    result = json.loads(out.splitlines()[-1])
    assert result["folder"] == str(tuned_root / "configs/fla/NVIDIA_H200")
    assert result["chosen"]["equal"].items() >= {"BT": 64, "num_warps": 2}.items()
    if other_size == "autotuned":
        assert result["chosen"]["other size"] == "autotuned"
    else:
        assert result["chosen"]["other size"].items() >= other_size.items()
    assert result["chosen"]["other dtype"] == "autotuned"


def autotuner(module: str = "fla.a"):
    def some_kernel():
        pass

    some_kernel.__module__ = module
    return types.SimpleNamespace(base_fn=some_kernel, keys=["K", "HV", "FLAG"], arg_names=["q", "K", "HV", "FLAG"])


def test_a_fuzzy_match_finds_the_largest_head_first():
    from fla.ops.utils.cache import AutotuneKey, KernelConfigFile
    from triton import Config

    content = None
    for head in (64, 256, 128):
        config = Config({"BK": head}, num_warps=4)
        content = tune_fla.kernel_file(content, autotuner(), (head, 4, True, "torch.bfloat16"), config, [1.0])
    file = KernelConfigFile.from_dict(Path("some_kernel.json"), content)

    def lookup(*key):
        entry = file.lookup_exact(AutotuneKey(key)) or file.lookup_fuzzy(AutotuneKey(key))
        return entry and entry["config"]["kwargs"]["BK"]

    assert lookup(64, 4, True, "torch.bfloat16") == 64
    assert lookup(96, 8, True, "torch.bfloat16") == 256
    assert lookup(64, 4, False, "torch.bfloat16") is None
    # as large a head, tuned later: it is there, behind the first
    content = tune_fla.kernel_file(content, autotuner(), (256, 2, True, "torch.bfloat16"), Config({"BK": 16}), [1.0])
    file = KernelConfigFile.from_dict(Path("some_kernel.json"), content)
    assert lookup(256, 2, True, "torch.bfloat16") == 16 and lookup(96, 8, True, "torch.bfloat16") == 256
    # tuned again: the entry is replaced, not doubled
    content = tune_fla.kernel_file(content, autotuner(), (64, 4, True, "torch.bfloat16"), Config({"BK": 32}), [0.5])
    assert len(content["autotune_entries"]) == 4
    with pytest.raises(ValueError, match="two kernels are called some_kernel"):
        tune_fla.kernel_file(content, autotuner("fla.b"), (64, 4, True), Config({}), [1.0])


@pytest.mark.parametrize("provenance", SHIPPED, ids=lambda path: path.parent.name)
def test_shipped_files_are_what_fla_reads(provenance):
    """Every shipped file: FLA parses it, its keys carry FLA's hashes, and it fits the kernel of that name."""
    from fla.ops.utils.cache import AutotuneKey, KernelConfigFile

    runs = json.loads(provenance.read_text())["runs"]
    assert all(tuned.gpu_folder(run["gpu"]) == provenance.parent.name for run in runs.values())
    files = [path for path in provenance.parent.glob("*.json") if path != provenance]
    assert {path.stem for path in files} >= {kernel for run in runs.values() for kernel in run["kernels"]}
    for path in files:
        content = json.loads(path.read_text())
        parsed = KernelConfigFile.from_dict(path, content)
        kernel = getattr(importlib.import_module(content["module"]), path.stem)
        while not hasattr(kernel, "configs"):
            kernel = kernel.fn
        assert parsed.autotune_entries
        for digest, entry in parsed.autotune_entries.items():
            assert digest == AutotuneKey.key_hash(entry["autotune_key"])
            assert entry["config"]["kwargs"].keys() == kernel.configs[0].kwargs.keys()
            assert {"num_warps", "num_stages", "num_ctas"} <= entry["config"].keys()


# ---- compiling ahead


@pytest.fixture
def some_driver(monkeypatch):
    from triton.runtime.driver import driver

    monkeypatch.setattr(driver, "_active", types.SimpleNamespace(get_current_target=lambda: "some target"))


@pytest.mark.usefixtures("some_driver")
def test_jobs_run_side_by_side_and_report_what_stopped_them(tmp_path):
    def hang():
        subprocess.run(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60; true"])

    def fail():
        raise ValueError("no such layout")

    jobs = [lambda: (tmp_path / "ran").touch(), fail, hang, lambda: time.sleep(0.2)]
    outcomes = tune_fla.compile_in_processes(jobs, workers=4, timeout=2.0)
    assert outcomes == [None, "ValueError: no such layout", "timeout after 2 s", None]
    assert (tmp_path / "ran").exists()
    pid = (tmp_path / "pid").read_text().strip()
    state = Path(f"/proc/{pid}/stat")
    for _ in range(50):  # its parent is gone, so it is for init to bury
        if not state.exists() or state.read_text().split(") ")[1][0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the compiler's own child outlived it")


@pytest.mark.usefixtures("some_driver")
def test_one_slow_candidate_does_not_use_up_the_timeout():
    jobs = [lambda: time.sleep(60)] + [lambda: None] * 5
    start = time.monotonic()
    outcomes = tune_fla.compile_in_processes(jobs, workers=2, timeout=50.0)
    assert outcomes[0].startswith("timeout") and outcomes[1:] == [None] * 5
    assert time.monotonic() - start < 25, "it was to be stopped soon after the others had finished"


def test_threads_report_the_same():
    def fail():
        raise ValueError("no such layout")

    outcomes = tune_fla.compile_in_threads([lambda: None, fail, lambda: time.sleep(1.5)], workers=3, timeout=0.5)
    assert outcomes == [None, "no such layout", "timeout after 0 s"]


# ---- which folder, and when


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A root with a folder for the H200, no settings, FLA not imported; `gpu(name)` puts one into the machine."""
    (tmp_path / "configs" / "fla" / "NVIDIA_H200").mkdir(parents=True)
    # Set and deleted, so that what use_tuned_kernels sets is undone afterwards.
    for name in FLA_SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(tuned, "_in_use", None)
    imports = []
    monkeypatch.setattr(tuned, "import_fla", lambda: imports.append("fla"))
    monkeypatch.delitem(sys.modules, "fla", raising=False)

    def gpu(name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: name)

    return types.SimpleNamespace(root=tmp_path, folder=tmp_path / "configs/fla/NVIDIA_H200", gpu=gpu, imports=imports)


def test_the_folder_of_this_gpu_is_used(machine):
    machine.gpu("NVIDIA H200")
    assert tuned.use_tuned_kernels(machine.root) == machine.folder
    assert os.environ["FLA_CONFIG_DIR"] == str(machine.folder) and os.environ["FLA_CACHE_MODE"] == "fuzzy"
    assert os.environ["TRITON_CACHE_AUTOTUNING"] == "1"
    assert tuned.use_tuned_kernels(machine.root) == machine.folder and machine.imports == ["fla"]


@pytest.mark.parametrize("name", [None, "NVIDIA A100-SXM4-80GB"])
def test_without_a_folder_for_it_nothing_is_imported(machine, name):
    machine.gpu(name)
    assert tuned.use_tuned_kernels(machine.root) is None
    assert "FLA_CONFIG_DIR" not in os.environ and "FLA_CACHE_MODE" not in os.environ and not machine.imports


def test_a_setting_of_the_user_wins(machine, monkeypatch):
    machine.gpu("NVIDIA H200")
    monkeypatch.setenv("FLA_CONFIG_DIR", "/my/configs")
    monkeypatch.setenv("FLA_CACHE_MODE", "strict")
    assert tuned.use_tuned_kernels(machine.root) == Path("/my/configs")
    assert (os.environ["FLA_CONFIG_DIR"], os.environ["FLA_CACHE_MODE"]) == ("/my/configs", "strict")


def test_disabled_by_the_user(machine, monkeypatch):
    machine.gpu("NVIDIA H200")
    monkeypatch.setenv("FLA_CACHE_MODE", "disabled")
    assert tuned.use_tuned_kernels(machine.root) is None and not machine.imports


def test_too_late_is_said(machine, monkeypatch):
    machine.gpu("NVIDIA H200")
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    with pytest.warns(RuntimeWarning, match="FLA is imported already.*before anything that imports fla"):
        assert tuned.use_tuned_kernels(machine.root) is None
    assert "FLA_CONFIG_DIR" not in os.environ


def test_gpu_folder_is_flas_own_rule(monkeypatch):
    from fla.ops.utils import cache

    monkeypatch.delenv("FLA_GPU_NAME", raising=False)
    for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X (gfx942)", "--"):
        assert tuned.gpu_folder(name) == cache.sanitize_gpu_name(name)
    monkeypatch.setenv("FLA_GPU_NAME", "NVIDIA H100")
    assert tuned.gpu_folder("anything") == "NVIDIA_H100"

