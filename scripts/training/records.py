"""The record of a run: `metrics.jsonl`, one JSON object a line; the schema of every training result in this repository.

kind = "run"    first line: schema, name, config (resolved), provenance (training/provenance.py), data (training/data), parameters
kind = "step"   step (1-based), tokens (seen so far), loss (nats/token, mean of the step's tokens), grad_norm (before clipping), lr,
                step_ms, tokens_per_second, mfu (null where the GPU's peak is unknown),
                peak_allocated_mib, peak_reserved_mib (of the step),
                loss_layer_ms, loss_layer_mib (forward + backward of the loss layer alone: time, and peak memory above what
                stood before it, its gradients included); the first step of a process also has startup_seconds
                (process creation → step done)
kind = "eval"   step, valid_loss (nats/token), valid_perplexity, valid_tokens
kind = "resume" step (the checkpoint's), provenance of the process that went on
kind = "end"    status (finished | interrupted | failed), and where finished: summary values (training/loop.py)

Times are device times (training/measure.py). A resumed run drops the lines after its checkpoint's step, so a file always
holds one unbroken curve.
"""

import json
import math
from pathlib import Path

SCHEMA = 1


class RecordFile:
    """Append-only writer of metrics.jsonl; each line is flushed, so a killed run keeps what it measured."""

    def __init__(self, path: Path):
        self.path = path
        self.file = path.open("a")

    def write(self, kind: str, **values) -> dict:
        record = {"kind": kind, **{name: finite(value) for name, value in values.items()}}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        return record

    def close(self) -> None:
        self.file.close()


def finite(value):
    """JSON has no NaN or infinity: they are written as strings, which read as what they are."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_records(path: Path, kind: str | None = None) -> list[dict]:
    """The records of a file, all or of one kind. A last line that a killed run left half written is passed over."""
    records = []
    for line in Path(path).read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [record for record in records if kind is None or record["kind"] == kind]


def drop_after(path: Path, step: int) -> None:
    """Keep the records up to a step (a resumed run writes the later ones again); atomic."""
    kept = [r for r in read_records(path) if r["kind"] != "end" and (r["kind"] == "run" or r["step"] <= step)]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
    partial.replace(path)
