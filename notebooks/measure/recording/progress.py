"""How far a sweep is: a bar for people, or lines in a file for the runner that shows its own."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

FILE = "FUSEDLIB_PROGRESS"
# transformers asks tqdm for a widget; a bar of text is all that a notebook needs.
warnings.filterwarnings("ignore", "IProgress not found")


class Progress:
    """What a sweep tells, into a file where one is given."""

    def __init__(self, study: str, total: int, file: str | None) -> None:
        self._file = file
        self._line: dict[str, Any] = {"study": study, "case": "", "done": 0, "total": total}
        # A line a second at most: in a notebook every refresh is another line of output.
        self.bar: tqdm[Any] = tqdm(
            total=total, desc=study, unit="case", dynamic_ncols=True, mininterval=1.0,
            disable=file is not None or not total,
        )  # fmt: skip

    def case(self, label: str) -> None:
        """A case begins."""
        self.bar.set_postfix_str(label, refresh=False)
        self._line["case"] = label
        self._write()

    def done(self) -> None:
        """The case has ended."""
        self.bar.update()
        self._line["done"] += 1
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            _append(self._file, self._line)


def _append(name: str, line: dict[str, Any]) -> None:
    # What is shown is worth less than what is measured: a full /tmp must not end a sweep.
    with suppress(OSError), Path(name).open("a") as file:
        file.write(json.dumps(line) + "\n")


def tell(study: str, text: str) -> None:
    """Say what a study is at while it measures no case: to people, or to the runner."""
    if file := os.environ.get(FILE):
        _append(file, {"study": study, "case": text, "done": 0, "total": 0})
    else:
        print(f"{study}: {text}", flush=True)


@contextmanager
def progress(study: str, total: int) -> Iterator[Progress]:
    """Progress over `total` cases, into the file `$FUSEDLIB_PROGRESS` when the runner asks so."""
    shown = Progress(study, total, os.environ.get(FILE) or None)
    with shown.bar:
        yield shown
