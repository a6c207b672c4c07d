"""The success criteria of the proposal's minimum viable experiment, as functions of its rows.

A row is a run (training/results.py). `same` holds one run of each head at the same batch size over the whole experiment;
`scan` holds short runs over batch sizes. Two baselines: the standard head in eager mode and under torch.compile (the one
that the proposal names); a criterion is judged against each.

Perplexity is a target of the full study; in the scaled-down run without a GPU the noise between two orders of summation
exceeds its 0.1, so only the loss is judged there.
"""

from dataclasses import dataclass

BASELINES = {"standard": "standard (eager)", "compile": "standard (torch.compile)"}
NEEDS_GPU = "needs a GPU"


@dataclass(frozen=True)
class Verdict:
    criterion: str
    baseline: str
    value: str
    target: str
    result: str  # PASS | FAIL | needs a GPU


def judge(
    criterion: str, baseline: str, value: float | None, form: str, target: str, passed: bool, on_gpu: bool
) -> Verdict:
    shown = "–" if value is None else format(value, form)
    return Verdict(
        criterion, BASELINES[baseline], shown, target, ("PASS" if passed else "FAIL") if on_gpu else NEEDS_GPU
    )


def verdicts(same: list[dict], scan: list[dict]) -> list[Verdict]:
    """The criteria of the section 'Success Criteria' of the proposal, then its table of metrics as far as the MVE shows them."""
    by_head = {row["loss"]: row for row in same if row["status"] == "finished"}
    if "cce" not in by_head:
        raise ValueError("no finished run with loss=cce: the experiment has no verdict")
    ours = by_head["cce"]
    on_gpu = ours["provenance"]["gpu"] is not None
    table = []
    for name in BASELINES:
        if name not in by_head:
            continue
        base = by_head[name]
        saved = 1 - ours["peak_allocated_mib"] / base["peak_allocated_mib"]
        speed = ours["tokens_per_second"] / base["tokens_per_second"]
        gap = abs(ours["train_loss"] - base["train_loss"])
        worse = ours["valid_perplexity"] - base["valid_perplexity"]
        best = best_within(scan, "cce", base["peak_allocated_mib"], larger_than=base["batch_size"])
        gain = None if best is None else best["tokens_per_second"] / base["tokens_per_second"]
        grown = "" if best is None else f" (B = {best['batch_size']} for {base['batch_size']})"
        table += [
            judge("peak memory saved, same batch", name, saved, ".1%", "≥ 50 %", saved >= 0.50, on_gpu),
            judge("throughput, same batch", name, speed, ".3f", "≥ 0.95 ×", speed >= 0.95, on_gpu),
            judge(
                f"throughput, batch grown within the baseline's memory{grown}",
                name, gain, ".3f", "≥ 1.10 ×", gain is not None and gain >= 1.10, on_gpu,
            ),
            judge("difference of the final training loss (nats)", name, gap, ".4f", "≤ 0.01", gap <= 0.01, True),
            judge("validation perplexity above the baseline's", name, worse, "+.3f", "≤ 0.1", worse <= 0.1, on_gpu),
        ]  # fmt: skip
    return table


def best_within(scan: list[dict], loss: str, memory_mib: float, larger_than: int) -> dict | None:
    """The fastest run of a head at a larger batch whose peak memory is within `memory_mib`."""
    runs = [
        row
        for row in scan
        if row["loss"] == loss
        and row["status"] == "finished"
        and row["batch_size"] > larger_than
        and row["peak_allocated_mib"] <= memory_mib
    ]
    return max(runs, key=lambda r: r["tokens_per_second"], default=None)


def as_text(table: list[Verdict]) -> str:
    """A markdown table, a line for each criterion and baseline."""
    lines = ["| criterion | against | value | target | verdict |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {v.criterion} | {v.baseline} | {v.value} | {v.target} | {v.result} |" for v in table]
    failed = [v for v in table if v.result == "FAIL"]
    lines += [
        "",
        f"{sum(v.result == 'PASS' for v in table)} pass, {len(failed)} fail, "
        f"{sum(v.result == NEEDS_GPU for v in table)} need a GPU.",
    ]
    return "\n".join(lines) + "\n"
