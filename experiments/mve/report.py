"""Verdict and picture of the minimum viable experiment from its data; run.py calls it at its end.

python experiments/mve/report.py results/mve/nvidia-h200      # reads runs.jsonl, scan.jsonl, curves.json there
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from criteria import as_text, verdicts  # noqa: E402
from picture import draw  # noqa: E402

from training.results import read_rows  # noqa: E402


def write_report(folder: Path) -> str:
    """Write verdict.md and mve.png beside the data in `folder`; return the verdict's text."""
    same = read_rows(folder / "runs.jsonl")
    scan = read_rows(folder / "scan.jsonl") if (folder / "scan.jsonl").is_file() else []
    text = as_text(verdicts(same, scan))
    source = same[-1]["provenance"]
    versions = ", ".join(f"{name} {source['versions'][name]}" for name in ("torch", "triton", "flash-linear-attention"))
    origin = f"{source['gpu'] or source['cpu']}, {versions}, commit {source['commit']}, {source['date']}."
    (folder / "verdict.md").write_text(f"{text}\n{origin}\n")
    curves = json.loads((folder / "curves.json").read_text())
    draw(folder / "mve.png", same, scan, {head: curve["loss"] for head, curve in curves.items()})
    return text


if __name__ == "__main__":
    print(write_report(Path(sys.argv[1])))
