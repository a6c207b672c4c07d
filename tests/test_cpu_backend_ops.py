"""Each of FLA's functions that runs on the CPU here, against its formula in float64: value and gradient."""

import pytest
import torch
import torch.nn.functional as F
from fla.modules.activations import swiglu, swiglu_linear, swish
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla.modules.norm.fused_norm_gate import layer_norm_gated, rms_norm_gated
from fla.modules.norm.layernorm import layer_norm, rms_norm
from fla.ops.common.chunk_h import chunk_bwd_dh, chunk_fwd_h
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.gated_delta_rule.gate import naive_gdn_gate
from fla.ops.gla import chunk as gla
from fla.ops.gla import chunk_gla, fused_recurrent_gla
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.utils import chunk_local_cumsum
from recurrences import delta_recurrence, gated_recurrence, l2_normalized

from models import cpu_backend
from models.cpu_backend import delta_rule
from models.cpu_backend.chunks import decayed_products

LENGTHS = [1, 5, 64, 100]
CLOSE = dict(rtol=1e-9, atol=1e-10)
# FLA's chunk_gla counts decays in units of log 2 by a constant that is 1.3e-8 off (RCP_LN2 = 1.4426950216).
CLOSE_BASE_2 = dict(rtol=1e-6, atol=1e-6)


def rand(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def assert_same(got, wanted, inputs, **close):
    """The outputs agree, and so do the gradients of a random projection of them with respect to `inputs`."""
    close = close or CLOSE
    got, wanted = ([x for x in (xs if isinstance(xs, tuple) else (xs,)) if x is not None] for xs in (got, wanted))
    assert len(got) == len(wanted) > 0
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a.double(), b, **close)
    projections = [torch.randn_like(x) for x in wanted]
    gradients = [
        torch.autograd.grad(sum((x * p).sum() for x, p in zip(xs, projections)), inputs, retain_graph=True)
        for xs in (got, wanted)
    ]
    for a, b in zip(*gradients):
        assert b.abs().max() > 0
        torch.testing.assert_close(a.double(), b.double(), **close)


# Norms


def plain_norm(x, weight, bias, rms, eps=1e-5):
    mean = 0 if rms else x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    y = (x - mean) / torch.sqrt(variance + eps)
    return (y if weight is None else y * weight) + (0 if bias is None else bias)


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
def test_norms(rms, affine, with_residual):
    x = rand(2, 3, 8)
    weight, bias = (rand(8), rand(8)) if affine else (None, None)
    residual = rand(2, 3, 8) if with_residual else None
    got = (rms_norm if rms else layer_norm)(x, weight, bias, residual=residual, prenorm=with_residual, eps=1e-5)
    total = x + residual if with_residual else x
    wanted = plain_norm(total, weight, bias, rms)
    inputs = [t for t in (x, weight, bias, residual) if t is not None]
    assert_same(got, (wanted, total) if with_residual else wanted, inputs)


def test_group_norm_has_a_weight_per_group():
    from fla.modules.norm.layernorm import group_norm

    x, weight, bias = rand(2, 3, 12), rand(12), rand(12)
    wanted = plain_norm(x.view(2, 3, 4, 3), weight.view(4, 3), bias.view(4, 3), rms=False).flatten(-2)
    assert_same(group_norm(x, weight, bias, num_groups=4, eps=1e-5), wanted, (x, weight, bias))


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("with_residual", [True, False])
def test_gated_norms(rms, activation, with_residual):
    x, g, weight, bias = rand(2, 3, 8), rand(2, 3, 8), rand(8), rand(8)
    residual = rand(2, 3, 8) if with_residual else None
    norm = rms_norm_gated if rms else layer_norm_gated
    got = norm(x, g, weight, bias, activation, residual=residual, prenorm=with_residual, eps=1e-5)
    gate = torch.sigmoid(g) * (1 if activation == "sigmoid" else g)
    total = x + residual if with_residual else x
    wanted = plain_norm(total, weight, bias, rms) * gate
    inputs = [t for t in (x, g, weight, bias, residual) if t is not None]
    assert_same(got, (wanted, total) if with_residual else wanted, inputs)


