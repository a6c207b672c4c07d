"""chunk_size: the value reaches FLA's kernel, in this model only, and leaves the output alone."""

import copy

import pytest
import torch
from fla.layers import gated_deltanet as gdn_layer
from fla.layers import gla as gla_layer
from fla.layers import kda as kda_layer
from fla.ops.gla import chunk as fla_gla
from test_models_recurrence import small_model

from models import chunk_size as module
from models import cpu_backend, final_hidden
from models.chunk_size import ALLOWED

LENGTH = 70
NAMES_AND_SIZES = [(name, size) for name, sizes in ALLOWED.items() for size in sizes]


@pytest.fixture
def seen(monkeypatch):
    """Every chunk size that an inner function gets, forward and backward."""
    sizes = []

    def spy(owner, name, where):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            sizes.append((name, where(args, kwargs)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    for name in ("chunk_gla_fwd_intra_gk", "chunk_gla_fwd_o_gk", "chunk_fwd_h", "chunk_bwd_dh", "chunk_gla_bwd_dqkg"):
        spy(fla_gla, name, lambda _, kwargs: kwargs["chunk_size"])
    spy(cpu_backend.delta_rule, "delta_rule", lambda args, _: args[9])
    return sizes


@pytest.mark.parametrize(("name", "size"), [*NAMES_AND_SIZES, ("gla", None), ("kda", None), ("gated_deltanet", None)])
def test_the_size_reaches_the_kernel(seen, name, size):
    model = small_model(name, chunk_size=size)
    final_hidden(model, torch.randint(40, (2, LENGTH))).sum().backward()
    assert {value for _, value in seen} == {size or 64}
    expected = {"chunk_gla_fwd_intra_gk", "chunk_gla_fwd_o_gk", "chunk_fwd_h", "chunk_bwd_dh", "chunk_gla_bwd_dqkg"}
    assert {function for function, _ in seen} == (expected if name == "gla" else {"delta_rule"})


@pytest.mark.parametrize("name", ALLOWED)
def test_output_and_gradient_do_not_depend_on_it(name):
    ids, states = torch.randint(40, (2, LENGTH)), None
    results = []
    for size in (None, *ALLOWED[name]):
        model = small_model(name, chunk_size=size)
        states = states or model.state_dict()
        model.load_state_dict(states)
        hidden = final_hidden(model, ids)
        hidden.square().mean().backward()
        results.append((hidden.detach(), [p.grad for p in model.model.parameters()]))
    for hidden, gradients in results[1:]:
        torch.testing.assert_close(hidden, results[0][0], rtol=1e-7, atol=1e-8)
        for a, b in zip(gradients, results[0][1]):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_chunk_gla_is_flas_chunk_gla():
    """Values, gradients, states and dtypes of our function at FLA's own chunk size."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(2, LENGTH, 2, 8).to(dtype).requires_grad_() for _ in range(3))
        g = torch.nn.functional.logsigmoid(torch.randn(2, LENGTH, 2, 8)).to(dtype).requires_grad_()
        h0 = torch.randn(2, 2, 8, 8, requires_grad=True)
        options = dict(initial_state=h0, output_final_state=True, state_v_first=True)
        results = []
        for op in (lambda *args, **kw: module.chunk_gla(*args, chunk_size=64, **kw), fla_gla.chunk_gla):
            o, state = op(q, k, v, g, **options)
            gradients = torch.autograd.grad(o.float().square().sum() + state.square().sum(), (q, k, v, g, h0))
            results.append((o, state, *gradients))
        for a, b in zip(*results):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_other_models_and_flas_modules_stay_as_they_are(seen):
    kernels = gla_layer.chunk_gla, gdn_layer.chunk_gated_delta_rule, kda_layer.chunk_kda
    for name, size in NAMES_AND_SIZES:
        small_model(name, chunk_size=size)
    assert kernels == (gla_layer.chunk_gla, gdn_layer.chunk_gated_delta_rule, kda_layer.chunk_kda)
    final_hidden(small_model("gla"), torch.randint(40, (2, LENGTH)))
    assert {value for _, value in seen} == {64}


def test_it_survives_a_deep_copy_and_gradient_checkpointing(seen):
    model = copy.deepcopy(small_model("gla", chunk_size=16))
    with torch.no_grad():
        model.model.layers[0].attn.o_proj.weight.zero_()  # of the copy, whose forward must use the copy's weights
    attn = model.model.layers[0].attn
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    assert attn(x)[0].abs().max() == 0
    model.gradient_checkpointing_enable()
    final_hidden(model, torch.randint(40, (2, LENGTH))).sum().backward()
    assert {value for _, value in seen} == {16}


def test_a_layer_that_does_not_call_the_kernel_is_an_error():
    with pytest.raises(RuntimeError, match="does not call chunk_nothing.*0.6.0"):
        module.with_global(small_model("gla").model.layers[0].attn.forward, "chunk_nothing", print)


@pytest.mark.parametrize(
    ("name", "size"), [("gla", 256), ("gla", 8), ("kda", 16), ("gated_deltanet", 128), ("transformer", 64)]
)
def test_other_sizes_are_refused(name, size):
    with pytest.raises(ValueError, match=f"model.chunk_size is {size}.*null"):
        module.check_chunk_size(name, size)
