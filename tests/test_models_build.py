"""Building models: from every config, from a seed, in a dtype; what is refused; FLOPs; and that all of them train."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import fla.backends
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import build_model, check_model, classifier, final_hidden, flops_per_token
from models.build import CLASSES, head_dims, model_config
from models.flops import linear_entries, mixer_flops

ROOT = Path(__file__).resolve().parent.parent
FLA_MODELS = ("gla", "gated_deltanet", "kda")
SIZES = ("mve", "350m", "1.3b")


@pytest.fixture(autouse=True)
def one_thread():
    """Small shapes: two threads on a busy machine wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def configs(compose_config):
    def pair(name, size="mve", *overrides):
        cfg = compose_config(f"model={name}", f"size={size}", *overrides)
        return cfg.model, cfg.size

    return pair


@pytest.fixture
def tiny_model(configs):
    def built(name, *overrides, **options):
        model, size = configs(
            name, "mve", "size.hidden_size=32", "size.num_heads=2", "size.intermediate_size=48", *overrides
        )
        return build_model(model, size, **{"vocab_size": 50, "max_seq_len": 128, **options})

    return built


def on_meta(model_cfg, size_cfg, vocab_size):
    with torch.device("meta"):
        return CLASSES[model_cfg.name][1](model_config(model_cfg, size_cfg, vocab_size=vocab_size, max_seq_len=64))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CLASSES)
def test_parameter_counts_are_those_in_the_config_file(configs, name, size):
    model_cfg, size_cfg = configs(name, size)
    check_model(model_cfg, size_cfg, device_type="cuda", seq_len=2048)
    model = on_meta(model_cfg, size_cfg, size_cfg.vocab_size)
    whole = sum(p.numel() for p in model.parameters())
    stack = sum(p.numel() for p in model.model.parameters()) - size_cfg.vocab_size * size_cfg.hidden_size
    assert whole - stack == size_cfg.vocab_size * size_cfg.hidden_size * (1 if size_cfg.tie_embeddings else 2)
    text = (ROOT / "configs" / "size" / f"{size}.yaml").read_text().replace("\n#", "")
    found = re.search(rf"\b{name} ([\d.]+) ([MB]) \(([\d.]+) ([MB])\)", text)
    for count, digits, unit in ((whole, *found.group(1, 2)), (stack, *found.group(3, 4))):
        places = len(digits.partition(".")[2])
        assert round(count / {"M": 1e6, "B": 1e9}[unit], places) == float(digits)


def test_the_mve_has_the_proposals_head_dimensions(configs):
    for name in FLA_MODELS:
        attn = on_meta(*configs(name), 64).model.layers[0].attn
        assert (attn.num_heads, attn.head_k_dim, attn.head_v_dim) == (4, 64, 128)
        assert head_dims(configs(name)[0], 256) == (64, 128)


@pytest.mark.parametrize("name", CLASSES)
def test_weights_follow_from_the_seed_and_have_the_librarys_spread(configs, name):
    def build(seed):
        torch.manual_seed(seed)
        return build_model(*configs(name), vocab_size=512, max_seq_len=64)

    first, again, other = build(1), build(1), build(2)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values()))
    large = [(key, a, b) for (key, a), b in zip(first.named_parameters(), other.parameters()) if a.numel() > 2**12]
    assert len(large) > 10
    for key, a, b in large:
        assert not torch.equal(a, b), key
        assert abs(a.mean()) < 5e-4 and abs(a.std() - 0.02) < 5e-4, key  # normal, initializer_range = 0.02
    assert len({a.flatten()[0].item() for _, a, _ in large}) == len(large)  # no two from the same draw


def test_late_fills_equal_the_library_where_a_tensor_is_used_meanwhile():
    from models.initialization import built_with_late_fills

    def build():
        module = nn.Linear(512, 512, bias=False)
        nn.init.uniform_(module.weight, 1, 2)
        module.register_buffer("logs", module.weight.detach().log())  # used before the end: drawn for it
        return module

    module = built_with_late_fills(build)
    assert torch.equal(module.logs, module.weight.log())
    assert 1 <= module.weight.min() < 1.01 and 1.99 < module.weight.max() <= 2

    def zeroed():
        module = nn.Linear(512, 512, bias=False)
        nn.init.zeros_(module.weight)
        return module

    assert built_with_late_fills(zeroed).weight.count_nonzero() == 0


