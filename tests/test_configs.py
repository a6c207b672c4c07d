"""Every config composes, and what it composes to passes the checks or is refused in one clear line."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from models.loss_heads import HEADS
from training.config import CONFIGS, check_run, total_steps

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ("model", "size", "loss", "data", "optim", "tracking", "experiment")


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def test_groups_offer_what_the_readme_says():
    assert choices("model") == ["gated_deltanet", "gla", "kda", "transformer"]
    assert choices("size") == ["1.3b", "350m", "mve"]
    assert choices("loss") == sorted(HEADS)
    assert choices("data") == ["fineweb", "stdlib", "synthetic", "text", "wikitext103"]


@pytest.mark.parametrize(("group", "choice"), [(group, choice) for group in GROUPS for choice in choices(group)])
def test_each_choice_composes_and_resolves(compose_config, group, choice):
    cfg = compose_config(f"{group}={choice}")
    resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=group != "data")
    assert resolved["seed"] == 1
    if group not in ("experiment", "data"):
        # An experiment overrides groups, and two choices of data are of one kind; every other choice goes by its file's name.
        assert resolved[group]["name"] == choice


@pytest.mark.parametrize(("model", "size", "loss"), itertools.product(choices("model"), choices("size"), sorted(HEADS)))
def test_every_model_size_and_loss_passes_the_checks_on_a_gpu(compose_config, monkeypatch, model, size, loss):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_run(compose_config(f"model={model}", f"size={size}", f"loss={loss}", "device=cuda"))


def test_by_device_picks_the_value_of_the_device(compose_config, monkeypatch):
    assert compose_config("device=cpu").train.seq_len == 128
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert compose_config("device=cuda").train.seq_len == 1024
    assert compose_config("device=cpu").train.seq_len == 128


def test_steps_follow_from_tokens(compose_config):
    train = compose_config("train.tokens=1000", "train.batch_size=3", "train.seq_len=10", "train.micro_batches=2").train
    assert total_steps(train) == 17  # 1000 / 60, rounded up
    train.steps = 5
    assert total_steps(train) == 5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss=liger"], "loss=liger needs a CUDA GPU.*loss=cce"),
        (["device=tpu"], "device=tpu: take auto, cuda or cpu"),
        (["train.batch_size=0"], "train.batch_size is 0: give 1 or more"),
        (["train.steps=null", "train.tokens=null"], "give one of them"),
        (["train.steps=-3"], "train.steps = -3"),
        (["train.autocast=float16"], "take bfloat16, or null"),
        (["train.param_dtype=int8"], "take float32 or bfloat16"),
        (["optim.lr=-1"], "optim.lr is -1"),
        (["checkpoint.keep=0"], "checkpoint.keep is 0"),
        (["data=text", "data.train=nowhere.txt"], "nowhere.txt"),
        (["resume=nowhere"], "no config.yaml of a run"),
        (["model=kda", "model.chunk_size=48"], "chunk_size.*48.*32.*64"),
        (["model=gated_deltanet", "model.chunk_size=128"], "chunk_size.*128.*16.*32.*64"),
        (["size.num_heads=7"], "7"),
    ],
)
def test_bad_values_are_refused_in_one_line(compose_config, overrides, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words) as error:
        check_run(compose_config("device=cpu", *overrides))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("override", ["loss=cut", "train.batchsize=4", "model=mamba"])
def test_unknown_names_are_refused_by_hydra(compose_config, override):
    with pytest.raises(ConfigCompositionException, match=override.split("=")[0]):
        compose_config(override)


def test_train_refuses_in_one_line_and_exits_with_2():
    done = subprocess.run(
        [sys.executable, "scripts/train.py", "loss=liger", "device=cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line]
    assert lines[-1].startswith("train: loss=liger needs a CUDA GPU")
    assert "Traceback" not in done.stderr
