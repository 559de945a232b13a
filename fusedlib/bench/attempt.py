"""One try at something that may fail: figures, or a status and its reason."""

import gc
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
        with suppress(RuntimeError):  # of a device that is lost, as the next call says
            torch.cuda.empty_cache()


def lost_device() -> str:
    """What CUDA says of an error that no call of this process gets over, such as an illegal access;
    empty where there is none.
    """
    import torch

    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return _first_line(error)
    return ""


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
