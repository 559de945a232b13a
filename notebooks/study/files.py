"""Files that are written whole or not at all, locks, and JSON lines that survive kills."""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator
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
    """Write a file whole or not at all: no reader, kill or full disk meets half of it."""
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


def lock(file: IO[Any], kind: int = fcntl.LOCK_EX) -> None:
    """Lock an open file until it is closed, however its process ends; where the file system has no
    locks, go on. Where another process has it, and `kind` says not to wait, BlockingIOError.
    """
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            raise


# --- JSON lines ----------------------------------------------------------------------------------


class ResultsError(RuntimeError):
    """A results file cannot be read or written; the message says what to do."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses while the block writes becomes a ResultsError."""
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

    Writers in several processes take turns by a lock on the file. What a killed writer left of a
    last line goes first, so that the new line does not continue it.
    """
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    data = memoryview("".join(lines).encode())
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            lock(file)
            end = _mend_end(file)
            try:
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise


def _mend_end(file: IO[bytes]) -> int:
    """Position to append at: a last line that lacks its end gets it, and goes if it is torn."""
    file.seek(0)
    content = file.read()
    last = b"".join(content.splitlines(keepends=True)[-1:])
    if _is_torn(last):
        file.truncate(len(content) - len(last))
        return len(content) - len(last)
    has_end = not last or last.endswith((b"\n", b"\r"))
    return len(content) + (0 if has_end else file.write(b"\n"))


def read_objects(path: Path) -> list[dict[str, Any]]:
    """All objects of the file but for a torn last line, whose case will be measured again."""
    try:
        with path.open("rb") as file:
            lock(file, fcntl.LOCK_SH)  # else the line that is just being written seems torn
            content = file.read()
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror or error}") from error
    objects = []
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        value = _parsed(line)
        if isinstance(value, dict):
            objects.append(value)
        elif line.strip() and not _is_torn(line):
            start = line.strip()[:60].decode(errors="replace")
            raise ResultsError(
                f"{path}, line {number} is not a JSON object: {start!r}. "
                "Nothing was changed. Mend or remove that line, or restore the file from git."
            )
    return objects


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _is_torn(line: bytes) -> bool:
    """Whether a line was cut off by a kill or a full disk: it has no end, and is no JSON."""
    has_end = line.endswith((b"\n", b"\r")) or not line.strip()
    return not has_end and _parsed(line) is None
