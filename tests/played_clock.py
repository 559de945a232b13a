"""A clock that tests set: what they say of times holds on a machine of any speed."""


class PlayedClock:
    """Stands for the module `time` where it is put; it goes on only where something sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s

    time = monotonic = perf_counter

    def perf_counter_ns(self) -> int:
        return round(1e9 * self.now_s)
