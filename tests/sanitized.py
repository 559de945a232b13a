"""One small run of one kernel, for compute-sanitizer to watch: `python tests/sanitized.py NAME`.

Without a name it lists the names. Each run has several ragged tiles, writes only what it owns and
checks its results, so that a kernel which the tool stopped or never saw is not taken for a clean
one. Most are operations of the laws' table. torch's own kernels run too;
`tests/test_sanitizer_gpu.py` has the tool leave those out.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import llama_models
from fusedlib import tuning
from interpreter import INTERPRETED
from study.product_kernel import accumulate_fwd

RUNS: dict[str, Callable[[], None]] = {}
BF16 = torch.bfloat16
MLPS = "swiglu_mlp", "swiglu_mlp by tiles", "swiglu_mlp of a pair"
LOSSES = "mean loss", "mean loss, plain", "loss by token", "loss by token, plain"
# Several chunks or slices, and ragged rows of several blocks.
CHUNKS = {"t": 20, "h": 8, "v": 16500}, {"loss_logits_bytes": 400_000}
SPLIT = {"split_least_size": 1, "split_least_results": 1, "split_least_work": 1}
FUSED = {"mlp_unfused_tokens": 64}
# Operations of the laws, sizes, and the numbers by which kernels are chosen and cut.
LAWS: dict[str, tuple[tuple[str, ...], dict[str, int], dict[str, object]]] = {
    "swiglu-tiles": (MLPS, {"t": 130, "h": 64, "i": 96}, FUSED | {"mlp_warp_specialized": False}),
    "swiglu-pointers": (MLPS, {"t": 70, "h": 49, "i": 83}, FUSED),
    "swiglu-apart": (MLPS, {"t": 70, "h": 48, "i": 83}, {"mlp_unfused_tokens": 1 << 40}),
    "swiglu-small-tiles": (MLPS, {"t": 130, "h": 144, "i": 80}, {}),
    "swiglu-few-tokens": (MLPS, {"t": 37, "h": 144, "i": 80}, {}),
    "swiglu-pointwise": (("swiglu",), {"t": 70, "h": 64, "i": 80}, {}),
    "split": (("linear",), {"t": 140, "h": 300, "o": 134}, SPLIT),
    "split-pair": (("swiglu_mlp split",), {"t": 140, "h": 300, "i": 134}, SPLIT),
    "linear-cross-entropy": (LOSSES, *CHUNKS),
    "linear-log-probs": (("log_probs", "log_probs, plain"), *CHUNKS),
    "rms-norm": (("rms_norm of a sum", "rms_norm of x alone"), {"t": 601, "h": 80}, {}),
    "wide-rms-norm": (("rms_norm of a sum", "rms_norm of x alone"), {"t": 300, "h": 8200}, {}),
    "rope": (("rope", "rope at positions"), {"t": 70, "l": 100}, {}),
}


def by_law(names: tuple[str, ...], sizes: dict[str, int], numbers: dict[str, object]) -> None:
    """Results and gradients; memory written over, and not where the graph is kept; inference."""
    sys.path.append(str(Path(__file__).parent / "laws"))
    import test_laws

    with tuning.override(**numbers):
        for name in names:
            operation = test_laws.CALLS[name]
            case = test_laws.Case(operation, "cpu" if INTERPRETED else "cuda", **sizes)
            assert test_laws.wrong(case) == [], name
            test_laws.checks.check_repeated(*case)
            with torch.no_grad():
                case.results()


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


@run("accumulate")
def accumulate() -> None:
    a, b = normal(128, 192), normal(192, 128)
    for promote in (False, True):
        near(accumulate_fwd(a, b, promote=promote), a.double() @ b.double())


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


NAMES = *LAWS, *RUNS


def main(names: list[str]) -> None:
    if not names:
        print(*NAMES)
    for name in names:
        torch.manual_seed(0)
        RUNS[name]() if name in RUNS else by_law(*LAWS[name])
        torch.cuda.synchronize()
        print(f"{name}: ran")


if __name__ == "__main__":
    main(sys.argv[1:])
