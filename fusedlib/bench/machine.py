"""What a number was measured on: hardware, software, and the card's state at the time."""

import hashlib
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

LOOK_S = 0.004
NAME = "FUSEDLIB_MACHINE"
"""Variable that names this machine; recorded machines are named, visitors' are not."""


@dataclass(frozen=True)
class Machine:
    """Facts about machine and software; what cannot be found out is None.

    `environment` identifies the kind of machine: it changes when a driver or a version does, not
    with the host, its boot or its GPU, which `host`, `boot_id` and `gpu_uuid` tell apart.
    """

    key: str
    environment: str
    host: str
    boot_id: str | None
    gpu_uuid: str | None
    device_type: str
    device_name: str
    device_count: int
    device_memory_gib: float | None
    compute_capability: str | None
    driver: str | None
    cuda: str | None
    torch: str | None
    triton: str | None
    python: str
    numpy: str | None
    cpu: str | None
    cpu_cores: int | None
    memory_gib: float | None
    os: str
    max_sm_clock_mhz: int | None
    power_limit_w: float | None

    def as_dict(self) -> dict[str, Any]:
        """The facts as a flat dictionary, all but the name: rows lie in a folder of that name."""
        return {name: value for name, value in asdict(self).items() if name != "key"}


def device_type() -> str:
    """`"cuda"`, `"mps"` or `"cpu"`: the best that torch can use, without making a CUDA context."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def version_of(package: str) -> str | None:
    """Version of an installed package, None when it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def slug(name: str) -> str:
    """A name that is safe as a folder on every system: letters, digits, dots and dashes."""
    text = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")
    return text[:60].rstrip("-.") or "unknown-" + hashlib.sha256(name.encode()).hexdigest()[:8]


@cache
def key() -> str:
    """Name of this machine's folder: `$FUSEDLIB_MACHINE`, else device and host name."""
    given = os.environ.get(NAME)
    return slug(given) if given else f"{slug(_device_name())}-{slug(platform.node())}"


def card() -> str:
    """Name of this type of card, whatever its host: "nvidia-h100" of "NVIDIA H100 80GB HBM3", and
    of no slice of one and no other H100.
    """
    return slug(re.sub(r" 80GB HBM3$", "", _device_name()))


def label(name: str) -> str:
    """A machine's name for people: "H200" of "nvidia-h200"; others stay as they are."""
    return name.removeprefix("nvidia-").upper() if name.startswith("nvidia-") else name


