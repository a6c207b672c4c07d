"""The picture of the minimum viable experiment: loss curves, the memory of a step, throughput."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {"standard": "#7f7f7f", "compile": "#1f77b4", "liger": "#ff7f0e", "chunked": "#9467bd", "cce": "#d62728"}
LABELS = {
    "standard": "standard (eager)",
    "compile": "standard (compiled)",
    "liger": "Liger",
    "chunked": "chunked (PyTorch)",
    "cce": "CCE-Kahan (ours)",
}


def draw(path: Path, same: list[dict], scan: list[dict], curves: dict[str, list[float]]) -> None:
    """Three panels from the rows (training/results.py) and the training loss of each head step by step."""
    runs = [row for row in same if row["status"] == "finished"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), constrained_layout=True)
    source = runs[0]["provenance"]
    figure.suptitle(
        f"Minimum viable experiment: {runs[0]['parameters'] / 1e6:.1f} M parameter GLA, V = {runs[0]['vocab_size']:,}, "
        f"T = {runs[0]['seq_len']}, {runs[0]['tokens'] / 1e6:.2f} M tokens of {runs[0]['data']} text, {source['gpu'] or 'CPU'}"
    )
    for head, losses in curves.items():
        left.plot(range(1, len(losses) + 1), losses, color=COLOURS[head], label=LABELS[head], linewidth=1.2, alpha=0.8)
    left.set(xlabel="step", ylabel="training loss (nats/token)", title="The heads train alike")
    if not scan:  # else the right panel names the colours
        left.legend(frameon=False, loc="lower left", fontsize=8)
    if "standard" in curves:
        inset = left.inset_axes([0.5, 0.5, 0.48, 0.46])
        for head, losses in curves.items():
            gaps = [1e3 * (a - b) for a, b in zip(losses, curves["standard"])]
            inset.plot(range(1, len(gaps) + 1), gaps, color=COLOURS[head], linewidth=0.9)
        inset.set_title("difference to standard (10⁻³ nats)", fontsize=9)
        inset.tick_params(labelsize=8)

    heads = [row["loss"] for row in runs]
    layer = [row["loss_layer_mib"] for row in runs]
    total = [row["peak_allocated_mib"] for row in runs]
    middle.barh(heads, total, color=[COLOURS[h] for h in heads], alpha=0.35, label="peak of the step")
    middle.barh(heads, layer, color=[COLOURS[h] for h in heads], height=0.4, label="loss layer alone")
    for index, (whole, part) in enumerate(zip(total, layer)):
        middle.text(whole, index, f" {whole:,.0f} ({part:,.0f})", va="center")
    middle.set(xlabel="MiB: peak of the step (the loss layer alone)", title=f"Memory, B = {runs[0]['batch_size']}")
    middle.set_xlim(0, 1.35 * max(total))
    middle.invert_yaxis()

    if scan:
        for head in dict.fromkeys(row["loss"] for row in scan):
            points = sorted(
                (r["batch_size"], r["tokens_per_second"] / 1e3)
                for r in scan
                if r["loss"] == head and r["status"] == "finished"
            )
            right.plot(*zip(*points), marker="o", color=COLOURS[head], label=LABELS[head])
        right.set_xscale("log", base=2)
        sizes = sorted({row["batch_size"] for row in scan})
        right.set_xticks(sizes, [str(size) for size in sizes])
        right.set(xlabel="batch size B (sequences)", ylabel="thousand tokens / s", title="Throughput over batch size")
        right.set_ylim(bottom=0)
        right.legend(frameon=False)
    else:
        rates = [row["tokens_per_second"] / 1e3 for row in runs]
        right.barh(heads, rates, color=[COLOURS[h] for h in heads], alpha=0.7)
        for index, rate in enumerate(rates):
            right.text(rate, index, f" {rate:,.2f}", va="center")
        right.set(xlabel="thousand tokens / s", title=f"Throughput, B = {runs[0]['batch_size']}")
        right.set_xlim(0, 1.2 * max(rates))
        right.invert_yaxis()
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
