"""dC as a sum over CHUNKS chunks of tokens in bf16, in bf16 with Kahan's compensation, in fp32: what each loses.

    python experiments/loss_heads/accumulation.py --shapes A B C --kinds trained confident

The other sum over calls, dE over slices of the vocabulary, stands in accuracy.md, as run.py measures it; cce/plans.py would not take
chunks for most of these. The error is that of the finished gradient against fp64, in the Frobenius norm; beside it stands the least
that a gradient in bf16 can have. Rows go to accumulation.jsonl, the table to accumulation.md, in results/loss_heads/<machine>/.
Needs a GPU, or TRITON_INTERPRET=1 and a tiny shape.
"""

import math
import sys
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from problems import Shape  # noqa: E402
from reference import reference, relative_error  # noqa: E402
from study import study  # noqa: E402
from torch import Tensor  # noqa: E402

from cce import operators  # noqa: E402
from cce.presets import Accumulation  # noqa: E402
from cce.targets import encode_targets  # noqa: E402
from training.results import markdown_table  # noqa: E402

CHUNKS = 8
GRANULE = 128  # tokens that a chunk is a multiple of


def gradient(e: Tensor, c: Tensor, codes: Tensor, accumulation: Accumulation) -> Tensor:
    """dC of the mean loss."""
    chunk = math.ceil(len(e) / CHUNKS / GRANULE) * GRANULE
    dloss = torch.tensor(1 / len(e), device=e.device)
    _, _, _, dc_VD = operators.one_pass(
        e, c, None, codes, dloss, None, 0.0, chunk, accumulation, False, True, e.dtype, c.dtype
    )
    return dc_VD


def errors(shape: Shape, e: Tensor, c: Tensor, targets: Tensor) -> list[dict]:
    """A row for each accumulation."""
    e, c = e.detach(), c.detach()
    truth = reference(e, c, targets)
    codes = encode_targets(targets, -100, 0, shape.vocabulary, False)
    return [
        {
            "accumulation": accumulation,
            "dc_error": relative_error(gradient(e, c, codes, accumulation), truth.dc),
            "dc_rounding": truth.dc_rounding,
        }
        for accumulation in get_args(Accumulation)
    ]


def table(rows: list[dict]) -> str:
    fp32 = {(row["shape"], row["kind"]): row["dc_error"] for row in rows if row["accumulation"] == "fp32"}
    shown = [
        {
            "shape": row["shape"],
            "softmax": row["kind"],
            "accumulation": row["accumulation"],
            "dC": row["dc_error"],
            "dC / fp32's": row["dc_error"] / fp32[row["shape"], row["kind"]],
            "fp64, rounded": row["dc_rounding"],
        }
        for row in rows
    ]
    columns = {
        "shape": "", "softmax": "", "accumulation": "", "dC": ".3e", "dC / fp32's": ".3f", "fp64, rounded": ".3e",
    }  # fmt: skip
    return (
        f"# dC as a sum over {CHUNKS} chunks of tokens: bf16 plain, bf16 with Kahan's compensation, fp32\n\n"
        "dC: relative error against fp64 in the Frobenius norm; fp64, rounded: that of the exact gradient in bf16.\n\n"
        + markdown_table(shown, columns)
    )


def obstacle(device: torch.device) -> str | None:
    if operators.runs_kernels(torch.empty(0, device=device)):
        return None
    return "no GPU here: chunks are walked by kernels (TRITON_INTERPRET=1 runs them on a CPU, slowly)"


if __name__ == "__main__":
    study("accumulation", __doc__, sys.argv[1:], ["trained"], obstacle, errors, table)
