"""What the kernels over rows of elements share: `rms_norm` and `rope`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Warps:
    """How wide a program is; `Launch` takes it for a configuration."""

    num_warps: int
    descriptors: ClassVar[bool] = False

    def launch(self) -> dict[str, Any]:
        """The keyword arguments of a kernel's launch."""
        return {"num_warps": self.num_warps}
