"""How far a sweep is: a bar for people, or lines in a file for the runner that shows its own."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from tqdm import tqdm


class Progress(Protocol):
    """What a sweep tells."""

    def case(self, label: str) -> None:
        """A case begins."""

    def done(self) -> None:
        """The case has ended."""


class _Bar:
    def __init__(self, study: str, total: int) -> None:
        # A line a second at most: in a notebook every refresh is another line of output.
        self._bar = tqdm(total=total, desc=study, unit="case", dynamic_ncols=True, mininterval=1.0)

    def case(self, label: str) -> None:
        self._bar.set_postfix_str(label, refresh=False)

    def done(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class _Lines:
    def __init__(self, path: Path, study: str, total: int) -> None:
        self._path, self._study, self._total, self._done = path, study, total, 0
        self._label = ""

    def case(self, label: str) -> None:
        self._label = label
        self._say()

    def done(self) -> None:
        self._done += 1
        self._say()

    def _say(self) -> None:
        line = {
            "study": self._study, "case": self._label, "done": self._done, "total": self._total
        }  # fmt: skip
        # What is shown is worth less than what is measured: a full /tmp must not end a sweep.
        with suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def progress(study: str, total: int) -> Iterator[Progress]:
    """Progress over `total` cases, into the file `$FUSEDLIB_PROGRESS` when the runner asks so."""
    if path := os.environ.get("FUSEDLIB_PROGRESS"):
        yield _Lines(Path(path), study, total)
        return
    bar = _Bar(study, total)
    try:
        yield bar
    finally:
        bar.close()