def test_norms_recompute_their_output():
    x, g, weight, dy = rand(4, 8, grad=False), rand(4, 8, grad=False), rand(8, grad=False), rand(4, 8, grad=False)
    y, _, rstd, _ = cpu_backend.norms.layer_norm_fwd(x, weight, None, is_rms_norm=True)
    again = cpu_backend.norms.layer_norm_bwd(dy, x, weight, None, None, rstd, is_rms_norm=True, recompute_output=True)[
        -1
    ]
    torch.testing.assert_close(again, y, **CLOSE)
    y, _, rstd, _ = cpu_backend.norms.layer_norm_gated_fwd(x, g, weight, None, is_rms_norm=True)
    again = cpu_backend.norms.layer_norm_gated_bwd(
        dy, x, g, weight, None, rstd=rstd, is_rms_norm=True, recompute_output=True
    )[-1]
    torch.testing.assert_close(again, y, **CLOSE)


def test_a_half_precision_norm_computes_in_float32():
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32)
    wanted = plain_norm(x.double(), weight.double(), None, rms=True, eps=1e-5)
    got, residual = rms_norm(x, weight, None, prenorm=True, residual_in_fp32=True, eps=1e-5)
    assert got.dtype == torch.bfloat16 and residual.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-30)  # one rounding


# Activations


def test_swish_and_swiglu():
    x, y, weight, bias = rand(3, 4, 6), rand(3, 4, 6), rand(5, 6), rand(5)
    assert_same(swish(x), x / (1 + torch.exp(-x)), (x,))
    z = x / (1 + torch.exp(-x)) * y
    assert_same(swiglu(x, y), z, (x, y))
    assert_same(swiglu_linear(x, y, weight, bias), z @ weight.T + bias, (x, y, weight, bias))
    assert_same(swiglu_linear(x, y, weight, None), z @ weight.T, (x, y, weight))


def test_swiglu_gives_its_value_again():
    from fla.modules.activations.ops import swiglu_fwdbwd

    x, y, g = rand(3, 6), rand(3, 6), rand(3, 6, grad=False)
    dx, dy, z = swiglu_fwdbwd(x.detach(), y.detach(), g, use_weight=True)
    wanted = F.silu(x) * y
    torch.testing.assert_close(z, wanted.detach(), **CLOSE)
    for a, b in zip((dx, dy), torch.autograd.grad(wanted, (x, y), g)):
        torch.testing.assert_close(a, b, **CLOSE)


# Short convolution


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("extras", [True, False])
def test_short_convolution(length, activation, extras):
    width = 4
    x, weight = rand(2, length, 6), rand(6, width)
    bias, residual, state = (rand(6), rand(2, length, 6), rand(2, 6, width)) if extras else (None, None, None)
    history = torch.zeros(2, 6, width, dtype=torch.float64) if state is None else state
    seen = torch.cat([history, x.mT], -1)
    wanted = F.conv1d(seen[..., 1:], weight[:, None], bias, groups=6).mT
    wanted = F.silu(wanted) if activation else wanted
    wanted = wanted if residual is None else wanted + residual
    got = causal_conv1d(x, weight, bias, residual, state, output_final_state=True, activation=activation)
    inputs = [t for t in (x, weight, bias, residual, state) if t is not None]
    assert_same(got, (wanted, seen[..., -width:]), inputs)
    torch.testing.assert_close(got[0], causal_conv1d(x, weight, bias, residual, state, activation=activation)[0])


def test_convolution_token_by_token_equals_the_sequence():
    x, weight, bias = rand(2, 7, 6, grad=False), rand(6, 4, grad=False), rand(6, grad=False)
    wanted, state = causal_conv1d(x, weight, bias, activation="silu", output_final_state=True)
    cache = torch.zeros(2, 6, 4, dtype=torch.float64)
    for t in range(7):
        y, returned = causal_conv1d_update(x[:, t : t + 1], cache, None, weight, bias, "silu")
        assert returned is cache
        torch.testing.assert_close(y, wanted[:, t : t + 1], **CLOSE)
    torch.testing.assert_close(cache, state, **CLOSE)


# Decays inside a chunk


def dense_products(left, right, g):
    exponent = g[..., :, None, :] - g[..., None, :, :]
    keep = torch.ones(g.shape[-2], g.shape[-2], dtype=torch.bool).tril()[..., None]
    decay = torch.where(keep, exponent, -torch.inf).exp()
    return (left[..., :, None, :] * right[..., None, :, :] * decay).sum(-1)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_decayed_products(size):
    left, right, raw = rand(2, 3, size, 5), rand(2, 3, size, 5), rand(2, 3, size, 5)
    g = F.logsigmoid(raw).cumsum(-2)
    inputs = (left, right) if size == 1 else (left, right, raw)
    assert_same(decayed_products(left, right, g), dense_products(left, right, g), inputs)
    torch.testing.assert_close(
        decayed_products(left, right, g / torch.tensor(2.0).log(), torch.exp2), dense_products(left, right, g)
    )


