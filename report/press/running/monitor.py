"""What a run tells while it goes on: a bar on a terminal, plain lines in a log."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

POLL_S = 0.3
# A log without news for longer looks like a hang.
NEWS_S = 60.0


class Monitor:
    """Shows notebook, cell and case of a run.

    Args:
        total_cells: code cells of all notebooks that will run.
        notebooks: how many they are.
        stream: where to; a bar when it is a terminal, else lines.
    """

    def __init__(self, total_cells: int, notebooks: int, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.notebooks = notebooks
        self._number = 0
        self._name = ""
        self._cell = self._cells = 0
        self._case = self._old_case = ""
        self._progress_file = Path()
        self._bar = None
        if self.stream.isatty():
            self._bar = tqdm(
                total=total_cells, unit="cell", file=self.stream, dynamic_ncols=True, leave=False,
                bar_format="{bar:16} {elapsed} {desc}",
            )  # fmt: skip

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)

    def skip(self, name: str, why: str) -> None:
        """A notebook that need not run."""
        self._number += 1
        self.say(f"[{self._number}/{self.notebooks}] {name}: {why}")

    @contextmanager
    def notebook(self, name: str, cells: int, progress_file: Path) -> Iterator[None]:
        """While a notebook runs; `progress_file` is where its sweeps say which case they are at."""
        self._number += 1
        self._name, self._cell, self._cells, self._case = name, 0, cells, ""
        self._progress_file, self._old_case = progress_file, ""
        self.say(f"[{self._number}/{self.notebooks}] {name}: started, {cells} cells")
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(stop,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()

    def cell(self) -> None:
        """A code cell begins."""
        self._cell += 1
        self._case, self._old_case = "", last_case(self._progress_file)
        if self._bar is not None and self._cell > 1:
            self._bar.update()
        self._show()

    def ended(self, what: str) -> None:
        """A notebook has ended, well or badly."""
        if self._bar is not None:
            self._bar.update(max(0, self._cells - max(0, self._cell - 1)))
        self.say(f"[{self._number}/{self.notebooks}] {self._name}: {what}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def status(self) -> str:
        """Where the run is, in one line."""
        text = f"[{self._number}/{self.notebooks}] {self._name} cell {self._cell}/{self._cells}"
        return f"{text} {self._case}" if self._case else text

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self.status(), refresh=True)

    def _watch(self, stop: threading.Event) -> None:
        news = time.monotonic()
        while not stop.wait(POLL_S):
            newest = last_case(self._progress_file)
            # Until this cell's sweep has said something, the file ends with an earlier cell's case.
            self._case = "" if newest == self._old_case else newest
            self._show()
            if self._bar is None and time.monotonic() - news >= NEWS_S:
                news = time.monotonic()
                self.say(self.status())


def last_case(path: Path) -> str:
    """The newest complete line of a sweep's progress file, for people; empty without one."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            complete = file.read().rpartition(b"\n")[0]
        line = json.loads(complete.rpartition(b"\n")[2])
        number = min(line["done"] + 1, line["total"])
        return f"case {number}/{line['total']} {line['case']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
