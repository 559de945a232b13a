"""What a run tells while it goes on: a line that changes on a terminal, plain lines in a log."""

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

TERMINAL_S = 0.3
LOG_S = 60.0  # a log without news for longer looks like a hang


class Monitor:
    """Shows notebook, cell and case of a run of so many notebooks."""

    def __init__(self, notebooks: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._notebooks = notebooks
        self._number = self._cell = self._cells = 0
        self._name = ""
        self._progress_file = Path()

    def say(self, text: str, end: str = "\n") -> None:
        """Print a line in the place of one that changes."""
        if self._stream.isatty():
            text = f"\r\x1b[K{text}"
        print(text, end=end, file=self._stream, flush=True)

    def skip(self, name: str, why: str) -> None:
        """A notebook that need not run."""
        self._number, self._name = self._number + 1, name
        self.say_of_notebook(why)

    @contextmanager
    def notebook(self, name: str, cells: int, progress_file: Path) -> Iterator[None]:
        """While a notebook runs; `progress_file` is where its sweeps say which case they are at."""
        self._cell, self._cells, self._progress_file = 0, cells, progress_file
        self.skip(name, f"started, {cells} cells")
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

    def say_of_notebook(self, text: str) -> None:
        """Print a line about the notebook that runs or ran."""
        self.say(f"[{self._number}/{self._notebooks}] {self._name}: {text}")

    def _watch(self, stop: threading.Event) -> None:
        terminal = self._stream.isatty()
        while not stop.wait(TERMINAL_S if terminal else LOG_S):
            line = f"[{self._number}/{self._notebooks}] {self._name} cell {self._cell}/"
            line += f"{self._cells} {last_case(self._progress_file)}".rstrip()
            if terminal:
                self.say(line[: shutil.get_terminal_size().columns - 1], end="")
            else:
                self.say(line)


def last_case(path: Path) -> str:
    """The newest complete line of a sweep's progress file, for people; empty without one."""
    try:
        line = json.loads(path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2])
        number, total = min(line["done"] + 1, line["total"]), line["total"]
        return f"case {number}/{total} {line['case']}" if total else str(line["case"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
