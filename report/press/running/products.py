"""Executed copies of notebooks: where they lie, and what the runner notes in them."""

import json
from pathlib import Path
from typing import Any

from measure.recording import paths
from measure.recording.files import write_whole

# Under this key of a copy's metadata stands what the runner notes about the run.
METADATA = "fusedlib"


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


def check_writable(folder: Path) -> None:
    """Make a folder, and learn now, not after an hour, that nothing can be written there."""
    write_whole(folder / "writable", "x" * 4096).unlink()