def test_decayed_products_stay_finite_under_strong_decay_in_float32():
    left, right = torch.randn(64, 8), torch.randn(64, 8)
    g = (-40 * torch.rand(64, 8)).cumsum(0).requires_grad_()  # exp(−g) overflows after three steps
    got = decayed_products(left, right, g)
    torch.testing.assert_close(
        got, dense_products(left.double(), right.double(), g.double()).float(), rtol=1e-3, atol=1e-6
    )
    got.sum().backward()
    assert g.grad.isfinite().all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(2, 11, 3), (2, 11, 3, 5)])
def test_chunk_local_cumsum(reverse, shape):
    g = rand(*shape, grad=False)
    got = chunk_local_cumsum(g, 4, reverse=reverse, scale=0.5)
    for t in range(11):
        start, end = t // 4 * 4, min(t // 4 * 4 + 4, 11)
        rows = g[:, t:end] if reverse else g[:, start : t + 1]
        torch.testing.assert_close(got[:, t], 0.5 * rows.sum(1), **CLOSE)
    assert chunk_local_cumsum(g.bfloat16(), 4).dtype == torch.float32


# The inner functions of chunk_gla, chunk by chunk


@pytest.fixture
def gla_inputs():
    """T = 11 in chunks of 4, so the last one is short; b in units of log 2, as FLA passes it."""
    q, k, v, raw = rand(2, 11, 3, 5), rand(2, 11, 3, 5), rand(2, 11, 3, 6), rand(2, 11, 3, 5)
    g = F.logsigmoid(raw)
    b = torch.cat([x.cumsum(1) for x in g.split(4, 1)], 1)
    return q, k, v, g, b, (b / torch.tensor(2.0, dtype=torch.float64).log()).detach()


def chunk_rows(x):
    """(B, T, H, D) → three pieces of (B, H, C, D)."""
    return [piece.transpose(1, 2) for piece in x.split(4, 1)]


def padded_A(pieces):
    """Pieces of (B, H, C, C) → (B, T, H, 4)."""
    return torch.cat([F.pad(a, (0, 4 - a.shape[-1])).transpose(1, 2) for a in pieces], 1)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_states_and_their_gradients(gla_inputs, state_v_first):
    q, k, v, g, b, b2 = gla_inputs
    h0 = rand(2, 3, 5, 6)
    flip = (lambda s: s.mT) if state_v_first else (lambda s: s)
    states, state, outputs = [], h0, []
    for qc, kc, vc, gc in zip(*(x.split(4, 1) for x in (q, k, v, g))):
        states.append(state)
        o, state = gated_recurrence(qc, kc, vc, gc, 0.3, state)
        state = state.clone()  # what is handed on: its gradient comes from later chunks only
        outputs.append(o)
    got, final = chunk_fwd_h(
        k.detach(),
        v.detach(),
        gk=b2,
        h0=flip(h0.detach()),
        output_final_state=True,
        state_v_first=state_v_first,
        chunk_size=4,
    )
    torch.testing.assert_close(flip(got), torch.stack(states, 1).detach(), **CLOSE)
    torch.testing.assert_close(flip(final), state.detach(), **CLOSE)

    do, dht = rand(2, 11, 3, 6, grad=False), rand(2, 3, 5, 6, grad=False)
    loss = sum((o * d).sum() for o, d in zip(outputs, do.split(4, 1))) + (state * dht).sum()
    *ends, start = torch.autograd.grad(loss, [*states[1:], state, h0])
    got, dh0 = chunk_bwd_dh(
        q.detach(), k.detach(), v.detach(), do, flip(h0.detach()), flip(dht), 0.3, gk=b2, state_v_first=state_v_first,
        chunk_size=4, states_in_fp32=True,
    )  # fmt: skip
    torch.testing.assert_close(flip(got), torch.stack(ends, 1), **CLOSE)
    torch.testing.assert_close(flip(dh0), start, **CLOSE)


