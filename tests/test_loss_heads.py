"""Every loss head against the formula in float64: one contract, whatever the head."""

import pytest
import torch
import torch.nn.functional as F

from models.loss_heads import HEADS, IGNORE_INDEX, check_loss_head, loss_head


def runs_here(name):
    try:
        check_loss_head(name, "cpu")
    except ValueError:
        return False
    return True


# On a machine without a C++ compiler `compile` is not among them: that it says so is tested below.
CPU_HEADS = [name for name in HEADS if runs_here(name)]
GPU = torch.cuda.is_available()
N, D, V = 48, 24, 80

# Relative error of the gradients, by dtype of hidden and weight. cce_filter drops entries of the softmax under 2^-12 (bf16)
# or eps/32 (other dtypes); on a softmax as broad as this one none is that small.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def heads():
    for name in HEADS:
        if name in CPU_HEADS or name in ("liger", "fla"):
            yield pytest.param(name, marks=[] if name in CPU_HEADS else pytest.mark.gpu)


def inputs(dtype=torch.float32, bias=False, ignored=0.25, device="cuda" if GPU else "cpu"):
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(2, N // 2, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) * 0.3
    targets = torch.randint(V, (2, N // 2), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORE_INDEX
    bias = torch.randn(V, generator=generator) * 0.3 if bias else None
    leaves = [x.to(device, dtype).requires_grad_() if x is not None else None for x in (hidden, weight, bias)]
    return leaves[0], targets.to(device), leaves[1], leaves[2]


def formula(hidden, targets, weight, bias=None, shift=0):
    """mean over counted targets of lse(z) − z[target] in float64, and its gradients, on a copy of the inputs."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    b = None if bias is None else bias.detach().double().requires_grad_()
    z = h @ w.T + (0 if b is None else b)
    t = targets
    if shift:
        z, t = z[:, :-shift], t[:, shift:]
    counted = t != IGNORE_INDEX
    nll = z.logsumexp(-1) - z.gather(-1, t.clamp_min(0)[..., None])[..., 0]
    loss = nll[counted].mean()
    loss.backward()
    return loss.detach(), h.grad, w.grad, None if b is None else b.grad


def relative(value, reference):
    return ((value.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", heads())
def test_loss_and_gradients_match_the_formula(name, shift, dtype):
    hidden, targets, weight, bias = inputs(dtype, bias=True)
    loss = loss_head(name, shift=shift)(hidden, targets, weight, bias)
    loss.backward()
    reference = formula(hidden, targets, weight, bias, shift)
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference[0].item(), rel=1e-6 if dtype == torch.float32 else 3e-3)
    for value, wanted in zip((hidden.grad, weight.grad, bias.grad), reference[1:]):
        assert value.dtype == dtype
        assert relative(value, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", heads())
def test_autocast_computes_in_bf16_and_returns_gradients_in_the_inputs_dtype(name):
    hidden, targets, weight, _ = inputs()
    with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
        loss = loss_head(name)(hidden, targets, weight)
    loss.backward()
    reference = formula(hidden, targets, weight)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(reference[0].item(), rel=3e-3)
    # Worse than float32, no worse than bf16: the autocast dtype was really used.
    assert 1e-5 < relative(hidden.grad, reference[1]) < TOLERANCE[torch.bfloat16]
    assert 1e-5 < relative(weight.grad, reference[2]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", heads())
def test_accumulated_micro_batches_equal_one_batch(name):
    """Micro-batches with unequal numbers of targets, weighted by their share, give the gradient of the whole."""
    hidden, targets, weight, _ = inputs()
    head = loss_head(name)
    total = (targets != IGNORE_INDEX).sum()
    for part in range(2):
        share = (targets[part] != IGNORE_INDEX).sum() / total
        (share * head(hidden[part], targets[part], weight)).backward()
    reference = formula(hidden, targets, weight)
    assert relative(hidden.grad, reference[1]) < TOLERANCE[torch.float32]
    assert relative(weight.grad, reference[2]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", heads())
def test_tied_weight_adds_both_gradients(name):
    """The classifier weight is also the embedding: its gradient is the sum of both uses."""
    _, targets, weight, _ = inputs(ignored=0.0)
    tokens = torch.randint(V, targets.shape, device=weight.device)
    loss_head(name)(torch.tanh(F.embedding(tokens, weight)), targets, weight).backward()
    reference = weight.detach().double().requires_grad_()
    z = torch.tanh(F.embedding(tokens, reference)) @ reference.T
    F.cross_entropy(z.flatten(0, 1), targets.flatten()).backward()
    assert relative(weight.grad, reference.grad) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", heads())
def test_no_target_left_is_nan_as_in_torch(name):
    hidden, targets, weight, _ = inputs()
    assert loss_head(name)(hidden, torch.full_like(targets, IGNORE_INDEX), weight).isnan()


@pytest.mark.parametrize("name", heads())
def test_own_ignore_index(name):
    hidden, targets, weight, _ = inputs(ignored=0.0)
    own = targets.masked_fill(targets % 3 == 0, 1)
    loss = loss_head(name, ignore_index=1)(hidden, own, weight)
    reference = formula(hidden, own.masked_fill(own == 1, IGNORE_INDEX), weight)[0]
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)


FLA_CRITERION = {
    "GLA": dict(fuse_cross_entropy=False, fuse_linear_cross_entropy=True),
    "GatedDeltaNet": dict(fuse_cross_entropy=False, fuse_linear_cross_entropy=True, head_dim=16),
    "KDA": dict(fuse_cross_entropy=True, head_dim=16),  # its config has one switch for both
}


@pytest.mark.parametrize("model_name", FLA_CRITERION)
@pytest.mark.parametrize("name", [name for name in CPU_HEADS if name != "compile"])
def test_as_criterion_of_an_fla_model(name, model_name):
    """Assigned to FLA's own model, it computes the loss that the model's logits give, in training and in evaluation."""
    import fla.models

    config = getattr(fla.models, f"{model_name}Config")(
        hidden_size=32, num_hidden_layers=1, num_heads=2, vocab_size=V, use_cache=False, **FLA_CRITERION[model_name]
    )
    model = getattr(fla.models, f"{model_name}ForCausalLM")(config).train()
    tokens = torch.randint(V, (2, 16))
    model.criterion = loss_head(name)
    ours = model(tokens, labels=tokens).loss
    with torch.no_grad():
        logits = model(tokens).logits
    theirs = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    # In evaluation FLA gives the criterion logits, and with num_items_in_batch it asks for a sum.
    assert model.eval()(tokens, labels=tokens).loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    model.criterion.reduction = "sum"
    hidden, weight = torch.randn(5, 32), torch.randn(V, 32)
    targets = torch.tensor([1, 2, IGNORE_INDEX, 3, 4])
    summed = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert model.criterion(hidden, targets, weight).item() == pytest.approx(summed.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("hidden", "targets", "weight", "words"),
    [
        ((4, D), (5,), (V, D), "targets of shape"),
        ((4, D), (4,), (V, D + 1), "D must agree"),
    ],
)
def test_shapes_that_do_not_fit(hidden, targets, weight, words):
    with pytest.raises(ValueError, match=words):
        loss_head("standard")(torch.zeros(hidden), torch.zeros(targets, dtype=torch.int64), torch.zeros(weight))


def test_unknown_head_and_option():
    with pytest.raises(ValueError, match="loss=cut does not exist: take one of standard"):
        loss_head("cut")
    with pytest.raises(ValueError, match="tokens_per_chunk is 0"):
        loss_head("chunked", tokens_per_chunk=0)


def test_heads_without_a_cpu_path_say_what_to_take_instead(monkeypatch):
    for name in ("liger", "fla"):
        with pytest.raises(ValueError, match=f"loss={name} needs a CUDA GPU.*loss=cce"):
            check_loss_head(name, "cpu")
        check_loss_head(name, "cuda")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match="needs a C\\+\\+ compiler.*loss=standard"):
        check_loss_head("compile", "cpu")
