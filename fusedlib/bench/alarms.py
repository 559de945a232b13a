"""What is too good to be true: a race refuses it with a reason, and the row has no time.

- A result that stays as it was, bit for bit, when the operands change was kept and not computed.
- A time in which the card's tensor cores could not make the problem's products is none.

That work runs on another stream than the clock's, `timing.in_turns` sees.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fusedlib.bench import machine
from fusedlib.bench.attempt import Wrong
from fusedlib.bench.rivals import Workload

# Of dense half-precision products, a multiprocessor and clock, by compute capability: the vendor's
# rate of the fastest card of it over multiprocessors and boost clock. No other dtype that is raced
# is faster. Where a capability is missing, no time is refused.
FLOPS_PER_CLOCK = {
    (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024,
}  # fmt: skip


def _reversed(old: Tensor) -> Tensor:
    return old.flip(0) if old.dim() else old


def _with_neighbours(old: Tensor) -> Tensor:
    """Every third element has the value of the one before it: another set of values."""
    elements = old.flatten().clone()
    count = len(elements[1::3])
    elements[1::3] = elements[::3][:count]
    return elements.view(old.shape)


def _halved(old: Tensor) -> Tensor:
    return old / 2


# None leaves the range of the values. What the first leaves as it was, such as a sum over rows, a
# maximum or a sort, one of the others changes; what halving does, as a norm, the first two do.
CHANGES = _reversed, _with_neighbours, _halved


def require_computed(work: Workload, leaves: Mapping[str, Tensor]) -> None:
    """Run forward on other operands: the same tensors, whose values are changed and put back.

    Raises:
        Wrong: the output is bit for bit the one before, however operands differ.
    """
    # Where elements share memory, nothing can be written.
    operands = [t for t in leaves.values() if t.is_floating_point() and all(t.stride())]
    kept = [t.detach().clone() for t in operands]
    before = work.forward().detach().clone()
    work.reset()
    changed = False
    try:
        for change in CHANGES:
            with torch.no_grad():
                for operand, old in zip(operands, kept, strict=True):
                    operand.copy_(change(old))
            if all(torch.equal(t, old) for t, old in zip(operands, kept, strict=True)):
                continue
            changed = True
            after = work.forward().detach()
            work.reset()
            if after.shape != before.shape or not torch.equal(after, before):
                return
    finally:
        with torch.no_grad():
            for operand, old in zip(operands, kept, strict=True):
                operand.copy_(old)
    if changed:
        raise Wrong(
            "the output stays the same, bit for bit, when the operands change: it was kept from "
            "another call and not computed"
        )


def most_flops_per_s(device: torch.device | str) -> float | None:
    """What the tensor cores of a card can do at its highest clock; None where nobody knows."""
    if torch.device(device).type != "cuda":
        return None
    per_clock = FLOPS_PER_CLOCK.get(torch.cuda.get_device_capability(device))
    clock_mhz = machine.describe().max_sm_clock_mhz
    if per_clock is None or clock_mhz is None:
        return None
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return per_clock * count * clock_mhz * 1e6


def require_possible_time(ms: float, flops: float, device: torch.device | str) -> None:
    """Hold a time against the FLOPs of the problem's products.

    Raises:
        Wrong: they are more than the card can do in it.
    """
    most_per_s = most_flops_per_s(device)
    if most_per_s and flops / most_per_s > ms / 1e3:
        raise Wrong(
            f"{flops:.3g} FLOPs in {ms:.3g} ms are {flops / ms / 1e9:.3g} TFLOP/s, more than the "
            f"{most_per_s / 1e12:.3g} that this card's tensor cores can do: not all was computed, "
            "or the clock did not see all"
        )