def test_products_inside_a_chunk_and_their_gradient(gla_inputs):
    q, k, v, _, b, b2 = gla_inputs
    wanted = [0.3 * dense_products(*rows) for rows in zip(*map(chunk_rows, (q, k, b)))]
    A = gla.chunk_gla_fwd_intra_gk(q.detach(), k.detach(), b2, 0.3, chunk_size=4)
    torch.testing.assert_close(A, padded_A(wanted).detach(), **CLOSE)

    do = rand(2, 11, 3, 6, grad=False)
    pairs = list(zip(chunk_rows(do), chunk_rows(v)))
    dA = gla.chunk_gla_bwd_dA(v.detach(), do, 0.3, chunk_size=4)
    torch.testing.assert_close(dA, padded_A([0.3 * (d @ x.mT).tril() for d, x in pairs]).detach(), **CLOSE)

    loss = sum(((a @ x) * d).sum() for a, (d, x) in zip(wanted, pairs))
    got = gla.chunk_gla_bwd_dqk_intra(q.detach(), k.detach(), b2, dA, chunk_size=4)
    for a, w in zip(got, torch.autograd.grad(loss, (q, k))):
        torch.testing.assert_close(a, w, **CLOSE)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_outputs_of_chunks_and_their_gradients(gla_inputs, state_v_first):
    """A chunk as a function of its start state h: o, and with dh of the end state, dq, dk, dv, dg."""
    q, k, v, g, b, b2 = gla_inputs
    flip = (lambda s: s.mT) if state_v_first else (lambda s: s)
    h, dh, do = rand(2, 3, 3, 5, 6, grad=False), rand(2, 3, 3, 5, 6, grad=False), rand(2, 11, 3, 6, grad=False)
    loss, outputs = 0, []
    for n, (qc, kc, vc, gc, dc) in enumerate(zip(*(x.split(4, 1) for x in (q, k, v, g, do)))):
        o, end = gated_recurrence(qc, kc, vc, gc, 0.3, h[:, n])
        outputs.append(o)
        loss = loss + (o * dc).sum() + (end * dh[:, n]).sum()
    dq, dk, dv, dg = torch.autograd.grad(loss, (q, k, v, g))

    q, k, v = q.detach(), k.detach(), v.detach()
    A = gla.chunk_gla_fwd_intra_gk(q, k, b2, 0.3, chunk_size=4)
    options = dict(state_v_first=state_v_first, chunk_size=4)
    o = gla.chunk_gla_fwd_o_gk(q, v, b2, A, flip(h), 0.3, **options)
    torch.testing.assert_close(o, torch.cat(outputs, 1).detach(), **CLOSE)
    torch.testing.assert_close(gla.chunk_gla_bwd_dv(k, b2, A, do, flip(dh), **options), dv, **CLOSE)
    dA = gla.chunk_gla_bwd_dA(v, do, 0.3, chunk_size=4)
    inner = gla.chunk_gla_bwd_dqk_intra(q, k, b2, dA, chunk_size=4)
    got = gla.chunk_gla_bwd_dqkg(q, k, v, flip(h), b2, do, flip(dh), *inner, 0.3, **options)
    for a, w in zip(got, (dq, dk, dg)):
        torch.testing.assert_close(a, w, **CLOSE)


# Whole operations against their recurrence


@pytest.mark.parametrize("length", [*LENGTHS, 130])
@pytest.mark.parametrize("op", [chunk_gla, fused_recurrent_gla])
def test_gla(op, length):
    q, k, v, raw = rand(2, length, 2, 4), rand(2, length, 2, 4), rand(2, length, 2, 6), rand(2, length, 2, 4)
    g = F.logsigmoid(raw)
    decay = {"g" if op is chunk_gla else "gk": g}
    inputs = (q, k, v) if length == 1 else (q, k, v, raw)  # the first decay has nothing to decay
    got, state = op(q, k, v, **decay)
    assert state is None
    assert_same(got, gated_recurrence(q, k, v, g, 0.5)[0], inputs, **CLOSE_BASE_2)


@pytest.mark.parametrize("op", [chunk_gla, fused_recurrent_gla])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_gla_from_a_state(op, state_v_first):
    q, k, v, raw = rand(2, 70, 2, 4), rand(2, 70, 2, 4), rand(2, 70, 2, 6), rand(2, 70, 2, 4)
    h0 = torch.randn(2, 2, 4, 6, requires_grad=True)  # FLA takes states in float32
    flip = (lambda s: s.mT) if state_v_first else (lambda s: s)
    g = F.logsigmoid(raw)
    decay = {"g" if op is chunk_gla else "gk": g}
    o, state = op(
        q, k, v, **decay, scale=0.3, initial_state=flip(h0), output_final_state=True, state_v_first=state_v_first
    )
    assert_same((o, flip(state)), gated_recurrence(q, k, v, g, 0.3, h0.double()), (q, k, v, raw, h0), **CLOSE_BASE_2)