@pytest.mark.parametrize("name", CLASSES)
def test_dtype_tying_and_the_classifier(tiny_model, name):
    model = tiny_model(name, dtype=torch.bfloat16)
    kept = {key for key, p in model.named_parameters() if p.dtype != torch.bfloat16}
    assert all(key.endswith((".A_log", ".dt_bias")) for key in kept)
    assert bool(kept) == (name in ("gated_deltanet", "kda"))
    assert model.training and not model.config.use_cache
    weight, bias = classifier(model)
    assert weight.shape == (50, 32) and bias is None
    assert weight is model.get_input_embeddings().weight
    untied = tiny_model(name, "size.tie_embeddings=false")
    assert classifier(untied)[0] is not untied.get_input_embeddings().weight
    ids = torch.randint(50, (2, 70))
    hidden = final_hidden(untied, ids)
    assert hidden.shape == (2, 70, 32)
    torch.testing.assert_close(hidden @ classifier(untied)[0].T, untied(ids).logits)


def test_flas_loss_fusing_is_off():
    for name in FLA_MODELS:
        model_cfg = dict(name=name, num_heads=2, expand_k=1.0, expand_v=1.0, chunk_size=None, options={})
        size_cfg = dict(hidden_size=32, num_layers=1, intermediate_size=32, tie_embeddings=False)
        config = model_config(model_cfg, size_cfg, vocab_size=8, max_seq_len=8)
        assert not config.fuse_cross_entropy and not getattr(config, "fuse_linear_cross_entropy", False)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_every_model_trains(tiny_model, name, autocast):
    """The loss of a fixed batch falls to less than half of log V."""
    model = tiny_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    ids = torch.randint(50, (1, 67))
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = final_hidden(model, ids[:, :-1])
            weight, _ = classifier(model)
            loss = nn.functional.cross_entropy((hidden @ weight.T).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert loss < math.log(50) / 2


@pytest.mark.parametrize("name", FLA_MODELS)
def test_bfloat16_parameters_train(tiny_model, name):
    model = tiny_model(name, dtype=torch.bfloat16)
    hidden = final_hidden(model, torch.randint(50, (2, 70)))
    assert hidden.dtype == torch.bfloat16
    hidden.float().square().mean().backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gla", "{use_short_conv: true, fuse_norm: false, fuse_swiglu: false}"),
        ("gated_deltanet", "{allow_neg_eigval: true, output_gate_activation: sigmoid}"),
        ("kda", "{safe_gate: true, lower_bound: -5}"),
        ("transformer", "{rms_norm_eps: 1.0e-5}"),
    ],
)
def test_options_reach_the_librarys_config(tiny_model, name, options):
    overrides = [f"model.options.{part.strip()}".replace(": ", "=") for part in options.strip("{}").split(",")]
    model = tiny_model(name, *(f"+{part}" for part in overrides))
    key, value = overrides[0].removeprefix("model.options.").split("=")
    assert str(getattr(model.config, key)).lower() == str(float(value) if "e-" in value else value)
    final_hidden(model, torch.randint(50, (2, 70))).sum().backward()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=gla", "model.name=mamba"], "model=mamba does not exist.*gla.*transformer"),
        (["model=gla", "size.num_heads=7"], "256 is not a multiple of model.num_heads = 7"),
        (["model=gla", "size.expand_k=0.3"], "76.8 is not a multiple"),
        (["model=kda", "size.num_heads=0"], "num_heads is 0: give a whole number"),
        (["model=kda", "size.num_layers=0"], "size.num_layers is 0"),
        (["model=kda", "size.hidden_size=2048"], "512 key dimensions.*at most 256"),
        (["model=gated_deltanet", "size.hidden_size=2048"], "512 key dimensions.*at most 256"),
        (["model=transformer", "size.num_heads=3"], "256 is not a multiple of 2 · model.num_heads = 6"),
        (["model=transformer", "size.num_heads=256"], "even size"),
        (["model=transformer", "model.chunk_size=64"], "no chunks"),
        (["model=gla", "model.chunk_size=256"], "256.*16, 32, 64, 128"),
        (["model=gla", "model.chunk_size=32", "train.seq_len=64"], "train.seq_len=64.*recurrent"),
        (["model=gla", "+model.options.use_conv=true"], "model.options.use_conv.*use_short_conv"),
        (["model=gla", "+model.options.hidden_size=3"], "model.options.hidden_size is no option"),
    ],
)
def test_bad_models_are_refused_in_one_line(compose_config, overrides, words):
    cfg = compose_config(*overrides)
    with pytest.raises(ValueError, match=words) as error:
        check_model(cfg.model, cfg.size, device_type="cpu", seq_len=cfg.train.seq_len)
    assert "\n" not in str(error.value)


