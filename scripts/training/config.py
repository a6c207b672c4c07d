"""The configuration of a run: resolvers that configs/ uses, the device, and every check that costs nothing.

`check_run` is called before data is read or a model is built: bad input ends there, in one line.
"""

from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from models import check_model
from models.loss_heads import check_loss_head
from training.data import check_data

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RESUME = "never, auto, or the folder of a run"


def device_type(device: str) -> str:
    """'auto' → 'cuda' where there is a GPU, else 'cpu'; 'cuda' and 'cpu' as they are."""
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device={device}: take auto, cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no GPU here: take device=cpu, or install a CUDA build of torch")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def by_device(on_gpu, on_cpu, *, _root_):
    """`${by_device:16,4}` in a config: the first value on a GPU, the second on a CPU."""
    return on_gpu if device_type(_root_.device) == "cuda" else on_cpu


OmegaConf.register_new_resolver("by_device", by_device, replace=True)


def total_steps(train: DictConfig) -> int:
    """Optimizer steps of the run: train.steps, or as many as train.tokens needs."""
    if train.steps is not None:
        return train.steps
    return -(-train.tokens // (train.batch_size * train.seq_len * train.micro_batches))


def check_run(cfg: DictConfig) -> None:
    """Raise ValueError or FileNotFoundError, in one line that names the value and the fix, for anything that cannot run."""
    device = device_type(cfg.device)
    check_loss_head(cfg.loss.name, device)
    train = cfg.train
    for name in ("batch_size", "seq_len", "micro_batches", "log_every"):
        if train[name] < 1:
            raise ValueError(f"train.{name} is {train[name]}: give 1 or more")
    if train.steps is None and train.tokens is None:
        raise ValueError("train.steps and train.tokens are both null: give one of them")
    if total_steps(train) < 1:
        raise ValueError(
            f"train.steps = {train.steps}, train.tokens = {train.tokens}: the run would have no step; give 1 or more"
        )
    if train.autocast not in (None, "bfloat16"):
        raise ValueError(
            f"train.autocast is {train.autocast}: take bfloat16, or null for none (float16 would need loss scaling)"
        )
    if train.param_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"train.param_dtype is {train.param_dtype}: take float32 or bfloat16")
    if cfg.checkpoint.keep < 1:
        raise ValueError(
            f"checkpoint.keep is {cfg.checkpoint.keep}: give 1 or more (the last good checkpoint is what resumes)"
        )
    if not (0 < cfg.optim.lr < 10):
        raise ValueError(f"optim.lr is {cfg.optim.lr}: give a learning rate between 0 and 10")
    if cfg.resume not in ("never", "auto") and not Path(cfg.resume, "config.yaml").is_file():
        raise FileNotFoundError(f"resume={cfg.resume}: no config.yaml of a run in that folder; give {RESUME}")
    check_model(cfg.model, cfg.size, device_type=device, seq_len=train.seq_len)
    check_data(cfg.data)
