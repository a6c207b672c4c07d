"""Tables and picture of the benchmark from its rows; run.py calls it at its end.

python experiments/loss_heads/report.py results/loss_heads/nvidia-h200      # reads rows.jsonl there
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from picture import draw  # noqa: E402
from problems import KINDS, NAMED  # noqa: E402
from rows import load  # noqa: E402

from cce.plans import mib_of_sum  # noqa: E402
from training.results import markdown_table  # noqa: E402

SPEED = {
    "entry": "",
    "exact": "",
    "forward": ".2f",
    "fwd + bwd": ".2f",
    "ms": ".2f",
    "beyond": ",.0f",
    "fwd beyond": ",.0f",
    "dE": ".1e",
    "dC": ".1e",
    "loss": ".1e",
    "6NDV/GEMM": ".0%",
    "6NDV/peak": ".0%",
    "host ms": ".2f",
}
EXPLAINED = """\
forward (no gradient asked for) and fwd + bwd in GEMMs: medians, over the time of the logits product `e @ c.T` measured right
before. beyond: peak memory in MiB less inputs and gradients (fwd beyond: of a forward pass without gradients). dE, dC:
relative error against fp64 in the Frobenius norm; loss: relative error. 6NDV/GEMM and 6NDV/peak: share of the roofline, the
time of the 6·N·D·V operations of an exact gradient at the logits product's measured rate and at the data sheet's peak, over
the time taken; where logits are recomputed 75 % is the most. host ms: what the host needs to issue a step; where it is no
less than ms, the row is bound by the host. exact: the implementation drops no part of the gradient on purpose.
"""
# Accumulation of what remains to be added up across tiles or slices, by our presets.
ACCUMULATION = {
    "bf16 plain": "ours plain accumulation",
    "bf16 Kahan": "ours cce_kahan_full_c",
    "fp32": "ours cce_exact",
}


def write_report(folder: Path) -> None:
    """Write report.md, accuracy.md and pareto.png beside rows.jsonl in `folder`. ValueError if nothing was measured."""
    rows = load(folder)
    measured = [row for row in rows if row["status"] == "measured"]
    if not measured:
        raise ValueError(f"{folder}: no measured row in rows.jsonl; run experiments/loss_heads/run.py")
    (folder / "report.md").write_text(speed_report(rows))
    (folder / "accuracy.md").write_text(accuracy_report(measured))
    draw(folder / "pareto.png", measured)


def shapes_of(rows: list[dict]) -> list[str]:
    """The shapes' names, the named ones first."""
    found = dict.fromkeys(row["shape"] for row in rows)
    return [name for name in NAMED if name in found] + [name for name in found if name not in NAMED]


