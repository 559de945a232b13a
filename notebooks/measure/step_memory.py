"""What fills memory through training steps, by the allocator's history: by kind, and at the peak.

A trainer is watched from before it is made, so that every block that its steps hold is known.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from measure.allocator_history import KnownAddresses, Watch, thinned, watching
from measure.racing.settings import MIB
from measure.racing.step_clock import Trainer


class Casts(TorchDispatchMode):
    """Notes the addresses of copies of weights in another dtype.

    A dispatch mode sees every operation below autograd and autocast, so also autocast's casts.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = addresses_of(weights)
        self.addresses: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and note what it made; an address that comes again is another block."""
        result = func(*args, **(kwargs or {}))
        given = addresses_of(t for t in tree_leaves(args) if isinstance(t, Tensor))
        created = addresses_of(t for t in tree_leaves(result) if isinstance(t, Tensor)) - given
        self.addresses -= created
        if func.overloadpacket.__name__ == "_to_copy" and given & self._weights:
            self.addresses |= created
        return result


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the tensors' storages."""
    return {t.untyped_storage().data_ptr() for t in tensors}


def gradients_of(trainer: Trainer) -> list[Tensor]:
    """The gradients that exist now."""
    return [p.grad for p in trainer.model.parameters() if p.grad is not None]


def moments_of(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """The optimizer's moments that exist now; numbers of steps are none."""
    held = optimizer.state.values() if optimizer else ()
    return [t for state in held for t in state.values() if isinstance(t, Tensor) and t.dim()]


def watched_steps(
    make: Callable[[], Trainer], device: torch.device, count: int, *, note_casts: bool = False
) -> tuple[Trainer, Watch, KnownAddresses]:
    """Make a trainer and let it make so many steps, with a moment at each border of a section.

    Moments are "built", then "begin 1", "forward 1", "backward 1", "step 1", "begin 2" and so on.

    Raises:
        Unavailable: a device whose allocator keeps no history.
    """
    addresses = KnownAddresses()
    with watching(device) as watch:
        trainer = make()
        watch.mark("built")
        addresses.named.append(("built", "weights", addresses_of(trainer.model.parameters())))
        for number in range(1, count + 1):
            trainer.clear()
            watch.mark(f"begin {number}")
            trainer.issue(partial(_section, trainer, watch, addresses, number, note_casts))
            del trainer.loss
    return trainer, watch, addresses


@contextmanager
def _section(
    trainer: Trainer,
    watch: Watch,
    addresses: KnownAddresses,
    number: int,
    note_casts: bool,
    name: str,
) -> Iterator[None]:  # fmt: skip
    """A section whose end is a moment at which addresses are known."""
    noting = name == "forward" and note_casts
    with Casts(trainer.model.parameters()) if noting else nullcontext() as casts:
        yield
    moment = f"{'step' if name == 'optimizer' else name} {number}"
    watch.mark(moment)
    if name == "forward":
        cast = casts.addresses if casts else set()
        addresses.forwards.append((f"begin {number}", moment, cast))
    elif name == "backward":
        addresses.named.append((moment, "gradients", addresses_of(gradients_of(trainer))))
    else:
        addresses.named.append((moment, "optimizer", addresses_of(moments_of(trainer.optimizer))))


def total(held: Mapping[str, np.ndarray]) -> np.ndarray:
    """All categories together."""
    summed: np.ndarray = np.sum(list(held.values()), axis=0)
    return summed


def curve(held: Mapping[str, np.ndarray], points: int, keep: Sequence[int] = ()) -> dict[str, Any]:
    """A row's figures of bytes by category: MiB at the peak of all, and at so many points of time.

    Args:
        keep: positions that must be among them.
    """
    together = total(held)
    at, chosen = int(np.argmax(together)), thinned(together, keep, points)
    figures: dict[str, Any] = {"live_at": chosen.tolist()}
    for name, series in held.items():
        figures[f"live_{name}_mib"] = [round(float(v), 4) for v in series[chosen] / MIB]
        figures[f"peak_{name}_mib"] = int(series[at]) / MIB
    return figures
