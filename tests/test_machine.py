"""Facts about the machine: complete, safe as names, null where there is nothing."""

import collections
import os
import sys
import types
from itertools import chain, repeat

import pytest
import torch
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


def gives(value):
    return lambda *_: value


ONE_CARD = {"nvmlDeviceGetCount": gives(1), "nvmlDeviceGetName": gives("card"),
            "nvmlDeviceGetHandleByUUID": gives(0)}  # fmt: skip
Process = collections.namedtuple("Process", "pid")


def fake_nvml(processes, used_gib):
    return types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: i, **ONE_CARD,
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


def test_the_card_is_torchs_first_whatever_the_bus_has_first(monkeypatch):
    """On a workstation whose display card sits before the one that computes."""
    uuids = {"GPU-00": 0, "GPU-11": 1}
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=gives(2),
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetHandleByUUID=uuids.__getitem__,
        nvmlDeviceGetName=["T400", "H100"].__getitem__,
        nvmlDeviceGetUUID=[*uuids].__getitem__,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "device_type", lambda: "cuda")
    first = types.SimpleNamespace(uuid="11")
    monkeypatch.setattr(torch.cuda, "get_device_properties", gives(first))
    assert (machine._device_name(), machine._gpu_uuid()) == ("H100", "GPU-11")


def test_cards_that_differ_have_folders_of_their_own(monkeypatch):
    names = [
        "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA H200",
        "NVIDIA H200 MIG 1g.18gb",
    ]  # fmt: skip
    cards = []
    for name in names:
        monkeypatch.setattr(machine, "_device_name", lambda name=name: name)
        cards.append(machine.card())
    assert len({*cards}) == len(names), cards
    assert (cards[0], cards[6]) == ("nvidia-h100", "nvidia-h200")


def test_conditions_come_from_nvml_and_survive_what_it_does_not_know(monkeypatch):
    def unknown(*_):
        raise RuntimeError("not supported")

    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: i, **ONE_CARD,
        nvmlDeviceGetPowerUsage=lambda h: 123000,
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
        nvmlDeviceGetHandleByIndex=lambda i: i, **ONE_CARD,
        nvmlDeviceGetTotalEnergyConsumption=steps,
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
