"""Files that the study makes: executed copies, written whole or not at all."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from measure.recording import paths

# Under this key of a copy's metadata stands what the runner notes about the run.
METADATA = "fusedlib"


class WriteError(OSError):
    """A product could not be written; the message names it, the reason and what to do."""


def copy_path(name: str, build: Path | None = None) -> Path:
    """Where the executed copy of a notebook lies, below the folder of products."""
    return (build or paths.build_dir()) / "notebooks" / f"{name}.ipynb"


def read_metadata(copy: Path) -> dict[str, Any]:
    """What the runner noted in an executed copy; empty when there is none or it is damaged."""
    try:
        metadata = json.loads(copy.read_text(encoding="utf-8"))["metadata"][METADATA]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file whole or not at all: neither a reader nor a full disk leaves half of it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise WriteError(
            f"cannot write {path}: {error.strerror or error}. Make room or choose another folder: "
            "FUSEDLIB_BUILD is for products, FUSEDLIB_RESULTS for rows"
        ) from error
    return path


def check_writable(folder: Path) -> None:
    """Make a folder, and learn now, not after an hour, that nothing can be written there."""
    write_whole(folder / "writable", "x" * 4096).unlink()