def by_problem(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    groups = {(shape, kind): [] for shape in shapes_of(rows) for kind in KINDS}
    for row in rows:
        groups[row["shape"], row["kind"]].append(row)
    return {problem: group for problem, group in groups.items() if group}


def origin(rows: list[dict]) -> str:
    """Machine, versions, commits and days of these rows, in one sentence."""
    sources = [row["provenance"] for row in rows]
    machines = sorted({source["gpu"] or source["cpu"] for source in sources})
    packages = ("torch", "triton")
    versions = sorted({", ".join(f"{name} {source['versions'][name]}" for name in packages) for source in sources})
    implementations = sorted({row["implementation"] for row in rows if "implementation" in row})
    implementations = [name for name in implementations if not name.startswith("torch ")]
    commits = sorted({str(source["commit"]) for source in sources})
    days = sorted({source["date"][:10] for source in sources})
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    parts = [
        " / ".join(machines),
        " / ".join(versions),
        "; ".join(implementations),
        f"commit {', '.join(commits)}",
        dates,
    ]
    return f"{'; '.join(part for part in parts if part)}.\n"


def title(group: list[dict]) -> str:
    """Heading and facts of a problem."""
    first = group[0]
    facts = first["problem"]
    lines = [
        f"## {first['shape']}, {first['kind']} softmax\n",
        f"N = {first['tokens']}, D = {first['hidden']}, V = {first['vocabulary']}; loss {facts['loss']:.4g}, median "
        f"p_target {facts['median_p_target']:.4g}, {facts['kept_tiles']:.1%} of the filter's tiles kept, unsorted.",
    ]
    units = [row["gemm_ms"] for row in group if row["status"] == "measured"]
    if units:
        rate = 2e-9 * first["tokens"] * first["hidden"] * first["vocabulary"]
        lines[-1] += (
            f" GEMM {min(units):.2f} to {max(units):.2f} ms over the rows = "
            f"{rate / max(units):.3g} to {rate / min(units):.3g} TFLOP/s."
        )
    return "\n".join(lines) + "\n"


def speed_report(rows: list[dict]) -> str:
    """A table for each problem, exact implementations first, the fastest first; then what could not be measured."""
    text = ["# Linear cross-entropies: time, memory, error\n", EXPLAINED, origin(rows)]
    for group in by_problem(rows).values():
        table = [
            {
                "entry": row["entry"],
                "exact": "yes" if row["exact"] else "no",
                "forward": row["forward_gemms"],
                "fwd + bwd": row["step_gemms"],
                "ms": row["step_ms"],
                "beyond": row["beyond_mib"],
                "fwd beyond": row["forward_beyond_mib"],
                "dE": row["de_error"],
                "dC": row["dc_error"],
                "loss": row["loss_rel_error"],
                "6NDV/GEMM": row["share_6ndv_of_gemm"],
                "6NDV/peak": row["share_6ndv_of_peak"],
                "host ms": row["host_ms"],
            }
            for row in sorted(group, key=lambda row: (not row["exact"], row.get("step_ms", 0)))
            if row["status"] == "measured"
        ]
        text.append(title(group))
        if table:
            text.append(markdown_table(table, SPEED))
        missing = [
            f"- {row['entry']}: {row['status']}: {row['reason']}" for row in group if row["status"] != "measured"
        ]
        if missing:
            text.append("Not measured:\n\n" + "\n".join(missing) + "\n")
    return "\n".join(text)


def accuracy_report(measured: list[dict]) -> str:
    """Errors against fp64, a table for each shape with its kinds side by side; then the accumulations side by side."""
    text = [
        "# Linear cross-entropies: error against fp64\n",
        "Relative errors: of the loss, and of the gradients in the Frobenius norm. The first row of a table is the exact "
        "gradient rounded to the inputs' dtype: nothing in that dtype can be closer. Entries that were measured on every "
        "kind of softmax of the shape.\n",
        origin(measured),
    ]
    for shape in shapes_of(measured):
        here = [row for row in measured if row["shape"] == shape]
        groups = {kind: group for (_, kind), group in by_problem(here).items()}
        columns = {"entry": "", "exact": ""}
        rounded = {"entry": "fp64, rounded", "exact": "yes"}
        table: dict[str, dict] = {}
        for kind, group in groups.items():
            columns |= {f"{kind}: {name}": form for name, form in (("loss", ".1e"), ("dE", ".2e"), ("dC", ".2e"))}
            facts = group[0]["problem"]
            rounded |= {f"{kind}: dE": facts["de_rounding"], f"{kind}: dC": facts["dc_rounding"]}
            for row in group:
                line = table.setdefault(row["entry"], {"entry": row["entry"], "exact": "yes" if row["exact"] else "no"})
                line[f"{kind}: loss"] = row["loss_rel_error"]
                line[f"{kind}: dE"] = row["de_error"]
                line[f"{kind}: dC"] = row["dc_error"]
        complete = [line for line in table.values() if all(f"{kind}: loss" in line for kind in groups)]
        text += [f"## {shape}\n", markdown_table([rounded, *complete], columns)]
    text.append(accumulation_report(measured))
    return "\n".join(text)


def is_accumulated(row: dict) -> bool:
    """Whether a row's sum was kept as its preset says: Kahan gives way to fp32 where that fits."""
    if row["curve"] != ACCUMULATION["bf16 Kahan"]:
        return True
    budget = row["workspace_mib"]
    return budget is not None and budget < mib_of_sum(row["tokens"], row["hidden"], "fp32")


def accumulation_report(measured: list[dict]) -> str:
    """bf16 plain, bf16 Kahan and fp32 accumulation, each in the least memory it was measured at: errors, and those over fp32's.

    A larger workspace would not do: cce_kahan_full_c keeps rounding errors only where fp32 does not fit.
    """
    table = []
    for shape, kind in dict.fromkeys((row["shape"], row["kind"]) for row in measured):
        of_problem = [row for row in measured if (row["shape"], row["kind"]) == (shape, kind) and is_accumulated(row)]
        found = {
            name: min((row for row in of_problem if row["curve"] == curve), key=lambda r: r["beyond_mib"], default=None)
            for name, curve in ACCUMULATION.items()
        }
        if None in found.values():
            continue
        table += [
            {
                "shape": shape,
                "softmax": kind,
                "accumulation": name,
                "beyond": row["beyond_mib"],
                "dE": row["de_error"],
                "dE / fp32's": row["de_error"] / found["fp32"]["de_error"],
                "dC": row["dc_error"],
                "dC / fp32's": row["dc_error"] / found["fp32"]["dc_error"],
            }
            for name, row in found.items()
        ]
    if not table:
        return ""
    columns = {
        "shape": "", "softmax": "", "accumulation": "", "beyond": ",.0f",
        "dE": ".3e", "dE / fp32's": ".3f", "dC": ".3e", "dC / fp32's": ".3f",
    }  # fmt: skip
    return "## Accumulation: bf16 plain, bf16 Kahan, fp32 (ours, in the least memory measured)\n\n" + markdown_table(
        table, columns
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="with rows.jsonl; report.md, accuracy.md and pareto.png are written beside it"
    )
    folder = parser.parse_args().folder
    if not load(folder):
        parser.error(f"{folder} has no rows: run.py measures them")
    write_report(folder)
