"""The command line and the files of a study that asks the same of several problems: accumulation.py, cut_off.py."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import free_memory
from problems import KINDS, NAMED, Shape, check_problem, parse_shape, problem
from torch import Tensor

from training.provenance import machine, provenance
from training.results import read_rows, write_rows

ROOT = Path(__file__).resolve().parents[2]


def study(
    name: str,
    description: str,
    command_line: list[str],
    kinds: list[str],
    obstacle: Callable[[torch.device], str | None],
    measure: Callable[[Shape, Tensor, Tensor, Tensor], list[dict]],
    table: Callable[[list[dict]], str],
) -> None:
    """Rows to <name>.jsonl, their table to <name>.md, in results/loss_heads/<machine>/, after each problem.

    obstacle: why a device will not do. measure(shape, e, c, targets): rows of a problem, without what says of which. kinds: the
    default ones.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[*NAMED], metavar="SHAPE", help=f"{', '.join(NAMED)} or NxDxV")
    parser.add_argument("--kinds", nargs="+", default=kinds, metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the results (default: results/loss_heads/<machine>)")
    args = parser.parse_args(command_line)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        shapes = [parse_shape(text) for text in args.shapes]
        for shape in shapes:
            for kind in args.kinds:
                check_problem(shape, kind)
    except ValueError as error:
        parser.error(str(error))
    if reason := obstacle(device):
        parser.error(reason)
    folder = args.out or ROOT / "results" / "loss_heads" / machine()
    path = folder / f"{name}.jsonl"
    rows = read_rows(path) if path.exists() else []
    for shape in shapes:
        for kind in args.kinds:
            found = measure(shape, *problem(shape, kind, args.seed, device))
            free_memory(device)
            of = {"shape": shape.name, "kind": kind}
            source = provenance(args.seed)
            rows = [row for row in rows if (row["shape"], row["kind"]) != (shape.name, kind)]
            rows += [{**of, **row, "provenance": source} for row in found]
            write_rows(path, rows)
            (folder / f"{name}.md").write_text(table(rows))
            print(table([row for row in rows if (row["shape"], row["kind"]) == (shape.name, kind)]), flush=True)
