"""One function, ready to run: its call, its operands, and what it gave, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedlib.bench import alarms

Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A call without arguments.

    Attributes:
        forward: gives the output, or a tuple of several.
        leaves: its operands by the reference's names.
    """

    forward: Callable[[], Any]
    leaves: Mapping[str, Tensor]

    def reset(self) -> None:
        """Drop all gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Put values, by the reference's names, into the operands' memory (`alarms.write`)."""
        for name, leaf in self.leaves.items():
            alarms.write(leaf, values[name])

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that arrived, by `d_` and the operands' names."""
        return {
            f"d_{name}": leaf.grad.detach()
            for name, leaf in self.leaves.items() if leaf.grad is not None
        }  # fmt: skip


def named(outputs: object) -> dict[str, Any]:
    """What a call gave, by name: y where it is no tuple or list, else y1, y2 and so on."""
    if not isinstance(outputs, tuple | list):
        return {"y": outputs}
    return {f"y{index}": output for index, output in enumerate(outputs, 1)}


def go_backward(outputs: Outputs, dy: Outputs) -> None:
    """Send the gradients of all outputs backward, those of outputs that want none left out.

    Raises:
        ValueError: there are not as many outputs as gradients.
    """
    if isinstance(outputs, Tensor) and isinstance(dy, Tensor):
        outputs.backward(dy)
        return
    if isinstance(outputs, Tensor) or isinstance(dy, Tensor) or len(outputs) != len(dy):
        given, wanted = (1 if isinstance(of, Tensor) else len(of) for of in (outputs, dy))
        raise ValueError(f"the call gives {given} outputs, the problem has {wanted}")
    pairs = [(y, d) for y, d in zip(outputs, dy, strict=True) if y.requires_grad]
    torch.autograd.backward([y for y, _ in pairs], [d for _, d in pairs])
