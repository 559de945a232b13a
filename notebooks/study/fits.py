"""Memory: what is not worth a try, and what is given back between two cases."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from fusedlib.bench import machine
from fusedlib.bench.attempt import Refused


class TooLarge(Refused):
    """Not tried: a count says that it is far above the memory there is."""

    status = "oom (predicted)"


MOST_MEMORY = {"cuda": 2.0, "mps": 0.7, "cpu": 0.7}
"""Times the memory there is: what is counted above is not tried. A card refuses and goes on, so an
attempt costs a second, and counts may be too high; a host's system ends the process instead."""


def require_memory(need_gib: float, device: str) -> None:
    """Raise `TooLarge` where work is counted to need far more memory than there is."""
    facts, most = machine.describe(), MOST_MEMORY[device]
    there = (facts.device_memory_gib if device == "cuda" else None) or facts.memory_gib
    if there is not None and need_gib > most * there:
        raise TooLarge(
            f"not tried: {need_gib:,.0f} GiB counted, more than {most:g} times the {there:,.0f} "
            "GiB there are"
        )


@contextmanager
def looking_through_new_objects() -> Iterator[None]:
    """While the block runs, `free_memory` looks through what was made in it alone: not through
    what imports hold, which takes 0.2 s each time. Of what was there before nothing is given back.
    """
    if gc.get_freeze_count():  # somebody else's, which is not to be undone
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
