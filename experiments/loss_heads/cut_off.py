"""What tensor cores cut off from logits, what the loss loses by it, and what makes up for it.

    python experiments/loss_heads/cut_off.py --shapes A C --kinds trained confident

Logits are made by torch.mm in bf16 with fp32 sums, twice: through the hidden dimension forward, and backward by blocks of 64. The
loss that is formed of them in fp64 is compared with that of logits in fp64, step by step to what cce/kernels does:

as made            forward, the target's logit among the others
target apart       its logit from exact sums
both directions    and every other tile of 256 classes backward
gain               and all logits times 1 + D / 64 · 2^-24 (cce/tiles.py: sum_gain)

lost: by how much logits are too small, in units of that gain: least squares over all logits, both directions; 0 where sums are rounded
to nearest. Rows go to cut_off.jsonl, the table to cut_off.md, in results/loss_heads/<machine>/. Needs a GPU. Takes the first TOKENS
tokens of a problem.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from problems import KINDS, Shape  # noqa: E402
from reference import nll  # noqa: E402
from study import study  # noqa: E402
from torch import Tensor  # noqa: E402

from cce.tiles import sum_gain  # noqa: E402
from training.results import markdown_table  # noqa: E402

TOKENS = 4096
AT_ONCE = 256  # tokens whose logits are in memory in fp64
DEPTH, CLASSES = 64, 256  # of a step and of a tile of the kernels
STEPS = ("as made", "target apart", "both directions", "gain")


def errors(shape: Shape, e: Tensor, c: Tensor, targets: Tensor) -> list[dict]:
    """One row: the relative error of the loss at each of STEPS, and what is lost."""
    e, c = e.detach()[:TOKENS], c.detach()
    backward = torch.cat(torch.arange(shape.hidden, device=e.device).split(DEPTH)[::-1])
    e_back, c_back, c_exact = e[:, backward].contiguous(), c[:, backward].contiguous(), c.double()
    odd_V = torch.arange(shape.vocabulary, device=e.device) // CLASSES % 2 == 1
    unit = sum_gain(shape.hidden) - 1
    total, exact = dict.fromkeys(STEPS, 0.0), 0.0
    product, square = 0.0, 0.0
    for start in range(0, len(e), AT_ONCE):
        here = slice(start, start + AT_ONCE)
        targets_n1 = targets[here, None]
        z = e[here].double() @ c_exact.T
        forth = torch.mm(e[here], c.T, out_dtype=torch.float32).double()
        back = torch.mm(e_back[here], c_back.T, out_dtype=torch.float32).double()
        both = torch.where(odd_V, back, forth)
        product += ((z - (forth + back) / 2) * z).sum()
        square += z.square().sum()
        own = z.gather(1, targets_n1)
        exact += nll(z, own, targets_n1).sum()
        total["as made"] += nll(forth, forth.gather(1, targets_n1), targets_n1).sum()
        total["target apart"] += nll(forth, own, targets_n1).sum()
        total["both directions"] += nll(both, own, targets_n1).sum()
        total["gain"] += nll(both * (1 + unit), own, targets_n1).sum()
    row = {step: float(total[step] / exact - 1) for step in STEPS}
    return [{**row, "lost": float(product / square) / unit}]


def table(rows: list[dict]) -> str:
    shown = [{"softmax": row["kind"], **row} for row in rows]
    columns = {"shape": "", "softmax": "", **dict.fromkeys(STEPS, "+.1e"), "lost": ".2f"}
    return (
        "# What tensor cores cut off: relative error of the loss\n\n"
        f"Steps: experiments/loss_heads/cut_off.py. The first {TOKENS} tokens; lost: in units of the gain.\n\n"
        + markdown_table(shown, columns)
    )


def obstacle(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "no GPU here: the question is what its tensor cores do"


if __name__ == "__main__":
    study("cut_off", __doc__, sys.argv[1:], [*KINDS], obstacle, errors, table)
