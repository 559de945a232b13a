"""Under load: how fast, and at what energy, a function runs when the card never rests.

Training keeps a card at its power limit, and the clock falls until the power fits. So each function
works alone for about a second, heated first.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fusedlib.bench import machine, timing
from fusedlib.bench.statistics import summarize
from fusedlib.bench.turns import Turn

# A card that rested is heated; between two functions it settles at the next one's power.
HEAT_S, SETTLE_S, REST_S = 1.0, 0.25, 0.5
BURST_MS = 30.0


@dataclass
class Load:
    """Turns that last for seconds, one after the other on a device. What a turn issues must not
    wait for the card, or it rests between two calls.
    """

    device: str
    busy_until: float = float("-inf")

    def turn(self, turn: Turn, seconds: float) -> Turn:
        """Another turn for so many seconds, after heating; `figures` as of `under_load`."""
        figures = {**turn.figures, "in_turns": False}

        def run() -> dict[str, float]:
            rested = time.perf_counter() - self.busy_until > REST_S
            heat_s = HEAT_S if rested else SETTLE_S
            figures.update(under_load(turn, self.device, heat_s, seconds))
            self.busy_until = time.perf_counter()
            return {"total": figures["burst_median_ms"]}

        return replace(turn, run=run, figures=figures, issue=None)


def under_load(turn: Turn, device: str, heat_s: float, seconds: float) -> dict[str, Any]:
    """Run a turn alone without a pause for `heat_s`, then measure `seconds` of the same.

    Returns:
        Per call `burst_median_ms`, with the other statistics and every burst's sample, and
        `joules`; the mean `power_w` and the median clock `sm_mhz` while it was measured.
    """
    issue = turn.issue or turn.run

    def once() -> None:
        turn.reset()
        issue()

    once_ms = timing.second_call_ms(once, device)
    calls = max(1, round(BURST_MS / max(once_ms, 1e-3)))
    load = partial(timing.sustained, once, device=device, calls=calls)
    if heat_s > once_ms / 1e3:  # that call has heated too
        load(heat_s=heat_s - once_ms / 1e3, seconds=0.0)
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
