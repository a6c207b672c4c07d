"""Vocabulary parallelism on two gloo ranks: loss and gradients of the shards are those of the whole vocabulary."""

import os

import pytest
import torch
import torch.distributed as dist
from cce_formula import formula, gradients, inputs, relative
from torch.multiprocessing.spawn import spawn

import cce
from cce import standard
from cce.vocab_parallel import partition

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="under TRITON_INTERPRET=1 CPU tensors take the kernels"
)


@pytest.mark.parametrize("vocabulary,ranks", [(1, 1), (7, 2), (507, 4), (1000, 8)])
def test_partition_covers_the_vocabulary(vocabulary, ranks):
    shards = [partition(vocabulary, rank, ranks) for rank in range(ranks)]
    assert shards[0][0] == 0 and shards[-1][1] == vocabulary
    assert all(a[1] == b[0] for a, b in zip(shards, shards[1:]))
    sizes = [stop - start for start, stop in shards]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def compare(shard, impl, options, dtype, tolerance):
    e, c, targets, b = inputs((2, 11), 8, 61, dtype, bias=True, ignored=0.2)
    options = dict(options)
    with_lse = options.pop("return_lse", False)
    expected, expected_lse = formula(e, c, targets, b, **options)
    if with_lse:
        expected = expected + 0.3 * expected_lse.sum()
    whole = gradients(expected, [e, c, b])
    mine_c = c.detach()[shard.start : shard.stop].clone().requires_grad_()
    mine_b = b.detach()[shard.start : shard.stop].clone().requires_grad_()
    loss = cce.linear_cross_entropy(
        e, mine_c, targets, mine_b, impl=impl, vocab_parallel_options=shard, return_lse=with_lse, **options
    )
    if with_lse:
        loss = loss[0] + 0.3 * loss[1].sum()
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    de, dc, db = gradients(loss, [e, mine_c, mine_b])
    if not shard.reduce_e_grad:
        dist.all_reduce(de)
    assert relative(de, whole[0]) < tolerance
    assert relative(dc, whole[1][shard.start : shard.stop]) < tolerance
    assert relative(db, whole[2][shard.start : shard.stop]) < tolerance


def work(rank, folder, dtype, tolerance):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for reduce_e_grad in (True, False):
            shard = cce.VocabParallelOptions.from_vocab(61, reduce_e_grad=reduce_e_grad)
            for options in ({}, dict(softcap=3.0, shift=1, z_loss=0.1), dict(return_lse=True, reduction="sum")):
                compare(shard, "cce_kahan_full_c", options, dtype, tolerance)
        uneven = cce.VocabParallelOptions(*((0, 1) if rank == 0 else (1, 61)))
        compare(uneven, "cce_exact", {}, dtype, tolerance)
        standard._compiled = lambda function: function  # the mathematics; torch.compile itself is tested on one rank
        compare(shard, "torch_compile", dict(softcap=3.0, shift=1, return_lse=True), dtype, tolerance)
        e, c = torch.randn(4, 3), torch.randn(shard.stop - shard.start, 3)
        with pytest.raises(ValueError, match="the target of token 2 .* is in no rank's"):
            cce.linear_cross_entropy(e, c, torch.tensor([0, 60, 61, 5]), vocab_parallel_options=shard)
        dist.barrier()  # no rank leaves while another still reads from it
    finally:
        dist.destroy_process_group()
    # All asserted. Leave without the interpreter's teardown, in which threads of gloo have aborted a rank that had passed.
    os._exit(0)


def test_two_ranks_agree_with_the_whole_vocabulary(tmp_path):
    spawn(work, args=(str(tmp_path), torch.float64, 1e-12), nprocs=2, join=True)