def test_gla_agrees_with_flas_own_reference():
    q, k, v = (torch.randn(2, 100, 2, 8) for _ in range(3))
    g = F.logsigmoid(torch.randn(2, 100, 2, 8))
    torch.testing.assert_close(chunk_gla(q, k, v, g)[0], naive_recurrent_gla(q, k, v, g)[0], rtol=1e-4, atol=1e-5)


def test_gla_stays_finite_under_strong_decay():
    q, k, v = (torch.randn(1, 130, 2, 8, requires_grad=True) for _ in range(3))
    g = (-50 * torch.rand(1, 130, 2, 8)).requires_grad_()
    o, _ = chunk_gla(q, k, v, g)
    wanted, _ = gated_recurrence(q.double(), k.double(), v.double(), g.double(), 8**-0.5)
    torch.testing.assert_close(o.double(), wanted, rtol=1e-3, atol=1e-5)
    o.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, g))


def delta_inputs(name, length, heads=2, value_heads=2):
    q, k, v = rand(2, length, heads, 4), rand(2, length, heads, 4), rand(2, length, value_heads, 6)
    decay = (2, length, value_heads, 4) if name == "kda" else (2, length, value_heads)
    return q, k, v, rand(*decay), rand(2, length, value_heads)


CHUNKED = {"gated_deltanet": chunk_gated_delta_rule, "kda": chunk_kda}
RECURRENT = {"gated_deltanet": fused_recurrent_gated_delta_rule, "kda": fused_recurrent_kda}
CHUNK_SIZES = {"gated_deltanet": (16, 32, 64), "kda": (32, 64)}


