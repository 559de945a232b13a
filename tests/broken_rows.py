"""The kernels of `rms_norm` and `rope` with one fault each, which every check must reject."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fusedlib.launch import launch
from rewritten import rewritten

# What stands in the kernels' files, and what shall.
BROKEN_NORM = {
    "mean over the block instead of the row": (
        "axis=1) * (1.0 / WIDTH) + eps", "axis=1) * (1.0 / BLOCK) + eps"),
    "mean of squares off by a thousandth": ("(1.0 / WIDTH) + eps", "(1.0 / WIDTH) * 1.001 + eps"),
    "last row of a tile left out": ("(row < rows) & (j < WIDTH)", "(row < rows - 1) & (j < WIDTH)"),
    "last column left out": ("stream = tl.load(x + row * x_row + j, mask=inside",
                             "stream = tl.load(x + row * x_row + j, mask=inside & (j < WIDTH - 1)"),
    "residual left out of the stream": ("stream.to(tl.float32) + added.to(tl.float32)",
                                        "stream.to(tl.float32)"),
    "mean term left out of d_s": ("(d - n * mean[:, None]) * scale", "d * scale"),
    "residual's gradient left out": ("gradient += _wide(ds, row * ds_row + j, inside)", "pass"),
    "weight left out of d_s": ("gradient = (d - n", "gradient = (upstream - n"),
    "first rows alone in d_weight": ("total += upstream * n", "total = upstream * n"),
    "wide rows: first rows alone in d_weight": ("(j < WIDTH) & (first > start)", "(j < 0)"),
    "wide rows: mean of the first block": (
        "mean += tl.sum(d * n, axis=1)", "mean += tl.sum(d * n, axis=1) * (left == 0)"),
    "last partial row left out": ("(i < parts)", "(i < parts - 1)"),
}  # fmt: skip
BROKEN_ROPE = {
    "backward turns on": ("        e, f = -f, -e\n", "        e, f = e, f\n"),
    "backward with the other half's sine": ("e, f = -f, -e", "e, f = -e, -f"),
    "other half's cosine": ("b * d + a * f", "b * c + a * f"),
    "turned the other way": ("a * c - b * e", "a * c + b * e"),
    "rest of the head left out": ("    if REST + ZEROS:", "    if False:"),
    "zeros left out": ("(j < REST + ZEROS)", "(j < REST)"),
    "the next head's instead of zeros": ("present & (j < REST), other", "present, other"),
    "last token left out": ("(token < tokens)[:, None]", "(token < tokens - 1)[:, None]"),
    "first token's angles for all": ("batch * table_batch + token * table_row",
                                     "batch * table_batch + token * 0"),
    "first sequence's angles for all": ("batch * table_batch + token", "token"),
    "k's first head for all": ("batch, head - heads, token", "batch, head * 0, token"),
}  # fmt: skip
# With the norms of q and k in the same launch.
BROKEN_NORMED_ROPE = {
    "mean of squares over half a head": ("(0.5 / HALF) + eps", "(1.0 / HALF) + eps"),
    "weight left out": ("a *= scale * w_a", "a *= scale + 0 * w_a"),
    "weight left out of d_q and d_k": ("back_a *= w_a", "back_a *= 1.0"),
    "mean term left out of d_q and d_k": ("back_b - b * mean", "back_b"),
    "first rows alone in d_weight": ("total_a += back_a * a", "total_a = back_a * a"),
    "k's d_weight where q's is": ("own + 2 * HALF, eps", "own, eps"),
    "k's weight for q": ("sin, q_weight, own", "sin, k_weight, own"),
    "last head left out": ("(i < rows)", "(i < rows - 1)"),
    "backward turns on": ("up_a * c + up_b * f, up_b * d - up_a * e",
                          "up_a * c - up_b * f, up_b * d + up_a * e"),
}  # fmt: skip


def put(
    monkeypatch: pytest.MonkeyPatch, folder: Path, module: ModuleType, fault: tuple[str, str]
) -> None:
    """Have the library launch the module's kernels with that fault.

    New tensors are NaN, so that what nobody writes is not right by chance.
    """
    broken = rewritten(monkeypatch, folder, module, *fault, times=None)
    monkeypatch.setattr(launch, "LAUNCHES", {})
    for name in [n for n in vars(module) if n.endswith("_kernel")]:
        monkeypatch.setattr(module, name, getattr(broken, name))
    empty, like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: like(*a, **k).fill_(torch.nan))
