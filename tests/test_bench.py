"""The benchmark of linear cross-entropies: its reference, problems, rows, entries, arguments and picture. No timings."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from matplotlib.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments" / "loss_heads"))
import accumulation  # noqa: E402
import cut_off  # noqa: E402
import measuring  # noqa: E402
import peers  # noqa: E402
import picture  # noqa: E402
import power  # noqa: E402
import reference as reference_module  # noqa: E402
import rows  # noqa: E402
import run  # noqa: E402
import trace_kernels  # noqa: E402
from problems import KINDS, NAMED, TINY, Shape, check_problem, parse_shape, problem  # noqa: E402
from reference import reference, relative_error  # noqa: E402
from report import accumulation_report, accuracy_report, speed_report, write_report  # noqa: E402

CPU = torch.device("cpu")
SMALL = Shape(300, 48, 500)
FEW = measuring.Sampling(2, 0.001)


# ---- reference ----


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_formula_in_fp64_over_any_chunks(kind, monkeypatch):
    monkeypatch.setattr(reference_module, "CHUNK_BYTES", 8 * SMALL.vocabulary * 128)  # chunks of 128, 128 and 44 tokens
    e, c, targets = problem(SMALL, kind, 0, CPU)
    found = reference(e, c, targets)
    wide_e, wide_c = (tensor.detach().double().requires_grad_() for tensor in (e, c))
    loss = F.cross_entropy(wide_e @ wide_c.T, targets)
    loss.backward()
    # F.cross_entropy subtracts: it has 1e-16 of a logit of about 20, the reference 1e-16 of the loss.
    assert found.loss == pytest.approx(loss.item(), rel=1e-9, abs=1e-14)
    assert relative_error(found.de, wide_e.grad) < 1e-10
    assert relative_error(found.dc, wide_c.grad) < 1e-10


def test_reference_loss_keeps_its_precision_when_p_is_one():
    """Two classes, logits z and 0: the loss is log1p(exp(−z)), which lse − z cannot tell from 0 at z = 50."""
    e = torch.full((1, 1), 50.0)
    c = torch.tensor([[1.0], [0.0]])
    found = reference(e, c, torch.tensor([0]))
    assert found.loss == pytest.approx(math.exp(-50), rel=1e-12)
    assert found.de.item() == pytest.approx(-math.exp(-50), rel=1e-12)


def test_reference_counts_the_tiles_that_a_filter_must_keep():
    e, c, targets = problem(SMALL, "trained", 0, CPU)
    found = reference(e, c, targets)
    strong = (e.double() @ c.double().T).softmax(-1)
    strong[torch.arange(SMALL.tokens), targets] -= 1
    strong = strong.abs() >= 2.0**-12
    tiles = [bool(columns.any()) for tokens in strong.split(128) for columns in tokens.split(128, dim=1)]
    assert found.kept_tiles == sum(tiles) / len(tiles)
    p_target = (e.double() @ c.double().T).softmax(-1).gather(1, targets[:, None])
    assert found.median_p_target == pytest.approx(p_target.median().item())


def test_reference_knows_what_rounding_alone_costs():
    found = reference(*problem(SMALL, "trained", 0, CPU))
    # bf16 keeps 8 bits: at most 2^-9 of each element, and about 2^-9 / √3 in the mean.
    assert 0.7 * 2**-9 / math.sqrt(3) < found.de_rounding < 2**-9
    assert relative_error(found.de.bfloat16(), found.de) == found.de_rounding


# ---- problems ----


@pytest.mark.parametrize("shape", [TINY, Shape(256, 320, 5000)])
class TestKinds:
    def softmax(self, shape, kind):
        e, c, targets = problem(shape, kind, 1, CPU)
        return (e.detach().double() @ c.detach().double().T).softmax(-1), targets

    def test_untrained_is_nearly_flat(self, shape):
        p, _ = self.softmax(shape, "untrained")
        deviation = 0.02 * math.sqrt(shape.hidden)
        assert p.log().std(-1).median().item() == pytest.approx(deviation, rel=0.1)
        assert p.max() < 10 / shape.vocabulary

    def test_trained_has_a_bias_a_peak_and_a_tail(self, shape):
        p, targets = self.softmax(shape, "trained")
        p_target = p.gather(1, targets[:, None])[:, 0]
        loss = -p_target.log().mean()
        assert 2 < loss < 0.8 * math.log(shape.vocabulary)
        assert p_target.quantile(0.9) > 0.05  # a peak for some
        tail = torch.where(p < 2.0**-12, p, 0).sum(-1).median()
        assert 0.02 < tail < 0.9
        ranks = torch.arange(1, shape.vocabulary + 1).double()
        assert torch.corrcoef(torch.stack([p.log().mean(0), -ranks.log()]))[0, 1] > 0.6  # frequent classes are likelier

    def test_confident_is_confident_and_not_saturated(self, shape):
        p, targets = self.softmax(shape, "confident")
        median = p.gather(1, targets[:, None]).median().item()
        assert 0.999 < median < 1 - 1e-6

    def test_targets_follow_zipf(self, shape):
        _, _, targets = problem(shape, "untrained", 0, CPU)
        share = (targets == 0).float().mean().item()
        expected = 1 / sum(1 / rank for rank in range(1, shape.vocabulary + 1))
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected / shape.tokens))


def test_a_problem_is_its_seed():
    first, again, other = (problem(SMALL, "trained", seed, CPU) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[0], other[0])
    assert first[0].dtype == first[1].dtype == torch.bfloat16 and first[0].is_leaf and first[1].requires_grad


def test_shapes_have_names():
    assert parse_shape("A") == NAMED["A"] == Shape(16384, 2048, 128256)
    assert parse_shape("16384x2048x128256").name == "A"
    assert parse_shape("7x8x9").name == "7x8x9" and parse_shape("7x8x9").product_flops == 2 * 7 * 8 * 9
    for text in ("D", "7x8", "7x8x0", "7x8x-9", "7X8X9", "axbxc", ""):
        with pytest.raises(ValueError, match="NxDxV"):
            parse_shape(text)


def test_confident_needs_room():
    with pytest.raises(ValueError, match="take D ≥ 39,"):
        check_problem(Shape(8, 32, 8192), "confident")


# ---- entries ----


def runnable() -> list[peers.Entry]:
    found = []
    for entry in peers.entries(SMALL, "trained", CPU):
        try:
            entry.built(CPU)
        except peers.CannotRun as reason:
            assert str(reason)
            continue
        found.append(entry)
    return found


@pytest.mark.parametrize("entry", runnable(), ids=lambda entry: entry.name)
@pytest.mark.parametrize("kind", ["untrained", "trained"])
def test_every_entry_computes_the_loss_and_its_gradient(entry, kind):
    """In fp32, where the filter's bound is 2^-28 and rounding no excuse."""
    e, c, targets = problem(SMALL, kind, 0, CPU, torch.float32)
    truth = reference(e, c, targets)
    loss = entry.built(CPU).loss(e, c, targets)
    loss.backward()
    assert loss.item() == pytest.approx(truth.loss, rel=1e-6)
    assert relative_error(e.grad, truth.de) < 1e-5
    assert relative_error(c.grad, truth.dc) < 1e-5


