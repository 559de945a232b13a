"""The SwiGLU kernels with one fault each, which every check must reject: a copy of another text."""

import importlib.util
from pathlib import Path

import pytest

from fusedlib.kernels import launch, swiglu_calls
from fusedlib.kernels import swiglu as kernels

H = "    h = gate * tl.sigmoid(gate) * up"
LAST = (
    "((row + tl.arange(0, HEIGHT)) == tokens - 1)[:, None]"
    " & ((column + tl.arange(0, WIDTH)) == inner - 1)[None, :]"
)
OFF = f"tl.where({LAST}, OFF, 0.0)"
# What stands there, and what shall; OFF is how far one element is off.
BROKEN = {
    "one K block instead of the whole sum": ("range(0, hidden, BLOCK_K)", "range(0, 1, BLOCK_K)"),
    "dropped K tile": ("range(0, hidden, BLOCK_K)", "range(BLOCK_K, hidden, BLOCK_K)"),
    "dropped ragged K tile": (
        "range(0, hidden, BLOCK_K)",
        "range(0, hidden // BLOCK_K * BLOCK_K, BLOCK_K)",
    ),
    "gate and up swapped": (H, "    h = up * tl.sigmoid(up) * gate"),
    "wrong last ragged element": (H, f"{H} + {OFF}"),
    "wrong last ragged gradient": ("d_gate = dh", f"d_gate = {OFF} + dh"),
    "wrong derivative": ("(s + silu * (1 - s))", "s"),
    "gradients swapped": ("dh * up * (s + silu * (1 - s))", "dh * silu"),
    "up left out of the recomputed h": ("_store(h_ptr, silu * up", "_store(h_ptr, silu"),
}


def put(monkeypatch: pytest.MonkeyPatch, folder: Path, fault: str, off: float) -> None:
    """Have the library launch kernels with that fault."""
    right, wrong = BROKEN[fault]
    text = Path(kernels.__file__).read_text(encoding="utf-8")
    assert right in text
    path = folder / "broken.py"
    path.write_text(text.replace(right, wrong.replace("OFF", str(off))), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("broken", path)
    assert spec is not None and spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    monkeypatch.setattr(launch, "_LAUNCHES", {})  # none of the right kernels' binaries
    for name in ("fill_fwd", "fill_bwd"):
        monkeypatch.setattr(swiglu_calls, name, getattr(broken, name))
