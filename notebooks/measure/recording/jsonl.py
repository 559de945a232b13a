"""Appending to and reading from a file of JSON lines that survives kills and neighbours."""

import contextlib
import fcntl
import json
import os
import warnings
from pathlib import Path
from typing import IO, Any


class ResultsError(RuntimeError):
    """A results file cannot be read or written; the message says what to do."""


class TornLineWarning(UserWarning):
    """The last line of a results file was cut off by a kill or a full disk and is dropped."""


def append_object(path: Path, row: dict[str, Any]) -> None:
    """Append one object as a line, whole or not at all, flushed to disk.

    Writers in several processes take turns by a lock on the file. A torn last line left by a
    killed writer is cut off first, so that the new line does not continue it.

    Raises:
        ResultsError: folder not writable, disk full; the file then is as it was.
    """
    data = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = _mend_end(file, path)
            try:
                _write_all(file, data)
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise ResultsError(
            f"cannot write to {path}: {error.strerror or error}. Rows written so far are kept; "
            "make room or set FUSEDLIB_RESULTS to a folder you may write to, then run again: "
            "only what is missing is measured."
        ) from error


def _write_all(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _mend_end(file: IO[bytes], path: Path) -> int:
    """Position to append at; a torn last line is cut off, one that only lacks its end is ended."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return 0
    file.seek(0)
    content = file.read(size)
    if content.endswith(b"\n"):
        return size
    start = content.rfind(b"\n") + 1
    if _parse(content[start:]) is not None:
        _write_all(file, b"\n")
        return size + 1
    _warn_torn(path, content[start:])
    file.truncate(start)
    return start


def read_objects(path: Path) -> list[dict[str, Any]]:
    """All objects of the file; a torn last line is dropped with a `TornLineWarning`.

    Raises:
        ResultsError: the file cannot be read, or a line before the last is not a JSON object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror or error}") from error
    lines = content.split(b"\n")
    objects = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        value = _parse(line)
        if value is not None:
            objects.append(value)
        elif number == len(lines):
            _warn_torn(path, line)
        else:
            start = line[:60].decode(errors="replace")
            raise ResultsError(
                f"{path}, line {number} is not a JSON object: {start!r}. "
                "Nothing was changed. Mend or remove that line, or restore the file from git."
            )
    return objects


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _warn_torn(path: Path, line: bytes) -> None:
    warnings.warn(
        f"{path}: the last line was cut off after {len(line)} bytes (a killed run or a full disk); "
        "it is dropped and its case will be measured again",
        TornLineWarning,
        stacklevel=3,
    )
