"""Tune FLA's kernels for this machine's GPU: writes configs/fla/<GPU>/<kernel>.json, which models/tuned.py loads.

    python scripts/tune_fla.py --models gla gated_deltanet kda --size 1.3b --batch 8 --seq-len 2048

One training step (and one evaluation) of each model runs with Triton's autotuner changed in three places: the
candidates of a kernel are compiled side by side, one forked process each, into Triton's cache before any is timed; a
candidate that takes longer than --compile-timeout is dropped; and timing takes 5 + 20 ms a candidate instead of 25 +
100. Each kernel's file is written as soon as its best candidate is known, so a run that is cut keeps what it has; the
same command goes on from Triton's cache.

The dtypes of parameters and products belong to a kernel's key and come from the training config (train.param_dtype,
train.autocast):
    python scripts/tune_fla.py --models gla --size mve --batch 64 --seq-len 1024 --set train.param_dtype=bfloat16
What was run, where and when goes to provenance.json beside the kernels' files; FLA opens only files named after a
kernel.
"""

import argparse
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from training.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
WARMUP_MS, REPEAT_MS = 5, 20
SIZE_KEYS = ("K", "V", "D", "S")  # the key names that shared memory grows with


# ---- the files


def kernel_file(existing: dict | None, autotuner: Autotuner, key: tuple, config: Config, times_ms: list[float]) -> dict:
    """The content of <kernel>.json with one more entry, in the format that FLA's KernelConfigFile reads.

    Entries for larger head dimensions come first, among equals the one tuned first: a fuzzy match takes the first, and
    what fits a large head in shared memory fits a small one.
    `module`, `key_names` and `best_timing` (ms: median, 20 %, 80 %) are for people; FLA passes over them.
    """
    from fla.ops.utils.cache import AutotuneKey
    from triton import __version__

    name, module = autotuner.base_fn.__name__, autotuner.base_fn.__module__
    if existing is not None and existing["module"] != module:
        raise ValueError(f"two kernels are called {name} ({existing['module']}, {module}): FLA keeps one file per name")
    settings = {
        "kwargs": dict(config.kwargs),
        "num_warps": config.num_warps,
        "num_ctas": config.num_ctas,
        "num_stages": config.num_stages,
        "maxnreg": config.maxnreg,
        "ir_override": config.ir_override,
    }
    names = [n for n in autotuner.keys if n in autotuner.arg_names]
    entries = dict(existing["autotune_entries"]) if existing else {}
    entries[AutotuneKey.key_hash(key)] = {"autotune_key": list(key), "config": settings, "best_timing": list(times_ms)}

    def head_size(entry: dict) -> int:
        values = dict(zip(names, entry["autotune_key"]))
        return math.prod(values[n] for n in SIZE_KEYS if isinstance(values.get(n), int))

    entries = dict(sorted(entries.items(), key=lambda item: -head_size(item[1])))
    default = next(iter(entries.values()))["config"]
    return {
        "kernel_name": name,
        "module": module,
        "triton_version": __version__,
        "key_names": names,
        "default_config": default,
        "autotune_entries": entries,
    }


def write_json(path: Path, content: dict) -> None:
    """Atomic: a reader, or a cut run, never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def read_json(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.is_file() else None


def check_reads_back(path: Path, key: tuple, config: Config) -> None:
    """FLA's own reader must find this entry for this key, in a file read anew."""
    from fla.ops.utils.cache import AutotuneKey, KernelConfigFile

    found = KernelConfigFile.from_dict(path, json.loads(path.read_text())).lookup_exact(AutotuneKey(autotune_key=key))
    if found is None or found["config"]["kwargs"] != config.kwargs or found["config"]["num_warps"] != config.num_warps:
        raise RuntimeError(f"{path.name}: FLA's reader finds {found} for {key}, written was {config}")


# ---- compiling candidates side by side


