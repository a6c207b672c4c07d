"""FLA's whole models on the CPU against the token-by-token recurrence with the same weights, in float64."""

import pytest
import recurrences
import torch

from models import build_model, final_hidden

SIZE = dict(hidden_size=16, num_layers=2, intermediate_size=24, tie_embeddings=True)


def small_model(name, chunk_size=None, **size):
    model_cfg = dict(name=name, num_heads=2, expand_k=1.0, expand_v=2.0, chunk_size=chunk_size, options={})
    model = build_model(model_cfg, {**SIZE, **size}, vocab_size=40, max_seq_len=128).double()
    with torch.no_grad():
        for p in model.parameters():  # away from zero biases, unit norms and nearly linear gates
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


@pytest.mark.parametrize("name", recurrences.LAYERS)
@pytest.mark.parametrize("length", [1, 37, 70])
def test_hidden_states_and_gradients(name, length):
    model = small_model(name)
    ids = torch.randint(40, (2, length))
    got, wanted = final_hidden(model, ids), recurrences.stack(name, model, ids)
    close = dict(rtol=1e-5, atol=1e-6)  # FLA's base-2 decays: see test_cpu_backend_ops
    torch.testing.assert_close(got, wanted, **close)
    projection = torch.randn_like(wanted)
    weights = [(key, p) for key, p in model.model.named_parameters()]
    got, wanted = (
        torch.autograd.grad((x * projection).sum(), [p for _, p in weights], allow_unused=True) for x in (got, wanted)
    )
    for (key, _), a, b in zip(weights, got, wanted):
        if b is None:
            raise AssertionError(f"the recurrence does not use {key}")
        torch.testing.assert_close(a, b, **close, msg=lambda text, key=key: f"{key}: {text}")
        if length > 1:
            assert b.abs().max() > 0, key


@pytest.mark.parametrize("name", recurrences.LAYERS)
@pytest.mark.parametrize("length", [1, 37, 70])
def test_evaluation_equals_training(name, length):
    """Without gradients FLA's layers take other kernels up to T = 64, and one for single tokens."""
    model = small_model(name)
    ids = torch.randint(40, (2, length))
    trained = final_hidden(model, ids).detach()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(final_hidden(model, ids), trained, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", recurrences.LAYERS)
def test_a_token_sees_no_later_token(name):
    model = small_model(name)
    ids = torch.randint(40, (1, 70))
    other = ids.clone()
    other[:, 50:] = (other[:, 50:] + 1) % 40
    a, b = final_hidden(model, ids), final_hidden(model, other)
    assert torch.equal(a[:, :50], b[:, :50])
    assert (a[:, 50] - b[:, 50]).abs().max() > 1e-3


@pytest.mark.parametrize("name", recurrences.LAYERS)
def test_a_cache_goes_on_where_it_stopped(name):
    model = small_model(name).eval()
    ids = torch.randint(40, (2, 12))
    with torch.no_grad():
        whole = model.model(ids, use_cache=False).last_hidden_state
        first = model.model(ids[:, :11], use_cache=True)
        last = model.model(ids[:, 11:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(last.last_hidden_state, whole[:, 11:], rtol=1e-5, atol=1e-6)
