"""Where our loss spends its time, kernel by kernel, once the GPU is warm: results/loss_heads/<machine>/kernels.jsonl and .md.

    python experiments/loss_heads/trace_kernels.py --shape A --budgets default 1536

A torch.profiler trace of STEPS steps (forward and backward) after WARM_UP ones. Rows: kernel, calls and milliseconds a step, and
for the products TFLOP/s: each of our logits kernels computes 2·N·D·V operations a step, or twice that where it makes a gradient
of them, too; the vendor's products together the 4·N·D·V of dE and dC.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from problems import Shape, parse_shape, problem  # noqa: E402
from run import budget  # noqa: E402
from torch import Tensor  # noqa: E402

import cce  # noqa: E402
from cce.presets import IMPLS  # noqa: E402
from training.provenance import machine, provenance  # noqa: E402
from training.results import markdown_table, read_rows, write_rows  # noqa: E402

STEPS, WARM_UP, SEED = 10, 40, 0
VENDOR = "products of the vendor's library"
# What each computes a step, in units of a product N x D x V.
PRODUCTS = {
    "_log_sum_exp_kernel": 1,
    "_exponentials_kernel": 1,
    "_logit_gradient_kernel": 1,
    "_hidden_product_kernel": 2,
    "_vocabulary_gradient_kernel": 2,
    VENDOR: 2,
}


def kernel_name(name: str) -> str:
    """The vendor's kernels under one name, PyTorch's own without their template arguments."""
    if re.search(r"nvjet|gemm|cutlass|splitKreduce", name):
        return VENDOR
    return re.sub(r"<.*", "", name).removeprefix("void ").rsplit("::", 1)[-1]


def summary(events: Iterable[tuple[str, float]], steps: int, shape: Shape) -> list[dict]:
    """Rows, longest first, from (kernel, microseconds) of every launch in `steps` steps."""
    totals: dict[str, list[float]] = {}
    for name, microseconds in events:
        total = totals.setdefault(kernel_name(name), [0, 0.0])
        total[0] += 1
        total[1] += microseconds
    rows = []
    for name, (calls, microseconds) in sorted(totals.items(), key=lambda item: -item[1][1]):
        flops = shape.product_flops * PRODUCTS.get(name, 0)
        ms = microseconds / 1e3 / steps
        tflops = flops / ms / 1e9 if flops else None
        rows.append({"kernel": name, "calls": calls / steps, "ms": ms, "tflops": tflops})
    return rows


def trace(shape: Shape, e: Tensor, c: Tensor, targets: Tensor, impl: str, workspace_mib: float | None) -> list[dict]:
    def step() -> None:
        e.grad = c.grad = None
        cce.linear_cross_entropy(e, c, targets, impl=impl, workspace_mib=workspace_mib).backward()

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    on_gpu = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return summary(((event.name, event.device_time) for event in on_gpu), STEPS, shape)


def main(command_line: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="A", help="A, B, C or NxDxV")
    parser.add_argument("--impl", default="cce_exact", choices=[name for name in IMPLS if name != "torch_compile"])
    parser.add_argument("--budgets", nargs="+", type=budget, default=[None], metavar="MIB", help="'default' or MiB")
    args = parser.parse_args(command_line)
    try:
        shape = parse_shape(args.shape)
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("no GPU here: there are no kernels to trace")
    folder = ROOT / "results" / "loss_heads" / machine()
    path = folder / "kernels.jsonl"
    source = provenance(SEED)
    tensors = problem(shape, "trained", SEED, torch.device("cuda"))
    made = []
    for workspace_mib in args.budgets:
        of = {"shape": shape.name, "impl": args.impl, "workspace_mib": workspace_mib}
        made += [{**of, **row, "provenance": source} for row in trace(shape, *tensors, args.impl, workspace_mib)]
    keys = ("shape", "impl", "workspace_mib")
    again = {tuple(row[key] for key in keys) for row in made}
    kept = [row for row in read_rows(path) if tuple(row[key] for key in keys) not in again] if path.exists() else []
    write_rows(path, kept + made)
    text = ["# Kernels of our loss, per step (forward and backward), GPU warm\n"]
    for run in dict.fromkeys(tuple(row[key] for key in keys) for row in kept + made):
        rows = [row for row in kept + made if tuple(row[key] for key in keys) == run]
        name, impl, workspace_mib = run
        text.append(
            f"## {name}, {impl}, workspace {'default' if workspace_mib is None else f'{workspace_mib:g} MiB'}\n"
        )
        text.append(markdown_table(rows, {"kernel": "", "calls": ",.0f", "ms": ".3f", "tflops": ".0f"}))
    (folder / "kernels.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main(sys.argv[1:])
