"""How the work is cut: slices of the vocabulary, chunks of tokens, splits among programs."""

import itertools
import math

import pytest
import torch

from cce import plans, tiles
from cce.tiles import MULTIPROCESSORS, logits_tile, vocabulary_splits

SHAPES = ((1000, 256, 32768), (8192, 2304, 256000), (16384, 2048, 128256), (65536, 256, 32768), (300, 4096, 1001))


@pytest.mark.parametrize("n,d,v", SHAPES)
def test_slices_cover_the_vocabulary_and_fit(n, d, v):
    """Each class once, in order; a slice's G fits its buffer, or the rows of dC behind it."""
    for buffer_classes, c_itemsize in itertools.product((128, 1024, 4096), (None, 2, 4)):
        reached = 0
        for first, width, in_dc in plans.slices(n, d, v, 128, buffer_classes, 2, c_itemsize):
            assert first == reached and first % 128 == 0 and width > 0
            columns = -(-width // 128) * 128
            if in_dc:
                assert 2 * n * columns <= (v - first - width) * d * c_itemsize and columns > buffer_classes
            else:
                assert columns <= buffer_classes
            reached += width
        assert reached == v


@pytest.mark.parametrize("arch", ["hopper", "other"])
@pytest.mark.parametrize("n,d,v", SHAPES)
def test_one_pass_is_chosen_only_where_it_fits(n, d, v, arch):
    chosen = {}
    for accumulation, mib in itertools.product(("fp32", "kahan", "plain"), (16, 128, 1024, 4096, 2**20)):
        choice = plans.one_pass_chunk(n, d, v, accumulation, mib, (True, True), arch)
        chosen[accumulation, mib] = choice
        if choice is not None:
            chunk, kept = choice
            if kept == "registers":
                assert arch == "hopper" and d <= 256 and chunk % 128 == 0
                assert plans.in_registers_bytes(n, chunk, d, v, True) <= mib * 2**20
                continue
            assert plans.one_pass_bytes(n, chunk, d, v, kept, True, arch) <= mib * 2**20
            assert kept == accumulation or (accumulation, kept) == ("kahan", "fp32") and chunk < n
    in_registers = arch == "hopper" and d <= 256
    if n * d * v >= 2**36:  # an fp32 sum alone is larger than 16 MiB
        assert chosen["fp32", 16] == ((16384, "registers") if in_registers else None)
    if n >= 1000:
        assert chosen["fp32", 2**20] is not None
        assert chosen["kahan", 2**20] == (math.ceil(n / 128) * 128, "kahan")  # one chunk: nothing adds up


def test_exponentials_take_dcs_memory():
    """D tokens' take what dC does: beside its fp32 sum only scratch of a chunk is left. Those of all tokens leave no sum, and only as many
    outside as dC's memory has no room for."""
    n, d, v = 16384, 2048, 128256
    sum_of_c, scratch = 4 * v * d, 40 * 2**20
    assert plans.one_pass_bytes(n, d, d, v, "fp32", True, "hopper") < sum_of_c + scratch
    assert plans.one_pass_bytes(n, 2 * d, d, v, "fp32", True, "hopper") < sum_of_c + 2 * v * d + 2 * scratch
    assert plans.one_pass_bytes(n, n, d, v, "fp32", True, "hopper") < 2 * n * v * (1 - d / (n + d)) + 8 * scratch


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("n,d,v", [*SHAPES, (120, 24, 40)])
def test_exponentials_in_dcs_memory_are_in_nobodys_way(n, d, v, itemsize):
    """Those of all tokens, in its first bytes, leave the rows of dC that come of them, its last."""
    for chunk in (1, n // 3, n - 1, n):
        classes = plans.classes_in_dc(n, chunk, d, v, 32)
        assert classes in (0, v) or (0 < classes < v and (v - classes) % 32 == 0)
        exponentials, rows = 2 * chunk * tiles.padded_width(classes, 2), classes * d * itemsize
        assert exponentials + (rows if chunk == n else 0) <= v * d * itemsize


@pytest.mark.parametrize("most,hidden", [(16384, 2048), (8192, 2304), (100, 64), (5000, 100), (5, 64), (128, 34000)])
def test_rows_of_a_product_fill_rounds(most, hidden):
    rows = plans.product_rows(most, hidden)
    rounds = math.ceil(rows / 128) * math.ceil(hidden / 256) / MULTIPROCESSORS
    assert 0 < rows <= most and (rows % 8 == 0 or rows == most < 8)
    assert most - rows < 8 or rounds > 0.95 * math.ceil(rounds)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("n,d,v", [*SHAPES, (2048, 2048, 128256), (16384, 2048, 4992), (1, 64, 50)])
def test_splits_leave_no_program_idle_for_long(n, d, v, stored):
    """The busiest program has at most a tenth more tiles than all would have if they could be divided, or one tile; a fiftieth where
    there are enough to divide them well."""
    tile = logits_tile(torch.bfloat16, d, "hopper", stored)
    token_tiles, class_tiles = math.ceil(n / tile.rows), math.ceil(v / tile.columns)
    splits = vocabulary_splits(n, v, tile, "hopper")
    assert 1 <= splits <= class_tiles
    shorter, longer = divmod(class_tiles, splits)
    work = [0] * MULTIPROCESSORS
    for item in range(token_tiles * splits):  # in the order of cce/kernels/logits.py: grouped
        group, within = divmod(item, tile.group * splits)
        split = within // min(token_tiles - group * tile.group, tile.group)
        work[item % MULTIPROCESSORS] += shorter + (split < longer)
    assert sum(work) == token_tiles * class_tiles
    divided = sum(work) / MULTIPROCESSORS
    assert max(work) <= max((1.02 if divided > 60 else 1.1) * divided, 1), splits


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_no_more_splits_than_allowed(most):
    tile = logits_tile(torch.bfloat16, 2048, "hopper", False)
    assert vocabulary_splits(16384, 128256, tile, "hopper", most) <= most


@pytest.mark.parametrize("cuda,capability,dtype,expected", [
    ("13.0", (9, 0), torch.bfloat16, 1 + 3 * 2.0**-24),
    ("13.0", (9, 0), torch.float16, 1 + 3 * 2.0**-24),
    ("13.0", (9, 0), torch.float32, 1.0),
    ("13.0", (8, 0), torch.bfloat16, 1.0),
    (None, (9, 0), torch.bfloat16, 1.0),  # AMD's
])  # fmt: skip
def test_gain_only_where_it_was_measured(monkeypatch, cuda, capability, dtype, expected):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(tiles, "_on_hopper", tiles._on_hopper.__wrapped__)
    assert tiles.gain(129, torch.device("cuda"), dtype) == expected
    assert tiles.gain(129, torch.device("cpu"), dtype) == 1.0
