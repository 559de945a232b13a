"""An allocator's history: a trace read, categories that add up, and what a peak is of."""

import pytest

from study import allocator
from study.allocator import CATEGORIES, History


def a_pass():
    """weights 1; forward: saved 2 and 3, temporary 4; backward: gradient 5; update: state 6."""
    changes = [
        (1, 100),
        (2, 20), (4, 7), (3, 10), (4, 0),
        (5, 100), (2, 0), (3, 0),
        (6, 200), (7, 50), (7, 0), (8, 3),
    ]  # fmt: skip
    moments = {"built": 1, "begin 1": 1, "forward 1": 5, "backward 1": 8, "step 1": 12}
    named = [
        ("built", "weights", {1}), ("backward 1", "gradients", {5}), ("step 1", "optimizer", {6}),
    ]  # fmt: skip
    return History(changes, moments), named, [("begin 1", "forward 1")]


def test_categories_add_up_to_what_is_held_at_every_moment():
    watched, *known = a_pass()
    held = allocator.live(allocator.classify(watched, *known), len(watched.changes))
    assert list(held) == list(CATEGORIES)
    there: dict[int, int] = {}
    for at, (address, nbytes) in enumerate(watched.changes):
        there[address] = nbytes
        assert sum(int(h[at]) for h in held.values()) == sum(there.values()), at
    assert held["optimizer"].tolist() == [0] * 8 + [200] * 4
    peak = {name: mib * 2**20 for name, mib in allocator.at_peak(held).items()}
    assert peak["peak_mib"] == 450 and peak["peak_temporaries_mib"] == 50


# --- what CUDA tells -----------------------------------------------------------------------------


def alloc(address, size, function="linear"):
    return {"action": "alloc", "addr": address, "size": size, "frames": [{"name": function}]}


def test_a_trace_is_read_with_its_moments():
    trace = [
        {"action": "segment_alloc", "addr": 1, "size": 99},
        alloc(1, 8),
        alloc(2, 4, "_sentinel"),
        {"action": "free_completed", "addr": 2, "size": 4},
        alloc(2, 16),
        {"action": "free_requested", "addr": 1, "size": 8},
        {"action": "free_completed", "addr": 1, "size": 8},
        {"action": "alloc", "addr": 3, "size": 32},
        alloc(4, 4, "_sentinel"),
    ]
    watched = allocator.read_trace(trace, ["built", "end"])
    assert watched.moments == {"built": 1, "end": 4}
    assert watched.changes == [(1, 8), (2, 16), (1, 0), (3, 32)]


def test_a_trace_that_was_cut_off_is_refused():
    with pytest.raises(ValueError, match="lacks the moments end"):
        allocator.read_trace([alloc(1, 4, "_sentinel")], ["built", "end"])
