"""The parts of a run against their definitions: learning rate, memory probe, fit, results, verdicts."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from training.measure import MIB, Clock, MemoryProbe, peak_flops
from training.memory_fit import MARGIN, explain, largest_batch
from training.optim import adamw, learning_rate
from training.provenance import provenance
from training.results import markdown_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments" / "mve"))
from criteria import as_text, best_within, verdicts  # noqa: E402

CPU = torch.device("cpu")


def test_learning_rate_warms_up_linearly_and_ends_at_the_floor():
    optim = OmegaConf.create({"lr": 2.0, "warmup_fraction": 0.1, "floor": 0.25})
    rates = [learning_rate(step, 100, optim) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[-1] == pytest.approx(0.5)
    # Half way down the cosine: the mean of top and floor.
    assert rates[54] == pytest.approx((2.0 + 0.5) / 2)
    assert all(a > b for a, b in zip(rates[9:], rates[10:]))


def test_weight_decay_is_on_matrices_only():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optim = OmegaConf.create({"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8})
    groups = adamw(model, optim, CPU).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 1), (0.0, 3)]


def test_memory_probe_sees_a_temporary_and_forgets_it_on_reset():
    """A buffer of 128 MiB that is gone again shows in its window's peak, and not in the next window's."""
    probe = MemoryProbe(CPU)
    probe.reset()
    before = probe.now()
    buffer = torch.ones(128 * MIB // 4)
    del buffer
    assert 120 < probe.peak()[0] - before < 160
    probe.reset()
    assert probe.peak()[0] - before < 16


def test_clock_is_in_milliseconds(monkeypatch):
    times = iter([10.0, 10.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock(CPU)
    assert clock.milliseconds(clock.mark(), clock.mark()) == pytest.approx(250)


def test_peak_flops_is_unknown_for_a_cpu():
    assert peak_flops(CPU) is None


def test_largest_batch_from_two_measurements():
    fixed, each, capacity = 1000.0, 30.0, 4000.0
    fits = largest_batch(lambda b: fixed + each * b, capacity)
    assert fixed + each * fits <= MARGIN * capacity < fixed + each * (fits + 1)


def test_nothing_fits():
    def never(_sequences):
        raise torch.OutOfMemoryError

    assert largest_batch(never, 100) is None
    assert "not even one sequence fits" in explain("cce", 4, 8192, None)


def test_provenance_is_complete_and_json():
    record = json.loads(json.dumps(provenance(3)))
    assert record["seed"] == 3 and record["date"].endswith("+00:00")
    assert record["versions"]["torch"] == torch.__version__


def test_markdown_table_shows_missing_values_as_dash():
    assert markdown_table([{"a": 1.26, "b": None}], {"a": ".1f", "b": ""}).splitlines()[-1] == "| 1.3 | – |"


def row(loss, *, batch_size=16, memory=1000.0, rate=100.0, train_loss=5.0, gpu="NVIDIA H200"):
    return {
        "loss": loss, "status": "finished", "batch_size": batch_size, "peak_allocated_mib": memory, "tokens_per_second": rate,
        "train_loss": train_loss, "valid_perplexity": math.exp(train_loss), "provenance": {"gpu": gpu},
    }  # fmt: skip


def results(table):
    return [verdict.result for verdict in table]


def test_verdicts_at_and_beyond_each_threshold():
    baseline = row("standard")
    passing = row("cce", memory=500.0, rate=95.0, train_loss=5.0005)
    scan = [row("cce", batch_size=32, memory=1000.0, rate=110.0), row("cce", batch_size=64, memory=1001.0, rate=900.0)]
    assert results(verdicts([baseline, passing], scan)) == ["PASS"] * 5
    failing = row("cce", memory=501.0, rate=94.9, train_loss=5.011)
    scan = [row("cce", batch_size=32, memory=1000.0, rate=109.9)]
    assert results(verdicts([baseline, failing], scan)) == ["FAIL"] * 5


def test_batch_is_grown_only_within_the_baselines_memory():
    scan = [row("cce", batch_size=32, memory=900, rate=10), row("cce", batch_size=64, memory=1100, rate=20)]
    assert best_within(scan, "cce", 1000, larger_than=16)["batch_size"] == 32
    assert best_within(scan, "cce", 1000, larger_than=32) is None
    assert best_within(scan, "cce", 100, larger_than=16) is None


def test_without_a_gpu_only_the_loss_is_judged():
    table = verdicts([row("standard", gpu=None), row("cce", gpu=None)], [])
    assert results(table) == ["needs a GPU"] * 3 + ["PASS", "needs a GPU"]
    assert "4 need a GPU" in as_text(table)
