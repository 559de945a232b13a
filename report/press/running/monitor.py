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
        self._stream = stream or sys.stderr
        self._notebooks = notebooks
        self._number = 0
        self._name = ""
        self._cell = self._cells = 0
        self._progress_file = Path()
        self._bar = tqdm(
            total=total_cells, unit="cell", file=self._stream, dynamic_ncols=True, leave=False,
            bar_format="{bar:16} {elapsed} {desc}", disable=not self._stream.isatty(),
        )  # fmt: skip

    def say(self, text: str) -> None:
        """A line that stays."""
        self._bar.write(text, file=self._stream)
        self._stream.flush()

    def skip(self, name: str, why: str) -> None:
        """A notebook that need not run."""
        self._number, self._name = self._number + 1, name
        self._say_of_notebook(why)

    @contextmanager
    def notebook(self, name: str, cells: int, progress_file: Path) -> Iterator[None]:
        """While a notebook runs; `progress_file` is where its sweeps say which case they are at."""
        self._number, self._name = self._number + 1, name
        self._cell, self._cells, self._progress_file = 0, cells, progress_file
        self._say_of_notebook(f"started, {cells} cells")
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
        self._progress_file.unlink(missing_ok=True)  # of an earlier cell's sweep
        self._cell += 1
        if self._cell > 1:
            self._bar.update()
        self._bar.set_description_str(self.status())

    def ended(self, what: str) -> None:
        """A notebook has ended, well or badly."""
        self._bar.update(max(0, self._cells - max(0, self._cell - 1)))
        self._say_of_notebook(what)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()

    def status(self) -> str:
        """Where the run is, in one line."""
        cell = f"cell {self._cell}/{self._cells}"
        parts = (self._head(), self._name, cell, last_case(self._progress_file))
        return " ".join(filter(None, parts))

    def _head(self) -> str:
        return f"[{self._number}/{self._notebooks}]"

    def _say_of_notebook(self, text: str) -> None:
        self.say(f"{self._head()} {self._name}: {text}")

    def _watch(self, stop: threading.Event) -> None:
        news = time.monotonic()
        while not stop.wait(POLL_S):
            self._bar.set_description_str(self.status())
            if self._bar.disable and time.monotonic() - news >= NEWS_S:
                news = time.monotonic()
                self.say(self.status())


def last_case(path: Path) -> str:
    """The newest complete line of a sweep's progress file, for people; empty without one."""
    try:
        line = json.loads(path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2])
        number = min(line["done"] + 1, line["total"])
        return f"case {number}/{line['total']} {line['case']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
