"""The one timer and the one memory probe of this repository; every experiment and benchmark uses them.

Timer: `Clock.mark()` puts a mark on the device's own time line (a CUDA event; on a CPU the host's clock), and
`Clock.milliseconds(a, b)` is the time between two marks, idle gaps included. Marks do not stop the device; reading does.

Memory: `MemoryProbe.reset()` opens a window and `MemoryProbe.peak()` is the highest memory in it, in MiB:
on CUDA the allocator's peak (torch.cuda.max_memory_allocated / _reserved); on a CPU, where PyTorch counts nothing, the
peak resident set of the process (VmHWM; Linux resets it through /proc/self/clear_refs), the same number for both.
"""

import os
import time
from pathlib import Path

import torch

MIB = 2**20

# Dense bf16 tensor-core peak in FLOP/s, from the vendors' data sheets; MFU is given for these only.
PEAK_FLOPS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "B200": 2250e12, "GB200": 2250e12}

Mark = float | torch.cuda.Event


class Clock:
    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"

    def mark(self) -> Mark:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Mark, end: Mark) -> float:
        if not self.on_cuda:
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


class MemoryProbe:
    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"

    def reset(self) -> None:
        """Open a new window: forget the peak."""
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> float:
        """MiB allocated (CUDA) or resident (CPU) at this moment."""
        return allocator("allocated_bytes", "current") if self.on_cuda else resident_mib("VmRSS")

    def peak(self) -> tuple[float, float]:
        """(allocated, reserved): the peaks in MiB since the last reset."""
        if self.on_cuda:
            return allocator("allocated_bytes", "peak"), allocator("reserved_bytes", "peak")
        return (resident_mib("VmHWM"),) * 2


def allocator(kind: str, value: str) -> float:
    """One number of the CUDA allocator in MiB: what torch.cuda.max_memory_allocated reads, without its flat dictionary of all
    statistics: this is read several times a step."""
    return torch.cuda.memory_stats_as_nested_dict()[kind]["all"][value] / MIB


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this needs Linux")


def seconds_since_start() -> float:
    """Seconds since this process was created, interpreter start and imports included (Linux)."""
    started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - started_ticks / os.sysconf("SC_CLK_TCK")


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of this GPU in FLOP/s, None where PEAK_FLOPS does not list it (and on a CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name.split()), None)
