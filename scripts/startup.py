"""Seconds from the start of the process to the end of the first training step: with empty compiler caches, then again.

    python scripts/startup.py gla gated_deltanet kda

Each start is `python scripts/train.py` in a process of its own, ended when its first step is recorded. Writes
results/startup/<model>.json: the rows "cold" and "warm", the overrides, and the provenance of the cold run.
Further arguments with a `=` are overrides: python scripts/startup.py gla loss=compile size=350m
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = ["size=1.3b", "loss=cce", "data=synthetic", "tracking=none", "train.batch_size=8", "train.seq_len=2048"]
LIMIT = 600  # seconds that one start may take


def records(runs: Path) -> list[dict]:
    """What the run in this folder has recorded so far (training/records.py), less a line still being written."""
    lines = [line for file in runs.rglob("metrics.jsonl") for line in file.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def first_step(overrides: list[str], caches: Path) -> tuple[float, dict]:
    """startup_seconds of one start with the compiler caches in a folder, and the run's provenance."""
    environment = os.environ | {"TRITON_CACHE_DIR": f"{caches}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
    with tempfile.TemporaryDirectory() as runs:
        overrides = [*overrides, "train.steps=50", "train.log_every=1", f"runs={runs}"]
        command = [sys.executable, "scripts/train.py", *overrides]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        try:
            start = time.monotonic()
            while time.monotonic() - start < LIMIT:
                ended = process.poll() is not None  # asked before the file is read, so that its last lines are seen
                written = records(Path(runs))
                seconds = [record["startup_seconds"] for record in written if "startup_seconds" in record]
                if seconds:
                    return seconds[0], written[0]["provenance"]
                if ended:
                    raise SystemExit(f"startup: status {process.returncode} before a step: {' '.join(command)}")
                time.sleep(0.2)
            raise SystemExit(f"startup: no step within {LIMIT} s: {' '.join(command)}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # SIGTERM would write a checkpoint
            process.wait()


def main() -> None:
    models = [argument for argument in sys.argv[1:] if "=" not in argument] or ["gla", "gated_deltanet", "kda"]
    for model in models:
        overrides = [f"model={model}", *RUN, *(argument for argument in sys.argv[1:] if "=" in argument)]
        with tempfile.TemporaryDirectory() as caches:
            cold, provenance = first_step(overrides, Path(caches))
            warm, _ = first_step(overrides, Path(caches))
        rows = [{"start": "cold", "seconds": round(cold, 1)}, {"start": "warm", "seconds": round(warm, 1)}]
        provenance["command"] = shlex.join(["python", "scripts/startup.py", *sys.argv[1:]])
        path = ROOT / "results" / "startup" / f"{model}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": rows, "overrides": overrides, "provenance": provenance}, indent=1) + "\n")
        print(f"{model}: {cold:.0f} s cold, {warm:.0f} s warm → {path.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