class FixedTarget:
    """Triton's driver for a forked compiler: the target is known, so CUDA, which a fork must not use, is not asked."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0


def compile_in_processes(jobs: list[Callable], workers: int, timeout: float) -> list[str | None]:
    """Run each job in a fork of this process; None where it finished, else what stopped it.

    A fork has the kernel and its arguments at hand without pickling, and can be killed with its ptxas. What it compiles
    reaches this process through Triton's cache on disk. Once half of the jobs have finished, the rest get 8 times their
    median (3 s at least), so that one candidate does not hold up a kernel for the whole timeout.
    """
    fixed = FixedTarget(driver.active.get_current_target())
    outcomes: list[str | None] = ["not started"] * len(jobs)
    running: dict[int, tuple[int, float, int]] = {}  # pid → job, start, pipe
    finished: list[float] = []
    waiting = list(range(len(jobs)))[::-1]
    sys.stdout.flush()
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop()
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                compile_and_exit(jobs[job], fixed, writer, timeout)
            os.close(writer)
            running[pid] = (job, time.monotonic(), reader)
        limit = timeout
        if len(finished) >= max(4, len(jobs) / 2):
            limit = min(timeout, max(3.0, 8 * statistics.median(finished)))
        for pid, (job, start, reader) in list(running.items()):
            seconds = time.monotonic() - start
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and seconds <= limit:
                continue
            if not done:
                kill_session(pid)
                os.waitpid(pid, 0)
                outcomes[job] = f"timeout after {seconds:.0f} s"
            elif status == 0:
                finished.append(seconds)
                outcomes[job] = None
            else:
                outcomes[job] = os.read(reader, 400).decode(errors="replace") or f"process ended with status {status}"
            os.close(reader)
            del running[pid]
        time.sleep(0.005)
    return outcomes


def compile_and_exit(job: Callable, fixed: FixedTarget, writer: int, timeout: float) -> None:
    """The forked side. It ends by _exit and without garbage collection: no destructor of a CUDA object may run here."""
    status = 1
    try:
        gc.disable()
        os.setsid()
        signal.alarm(int(timeout) + 10)  # should the parent be killed
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        driver.set_active(fixed)
        job()
        status = 0
    except BaseException as error:
        os.write(writer, f"{type(error).__name__}: {error}"[:300].encode())
    finally:
        os._exit(status)


def kill_session(pid: int) -> None:
    """The compiler and the ptxas that it may be waiting for."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def compile_in_threads(jobs: list[Callable], workers: int, timeout: float) -> list[str | None]:
    """The same without fork: most of Triton's passes and ptxas run outside the GIL. What overruns is left running."""
    pool = ThreadPoolExecutor(workers)
    futures = [pool.submit(job) for job in jobs]
    in_time = wait(futures, timeout=timeout * max(1, math.ceil(len(jobs) / workers))).done
    pool.shutdown(wait=False, cancel_futures=True)
    errors = [future.exception() if future in in_time else f"timeout after {timeout:.0f} s" for future in futures]
    return [None if error is None else str(error)[:300] for error in errors]


# ---- the changed autotuner