def vector_decay(g, k, value_heads=2):
    return g if g.dim() == 4 else g[..., None].expand(*g.shape[:3], k.shape[-1])


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("length", LENGTHS)
def test_delta_rules(name, length):
    q, k, v, raw, beta_raw = delta_inputs(name, length)
    g, beta = F.logsigmoid(raw), torch.sigmoid(beta_raw)
    inputs = (q, k, v, beta_raw) if length == 1 else (q, k, v, raw, beta_raw)
    keys = l2_normalized(k)
    wanted = delta_recurrence(q, keys, v, vector_decay(g, k), beta, 0.5)[0]
    for chunk_size in CHUNK_SIZES[name]:
        got, state = CHUNKED[name](q, keys, v, g, beta, chunk_size=chunk_size)
        assert state is None
        assert_same(got, wanted, inputs)


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_delta_rules_as_the_layers_call_them(name, state_v_first):
    """Normalization, gate and sigmoid inside, more value heads than key heads, a state in and a state out."""
    length, heads, value_heads = 70, 2, 4
    q, k, v, raw, beta_raw = delta_inputs(name, length, heads, value_heads)
    A_log, dt_bias = rand(value_heads), rand(value_heads * (4 if name == "kda" else 1))
    h0 = torch.randn(2, value_heads, 4, 6, requires_grad=True)
    flip = (lambda s: s.mT) if state_v_first else (lambda s: s)
    if name == "kda":
        g = -A_log.exp()[:, None] * F.softplus(raw + dt_bias.view(value_heads, 4))
    else:
        g = -A_log.exp() * F.softplus(raw + dt_bias)
    shared_q, shared_k = (l2_normalized(x).repeat_interleave(2, 2) for x in (q, k))
    wanted = delta_recurrence(shared_q, shared_k, v, vector_decay(g, k), 2 * torch.sigmoid(beta_raw), 0.5, h0.double())
    options = dict(
        A_log=A_log, dt_bias=dt_bias, initial_state=flip(h0), output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=state_v_first,
    )  # fmt: skip
    o, state = CHUNKED[name](q, k, v, raw, beta_raw, **options)
    assert_same((o, flip(state)), wanted, (q, k, v, raw, beta_raw, A_log, dt_bias, h0), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        o, state = RECURRENT[name](q, k, v, raw, beta=beta_raw, **options)
    torch.testing.assert_close(o, wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(flip(state), wanted[1], rtol=1e-6, atol=1e-6)


def test_gates_agree_with_flas_references():
    g, A_log, dt_bias = torch.randn(2, 5, 3, 4), torch.randn(3), torch.randn(12)
    rows = dt_bias.view(3, 4)
    torch.testing.assert_close(delta_rule.softplus_gate(g, A_log[:, None], rows), naive_kda_gate(g, A_log, dt_bias))
    torch.testing.assert_close(
        delta_rule.bounded_gate(g, A_log[:, None], rows, -5.0), naive_kda_lowerbound_gate(g, A_log, dt_bias, -5.0)
    )
    scalar = g[..., 0]
    torch.testing.assert_close(delta_rule.softplus_gate(scalar, A_log, A_log), naive_gdn_gate(scalar, A_log, A_log))


def test_kda_with_a_bounded_gate():
    q, k, v, raw, beta = delta_inputs("kda", 40)
    A_log, dt_bias = rand(2), rand(8)
    g = -5 * torch.sigmoid(A_log.exp()[:, None] * (raw + dt_bias.view(2, 4)))
    got, _ = chunk_kda(
        q, k, v, raw, torch.sigmoid(beta), A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, safe_gate=True,
        lower_bound=-5.0, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    wanted, _ = delta_recurrence(l2_normalized(q), l2_normalized(k), v, g, torch.sigmoid(beta), 0.5)
    assert_same(got, wanted, (q, k, v, raw, beta, A_log, dt_bias))


@pytest.mark.parametrize("name", CHUNKED)
def test_delta_rules_stay_finite_under_strong_decay(name):
    q, k, v, raw, beta = (x.detach().float().requires_grad_() for x in delta_inputs(name, 130))
    g = -60 * torch.sigmoid(raw)
    o, _ = CHUNKED[name](q, k, v, g, torch.sigmoid(beta), use_qk_l2norm_in_kernel=True)
    exact = [x.double() for x in (l2_normalized(q), l2_normalized(k), v, vector_decay(g, k), torch.sigmoid(beta))]
    torch.testing.assert_close(o.double(), delta_recurrence(*exact, 0.5)[0], rtol=1e-3, atol=1e-5)
    o.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, raw, beta))


@pytest.mark.parametrize("chunk_size", [8, 48, 128])
@pytest.mark.parametrize("name", CHUNKED)
def test_delta_rules_refuse_other_chunk_sizes(name, chunk_size):
    with pytest.raises(ValueError, match=f"{chunk_size}"):
        CHUNKED[name](*(x.detach() for x in delta_inputs(name, 5)), chunk_size=chunk_size)


# Dispatch


def test_only_cpu_tensors_are_taken():
    here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    assert cpu_backend.on_cpu(here, None, eps=1e-5, weight=here)[0]
    assert not cpu_backend.on_cpu(elsewhere, weight=elsewhere)[0]
    assert not cpu_backend.on_cpu(here, weight=elsewhere)[0]
    assert not cpu_backend.on_cpu(1.0)[0]


def test_tensors_elsewhere_take_flas_kernel(monkeypatch):
    """With the verifier's answer for a GPU, FLA's dispatcher goes past this backend to the function it wraps."""
    from fla.backends import _function_registries
    from fla.modules.norm.layernorm import layer_norm_fwd

    registry = next(r for f, r in _function_registries.items() if f.__name__ == "layer_norm_fwd")
    assert registry.get_active().backend_type == "torch_cpu"
    calls = []
    original = registry.dispatch(lambda *args, **kwargs: calls.append("fla"))
    x = torch.zeros(2, 4, device="meta")
    original(x, x[0], None)
    assert calls == ["fla"]
    layer_norm_fwd(torch.zeros(2, 4), torch.ones(4), None)
    assert calls == ["fla"]


def test_packed_sequences_are_refused():
    q = torch.randn(1, 8, 2, 4)
    with pytest.raises(NotImplementedError, match="cu_seqlens"):
        chunk_kda(q, q, q, -q.abs(), q[..., 0], cu_seqlens=torch.tensor([0, 3, 8]))


@pytest.mark.parametrize("name", CHUNKED)
def test_autocast_does_not_round_inside_an_operation(name):
    inputs = [x.detach().float() for x in delta_inputs(name, 70)]
    inputs[3], inputs[4] = F.logsigmoid(inputs[3]), torch.sigmoid(inputs[4])
    wanted, _ = CHUNKED[name](*inputs, use_qk_l2norm_in_kernel=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = CHUNKED[name](*inputs, use_qk_l2norm_in_kernel=True)
    assert torch.equal(got, wanted)
