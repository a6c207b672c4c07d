"""Gather finished runs into a result: a JSON-lines file with provenance and a table beside it.

python scripts/train.py --multirun model=gla,kda loss=compile,cce runs=runs/grid
python scripts/collect.py runs/grid results/grid        # → results/grid.jsonl, results/grid.md
"""

import argparse
from pathlib import Path

from training.results import collect_rows, markdown_table, write_rows

COLUMNS = {
    "model": "", "size": "", "loss": "", "vocab_size": "", "batch_size": "", "seq_len": "", "status": "", "train_loss": ".4f",
    "valid_loss": ".4f", "tokens_per_second": ",.0f", "mfu": ".3f", "step_ms": ".2f", "loss_layer_ms": ".2f",
    "loss_layer_mib": ",.0f", "peak_allocated_mib": ",.0f", "startup_seconds": ".1f",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder that was given to train.py as runs=…")
    parser.add_argument("result", type=Path, help="path of the result without ending")
    arguments = parser.parse_args()
    rows = collect_rows(arguments.runs)
    write_rows(arguments.result.with_suffix(".jsonl"), rows)
    source = rows[0]["provenance"]
    note = f"{source['gpu'] or source['cpu']}, commit {source['commit']}, {source['date']}; every row's provenance: the .jsonl beside.\n"
    arguments.result.with_suffix(".md").write_text(markdown_table(rows, COLUMNS) + "\n" + note)
    print(markdown_table(rows, COLUMNS))


if __name__ == "__main__":
    main()
