"""What is too good to be true is refused with a reason, and has no time: `RULES` is the table.

Each rule looks at behaviour, never at source. Operands are drawn anew before each sample in the
same memory, and results must be right for values that are drawn so (`fusedlib.bench.problem`): what
is quick because it was kept is wrong as often. A function runs in this process: one that is out to
change this module, nothing here can refuse.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedlib.bench import machine, timing
from fusedlib.bench.attempt import Wrong

# Of dense half-precision products, a multiprocessor and clock, by compute capability: the vendor's
# rate of the fastest card of it over multiprocessors and boost clock. No other dtype that is raced
# is faster. Where a capability is missing, no time is refused.
FLOPS_PER_CLOCK = {
    (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024,
}  # fmt: skip
second_clock_ns = time.monotonic_ns
# The second clock sees the launch and the flush of the L2 too.
CLOCKS_APART, CLOCKS_APART_MS = 3.0, 1.0
EMPTY_SHARE, EMPTY_MS = 0.5, 0.01
HOLD_CYCLES = 10_000_000  # about 5 ms
_CHANCE = random.SystemRandom()  # no seed that a rival sets decides it
_TIMERS = {
    (owner, name): getattr(owner, name)
    for owner, names in (
        (torch.cuda.Event, ("record", "elapsed_time", "synchronize")),
        (torch.cuda, ("synchronize", "current_stream", "Event")),
        (time, ("perf_counter", "perf_counter_ns", "monotonic_ns")),
    )
    for name in names
}


def some_of(count: int) -> int:
    """A number from 1 to `count` that no rival foresees."""
    return _CHANCE.randint(1, count)


# --- operands -------------------------------------------------------------------------------------


def has_own_elements(tensor: Tensor) -> bool:
    """Whether there are elements, and no two of them share memory."""
    return tensor.numel() > 0 and all(tensor.stride())


@torch.no_grad()
def write(tensor: Tensor, values: Tensor) -> None:
    """Put values into a tensor's memory; its address and `_version` stay as they are."""
    if has_own_elements(tensor):
        tensor.data.copy_(values)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(_CHANCE.randrange(2**31))


@torch.no_grad()
def scaled(values: Tensor) -> Tensor:
    """Each value times a random number of its own, from a bound that is random too, to one.

    Signs, zeros and the range stay, mantissas are full, sums are others in each draw. Zeros alone
    become such numbers less a half; whole numbers stay.
    """
    if not values.is_floating_point():
        return values
    least, generator = _CHANCE.uniform(0.25, 0.75), _generator(values.device)
    uniform = torch.rand(values.shape, generator=generator, device=values.device)
    factor = (least + (1 - least) * uniform).to(values.dtype)
    return values * factor if bool(values.any()) else factor - 0.5


@torch.no_grad()
def resampled(values: Tensor) -> Tensor:
    """Of all that lie along the longest dimension as many, each drawn from all, then `scaled`."""
    if values.ndim:
        dim = max(range(values.ndim), key=lambda dim: values.shape[dim])
        size, generator = values.shape[dim], _generator(values.device)
        at = torch.randint(size, (size,), generator=generator, device=values.device)
        values = values.index_select(dim, at)
    return scaled(values)


