"""One small run of one kernel, for compute-sanitizer to watch: `python tests/sanitized.py NAME`.

Without a name it lists the names. Each run has several ragged tiles, writes only what it owns and
checks its results, so that a kernel which the tool stopped or never saw is not taken for a clean
one. torch's own kernels run too; `tests/test_sanitizer_gpu.py` has the tool leave those out.
"""

import sys
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.attention import SDPBackend, sdpa_kernel

import llama_models
from fusedlib import rms_norm, rope, tuning
from fusedlib.ops.loss.function import linear_cross_entropy, linear_log_probs, plan, slices
from fusedlib.ops.matmul.function import multiply
from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.function import swiglu
from study.product_kernel import accumulate_fwd
from swiglu_checks import mlp as mlp_of

RUNS: dict[str, Callable[[], None]] = {}
BF16 = torch.bfloat16


def run(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        RUNS[name] = function
        return function

    return register


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def near(found: Tensor, true: Tensor, allowed: float = 2e-2) -> None:
    """In norm, far looser than the tests of results: this is about having run at all."""
    error = (found.double() - true.double()).norm() / true.double().norm()
    assert error < allowed, f"error {error:.2e}, allowed {allowed:.0e}"


def both(gate_up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """h and d(gate|up) in float64."""
    gate, up = gate_up.double().chunk(2, dim=1)
    s, dh = torch.sigmoid(gate), dh.double()
    d_gate = dh * up * s * (1 + gate * (1 - s))
    return gate * s * up, torch.cat([d_gate, dh * gate * s], dim=1)


def mlp(tokens: int, hidden: int, inner: int) -> None:
    """Forward and backward of a packed weight and of a pair: gate|up overwritten, kept, and
    computed again; then half frozen.
    """
    x, w_gate_up = normal(tokens, hidden), normal(2 * inner, hidden, scale=hidden**-0.5)
    w_down, dy = normal(hidden, inner, scale=inner**-0.5), normal(tokens, hidden)
    gate_up = x.double() @ w_gate_up.double().T
    h, d_gate_up = both(gate_up, dy.double() @ w_down.double())
    for weights in ([w_gate_up], [t.clone() for t in w_gate_up.chunk(2)]):
        leaves = [t.detach().requires_grad_() for t in (x, *weights, w_down)]
        y = mlp_of(*leaves)
        kept = grad(y, leaves, dy, retain_graph=True)
        near(y, h @ w_down.double().T)
        near(kept[0], d_gate_up @ w_gate_up.double())
        near(torch.cat(kept[1:-1]), d_gate_up.T @ x.double())
        near(kept[-1], dy.double().T @ h)
        for found in (grad(y, leaves, dy), grad(mlp_of(*leaves, save="input"), leaves, dy)):
            for one, other in zip(found, kept, strict=True):
                near(one, other)
        with torch.no_grad():
            near(mlp_of(*leaves), y)


@run("swiglu-tiles")
@patch.object(route, "max_unfused_tokens", return_value=route.FEW_TOKENS)
@patch.object(route, "_runs_warp_specialized", return_value=False)
def swiglu_tiles(*_: object) -> None:
    """The fused kernels of other cards."""
    mlp(130, 64, 96)


@run("swiglu-pointers")
@patch.object(route, "max_unfused_tokens", return_value=route.FEW_TOKENS)
def swiglu_pointers(_: object) -> None:
    mlp(70, 49, 83)


@run("swiglu-apart")
@patch.object(route, "max_unfused_tokens", return_value=1 << 40)
def swiglu_apart(_: object) -> None:
    mlp(70, 48, 83)


@run("swiglu-small-tiles")
def swiglu_small_tiles() -> None:
    mlp(130, 144, 80)


@run("swiglu-few-tokens")
def swiglu_few_tokens() -> None:
    mlp(37, 144, 80)


@run("swiglu-pointwise")
def swiglu_pointwise() -> None:
    x, weight = normal(70, 64).requires_grad_(), normal(160, 64, scale=0.125).requires_grad_()
    dh = normal(70, 80)
    _, d_weight = grad(swiglu(x, weight), (x, weight), dh)
    _, d_gate_up = both(x.double() @ weight.double().T, dh)
    near(d_weight, d_gate_up.T @ x.double())


@run("hopper")
def hopper_both() -> None:
    """Every variant: gate|up stored or not, in place or not, h wanted or not."""
    from fusedlib.ops.mlp import hopper

    tokens, hidden, inner = 300, 272, 208
    x, dy = normal(tokens, hidden), normal(tokens, hidden)
    w_gate_up = normal(2 * inner, hidden, scale=hidden**-0.5)
    w_down = normal(hidden, inner, scale=inner**-0.5)
    h, again, alone = (x.new_empty(tokens, inner) for _ in range(3))
    gate_up, apart, lone = (x.new_empty(tokens, 2 * inner) for _ in range(3))
    sizes, pair = (x.device, tokens, hidden, inner), [t.clone() for t in w_gate_up.chunk(2)]
    hopper.forward_launch(*sizes, inner, True)(x, w_gate_up, w_gate_up, gate_up, h)
    hopper.forward_launch(*sizes, 0, False)(x, *pair, alone, alone)
    storing = hopper.backward_launch(*sizes, True)
    storing(dy, w_down, gate_up, apart, again)
    hopper.backward_launch(*sizes, False)(dy, w_down, gate_up, lone, lone)
    true_h, true_d = both(gate_up, dy.double() @ w_down.double())
    storing(dy, w_down, gate_up, gate_up.view_as(gate_up), again)
    for found, true in ((h, true_h), (alone, true_h), (again, true_h), (apart, true_d),
                        (lone, true_d), (gate_up, true_d)):  # fmt: skip
        near(found, true)


@run("split")
@tuning.override(split_least_size=1, split_least_results=1, split_least_work=1)
def split() -> None:
    """Lines that are rows, and that are columns; and a factor whose rows lie in two tensors."""
    a, b = (normal(*shape, dtype=torch.float32) for shape in ((140, 300), (300, 134)))
    for left, right in ((a, b), (a.T.contiguous().T, b.T.contiguous().T)):
        near(multiply(left, right), a.double() @ b.double(), 1e-6)
    above, below = (t.clone() for t in b.chunk(2))
    near(multiply(a, above, lower_half=below), a.double() @ b.double(), 1e-6)
    above, below = (t.contiguous() for t in b.T.chunk(2))
    near(multiply(a, above, (False, True), lower_half=below), a.double() @ b.double(), 1e-6)


@run("linear-cross-entropy")
def loss() -> None:
    """Several chunks, ragged rows of several blocks, every variant of the kernel."""
    hidden, weight = (normal(n, 8, scale=0.5).requires_grad_() for n in (20, 16500))
    memory = 600_000
    assert plan(20, weight, memory=memory).rows == 10
    target = torch.randint(16500, (20,), device="cuda")
    target[::7] = -100
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    by_class = torch.rand(16500, device="cuda")
    more = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "class_weights": by_class}
    for settings in ({}, more):
        for reduction in ("mean", "none"):
            chunked = {"reduction": reduction, "memory": memory, **settings}
            losses = linear_cross_entropy(hidden, weight, target, **chunked)
            true = linear_cross_entropy(*wide, target, reduction=reduction, **settings)
            near(losses, true)
            found = grad(losses.sum(), (hidden, weight))
            for one, other in zip(found, grad(true.sum(), wide), strict=True):
                near(one, other)


@run("linear-log-probs")
def log_probs() -> None:
    """Slices and rows of several blocks, with an entropy and without."""
    hidden, weight = (normal(n, 8, scale=0.5).requires_grad_() for n in (20, 16500))
    tokens = torch.randint(16500, (20,), device="cuda")
    tokens[::7] = -100
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    with tuning.override(loss_logits_bytes=400_000):
        assert slices(20, weight).rows < 16500
        for settings in ({"entropy": False}, {"temperature": 0.7, "softcap": 5.0}):
            found = [
                t for t in linear_log_probs(hidden, weight, tokens, **settings) if t is not None
            ]
            true = [t for t in linear_log_probs(*wide, tokens, **settings) if t is not None]
            gradients = grad([t.sum() for t in found], (hidden, weight))
            truth = grad([t.sum() for t in true], wide)
            for one, other in zip((*found, *gradients), (*true, *truth), strict=True):
                near(one, other)


@run("accumulate")
def accumulate() -> None:
    a, b = normal(128, 192), normal(192, 128)
    for promote in (False, True):
        near(accumulate_fwd(a, b, promote=promote), a.double() @ b.double())


@run("rms-norm")
def rms_norm_all() -> None:
    """Several rows a program, and rows wider than one holds; the last tiles are ragged."""
    for rows, width in ((601, 80), (300, 8200)):
        x, residual, dy = (normal(rows, width) for _ in range(3))
        weight = normal(width).requires_grad_()
        y, s = rms_norm(x.requires_grad_(), weight, residual=residual)
        n = s.double() * (s.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        d_x, d_weight = grad(y, (x, weight), dy)
        near(y, n * weight.double())
        near(d_weight, (dy.double() * n).sum(0))
        near((d_x * s).sum(-1) + dy.norm(dim=-1), dy.norm(dim=-1))  # d_x is orthogonal to s
        bare = rms_norm(x, None)
        near(bare, x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt())
        [d_x] = grad(bare, x, dy)
        near((d_x * x).sum(-1) + dy.norm(dim=-1), dy.norm(dim=-1))


@run("rope")
def rope_both() -> None:
    q, k = (normal(2, 70, heads, 40).transpose(1, 2) for heads in (6, 2))
    angles = torch.rand(100, 12, device="cuda").repeat(1, 2)
    at = torch.randint(100, (2, 70), device="cuda")
    q = q.requires_grad_()
    turned = rope(q, k, angles.cos(), angles.sin(), positions=at)
    near(grad(turned[0], q, turned[0])[0], q)
    near(turned[1].norm(dim=-1), k.norm(dim=-1))


@run("decoder-layer")
def decoder_layer() -> None:
    """With norms of q and k, and without; the last tiles are ragged.

    Attention by plain products: cuDNN's kernels have races and barriers of their own.
    """
    for name, head_dim in (("Llama", 40), ("Qwen3", 24)):
        plain, patched = llama_models.pair("cuda", name=name, head_dim=head_dim)
        ids, labels = llama_models.tokens("cuda")
        with sdpa_kernel(SDPBackend.MATH):
            assert llama_models.whole_layers(patched, ids, labels=labels)[0]
            assert not llama_models.misses_of(plain, patched, ids, labels)


def main(names: list[str]) -> None:
    if not names:
        print(*RUNS)
    for name in names:
        torch.manual_seed(0)
        RUNS[name]()
        torch.cuda.synchronize()
        print(f"{name}: ran")


if __name__ == "__main__":
    main(sys.argv[1:])
