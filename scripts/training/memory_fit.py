"""Out of memory: say which batch size, sequence length and head did not fit, and what would.

What would fit comes from measurement: one and two sequences are run, and their peaks give the line
peak(B) = fixed + B · per_sequence, which the device's memory then bounds.
"""

from collections.abc import Callable

import torch

MARGIN = 0.95  # share of the memory that an allocator fills before fragmentation stops it


def largest_batch(peak_mib_of: Callable[[int], float], capacity_mib: float) -> int | None:
    """Largest batch size that fits `capacity_mib`, or None where one sequence does not.

    Args:
        peak_mib_of: runs a forward and backward pass of so many sequences and returns the peak in MiB.
    """
    one, two = (peak_or_none(peak_mib_of, sequences) for sequences in (1, 2))
    if one is None or one > MARGIN * capacity_mib:
        return None
    if two is None:
        return 1
    per_sequence = max(two - one, 1e-3)
    return max(1, int((MARGIN * capacity_mib - (one - per_sequence)) // per_sequence))


def peak_or_none(peak_mib_of: Callable[[int], float], sequences: int) -> float | None:
    """The peak, or None where the memory does not suffice. The failed attempt's tensors are gone on return."""
    try:
        return peak_mib_of(sequences)
    except torch.OutOfMemoryError:
        return None


def explain(loss: str, batch_size: int, seq_len: int, fits: int | None) -> str:
    """The one line that a run out of memory ends with."""
    head = f"out of memory: loss={loss} with train.batch_size={batch_size}, train.seq_len={seq_len}"
    if fits is None:
        return f"{head}; not even one sequence fits: take a shorter train.seq_len, a smaller size, or loss=cce"
    if fits >= batch_size:
        return f"{head}; {fits} would fit an empty GPU: another process holds memory, or it is fragmented"
    advice = f"train.batch_size={fits} would fit (with train.micro_batches={-(-batch_size // fits)} for the same step)"
    return f"{head}; {advice}" + ("" if loss.startswith("cce") else ", or loss=cce, which holds no logits")
