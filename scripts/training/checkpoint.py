"""Checkpoints by PyTorch's distributed checkpoint (DCP), whole or not at all.

A checkpoint is the folder `<run>/checkpoints/step-<step>`: DCP's files of model and optimizer, and progress.pt. It is
written under another name and renamed when complete, so a half-written one is never picked up.
"""

import random
import re
import shutil
import warnings
from pathlib import Path

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

PROGRESS = "progress.pt"  # step, position in the data, random states
COMPLETE = re.compile(r"step-(\d{8})")


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, position: dict, *, keep: int
) -> Path:
    """Write the checkpoint of a step under `folder` and delete all but the last `keep` of them."""
    target = folder / f"step-{step:08d}"
    partial = folder / f"partial-{step:08d}"
    if target.exists():  # the same step, the same state
        return target
    for stale in folder.glob("partial-*"):
        shutil.rmtree(stale)
    with quiet():
        dcp.save(state(model, optimizer), checkpoint_id=partial)
    torch.save(progress(step, position), partial / PROGRESS)
    partial.rename(target)
    for old in completed(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict]:
    """Restore model, optimizer and random states in place; return (step, position in the data)."""
    state_dict = state(model, optimizer)
    with quiet():
        dcp.load(state_dict, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"])
    # Our own file, with NumPy's and Python's random states: more than weights.
    restored = torch.load(checkpoint / PROGRESS, weights_only=False)
    torch.set_rng_state(restored["torch"])
    random.setstate(restored["python"])
    numpy.random.set_state(restored["numpy"])
    if torch.cuda.is_available() and restored["cuda"] is not None:
        torch.cuda.set_rng_state(restored["cuda"])
    return restored["step"], restored["position"]


def completed(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if COMPLETE.fullmatch(path.name))


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def progress(step: int, position: dict) -> dict:
    return {
        "step": step,
        "position": position,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


class quiet(warnings.catch_warnings):
    """DCP warns on every call of a single process that no process group exists; that is how it is meant here."""

    def __enter__(self):
        super().__enter__()
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
        warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
