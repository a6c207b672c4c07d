"""The proposal's minimum viable experiment, from the runs to the verdict: `make mve`.

    python experiments/mve/run.py [override …]          # e.g. data=wikitext103, seed=2

1. One run of each head over the whole experiment (configs/experiment/mve.yaml), same batches, same seed.
2. On a GPU: short runs over batch sizes, for the criterion of the grown batch.
3. results/mve/<machine>/: runs.jsonl and scan.jsonl (rows with provenance), curves.json, verdict.md, mve.png.

A run that was stopped goes on from its checkpoint (resume=auto under runs/mve); finished ones are made again.
Overrides other than none write over results/mve/<machine>: commit what is to stay.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from report import write_report  # noqa: E402

from training.provenance import machine  # noqa: E402
from training.records import read_records  # noqa: E402
from training.results import collect_rows, write_rows  # noqa: E402
from training.run_folder import METRICS  # noqa: E402

GPU_HEADS = ("standard", "compile", "liger", "cce")
CPU_HEADS = ("standard", "compile", "chunked", "cce")
BATCH_SIZES = "16,32,64,128,256"
SCAN_STEPS = 40


def train(*overrides: str) -> None:
    """One call of scripts/train.py in its own process; a run that cannot be is told by its records, not here."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *overrides, "experiment=mve"]
    print("mve: python scripts/train.py", *command[2:], flush=True)
    subprocess.run(command, cwd=ROOT, check=False)


def heads() -> tuple[str, ...]:
    return GPU_HEADS if torch.cuda.is_available() else CPU_HEADS


def written_since(row: dict, seconds: float) -> bool:
    return (ROOT / row["folder"] / METRICS).stat().st_mtime >= seconds


def main(overrides: list[str]) -> None:
    runs = Path("runs", "mve")  # relative: commands are part of the provenance
    if not torch.cuda.is_available():
        print(
            "mve: no GPU here: a scaled-down run of the heads that run on a CPU; memory and speed need a GPU to be judged"
        )
    began = time.time()
    for head in heads():
        train(f"loss={head}", f"runs={runs / 'same'}", "resume=auto", *overrides)
    # Runs of other days may lie beside those of this call, and must not stand in for one that failed now.
    fresh = {row["loss"]: row for row in collect_rows(ROOT / runs / "same") if written_since(row, began)}
    missing = [head for head in ("standard", "cce") if fresh.get(head, {}).get("status") != "finished"]
    if missing:
        sys.exit(f"mve: no finished run of loss={', '.join(missing)}: see above; there is no verdict without it")
    same, scan = [fresh[head] for head in heads() if head in fresh], []
    if torch.cuda.is_available():
        shutil.rmtree(ROOT / runs / "scan", ignore_errors=True)
        for head in heads():
            train(
                "--multirun", f"loss={head}", f"train.batch_size={BATCH_SIZES}", f"train.steps={SCAN_STEPS}",
                "train.eval_tokens=16384", f"runs={runs / 'scan'}", *overrides,
            )  # fmt: skip
        scan = collect_rows(ROOT / runs / "scan")

    result = ROOT / "results" / "mve" / machine()
    write_rows(result / "runs.jsonl", same)
    if scan:
        write_rows(result / "scan.jsonl", scan)
    curves = {}
    for row in same:
        steps = read_records(ROOT / row["folder"] / METRICS, "step")
        curves[row["loss"]] = {name: [step[name] for step in steps] for name in ("loss", "step_ms", "loss_layer_ms")}
    (result / "curves.json").write_text(json.dumps(curves))
    print(f"\n{write_report(result)}\nData, verdict and picture: {result.relative_to(ROOT)}/")


if __name__ == "__main__":
    main(sys.argv[1:])