@torch.no_grad()
def one_changed(values: Tensor) -> Tensor:
    """A copy in which one element, somewhere, is another one, `scaled`."""
    changed = values.detach().clone(memory_format=torch.contiguous_format)
    flat = changed.view(-1)
    at, other = (_CHANCE.randrange(len(flat)) for _ in range(2))
    flat[at] = scaled(flat[other])
    return changed


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit for bit; NaN may equal NaN."""
    first, second = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


@contextmanager
def unchanged(operands: Mapping[str, Tensor]) -> Iterator[None]:
    """Put operands back as they were; raise `Wrong` where one was written over."""
    kept = {name: tensor.detach().clone() for name, tensor in operands.items()}
    yield
    written = [name for name, old in kept.items() if not same_bits(operands[name], old)]
    for name in written:
        with torch.no_grad():
            operands[name].data.copy_(kept[name])
    if written:
        raise Wrong(f"wrote over {', '.join(written)}: a rival must leave its operands alone")


def require_inputs_alone(outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    """Raise `Wrong` where gradients would reach another leaf than an input: it would be neither
    checked nor dropped between samples, and stay in its owner's `grad`.
    """
    known = {id(leaf) for leaf in inputs.values()}
    seen, waiting = set(), [y.grad_fn for y in outputs.values() if isinstance(y, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise Wrong(
                f"a tensor of shape {tuple(leaf.shape)} that is no input wants a gradient, which "
                "nothing would check: give it as an input (a module's by "
                "torch.func.functional_call), or freeze it"
            )
        waiting += [following for following, _ in node.next_functions]


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Raise `Wrong` where a thread of Python's that began inside is still alive."""
    before = set(threading.enumerate())
    yield
    # A dummy stands for a thread of others, such as autograd's, that once ran Python.
    new = [t.name for t in threading.enumerate() if t not in before and t.is_alive()
           and not isinstance(t, threading._DummyThread)]  # fmt: skip
    if new:
        raise Wrong(
            f"the call left a thread at work ({new[0]}), which the clock does not see; a call must "
            "have done its work when it returns"
        )


# --- results --------------------------------------------------------------------------------------


SMALL_BYTES, SMALL_BLOCKS = 2**16, 64
"""Below so many bytes so many blocks are filled, for one result."""


def poison(shapes: Iterable[tuple[torch.Size, torch.dtype]], device: torch.device) -> None:
    """Fill with NaN the blocks that such tensors get next: right results may lie there. Of small
    ones an allocator has many that are free.
    """
    blocks = [
        torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes
        for _ in range(SMALL_BLOCKS if shape.numel() * dtype.itemsize < SMALL_BYTES else 2)
    ]  # fmt: skip
    for block in blocks:
        block.fill_(float("nan") if block.is_floating_point() else 1)


def hold_back(device: torch.device) -> None:
    """Keep a card's current stream busy for some ms, so that an output is copied before short work
    on another stream is done, for which it does not wait.
    """
    if device.type == "cuda":
        torch.cuda._sleep(HOLD_CYCLES)


