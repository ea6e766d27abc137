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
from conftest import ROOT, TINY, small_gpt, start, succeed

import model as model_module
from engine.generation import LayerCache
from engine.kernels import build as building
from engine.kernels import native as kernels
from engine.kernels import ops
from engine.kernels.native import NORM_EPS
from model import GPT, LayerNorm, rotary

HAS_CC = shutil.which("cc") is not None
CPU = torch.backends.cpu.get_cpu_capability()
ERROR = {torch.bfloat16: 0.01, torch.float32: 1e-5}  # relative to the whole, from rounding


def on(dtype: torch.dtype, *values):
    """A test's parameter; the test is skipped where there can be no kernels for `dtype`."""
    missing = not HAS_CC or building.instructions(dtype) is None
    reason = f"needs a C compiler (cc) and a CPU with kernels for {dtype}"
    return pytest.param(dtype, *values, marks=pytest.mark.skipif(missing, reason=reason), id=str(dtype)[6:])


both = pytest.mark.parametrize("dtype", [on(torch.float32), on(torch.bfloat16)])
only_float32 = pytest.mark.parametrize("dtype", [on(torch.float32)])
only_bfloat16 = pytest.mark.parametrize("dtype", [on(torch.bfloat16)])


def run_these_tests(*arguments: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", *arguments, __file__]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **environment}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and passed and int(passed[1]) > 30, run.stdout + run.stderr


@pytest.mark.skipif(not HAS_CC or CPU != "AVX512", reason="needs a C compiler and a CPU with AVX-512, which has AVX2")
@pytest.mark.slow
def test_these_tests_pass_with_avx2_kernels():
    run_these_tests("-k", "float32", ATEN_CPU_CAPABILITY="avx2")


@pytest.mark.skipif(
    not HAS_CC or CPU not in ("AVX2", "AVX512") or building.instructions(torch.bfloat16) is not None,
    reason="needs a C compiler and a CPU with AVX2 that has no bfloat16 kernels of its own",
)
def test_these_tests_pass_with_emulated_avx512_kernels(tmp_path):
    run_these_tests("-p", "emulated", "-k", "bfloat16", "-m", "not slow", XDG_CACHE_HOME=str(tmp_path))


@only_float32
def test_kernels_are_built_once_unless_damaged_or_outdated_and_CC_may_have_arguments(dtype, tmp_path):
    changed = tmp_path / "kernels.c"
    changed.write_text(building.SOURCE.read_text() + "// changed\n")
    script = tmp_path / "describe.py"
    script.write_text(
        "import pathlib, sys, torch; from engine.kernels import build\n"
        f"build.SOURCE = pathlib.Path(sys.argv[1]); print(build.describe({dtype}))"
    )
    environment = {"CC": "cc -m64", "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def built(source: Path) -> tuple[Path, int]:
        """The library, and when it was written."""
        run = start(str(source), script=str(script), env=environment)
        library = Path(run.stdout.rstrip().rpartition(" in ")[2])
        assert library.stat().st_size > 8192, run.stderr
        return library, library.stat().st_mtime_ns

    library, written = built(building.SOURCE)
    assert built(building.SOURCE) == (library, written)
    library.write_bytes(library.read_bytes()[:-9000])  # would crash the process
    again, later = built(building.SOURCE)
    assert again == library and later > written and built(changed)[0] != library


@both
def test_a_second_derivative_is_refused_and_the_default_dtype_does_not_matter(dtype):
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


def results(function, x: torch.Tensor, *weights, g: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of x and the weights."""
    leaves = [z.detach().requires_grad_() for z in (x, *weights)]
    y = function(*leaves)
    y.backward(g.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def scattered(*shape: int) -> torch.Tensor:
    """Random numbers that lie in memory in another order."""
    return torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))


@both
@pytest.mark.parametrize("turned, size", [(True, 1), (True, 8), (False, 1), (False, 4)])
@pytest.mark.parametrize("B, T, H, D", [(2, 128, 4, 32), (2, 50, 2, 32), (1, 7, 2, 64), (1, 1, 1, 32), (2, 33, 3, 48)])
def test_attention_and_its_gradient_match_float64(dtype, B, T, H, D, turned, size):
    torch.manual_seed(0)
    x, g = size * torch.randn(B, T, 3 * H * D).to(dtype), scattered(B, T, H * D).to(dtype)
    rotation = rotary(T, D, x.device) if turned else None
    found = results(lambda z: kernels.attention(z, H, rotation), x, g=g)
    exact = results(lambda z: plain_attention(z, H, rotation), x.double(), g=g)
    for ours, right in zip(found, exact, strict=True):
        # Gradients of queries, keys and values differ in size: each is compared for itself.
        for part in range(1 if ours.size(-1) == H * D else 3):
            cut = slice(part * H * D, (part + 1) * H * D)
            if right[..., cut].norm() > 1e-6:
                assert relative_error(ours[..., cut], right[..., cut]) < ERROR[dtype]
            else:  # one character has nothing to choose from
                assert ours[..., cut].float().norm() < 1e-2


@both
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 1e8])
def test_attention_weights_in_backward_sum_to_one_for_large_scores(dtype, size):
    torch.manual_seed(0)
    x, g = torch.randn(2, 40, 3 * 64).to(dtype), torch.randn(2, 40, 64).to(dtype)
    x[..., :128] *= size
    _, gradient = results(lambda z: kernels.attention(z, 2, None), x, g=g)
    ours, right = gradient[..., 128:].double().sum(dim=1), g.double().sum(dim=1)
    assert relative_error(ours, right) < ERROR[dtype]


@both
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(
    "B, past, H, D", [(2, 49, 2, 32), (1, 0, 2, 64), (3, 15, 1, 48), (2, 16, 2, 32), (64, 70, 4, 32)]
)
def test_attention_with_a_cache_equals_the_last_row_of_full_attention(dtype, B, past, H, D, turned):
    """It changes its own place in the cache, and no other."""
    torch.manual_seed(0)
    x = torch.randn(B, past + 1, 3 * H * D).to(dtype)
    _, k, v = x.view(B, past + 1, 3, H, D).permute(2, 0, 3, 1, 4)
    k = k.double()
    rotation = rotary(past + 1, D, x.device) if turned else None
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


ROTATION = rotary(40, 32, torch.device("cpu"))
# Kernel, plain PyTorch, and how many weights they take besides x.
OPERATIONS = {
    "rms_norm": (kernels.rms_norm, lambda x: F.rms_norm(x, x.shape[-1:], eps=NORM_EPS), 0),
    "squared_relu": (kernels.squared_relu, lambda x: F.relu(x).square(), 0),
    "gelu": (kernels.gelu, F.gelu, 0),
    "layer_norm": (lambda x, w: kernels.layer_norm(x, w, None), lambda x, w: F.layer_norm(x, x.shape[-1:], w), 1),
    "layer_norm with bias": (kernels.layer_norm, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 2),
    "token_shift": (kernels.token_shift, lambda x, weight: x + weight * F.pad(x, (0, 0, 1, -1)), 1),
    "attention": (lambda x: kernels.attention(x, 2, None), lambda x: plain_attention(x, 2, None), 0),
    "rotary attention": (lambda x: kernels.attention(x, 2, ROTATION), lambda x: plain_attention(x, 2, ROTATION), 0),
}


@both
@pytest.mark.parametrize("name", [name for name in OPERATIONS if "attention" not in name])
def test_operations_and_all_their_gradients_match_float64(dtype, name):
    torch.manual_seed(0)
    kernel, plain, weights = OPERATIONS[name]
    x, g = (3 * torch.randn(7, 40, 48) + 2).to(dtype), scattered(7, 40, 48).to(dtype)
    own = [torch.randn(48) for _ in range(weights)]
    ours = results(kernel, x, *own, g=g)
    right = results(plain, x.double(), *(z.double() for z in own), g=g)
    for a, b in zip(ours, right, strict=True):
        assert relative_error(a, b) < ERROR[dtype]
    with torch.no_grad():
        assert torch.equal(kernel(x, *own), ours[0])


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nan_and_inf_propagate(dtype, name, value):
    kernel, plain, weights = OPERATIONS[name]
    x, own = torch.ones(2, 40, 192, dtype=dtype), [torch.ones(192)] * weights
    x[1, 7, 70] = value
    y = kernel(x, *own)
    assert torch.equal(y.isfinite(), plain(x.float(), *own).to(dtype).isfinite())
    assert y[0].isfinite().all()


@pytest.mark.parametrize("dtype, relative, absolute", [on(torch.float32, 1e-6, 5e-7), on(torch.bfloat16, 2**-8, 1e-30)])
def test_gelu_is_exact_far_from_zero(dtype, relative, absolute):
    x = torch.tensor([-300.0, -13.0, -5.0, -3.0, -0.01, 0.0, 0.01, 3.0, 5.0, 300.0]).to(dtype)
    x = F.pad(x, (0, 6))
    assert torch.allclose(kernels.gelu(x).double(), F.gelu(x.double()), relative, absolute)


@both
def test_dropout_has_its_rate_repeats_by_seed_and_its_gradient_has_the_same_mask(dtype):
    x, g = (scattered(64, 640).abs() + 1).to(dtype), scattered(64, 640).to(dtype)
    drawn = []
    for seed, threads in ((0, 1), (0, 2), (1, 2)):
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        drawn.append(results(lambda z: kernels.dropout(z, 0.2), x, g=g))
    (y, gradient), again, other = drawn
    kept = y != 0
    assert torch.equal(y, again[0]) and torch.equal(gradient, again[1])
    assert abs(kept.float().mean() - 0.8) < 0.01
    pairs = [kept[:, lag:] & kept[:, :-lag] for lag in (1, 8, 16)]  # independent of neighbors,
    for pair in (*pairs, kept[1:] & kept[:-1], kept & (other[0] != 0)):  # of other rows, and of other seeds
        assert abs(pair.float().mean() - 0.64) < 0.01
    assert relative_error(y, torch.where(kept, x.double() / 0.8, 0)) < ERROR[dtype]
    assert relative_error(gradient, torch.where(kept, g.double() / 0.8, 0)) < ERROR[dtype]


@both
@pytest.mark.parametrize("softcap", [0, 15])
@pytest.mark.parametrize("width", [1, 7, 16, 65, 150])
def test_cross_entropy_and_its_gradient_match_float64(dtype, softcap, width):
    torch.manual_seed(0)
    x = (10 * torch.randn(3, 40, width)).to(dtype)
    targets = torch.randint(0, width, (3, 40))
    targets[1, 5:30] = -1

    def plain(z):
        z = softcap * torch.tanh(z / softcap) if softcap else z
        return z, F.cross_entropy(z.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def run(function, z, total):
        z = z.detach().clone().requires_grad_()
        y, loss = function(z)
        total(y, loss).backward()
        return y.detach(), loss.detach(), z.grad

    for total in (lambda _, loss: 3 * loss, lambda y, loss: 3 * loss + 0.01 * y.sum(), lambda y, _: y.sum()):
        ours = run(lambda z: kernels.cross_entropy(z, targets, softcap), x, total)
        right = run(plain, x.double(), total)
        assert ours[0].dtype is torch.float32 and ours[2].dtype is dtype
        for a, b, error in zip(ours, right, (1e-6, 1e-6, ERROR[dtype]), strict=True):
            assert (a - b).norm() <= error * b.norm()
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
        with pytest.raises((ValueError, RuntimeError), match=r"(?i)target|meta|scalar type"):  # torch's own
            ops.cross_entropy(x, unfit)


@only_float32
@pytest.mark.parametrize("rows, columns, width", [(1, 4, 16), (9, 384, 128), (262, 68, 160)])
def test_a_linear_layer_matches_float64_and_its_rows_are_independent(dtype, rows, columns, width):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 1, width), torch.randn(columns, width), torch.randn(columns)
    for b in (bias, None):
        y = kernels.linear(x, weight, b)
        right = F.linear(x.double(), weight.double(), b if b is None else b.double())
        assert y.shape == right.shape and relative_error(y, right) < 1e-6
        torch.set_num_threads(2)  # no gradient: test_results_are_equal has none of these
        for row in range(rows):
            assert torch.equal(kernels.linear(x[row], weight, b), y[row])
        assert torch.equal(kernels.linear(x, weight, b), y)
        torch.set_num_threads(1)


@only_bfloat16
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows, columns, width", [(8, 32, 32), (72, 96, 160), (776, 128, 64)])
def test_a_linear_layer_in_bfloat16_and_its_gradients_match_float64(dtype, rows, columns, width, has_bias):
    torch.manual_seed(0)
    x = torch.randn(4, rows // 4, width).to(dtype).transpose(0, 1)  # neither is dense
    g = torch.randn(4, rows // 4, columns).to(dtype).transpose(0, 1)
    weights = [torch.randn(columns, width), torch.randn(columns)][: 1 + has_bias]

    def linear(x, weight, bias=None):
        return kernels.linear(x, weight, bias)

    ours = results(linear, x, *weights, g=g)
    right = results(F.linear, x.double(), *(z.double() for z in weights), g=g)
    # Nothing is rounded on the way to the gradients of weight and bias.
    for a, b, error in zip(ours, right, [ERROR[dtype]] * 2 + [1e-6] * 2, strict=False):
        assert relative_error(a, b) < error
    assert [z.dtype for z in ours[2:]] == [torch.float32] * (1 + has_bias)
    assert torch.equal(linear(x[-2:], *weights), ours[0][-2:])


def build(arch: str, **settings) -> GPT:
    sizes = {"n_embd": 64, "vocab_size": 19, "block_size": 40}
    return small_gpt(arch, std=0.1, **sizes, **settings)


@both
def test_a_model_uses_the_kernels(dtype, monkeypatch):
    monkeypatch.setattr(ops, "_products_are_slow", lambda dtype: True)
    called = set()
    names = {"attention", "linear", "cross_entropy", "dropout"}
    for name in names:
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, k=kernel, n=name: called.add(n) or k(*a))
    idx = torch.randint(0, 19, (8, 33))
    with torch.no_grad(), torch.autocast("cpu", enabled=dtype is torch.bfloat16):
        build("gpt2", resid_pdrop=0.1)(idx, idx)
    assert called == names
    logits = torch.randn(8, 33, 19).to(dtype)
    for softcap, has_kernel in ((15, True), (15.0, True), (2.5, False), (float("nan"), False)):
        called.clear()
        ops.cross_entropy(logits, idx, softcap)
        assert bool(called) == has_kernel


@both
def test_unsupported_tensors_fall_back_to_torch(dtype, monkeypatch):
    monkeypatch.setattr(ops, "_products_are_slow", lambda dtype: True)
    torch.manual_seed(0)
    found = []  # pairs of what is computed and what is right

    x, weight, bias = torch.randn(272, 64).to(dtype), torch.randn(64, 64), torch.randn(64)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert kernels.supports(x) and not kernels.supports(fake) and not kernels.supports(x.to("meta"))
    for given in (
        (x[:260].clone(), weight, bias),
        (x[:, :40], weight[:, :40].contiguous(), bias),
        (x, weight[:43], bias[:43]),
        (x, weight.t(), bias),
        (x, weight, torch.ones(1).expand(64)),
        (x, weight.to(dtype), bias.to(dtype)),
        (x.float(), weight, bias),
        (x.double(), weight.double(), bias.double()),
    ):
        g = torch.randn(len(given[0]), len(given[1]))
        right = results(F.linear, *(z.double() for z in given), g=g)
        for amp in (torch.bfloat16, torch.float16) if dtype is torch.bfloat16 else (None,):
            with torch.autocast("cpu", amp, enabled=amp is not None):
                found += zip(results(ops.linear, *given, g=g), right, strict=True)
                with torch.no_grad():
                    found.append((ops.linear(*given), right[0]))

    x = torch.randn(2, 64).to(dtype)
    found.append((ops.rms_norm(x, 0.1), F.rms_norm(x.double(), (64,), eps=0.1)))
    for norm in (LayerNorm(64, eps=0.1).to(dtype), LayerNorm(64).to(dtype)):
        found.append((norm(x), F.layer_norm(x.double(), (64,), eps=norm.eps)))
    if dtype is torch.float32:
        strided, spread = torch.randn(128)[::2], torch.ones(1).expand(64)
        for weight, bias in ((strided, None), (spread, strided)):
            right = F.layer_norm(x.double(), (64,), weight.double(), None if bias is None else bias.double())
            found.append((ops.layer_norm(x, weight, bias, 1e-5), right))
    x, weight = torch.randn(2, 3, 5, 64).to(dtype), torch.randn(64)
    found.append((ops.token_shift(x, weight)[:, 1:], (x[:, 1:] + x[:, :-1] * weight.to(dtype)).double()))

    attention = ops.causal_attention
    for n_head, width in ((1, 33), (2, 40), (4, 16)):
        qkv = torch.randn(1, 40, 3 * n_head * width).to(dtype)
        found.append((attention(qkv, n_head, None, None, 0.0), plain_attention(qkv.double(), n_head, None)))
    qkv, (cos, sin) = torch.randn(1, 40, 192).to(dtype), ROTATION
    right = plain_attention(qkv.double(), 2, ROTATION)
    for other in (cos.double(), cos.t().contiguous().t(), cos.clone().requires_grad_()):
        y = attention(qkv, 2, (other, sin), None, 0.0)
        assert y.requires_grad == other.requires_grad
        if other.requires_grad:
            assert torch.autograd.grad(y.sum(), other, retain_graph=True)[0].any()
        found.append((y, right))
    dropped = [attention(qkv, 2, None, None, 0.5) for _ in range(2)]
    assert not torch.equal(*dropped)

    for number, (ours, right) in enumerate(found):
        assert relative_error(ours, right) < ERROR[dtype], number


@both
@pytest.mark.parametrize("arch, shift", [("gpt2", False), ("modern", False), ("modern", True)])
def test_results_are_bitwise_equal_for_any_number_of_threads(dtype, arch, shift, monkeypatch):
    model, idx = build(arch, token_shift=shift), torch.randint(0, 19, (8, 34))
    monkeypatch.setattr(ops, "_products_are_slow", lambda dtype: True)
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits, loss = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
        results.append([logits, loss, *(p.grad for p in model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "/bin/false"])
def test_without_a_working_compiler_a_run_says_so_and_trains(tmp_path, compiler):
    environment = {"CC": compiler, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = succeed(*TINY, f"run_dir={tmp_path / 'run'}", env=environment)
    assert "plain PyTorch" in run.stdout
    assert not [name for _, _, names in os.walk(tmp_path / "cache") for name in names]


# --- an edited model.py ---

SOURCE = (ROOT / "model.py").read_text()
[WINDOWED_ATTENTION] = re.findall("```python\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
EDITS = {
    "the attention of docs/architecture.md": ("ops.causal_attention(", "windowed_attention("),
    "another epsilon of a norm": ("return ops.rms_norm(x)", "return ops.rms_norm(x, 1.0)"),
    "another rotation": ("ROPE_BASE ** -(half / width)", "ROPE_BASE ** -(half / width / 2)"),
    "another activation": ("self.activation(self.c_fc(x))", "torch.sin(self.c_fc(x))"),
    "another norm": ("return ops.rms_norm(x)", "return x.tanh()"),
    "another cap": ("else SOFTCAP", "else 2.5"),
}


def edited(old: str, new: str, folder: Path, monkeypatch) -> types.ModuleType:
    """model.py with `new` instead of the first `old`, imported from a file in `folder`."""
    if old not in SOURCE:  # by whoever changes that line
        pytest.skip(f"model.py has no {old!r}")
    (folder / "edited.py").write_text(SOURCE.replace(old, new, 1) + WINDOWED_ATTENTION)
    spec = importlib.util.spec_from_file_location("edited", folder / "edited.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "edited", module)
    spec.loader.exec_module(module)
    return module


def logits_and_text(module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of a training step, without and with a cache, and a text."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 19, "block_size": 40}
    model = module.GPT(module.GPTConfig("modern", embd_pdrop=0, resid_pdrop=0, attn_pdrop=0, **sizes))
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
def test_an_edited_model_runs_as_written(dtype, edit, tmp_path, monkeypatch):
    module = edited(*EDITS[edit], tmp_path, monkeypatch)
    runs = {"kernels": logits_and_text(module, dtype)}
    monkeypatch.setattr(kernels, "library", lambda _: None)
    monkeypatch.setattr(ops, "MAX_PLAIN_ATTENTION", 0)
    runs["torch's fused attention"] = logits_and_text(module, dtype)
    monkeypatch.setattr(ops, "MAX_PLAIN_ATTENTION", 40)
    right = logits_and_text(module, dtype)
    unedited = logits_and_text(model_module, dtype)
    for ours in runs.values():
        for a, b, c in zip(ours[:2], right, unedited, strict=False):
            assert relative_error(a, b) < 4 * ERROR[dtype] < 0.3 * relative_error(c, b)
        assert relative_error(ours[1], ours[0]) < 4 * ERROR[dtype]  # with a cache and without
        assert torch.equal(ours[2], right[2]) and not torch.equal(ours[2], unedited[2])
