"""Train one model with one loss head.

    python scripts/train.py loss=cce model=gla                       # on a GPU: the proposal's MVE; on a CPU: a small run
    python scripts/train.py loss=liger model=kda size=350m train.batch_size=8
    python scripts/train.py --multirun model=gla,kda loss=compile,cce

Configs: configs/train.yaml and its groups; `--help` lists them, `--cfg job --resolve` shows what a run would take.
"""

import os
import sys

# Before torch: OpenMP threads that spin long for each other stall as soon as another process wants a core.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from training.loop import RunError, run

failures: list[str] = []


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Run it; the return value is the validation loss (for Hydra's optimizing sweepers)."""
    try:
        summary = run(cfg)
    except (RunError, ValueError, FileNotFoundError, ConnectionError) as error:
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        # In a sweep the other combinations go on; the exit status tells at the end.
        failures.append(str(error))
        print(f"train: {error}", file=sys.stderr)
        if HydraConfig.get().mode == RunMode.RUN:
            sys.exit(2)
        return None
    if summary["status"] == "interrupted":
        print(
            f"train: stopped at step {summary['step']}, checkpoint written; go on with the same command and "
            f"resume={summary['folder']} (or resume=auto)"
        )
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            sys.exit(143)  # the signal was for the sweep
        return None
    print(
        f"train: step {summary['step']}, {summary['tokens']:,} tokens | train loss {summary['train_loss']:.4f} | "
        f"validation loss {summary['valid_loss']:.4f}, perplexity {summary['valid_perplexity']:.2f} | "
        f"{summary['tokens_per_second']:,.0f} tok/s | peak {summary['peak_allocated_mib']:,.0f} MiB | "
        f"loss layer {summary['loss_layer_ms']:.2f} ms, {summary['loss_layer_mib']:,.0f} MiB | {summary['folder']}"
    )
    return summary["valid_loss"]


if __name__ == "__main__":
    main()
    if failures:
        sys.exit(2)
