"""The rows of the benchmark in rows.jsonl: one for each entry, shape and kind of softmax; a new one replaces the old.

A row holds
- what was measured: entry, implementation (library and version), exact (claims to drop no part of the gradient), curve and
  workspace_mib (peers.Entry), shape (its name), tokens, hidden, vocabulary, kind, seed, provenance (training/provenance.py)
- problem: loss, median_p_target, kept_tiles, de_rounding, dc_rounding (reference.Reference)
- status: "measured", "cannot run" (a library is missing, say) or "failed"; the latter two carry a reason, and end here
- times, medians over `samples` (forward_samples, …): gemm_ms (the unit: torch.mm(e, c.T, out=…), measured right before this
  entry), forward_ms (no gradient asked for), step_ms (forward + backward), their quartiles [q1, q3], host_ms (host time of
  issuing one step; null on a CPU), first_call_s (the first step, compiling and autotuning as far as no cache on disk had it)
- forward_gemms, step_gemms: in units of gemm_ms
- share_6ndv_of_gemm, share_8ndv_of_gemm, share_6ndv_of_peak, share_8ndv_of_peak: time that 6·N·D·V (logits kept) or 8·N·D·V
  operations (logits recomputed) take at the logits product's measured rate or the data sheet's peak, over step_ms; the last
  two are null where the peak is unknown
- memory in MiB: beyond_mib (peak of a step, less what stood before and less the two gradients), forward_beyond_mib (peak of a
  forward pass without gradients, less what stood before), kept_mib (what all the calls left allocated)
- loss, loss_rel_error, de_error, dc_error: against fp64, the gradients in the Frobenius norm
"""

from pathlib import Path

from training.results import read_rows, write_rows

FILE = "rows.jsonl"


def key(row: dict) -> tuple[str, str, str]:
    return row["entry"], row["shape"], row["kind"]


def load(folder: Path) -> list[dict]:
    path = folder / FILE
    return read_rows(path) if path.is_file() else []


def store(folder: Path, row: dict) -> None:
    """Add a row in the place of the one with its key. The file is replaced as a whole: a kill leaves the old or the new."""
    rows = load(folder)
    places = [index for index, old in enumerate(rows) if key(old) == key(row)]
    if places:
        rows[places[0]] = row
    else:
        rows.append(row)
    write_rows(folder / FILE, rows)
