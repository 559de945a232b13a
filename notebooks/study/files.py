"""Files that are written whole or not at all, locks, and JSON lines that survive kills."""

import contextlib
import fcntl
import json
import os
import secrets
import warnings
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any


class WriteError(OSError):
    """A file could not be written; the message names it, the reason and what to do."""

    def __str__(self) -> str:
        return (
            f"cannot write {self.filename}: {self.strerror}. Make room or choose another folder: "
            "FUSEDLIB_BUILD is for products, FUSEDLIB_RESULTS for rows"
        )


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file whole or not at all: neither a reader, a kill nor a full disk meets half of it.

    Raises:
        WriteError: it could not be written, and is what it was.
    """
    # No process id: two containers that share a folder may have the same.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return path


def lock(file: IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed, however its process ends.

    False where the file system has no locks.

    Raises:
        BlockingIOError: another process has it, and `kind` says not to wait.
    """
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


# --- JSON lines ----------------------------------------------------------------------------------


class ResultsError(RuntimeError):
    """A results file cannot be read or written; the message says what to do."""


class TornLineWarning(UserWarning):
    """The last line of a results file was cut off by a kill or a full disk and is left out."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses while the block writes becomes a ResultsError that says what to do.

    Raises:
        ResultsError: folder not writable, disk full.
    """
    try:
        yield
    except OSError as error:
        raise ResultsError(
            f"cannot write to {path}: {error.strerror or error}. Rows written so far are kept; "
            "make room or set FUSEDLIB_RESULTS to a folder you may write to, then run again: "
            "only what is missing is measured."
        ) from error


def append_objects(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append objects, a line each, all or none of them, flushed to disk.

    Writers in several processes take turns by a lock on the file. A torn last line left by a
    killed writer is first moved into a file beside, so that the new line does not continue it.

    Raises:
        ResultsError: folder not writable, disk full; the file then is as it was.
    """
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    data = "".join(lines).encode()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            lock(file)
            end = _mend_end(file, path)
            try:
                _write_all(file, data)
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise


def _write_all(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _mend_end(file: IO[bytes], path: Path) -> int:
    """Position to append at, after a line's end.

    A last line that lacks its end gets it, unless it is torn: then it moves into a file beside.
    """
    file.seek(0)
    content = file.read()
    last = b"".join(content.splitlines(keepends=True)[-1:])
    if last.endswith((b"\n", b"\r")) or not last:
        return len(content)
    if not _is_torn(last):
        return len(content) + file.write(b"\n")
    names = (path.with_name(f"{path.name}.torn-{n}") for n in count(1))
    beside = write_whole(next(name for name in names if not name.exists()), last)
    _warn_torn(path, last, f"it is kept in {beside.name}")
    start = len(content) - len(last)
    file.truncate(start)
    return start


def read_objects(path: Path) -> list[dict[str, Any]]:
    """All objects of the file; a torn last line is left out with a `TornLineWarning`.

    Raises:
        ResultsError: the file cannot be read, or a line that is not torn is not a JSON object.
    """
    try:
        with path.open("rb") as file:
            lock(file, fcntl.LOCK_SH)  # else the line that is just being written seems torn
            content = file.read()
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror or error}") from error
    objects = []
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.strip():
            continue
        value = _parse(line)
        if value is not None:
            objects.append(value)
        elif _is_torn(line):
            _warn_torn(path, line, "it is left out")
        else:
            start = line.strip()[:60].decode(errors="replace")
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


def _is_torn(line: bytes) -> bool:
    """Whether a line was cut off: it has no end, and is no JSON of any kind."""
    if line.endswith((b"\n", b"\r")) or not line.strip():
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _warn_torn(path: Path, line: bytes, what: str) -> None:
    warnings.warn(
        f"{path}: the last line was cut off after {len(line)} bytes (a killed run or a full disk); "
        f"{what}, and its case will be measured again",
        TornLineWarning,
        stacklevel=3,
    )
