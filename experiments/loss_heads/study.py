"""The command line and the files of a study that asks the same of several problems: accumulation.py, cut_off.py, power.py."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from measuring import free_memory
from problems import NAMED, Shape, add_arguments, asked, problem
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
    measure: Callable[[Shape, Tensor, Tensor, Tensor], Iterable[dict]],
    table: Callable[[list[dict]], str],
) -> None:
    """Rows to <name>.jsonl as they come, their table to <name>.md after each problem, in results/loss_heads/<machine>/.

    obstacle: why a device will not do. measure(shape, e, c, targets): rows of a problem, without what says of which. kinds: the
    default ones.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, [*NAMED], kinds)
    parser.add_argument("--out", type=Path, help="folder of the results (default: results/loss_heads/<machine>)")
    args = parser.parse_args(command_line)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        problems = asked(args)
    except ValueError as error:
        parser.error(str(error))
    if reason := obstacle(device):
        parser.error(reason)
    folder = args.out or ROOT / "results" / "loss_heads" / machine()
    path = folder / f"{name}.jsonl"
    rows = read_rows(path) if path.exists() else []
    for shape, kind in problems:
        source, made = provenance(args.seed), []
        others = [row for row in rows if (row["shape"], row["kind"]) != (shape.name, kind)]
        for row in measure(shape, *problem(shape, kind, args.seed, device)):
            made.append({"shape": shape.name, "kind": kind, **row, "provenance": source})
            rows = others + made
            write_rows(path, rows)
        free_memory(device)
        (folder / f"{name}.md").write_text(table(rows))
        print(table(made), flush=True)
