"""An allocator's history: a trace read, categories that add up, a thinning that keeps the peak."""

import numpy as np
import pytest
import torch

from study import allocator, paths
from study.allocator import (
    CATEGORIES,
    Casts,
    Change,
    History,
    KnownAddresses,
    addresses_of,
    watching,
)
from study.models.transformer import RMSNorm


def a_pass():
    """weights 1; forward: saved 2, cast 3, temporary 4; backward: gradient 5; update: state 6."""
    changes = [
        Change(1, 100),
        Change(2, 20), Change(4, 7), Change(3, 10), Change(4, 0),
        Change(5, 100), Change(2, 0), Change(3, 0),
        Change(6, 200), Change(7, 50), Change(7, 0), Change(8, 3),
    ]  # fmt: skip
    moments = {"built": 1, "begin 1": 1, "forward 1": 5, "backward 1": 8, "step 1": 12}
    addresses = KnownAddresses(
        [("built", "weights", {1}), ("backward 1", "gradients", {5}), ("step 1", "optimizer", {6})],
        [("begin 1", "forward 1", {3})],
    )  # fmt: skip
    return History(changes, moments), addresses


def test_every_block_is_what_its_address_was_known_to_be():
    actual = {b.address: b.category for b in allocator.classify(*a_pass())}
    assert actual == {
        1: "weights", 2: "activations", 3: "casts", 4: "temporaries", 5: "gradients",
        6: "optimizer", 7: "temporaries", 8: "other",
    }  # fmt: skip


def test_an_address_that_comes_again_is_another_block():
    watched = History([Change(1, 8), Change(1, 0), Change(1, 16), Change(1, 4)], {"built": 1})
    actual = allocator.classify(watched, KnownAddresses([("built", "weights", {1})]))
    assert [(b.nbytes, b.start, b.end, b.category) for b in actual] == [
        (8, 0, 1, "weights"), (16, 2, 3, "temporaries"), (4, 3, None, "other"),
    ]  # fmt: skip


def test_categories_add_up_to_what_is_held_at_every_moment():
    watched, addresses = a_pass()
    held = allocator.live(allocator.classify(watched, addresses), len(watched.changes))
    assert list(held) == list(CATEGORIES)
    there: dict[int, int] = {}
    for at, change in enumerate(watched.changes):
        there[change.address] = change.nbytes
        assert sum(int(h[at]) for h in held.values()) == sum(there.values()), at
    assert held["optimizer"].tolist() == [0] * 8 + [200] * 4


def test_thinning_keeps_the_peak_the_moments_and_both_ends():
    total = np.random.default_rng(0).integers(0, 1000, 5000)
    total[3210] = 10_000
    kept = allocator.thinned(total, [17, 4321, 4999], 400)
    assert {0, 17, 3210, 4321, 4999} <= set(kept.tolist())
    assert len(kept) <= 400 and (np.diff(kept) > 0).all()
    assert allocator.thinned(total[:30], [], 400).tolist() == list(range(30))
    # No stretch hides what is within it.
    assert abs(int(total[kept].min()) - int(total.min())) == 0


# --- what CUDA tells -----------------------------------------------------------------------------


def frame(name, file, line=7):
    return {"name": name, "filename": file, "line": line}


def alloc(address, size, *frames):
    return {"action": "alloc", "addr": address, "size": size, "frames": list(frames)}


MARK = frame("_sentinel", allocator.__file__)
MODEL = frame("forward", str(paths.NOTEBOOKS / "study" / "models" / "transformer.py"))
TORCH = frame("linear", "/x/site-packages/torch/nn/functional.py", 9)


def test_a_trace_is_read_with_its_moments_and_stacks():
    trace = [
        {"action": "segment_alloc", "addr": 1, "size": 99},
        alloc(1, 8, TORCH, MODEL),
        alloc(2, 4, MARK, MODEL),
        {"action": "free_completed", "addr": 2, "size": 4},
        alloc(2, 16, TORCH),
        {"action": "free_requested", "addr": 1, "size": 8},
        {"action": "free_completed", "addr": 1, "size": 8},
        alloc(3, 32),
        alloc(4, 4, MARK),
    ]
    watched = allocator.read_trace(trace, ["built", "end"])
    assert watched.moments == {"built": 1, "end": 4}
    assert [(c.address, c.nbytes) for c in watched.changes] == [(1, 8), (2, 16), (1, 0), (3, 32)]
    assert watched.changes[0].where == "notebooks/study/models/transformer.py:7 forward"
    assert watched.changes[1].where == "torch/nn/functional.py:9 linear"
    assert watched.changes[3].where.startswith("no Python frame")


def test_a_trace_that_was_cut_off_is_refused():
    with pytest.raises(ValueError, match="lacks the moments end"):
        allocator.read_trace([alloc(1, 4, MARK)], ["built", "end"])
    with pytest.raises(ValueError, match="more sentinels than moments"):
        allocator.read_trace([alloc(1, 4, MARK)], [])


# --- what a CPU tells ----------------------------------------------------------------------------


def test_a_cpu_s_history_has_every_block_and_moment():
    with watching(torch.device("cpu")) as watch:
        kept = torch.empty(1000)
        watch.mark("kept")
        gone = torch.empty(500)
        del gone
        watch.mark("gone")
    actual = allocator.blocks(watch.history)
    at = watch.history.moments
    assert [b.nbytes for b in actual if b.lives(at["kept"])] == [4 * kept.numel()]
    assert [b.nbytes for b in actual if b.lives(at["gone"])] == [4 * kept.numel()]
    assert 2000 in [b.nbytes for b in actual]


def test_casts_of_weights_are_noted_and_forgotten_when_their_address_comes_again():
    norm = RMSNorm(8, dtype=torch.bfloat16)
    with Casts(norm.parameters()) as casts:
        norm(torch.ones(3, 8, dtype=torch.bfloat16))
        cast = norm.weight.to(torch.float32)
        norm.weight.detach()
    assert addresses_of([cast]) <= casts.addresses
    assert not addresses_of(norm.parameters()) & casts.addresses
