"""The one registry: who is measured, by task. One decorated function is all that a rival needs.

A rival takes a task's inputs, sets itself up outside the clock, and returns what runs. What both
are says the task's type, which mypy holds every rival to.

A rival's name, requirements and settings stand in its decorator, its label and colour in
`columns.toml`; checks and races go through the registry and name nobody.
"""

import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from fusedlib.bench import alarms, timing
from fusedlib.bench import workload as calls
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.machine import version_of
from study.settings import DTYPES

# Where the distribution is called otherwise than the package that is imported.
DISTRIBUTIONS = {
    "liger_kernel": "liger-kernel", "quack": "quack-kernels", "thunder": "lightning-thunder",
    "flash_attn.cute": "flash-attn-4", "cutlass": "nvidia-cutlass-dsl",
}  # fmt: skip

P = ParamSpec("P")
Built = TypeVar("Built", covariant=True)


class Task(str, Generic[P, Built]):
    """The name of a task, with the types of what its rivals take and of what they build."""


@dataclass(frozen=True)
class Workload(calls.Workload):
    """One rival, ready to run.

    Attributes:
        leaves: its operands by the reference's names. Packed gate and up rows go by the name
            `w_gate_up`: gate rows above up rows, or a gate row and an up row by turns where
            `alternating`.
        path: which code runs, where a rival chooses among several by shape or dtype.
        figures: what else its rows say of how it was set up.
    """

    alternating: bool = False
    path: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Put values, by the reference's names, into the operands' memory; packed rows apart."""
        for name, leaf in self.leaves.items():
            if name == "w_gate_up" and name not in values:
                for rows, part in zip(self._parts(leaf), ("w_gate", "w_up"), strict=True):
                    alarms.write(rows, values[part])
            else:
                alarms.write(leaf, values[name])

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that arrived, by `d_` and the reference's names; packed rows apart."""
        gradients = super().gradients()
        if (packed := gradients.pop("d_w_gate_up", None)) is not None:
            gradients |= dict(zip(("d_w_gate", "d_w_up"), self._parts(packed), strict=True))
        return gradients

    def _parts(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Gate and up of packed rows."""
        return (packed[0::2], packed[1::2]) if self.alternating else packed.chunk(2)


@dataclass(frozen=True)
class Bound:
    """What no rival of an operation can be faster than; it gives no y, and nobody judges it. `run`
    does the work of a direction, and `results` are what it wrote, by name.
    """

    run: Callable[[str], object]
    results: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Rival(Generic[P, Built]):
    """A registered rival: `build` makes of the task's inputs what runs, `settings` says how it is
    set, and `traits` what else is known of it, such as "fused".
    """

    task: str
    name: str
    build: Callable[P, Built]
    settings: str
    requires: tuple[str, ...] = ()
    needs_cuda: bool = False
    dtypes: tuple[str, ...] = tuple(DTYPES)
    capability: tuple[int, int] = (0, 0)
    traits: frozenset[str] = frozenset()

    def check_available(self, device: torch.device | str, dtype: str) -> None:
        """Whether it can run at all on this device in this dtype; costs no set-up.

        Raises:
            Unavailable: a package or the device is missing, the device is no CUDA GPU or too old,
                or the dtype is not taken.
        """
        for package in self.requires:
            if not _installed(package):
                raise Unavailable(f"the package {package} is not installed")
        kind = torch.device(device).type
        if kind == "cuda" and not torch.cuda.is_available():
            raise Unavailable("this machine has no CUDA device")
        if self.needs_cuda and kind != "cuda":
            raise Unavailable(f"needs a CUDA GPU, the inputs are on {kind}")
        if dtype not in self.dtypes:
            raise Unavailable(f"takes {', '.join(self.dtypes)}, not {dtype}")
        if self.needs_cuda and torch.cuda.get_device_capability(device) < self.capability:
            least = "{}.{}".format(*self.capability)
            raise Unavailable(f"needs compute capability {least} or later")

    def version(self) -> str:
        """Versions of the packages behind it; torch's for those that need nothing else."""
        packages = [DISTRIBUTIONS.get(p, p) for p in self.requires or ("torch",)]
        return ", ".join(f"{p} {version_of(p)}" for p in packages)

    def facts(self) -> dict[str, str]:
        """Version and settings, as figures of its rows."""
        return {"version": self.version(), "settings": self.settings}


def _installed(package: str) -> bool:
    parent = package.rpartition(".")[0]
    return (not parent or _installed(parent)) and importlib.util.find_spec(package) is not None


RIVALS: dict[tuple[str, str], Rival[..., Any]] = {}
HALVES = ("bfloat16", "float16")
FAMILIES: dict[str, dict[str, Any]] = {
    "liger": {"requires": ("liger_kernel",), "needs_cuda": True},
    "quack": {
        "requires": ("quack",), "needs_cuda": True, "dtypes": HALVES, "capability": (9, 0),
    },
    "cut": {"requires": ("cut_cross_entropy",), "needs_cuda": True, "dtypes": HALVES},
}  # fmt: skip
"""What every rival needs whose name begins so, besides what its task does."""


def rival(
    task: Task[P, Built], name: str, **options: Any
) -> Callable[[Callable[P, Built]], Callable[P, Built]]:
    """Register a function as a rival, by its name in the rows. How it is set is the first line of
    its docstring, or given as `settings` where one function builds several rivals. One that a
    notebook or script defines itself may be registered again: the later one counts.

    Raises:
        ValueError: the task has a rival of this name.
    """

    def register(build: Callable[P, Built]) -> Callable[P, Built]:
        if (task, name) in RIVALS and not is_own(name):
            raise ValueError(f"{task} has a rival named {name!r} already")
        needs = FAMILIES.get(name.partition("-")[0], {})
        packages = dict.fromkeys((*options.get("requires", ()), *needs.get("requires", ())))
        settings = (build.__doc__ or "").partition("\n")[0].rstrip(".")
        fields = {"settings": settings, **needs, **options, "requires": tuple(packages)}
        RIVALS[task, name] = Rival(task, name, build, **fields)
        return build

    return register


def is_own(name: str) -> bool:
    """Whether this notebook or script itself defines a rival of that name, whose code may be other
    than that of an earlier row.
    """
    builds = (one.build for one in RIVALS.values() if one.name == name)
    return any(getattr(build, "__module__", None) == "__main__" for build in builds)


def get(task: Task[P, Built], name: str) -> Rival[P, Built]:
    """The rival of that name in a task; of an unknown one ValueError lists those that are known."""
    if (task, name) not in RIVALS:
        raise ValueError(f"unknown rival {name!r} in {task}; known: {', '.join(names(task))}")
    registered: Any = RIVALS[task, name]
    return registered


def workload(one: Rival[P, Workload | Bound], *inputs: P.args, **more: P.kwargs) -> Workload:
    """What a rival runs on a task's inputs; Unavailable where it is a bound, which gives no y."""
    built = one.build(*inputs, **more)
    if isinstance(built, Bound):
        raise Unavailable(f"{one.name} bounds {one.task} and gives no y: take another rival")
    return built


def searched(work: Workload, dy: calls.Outputs) -> Workload:
    """A workload that tries tiles at every new shape, when it has found them: `search_s` of its
    rows is how long its first forward and backward took, in which it also compiles.
    """
    start = time.perf_counter()
    calls.go_backward(work.forward(), dy)
    for device in {leaf.device for leaf in work.leaves.values()}:
        timing.synchronize(device)
    found = {"search_s": time.perf_counter() - start}
    work.reset()
    return replace(work, figures={**work.figures, **found})


def names(task: Task[..., Any], *traits: str) -> list[str]:
    """Names of a task's rivals that have all these traits, in the order they were registered."""
    return [n for (t, n), r in RIVALS.items() if t == task and r.traits.issuperset(traits)]


def chosen(task: Task[..., Any], wanted: Iterable[str]) -> list[str]:
    """Names of rivals. `all` stands for the task's rivals but those of the trait `on request`;
    `light` leaves out also bounds, and those of the trait `slow to set up` at each new shape.
    """
    left_out = {"all": {"on request"}, "light": {"on request", "slow to set up", "bound"}}
    every = {word: [n for n in names(task) if not traits & get(task, n).traits]
             for word, traits in left_out.items()}  # fmt: skip
    chosen_names = [name for word in wanted for name in every.get(word, [word])]
    return [get(task, name).name for name in dict.fromkeys(chosen_names)]
