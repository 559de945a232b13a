"""The clock and its statistics."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedlib.bench import statistics, timing
from played_clock import PlayedClock
from study import trainers


@pytest.fixture
def clock(monkeypatch) -> PlayedClock:
    played = PlayedClock()
    monkeypatch.setattr(timing, "time", played)
    return played


def test_sections_time_parts_of_the_same_step(clock):
    step = trainers.Sections("cpu")
    for name, pause in (("forward", 0.02), ("backward", 0.04)):
        with step.section(name):
            clock.sleep(pause)
        clock.sleep(0.01)
    expected = {"forward": 20, "backward": 40, "total": 70}
    assert step.elapsed_ms() == pytest.approx(expected)


def test_in_turns_takes_turns_and_keeps_every_sample():
    order = []
    times = timing.in_turns(
        {n: (lambda n=n: order.append(n)) for n in "ABC"},
        device="cpu", warmup=2, repetitions=3, flush_l2=True,
    )  # fmt: skip
    assert "".join(order) == "ABCBCACABCBAACB"
    assert {n: len(t.samples_ms) for n, t in times.items()} == {"A": 3, "B": 3, "C": 3}
    assert not times["A"].flush_l2, "there is no L2 to flush on a CPU, and the row must say so"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12])
def test_each_is_as_often_in_each_place_and_behind_each_other_one(count):
    rounds = [timing.order(range(count), index) for index in range(count * (1 + count % 2))]
    assert all(sorted(one) == [*range(count)] for one in rounds)
    places = Counter(place for one in rounds for place in enumerate(one))
    pairs = Counter(pair for one in rounds for pair in pairwise(one))
    assert len(places) == count**2 and len({*places.values()}) == 1
    assert len(pairs) == count * (count - 1) and len({*pairs.values()}) <= 1


@pytest.mark.parametrize(
    ("returned", "total"),
    [({"total": 5.0, "forward": 2}, 5.0), ({"y": torch.ones(3)}, None), ({"total": None}, None)],
)
def test_a_mapping_of_numbers_tells_of_parts_and_a_model_s_output_does_not(clock, returned, total):
    times = timing.in_turns(
        {"A": lambda: clock.sleep(0.007) or returned},
        device="cpu", warmup=0, repetitions=2, flush_l2=False,
    )["A"]  # fmt: skip
    assert times.samples_ms == pytest.approx([total or 7.0] * 2)
    assert times.parts == ({"forward": (2.0, 2.0)} if total else {})


def test_preparation_stays_outside_the_clock(clock):
    times = timing.in_turns(
        {"quick": lambda: None}, device="cpu", warmup=0, repetitions=3, flush_l2=False,
        prepare=lambda _: clock.sleep(0.03),
    )  # fmt: skip
    assert times["quick"].samples_ms == (0, 0, 0)


@pytest.mark.parametrize("bad", [{"warmup": -1}, {"repetitions": 0}, {"work": {}}])
def test_nothing_to_time_is_an_error(bad):
    options = {"work": {"a": print}, "warmup": 0, "repetitions": 1} | bad
    with pytest.raises(ValueError, match="nothing to time"):
        timing.in_turns(options.pop("work"), device="cpu", flush_l2=False, **options)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=40))
def test_bootstrap_interval_holds_the_median_within_the_samples(samples):
    got = statistics.bootstrap_median(samples)
    assert min(samples) <= got.low <= got.value <= got.high <= max(samples)
    assert got == statistics.bootstrap_median(samples)


def test_bootstrap_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        got = statistics.bootstrap_median(rng.lognormal(size=30))
        hits += got.low <= 1.0 <= got.high
    assert 0.88 <= hits / 200 <= 1.0


def test_ratio_comes_from_pairs_so_that_drift_cancels():
    drift = np.linspace(1, 10, 50)
    got = statistics.paired_ratio((2 * drift).tolist(), drift.tolist())
    assert (got.low, got.value, got.high) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="equally many"):
        statistics.paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one sample"):
        statistics.bootstrap_median([])


def test_a_clock_marks_the_stream_of_its_own_card(monkeypatch):
    """Not of the current one, which would be done when the launch is."""
    marked = []

    class Event:
        def __init__(self, enable_timing):
            """Nothing."""

        def record(self, stream="of the current card"):
            marked.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    timing.clock_for("cuda:1").mark()
    assert marked == ["of cuda:1"]


@pytest.mark.gpu
def test_cuda_clock_sees_the_device_not_the_launch():
    x = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    times = timing.in_turns(
        {"product": lambda: x @ x}, device="cuda", warmup=3, repetitions=5, flush_l2=True
    )
    # 2 · 8192³ operations cannot take less than a millisecond on any card of today.
    assert min(times["product"].samples_ms) > 1
    assert times["product"].flush_l2
