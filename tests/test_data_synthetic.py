"""Zipf tokens: the law's frequencies, its entropy, determinism."""

import math

import numpy as np
import pytest

from training.data import load_data
from training.data.synthetic import entropy, zipf_probabilities, zipf_tokens

CFG = {"kind": "synthetic", "train_tokens": 200_000, "valid_tokens": 4_000, "exponent": 1.0}


def chi_squared_z(tokens, vocab_size, exponent):
    """How many standard deviations the chi-squared statistic lies above its mean, under the law with this exponent."""
    harmonic = math.fsum((k + 1) ** -exponent for k in range(vocab_size))
    expected = np.array([len(tokens) * (k + 1) ** -exponent / harmonic for k in range(vocab_size)])
    observed = np.bincount(tokens, minlength=vocab_size)
    statistic = ((observed - expected) ** 2 / expected).sum()
    return (statistic - (vocab_size - 1)) / math.sqrt(2 * (vocab_size - 1))


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.2])
def test_frequencies_follow_the_law(exponent):
    tokens = zipf_tokens(300_000, vocab_size=500, exponent=exponent, seed=[1, 0])
    assert abs(chi_squared_z(tokens, 500, exponent)) < 4
    assert chi_squared_z(tokens, 500, exponent + 0.05) > 10


def test_entropy():
    assert entropy(zipf_probabilities(1000, 0.0)) == pytest.approx(math.log(1000))
    probabilities = zipf_probabilities(2000, 1.0)
    losses = -np.log(probabilities[zipf_tokens(200_000, vocab_size=2000, exponent=1.0, seed=[4, 0])])
    assert losses.mean() == pytest.approx(entropy(probabilities), abs=4 * losses.std() / math.sqrt(len(losses)))


@pytest.mark.parametrize("vocab_size, dtype", [(65_536, np.uint16), (128_256, np.uint32)])
def test_any_vocabulary(tmp_path, vocab_size, dtype):
    data = load_data(CFG, vocab_size=vocab_size, seq_len=64, seed=1, cache_dir=tmp_path)
    assert data.train.dtype == data.valid.dtype == dtype
    assert (len(data.train), len(data.valid), data.vocab_size) == (200_000, 4_000, vocab_size)
    assert data.train.max() < vocab_size
    assert data.train.max() > 0.9 * vocab_size
    assert data.tokenizer is None
    assert list(tmp_path.iterdir()) == []


def test_deterministic_by_seed(tmp_path):
    one, again, two = (load_data(CFG, vocab_size=1000, seq_len=64, seed=seed, cache_dir=tmp_path) for seed in (1, 1, 2))
    assert np.array_equal(one.train, again.train) and np.array_equal(one.valid, again.valid)
    assert not np.array_equal(one.train, two.train)
    assert not np.array_equal(one.train[:4000], one.valid)


def test_provenance_names_the_floor_of_the_loss(tmp_path):
    facts = load_data({**CFG, "exponent": 0}, vocab_size=256, seq_len=64, seed=3, cache_dir=tmp_path).provenance
    assert facts["entropy_nats_per_token"] == pytest.approx(math.log(256))
    assert facts["seed"] == 3 and facts["train"] == {"tokens": 200_000}


def test_sequence_longer_than_the_stream(tmp_path):
    with pytest.raises(ValueError, match="seq_len=5000 .*5001 tokens.*has 3000"):
        load_data({**CFG, "train_tokens": 3000}, vocab_size=256, seq_len=5000, seed=1, cache_dir=tmp_path)
