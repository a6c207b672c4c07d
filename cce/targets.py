"""Targets as the computation sees them: one int32 code per token, on the device, without a host sync on CUDA.

code >= 0            the class, as a row of this rank's classifier
ELSEWHERE            a valid token whose class lies in another rank's shard of the vocabulary
OUT_OF_RANGE         a target outside [0, V): its loss and the gradients it touches are NaN (CUDA; a CPU call raises)
IGNORED              ignore_index, or a position without a target under `shift`
"""

import torch

ELSEWHERE = -1
OUT_OF_RANGE = -2
IGNORED = -3


def shift_targets(targets: torch.Tensor, shift: int, ignore_index: int) -> torch.Tensor:
    """Targets moved `shift` positions earlier along the last axis; the last `shift` positions become ignored.

    e[..., t, :] predicts targets[..., t + shift]. The hidden states stay where they are, without a copy.
    """
    if shift == 0:
        return targets
    shifted = torch.full_like(targets, ignore_index)
    shifted[..., :-shift] = targets[..., shift:]
    return shifted


def encode_targets(targets_N: torch.Tensor, ignore_index: int, start: int, stop: int, sharded: bool) -> torch.Tensor:
    """Codes [N] int32 for targets [N] and this rank's rows [start, stop) of the classifier.

    With `sharded` a target outside [start, stop) belongs to another rank; without, it is out of range.
    """
    inside = (targets_N >= start) & (targets_N < stop)
    outside = torch.full_like(targets_N, OUT_OF_RANGE)
    if sharded:
        outside.masked_fill_(targets_N >= 0, ELSEWHERE)
    codes = torch.where(inside, targets_N - start, outside)
    codes = torch.where(targets_N == ignore_index, IGNORED, codes)
    return codes.to(torch.int32)


def check_range(targets: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """ValueError that names the first target outside [0, vocabulary) and its position. Waits for the device."""
    bad = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
    if bool(bad.any()):
        position = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"targets[{', '.join(map(str, position))}] = {int(targets[position])} is outside [0, {vocabulary}) "
            f"and is not ignore_index={ignore_index}."
        )
