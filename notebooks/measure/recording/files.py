"""Files that are written whole or not at all, and locks on files."""

import contextlib
import fcntl
import os
import secrets
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
