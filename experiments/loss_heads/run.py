"""Every linear cross-entropy on the same tensors: time, memory, error, and the picture of time against memory: `make bench`.

    python experiments/loss_heads/run.py                                 # GPU: shapes A, B, C, all softmax kinds, all entries
    python experiments/loss_heads/run.py --shapes A 4096x1024x50304 --kinds trained --entries ours quack
    python experiments/loss_heads/run.py --apple ../ml-cross-entropy     # Apple's from a checkout

Each row is stored in results/loss_heads/<machine>/rows.jsonl as soon as it is measured; report.md, accuracy.md and pareto.png
beside it are written at the end from all rows there (report.py writes them again at any time).
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from measuring import DeviceLost, Sampling, free_memory, measure, warm_up  # noqa: E402
from peers import Entry, entries, selected, use_apple  # noqa: E402
from problems import KINDS, NAMED, TINY, Shape, add_arguments, asked, problem  # noqa: E402
from reference import reference  # noqa: E402
from report import write_report  # noqa: E402
from rows import key, load, store  # noqa: E402

from training.provenance import machine, provenance  # noqa: E402


def budget(text: str) -> float | None:
    if text == "default":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"budget {text!r} is neither 'default' nor a number of MiB > 0")
    return value


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def samples(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} runs have no quartiles: give 2 or more")
    return int(text)


def arguments(device: torch.device) -> argparse.ArgumentParser:
    cpu = device.type != "cuda"
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_arguments(parser, [TINY.size] if cpu else [*NAMED], ["trained"] if cpu else [*KINDS])
    add(
        "--entries",
        nargs="+",
        default=[],
        metavar="PART",
        help="entries whose name contains one of these (default: all)",
    )
    add(
        "--budgets",
        nargs="+",
        type=budget,
        metavar="MIB",
        help="workspace_mib of ours: 'default' or MiB, for all presets",
    )
    add("--repeats", type=samples, default=20, help="timed runs at least (default: 20)")
    add(
        "--seconds",
        type=positive,
        default=0.3,
        help="more runs, up to 5 times as many, until this is spent (default: 0.3)",
    )
    add("--apple", type=Path, metavar="PATH", help="root of a checkout of apple/ml-cross-entropy")
    add("--minutes", type=positive, help="start no further entry after this time; --missing goes on later")
    add("--missing", action="store_true", help="leave out what has a row already")
    add("--out", type=Path, help="folder of the results (default: results/loss_heads/<machine>)")
    return parser


def plan(args: argparse.Namespace, device: torch.device) -> list[tuple[Shape, str, list[Entry]]]:
    """What to measure, problem by problem; ValueError, naming the value, for what does not exist."""
    candidates = {(shape, kind): entries(shape, kind, device, args.budgets) for shape, kind in asked(args)}
    known = list(dict.fromkeys(entry.name for found in candidates.values() for entry in found))
    for part in args.entries:
        if not any(part.lower() in name.lower() for name in known):
            raise ValueError(f"no entry's name contains {part!r}; there are: {'; '.join(known)}")
    if args.apple is not None:
        use_apple(args.apple)
    return [(shape, kind, selected(found, args.entries)) for (shape, kind), found in candidates.items()]


def progress(row: dict) -> str:
    if row["status"] != "measured":
        return f"{row['status']}: {row['reason']}"
    return (
        f"{row['step_gemms']:.2f} GEMMs ({row['step_ms']:.2f} ms), forward {row['forward_gemms']:.2f}, "
        f"beyond {row['beyond_mib']:,.0f} MiB, dE {row['de_error']:.1e}, dC {row['dc_error']:.1e}, "
        f"first call {row['first_call_s']:.1f} s"
    )


def main(command_line: list[str]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = arguments(device)
    args = parser.parse_args(command_line)
    try:
        problems = plan(args, device)
    except ValueError as error:
        parser.error(str(error))
    folder = args.out or ROOT / "results" / "loss_heads" / machine()
    if args.missing:
        there = {key(row) for row in load(folder)}
        problems = [
            (shape, kind, [entry for entry in found if (entry.name, shape.name, kind) not in there])
            for shape, kind, found in problems
        ]
    total = sum(len(found) for _, _, found in problems)
    if device.type != "cuda":
        print("bench: no GPU here: a small shape shows how it works; time and memory need a GPU to mean something")
    print(f"bench: {total} rows", flush=True)

    sampling = Sampling(args.repeats, args.seconds)
    warm_up(device)
    began, done, late = time.monotonic(), 0, False
    for shape, kind, found in problems:
        if not found or late:
            continue
        e, c, targets = problem(shape, kind, args.seed, device)
        truth = reference(e, c, targets)
        free_memory(device)
        print(
            f"\n{shape.name} ({shape.size}), {kind} softmax: loss {truth.loss:.4g}, median p_target "
            f"{truth.median_p_target:.4g}, {truth.kept_tiles:.1%} of tiles kept by the filter",
            flush=True,
        )
        source = provenance(args.seed)
        for entry in found:
            elapsed = (time.monotonic() - began) / 60
            late = args.minutes is not None and elapsed > args.minutes
            if late:
                break
            row = {  # described in rows.py
                "entry": entry.name,
                "exact": entry.exact,
                "curve": entry.curve,
                "workspace_mib": entry.workspace_mib,
                "shape": shape.name,
                "tokens": shape.tokens,
                "hidden": shape.hidden,
                "vocabulary": shape.vocabulary,
                "kind": kind,
                "seed": args.seed,
                "problem": truth.facts(),
                "provenance": source,
            }
            try:
                row |= measure(entry, shape, e, c, targets, truth, sampling)
            except DeviceLost as lost:
                store(folder, row | lost.args[0])
                sys.exit(f"bench: {entry.name} lost the GPU ({lost.args[0]['reason']}): go on with --missing")
            store(folder, row)
            done += 1
            elapsed = (time.monotonic() - began) / 60
            left = elapsed / done * (total - done)
            print(f"[{done}/{total}, {elapsed:.1f} min, {left:.1f} to go] {entry.name}: {progress(row)}", flush=True)
        del e, c, targets, truth
        free_memory(device)
    if late:
        print(f"\nbench: {args.minutes:g} minutes are over, {total - done} rows are not measured; --missing goes on")
    write_report(folder)
    shown = folder.resolve()
    shown = shown.relative_to(ROOT) if shown.is_relative_to(ROOT) else folder
    print(f"\nRows, tables and picture: {shown}/rows.jsonl, report.md, accuracy.md, pareto.png")


if __name__ == "__main__":
    main(sys.argv[1:])
