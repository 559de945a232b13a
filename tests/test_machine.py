"""Facts about the machine: complete, safe as names, null where there is nothing."""

import collections
import os
import sys
import types
from itertools import chain, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedlib.bench import machine
from played_clock import PlayedClock
from processes import wait_for


@pytest.fixture(autouse=True)
def _forget():
    cached = (machine.key, machine.describe, machine._device_name)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


Process = collections.namedtuple("Process", "pid")


def fake_nvml(processes, used_gib):
    return types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetComputeRunningProcesses=lambda h: list(map(Process, processes)),
        nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(used=used_gib * 2**30),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "used", "description"),
    [
        ([], 0.6, ""),
        ([os.getpid()], 1.5, ""),
        ([os.getpid(), 11, 12], 0.6, "processes 11, 12 run"),
        ([], 40.0, "somebody uses 40.0 GiB"),  # in another container: no process is seen
    ],
)
def test_others_on_the_card_are_seen_by_process_or_by_memory(
    monkeypatch, processes, used, description
):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(processes, used))
    assert machine.others_on_card(2.0) == description
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.others_on_card(2.0) == "", "nothing is known"


def test_conditions_come_from_nvml_and_survive_what_it_does_not_know(monkeypatch):
    def unknown(*_):
        raise RuntimeError("not supported")

    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetPowerUsage=lambda h: 123000,
        nvmlDeviceGetClockInfo=lambda h, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetEnforcedPowerLimit=unknown, nvmlDeviceGetTemperature=lambda h, kind: 35,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert machine.conditions("after") == {
        "sm_clock_after_mhz": 1980, "memory_clock_after_mhz": 3201, "power_after_w": 123.0,
        "power_limit_after_w": None, "temperature_after_c": 35,
    }  # fmt: skip


def test_energy_is_taken_between_steps_of_the_counter(monkeypatch):
    """A counter that moves every 50 ms: by the block's ends the power would be off by its share."""
    clock = PlayedClock()
    monkeypatch.setattr(machine, "time", clock)

    def steps(_):
        clock.now_s = min(clock.now_s + machine.LOOK_S, 0.33)
        return 1000 + int(clock.now_s / 0.05) * 35_000  # 700 W

    clocks = chain([345, 1400, 1410], repeat(1420))
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetTotalEnergyConsumption=steps,
        nvmlDeviceGetClockInfo=lambda h, kind: next(clocks),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with machine.energy() as used:
        wait_for(lambda: clock.now_s == 0.33)
    assert used.power_w == pytest.approx(700, rel=0.02)
    assert used.sm_mhz == 1420 and used.seconds == pytest.approx(0.25, abs=machine.LOOK_S)
    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", None)
    with machine.energy() as used:
        pass
    assert (used.joules, used.power_w) == (None, None)


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("../../etc/passwd", "etc-passwd"),
        ("Ünïcode / Größe\n*?", "n-code-gr-e"),
        ("日本", "unknown-cf2abf0c"),
    ],
)
def test_odd_names_become_folders(name, safe, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_MACHINE", name)
    assert machine.key() == machine.slug(name) == safe


@settings(deadline=None)
@given(st.text(max_size=200))
def test_every_slug_is_a_plain_folder_name(name):
    text = machine.slug(name)
    assert text
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert text[0] not in ".-"
    assert len(text) <= 60
