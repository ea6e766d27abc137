"""C kernels and fused attention compute what plain PyTorch does, to the type's rounding; where they
would not, plain PyTorch is used.
"""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, start

import model as model_module
from engine.generation import LayerCache
from engine.kernels import build as building
from engine.kernels import native as kernels
from engine.kernels import ops
from engine.kernels.native import NORM_EPS
from model import GPT, GPTConfig, LayerNorm, rotary

ERROR = {torch.bfloat16: 0.01, torch.float32: 1e-5}  # relative to the whole, from rounding


def on(dtype: torch.dtype, *values):
    """A test's parameter; the test is skipped where there can be no kernels for `dtype`."""
    missing = shutil.which("cc") is None or building.instructions(dtype) is None
    reason = f"needs a C compiler (cc) and a CPU with kernels for {dtype}"
    return pytest.param(
        dtype, *values, marks=pytest.mark.skipif(missing, reason=reason), id=str(dtype)[6:]
    )


both = pytest.mark.parametrize("dtype", [on(torch.float32), on(torch.bfloat16)])


@both
def test_the_kernels_can_be_built(dtype):
    assert building.library(dtype) is not None, building.describe(dtype)


@pytest.mark.skipif(
    shutil.which("cc") is None or torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="needs a C compiler (cc) and a CPU with AVX-512, which can do as if it had AVX2 alone",
)
@pytest.mark.slow
def test_all_of_this_is_true_with_avx2_alone():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-k", "float32", __file__],
        cwd=ROOT,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and passed and int(passed[1]) > 30, run.stdout


@both
def test_a_broken_build_is_built_again_and_a_compiler_may_have_arguments(dtype, tmp_path):
    environment = {"CC": "cc -m64", "XDG_CACHE_HOME": str(tmp_path)}
    program = f"import torch; from engine.kernels import build; print(build.describe({dtype}))"
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        (built,) = tmp_path.glob("*/*")
        assert run.stdout.endswith(f" in {built}\n"), run.stderr
        built.write_bytes(b"not a library")


