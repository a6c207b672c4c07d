"""Weights & Biases: the run's records under its own name. metrics.jsonl (training/records.py) is written in any case."""

import os
from pathlib import Path

from omegaconf import DictConfig


class Tracker:
    """`tracking=wandb` logs step and eval records (offline by default: `wandb sync <run>/wandb/offline-run-*` uploads them);
    `tracking=none` does nothing."""

    def __init__(self, tracking: DictConfig, run_folder: Path, config: dict):
        self.run = None
        if tracking.name == "none":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self.run = wandb.init(
            project=tracking.project,
            mode=tracking.mode,
            dir=str(run_folder),
            name=f"{run_folder.parent.name}-{run_folder.name}",
            # One id for the folder: what a resumed run logs goes on in the same wandb run.
            id=f"{run_folder.parent.name}-{run_folder.name}".replace(".", "-"),
            resume="allow",
            config=config,
        )

    def log(self, record: dict) -> None:
        if self.run is not None:
            values = {name: value for name, value in record.items() if name not in ("kind", "step")}
            prefix = "valid" if record["kind"] == "eval" else "train"
            self.run.log(
                {f"{prefix}/{name.removeprefix('valid_')}": value for name, value in values.items()},
                step=record["step"],
            )

    def finish(self, summary: dict) -> None:
        if self.run is not None:
            self.run.summary.update(summary)
            self.run.finish()
