"""One try at something that may fail: figures, or a status and its reason."""

import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, TypeVar

T = TypeVar("T")
STATUSES = ("ok", "wrong", "unavailable", "oom", "oom (predicted)", "failed")
"""What can become of a case. All but "ok" have a reason and no time."""


class Refused(Exception):  # noqa: N818 (a state of affairs, not an error)
    """A case has no time, for the reason given; `figures` are what is known of it all the same."""

    status = "failed"

    def __init__(self, reason: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.figures = dict(figures or {})


class Unavailable(Refused):
    """This case cannot run here."""

    status = "unavailable"


class Wrong(Refused):
    """The result misses the reference."""

    status = "wrong"


class TooLarge(Refused):
    """Not tried: a count says that it is far above the memory there is."""

    status = "oom (predicted)"


def extra(name: str) -> Any:
    """A module of a package that the extra `bench` installs, such as pandas.

    Raises:
        ModuleNotFoundError: it is not installed; says what to do.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'fusedlib[bench]'", name=error.name
        ) from None


MOST_MEMORY = {"cuda": 2.0, "mps": 0.7, "cpu": 0.7}
"""Times the memory there is: what is counted above is not tried. A card refuses and goes on, so an
attempt costs a second, and counts may be too high; a host's system ends the process instead."""


def require_memory(need_gib: float, device: str) -> None:
    """Whether work that needs so much memory by count is worth a try.

    Raises:
        TooLarge: it is counted far above the memory there is.
    """
    from fusedlib.bench import machine

    facts, most = machine.describe(), MOST_MEMORY[device]
    there = (facts.device_memory_gib if device == "cuda" else None) or facts.memory_gib
    if there is not None and need_gib > most * there:
        raise TooLarge(
            f"not tried: {need_gib:,.0f} GiB counted, more than {most:g} times the {there:,.0f} "
            "GiB there are"
        )


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What came of a try: `value` when `status` is ok, else a status with its reason."""

    status: str = "ok"
    reason: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    value: T | None = None

    @classmethod
    def at(cls, make: Callable[..., T], *args: Any) -> "Attempt[T]":
        """Call `make`. A package that is not installed is `unavailable`, memory that ran out `oom`,
        any other exception `failed` with its message and line; ctrl-C passes.
        """
        try:
            return cls(value=make(*args))
        except Refused as refusal:
            return cls(refusal.status, str(refusal), refusal.figures)
        except Exception as error:
            if package := _missing_package(error):
                return cls("unavailable", f"the package {package} is not installed")
            if is_out_of_memory(error):
                free_memory()
                return cls("oom", _first_line(error))
            where = traceback.extract_tb(error.__traceback__)[-1]
            file = where.filename.rsplit("/", 1)[-1]
            reason = f"{type(error).__name__}: {_first_line(error)} ({file}:{where.lineno})"
            return cls("failed", reason)

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        return self.status == "ok"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the device or in the host."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text


def free_memory() -> None:
    """Give a case's memory back, so that the next one finds it."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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


def forget_compiled() -> None:
    """Empty torch.compile's cache, which is bounded: eight shapes of one function at most."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _missing_package(error: BaseException) -> str | None:
    """The package that an import did not find; None for other errors and modules of our own."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    return None if package == "fusedlib" else package


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
