"""Where a run lives: runs/<model>-<size>-<loss>/<date-time>, with config.yaml, metrics.jsonl,
documents.jsonl (name, hash and size of each document of the corpus) and checkpoints/.

`resume=never` opens a new folder. `resume=auto` goes on with the newest folder of the same configuration that is not
finished, and opens a new one where there is none, so a job that is started again and again ends up complete.
`resume=<folder>` goes on with that one, given the same configuration.
"""

from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from training.records import read_records

CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "checkpoints"


def open_run_folder(cfg: DictConfig) -> tuple[Path, bool]:
    """(folder, whether it is one to go on with); a new folder gets its config.yaml."""
    if cfg.resume not in ("never", "auto"):
        folder = Path(cfg.resume)
        if not same_run(OmegaConf.load(folder / CONFIG), cfg):
            raise ValueError(
                f"resume={folder}: its config.yaml is another configuration; give the overrides that it was started with"
            )
        if finished(folder):
            raise ValueError(f"resume={folder}: that run is finished; resume=never starts a new one")
        return folder, True
    group = Path(cfg.runs) / f"{cfg.model.name}-{cfg.size.name}-{cfg.loss.name}"
    if cfg.resume == "auto":
        for folder in sorted(group.glob("*/" + CONFIG), reverse=True):
            if same_run(OmegaConf.load(folder), cfg) and not finished(folder.parent):
                return folder.parent, True
    folder = new_folder(group)
    partial = folder / (CONFIG + ".partial")
    OmegaConf.save(cfg, partial, resolve=True)
    partial.rename(folder / CONFIG)
    return folder, False


def new_folder(group: Path) -> Path:
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        try:
            (group / (name + suffix)).mkdir(parents=True)
            return group / (name + suffix)
        except FileExistsError:
            continue
    raise FileExistsError(f"{group / name}: 99 runs began in this second")


def same_run(saved: DictConfig, cfg: DictConfig) -> bool:
    """Equal in everything that a result depends on."""
    ignored = ("resume", "runs", "tracking", "checkpoint")

    def content(config: DictConfig) -> dict:
        return {key: value for key, value in OmegaConf.to_container(config, resolve=True).items() if key not in ignored}

    return content(saved) == content(cfg)


def finished(folder: Path) -> bool:
    metrics = folder / METRICS
    return metrics.is_file() and any(record["status"] == "finished" for record in read_records(metrics, "end"))