@cache
def describe() -> Machine:
    """The description of this machine. Never raises: a missing fact is None."""
    static: dict[str, Any] = {
        "device_type": device_type(),
        "device_name": _device_name(),
        **_gpu_facts(),
        **{package: version_of(package) for package in ("torch", "triton", "numpy")},
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpu_cores": _cores(),
        "memory_gib": _memory_gib(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    digest = hashlib.sha256(repr(sorted(static.items())).encode()).hexdigest()[:12]
    return Machine(
        key=key(), environment=digest, host=platform.node(), boot_id=_boot_id(),
        gpu_uuid=_gpu_uuid(), **static,
    )  # fmt: skip


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _gpu_uuid() -> str | None:
    with _nvml() as (nvml, handle):
        return None if handle is None else _text(_ask(nvml.nvmlDeviceGetUUID, handle))


def _cpu_name() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
        if model := re.search(r"model name\s*:\s*(.+)", text):
            return model[1].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return platform.processor() or None


@cache
def _device_name() -> str:
    kind = device_type()
    if kind == "cuda":
        with _nvml() as (nvml, handle):
            if handle is not None:
                return _text(nvml.nvmlDeviceGetName(handle))
        import torch

        return torch.cuda.get_device_name()
    return _cpu_name() or platform.machine() or "unknown device"


def _gpu_facts() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "device_count": torch.cuda.device_count() if device_type() == "cuda" else 1,
        "cuda": torch.version.cuda,
        **dict.fromkeys(
            ("device_memory_gib", "compute_capability", "driver",
             "max_sm_clock_mhz", "power_limit_w")
        ),
    }  # fmt: skip
    with _nvml() as (nvml, handle):
        if handle is None:
            return facts
        facts["driver"] = _text(_ask(nvml.nvmlSystemGetDriverVersion))
        memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        facts["device_memory_gib"] = memory and round(memory.total / 2**30, 1)
        capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        facts["compute_capability"] = capability and "{}.{}".format(*capability)
        facts["max_sm_clock_mhz"] = _ask(nvml.nvmlDeviceGetMaxClockInfo, handle, 1)
        limit = _ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        facts["power_limit_w"] = limit and limit / 1000
    return facts


def conditions(when: str) -> dict[str, Any]:
    """State of the NVIDIA card now, as `sm_clock_before_mhz` and so on; empty without one."""
    with _nvml() as (nvml, handle):
        if handle is None:
            return {}
        power = _ask(nvml.nvmlDeviceGetPowerUsage, handle)
        limit = _ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return {
            f"sm_clock_{when}_mhz": _ask(nvml.nvmlDeviceGetClockInfo, handle, 1),
            f"memory_clock_{when}_mhz": _ask(nvml.nvmlDeviceGetClockInfo, handle, 2),
            f"power_{when}_w": power and power / 1000,
            f"power_limit_{when}_w": limit and limit / 1000,
            f"temperature_{when}_c": _ask(nvml.nvmlDeviceGetTemperature, handle, 0),
        }


@cache
def memory_bytes_per_s() -> float | None:
    """What the first card's memory can move at its highest clock; None where nobody knows."""
    with _nvml() as (nvml, handle):
        if handle is None:
            return None
        mhz = _ask(nvml.nvmlDeviceGetMaxClockInfo, handle, 2)
        bits = _ask(nvml.nvmlDeviceGetMemoryBusWidth, handle)
        return 2 * mhz * 1e6 * bits / 8 if mhz and bits else None  # two transfers a clock


def others_on_card(most_used_gib: float) -> str:
    """What else runs on the first visible card, for people; empty where nothing does.

    Args:
        most_used_gib: memory in use that a card on which nothing runs may show.
    """
    with _nvml() as (nvml, handle):
        if handle is None:
            return ""
        running = _ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        others = [str(process.pid) for process in running if process.pid != os.getpid()]
        if others:
            return f"processes {', '.join(others)} run"
        memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        used = memory.used / 2**30 if memory else 0.0
        return f"somebody uses {used:.1f} GiB" if used > most_used_gib else ""


@dataclass
class Energy:
    """What the card used while a block ran; None where it does not tell.

    Attributes:
        joules: between the first and the last step that its counter made in the block.
        seconds: between these steps, so that their quotient is the power whatever the counter's
            period; of the whole block where it made fewer than two.
        sm_mhz: the multiprocessors' clock, median of what NVML said while the block ran.
    """

    joules: float | None = None
    seconds: float = 0.0
    sm_mhz: float | None = None

    @property
    def power_w(self) -> float | None:
        """Joules a second."""
        return None if self.joules is None else self.joules / self.seconds


class _Look(NamedTuple):
    """One look at the card: the host's seconds, the counter in mJ, the clock in MHz."""

    at: float
    energy_mj: int | None
    sm_mhz: int | None


@contextmanager
def energy() -> Iterator[Energy]:
    """Measure the first card's energy and clock over a block; a thread asks NVML every few ms."""
    used = Energy()
    looks: list[_Look] = []
    over = threading.Event()
    with _nvml() as (nvml, handle):

        def look() -> None:
            count = getattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", None)
            answers = count and _ask(count, handle), _ask(nvml.nvmlDeviceGetClockInfo, handle, 1)
            looks.append(_Look(time.perf_counter(), *answers))

        def watch() -> None:
            while not over.wait(LOOK_S):
                look()

        watching = threading.Thread(target=watch, daemon=True)
        begin = time.perf_counter()
        if handle is not None:
            look()
            watching.start()
        try:
            yield used
        finally:
            over.set()
            if handle is not None:
                watching.join()
                look()
    used.seconds = time.perf_counter() - begin
    _summed(used, looks)


def _summed(used: Energy, looks: list[_Look]) -> None:
    clocks = [look.sm_mhz for look in looks if look.sm_mhz is not None]
    used.sm_mhz = statistics.median(clocks) if clocks else None
    counted = [look for look in looks if look.energy_mj is not None]
    steps = [late for early, late in pairwise(counted) if late.energy_mj != early.energy_mj]
    ends = steps if len(steps) > 1 else counted
    if len(ends) > 1:
        first, last = ends[0], ends[-1]
        used.joules = (last.energy_mj - first.energy_mj) / 1e3  # type: ignore[operator]
        used.seconds = last.at - first.at


@contextmanager
def _nvml() -> Iterator[tuple[Any, Any]]:
    """NVML and the handle of the first visible card, or (None, None) where there is none."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:
        yield None, None
        return
    try:
        yield nvml, _ask(_first_visible, nvml)
    finally:
        nvml.nvmlShutdown()


def _first_visible(nvml: Any) -> Any:
    """The handle of the card that torch calls cuda:0. NVML counts by the bus, CUDA by speed: where
    cards differ, and where torch has begun anyway, torch says which one it is.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if visible.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(visible)
    import torch

    cards = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
    if torch.cuda.is_initialized() or len({nvml.nvmlDeviceGetName(card) for card in cards}) > 1:
        uuid = torch.cuda.get_device_properties(0).uuid
        for kind in ("GPU", "MIG"):
            if (found := _ask(nvml.nvmlDeviceGetHandleByUUID, f"{kind}-{uuid}")) is not None:
                return found
    return cards[int(visible) if visible else 0]


def _ask(question: Any, *args: Any) -> Any:
    """NVML's answer, None where the card or the driver does not give one."""
    try:
        return question(*args)
    except Exception:
        return None


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
