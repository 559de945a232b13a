"""A module with a few characters of its text exchanged, for tests that must reject it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fusedlib.launch import launch, operator


def rewritten(
    monkeypatch: pytest.MonkeyPatch, folder: Path, module: ModuleType, right: str, wrong: str,
    times: int | None = 1,
) -> ModuleType:  # fmt: skip
    """A copy of the module in which `wrong` stands for `right`, for plain eager mode: operators are
    registered once, so its own are not.

    Args:
        folder: the copy's.
        times: how often `right` must stand there; None, at least once.
    """
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    found = text.count(right)
    assert found == times if times else found, f"{right!r} stands {found} times in {module}"
    path = folder / "broken.py"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("broken", path)
    assert spec is not None and spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "broken", broken)  # dataclasses look their module up
    with monkeypatch.context() as unregistered:
        for register in ("operator", "differentiable"):
            unregistered.setattr(operator, register, lambda name, function, *_: function)
        spec.loader.exec_module(broken)
    return broken


def use_broken_kernels(
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
