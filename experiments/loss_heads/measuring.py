"""Time, memory and error of one entry on one problem, with the timer and the probe of training/measure.py.

A timed run is: gradients set to None, L2 overwritten (on a GPU: FLUSH_BYTES of zeros, so that no run finds its inputs there,
at any shape), mark, call, mark. Runs are issued back to back; the host waits only when the marks are read. Memory is
measured in separate calls after the first, so that what a library compiles or autotunes is in neither number.
"""

import ctypes
import gc
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peers import CannotRun, Entry, Loss
from problems import Shape
from reference import Reference, relative_error
from torch import Tensor

from training.measure import MIB, Clock, MemoryProbe, peak_flops

FLUSH_BYTES = 256 * MIB
WARM_UP = 2
HOST_RUNS = 7
MOST = 5  # times the least number of samples: where a run is short


@dataclass(frozen=True)
class Sampling:
    """At least `least` timed runs of a thing, and more until `seconds` are spent, up to MOST · least."""

    least: int
    seconds: float


class DeviceLost(RuntimeError):
    """A failed kernel took the CUDA context with it; its argument is the status and reason of the row."""


def warm_up(device: torch.device) -> None:
    """One small product forward and backward: cuBLAS takes its workspaces, which live on, before anything is measured."""
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    synchronize(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:  # what malloc keeps would stand before and hide a peak
        ctypes.CDLL(None).malloc_trim(0)


def times(run: Callable[[], object], device: torch.device, sampling: Sampling, before=lambda: None) -> list[float]:
    """Milliseconds of each timed run; `before` is called before each, outside of its time."""
    clock = Clock(device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def timed():
        before()
        if flush is not None:
            flush.zero_()
        start = clock.mark()
        run()
        return start, clock.mark()

    for _ in range(WARM_UP):
        warm = clock.milliseconds(*timed())
    count = min(MOST * sampling.least, max(sampling.least, int(1e3 * sampling.seconds / warm)))
    marks = [timed() for _ in range(count)]
    return [clock.milliseconds(*pair) for pair in marks]


def host_times(run: Callable[[], object], device: torch.device, before: Callable[[], None]) -> list[float]:
    """Milliseconds that the host takes to issue each of HOST_RUNS runs, the device idle at its start."""
    clock = Clock(torch.device("cpu"))
    found = []
    for _ in range(HOST_RUNS):
        before()
        synchronize(device)
        start = clock.mark()
        run()
        found.append(clock.milliseconds(start, clock.mark()))
    synchronize(device)
    return found


def gemm_ms(e_ND: Tensor, c_VD: Tensor, sampling: Sampling) -> float:
    """The unit: median milliseconds of the logits product into memory that is there."""
    e_ND, c_VD = e_ND.detach(), c_VD.detach()
    logits_NV = e_ND.new_empty(len(e_ND), len(c_VD))
    return statistics.median(times(lambda: torch.mm(e_ND, c_VD.T, out=logits_NV), e_ND.device, sampling))


def beyond_mib(run: Callable[[], object], device: torch.device, results: Callable[[], int]) -> float:
    """Peak memory of `run` in MiB, less what stood before and less the bytes that `results` counts after it."""
    probe = MemoryProbe(device)
    free_memory(device)
    synchronize(device)
    before = probe.now()
    probe.reset()
    kept = run()  # noqa: F841  the loss is alive at the peak of a training step too
    synchronize(device)
    return probe.peak()[0] - before - results() / MIB


def quartiles(values: list[float]) -> list[float]:
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def measure(
    entry: Entry, shape: Shape, e: Tensor, c: Tensor, targets: Tensor, truth: Reference, sampling: Sampling
) -> dict:
    """The measured part of a row (rows.py), or its status and reason; DeviceLost where nothing more can be measured."""
    device = e.device
    free_memory(device)
    try:
        built = entry.built(device)
        row = {"implementation": built.version, "status": "measured"}
        return row | _measured(built.loss, shape, e, c, targets, truth, sampling)
    except CannotRun as error:
        return {"status": "cannot run", "reason": in_one_line(error)}
    except Exception as error:
        failure = {"status": "failed", "reason": f"{type(error).__name__}: {in_one_line(error)}"}
        try:
            synchronize(device)
        except RuntimeError:
            raise DeviceLost(failure) from error
        return failure
    finally:
        e.grad = c.grad = None


def in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or "no message"


def _measured(
    loss_of: Loss, shape: Shape, e: Tensor, c: Tensor, targets: Tensor, truth: Reference, sampling: Sampling
) -> dict:
    device = e.device

    def forget() -> None:
        e.grad = c.grad = None

    def step() -> Tensor:
        loss = loss_of(e, c, targets)
        loss.backward()
        return loss

    @torch.no_grad()
    def forward() -> Tensor:
        return loss_of(e, c, targets)

    host, probe = Clock(torch.device("cpu")), MemoryProbe(device)
    unit = gemm_ms(e, c, sampling)
    free_memory(device)
    stood = probe.now()

    start = host.mark()
    loss = step().item()
    synchronize(device)
    first_call_s = 1e-3 * host.milliseconds(start, host.mark())
    errors = {
        "loss": loss,
        "loss_rel_error": abs(loss - truth.loss) / truth.loss,
        "de_error": relative_error(e.grad, truth.de),
        "dc_error": relative_error(c.grad, truth.dc),
    }
    wrong = [name for name, value in errors.items() if not math.isfinite(value)]
    if wrong:
        raise ArithmeticError(f"{', '.join(wrong)} not finite")
    forget()
    forward()

    step_beyond = beyond_mib(step, device, lambda: e.grad.nbytes + c.grad.nbytes)
    forget()
    forward_beyond = beyond_mib(forward, device, lambda: 0)
    forward_times = times(forward, device, sampling)
    step_times = times(step, device, sampling, before=forget)
    host_ms = statistics.median(host_times(step, device, forget)) if device.type == "cuda" else None
    forget()
    free_memory(device)

    forward_ms, step_ms = statistics.median(forward_times), statistics.median(step_times)
    peak = peak_flops(device)
    product_ms_at_peak = None if peak is None else 1e3 * shape.product_flops / peak
    return {
        "gemm_ms": unit,
        "forward_ms": forward_ms,
        "step_ms": step_ms,
        "forward_quartiles_ms": quartiles(forward_times),
        "step_quartiles_ms": quartiles(step_times),
        "forward_samples": len(forward_times),
        "step_samples": len(step_times),
        "host_ms": host_ms,
        "first_call_s": first_call_s,
        "forward_gemms": forward_ms / unit,
        "step_gemms": step_ms / unit,
        **{
            f"share_{2 * products}ndv_of_{name}": None if product_ms is None else products * product_ms / step_ms
            for products in (3, 4)
            for name, product_ms in (("gemm", unit), ("peak", product_ms_at_peak))
        },
        "beyond_mib": step_beyond,
        "forward_beyond_mib": forward_beyond,
        "kept_mib": probe.now() - stood,
        **errors,
    }
