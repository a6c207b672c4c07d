"""Synthetic tokens: independent draws from Zipf's law at any vocabulary size, for runs that measure speed alone.

Token k of V has probability (k + 1)^-s / Σ_j j^-s (rank = id + 1; s = 0: uniform). The entropy of that law is the
lowest loss that any model can reach.
"""

import numpy as np


def zipf_probabilities(vocab_size: int, exponent: float) -> np.ndarray:
    """[V] float64, sums to 1."""
    weights = np.arange(1, vocab_size + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def zipf_tokens(count: int, *, vocab_size: int, exponent: float, seed: list[int]) -> np.ndarray:
    """[count] uint16 or uint32: inverse of the cumulative distribution at uniform draws.

    RandomState, because its streams are frozen: the same tokens with any version of NumPy.
    """
    cumulative = np.cumsum(zipf_probabilities(vocab_size, exponent))
    draws = np.random.RandomState(seed).random_sample(count) * cumulative[-1]
    tokens = np.searchsorted(cumulative, draws, side="right")
    return np.minimum(tokens, vocab_size - 1).astype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def entropy(probabilities: np.ndarray) -> float:
    """Nats per token."""
    return float(-(probabilities * np.log(probabilities)).sum())
