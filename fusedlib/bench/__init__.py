"""Timing utilities for whoever times a kernel or a training step of their own.

    from fusedlib.bench import check, timing

    times = timing.in_turns(
        {"mine": lambda: mine(x), "theirs": lambda: theirs(x)}, device="cuda", warmup=3,
        repetitions=20, flush_l2=True, prepare=lambda name: timing.synchronize("cuda"),
    )
    print(times["mine"].figures()["median_ms"], times["theirs"].ratio_to(times["mine"]))

    true = {"y": reference(x.double())}  # right first: lists what errs more than plain PyTorch may
    own, plain = (check.errors({"y": f(x)}, true) for f in (mine, reference))
    print(check.misses(own, plain, x.dtype))

The ratio is how many times as fast as theirs mine is, with its interval. `operation` and `race` do
both, with gradients, and refuse what is too good to be true (`alarms`):

    for row in race.race(RACE, cases):
        print(row.case["provider"], row.status, row.reason, row.figures.get("median_ms"))

A rival is one decorated function (`rivals`); a study lists its cases, flat dictionaries (`cases`).
`race` holds every rival against the reference (`check`), then times all in turns (`timing`), from
Python or as CUDA graphs (`cuda_graphs`); `sustained` does so at the card's power limit, with
energy; `step_clock` times whole training steps. `sweep` measures single cases, `fresh` in processes
of their own. Whatever becomes of a case it gives a row (`attempt`). No file is written and no time
is kept: every call checks and measures anew.

`machine` says on what was measured; with the extra `bench`, which brings NVML, rows have the card's
clocks and power. `roofline` says what the device can reach at all, `statistics` what samples say.
"""
