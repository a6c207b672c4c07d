"""Windows: every batch is the next tokens, every token once a pass, the order by seed alone, resume at any position."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data import IGNORE_INDEX, PackedBatches, evaluation_batches
from training.data.packing import check_token_ids

sizes = {"seq_len": st.integers(1, 9), "batch_size": st.integers(1, 5)}


def stream(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint16)  # a token is its own place


def windows_of(batches, count: int, seq_len: int) -> list[int]:
    """Numbers of the windows in the next `count` batches; token values are places."""
    return [int(row[0]) // seq_len for inputs, _ in itertools.islice(batches, count) for row in inputs]


@settings(max_examples=60, deadline=None)
@given(**sizes, extra=st.integers(0, 60), seed=st.integers(0, 2**32 - 1))
def test_batches_are_windows_and_their_next_tokens(seq_len, batch_size, extra, seed):
    tokens = stream(seq_len + 1 + extra)
    for inputs, targets in itertools.islice(
        PackedBatches(tokens, seq_len=seq_len, batch_size=batch_size, seed=seed), 7
    ):
        assert inputs.shape == targets.shape == (batch_size, seq_len)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)
        assert torch.all(inputs[:, 0] % seq_len == 0)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(seq_len))


@settings(max_examples=60, deadline=None)
@given(**sizes, windows=st.integers(1, 20), seed=st.integers(0, 1000))
def test_each_epoch_has_each_window_once(seq_len, batch_size, windows, seed):
    batches = PackedBatches(stream(windows * seq_len + 1), seq_len=seq_len, batch_size=batch_size, seed=seed)
    order = windows_of(batches, -(-3 * windows // batch_size), seq_len)
    for epoch in range(3):
        assert sorted(order[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_order_depends_on_seed_and_epoch():
    def order(**options):
        return windows_of(PackedBatches(stream(65), seq_len=1, batch_size=4, **options), 32, 1)

    one = order(seed=1)
    assert one == order(seed=1)
    assert one != order(seed=2)
    assert one[:64] != one[64:]
    assert order(seed=1, shuffle=False) == [*range(64), *range(64)]


def test_order_is_the_same_on_every_machine():
    """MT19937 seeded with [seed, epoch] and Fisher-Yates from the end, which NEP 19 froze, written out in Python."""
    seed, windows = 5, 11

    def permutation(epoch: int) -> list[int]:
        bits = np.random.MT19937()
        bits._legacy_seeding([seed, epoch])
        order = list(range(windows))
        for last in range(windows - 1, 0, -1):
            mask = (1 << last.bit_length()) - 1
            while (choice := int(bits.random_raw()) & mask) > last:
                pass
            order[last], order[choice] = order[choice], order[last]
        return order

    batches = PackedBatches(stream(windows + 1), seq_len=1, batch_size=1, seed=seed)
    assert windows_of(batches, 2 * windows, 1) == permutation(0) + permutation(1)


@settings(max_examples=100, deadline=None)
@given(**sizes, extra=st.integers(0, 60), seed=st.integers(0, 99), before=st.integers(0, 30), shuffle=st.booleans())
def test_resume_at_any_position_is_exact(seq_len, batch_size, extra, seed, before, shuffle):
    options = {"seq_len": seq_len, "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
    tokens = stream(seq_len + 1 + extra)
    unbroken = PackedBatches(tokens, **options)
    for _ in range(before):
        next(unbroken)
    saved = json.dumps(unbroken.state_dict())
    resumed = PackedBatches(tokens, **options)
    next(resumed)
    resumed.load_state_dict(json.loads(saved))
    for _ in range(8):
        for here, there in zip(next(unbroken), next(resumed)):
            assert torch.equal(here, there)


def test_resume_with_another_batch_size_goes_on_at_the_same_window():
    order = windows_of(PackedBatches(stream(41), seq_len=2, batch_size=1, seed=3), 60, 2)
    first = PackedBatches(stream(41), seq_len=2, batch_size=6, seed=3)
    begun = windows_of(first, 2, 2)
    second = PackedBatches(stream(41), seq_len=2, batch_size=4, seed=3)
    second.load_state_dict(first.state_dict())
    assert begun + windows_of(second, 12, 2) == order


@pytest.mark.parametrize("change", [{"seq_len": 3}, {"seed": 9}, {"shuffle": False}, {"tokens": stream(40)}])
def test_resume_in_other_data_is_refused(change):
    options = {"tokens": stream(41), "seq_len": 2, "batch_size": 2, "seed": 1, "shuffle": True}
    state = PackedBatches(**options).state_dict()
    with pytest.raises(ValueError, match=f"{next(iter(change))} = .*this run has"):
        PackedBatches(**{**options, **change}).load_state_dict(state)


@settings(max_examples=40, deadline=None)
@given(**sizes, windows=st.integers(1, 30), world=st.integers(1, 4))
def test_processes_share_the_global_batch(seq_len, batch_size, windows, world):
    tokens = stream(windows * seq_len + 1)
    whole = PackedBatches(tokens, seq_len=seq_len, batch_size=batch_size * world, seed=1)
    parts = [
        PackedBatches(tokens, seq_len=seq_len, batch_size=batch_size, seed=1, rank=rank, world=world)
        for rank in range(world)
    ]
    for _ in range(5):
        assert torch.equal(next(whole)[0], torch.cat([next(part)[0] for part in parts]))
    assert all(part.state_dict() == whole.state_dict() for part in parts)


@settings(max_examples=150, deadline=None)
@given(**sizes, count=st.integers(2, 120), world=st.integers(1, 3), most=st.none() | st.integers(1, 130))
def test_evaluation_predicts_every_token_once(seq_len, batch_size, count, world, most):
    tokens = stream(count)
    options = {"seq_len": seq_len, "batch_size": batch_size, "max_tokens": most}
    ranks = [list(evaluation_batches(tokens, **options, rank=rank, world=world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    in_order = [batch for turn in zip(*ranks) for batch in turn]
    predicted = []
    for inputs, targets in in_order:
        assert inputs.shape == targets.shape == (batch_size, seq_len)
        valid = targets != IGNORE_INDEX
        assert torch.equal(targets[valid], inputs[valid] + 1)
        assert torch.all(inputs[~valid] == 0)
        for row in range(batch_size):  # a row is one unbroken window, filled up at its end only
            places = inputs[row][valid[row]]
            assert torch.equal(valid[row], torch.arange(seq_len) < len(places))
            assert torch.equal(places, places[:1] + torch.arange(len(places)))
        predicted += targets[valid].tolist()
    assert predicted == list(range(1, 1 + min(count - 1, most or count)))
    if world == 1:
        assert all((targets != IGNORE_INDEX).any() for _, targets in in_order)


def test_stream_shorter_than_a_window_names_both_numbers():
    PackedBatches(stream(17), seq_len=16, batch_size=1, seed=1)
    with pytest.raises(ValueError, match="seq_len=17 .*needs 18 tokens.* has 17"):
        PackedBatches(stream(17), seq_len=17, batch_size=1, seed=1)


@pytest.mark.parametrize(
    "options",
    [
        {"seq_len": 0},
        {"batch_size": 0},
        {"rank": 2, "world": 2},
        {"rank": -1},
        {"world": 0},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_numbers_out_of_range(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
        PackedBatches(stream(20), **{"seq_len": 2, "batch_size": 2, "seed": 1, **options})


@pytest.mark.parametrize("count, most, message", [(1, None, "1 tokens"), (0, None, "0 tokens"), (9, 0, "max_tokens=0")])
def test_nothing_to_evaluate(count, most, message):
    with pytest.raises(ValueError, match=message):
        evaluation_batches(stream(count), seq_len=2, batch_size=2, max_tokens=most)


def test_token_id_outside_the_vocabulary():
    check_token_ids(np.array([3, 99]), 100, "the training set")
    with pytest.raises(ValueError, match="token id 99, .* V is 99"):
        check_token_ids(np.array([3, 99]), 99, "the training set")
