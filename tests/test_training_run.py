"""Whole runs on the CPU: what is recorded, resume bit for bit after SIGKILL, SIGTERM, NaN, out of memory."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_loss_heads import CPU_HEADS

from training import checkpoint, loop
from training.loop import RunError, run
from training.records import read_records
from training.run_folder import open_run_folder

ROOT = Path(__file__).resolve().parent.parent


def metrics_of(summary: dict) -> Path:
    return Path(summary["folder"]) / "metrics.jsonl"


def losses(metrics: Path) -> list[float]:
    return [record["loss"] for record in read_records(metrics, "step")]


def test_a_run_records_what_it_says(compose_config, tiny):
    summary = run(compose_config(*tiny))
    records = read_records(metrics_of(summary))
    assert [record["kind"] for record in records] == ["run", *["step"] * 12, "eval", "end"]
    first, steps, evaluation = records[0], records[1:-2], records[-2]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert [record["tokens"] for record in steps] == [32 * i for i in range(1, 13)]
    for record in steps:
        for name in ("loss", "grad_norm", "lr", "step_ms", "tokens_per_second", "peak_allocated_mib", "loss_layer_ms"):
            assert record[name] > 0, name
        assert record["loss_layer_ms"] < record["step_ms"]
        assert record["mfu"] is None  # a CPU has no listed peak
    assert all("startup_seconds" not in record for record in steps[1:])
    # An untrained model is near the uniform distribution over the vocabulary.
    assert steps[0]["loss"] == pytest.approx(math.log(64), abs=0.3)
    assert evaluation["valid_perplexity"] == pytest.approx(math.exp(evaluation["valid_loss"]))
    assert evaluation["valid_tokens"] == 64
    provenance = first["provenance"]
    assert provenance["seed"] == 1 and provenance["versions"]["torch"] == torch.__version__ and provenance["date"]
    assert first["parameters"] > 64 * 32
    assert summary["train_loss"] == pytest.approx(steps[-1]["loss"])
    assert summary["status"] == "finished" and records[-1]["status"] == "finished"


@pytest.mark.parametrize("model", ["gla", "gated_deltanet", "kda", "transformer"])
def test_every_model_trains_alike_with_every_head(compose_config, tiny, model):
    """Every head takes a model down the path that the standard head takes."""
    curves = {}
    for loss in CPU_HEADS:
        cfg = compose_config(
            *tiny, f"model={model}", f"loss={loss}", "train.steps=6", "checkpoint.every=0", "optim.lr=0.01"
        )
        curves[loss] = losses(metrics_of(run(cfg)))
    assert curves["standard"][-1] < curves["standard"][0] - 0.05
    for loss, curve in curves.items():
        assert curve == pytest.approx(curves["standard"], abs=2e-3), loss


def test_micro_batches_are_one_step(compose_config, tiny):
    """Two micro-batches of 2 take the steps of one batch of 4: same tokens, same losses but for the order of the sums."""
    whole = run(compose_config(*tiny, "train.batch_size=4", "train.micro_batches=1"))
    split = run(compose_config(*tiny, "train.batch_size=2", "train.micro_batches=2"))
    assert losses(metrics_of(split)) == pytest.approx(losses(metrics_of(whole)), rel=1e-5)


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "train.py"), *overrides]


def newest_metrics(runs: Path) -> Path | None:
    return max(runs.glob("*/*/metrics.jsonl"), default=None)


def wait_for_step(runs: Path, step: int, process: subprocess.Popen, seconds: float = 120) -> Path:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        metrics = newest_metrics(runs)
        if metrics and any(record["step"] >= step for record in read_records(metrics, "step")):
            return metrics
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.stderr.read() if process.stderr else ''}")


LONG = ["train.steps=160", "train.log_every=1", "checkpoint.every=5"]


def test_killed_run_goes_on_bit_for_bit(tiny, tmp_path, compose_config):
    """SIGKILL in the middle, then resume=auto: the loss curve is the one of an unbroken run, every bit of it."""
    runs = tmp_path / "runs"
    overrides = [*tiny, *LONG, "resume=auto"]
    process = subprocess.Popen(command(*overrides), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    metrics = wait_for_step(runs, 12, process)
    process.kill()
    process.wait()
    killed_at = len(losses(metrics))
    assert 12 <= killed_at < 160
    subprocess.run(command(*overrides), cwd=ROOT, check=True, capture_output=True)
    assert newest_metrics(runs) == metrics, "resume=auto went on in the same folder"
    assert [record["step"] for record in read_records(metrics, "resume")][0] >= 10
    unbroken = subprocess.run(
        command(*overrides, f"runs={tmp_path / 'unbroken'}"), cwd=ROOT, check=True, capture_output=True
    )
    assert unbroken.returncode == 0
    reference = newest_metrics(tmp_path / "unbroken")
    assert losses(metrics) == losses(reference) and len(losses(metrics)) == 160
    for name in ("valid_loss", "train_loss", "tokens"):
        assert read_records(metrics, "end")[-1][name] == read_records(reference, "end")[-1][name], name


def test_sigterm_writes_a_checkpoint_and_exits_cleanly(tiny, tmp_path):
    runs = tmp_path / "runs"
    overrides = [*tiny, *LONG, "train.steps=4000", "checkpoint.every=0", "resume=auto"]
    process = subprocess.Popen(command(*overrides), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = wait_for_step(runs, 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    end = read_records(metrics, "end")[-1]
    assert end["status"] == "interrupted" and f"stopped at step {end['step']}" in output
    saved = checkpoint.completed(metrics.parent / "checkpoints")
    assert [path.name for path in saved] == [f"step-{end['step']:08d}"]
    assert len(losses(metrics)) == end["step"]


def test_half_written_checkpoint_is_not_picked_up(compose_config, tiny, tmp_path, monkeypatch):
    """A process that dies inside a save leaves a partial folder; the run goes on from the checkpoint before."""

    def dies(state, checkpoint_id):
        checkpoint_id.mkdir(parents=True)
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        raise KeyboardInterrupt

    cfg = compose_config(*tiny, "resume=auto")
    save = checkpoint.dcp.save
    monkeypatch.setattr(
        checkpoint.dcp,
        "save",
        lambda *a, **k: save(*a, **k) if "00000008" not in str(k["checkpoint_id"]) else dies(*a, **k),
    )
    with pytest.raises(KeyboardInterrupt):
        run(cfg)
    monkeypatch.setattr(checkpoint.dcp, "save", save)
    folder = newest_metrics(tmp_path / "runs").parent
    assert [path.name for path in checkpoint.completed(folder / "checkpoints")] == ["step-00000004"]
    summary = run(cfg)
    assert Path(summary["folder"]) == folder
    assert read_records(folder / "metrics.jsonl", "resume")[0]["step"] == 4
    assert [record["step"] for record in read_records(folder / "metrics.jsonl", "step")] == list(range(1, 13))
    assert not list((folder / "checkpoints").glob("partial-*"))


def test_resume_auto_starts_anew_when_the_configuration_differs(compose_config, tiny):
    first = run(compose_config(*tiny, "resume=auto"))
    assert run(compose_config(*tiny, "resume=auto"))["folder"] != first["folder"], "a finished run is not gone on with"
    other = run(compose_config(*tiny, "resume=auto", "seed=2"))
    assert losses(metrics_of(other)) != losses(metrics_of(first))


def test_resume_of_a_named_folder_needs_its_configuration(compose_config, tiny):
    summary = run(compose_config(*tiny))
    with pytest.raises(ValueError, match="another configuration"):
        run(compose_config(*tiny, f"resume={summary['folder']}", "seed=2"))
    with pytest.raises(ValueError, match="is finished"):
        run(compose_config(*tiny, f"resume={summary['folder']}"))
    assert len(losses(metrics_of(summary))) == 12, "the records of the finished run are untouched"


def test_a_run_killed_after_its_last_step_still_ends(compose_config, tiny):
    """The last checkpoint is there, the summary is not: resuming makes it, without another step."""
    whole = run(compose_config(*tiny))
    metrics = metrics_of(whole)
    kept = [line for line in metrics.read_text().splitlines() if json.loads(line)["kind"] not in ("eval", "end")]
    metrics.write_text("".join(line + "\n" for line in kept))
    again = run(compose_config(*tiny, "resume=auto"))
    assert again["folder"] == whole["folder"]
    assert {name: again[name] for name in ("train_loss", "valid_loss", "step")} == {
        name: whole[name] for name in ("train_loss", "valid_loss", "step")
    }
    assert len(losses(metrics)) == 12


def test_a_run_killed_before_its_first_record_starts_in_its_folder(compose_config, tiny):
    cfg = compose_config(*tiny, "resume=auto")
    folder, goes_on = open_run_folder(cfg)
    assert not goes_on and not (folder / "metrics.jsonl").exists()
    summary = run(cfg)
    assert Path(summary["folder"]) == folder
    assert [record["kind"] for record in read_records(metrics_of(summary))][0] == "run"


def test_infinite_gradient_stops_before_a_checkpoint(compose_config, tiny, monkeypatch):
    """A finite loss with a gradient that is not: the weights are spoiled, and must not become the last good checkpoint."""
    clip = torch.nn.utils.clip_grad_norm_
    calls = iter(range(100))
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *a: clip(*a) * (math.inf if next(calls) == 7 else 1.0)
    )
    with pytest.raises(RunError, match="gradient norm is inf at step 8; the last good checkpoint is .*step-00000004"):
        run(compose_config(*tiny))


def test_nan_loss_stops_with_the_step_and_the_last_good_checkpoint(compose_config, tiny, monkeypatch):
    calls = 0
    original = loop.Training.forward_backward

    def poisoned(self, *arguments):
        nonlocal calls
        calls += 1
        return original(self, *arguments) * (math.nan if calls == 7 else 1.0)

    monkeypatch.setattr(loop.Training, "forward_backward", poisoned)
    with pytest.raises(RunError, match="the loss is nan at step 7; the last good checkpoint is .*step-00000004"):
        run(compose_config(*tiny))


def test_out_of_memory_says_what_would_fit(compose_config, tiny, monkeypatch):
    """A device that holds 5 sequences: the message names batch, length and head, and a batch that fits."""
    original = loop.Training.forward_backward

    def small_device(self, inputs, targets, share, layers, peaks):
        if inputs.shape[0] > 5:
            raise torch.OutOfMemoryError("out of memory")
        loss = original(self, inputs, targets, share, layers, peaks)
        peaks[:] = [(100.0 + 20.0 * inputs.shape[0], 0.0)]  # MiB: fixed + per sequence
        return loss

    monkeypatch.setattr(loop.Training, "forward_backward", small_device)
    monkeypatch.setattr(loop.Training, "memory_capacity_mib", lambda self: 210.0 / 0.95)
    with pytest.raises(RunError) as error:
        run(compose_config(*tiny, "train.batch_size=8", "loss=standard"))
    message = str(error.value)
    assert "loss=standard with train.batch_size=8, train.seq_len=16" in message
    assert "train.batch_size=5 would fit (with train.micro_batches=2" in message
    assert "loss=cce" in message


def test_a_sweep_goes_on_past_a_combination_that_cannot_run(tiny, tmp_path):
    done = subprocess.run(
        command("--multirun", *tiny, "loss=liger,cce", "train.steps=2"), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "train: loss=liger needs a CUDA GPU" in done.stderr
    ends = [read_records(path, "end") for path in (tmp_path / "runs").glob("*/*/metrics.jsonl")]
    assert [end[0]["status"] for end in ends] == ["finished"]


def test_wandb_offline_run_can_be_synced_later(compose_config, tiny):
    summary = run(compose_config(*[o for o in tiny if o != "tracking=none"], "tracking=wandb", "train.steps=3"))
    files = list(Path(summary["folder"]).glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1 and files[0].stat().st_size > 0


def test_records_survive_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"kind": "step", "step": 1}) + "\n" + '{"kind": "step", "st')
    assert read_records(path) == [{"kind": "step", "step": 1}]
