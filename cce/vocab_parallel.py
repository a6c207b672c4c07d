"""Vocabulary parallelism: each rank holds the rows [start, stop) of the classifier and all tokens.

Ranks exchange a few numbers per token in the forward (the maximum and the sum of the log-sum-exp, the target's logit)
and, unless reduce_e_grad is False, the sum of dE in the backward. Every rank returns the same loss.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from cce.targets import IGNORED


def partition(vocabulary: int, rank: int, ranks: int) -> tuple[int, int]:
    """[start, stop) of `rank`: contiguous, sizes differ by at most one, larger shards first."""
    size, larger = divmod(vocabulary, ranks)
    start = rank * size + min(rank, larger)
    return start, start + size + (rank < larger)


@dataclass
class VocabParallelOptions:
    """This rank's shard of the vocabulary.

    start, stop: classes [start, stop) of this rank; c and bias hold these rows.
    group: process group whose shards together are the vocabulary (None: the default group).
    reduce_e_grad: sum dE over the group in the backward; False where the framework does it.
    """

    start: int
    stop: int
    group: "dist.ProcessGroup | None" = None
    reduce_e_grad: bool = True

    @classmethod
    def from_vocab(
        cls, vocab_size: int, group: "dist.ProcessGroup | None" = None, reduce_e_grad: bool = True
    ) -> "VocabParallelOptions":
        """Shards of equal size (to one row) over the ranks of `group`."""
        start, stop = partition(vocab_size, dist.get_rank(group), dist.get_world_size(group))
        return cls(start, stop, group, reduce_e_grad)


def combine_parts(
    rest_N: torch.Tensor, target_logit_N: torch.Tensor, codes_N: torch.Tensor, group: "dist.ProcessGroup | None"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rest, target_logit) of the whole vocabulary from each rank's.

    rest is the log-sum-exp over the classes that are not the target. A target that no rank holds is out of range:
    ValueError on every rank for CPU tensors, NaN on a GPU.
    """
    maximum_N = rest_N.clamp(min=torch.finfo(rest_N.dtype).min)
    dist.all_reduce(maximum_N, op=dist.ReduceOp.MAX, group=group)
    sums_3N = torch.stack([(rest_N - maximum_N).exp(), target_logit_N, (codes_N >= 0).to(rest_N.dtype)])
    dist.all_reduce(sums_3N, group=group)
    rest_N = maximum_N + sums_3N[0].log()
    missing_N = (sums_3N[2] == 0) & (codes_N != IGNORED)
    if rest_N.device.type == "cpu" and bool(missing_N.any()):
        token = int(missing_N.nonzero()[0])
        raise ValueError(f"the target of token {token} (of the flattened targets) is in no rank's [start, stop).")
    return rest_N, sums_3N[1].masked_fill(missing_N, float("nan"))


def reduce_e_grad(de_ND: torch.Tensor, group: "dist.ProcessGroup | None") -> torch.Tensor:
    """Sum of dE over the group, added in at least fp32."""
    total_ND = de_ND.to(torch.promote_types(de_ND.dtype, torch.float32), copy=True)
    dist.all_reduce(total_ND, group=group)
    return total_ND.to(de_ND.dtype)