def test_a_cpu_runs_ours_and_the_standard_loss():
    names = [entry.name for entry in runnable()]
    assert "standard eager" in names
    assert {f"ours {preset}" for preset in peers.PRESETS} <= set(names)


@pytest.mark.parametrize("shape", [*NAMED.values(), TINY])
@pytest.mark.parametrize("kind", KINDS)
def test_names_of_entries_are_unique_and_budgets_rise(shape, kind):
    found = peers.entries(shape, kind, torch.device("cuda"))
    assert len({entry.name for entry in found}) == len(found)
    for preset in peers.PRESETS:
        budgets = [entry.workspace_mib for entry in found if entry.curve == f"ours {preset}"]
        assert budgets[0] is None and budgets[1:] == sorted(budgets[1:])
    chosen = peers.ours(shape, kind, torch.device("cuda"), [None, 100.0])
    assert [entry.workspace_mib for entry in chosen] == [None, 100.0] * len(peers.PRESETS)


def test_only_what_filters_is_not_exact():
    found = peers.entries(NAMED["A"], "untrained", torch.device("cuda"))
    filters = {entry.name for entry in found if not entry.exact}
    assert {name for name in filters if name.startswith("Apple")} == {
        "Apple cce", "Apple cce_kahan", "Apple cce_kahan_full_c",
    }  # fmt: skip
    assert all("(filtered)" in name for name in filters if not name.startswith("Apple"))