class TuningRun:
    """Triton's autotuner while a model is tuned: compiles ahead, times briefly, writes what it chose.

    Args:
        folder: where <kernel>.json go.
        options: workers, compile_timeout, max_candidates, as on the command line.
        note: called after each kernel with `kernels`, what provenance.json says of them.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, note: Callable[[dict], None]):
        self.folder, self.options, self.note = folder, options, note
        self.compile_jobs = compile_in_processes
        self.compiled: dict[str, tuple[int, list[str], float]] = {}  # kernel → candidates, why dropped, seconds
        self.kernels: dict[str, list[dict]] = {}
        self.original = {
            (Autotuner, "prune_configs"): Autotuner.prune_configs,
            (Autotuner, "run"): Autotuner.run,
            (Autotuner, "do_bench"): Autotuner.do_bench,
            (JITFunction, "_do_compile"): JITFunction._do_compile,
        }

    def __enter__(self):
        tuning, prune, run = self, Autotuner.prune_configs, Autotuner.run

        def prune_configs(autotuner, kwargs):
            return tuning.compile_candidates(autotuner, kwargs, tuning.bounded(prune(autotuner, kwargs)))

        def run_and_write(autotuner, *args, **kwargs):
            known, start = set(autotuner.cache), time.monotonic()
            result = run(autotuner, *args, **kwargs)
            for key in autotuner.cache.keys() - known:
                tuning.write(autotuner, key, time.monotonic() - start)
            return result

        def brief(kernel_call, quantiles):
            return driver.active.get_benchmarker()(kernel_call, warmup=WARMUP_MS, rep=REPEAT_MS, quantiles=quantiles)

        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        triton_key()  # hashes Triton's installation, once, for all forks
        Autotuner.prune_configs, Autotuner.run, Autotuner.do_bench = prune_configs, run_and_write, staticmethod(brief)
        return self

    def __exit__(self, *exception):
        for (owner, name), function in self.original.items():
            setattr(owner, name, function)

    def bounded(self, configs: list[Config]) -> list[Config]:
        """At most max_candidates of them, spread evenly over the list."""
        n = self.options.max_candidates
        return configs if not n or len(configs) <= n else [configs[i * len(configs) // n] for i in range(n)]

    def compile_candidates(self, autotuner: Autotuner, kwargs: dict, configs: list[Config]) -> list[Config]:
        """The candidates that compiled, each now in Triton's cache on disk."""
        start = time.monotonic()
        name, args = autotuner.base_fn.__name__, list(autotuner.nargs.values())
        jobs = [self.compile_job(autotuner, args, kwargs, config) for config in configs]
        wanted = [i for i, job in enumerate(jobs) if job is not None]
        outcomes: list[str | None] = [None] * len(configs)
        compiled = self.compile_jobs([jobs[i] for i in wanted], self.options.workers, self.options.compile_timeout)
        for i, outcome in zip(wanted, compiled):
            outcomes[i] = outcome
        ready = [config for config, outcome in zip(configs, outcomes) if outcome is None]
        dropped = [f"{config}: {outcome}" for config, outcome in zip(configs, outcomes) if outcome is not None]
        if not ready and self.compile_jobs is compile_in_processes:
            print(f"{name}: no candidate compiled in a fork ({outcomes[0]}); threads from here on", flush=True)
            self.compile_jobs = compile_in_threads
            return self.compile_candidates(autotuner, kwargs, configs)
        if not ready:
            raise RuntimeError(f"{name}: none of {len(configs)} candidates compiled (--compile-timeout?): {dropped[0]}")
        self.compiled[name] = (len(configs), dropped, time.monotonic() - start)
        return ready

    def compile_job(self, autotuner: Autotuner, args: list, kwargs: dict, config: Config) -> Callable | None:
        """The compilation that a launch with this candidate would do, or None where the kernel is loaded already.

        JITFunction.run with warmup=True stops at _do_compile; there the arguments of the compilation are taken, and the
        None that is returned means 'no kernel, launch nothing'.
        """
        taken = []
        compile_now = self.original[JITFunction, "_do_compile"]
        JITFunction._do_compile = lambda function, *job: taken.append((function, *job))
        try:
            autotuner.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})
        finally:
            JITFunction._do_compile = compile_now
        return (lambda: compile_now(*taken[0])) if taken else None

    def write(self, autotuner: Autotuner, key: tuple, seconds: float) -> None:
        name, config = autotuner.base_fn.__name__, autotuner.cache[key]
        candidates, dropped, compile_seconds = self.compiled.get(name, (len(autotuner.configs), [], 0.0))
        times_ms = autotuner.configs_timings[config]
        times_ms = list(times_ms) if isinstance(times_ms, (list, tuple)) else [times_ms]
        if not math.isfinite(times_ms[0]):
            raise RuntimeError(f"{name}: none of {candidates} candidates ran (key {key})")
        path = self.folder / f"{name}.json"
        write_json(path, kernel_file(read_json(path), autotuner, key, config, times_ms))
        check_reads_back(path, key, config)
        self.kernels.setdefault(name, []).append(
            dict(candidates=candidates, dropped=dropped, compile_s=round(compile_seconds, 1), total_s=round(seconds, 1))
        )
        self.note(self.kernels)
        print(
            f"{name}: {candidates} candidates, {len(dropped)} dropped, compiled in {compile_seconds:.1f} s, "
            f"timed in {seconds - compile_seconds:.1f} s: {times_ms[0]:.3f} ms with {config}",
            flush=True,
        )


