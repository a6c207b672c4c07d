"""The recurrences and layers written from the mathematics, token by token: what tests compare the chunked forms with.

Any dtype, any device, differentiable. Shapes: q, k (B, T, H, K), v (B, T, H, V), states (B, H, K, V).
"""

import torch
import torch.nn.functional as F


def gated_recurrence(q, k, v, log_decay, scale, state=None):
    """S_t = diag(exp g_t) S_{t−1} + k_tᵀ v_t, o_t = scale · q_t S_t; log_decay (B, T, H, K)."""
    return delta_recurrence(q, k, v, log_decay, None, scale, state)


def delta_recurrence(q, k, v, log_decay, beta, scale, state=None):
    """The same with the delta rule: what is written is β_t (v_t − k_t S), S after the decay; beta (B, T, H) or None."""
    batch, length, heads, keys = q.shape
    if state is None:
        state = q.new_zeros(batch, heads, keys, v.shape[-1])
    outputs = []
    for t in range(length):
        state = log_decay[:, t].exp()[..., None] * state
        write = v[:, t]
        if beta is not None:
            write = beta[:, t, :, None] * (write - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def l2_normalized(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def short_conv(x, weight):
    """Depthwise causal convolution and SiLU; weight (D, 1, W)."""
    width, length = weight.shape[-1], x.shape[1]
    padded = torch.cat([x.new_zeros(x.shape[0], width - 1, x.shape[2]), x], 1)
    return F.silu(sum(padded[:, i : i + length] * weight[:, 0, i] for i in range(width)))


def heads_of(x, count):
    return x.unflatten(-1, (count, -1))


def gla_layer(layer, x):
    h = layer.num_heads
    q, k, v = (heads_of(p(x), h) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    log_decay = heads_of(F.logsigmoid(layer.gk_proj(x)), h) / layer.gate_logit_normalizer
    o, _ = gated_recurrence(q, k, v, log_decay, q.shape[-1] ** -0.5)
    norm = layer.g_norm_swish_gate
    o = rms_norm(o, norm.weight, norm.eps) * F.silu(heads_of(layer.g_proj(x), h))
    return layer.o_proj(o.flatten(-2))


def convolved_heads(layer, x):
    pairs = ((layer.q_proj, layer.q_conv1d), (layer.k_proj, layer.k_conv1d), (layer.v_proj, layer.v_conv1d))
    q, k, v = (heads_of(short_conv(p(x), c.weight), layer.num_heads) for p, c in pairs)
    return l2_normalized(q), l2_normalized(k), v, torch.sigmoid(layer.b_proj(x)), q.shape[-1] ** -0.5


def gated_deltanet_layer(layer, x):
    q, k, v, beta, scale = convolved_heads(layer, x)
    log_decay = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    o, _ = delta_recurrence(q, k, v, log_decay[..., None].expand_as(k), beta, scale)
    o = rms_norm(o, layer.o_norm.weight, layer.o_norm.eps) * F.silu(heads_of(layer.g_proj(x), layer.num_heads))
    return layer.o_proj(o.flatten(-2))


def kda_layer(layer, x):
    q, k, v, beta, scale = convolved_heads(layer, x)
    log_decay = -layer.A_log.exp()[:, None] * F.softplus(heads_of(layer.f_proj(x) + layer.dt_bias, layer.num_heads))
    o, _ = delta_recurrence(q, k, v, log_decay, beta, scale)
    o = rms_norm(o, layer.o_norm.weight, layer.o_norm.eps) * torch.sigmoid(heads_of(layer.g_proj(x), layer.num_heads))
    return layer.o_proj(o.flatten(-2))


LAYERS = {"gla": gla_layer, "gated_deltanet": gated_deltanet_layer, "kda": kda_layer}


def stack(name, model, input_ids):
    """Final hidden states of one of FLA's models: pre-norm blocks of a mixer and a SwiGLU MLP."""
    x = model.model.embeddings(input_ids)
    for block in model.model.layers:
        x = x + LAYERS[name](block.attn, rms_norm(x, block.attn_norm.weight, block.attn_norm.eps))
        y, mlp = rms_norm(x, block.mlp_norm.weight, block.mlp_norm.eps), block.mlp
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
    return rms_norm(x, model.model.norm.weight, model.model.norm.eps)
