"""The clock of whole steps, on a device and a host whose paces the test sets."""

from types import SimpleNamespace

import pytest
import torch

from fusedlib.bench import timing
from study import trainers

LIMITS = {"seconds": 0.5, "steps": 10}
PARTS = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1}


class Simulated(trainers.Trainer):
    """A device that works off what a host issues, each at a pace in ms a step, and their clocks."""

    def __init__(self, device_ms, host_ms=1.0):
        self.device_ms, self.host_ms = device_ms, host_ms
        self.device = torch.device("cuda")
        self.now = self.idle_at = 0.0  # the host's time, and when the device is done; ms
        self.issued = self.synchronised = 0

    # what a trainer has
    def issue(self, section=None):
        pace = self.device_ms(self.issued) if callable(self.device_ms) else self.device_ms
        self.issued += 1
        sections = trainers.Sections("cuda")
        for name, share in PARTS.items():
            with sections.section(name):
                self.now += share * self.host_ms
                self.idle_at = max(self.idle_at + share * pace, self.now)
        return sections

    # what a clock of the device has
    def mark(self):
        self.idle_at = max(self.idle_at, self.now)
        return self.idle_at

    def elapsed_ms(self, start, end):
        return end - start

    def synchronize(self, device):
        self.synchronised += 1
        self.now = max(self.now, self.idle_at)


@pytest.fixture
def simulated(monkeypatch):
    def make(*paces):
        clocked = Simulated(*paces)
        monkeypatch.setattr(timing, "clock_for", lambda device: clocked)
        monkeypatch.setattr(timing, "synchronize", clocked.synchronize)
        seconds = SimpleNamespace(perf_counter=lambda: clocked.now / 1e3)
        monkeypatch.setattr(trainers, "time", seconds)
        return clocked

    return make


def test_a_steady_step_after_a_slow_start_has_its_very_time(simulated):
    row = trainers.measure(simulated(lambda n: 300.0 if n < 2 else 30.0), **LIMITS)
    assert row["step_median_ms"] == pytest.approx(30.0)
    assert row["both_median_ms"] == pytest.approx(27.0)
    assert row["backward_median_ms"] == pytest.approx(18.0)
    assert row["optimizer_median_ms"] == pytest.approx(3.0)
    assert row["settled"]
    assert row["issue_ms"] == pytest.approx(1.0)


def test_it_waits_until_a_jump_of_the_pace_is_over(simulated):
    jump = trainers.DISCARDED + 15  # within the second block of settling
    row = trainers.measure(simulated(lambda n: 30.0 if n < jump else 44.0), **LIMITS)
    assert row["settled"]
    assert row["step_median_ms"] == pytest.approx(44.0)
    assert min(row["step_samples_ms"]) == pytest.approx(44.0)


@pytest.mark.parametrize("host_ms", [44.0, 30.0, 26.6])
def test_a_step_takes_as_long_as_the_slower_of_host_and_card(simulated, host_ms):
    row = trainers.measure(simulated(28.4, host_ms), **LIMITS)
    assert row["issue_ms"] == pytest.approx(host_ms)
    assert row["step_median_ms"] == pytest.approx(max(host_ms, 28.4))


@pytest.mark.parametrize(
    ("kernels_ms", "step_ms", "setter"),
    [(9.93, 49.9, "host"), (17.0, 41.4, "host"), (97.9, 112.0, "card"), (30.9, 32.0, "card")],
    ids=["19 % busy", "41 % busy", "88 % busy", "97 % busy"],
)
def test_who_keeps_the_other_waiting_sets_the_pace(kernels_ms, step_ms, setter):
    """The card was said to set the pace of a step in which it was 19 % busy."""
    assert trainers.pace_setter(kernels_ms, step_ms) == setter
