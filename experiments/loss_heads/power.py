"""Joules, watts and clock of a step: what is bound by the GPU's power limit.

    python experiments/loss_heads/power.py --shapes A --kinds trained

At its power limit a GPU lowers its clock: then a step takes as long as its energy divided by that limit, and what counts is energy, not
idle tensor cores. Each thing is run back to back for SECONDS, after WARM_UP; energy is what NVML's counter of the GPU gained (it is
refreshed some tens of times a second). Rows go to power.jsonl, the table to power.md, in results/loss_heads/<machine>/. Needs an NVIDIA
GPU and `pip install nvidia-ml-py`.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from measuring import Sampling, free_memory, synchronize, times  # noqa: E402
from peers import CannotRun, entries, selected  # noqa: E402
from problems import Shape  # noqa: E402
from study import study  # noqa: E402
from torch import Tensor  # noqa: E402

from training.measure import Clock  # noqa: E402
from training.results import markdown_table  # noqa: E402

WARM_UP, SECONDS = 1.0, 3.0
BATCH_SECONDS = 0.1  # of runs that are issued before the host waits for them
PRODUCT = "logits product"
COMPILED, OURS = "standard torch.compile", "ours cce_exact"


class Meter:
    """NVML's counters of a GPU. ImportError without nvidia-ml-py; pynvml.NVMLError where the driver tells nothing."""

    def __init__(self, device: torch.device):
        import pynvml

        pynvml.nvmlInit()
        self.nvml = pynvml
        uuid = torch.cuda.get_device_properties(device).uuid
        self.gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.limit_watts = 1e-3 * pynvml.nvmlDeviceGetEnforcedPowerLimit(self.gpu)

    def joules(self) -> float:
        """Since the driver was loaded."""
        return 1e-3 * self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu)

    def clock_mhz(self) -> float:
        """Of the multiprocessors, now."""
        return self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM)


def drawn(run: Callable[[], object], meter: Meter, device: torch.device) -> dict:
    """Of one run: ms, watts, joules; and the median clock while the GPU works."""
    host = Clock(torch.device("cpu"))

    def repeat(seconds: float, batch: int) -> tuple[float, int, list[float]]:
        began, spent, count, clocks = host.mark(), 0.0, 0, []
        while spent < seconds:
            for _ in range(batch):
                run()
            clocks.append(meter.clock_mhz())
            synchronize(device)
            spent, count = 1e-3 * host.milliseconds(began, host.mark()), count + batch
        return spent, count, clocks

    milliseconds = statistics.median(times(run, device, Sampling(3, 0.0)))
    batch = max(1, round(1e3 * BATCH_SECONDS / milliseconds))
    repeat(WARM_UP, batch)
    before = meter.joules()
    spent, count, clocks = repeat(SECONDS, batch)
    joules = (meter.joules() - before) / count
    return {
        "ms": 1e3 * spent / count,
        "joules": joules,
        "watts": joules * count / spent,
        "clock_mhz": statistics.median(clocks),
        "limit_watts": meter.limit_watts,
    }


def energies(shape: Shape, e: Tensor, c: Tensor, targets: Tensor) -> Iterator[dict]:
    """A row for the logits product, for our forward pass without gradients (the log-sum-exp alone), for a step of the compiled
    standard loss and of ours at each budget of the benchmark."""
    device = e.device
    meter = Meter(device)

    def row(name: str, run: Callable[[], object]) -> dict:
        found = {"entry": name, **drawn(run, meter, device)}
        free_memory(device)
        return found

    e_ND, c_VD = e.detach(), c.detach()
    yield row(PRODUCT, partial(torch.mm, e_ND, c_VD.T, out=e_ND.new_empty(len(e), len(c))))
    for entry in selected(entries(shape, "trained", device), (COMPILED, OURS)):
        try:
            loss_of = entry.built(device).loss
        except CannotRun:
            continue

        def step(loss_of=loss_of) -> None:
            e.grad = c.grad = None
            loss_of(e, c, targets).backward()

        if entry.name == OURS:
            yield row(f"{entry.name}, no gradient", partial(loss_of, e_ND, c_VD, targets))
        yield row(entry.name, step)
    e.grad = c.grad = None


def table(rows: list[dict]) -> str:
    products = {(row["shape"], row["kind"]): row for row in rows if row["entry"] == PRODUCT}

    def shown(row: dict) -> dict:
        product = products[row["shape"], row["kind"]]
        return {
            "shape": row["shape"],
            "softmax": row["kind"],
            "entry": row["entry"],
            "ms": row["ms"],
            "J": row["joules"],
            "ms / product's": row["ms"] / product["ms"],
            "J / product's": row["joules"] / product["joules"],
            "W": row["watts"],
            "of limit": row["watts"] / row["limit_watts"],
            "MHz": row["clock_mhz"],
        }

    columns = {
        "shape": "", "softmax": "", "entry": "", "ms": ".2f", "J": ".2f", "ms / product's": ".2f", "J / product's": ".2f", "W": ".0f",
        "of limit": ".0%", "MHz": ".0f",
    }  # fmt: skip
    return (
        "# Energy of a step (forward and backward), power and clock\n\n"
        f"Runs back to back for {SECONDS:g} s. J: of one run; product: the logits product of the shape; of limit: watts over the\n"
        "power that the GPU may draw; MHz: median clock of the multiprocessors.\n\n"
        + markdown_table([shown(row) for row in rows], columns)
    )


def obstacle(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return "no NVIDIA GPU here: there is no power to measure"
    try:
        Meter(device).joules()
    except Exception as error:
        return f"no counter of this GPU (nvidia-ml-py reads it): {type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    study("power", __doc__, sys.argv[1:], ["trained"], obstacle, energies, table)