def test_entries_are_selected_by_part_of_their_name():
    found = peers.entries(TINY, "trained", CPU)
    assert peers.selected(found, []) == found
    assert {entry.name.split()[0] for entry in peers.selected(found, ["QUACK", "liger"])} == {"quack", "Liger"}


# ---- measuring ----


def test_a_timed_run_is_prepared_outside_of_its_time():
    calls = []
    found = measuring.times(lambda: calls.append("run"), CPU, FEW, before=lambda: calls.append("before"))
    assert FEW.least <= len(found) <= measuring.MOST * FEW.least
    assert calls == ["before", "run"] * (len(found) + measuring.WARM_UP)


def test_a_row_has_the_errors_of_its_entry_and_leaves_no_gradient():
    e, c, targets = problem(SMALL, "trained", 0, CPU)
    truth = reference(e, c, targets)
    off = peers.Entry(
        "off", True, lambda: peers.Built(lambda e, c, t: 1.01 * F.cross_entropy(e.float() @ c.float().T, t), "x"), False
    )
    row = measuring.measure(off, SMALL, e, c, targets, truth, FEW)
    assert row["status"] == "measured"
    assert row["loss_rel_error"] == pytest.approx(0.01, rel=1e-3)
    # The gradient is 1 % too long, and rounded to bf16.
    for error, rounding in ((row["de_error"], truth.de_rounding), (row["dc_error"], truth.dc_rounding)):
        assert error == pytest.approx(math.hypot(0.01, rounding), rel=0.05)
    assert row["step_gemms"] == row["step_ms"] / row["gemm_ms"]
    assert row["share_8ndv_of_gemm"] == pytest.approx(4 / row["step_gemms"])
    assert row["share_6ndv_of_peak"] is None and row["host_ms"] is None
    assert row["step_samples"] >= 2 and row["step_quartiles_ms"][0] <= row["step_ms"] <= row["step_quartiles_ms"][1]
    assert e.grad is None and c.grad is None


def test_what_fails_is_a_row_with_its_reason():
    e, c, targets = problem(SMALL, "trained", 0, CPU)
    truth = reference(e, c, targets)

    def broken(e, c, targets):
        raise RuntimeError("out of\n  luck")

    def not_a_number(e, c, targets):
        return (e.sum() + c.sum()).float() * math.nan

    def row(loss, needs_cuda=False):
        entry = peers.Entry("x", True, lambda: peers.Built(loss, "x 1"), needs_cuda)
        return measuring.measure(entry, SMALL, e, c, targets, truth, FEW)

    assert row(broken) == {"status": "failed", "reason": "RuntimeError: out of luck"}
    assert row(broken, needs_cuda=True) == {"status": "cannot run", "reason": "needs a CUDA GPU"}
    assert row(not_a_number)["status"] == "failed" and "not finite" in row(not_a_number)["reason"]


def test_a_package_that_is_missing_is_named():
    with pytest.raises(peers.CannotRun, match="no-such-package is not installed"):
        peers.imported("no_such_module", "no-such-package")


# ---- rows ----


def test_a_row_replaces_the_one_with_its_key_and_no_other(tmp_path):
    def row(entry, value, kind="trained"):
        return {"entry": entry, "shape": "A", "kind": kind, "value": value}

    for new in (row("a", 1), row("b", 2), row("a", 3, "confident"), row("a", 4)):
        rows.store(tmp_path, new)
    assert rows.load(tmp_path) == [row("a", 4), row("b", 2), row("a", 3, "confident")]


def test_rows_survive_a_kill_while_they_are_written(tmp_path, monkeypatch):
    first = {"entry": "a", "shape": "A", "kind": "trained"}
    rows.store(tmp_path, first)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            rows.store(tmp_path, {"entry": "b", "shape": "A", "kind": "trained"})
    assert rows.load(tmp_path) == [first]


# ---- the command ----

ARGUMENTS = [
    "--shapes",
    "64x48x200",
    "--entries",
    "eager",
    "ours cce_",
    "Liger",
    "--repeats",
    "2",
    "--seconds",
    "0.001",
]


