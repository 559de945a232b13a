"""Calls of `swiglu_mlp` with one fault each, for paths whose kernels no test rewrites.

Those in Gluon and of split precision, cuBLAS's products with a pointwise kernel, and plain PyTorch:
each is given operands, or has its result changed, as that fault would.
"""

import torch

import swiglu_checks as checks
from fusedlib.ops.mlp.function import swiglu_mlp

BLOCK_K = 64


def only(x, columns):
    """x with zeros in all other columns: what is left when those terms are not summed."""
    kept = torch.zeros(x.shape[1], device=x.device, dtype=x.dtype)
    kept[columns] = 1
    return x * kept


def one_off(y):
    off = torch.zeros_like(y)
    off[-1, -1] = 2.0 if y.dtype == torch.bfloat16 else 1e-3
    return y + off


FAULTS = {
    "dropped K tile": lambda x, w, d: swiglu_mlp(only(x, slice(BLOCK_K, None)), w, d),
    "one K block": lambda x, w, d: swiglu_mlp(only(x, slice(0, BLOCK_K)), w, d),
    "gate and up swapped": lambda x, w, d: swiglu_mlp(x, w.roll(len(w) // 2, 0), d),
    "wrong last element": lambda x, w, d: one_off(swiglu_mlp(x, w, d)),
    "no gradient of w_gate_up": lambda x, w, d: swiglu_mlp(x, w.detach(), d),
    "no gradient of w_down": lambda x, w, d: swiglu_mlp(x, w, d.detach()),
}
PAIRS = {
    "a pair swapped": lambda x, w, d: swiglu_mlp(x, w[::-1], d),
    "gate's weight taken for up's": lambda x, w, d: swiglu_mlp(x, (w[0], w[0] + 0 * w[1]), d),
    "no gradient of w_gate": lambda x, w, d: swiglu_mlp(x, (w[0].detach(), w[1]), d),
    "no gradient of w_up": lambda x, w, d: swiglu_mlp(x, (w[0], w[1].detach()), d),
}
FAULTS |= PAIRS


def check_rejected(device: str, dtype: str, shape: tuple[int, int, int], fault: str) -> None:
    """The assertion that the right call passes refuses the broken one."""

    def broken(x, w_gate_up, w_down, *, save):
        return FAULTS[fault](x, w_gate_up, w_down)

    pair = fault in PAIRS
    assert checks.misses_mlp(device, dtype, shape, pair=pair) == []
    missed = checks.misses_mlp(device, dtype, shape, compute=broken, pair=pair)
    assert missed
    if fault.startswith("no gradient"):
        assert all(line.startswith("no gradient arrived at w_") for line in missed)