def as_returned(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of what a call gave, as it is at the return and in the current stream; raise `Wrong`
    where an output is no plain tensor with memory, or changes after the return.
    """
    copies = {}
    for name, tensor in outputs.items():
        require_plain(name, tensor)
        copies[name] = torch.clone(tensor.detach(), memory_format=torch.preserve_format)
    for name, tensor in outputs.items():
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        if not same_bits(tensor, copies[name]):
            raise Wrong(
                f"{name} changed after the call had returned: it is written by another thread or "
                "stream, which the clock does not see"
            )
    return copies


def require_plain(name: str, tensor: object) -> None:
    """Raise `Wrong` where an output is no plain tensor with memory."""
    if type(tensor) is not Tensor:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise Wrong(f"{name} is a {kind}, not a plain torch.Tensor: it may compute when it is read")
    if overridden := [key for key, value in vars(tensor).items() if callable(value)]:
        raise Wrong(f"{name} has a method of its own, {overridden[0]}: it may compute when read")
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise Wrong(f"{name} has no memory behind its {tensor.numel()} elements")


def require_own_memory(
    outputs: Mapping[str, Tensor], operands: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> None:
    """Raise `Wrong` where outputs share memory with operands, or with outputs of `before`."""
    for others, reason in (
        (operands, "lies in the memory of the operand {}"),
        (before, "was handed out before as {}, and the next call writes over it: return a clone"),
    ):
        owners = {t.untyped_storage().data_ptr(): n for n, t in others.items() if t.numel()}
        for name, tensor in outputs.items():
            owner = owners.get(tensor.untyped_storage().data_ptr())
            if owner is not None and tensor.numel():
                raise Wrong(f"{name} {reason.format(owner)}")


# --- times ----------------------------------------------------------------------------------------


def require_own_timers() -> None:
    """Put the functions that clocks are made of back; raise `Wrong` where one was replaced."""
    replaced = [key for key, timer in _TIMERS.items() if getattr(*key) is not timer]
    for owner, name in replaced:
        setattr(owner, name, _TIMERS[owner, name])
    if replaced:
        names = ", ".join(f"{owner.__name__}.{name}" for owner, name in replaced)
        raise Wrong(f"replaced {names}, by which it is timed")


@contextmanager
def own_timers() -> Iterator[None]:
    """Whoever runs inside may not replace a timer."""
    try:
        yield
    finally:
        require_own_timers()


def require_clocks_agree(ms: float, second_ms: float) -> None:
    """Raise `Wrong` where a sample's least time by the host's monotonic clock is more than three
    times as long, and a millisecond.
    """
    if second_ms > CLOCKS_APART * ms + CLOCKS_APART_MS:
        raise Wrong(
            f"a sample of {ms:.3g} ms took {second_ms:.3g} ms by a second clock: the first one "
            "does not see all of the work, or other processes use the device"
        )


def require_cheap_nothing(empty_ms: float, ms: float) -> None:
    """Raise `Wrong` where a call that does nothing takes most of a sample's least time."""
    if empty_ms > max(EMPTY_MS, EMPTY_SHARE * ms):
        raise Wrong(
            f"a call that does nothing takes {empty_ms:.3g} ms of these {ms:.3g} ms: the time is "
            "the clock's own; take a larger problem"
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


def most_bytes_per_s(device: torch.device | str) -> float | None:
    """What the memory of a card can move at its highest clock; None where nobody knows."""
    return machine.memory_bytes_per_s() if torch.device(device).type == "cuda" else None


def require_possible_time(
    ms: float, flops: float, device: torch.device | str, moved_bytes: float = 0.0
) -> None:
    """Raise `Wrong` where a time is too short for the card: for the FLOPs of a problem's products,
    or for the bytes of operands and results, once each, less those that the L2 may hold.
    """
    roofs = [(flops, "FLOPs", 1e12, "TFLOP/s", most_flops_per_s(device), "tensor cores can do")]
    if most_bytes := most_bytes_per_s(device):
        beyond = moved_bytes - torch.cuda.get_device_properties(device).L2_cache_size
        roofs += [(beyond, "bytes beside what the L2 holds", 1e9, "GB/s", most_bytes,
                   "memory can move")]  # fmt: skip
    for amount, what, scale, unit, most_per_s, ability in roofs:
        if most_per_s and amount / most_per_s > ms / 1e3:
            raise Wrong(
                f"{amount:.3g} {what} in {ms:.3g} ms are {1e3 * amount / ms / scale:.3g} {unit}, "
                f"more than the {most_per_s / scale:.3g} that this card's {ability}: not all was "
                "computed, read or written, or the clock did not see all"
            )


# --- the table ------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """What must hold, what is caught where it does not, and the function that looks."""

    rule: str
    catches: str
    function: Callable[..., Any]


RULES = (
    Rule("values change, addresses and versions do not", "results kept by what is no value", write),
    Rule("each value is drawn anew", "results kept by shape, sum or samples of values", scaled),
    Rule("one element is changed", "results kept by most of the values", one_changed),
    Rule("operands stay as they are", "inputs destroyed, zeros written into them", unchanged),
    Rule("blocks that were freed hold NaN", "the answer found in freed memory", poison),
    Rule("outputs are plain tensors", "work put off until a result is read", require_plain),
    Rule("the stream is busy before a call", "another stream, not waited for", hold_back),
    Rule("outputs are done at the return", "threads and streams that go on writing", as_returned),
    Rule("outputs have memory of their own", "static buffers, views of inputs", require_own_memory),
    Rule("gradients reach inputs alone", "weights kept in a function", require_inputs_alone),
    Rule("no thread stays at work", "work that the clock does not see", no_new_threads),
    Rule("timers stay what they are", "a clock that is replaced", require_own_timers),
    Rule("work is on the current stream", "a side stream", timing.require_current_stream),
    Rule("a second clock agrees", "a clock that sees part of the work", require_clocks_agree),
    Rule("a call of nothing is cheap", "a time that is the clock's own", require_cheap_nothing),
    Rule("the card can do so much", "work or bytes left out", require_possible_time),
)