def test_a_run_that_dies_keeps_its_rows_and_goes_on_with_the_missing(tmp_path, monkeypatch):
    measured = []

    def dying(entry, *rest):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(entry.name)
        return measuring.measure(entry, *rest)

    monkeypatch.setattr(run, "measure", dying)
    with pytest.raises(KeyboardInterrupt):
        run.main([*ARGUMENTS, "--out", str(tmp_path)])
    before = rows.load(tmp_path)
    assert [row["entry"] for row in before] == measured == ["standard eager", "ours cce_exact"]

    monkeypatch.setattr(run, "measure", measuring.measure)
    run.main([*ARGUMENTS, "--out", str(tmp_path), "--missing"])
    after = rows.load(tmp_path)
    assert after[:2] == before
    assert {row["entry"] for row in after[2:]} == {"ours cce_kahan_full_c", "Liger", "Liger fp32 accumulation"}

    run.main([*ARGUMENTS, "--out", str(tmp_path)])  # all anew: each row in the place of the old
    again = rows.load(tmp_path)
    assert [rows.key(row) for row in again] == [rows.key(row) for row in after]
    assert all(row["status"] == "cannot run" or row["step_ms"] != old["step_ms"] for row, old in zip(again, after))
    assert all(row["provenance"]["seed"] == 0 and row["problem"]["loss"] > 0 for row in again)

    report, accuracy = (tmp_path / "report.md").read_text(), (tmp_path / "accuracy.md").read_text()
    for row in again:
        assert row["entry"] in report
        if row["status"] == "measured":
            assert f"{row['de_error']:.2e} | {row['dc_error']:.2e}" in accuracy
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "bad, message",
    [
        (["--shapes", "16384x2048"], "'16384x2048' is neither one of A, B, C nor NxDxV"),
        (["--kinds", "sharp"], "'sharp' is unknown: take one of untrained, trained, confident"),
        (["--entries", "nobody"], "no entry's name contains 'nobody'; there are: standard eager;"),
        (["--shapes", "8x16x8192", "--kinds", "confident"], "has no confident softmax"),
        (["--budgets", "default", "-3"], "-3"),
        (["--budgets", "big"], "budget 'big' is neither 'default' nor a number of MiB > 0"),
        (["--repeats", "1"], "give 2 or more"),
        (["--minutes", "0"], "0 is not above 0"),
        (["--apple", "no/such/checkout"], "no/such/checkout holds no cut_cross_entropy/"),
    ],
)
def test_bad_arguments_are_told_before_any_work(bad, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "problem", lambda *_: pytest.fail("work began"))
    with pytest.raises(SystemExit) as stopped:
        run.main([*bad, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_apple_is_taken_from_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "cut_cross_entropy"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import enum\n__version__ = '0.1'\nLinearCrossEntropyImpl = enum.IntEnum('Impl', ['CCE', 'CCE_EXACT'])\n"
        "def linear_cross_entropy(e, c, targets, impl): return impl\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "cut_cross_entropy", raising=False)
    peers.use_apple(tmp_path)
    built = {entry.name: entry.build for entry in peers.apple()}
    exact = built["Apple cce_exact"]()
    assert exact.version == "cut_cross_entropy 0.1" and exact.loss(None, None, None) == "cce_exact"
    with pytest.raises(peers.CannotRun, match="cut_cross_entropy 0.1 has no preset cce_kahan; it has cce, cce_exact"):
        built["Apple cce_kahan"]()
    monkeypatch.delitem(sys.modules, "cut_cross_entropy")


# ---- report and picture ----


def made_up_row(
    entry, *, step=4.0, beyond=100.0, exact=True, curve=None, budget=None, de=2e-3, dc=1.6e-3, kind="trained"
):
    return {
        "entry": entry, "exact": exact, "curve": curve, "workspace_mib": budget, "implementation": "x 1", "status": "measured",
        "shape": "A", "tokens": 16384, "hidden": 2048, "vocabulary": 128256, "kind": kind, "seed": 0, "gemm_ms": 12.5,
        "forward_ms": 13.0, "step_ms": 12.5 * step, "host_ms": 1.0, "forward_gemms": 1.04, "step_gemms": step,
        "share_6ndv_of_gemm": 3 / step, "share_6ndv_of_peak": 2 / step, "beyond_mib": beyond, "forward_beyond_mib": 2.0,
        "loss_rel_error": 1e-6, "de_error": de, "dc_error": dc,
        "problem": {"loss": 5.5, "median_p_target": 0.02, "kept_tiles": 0.5, "de_rounding": 1.5e-3, "dc_rounding": 1.4e-3},
        "provenance": {"versions": {"torch": "2", "triton": "3"}, "gpu": "GPU", "cpu": "", "commit": "c", "date": "2026-01-01"},
    }  # fmt: skip


def test_speed_report_puts_exact_before_filtered_and_fast_before_slow():
    made = [
        made_up_row("slow"), made_up_row("filtered", step=1.5, exact=False), made_up_row("fast", step=3.0),
        {**made_up_row("absent"), "status": "cannot run", "reason": "not installed"},
    ]  # fmt: skip
    text = speed_report(made)
    places = [text.index(f"| {name} |") for name in ("fast", "slow", "filtered")]
    assert places == sorted(places)
    assert "- absent: cannot run: not installed" in text


def test_accuracy_report_compares_kinds_and_accumulations():
    made = [
        made_up_row(curve, curve=curve, de=de, beyond=beyond, budget=budget)
        for curve, de, beyond, budget in (
            ("ours plain accumulation", 6e-3, 64.0, None), ("ours cce_exact", 2e-3, 192.0, None),
            ("ours cce_kahan_full_c", 2.1e-3, 96.0, 96), ("ours cce_kahan_full_c", 2e-3, 90.0, 128),  # the latter keeps fp32
        )
    ]  # fmt: skip
    made += [made_up_row("ours cce_exact", curve="ours cce_exact", kind="confident")]
    text = accuracy_report(made)
    table = text[: text.index("## Accumulation")]
    assert "| ours cce_exact |" in table and "| ours plain" not in table  # measured on one kind only
    assert "| fp64, rounded | yes | – | 1.50e-03 | 1.40e-03 |" in table
    found = accumulation_report(made)
    assert "| bf16 plain | 64 | 6.000e-03 | 3.000 |" in found and "| bf16 Kahan | 96 | 2.100e-03 | 1.050 |" in found


def test_a_report_needs_a_measured_row(tmp_path):
    with pytest.raises(ValueError, match="no measured row"):
        write_report(tmp_path)


def test_labels_of_a_crowded_picture_do_not_cover_each_other(tmp_path, monkeypatch):
    crowd = [made_up_row(f"quack variant {i}", step=3 + 0.1 * (i % 3), beyond=1000 + 60 * i) for i in range(9)]
    crowd += [
        made_up_row(
            f"ours cce_exact {budget} MiB",
            step=4.2 - budget / 2000,
            beyond=budget,
            curve="ours cce_exact",
            budget=budget,
        )
        for budget in (96, 512, 1536)
    ]
    boxes = []
    placed = picture.place_labels

    def looked_at(axes, shown):
        floors = len(axes.texts)
        placed(axes, shown)
        renderer = axes.figure.canvas.get_renderer()
        for text in axes.texts[floors:]:
            text.update_positions(renderer)
            boxes.append(Text.get_window_extent(text, renderer).extents)  # without its leader

    monkeypatch.setattr(picture, "place_labels", looked_at)
    picture.draw(tmp_path / "picture.png", crowd)
    assert len(boxes) == 9  # each peer has its name; ours are curves
    assert picture.overlap(boxes, boxes).sum() == len(boxes)  # each with itself


def test_kernel_times_add_up_to_steps():
    """Two steps of a 2·N·D·V product in 2 ms each, and the vendor's two products in 1 ms each under other names."""
    shape = Shape(1000, 1000, 1000)
    events = [
        ("_log_sum_exp_kernel", 2000.0),
        ("nvjet_sm90_x", 1000.0),
        ("void cublasLt::splitKreduce_kernel<32>(int)", 1000.0),
    ] * 2
    rows = {row["kernel"]: row for row in trace_kernels.summary(events, 2, shape)}
    assert rows["_log_sum_exp_kernel"]["ms"] == 2.0 and rows["_log_sum_exp_kernel"]["calls"] == 1
    assert math.isclose(rows["_log_sum_exp_kernel"]["tflops"], 2e9 / 2e-3 / 1e12)
    assert rows[trace_kernels.VENDOR]["calls"] == 2 and math.isclose(
        rows[trace_kernels.VENDOR]["tflops"], 4e9 / 2e-3 / 1e12
    )
    assert trace_kernels.kernel_name("void at::native::reduce_kernel<512, 1>(float)") == "reduce_kernel"


def test_energy_is_what_the_counter_gained_over_the_runs(monkeypatch):
    """A counter that gains 7 J with each run, 2 J where there is only a product."""
    monkeypatch.setattr(power, "WARM_UP", 0.01)
    monkeypatch.setattr(power, "SECONDS", 0.02)
    gained = [1000.0]
    meter = SimpleNamespace(joules=lambda: gained[0], clock_mhz=lambda: 1500.0, limit_watts=700.0)

    def runs_of(joules: float) -> dict:
        def run():
            gained[0] += joules

        return power.drawn(run, meter, CPU)

    step, product = runs_of(7.0), runs_of(2.0)
    assert math.isclose(step["joules"], 7, rel_tol=1e-9) and math.isclose(product["joules"], 2, rel_tol=1e-9)
    assert math.isclose(step["watts"] * step["ms"], 7e3, rel_tol=1e-9)
    of = {"shape": "A", "kind": "trained"}
    text = power.table([of | product | {"entry": power.PRODUCT}, of | step | {"entry": "ours"}])
    assert "| A | trained | ours |" in text and f"| 7.00 | {step['ms'] / product['ms']:.2f} | 3.50 |" in text


@pytest.mark.interpret
def test_accumulation_over_chunks():
    """Two chunks: fp32 is no further off than bf16, and the table sets both against it."""
    shape = Shape(256, 16, 64)
    e, c, targets = problem(shape, "trained", 0, torch.device("cpu"))
    rows = accumulation.errors(shape, e, c, targets)
    of = {row["accumulation"]: row["dc_error"] for row in rows}
    assert of["fp32"] <= of["kahan"] <= of["plain"] < 3e-2
    text = accumulation.table([{"shape": shape.name, "kind": "trained", **row} for row in rows])
    assert f"| plain | {of['plain']:.3e} | {of['plain'] / of['fp32']:.3f} |" in text


class TensorCores:
    """torch.mm with fp32 sums that take 16 products at a time, exactly, and are cut off toward zero."""

    @staticmethod
    def mm(a, b, out_dtype):
        assert out_dtype == torch.float32
        total = torch.zeros(len(a), b.shape[1])
        for d in range(0, a.shape[1], 16):
            exact = total.double() + a[:, d : d + 16].double() @ b[d : d + 16].double()
            total = exact.float()
            too_large = total.double().abs() > exact.abs()
            total = torch.where(too_large, torch.nextafter(total, torch.zeros(())), total)
        return total


@pytest.mark.parametrize("kind", ["confident", "trained"])
def test_cut_off_sums_lose_in_proportion_to_the_logit(kind, monkeypatch):
    """A sum that grows evenly to z is cut off by half a unit in the last place at each of D / 16 additions: of z that is D / 64 times
    2^-23 times the mean of 2^floor(log2 s) / s, 0.72 where log2 s is spread evenly: 1.44 units of D / 64 2^-24, less while sums are
    so small that their products fit."""
    monkeypatch.setattr(torch, "mm", TensorCores.mm)
    shape = Shape(96, 1024, 1024)
    e, c, targets = problem(shape, kind, 0, CPU)
    (row,) = cut_off.errors(shape, e, c, targets)
    assert 1.0 < row["lost"] < 1.44
    assert abs(row["both directions"]) < 0.5 * abs(row["as made"])
    if kind == "confident":
        # The target's logit is large: among cut off ones it is what is wrong, and the gain mends the others.
        assert abs(row["target apart"]) < 0.1 * abs(row["as made"])
        assert abs(row["gain"]) < 0.2 * abs(row["both directions"])
    assert f"| {row['gain']:+.1e} | {row['lost']:.2f} |" in cut_off.table([{"shape": "S", "kind": kind, **row}])


def test_cut_off_needs_tensor_cores():
    assert cut_off.obstacle(torch.device("cuda")) is None
    assert "no GPU" in cut_off.obstacle(CPU)
