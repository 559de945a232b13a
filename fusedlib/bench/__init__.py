"""Timing utilities for whoever times a kernel or a training step of their own.

A rival is one decorated function (`rivals`); a study lists its cases, flat dictionaries (`cases`).
`race` holds every rival against the reference (`check`), then times all in turns (`timing`), from
Python or as CUDA graphs (`cuda_graphs`); `sustained` does so at the card's power limit, with
energy; `step_clock` times whole training steps. `sweep` measures single cases, `fresh` in processes
of their own. Whatever becomes of a case it gets a row (`attempt`), appended at once to a recording
(`results`, `jsonl`) that says on which machine, with which code (`machine`, `provenance`).
`roofline` says what the device can reach at all, `statistics` what samples say.
"""
