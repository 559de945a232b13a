"""Timing utilities for whoever times a kernel or a training step of their own.

    from fusedlib import bench

    print(bench.compare(reference, {"mine": f, "theirs": g}, {"x": x, "w": w}, backward=True))

`compare` is the one call that most need: it checks results and gradients, times in turns, and
refuses with a reason what is wrong or too good to be true; `help(bench.compare)` has its rules. It
stands on parts that can be used alone:

    from fusedlib.bench import timing

    times = timing.in_turns(
        {"mine": lambda: mine(x), "theirs": lambda: theirs(x)}, device="cuda", warmup=3,
        repetitions=20, flush_l2=True, prepare=lambda name: timing.synchronize("cuda"),
    )
    print(times["mine"].figures()["median_ms"], times["theirs"].ratio_to(times["mine"]))

The ratio is how many times as fast as theirs mine is, with its interval; nothing is checked there.
`problem` has the truth in float64 and holds a function against it by the rule of `check`; `turns`
times all that are right, from Python or as CUDA graphs (`cuda_graphs`), and refuses what is too
good to be true (`alarms`); `sustained` does so at the card's power limit, with energy. Whatever
becomes of a function it gives a row (`attempt`). No file is written and no time is kept: every call
measures anew.

`verdict` reads a table of times or ratios that others published, and lists what cannot be so.

`machine` says on what was measured; with the extra `bench`, which brings NVML, rows have the card's
clocks and power. `statistics` says what samples say.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedlib.bench.comparison import compare
    from fusedlib.bench.verdicts import verdict

__all__ = ["compare", "verdict"]


def __getattr__(name: str) -> Any:
    """What is called by most, imported when it is asked for: the package itself needs no torch."""
    if name == "compare":
        from fusedlib.bench import comparison

        return comparison.compare
    if name == "verdict":
        from fusedlib.bench.verdicts import verdict

        return verdict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
