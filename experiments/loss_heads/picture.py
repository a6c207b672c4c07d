"""The Pareto picture: time of a step against its memory, a panel for each shape."""

import math
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

OURS = {  # curve → colour, line, marker
    "ours cce_exact": ("#d62728", "-", "o"),
    "ours cce_kahan_full_c": ("#1f77b4", "-", "s"),
    "ours plain accumulation": ("#9467bd", ":", "^"),
    "ours cce (filtered)": ("#2ca02c", "--", "D"),
}
PEER = "#444444"
PANEL = (7.2, 7.6)  # inches
LEAST_MIB = 1.0  # what is below is drawn here: the axis is logarithmic
ROUGH = 1.5  # times the standard loss's error in dE or dC: such an exact gradient is marked as rounded more
FLOORS = {3: "3 GEMMs: floor with logits kept", 4: "4 GEMMs: floor with logits recomputed"}
TIMES = (0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
SHORT = (("F.linear_cross_entropy", "lce"), ("FusedLinearCrossEntropyLoss", ""), ("accumulation", "accum."))
# Places of a label around its point, in points (1/72 inch): near ones first.
OFFSETS = [
    (distance * math.cos(angle), distance * math.sin(angle))
    for distance in (7, 14, 22, 32, 44, 58, 74, 92)
    for angle in (i * math.pi / 8 for i in (0, 8, 1, 15, 7, 9, 2, 14, 6, 10, 3, 13, 5, 11, 4, 12))
]


def draw(path: Path, measured: list[dict]) -> None:
    """From measured rows (rows.py): the trained softmax where there is one, else the first kind of the shape."""
    panels = []
    for shape in sorted({row["shape"] for row in measured}, key=lambda name: (len(name), name)):
        here = [row for row in measured if row["shape"] == shape]
        kinds = [row["kind"] for row in here]
        kind = "trained" if "trained" in kinds else kinds[0]
        panels.append([row for row in here if row["kind"] == kind])
    width = PANEL[0] * len(panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(width, PANEL[1]), squeeze=False)
    rows_of_legend = 2 if len(panels) > 1 else 4
    figure.subplots_adjust(
        left=0.65 / width, right=1 - 0.2 / width, top=1 - 0.8 / PANEL[1], bottom=(0.65 + 0.2 * rows_of_legend) / PANEL[1],
        wspace=0.11,
    )  # fmt: skip
    source = measured[-1]["provenance"]
    figure.suptitle(
        f"Loss and gradients of a linear cross-entropy: time against memory ({source['gpu'] or 'CPU'}, "
        f"torch {source['versions']['torch']}, triton {source['versions']['triton']})",
        fontsize=13 if len(panels) > 1 else 9.5,
    )
    for panel, rows in zip(axes[0], panels):
        draw_panel(panel, rows)
    figure.legend(
        handles=legend(measured), loc="lower center", ncols=2 if len(panels) == 1 else 4, frameon=False, fontsize=9
    )
    figure.canvas.draw()
    for panel, rows in zip(axes[0], panels):
        place_labels(panel, rows)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def place(row: dict) -> tuple[float, float]:
    return max(LEAST_MIB, row["beyond_mib"]), row["step_gemms"]


def peers_in(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["curve"] is None]


def rounds_more(row: dict, rows: list[dict]) -> bool:
    """Whether an exact gradient is further off than ROUGH times the standard loss's."""
    standard = next((r for r in rows if r["entry"] == "standard eager"), None)
    return standard is not None and any(row[name] > ROUGH * standard[name] for name in ("de_error", "dc_error"))


def draw_panel(axes: Axes, rows: list[dict]) -> None:
    first = rows[0]
    axes.set_xscale("log")
    axes.set_yscale("log")
    for row in peers_in(rows):
        x, y = place(row)
        if not row["exact"]:
            axes.plot(x, y, "x", color=PEER, markersize=8, markeredgewidth=2, zorder=6)
        else:
            face = "white" if rounds_more(row, rows) else PEER
            axes.plot(x, y, "o", color=PEER, markerfacecolor=face, markersize=7, zorder=6)
    for curve, (colour, line, marker) in OURS.items():
        points = sorted(place(row) for row in rows if row["curve"] == curve)
        if points:
            axes.plot(*zip(*points), line, marker=marker, color=colour, markersize=5.5, linewidth=1.8, zorder=4)
    xs, ys = zip(*(place(row) for row in rows))
    low, high = min(*ys, 2.8) / 1.15, max(*ys, 4.2) * 1.25
    axes.set_ylim(low, high)
    axes.set_xlim(min(xs) / 1.8, max(xs) * 3)
    for products, name in FLOORS.items():
        axes.axhline(products, color="#999999", linewidth=1, linestyle=(0, (6, 3)), zorder=1)
        axes.annotate(
            name, (0, products), xycoords=("axes fraction", "data"), xytext=(4, 2), textcoords="offset points",
            ha="left", va="bottom", fontsize=8, color="#777777",
        )  # fmt: skip
    axes.yaxis.set_major_locator(FixedLocator([t for t in TIMES if low <= t <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.grid(True, which="major", color="#eeeeee", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("memory beyond inputs and gradients, forward + backward (MiB)")
    axes.set_ylabel("forward + backward (GEMMs: logits products of this shape)")
    unit = sorted(row["gemm_ms"] for row in rows)[len(rows) // 2]
    letter = "" if "x" in first["shape"] else f"{first['shape']}: "
    axes.set_title(
        f"{letter}N = {first['tokens']:,}, D = {first['hidden']:,}, V = {first['vocabulary']:,}, "
        f"{first['kind']} softmax, GEMM {unit:.3g} ms",
        fontsize=10,
    )


def legend(rows: list[dict]) -> list:
    def handle(label: str, **style):
        return plt.Line2D([], [], label=label, **style)

    curves = {row["curve"] for row in rows}
    found = [
        handle(f"{name}, by budget", color=colour, linestyle=line, marker=marker)
        for name, (colour, line, marker) in OURS.items()
        if name in curves
    ]
    return [
        *found,
        handle("peer, exact gradient", color=PEER, marker="o", linestyle=""),
        handle(
            f"peer, exact, error > {ROUGH:g} × standard's",
            color=PEER, marker="o", markerfacecolor="white", linestyle="",
        ),
        handle("peer, filtered gradient", color=PEER, marker="x", markeredgewidth=2, linestyle=""),
    ]  # fmt: skip


def short(name: str) -> str:
    for long, brief in SHORT:
        name = name.replace(long, brief)
    return name.strip()


def place_labels(axes: Axes, rows: list[dict]) -> None:
    """A name beside each peer, at the cheapest of OFFSETS: the text shall cover nothing, and its leader no other point.

    A box is (left, bottom, right, top) in pixels.
    """
    scale = axes.figure.dpi / 72
    renderer = axes.figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer).extents
    texts = [text.get_window_extent(renderer).extents for text in axes.texts]
    points = {row["entry"]: around(axes.transData.transform(place(row)), 5 * scale) for row in rows}
    curves = [
        around(point, 2 * scale)
        for line in axes.lines
        if len(line.get_xdata()) > 2  # a curve of ours; peers are single points, floors have two
        for point in along(axes.transData.transform(line.get_xydata()), 6 * scale)
    ]
    for row in sorted(peers_in(rows), key=lambda row: (-row["step_gemms"], row["beyond_mib"])):
        text = axes.annotate(
            short(row["entry"]), place(row), xytext=(0, 0), textcoords="offset points", fontsize=8.8, va="center",
            arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}, zorder=5,
        )  # fmt: skip
        text.arrow_patch.set_visible(False)
        left, bottom, right, top = text.get_window_extent(renderer).extents
        size, here = (right - left, top - bottom), axes.transData.transform(place(row))
        others = np.array([box for entry, box in points.items() if entry != row["entry"]])
        near = others + 8 * scale * np.array([-1, -1, 1, 1]) if len(others) else others

        def cost(offset: tuple[float, float], here=here, size=size, others=others, near=near) -> float:
            box = label_box(here + scale * np.array(offset), size, offset)
            tip = np.clip(here, box[:2], box[2:])
            leader = [around(point, 1.0) for point in along([here, tip], 3 * scale)]
            return (
                100 * (not inside(box, frame))
                + 10 * overlap([box], [*texts, *points.values()]).sum()
                + 10 * overlap(leader, [*texts, *others]).any(0).sum()
                + 3 * overlap([box], curves).any()
                + 1 * overlap([box], near).sum()  # a label beside another's point reads as that one's
                + math.hypot(*offset) / 30
            )

        best = min(OFFSETS, key=cost)
        text.set_position(best)
        text.set_horizontalalignment(alignment(best))
        text.arrow_patch.set_visible(math.hypot(*best) > 10)
        texts.append(label_box(here + scale * np.array(best), size, best))


def alignment(offset: tuple[float, float]) -> str:
    return "left" if offset[0] > 1 else "right" if offset[0] < -1 else "center"


def label_box(anchor: np.ndarray, size: tuple[float, float], offset: tuple[float, float]) -> np.ndarray:
    """The box of a text whose near edge is at `anchor`, `offset` from its point."""
    left = anchor[0] - size[0] * {"left": 0, "center": 0.5, "right": 1}[alignment(offset)]
    return np.array([left, anchor[1] - size[1] / 2, left + size[0], anchor[1] + size[1] / 2])


def around(point: np.ndarray, radius: float) -> np.ndarray:
    return np.concatenate([np.asarray(point) - radius, np.asarray(point) + radius])


def along(points, step: float) -> list[np.ndarray]:
    """Points at most `step` apart on the line through `points`."""
    found = []
    for start, end in zip(np.asarray(points), np.asarray(points)[1:]):
        count = max(1, math.ceil(np.linalg.norm(end - start) / step))
        found += [start + (end - start) * i / count for i in range(count + 1)]
    return found


def overlap(boxes, others) -> np.ndarray:
    """Which of `boxes` overlap which of `others`: bool (boxes, others)."""
    a, b = np.reshape(boxes, (-1, 1, 4)), np.reshape(others, (1, -1, 4))
    return ((a[..., :2] < b[..., 2:]) & (b[..., :2] < a[..., 2:])).all(-1)


def inside(box: np.ndarray, frame: np.ndarray) -> bool:
    return bool((box[:2] >= frame[:2]).all() and (box[2:] <= frame[2:]).all())