@both
def test_another_source_is_another_build(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    changed = tmp_path / "kernels.c"
    changed.write_text(building.SOURCE.read_text() + "// changed\n")
    built = []
    for source in (building.SOURCE, changed):
        monkeypatch.setattr(building, "SOURCE", source)
        built.append(building._build.__wrapped__(dtype)[1])
    assert built[0] != built[1] and all(os.path.exists(path) for path in built)


@both
def test_what_only_stands_for_a_tensor_is_left_to_torch(dtype):
    x = torch.ones(2, 32, dtype=dtype)
    assert kernels.supports(x)
    assert not kernels.supports(x.double()) and not kernels.supports(x.to("meta"))
    with torch._subclasses.FakeTensorMode() as mode:
        assert not kernels.supports(mode.from_tensor(x))


@both
def test_heads_of_a_width_that_attention_is_not_written_for_are_left_to_torch(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "attention", lambda *_: pytest.fail("reads other heads"))
    for n_head, n_embd in ((16, 528), (2, 80), (4, 64)):  # 33, 40 and 16 wide
        model = build("gpt2", n_head=n_head, n_embd=n_embd)
        loss_and_gradient(model, torch.zeros(1, 40, dtype=torch.int64), dtype)


@both
def test_a_second_derivative_is_refused_and_another_default_type_is_no_matter(dtype):
    x = torch.randn(2, 32).to(dtype).requires_grad_()
    (g,) = torch.autograd.grad((kernels.rms_norm(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    before = kernels.rms_norm(x), kernels.attention(torch.ones(1, 40, 96, dtype=dtype), 1, None)
    torch.set_default_dtype(torch.float64)
    try:
        after = kernels.rms_norm(x), kernels.attention(torch.ones(1, 40, 96, dtype=dtype), 1, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def plain_attention(qkv: torch.Tensor, n_head: int, rotation) -> torch.Tensor:
    B, T, C = qkv.size(0), qkv.size(1), qkv.size(2) // 3
    q, k, v = qkv.view(B, T, 3, n_head, -1).permute(2, 0, 3, 1, 4)
    if rotation is not None:
        q, k = (F.rms_norm(ops.rotate(z, *rotation), z.shape[-1:], eps=NORM_EPS) for z in (q, k))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(B, T, C)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def result_and_gradient(function, x: torch.Tensor, g: torch.Tensor):
    x = x.detach().clone().requires_grad_()
    y = function(x)
    y.backward(g.to(y.dtype))
    return y.detach(), x.grad


@both
@pytest.mark.parametrize("turned, size", [(True, 1), (True, 8), (False, 1), (False, 4)])
@pytest.mark.parametrize(
    "B, T, H, D", [(2, 128, 4, 32), (2, 50, 2, 32), (1, 7, 2, 64), (1, 1, 1, 32), (2, 33, 3, 48)]
)
def test_attention_and_its_gradient_are_those_of_float64(dtype, B, T, H, D, turned, size):
    torch.manual_seed(0)
    x, g = size * torch.randn(B, T, 3 * H * D).to(dtype), torch.randn(B, T, H * D).to(dtype)
    rotation = rotary(0, T, D, x.device) if turned else None
    results = result_and_gradient(lambda z: kernels.attention(z, H, rotation), x, g)
    exact = result_and_gradient(lambda z: plain_attention(z, H, rotation), x.double(), g)
    for ours, right in zip(results, exact, strict=True):
        # Gradients of queries, keys and values differ in size: each is compared for itself.
        for part in range(1 if ours.size(-1) == H * D else 3):
            cut = slice(part * H * D, (part + 1) * H * D)
            if right[..., cut].norm() > 1e-6:
                assert relative_error(ours[..., cut], right[..., cut]) < ERROR[dtype]
            else:  # one character has nothing to choose from
                assert ours[..., cut].float().norm() < 1e-2


@both
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 1e8])
def test_the_weights_of_the_gradient_add_up_to_one_however_large_the_scores(dtype, size):
    torch.manual_seed(0)
    x, g = torch.randn(2, 40, 3 * 64).to(dtype), torch.randn(2, 40, 64).to(dtype)
    x[..., :128] *= size
    _, gradient = result_and_gradient(lambda z: kernels.attention(z, 2, None), x, g)
    ours, right = gradient[..., 128:].double().sum(dim=1), g.double().sum(dim=1)
    assert relative_error(ours, right) < ERROR[dtype]


@both
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(
    "B, past, H, D",
    [(2, 49, 2, 32), (1, 0, 2, 64), (3, 15, 1, 48), (2, 16, 2, 32), (64, 70, 4, 32)],
)
def test_one_more_character_attends_as_the_last_of_all(dtype, B, past, H, D, turned):
    """It changes its own place in the cache, and no other."""
    torch.manual_seed(0)
    x = torch.randn(B, past + 1, 3 * H * D).to(dtype)
    _, k, v = x.view(B, past + 1, 3, H, D).permute(2, 0, 3, 1, 4)
    k = k.double()
    rotation = rotary(0, past + 1, D, x.device) if turned else None
    if rotation is not None:
        k = F.rms_norm(ops.rotate(k, *rotation), (D,), eps=NORM_EPS)
    keys, values = torch.full((2, B, H, past + 9, D), 7.0, dtype=dtype)
    keys[:, :, :past], values[:, :, :past] = k[:, :, :-1], v[:, :, :-1]
    last = tuple(table[past:] for table in rotation) if rotation is not None else None
    ours = kernels.attention_step(x[:, -1:], H, last, keys, values, past)
    assert relative_error(ours, plain_attention(x.double(), H, rotation)[:, -1:]) < ERROR[dtype]
    assert relative_error(keys[:, :, : past + 1], k) < ERROR[dtype]
    assert torch.equal(values[:, :, : past + 1], v)
    assert (keys[:, :, past + 1 :] == 7).all() and (values[:, :, past + 1 :] == 7).all()


@both
@pytest.mark.parametrize(
    "kernel, plain",
    [
        (kernels.rms_norm, lambda x: F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)),
        (kernels.squared_relu, lambda x: F.relu(x).square()),
    ],
)
def test_norm_and_activations_and_their_gradients_are_those_of_float64(dtype, kernel, plain):
    torch.manual_seed(0)
    x, g = 3 * torch.randn(3, 5, 48).to(dtype), torch.randn(3, 5, 48).to(dtype)
    ours, right = result_and_gradient(kernel, x, g), result_and_gradient(plain, x.double(), g)
    for a, b in zip(ours, right, strict=True):
        assert relative_error(a, b) < ERROR[dtype]
    with torch.no_grad():
        assert torch.equal(kernel(x), ours[0])


def result_and_gradients(function, x, weight, bias, g) -> list[torch.Tensor]:
    """The output, and the gradients of x, weight and, if there is one, bias."""
    leaves = [z if z is None else z.detach().requires_grad_() for z in (x, weight, bias)]
    y = function(*leaves)
    y.backward(g.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@both
@pytest.mark.parametrize(
    "kernel, plain, has_bias",
    [
        (kernels.layer_norm, lambda x, w, b: F.layer_norm(x, (48,), w, b), True),
        (kernels.layer_norm, lambda x, w, b: F.layer_norm(x, (48,), w, b), False),
        (
            lambda x, w, _: kernels.token_shift(x, w),
            lambda x, w, _: x + w * F.pad(x, (0, 0, 1, -1)),
            False,
        ),
    ],
)
def test_operations_with_weights_and_all_their_gradients_are_those_of_float64(
    dtype, kernel, plain, has_bias
):
    torch.manual_seed(0)
    x, g = (3 * torch.randn(7, 40, 48) + 2).to(dtype), torch.randn(7, 40, 48).to(dtype)
    weight, bias = torch.randn(48), torch.randn(48) if has_bias else None

    ours = result_and_gradients(kernel, x, weight, bias, g)
    exact = (z if z is None else z.double() for z in (x, weight, bias))
    right = result_and_gradients(plain, *exact, g)
    for a, b in zip(ours, right, strict=True):
        assert relative_error(a, b) < ERROR[dtype]


@pytest.mark.parametrize("dtype", [on(torch.float32)])
def test_layer_norm_with_another_eps_is_left_to_torch(dtype):
    x, norm = torch.randn(2, 64, dtype=dtype) / 10, LayerNorm(64, eps=0.1)
    assert torch.allclose(norm(x), F.layer_norm(x, (64,), eps=0.1), atol=1e-6)


@pytest.mark.parametrize("dtype", [on(torch.bfloat16)])
def test_layer_norm_with_other_weights_than_float32_is_left_to_torch(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "layer_norm", lambda *_: pytest.fail("reads float32"))
    norm = LayerNorm(64).to(dtype)
    assert norm(torch.randn(2, 64).to(dtype)).isfinite().all()


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_is_not_finite_stays_so(dtype, value):
    x = torch.ones(2, 40, 192, dtype=dtype)
    x[1, 7, 70] = value
    rotation = rotary(0, 40, 32, x.device)
    functions = [kernels.rms_norm, lambda z: kernels.attention(z, 2, rotation)]
    functions += [kernels.squared_relu, lambda z: kernels.attention(z, 2, None)]
    functions += [lambda z: kernels.layer_norm(z, torch.ones(192), None)]
    functions += [lambda z: kernels.token_shift(z, torch.ones(192))]
    plain = [
        lambda z: F.rms_norm(z, z.shape[-1:], eps=NORM_EPS),
        lambda z: plain_attention(z, 2, rotation),
        lambda z: F.relu(z).square(),
        lambda z: plain_attention(z, 2, None),
        lambda z: F.layer_norm(z, (192,)),
        lambda z: z + F.pad(z, (0, 0, 1, -1)),
    ]
    for ours, theirs in zip(functions, plain, strict=True):
        y = ours(x)
        assert torch.equal(y.isfinite(), theirs(x.float()).to(dtype).isfinite())
        assert y[0].isfinite().all()


@both
@pytest.mark.parametrize("softcap", [0, 15])
@pytest.mark.parametrize("width", [1, 7, 16, 65, 150])
def test_cross_entropy_and_its_gradient_are_those_of_float64(dtype, softcap, width):
    torch.manual_seed(0)
    x = (10 * torch.randn(3, 40, width)).to(dtype)
    targets = torch.randint(0, width, (3, 40))
    targets[1, 5:30] = -1

    def plain(z):
        z = softcap * torch.tanh(z / softcap) if softcap else z
        return z, F.cross_entropy(z.flatten(0, 1), targets.flatten(), ignore_index=-1)

    for weight in (0, 0.01):  # of the logits' own gradient, beside that of the loss

        def run(function, z, weight=weight):
            z = z.detach().clone().requires_grad_()
            y, loss = function(z)
            (3 * loss + (weight * y.sum() if weight else 0)).backward()
            return y.detach(), loss.detach(), z.grad

        ours = run(lambda z: kernels.cross_entropy(z, targets, softcap), x)
        right = run(plain, x.double())
        assert ours[0].dtype is torch.float32 and ours[2].dtype is dtype
        for a, b, error in zip(ours, right, (1e-6, 1e-6, ERROR[dtype]), strict=True):
            assert (a - b).norm() <= error * b.norm()
    y = kernels.cross_entropy(x.requires_grad_(), targets, softcap)[0]
    (alone,) = torch.autograd.grad(y.sum(), x)
    z = x.detach().double().requires_grad_()
    assert relative_error(alone, torch.autograd.grad(plain(z)[0].sum(), z)[0]) < ERROR[dtype]
    with torch.no_grad():
        assert torch.equal(kernels.cross_entropy(x, targets, softcap)[1], ours[1])


@both
def test_cross_entropy_of_large_logits_and_wrong_targets(dtype):
    x = torch.tensor([[3e4, 3e4, -3e4], [-3e4, 0, 0]]).to(dtype).requires_grad_()
    targets = torch.tensor([0, 1])
    _, loss = kernels.cross_entropy(x, targets, 0)
    loss.backward()
    right = torch.tensor([[-0.25, 0.25, 0], [0, -0.25, 0.25]])
    assert abs(loss.item() - math.log(2)) < 1e-6 and torch.allclose(x.grad.float(), right)
    y, loss = kernels.cross_entropy(x, targets, 15)
    assert y[0].tolist() == [15, 15, -15] and loss.isfinite()
    assert kernels.cross_entropy(x, torch.full((2,), -1), 0)[1].isnan()  # as in torch
    assert kernels.cross_entropy(x * math.nan, targets, 15)[1].isnan()
    masked = torch.tensor([[0, -math.inf], [-math.inf, 0]], dtype=dtype).requires_grad_()
    for softcap, alike in ((0, masked), (15, (15 * torch.tanh(masked.float() / 15)))):
        _, loss = kernels.cross_entropy(masked, torch.tensor([0, -1]), softcap)
        right = F.cross_entropy(alike.float(), torch.tensor([0, -1]), ignore_index=-1)
        assert torch.allclose(loss, right)
        for a, b in zip(*(torch.autograd.grad(z, masked) for z in (loss, right)), strict=True):
            assert torch.equal(a, b)
    for wrong in (3, -2):
        with pytest.raises(IndexError, match="in the vocabulary"):
            kernels.cross_entropy(x, torch.tensor([0, wrong]), 0)
    for unfit in (torch.tensor([0]), torch.tensor([0.0, 1.0]), targets.to("meta")):
        with pytest.raises((ValueError, RuntimeError), match=r"(?i)target|meta"):  # torch's own
            ops.cross_entropy(x, unfit)


only_bfloat16 = pytest.mark.parametrize("dtype", [on(torch.bfloat16)])
only_float32 = pytest.mark.parametrize("dtype", [on(torch.float32)])


@only_float32
@pytest.mark.parametrize("rows, columns, width", [(1, 4, 16), (9, 384, 128), (262, 68, 160)])
def test_a_linear_layer_is_that_of_float64_and_its_rows_do_not_know_of_each_other(
    dtype, rows, columns, width
):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 1, width), torch.randn(columns, width), torch.randn(columns)
    for b in (bias, None):
        y = kernels.linear(x, weight, b)
        right = F.linear(x.double(), weight.double(), b if b is None else b.double())
        assert y.shape == right.shape and relative_error(y, right) < 1e-6
        torch.set_num_threads(2)
        for row in range(rows):
            assert torch.equal(kernels.linear(x[row], weight, b), y[row])
        assert torch.equal(kernels.linear(x, weight, b), y)
        torch.set_num_threads(1)


@only_bfloat16
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows, columns, width", [(8, 32, 32), (72, 96, 160), (776, 128, 64)])
def test_a_linear_layer_in_bfloat16_and_its_gradients_are_those_of_float64(
    dtype, rows, columns, width, has_bias
):
    torch.manual_seed(0)
    x = torch.randn(4, rows // 4, width).to(dtype).transpose(0, 1)  # neither is dense
    g = torch.randn(4, rows // 4, columns).to(dtype).transpose(0, 1)
    weight, bias = torch.randn(columns, width), torch.randn(columns) if has_bias else None

    ours = result_and_gradients(kernels.linear, x, weight, bias, g)
    exact = (z if z is None else z.double() for z in (x, weight, bias))
    right = result_and_gradients(F.linear, *exact, g)
    # Nothing is rounded on the way to the gradients of weight and bias.
    for a, b, error in zip(ours, right, [ERROR[dtype]] * 2 + [1e-6] * 2, strict=False):
        assert relative_error(a, b) < error
    assert [z.dtype for z in ours[2:]] == [torch.float32] * (1 + has_bias)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        again = result_and_gradients(kernels.linear, x, weight, bias, g)
        assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))
    torch.set_num_threads(1)
    assert torch.equal(kernels.linear(x[-2:], weight, bias), ours[0][-2:])


@both
def test_linear_layers_are_the_kernels_where_they_are_faster(dtype, monkeypatch):
    model, idx = build("gpt2", n_embd=256, bias=True), torch.randint(0, 19, (8, 32))
    calls = []
    linear = kernels.linear
    monkeypatch.setattr(kernels, "linear", lambda *a: calls.append(1) or linear(*a))

    def logits(fast: bool):
        monkeypatch.setattr(ops, "_products_are_slow", lambda dtype: fast)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return model(idx)[0].detach()

    with torch.no_grad():
        right = logits(fast=False)
        assert not calls
        assert relative_error(logits(fast=True), right) < ERROR[dtype]
        assert len(calls) == 2 * 4  # all of both layers, not the head, which has 19 columns
    logits(fast=True)
    assert len(calls) == (16 if dtype is torch.bfloat16 else 8)  # with gradients in bfloat16 alone


@only_float32
def test_a_linear_layer_that_the_kernel_is_not_for_is_left_to_torch(dtype, monkeypatch):
    monkeypatch.setattr(ops, "_products_are_slow", lambda dtype: True)
    x, weight, bias = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64)
    with torch.no_grad():
        assert ops._linear_is_faster(x, weight, bias) and ops._linear_is_faster(x, weight, None)
        unfit = [
            (x[:1], weight, bias),  # too small to be worth it
            (x[:, :48], weight, bias),
            (x, weight[:63], None),
            (x, weight.t(), bias),
            (x, weight.double(), bias),
            (x, weight.to("meta"), bias),
            (x, weight, bias.bfloat16()),
            (x, weight, torch.ones(1).expand(64)),
            (x.double(), weight.double(), None),
        ]
        assert not any(ops._linear_is_faster(*arguments) for arguments in unfit)
        with torch.autocast("cpu", torch.bfloat16):
            assert not ops._linear_is_faster(x, weight, bias)
    assert not ops._linear_is_faster(x, weight, bias)


@only_bfloat16
def test_a_linear_layer_that_the_kernel_in_bfloat16_is_not_for_is_left_to_torch(dtype, monkeypatch):
    monkeypatch.setattr(ops, "_products_are_slow", lambda dtype: True)
    x, weight, bias = torch.randn(264, 64).to(dtype), torch.randn(64, 64), torch.randn(64)
    with torch.autocast("cpu", dtype):
        assert ops._linear_is_faster(x, weight, bias) and ops._linear_is_faster(x, weight, None)
        unfit = [
            (x[:248], weight, bias),  # too few to be worth it
            (x[:260], weight, bias),
            (x[:, :48], weight[:, :48].contiguous(), bias),
            (x, weight[:48], bias[:48]),
            (x.float(), weight, bias),
            (x, weight.to(dtype), bias),
            (x, weight, bias.to(dtype)),
        ]
        assert not any(ops._linear_is_faster(*arguments) for arguments in unfit)
    assert not ops._linear_is_faster(x, weight, bias)
    with torch.autocast("cpu", torch.float16):
        assert not ops._linear_is_faster(x, weight, bias)


def build(arch: str, **settings) -> GPT:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 19, "block_size": 40}
    dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPTConfig(arch=arch, model_type=None, **(sizes | dropout | settings))
    model = GPT(config)
    for parameter in model.parameters():  # a head that starts at zero would hide the rest
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def loss_and_gradient(
    model: GPT, idx: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        logits, loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return logits.detach(), loss.detach(), gradient


@both
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_a_model_is_the_same_with_and_without_kernels(dtype, arch, monkeypatch):
    model, idx = build(arch), torch.randint(0, 19, (8, 34))
    monkeypatch.setattr(ops, "_products_are_slow", lambda dtype: True)
    calls = []
    for name in ("attention", "linear", "cross_entropy"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, k=kernel, n=name: calls.append(n) or k(*a))
    ours = loss_and_gradient(model, idx, dtype)
    linear = int(dtype is torch.bfloat16)
    layer = [*["linear"] * linear, "attention", *["linear"] * 3 * linear]
    assert calls == [*layer, *layer, "cross_entropy"]
    monkeypatch.setattr(kernels, "library", lambda _: None)
    plain = loss_and_gradient(model, idx, dtype)
    assert len(calls) == 2 * len(layer) + 1
    for a, b in zip(ours, plain, strict=True):
        assert relative_error(a, b) < 4 * ERROR[dtype]


@both
@pytest.mark.parametrize("arch, shift", [("gpt2", False), ("modern", False), ("modern", True)])
def test_results_are_equal_bit_for_bit_whatever_the_threads(dtype, arch, shift, monkeypatch):
    model, idx = build(arch, token_shift=shift), torch.randint(0, 19, (8, 34))
    monkeypatch.setattr(ops, "_products_are_slow", lambda dtype: True)
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        results.append(loss_and_gradient(model, idx, dtype))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@both
def test_what_the_attention_kernel_cannot_do_is_left_to_torch(dtype, monkeypatch):
    monkeypatch.setattr(
        kernels, "attention", lambda *_: pytest.fail("drops nothing, learns nothing")
    )
    idx = torch.randint(0, 19, (1, 34))
    loss_and_gradient(build("modern", attn_pdrop=0.5), idx, dtype)

    cos, sin = rotary(0, 34, 32, idx.device)
    qkv = torch.randn(1, 34, 192, dtype=dtype)
    for other in (cos.double(), cos.t().contiguous().t(), cos.clone().requires_grad_()):
        y = model_module.causal_attention(qkv, 2, (other, sin), None, 0.0)
        assert y.requires_grad == other.requires_grad


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "/bin/false"])
def test_without_a_working_compiler_a_run_says_so_and_trains(tmp_path, compiler):
    environment = {"CC": compiler, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = start(*TINY, f"run_dir={tmp_path / 'run'}", env=environment)
    assert run.returncode == 0, run.stderr
    assert "plain PyTorch" in run.stdout
    assert not [name for _, _, names in os.walk(tmp_path / "cache") for name in names]


@pytest.mark.parametrize("dtype", [on(torch.float32)])
@pytest.mark.parametrize(
    "name", ["squared_relu", "rms_norm", "layer_norm", "token_shift", "attention"]
)
def test_a_gradient_may_lie_in_memory_in_any_order(dtype, name):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 192 if name == "attention" else 64, dtype=dtype, requires_grad=True)
    arguments = {"layer_norm": (torch.ones(64), None), "attention": (2, None)}
    arguments["token_shift"] = (torch.ones(64),)
    y = getattr(kernels, name)(x, *arguments.get(name, ()))
    g = torch.randn(y.size(2), 8, 2).permute(2, 1, 0)
    assert not g.is_contiguous()
    (ours,) = torch.autograd.grad(y, x, g, retain_graph=True)
    assert torch.equal(ours, torch.autograd.grad(y, x, g.contiguous())[0])