def test_the_cpu_needs_flas_dispatcher(configs, monkeypatch):
    monkeypatch.setattr(fla.backends, "_DISPATCH_DISABLED", True)
    with pytest.raises(ValueError, match="FLA_DISABLE_BACKEND_DISPATCH=1"):
        check_model(*configs("kda"), device_type="cpu", seq_len=128)
    check_model(*configs("kda"), device_type="cuda", seq_len=128)
    check_model(*configs("transformer"), device_type="cpu", seq_len=128)


# FLOPs


def test_flops_of_the_transformer_are_what_torch_counts(configs):
    model_cfg, size_cfg = configs("transformer")
    model = build_model(model_cfg, size_cfg, vocab_size=512, max_seq_len=96)
    # The CPU's fused attention is not in torch's table, its unfused form is.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        final_hidden(model, torch.randint(512, (2, 96))) @ classifier(model)[0].T
    assert flops_per_token(model_cfg, size_cfg, 512, 96) == 3 * counter.get_total_flops() / (2 * 96)


@pytest.mark.parametrize("name", FLA_MODELS)
def test_linear_layers_are_what_torch_counts(configs, name):
    """F.linear is aten.mm; the mixers' products are batched, aten.bmm."""
    model_cfg, size_cfg = configs(name)
    model = build_model(model_cfg, size_cfg, vocab_size=512, max_seq_len=96)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        final_hidden(model, torch.randint(512, (2, 96)))
    counts = counter.get_flop_counts()["Global"]
    linear = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    assert 2 * linear_entries(model_cfg, size_cfg) == linear / (2 * 96)
    total = 2 * linear_entries(model_cfg, size_cfg) + 2 * 256 * 512 + 2 * mixer_flops(model_cfg, 256, 96)
    assert flops_per_token(model_cfg, size_cfg, 512, 96) == 3 * total


def test_mixers_are_what_torch_counts_for_their_products():
    """One head, one chunk: the products that the docstring lists, carried out."""
    C, K, V, tokens = 16, 8, 24, 16
    q, k, v, h, A, inverse = (torch.zeros(*s) for s in ((C, K), (C, K), (C, V), (K, V), (C, C), (C, C)))
    cfg = dict(num_heads=1, expand_k=1.0, expand_v=3.0, chunk_size=C)
    with FlopCounterMode(display=False) as counter:
        q @ h, k.T @ v, q @ k.T, A @ v
    assert mixer_flops({**cfg, "name": "gla"}, K, 999) == counter.get_total_flops() / tokens
    with FlopCounterMode(display=False) as counter:
        q @ h, k.T @ v, q @ k.T, A @ v, k @ h, k @ k.T, inverse @ k, inverse @ v
    for name in ("gated_deltanet", "kda"):
        assert mixer_flops({**cfg, "name": name}, K, 999) == counter.get_total_flops() / tokens


# Importing


def test_a_fresh_process_runs_fla_on_the_cpu_without_warnings_with_triton_interpreting():
    code = (
        "import torch, models\n"
        "model_cfg = dict(name='gla', num_heads=2, expand_k=1.0, expand_v=1.0, chunk_size=None, options={})\n"
        "size_cfg = dict(hidden_size=32, num_layers=1, intermediate_size=32, tie_embeddings=True)\n"
        "model = models.build_model(model_cfg, size_cfg, vocab_size=9, max_seq_len=80)\n"
        "models.final_hidden(model, torch.randint(9, (1, 80))).sum().backward()\n"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Triton is not supported" not in done.stderr


def test_gated_deltanet_on_hopper_needs_a_triton_that_compiles_it(monkeypatch):
    from models import build

    monkeypatch.setattr(build, "IS_NVIDIA_HOPPER", True)
    monkeypatch.setattr(build, "TRITON_ABOVE_3_7_1", False)
    with pytest.raises(ValueError, match="Hopper.*triton>=3.7.1.*model=kda"):
        build.check_hopper("gated_deltanet", "cuda")
    build.check_hopper("gated_deltanet", "cpu")
    build.check_hopper("gla", "cuda")
    monkeypatch.setattr(build, "TRITON_ABOVE_3_7_1", True)
    build.check_hopper("gated_deltanet", "cuda")