# ---- the models


def one_step(cfg, device: torch.device) -> None:
    """Forward and backward of the decoder, as scripts/training/loop.py runs it, then a forward as in validation."""
    from models import build_model, final_hidden

    dtype = cfg.train.autocast
    autocast = torch.autocast(device.type, dtype=dtype and getattr(torch, dtype), enabled=dtype is not None)
    model = build_model(
        cfg.model,
        cfg.size,
        vocab_size=cfg.vocab_size,
        max_seq_len=cfg.train.seq_len,
        dtype=getattr(torch, cfg.train.param_dtype),
        device=device,
    )
    inputs = torch.randint(cfg.vocab_size, (cfg.train.batch_size, cfg.train.seq_len), device=device)
    model.train()
    with autocast:
        hidden = final_hidden(model, inputs)
    hidden.backward(torch.randn_like(hidden))
    model.eval()
    with autocast, torch.no_grad():
        final_hidden(model, inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()


def training_config(model: str, options: argparse.Namespace):
    from hydra import compose, initialize_config_dir

    import training.config  # noqa: F401  (registers the resolvers that configs/ uses)

    shape = [f"train.batch_size={options.batch}", f"train.seq_len={options.seq_len}"]
    shape += ["vocab_size=1024"]  # the decoder does not depend on V: a small one saves the time to fill the embeddings
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose(config_name="train", overrides=[f"model={model}", f"size={options.size}", *shape, *options.set])


def tune(model: str, options: argparse.Namespace, folder: Path, device: torch.device) -> None:
    cfg = training_config(model, options)
    start = time.monotonic()
    name = " ".join([f"{model} {options.size} B={options.batch} T={options.seq_len}", *options.set])
    record = {**provenance(), "param_dtype": cfg.train.param_dtype, "autocast": cfg.train.autocast, "finished": False}

    def note(kernels: dict) -> None:
        record.update(seconds=round(time.monotonic() - start, 1), kernels=kernels)
        runs = (read_json(folder / "provenance.json") or {"runs": {}})["runs"]
        write_json(folder / "provenance.json", {"runs": {**runs, name: record}})

    with TuningRun(folder, options, note) as tuning:
        one_step(cfg, device)
    record["finished"] = True
    note(tuning.kernels)
    print(f"tune_fla: {name}: {len(tuning.kernels)} kernels in {record['seconds']} s → {folder}", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gla", "gated_deltanet", "kda"], help="names of configs/model")
    parser.add_argument("--size", default="1.3b", help="a name of configs/size")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of configs/train.yaml")
    parser.add_argument("--max-candidates", type=int, help="at most so many candidates a kernel (default: all)")
    parser.add_argument("--compile-timeout", type=float, default=20.0, help="seconds a candidate may compile")
    parser.add_argument("--model-timeout", type=float, default=240.0, help="seconds a model may take; its files stay")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="compilations at a time")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    if not torch.cuda.is_available():
        print("tune_fla: PyTorch sees no GPU; kernels are tuned on the GPU that they are for", file=sys.stderr)
        return 2
    os.environ["FLA_CACHE_MODE"] = "disabled"  # tune anew, whatever is shipped; FLA reads it when it is imported
    if len(options.models) == 1:
        from models.tuned import gpu_folder

        folder = ROOT / "configs" / "fla" / gpu_folder(torch.cuda.get_device_name())
        tune(options.models[0], options, folder, torch.device("cuda"))
        sys.stdout.flush()
        os._exit(0)  # a thread that still compiles a dropped candidate must not hold up the exit
    failed = []
    for model in options.models:
        # A process each: a candidate that breaks the CUDA context, or a model that hangs, costs that model only.
        command = [sys.executable, *sys.argv, "--models", model]  # of an option given twice, argparse takes the last
        try:
            if subprocess.run(command, timeout=options.model_timeout).returncode:
                failed.append(model)
        except subprocess.TimeoutExpired:
            print(f"tune_fla: {model} stopped after {options.model_timeout:.0f} s (--model-timeout)", file=sys.stderr)
            failed.append(model)
    if failed:
        print(f"tune_fla: not finished: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
