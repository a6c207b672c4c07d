"""From finished runs to the rows of a result: the one schema of everything under results/ that comes from training.

A row is one run: folder (of its records, relative to the repository), model, size, loss, data, vocab_size, seq_len,
batch_size, micro_batches, parameters; then the summary of training/loop.py (train_loss, valid_loss, valid_perplexity,
step_ms, tokens_per_second, mfu, loss_layer_ms, peak_allocated_mib, peak_reserved_mib, loss_layer_mib); startup_seconds;
and provenance (training/provenance.py).
A run that did not finish has status and reason in place of the summary. Units are in the names.
"""

import json
from pathlib import Path

from training.provenance import ROOT
from training.records import read_records
from training.run_folder import METRICS

RUN_KEYS = ("seq_len", "batch_size", "micro_batches")


def collect_rows(runs: Path) -> list[dict]:
    """One row for each run under a folder of runs, oldest first."""
    paths = sorted(runs.glob(f"*/*/{METRICS}"), key=lambda path: path.parent.name)
    # A run that was killed before its first record has told nothing.
    rows = [row(path) for path in paths if read_records(path, "run")]
    if not rows:
        raise FileNotFoundError(f"{runs}: no runs here (looked for <group>/<date-time>/{METRICS})")
    return rows


def row(metrics: Path) -> dict:
    records = read_records(metrics)
    first = next(record for record in records if record["kind"] == "run")
    config = first["config"]
    last = next((record for record in reversed(records) if record["kind"] == "end"), {"status": "killed"})
    started = next((record["startup_seconds"] for record in records if "startup_seconds" in record), None)
    summary = {key: value for key, value in last.items() if key not in ("kind", "folder")}
    folder = metrics.parent.resolve()
    return {
        "folder": str(folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder.name),
        "model": config["model"]["name"],
        "size": config["size"]["name"],
        "loss": config["loss"]["name"],
        "data": config["data"]["kind"],
        "vocab_size": config["vocab_size"],
        **{key: config["train"][key] for key in RUN_KEYS},
        "parameters": first["parameters"],
        **summary,
        "startup_seconds": started,
        "provenance": first["provenance"],
    }


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write rows as JSON lines, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def markdown_table(rows: list[dict], columns: dict[str, str]) -> str:
    """A table of some columns: key → format, as in {"loss": "", "tokens_per_second": ",.0f"}; None prints as –."""

    def cell(value, form: str) -> str:
        return "–" if value is None else format(value, form)

    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(cell(row.get(key), form) for key, form in columns.items()) + " |" for row in rows]
    return "\n".join(lines) + "\n"
