"""Under load: how fast, and at what energy, a rival runs when the card never rests.

Training keeps a card at its power limit, and the clock falls until the power fits. So each rival
works alone for about a second, heated first, and all of a heat do so in rounds: A B C, then C B A,
so that drift hits all alike. A round is a heat of its own in the one race.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusedlib.bench import code, machine, race, rivals, swiglu, timing
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.race import Case, Entry, Event, Lap
from fusedlib.bench.statistics import summarize

EXPERIMENT = "sustained"
ROUNDS = 2
# A card that rested is heated; between two rivals it settles at the next one's power.
HEAT_S, SETTLE_S, REST_S = 1.0, 0.25, 0.5
BURST_MS = 30.0


def cases(
    shapes: Sequence[str], asked: Sequence[str], *, seconds: float, device: str, group: str,
    dtype: str = "bfloat16", directions: Sequence[str] = ("forward", "forward+backward"),
    rounds: int = ROUNDS,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a shape, direction, round and rival; every second round in the opposite order.

    Args:
        shapes: "tokens·hidden·intermediate".
        asked: names of rivals.
        seconds: of a measurement, after heating.
        device: where it runs.
        group: what the shapes are, for the notebook's selections.
        dtype: of inputs, weights and results.
        directions: "forward", "forward+backward".
        rounds: measurements of each.

    Raises:
        ValueError: as `swiglu.cases`.
    """
    names = rivals.chosen(swiglu.TASK, asked)
    found = []
    for shape in shapes:
        for direction in directions:
            for number in range(1, rounds + 1):
                listed = swiglu.cases(
                    [shape], names if number % 2 else names[::-1], dtype=dtype, device=device,
                    repetitions=1, directions=[direction], group=group,
                )  # fmt: skip
                own = {"experiment": EXPERIMENT, "round": number, "seconds": seconds}
                found += [{**case, **own} for case in listed]
    return found


class Course:
    """Another course, whose laps last for a case's `seconds`."""

    def __init__(self, course: race.Course, device: str) -> None:
        self.course, self.device = course, device
        self.busy_until = float("-inf")

    def enter(self, case: Case) -> Entry:
        """As in turns: held against the truth first."""
        entry = self.course.enter(case)
        return Entry(entry.figures, lambda heat: self._lasting(entry.lap(heat), heat["seconds"]))

    def _lasting(self, lap: Lap, seconds: float) -> Lap:
        figures = {**lap.figures, "in_turns": False}

        def run() -> dict[str, float]:
            rested = time.perf_counter() - self.busy_until > REST_S
            heat_s = HEAT_S if rested else SETTLE_S
            figures.update(under_load(lap, self.device, heat_s, seconds))
            self.busy_until = time.perf_counter()
            return {"total": figures["burst_median_ms"]}

        return Lap(run, lap.prepare, lap.reset, figures)


def event(turns: Event) -> Event:
    """How a study that races in turns races under load; its cases tell their `seconds`."""

    def available(case: Case) -> None:
        turns.available(case)
        if torch.device(case["device"]).type != "cuda":
            raise Unavailable("sustained runs need a CUDA GPU")

    return replace(
        turns, course=lambda case: Course(turns.course(case), case["device"]), available=available,
        warmup=0, rounds=lambda case: 1, seconds=0.0, most=None, bursts=False,
    )  # fmt: skip


def under_load(lap: Lap, device: str, heat_s: float, seconds: float) -> dict[str, Any]:
    """Run a lap alone without a pause for `heat_s`, then measure `seconds` of the same.

    Returns:
        Per call `burst_median_ms`, with the other statistics and every burst's sample, and
        `joules`; the mean `power_w` and the median clock `sm_mhz` while it was measured.
    """

    def once() -> None:
        lap.reset()
        lap.run()

    calls = max(1, round(BURST_MS / max(_second_ms(once, device), 1e-3)))
    load = partial(timing.sustained, once, device=device, calls=calls)
    load(heat_s=heat_s, seconds=0.0)
    with machine.energy() as used:
        taken = load(heat_s=0.0, seconds=seconds)
        timing.synchronize(device)
    figures = summarize(taken.samples_ms, "burst")
    power, mean_s = used.power_w, figures["burst_mean_ms"] / 1e3
    joules = None if power is None else power * mean_s
    return {
        **figures, "burst_calls": calls, "heat_s": heat_s, "power_w": power, "joules": joules,
        "sm_mhz": used.sm_mhz,
    }  # fmt: skip


def _second_ms(once: Any, device: str) -> float:
    """ms of the second of two calls."""
    taken = 0.0
    for _ in range(2):
        timing.synchronize(device)
        begin = time.perf_counter()
        once()
        timing.synchronize(device)
        taken = (time.perf_counter() - begin) * 1e3
    return taken


def study_code() -> code.Code:
    """Fingerprints of such rows."""
    turns = swiglu.study_code()
    harness = (*turns.harness, machine.Energy, machine.energy, under_load)
    return code.Code(harness, (*turns.problem, Course), turns.rival)


EVENT = event(swiglu.EVENT)
