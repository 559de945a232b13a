"""Who made a tensor: the operation and line of the model behind each storage of a forward pass.

A dispatch mode sees every operation below autograd and autocast, so also autocast's casts.
"""

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedlib import paths
from fusedlib.bench.model_memory.history import DEPTH

_MODELS = str(paths.ROOT / "fusedlib" / "models")


class Births(TorchDispatchMode):
    """Notes the latest storage made at each address: `where` it was made, and `casts` of weights.

    Args:
        weights: parameters; a cast of one is a storage of its own.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = {w.untyped_storage().data_ptr() for w in weights}
        self.where: dict[int, str] = {}
        self.casts: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and note its new storages."""
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in tree_leaves(args) if _real(a)}
        name = func.overloadpacket.__name__
        for tensor in tree_leaves(result):
            if not _real(tensor) or (address := tensor.untyped_storage().data_ptr()) in given:
                continue
            self.where[address] = f"{name} ← {_lines()}"
            self.casts.discard(address)
            if name == "_to_copy" and given & self._weights:
                self.casts.add(address)
        return result


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.untyped_storage().nbytes() > 0


def _lines() -> str:
    """The innermost frames of the model's code."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < DEPTH:
        code = frame.f_code
        if code.co_filename.startswith(_MODELS):
            file = code.co_filename.removeprefix(str(paths.ROOT)).lstrip("/")
            found.append(f"{file}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " ← ".join(found)
