"""Fixtures for the whole suite: two threads, one seed, quiet tracking, and the composition of configs."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as scripts/train.py
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hydra import compose, initialize_config_dir

from training.config import CONFIGS


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def compose_config():
    """compose_config("loss=cce", …) → the composed training config."""

    def composed(*overrides: str):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return compose("train", overrides=list(overrides))

    return composed


@pytest.fixture
def tiny(tmp_path):
    """Overrides of a run of a few seconds on a CPU."""
    return [
        "device=cpu", "data=synthetic", "tracking=none", "vocab_size=64", "size.hidden_size=32", "size.num_heads=2",
        "train.seq_len=16", "train.batch_size=2", "train.steps=12", "train.log_every=3", "train.eval_tokens=64",
        f"runs={tmp_path / 'runs'}", f"cache={tmp_path / 'cache'}", "checkpoint.every=4",
    ]  # fmt: skip
