"""The gated delta rule on the CPU: `chunk_gated_delta_rule` (GatedDeltaNet), `chunk_kda` (KDA), their recurrent forms.

Per head, with S a K×V state, α_t the decay (a scalar in GatedDeltaNet, arXiv:2412.06464; a vector over K in KDA,
arXiv:2510.26692) and β_t the writing strength:

    S'_t = diag(α_t) S_{t−1},   S_t = S'_t + β_t k_tᵀ (v_t − k_t S'_t),   o_t = scale · q_t S_t.

Over chunks of C positions the writes of a chunk solve one triangular system (the WY form of arXiv:2406.06484, section
3.2): with b the running sum of log α in the chunk, h the state at its start, L_ij = β_i Σ_d k_id k_jd exp(b_id − b_jd)
(j < i),

    (I + L) [W, U] = [β k ⊙ exp(b), β v],   U' = U − W h   (row i: what position i writes to the state),
    o = scale · ((q ⊙ exp(b)) h + A U'),    A_ij = Σ_d q_id k_jd exp(b_id − b_jd) (j ≤ i),
    next h = diag(exp(b_last)) h + (k ⊙ exp(b_last − b))ᵀ U'.

Gradients are autograd's. Everything runs in float32 (float64 for float64 inputs).
Suffixes: B batch, T time, H heads, N chunks, C chunk, K, V dims; HV value heads, a multiple of H.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.cpu_backend.chunks import compute_dtype, decayed_products, from_chunks, to_chunks

L2_EPS = 1e-6  # FLA's: x / √(Σ x² + eps)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **_,
) -> tuple[Tensor, Tensor | None]:
    """q, k (B, T, H, K), v (B, T, HV, V), g and beta (B, T, HV) → o (B, T, HV, V), final state or None."""
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size is {chunk_size}: GatedDeltaNet takes 16, 32 or 64")
    dtype = compute_dtype(q)
    g = g.to(dtype)
    if use_gate_in_kernel:
        g = softplus_gate(g, A_log, dt_bias)
    return delta_rule(
        q, k, v, g[..., None], beta, scale, initial_state, output_final_state, state_v_first, chunk_size,
        l2norm=use_qk_l2norm_in_kernel, sigmoid=use_beta_sigmoid_in_kernel, double=allow_neg_eigval,
    )  # fmt: skip


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **_,
) -> tuple[Tensor, Tensor | None]:
    """q, k (B, T, H, K), v (B, T, HV, V), g (B, T, HV, K), beta (B, T, HV) → o (B, T, HV, V), final state or None."""
    if chunk_size not in (32, 64):
        raise ValueError(f"chunk_size is {chunk_size}: KDA takes 32 or 64")
    dtype = compute_dtype(q)
    g = g.to(dtype)
    if use_gate_in_kernel:
        heads = g.shape[-2]
        dt_bias = None if dt_bias is None else dt_bias.view(heads, -1)
        A_log = None if A_log is None else A_log.view(heads, 1)
        g = softplus_gate(g, A_log, dt_bias) if lower_bound is None else bounded_gate(g, A_log, dt_bias, lower_bound)
    return delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, chunk_size,
        l2norm=use_qk_l2norm_in_kernel, sigmoid=use_beta_sigmoid_in_kernel, double=allow_neg_eigval,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    """FLA's recurrent kernel, which its layer takes for evaluation up to T = 64: the same function."""
    if g is None or gk is not None or gv is not None:
        raise NotImplementedError("the CPU backend has GatedDeltaNet's scalar decay g only: run other decays on a GPU")
    return chunk_gated_delta_rule(
        q, k, v, g, beta, use_gate_in_kernel=A_log is not None, A_log=A_log, dt_bias=dt_bias, **options
    )


def fused_recurrent_kda_fwd(*args, inplace_final_state: bool = True, A_log=None, dt_bias=None, **options):
    """FLA's recurrent kernel, which its layer takes for evaluation up to T = 64: the same function."""
    if inplace_final_state:
        raise NotImplementedError("the CPU backend returns a new final state: pass inplace_final_state=False")
    return chunk_kda(*args, A_log=A_log, dt_bias=dt_bias, **options)


def softplus_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """log α = −exp(A_log) · softplus(g + dt_bias)."""
    g = g if dt_bias is None else g + dt_bias.to(g.dtype)
    return -A_log.to(g.dtype).exp() * F.softplus(g)


def bounded_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    """log α = lower_bound · σ(exp(A_log) · (g + dt_bias)), in [lower_bound, 0)."""
    g = g if dt_bias is None else g + dt_bias.to(g.dtype)
    return lower_bound * torch.sigmoid(g if A_log is None else A_log.to(g.dtype).exp() * g)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    chunk_size: int,
    *,
    l2norm: bool,
    sigmoid: bool,
    double: bool,
) -> tuple[Tensor, Tensor | None]:
    """The chunked form above. g is log α, (B, T, HV, K), or (B, T, HV, 1) for a scalar decay."""
    out_dtype, (length, heads, keys), value_heads = q.dtype, q.shape[1:], v.shape[2]
    q, k, v, beta = (x.to(g.dtype) for x in (q, k, v, beta))
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
    if sigmoid:
        beta = torch.sigmoid(beta) * (2 if double else 1)
    q = q * (keys**-0.5 if scale is None else scale)
    if value_heads != heads:
        q, k = (x.repeat_interleave(value_heads // heads, dim=2) for x in (q, k))
    # A short sequence needs no full chunk: the smallest power of two that holds it.
    chunk_size = min(chunk_size, 1 << (length - 1).bit_length())
    q, k, v, g, beta = (to_chunks(x, chunk_size) for x in (q, k, v, g, beta))

    b = g.cumsum(-2)
    b_last, beta = b[..., -1:, :], beta[..., None]
    A, L = row_products(torch.stack([q, k]), k, b)
    rhs = torch.cat([beta * k * b.exp(), beta * v], dim=-1)
    # unitriangular: the solver takes the diagonal as 1 and reads below it only.
    W, U = torch.linalg.solve_triangular(beta * L, rhs, upper=False, unitriangular=True).split([keys, v.shape[-1]], -1)
    q_in, k_out, kept = q * b.exp(), (k * (b_last - b).exp()).mT, b_last.exp().mT

    state = q.new_zeros(q.shape[0], value_heads, keys, v.shape[-1])
    if initial_state is not None:
        state = (initial_state.mT if state_v_first else initial_state).to(state.dtype)
    outputs = []
    for n in range(q.shape[1]):
        writes = U[:, n] - W[:, n] @ state
        outputs.append(q_in[:, n] @ state + A[:, n] @ writes)
        state = kept[:, n] * state + k_out[:, n] @ writes
    o = from_chunks(torch.stack(outputs, 1), length).to(out_dtype)
    if not output_final_state:
        return o, None
    return o, (state.mT if state_v_first else state).contiguous()


def row_products(left: Tensor, right: Tensor, b: Tensor) -> Tensor:
    """Σ_d left_id right_jd exp(b_id − b_jd) for j ≤ i, else 0; a scalar decay has 1 as its last axis."""
    if b.shape[-1] > 1:
        return decayed_products(left, right, b)
    above = torch.ones(b.shape[-2], b.shape[-2], dtype=torch.bool).triu(1)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    return left @ right.mT * (b - b.mT).masked_fill(above, -torch.inf).exp()