# --- an edited model.py ---

EDITS = {
    "a window of 4": (
        ".triu(1 + T - S)",
        ".triu(1 + T - S) - (1 / torch.zeros(S, T)).tril(T - S - 4)",
    ),
    "another scale": ("D**-0.5", "D**-0.1"),
    "no queries normalized": ("v = qkv[2]", "q, k = ops.rotate(qkv[:2], *rotation); v = qkv[2]"),
    "another epsilon": ("ops.rotate(qkv[:2], *rotation))", "ops.rotate(qkv[:2], *rotation), 1.0)"),
    "another epsilon of a norm": ("return ops.rms_norm(x)", "return ops.rms_norm(x, 1.0)"),
    "another rotation": ("ROPE_BASE ** -(half / width)", "ROPE_BASE ** -(half / width / 2)"),
    "another activation": ("self.activation(self.c_fc(x))", "torch.sin(self.c_fc(x))"),
    "another norm": ("return ops.rms_norm(x)", "return x.tanh()"),
}
SOURCE = (ROOT / "model.py").read_text()


def edited(old: str, new: str, folder: Path, monkeypatch) -> types.ModuleType:
    """model.py with `new` instead of `old`, imported from a file in `folder`."""
    assert SOURCE.count(old) == 1
    (folder / "edited.py").write_text(SOURCE.replace(old, new))
    spec = importlib.util.spec_from_file_location("edited", folder / "edited.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "edited", module)
    spec.loader.exec_module(module)
    return module


def logits_and_text(module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of a training step, without and with a cache, and a text."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 19, "block_size": 40}
    model = module.GPT(
        module.GPTConfig("modern", embd_pdrop=0, resid_pdrop=0, attn_pdrop=0, **sizes)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    idx = torch.randint(0, 19, (2, 40))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        trained = model(idx, idx)[0].detach()
        cache = [LayerCache(model.config, 2, idx.device, dtype) for _ in model.blocks]
        with torch.no_grad():
            pieces = [model(piece, cache=cache)[0] for piece in idx.split([9] + [1] * 31, dim=1)]
    text = model.generate(idx[:, :1], 60, do_sample=True, seed=3)  # also past the block
    return [trained, torch.cat(pieces, dim=1), text]


@both
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_computes_what_was_written(dtype, edit, tmp_path, monkeypatch, caplog):
    ops._log_edit.cache_clear()
    module = edited(*EDITS[edit], tmp_path, monkeypatch)
    runs = {"kernels": logits_and_text(module, dtype)}
    differs = edit in ("a window of 4", "another scale", "no queries normalized", "another epsilon")
    assert ("edited.causal_attention was edited" in caplog.text) == differs
    monkeypatch.setattr(kernels, "library", lambda _: None)
    monkeypatch.setattr(ops, "MAX_PLAIN_ATTENTION", 0)
    runs["torch's fused attention"] = logits_and_text(module, dtype)
    monkeypatch.setattr(ops, "MAX_PLAIN_ATTENTION", 40)
    right = logits_and_text(module, dtype)
    unedited = logits_and_text(model_module, dtype)
    for ours in runs.values():
        for a, b, c in zip(ours[:2], right, unedited, strict=False):
            assert relative_error(a, b) < 4 * ERROR[dtype] < 0.3 * relative_error(c, b)
        assert torch.equal(ours[2], right[2]) and not torch.equal(ours[2], unedited[2])


def test_the_attention_of_model_py_is_the_one_that_the_kernels_compute():
    assert ops.code_digest(model_module.causal_attention.__wrapped__) == ops.STANDARD_ATTENTION
