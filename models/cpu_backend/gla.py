"""The inner functions of FLA's `chunk_gla` on the CPU (of fla.ops.gla.chunk, common.chunk_h and utils.cumsum).

Gated linear attention (Yang et al. 2024, arXiv:2312.06635, section 4): per head, with S a K×V state and α_t = exp(g_t),

    S_t = diag(α_t) S_{t−1} + k_tᵀ v_t,    o_t = scale · q_t S_t.

Over chunks of C positions, with b the running sum of g inside a chunk and h the state at its start:

    o = scale · (q ⊙ exp(b)) h + A v,   A_ij = scale · Σ_d q_id k_jd exp(b_id − b_jd) (j ≤ i),
    next h = diag(exp(b_last)) h + (k ⊙ exp(b_last − b))ᵀ v.

As in FLA's kernels, b comes in units of log 2 (hence exp2), A has shape (B, T, H, C), h lists the states of all chunks.
Everything adds up in float32 (float64 for float64 inputs).
Suffixes: B batch, T time, H heads, N chunks, C chunk, K, V dims.
"""

import torch
from fla.ops.gla.chunk import chunk_gla_bwd as fla_chunk_gla_bwd
from fla.ops.gla.chunk import chunk_gla_fwd as fla_chunk_gla_fwd
from torch import Tensor

from models.cpu_backend.chunks import compute_dtype, decayed_products, from_chunks, to_chunks


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    **_,
) -> Tensor:
    """Running sum of g (B, T, H) or (B, T, H, D) inside each chunk, from its end with `reverse`, times `scale`."""
    g_NC = to_chunks(g.to(compute_dtype(g)), chunk_size)
    total = g_NC.flip(3).cumsum(3).flip(3) if reverse else g_NC.cumsum(3)
    total = from_chunks(total if scale is None else total * scale, g.shape[1])
    return total.to(torch.promote_types(output_dtype or g.dtype, g.dtype) if g.dtype == torch.float64 else output_dtype)


def chunk_fwd_h(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    h0: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int | None = None,
    states_in_fp32: bool = False,
    **_,
) -> tuple[Tensor, Tensor | None]:
    """The states at the chunks' starts (B, N, H, K, V) and after the last (B, H, K, V); V, K with `state_v_first`."""
    only_key_decay(gk, g, g_gamma, gv, split_size)
    (b, k_NC, v_NC), dtype = chunked(chunk_size, gk, k, v)
    b_last = b[..., -1:, :]
    added = (k_NC * torch.exp2(b_last - b)).mT @ v_NC
    kept = torch.exp2(b_last).mT
    state = torch.zeros_like(added[:, 0]) if h0 is None else key_first(h0, state_v_first).to(dtype)
    states = []
    for n in range(added.shape[1]):
        states.append(state)
        state = kept[:, n] * state + added[:, n]
    h = key_first(torch.stack(states, 1), state_v_first)
    return h.to(dtype if states_in_fp32 else k.dtype), key_first(state, state_v_first) if output_final_state else None


def chunk_bwd_dh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h0: Tensor | None,
    dht: Tensor | None,
    scale: float,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int | None = None,
    states_in_fp32: bool = False,
    **_,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the states at the chunks' ends (B, N, H, K, V), and of h0."""
    only_key_decay(gk, g, g_gamma, gv, split_size)
    (b, q_NC, do_NC), dtype = chunked(chunk_size, gk, q, do)
    added = (q_NC * torch.exp2(b)).mT @ do_NC * scale
    kept = torch.exp2(b[..., -1:, :]).mT
    grad = torch.zeros_like(added[:, 0]) if dht is None else key_first(dht, state_v_first).to(dtype)
    grads = []
    for n in reversed(range(added.shape[1])):
        grads.append(grad)
        grad = kept[:, n] * grad + added[:, n]
    dh = key_first(torch.stack(grads[::-1], 1), state_v_first)
    return dh.to(dtype if states_in_fp32 else k.dtype), None if h0 is None else key_first(grad, state_v_first)


def chunk_gla_fwd_intra_gk(q: Tensor, k: Tensor, g: Tensor, scale: float, chunk_size: int = 64, **_) -> Tensor:
    """A (B, T, H, C): the products inside a chunk."""
    (b, q_NC, k_NC), _ = chunked(chunk_size, g, q, k)
    return from_chunks(decayed_products(q_NC * scale, k_NC, b, torch.exp2), q.shape[1])


def chunk_gla_fwd_o_gk(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    A: Tensor,
    h: Tensor,
    scale: float,
    state_v_first: bool = False,
    chunk_size: int = 64,
    **_,
) -> Tensor:
    """o (B, T, H, V) = scale · (q ⊙ exp(b)) h + A v."""
    (b, q_NC, v_NC), dtype = chunked(chunk_size, g, q, v)
    h = key_first(h, state_v_first).to(dtype)
    o = (q_NC * torch.exp2(b)) @ h * scale + lower(A, chunk_size) @ v_NC
    return from_chunks(o, q.shape[1]).to(v.dtype)


def chunk_gla_bwd_dA(v: Tensor, do: Tensor, scale: float, chunk_size: int = 64, **_) -> Tensor:
    """scale · do vᵀ inside a chunk (B, T, H, C): what reaches q kᵀ; A itself holds the scale in the forward pass."""
    v_NC, do_NC = (to_chunks(x.to(compute_dtype(x)), chunk_size) for x in (v, do))
    return from_chunks((do_NC @ v_NC.mT * scale).tril(), v.shape[1])


