"""The SwiGLU kernels with one fault each, which every check must reject: a copy of another text."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fusedlib.launch import binaries
from fusedlib.launch.launch import Launch
from fusedlib.ops.mlp import plan, plan_cache
from fusedlib.ops.mlp import tiles as swiglu
from fusedlib.ops.mlp.few_tokens import kernels as few_tokens
from fusedlib.ops.mlp.few_tokens import products as few_products
from rewritten import rewritten

H = "    h = activated * up"
LAST = (
    "((row + tl.arange(0, HEIGHT)) == tokens - 1)[:, None]"
    " & ((column + tl.arange(0, WIDTH)) == inner - 1)[None, :]"
)
OFF = f"tl.where({LAST}, OFF, 0.0)"
# What stands in `swiglu`, and what shall; OFF is how far one element is off.
BROKEN = {
    "one K block instead of the whole sum": ("range(0, hidden, BLOCK_K)", "range(0, 1, BLOCK_K)"),
    "dropped K tile": ("range(0, hidden, BLOCK_K)", "range(BLOCK_K, hidden, BLOCK_K)"),
    "dropped ragged K tile": (
        "range(0, hidden, BLOCK_K)",
        "range(0, hidden // BLOCK_K * BLOCK_K, BLOCK_K)",
    ),
    "gate and up swapped": (H, "    h = up * tl.sigmoid(up) * gate"),
    "gate's rows taken for up's": ("w_up, up_row + column", "w_gate, column"),
    "wrong last ragged element": (H, f"{H} + {OFF}"),
    "wrong last ragged gradient": ("d_gate = dh", f"d_gate = {OFF} + dh"),
    "wrong derivative": ("slope(gate, activated, s, ACTIVATION)", "s"),
    "gradients swapped": ("dh * up * slope(gate, activated, s, ACTIVATION)", "dh * activated"),
    "up left out of the recomputed h": (
        "store_block(h_ptr, activated * up",
        "store_block(h_ptr, activated",
    ),
}


NAMES = ("_swiglu_fwd_kernel", "_swiglu_bwd_kernel")

STORED = "store_block(c, acc, row, column, tokens, width"
LAST_OF_FEW = LAST.replace("inner", "width")
# The same for `few_tokens`.
BROKEN_FEW = {
    "one K block instead of the whole sum": ("range(0, depth, DEPTH)", "range(0, 1, DEPTH)"),
    "dropped K tile": ("range(0, depth, DEPTH)", "range(DEPTH, depth, DEPTH)"),
    "dropped ragged K tile": (
        "range(0, depth, DEPTH)",
        "range(0, depth // DEPTH * DEPTH, DEPTH)",
    ),
    "dropped ragged K tiles of d_x": ("tl.cdiv(depth, DEPTH)", "depth // DEPTH"),
    "wrong last ragged element": (
        STORED,
        STORED.replace("acc", f"acc + tl.where({LAST_OF_FEW}, OFF, 0.0)"),
    ),
    "gate's weight taken for up's": ("b_right + first_row * width", "b_left - depth * width"),
    "up's columns left out": ("range(0, 2 * blocks)", "range(0, blocks)"),
    "last tile of a span left out": ("first + SPAN * SIDE,", "first + SPAN * SIDE - SIDE,"),
    "last token left out": ("(b, 0, column, tokens,", "(b, 0, column, tokens - 1,"),
    "wrong factor of a weight's gradient": ("d_gate_up, x, d_w", "d_gate_up, dy, d_w"),
    "d_x left out": ("x_programs = wants[0] *", "x_programs = 0 *"),
    "a weight's gradient left out": ("down_programs = wants[2] *", "down_programs = 0 *"),
    "the other weight's gradient left out": (
        "gate_up_programs = wants[1] *",
        "gate_up_programs = 0 *",
    ),
}
FEW_NAMES = ("_few_down_kernel", "_few_gradients_kernel")


def put(monkeypatch: pytest.MonkeyPatch, folder: Path, fault: str, off: float) -> list[Launch]:
    """Have the library launch `swiglu`'s kernels with that fault, plans too; what it launches."""
    broken = _with_fault(monkeypatch, folder, swiglu, BROKEN[fault], off)
    forget(monkeypatch)
    for name in ("fwd_launch", "bwd_launch"):
        monkeypatch.setattr(swiglu, name, getattr(broken, name))
    return _started(monkeypatch, [getattr(broken, name) for name in NAMES])


def put_few(monkeypatch: pytest.MonkeyPatch, folder: Path, fault: str, off: float) -> list[Launch]:
    """The same for the products that are `few_tokens`'s own."""
    broken = _with_fault(monkeypatch, folder, few_tokens, BROKEN_FEW[fault], off)
    forget(monkeypatch)
    monkeypatch.setattr(few_products, "kernels", broken)
    return _started(monkeypatch, [getattr(broken, name) for name in FEW_NAMES])


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the right kernels' binaries is kept, in launches or plans.

    A plan's new matrices are NaN: memory that the right kernels wrote before may hold their
    results, so that a gradient which nobody writes would look right.
    """
    monkeypatch.setattr(binaries, "_LOADED", {})
    monkeypatch.setattr(plan_cache, "_PLANS", {})

    def allocator(device):
        return lambda shape, _, dtype: torch.full(shape, torch.nan, dtype=dtype, device=device)

    for module in (plan, few_products):
        monkeypatch.setattr(module, "allocator", allocator)


def names(started: list[Launch]) -> set[str]:
    """Of the kernels that were launched."""
    return {launched.kernel.__name__ for launched in started}


def _with_fault(
    monkeypatch: pytest.MonkeyPatch, folder: Path, module: ModuleType, fault: tuple[str, str],
    off: float,
) -> ModuleType:  # fmt: skip
    right, wrong = fault
    wrong = wrong.replace("OFF", str(off))
    return rewritten(monkeypatch, folder, module, right, wrong, times=None)


def _started(monkeypatch: pytest.MonkeyPatch, kernels: list[object]) -> list[Launch]:
    """Launches of these kernels from now on."""
    started = []
    original = Launch.__call__

    def noted(self: Launch, *matrices: torch.Tensor) -> None:
        if any(self.kernel is kernel for kernel in kernels):
            started.append(self)
        original(self, *matrices)

    monkeypatch.setattr(Launch, "__call__", noted)
    return started


def without_scales(monkeypatch) -> None:
    """Split factors whose lines' words say nothing."""
    from fusedlib.ops.linear.split import parts

    split_factor = parts.FactorSplitter.__call__

    def broken(self, source, below=None):
        found, words = split_factor(self, source, below)
        return found, words * 0

    monkeypatch.setattr(parts.FactorSplitter, "__call__", broken)