def chunk_gla_bwd_dv(
    k: Tensor,
    g: Tensor,
    A: Tensor,
    do: Tensor,
    dh: Tensor,
    state_v_first: bool = False,
    chunk_size: int = 64,
    **_,
) -> Tensor:
    """dv (B, T, H, V) = Aᵀ do + (k ⊙ exp(b_last − b)) dh."""
    (b, k_NC, do_NC), dtype = chunked(chunk_size, g, k, do)
    dh = key_first(dh, state_v_first).to(dtype)
    dv = lower(A, chunk_size).mT @ do_NC + (k_NC * torch.exp2(b[..., -1:, :] - b)) @ dh
    return from_chunks(dv, k.shape[1]).to(do.dtype)


def chunk_gla_bwd_dqk_intra(
    q: Tensor, k: Tensor, g: Tensor, dA: Tensor, chunk_size: int = 64, **_
) -> tuple[Tensor, Tensor]:
    """dq and dk from inside a chunk: dq_i = Σ_j dA_ij k_j exp(b_i − b_j), dk_j = Σ_i dA_ij q_i exp(b_i − b_j)."""
    (b, q_NC, k_NC), _ = chunked(chunk_size, g, q, k)
    with torch.enable_grad():
        q_NC, k_NC = q_NC.detach().requires_grad_(), k_NC.detach().requires_grad_()
        A = decayed_products(q_NC, k_NC, b.detach(), torch.exp2)
        dq, dk = torch.autograd.grad(A, (q_NC, k_NC), lower(dA, chunk_size))
    return from_chunks(dq, q.shape[1]), from_chunks(dk, q.shape[1])


def chunk_gla_bwd_dqkg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor,
    do: Tensor,
    dh: Tensor,
    dq: Tensor,
    dk: Tensor,
    scale: float,
    state_v_first: bool = False,
    chunk_size: int = 64,
    **_,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq and dk with the states' share added to what came from inside the chunk, and dg (of decays, not their sums).

    b_id enters as exp(b) beside q and exp(−b) beside k, so its gradient is q ⊙ dq − k ⊙ dk; b_last also scales the
    state and k on their way out: Σ_v h ⊙ dh · exp(b_last) + Σ_i k ⊙ dk_out. g_t is in every b_i, i ≥ t: a reverse sum.
    """
    (b, q_NC, k_NC, v_NC, do_NC, dq_NC, dk_NC), dtype = chunked(chunk_size, g, q, k, v, do, dq, dk)
    h, dh = key_first(h, state_v_first).to(dtype), key_first(dh, state_v_first).to(dtype)
    b_last = b[..., -1:, :]
    dk_out = v_NC @ dh.mT * torch.exp2(b_last - b)
    d_last = (h * dh).sum(-1)[..., None, :] * torch.exp2(b_last) + (k_NC * dk_out).sum(-2, keepdim=True)
    dq_NC = dq_NC + do_NC @ h.mT * torch.exp2(b) * scale
    dk_NC = dk_NC + dk_out
    db = q_NC * dq_NC - k_NC * dk_NC
    dg = db.flip(-2).cumsum(-2).flip(-2) + d_last
    length = q.shape[1]
    return from_chunks(dq_NC, length), from_chunks(dk_NC, length), from_chunks(dg, length).to(g.dtype)


def fused_recurrent_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    **_,
) -> tuple[Tensor, Tensor | None]:
    """FLA's recurrent kernel, which its GLA layer takes up to T = 64: the same function, computed in chunks."""
    only_key_decay(gk, g, g_gamma, gv, reverse or None)
    _, _, _, state, o = fla_chunk_gla_fwd(
        q, k, v, gk, None, scale, initial_state, output_final_state, state_v_first, chunk_size=recurrent_chunk(q)
    )
    return o.to(compute_dtype(q)), state


def fused_recurrent_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    o: Tensor | None = None,
    do: Tensor | None = None,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    state_v_first: bool = False,
    **_,
):
    """Returns dq, dk, dv, dg, dgk, dgv, dinitial_state."""
    only_key_decay(gk, g, g_gamma, gv, reverse or None)
    size = recurrent_chunk(q)
    b, A, *_ = fla_chunk_gla_fwd(q, k, v, gk, None, scale, initial_state, False, state_v_first, chunk_size=size)
    dq, dk, dv, dgk, dh0 = fla_chunk_gla_bwd(
        q, k, v, gk, b, scale, initial_state, None, A, do, dht, state_v_first, chunk_size=size
    )
    return dq, dk, dv, None, dgk.to(gk.dtype), None, dh0


def recurrent_chunk(q: Tensor) -> int:
    """A power of two, at most 64, that holds the sequence."""
    return min(64, 1 << (q.shape[1] - 1).bit_length())


def only_key_decay(gk, *others) -> None:
    if gk is None or any(other is not None for other in others):
        raise NotImplementedError(
            "the CPU backend decays states along the keys only, as GLA does: run other ops on a GPU"
        )


def chunked(chunk_size: int, b: Tensor, *tensors: Tensor) -> tuple[list[Tensor], torch.dtype]:
    """b and the tensors as chunks in the compute dtype; b is held over the missing rows, the others are zero there."""
    dtype = compute_dtype(tensors[0])
    rows = [to_chunks(x.to(dtype), chunk_size) for x in tensors]
    return [to_chunks(b.to(dtype), chunk_size, hold=True), *rows], dtype


def lower(A: Tensor, chunk_size: int) -> Tensor:
    """A (B, T, H, C) → (B, N, H, C, C), lower triangle."""
    return to_chunks(A, chunk_size).tril()


def key_first(state: Tensor, state_v_first: bool) -> Tensor:
    """Between FLA's two layouts of a state, (…, K, V) and (…, V, K), either way."""
    return state.mT if state_v_first else state
