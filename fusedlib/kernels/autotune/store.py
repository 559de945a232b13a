"""The tuned tiles on disk: `tiles.json` in `fusedlib.paths.cache_dir()`.

    {"tiles": {"<key>": {"config": {"block_m": 64, ...}, ...}}}

Written whole to a temporary file that takes the old one's place, after merging with what other
processes wrote meanwhile: the first to store a key decides for all. A file that cannot be read or
written costs a warning, never a step. Fields that this version does not know are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedlib import paths

NAME = "tiles.json"
Entry = dict[str, Any]


class TilesWarning(UserWarning):
    """The file of tuned tiles cannot be read or written; said once a process and reason."""


def read(key: str) -> Entry | None:
    """The entry of that key, or None."""
    try:
        return _content(_path())["tiles"].get(key)
    except (OSError, RuntimeError) as error:
        _warn("read", error)
        return None


def put(key: str, entry: Entry, refused: Entry | None = None) -> Entry:
    """Store an entry unless another process has stored one by now.

    Args:
        key: whose.
        entry: what to store.
        refused: what `read` gave for this key, if that was no use; it is replaced.

    Returns:
        The file's entry: another process's, or this one.
    """
    try:
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path):
            content = _content(path)
            tiles = content["tiles"]
            if tiles.get(key) in (None, refused):
                tiles[key] = entry
                _replace(path, content)
            return tiles[key]
    except (OSError, RuntimeError) as error:
        _warn("write", error)
        return entry


def _path() -> Path:
    return paths.cache_dir() / NAME


def _content(path: Path) -> dict[str, Any]:
    """The file's content; an empty one where there is no file, or nothing that can be used."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"tiles": {}}
    except ValueError as error:  # not JSON, or not UTF-8
        return _unusable(path, str(error))
    if not isinstance(content, dict) or not isinstance(content.get("tiles"), dict):
        return _unusable(path, 'it is not an object with "tiles"')
    sound = {k: e for k, e in content["tiles"].items() if isinstance(e, dict)}
    return content | {"tiles": sound}


def _unusable(path: Path, reason: str) -> dict[str, Any]:
    _say(
        f"{path} cannot be used ({reason}). Tiles are tuned again and the file is made anew; "
        "nothing need be done."
    )
    return {"tiles": {}}


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Writers take turns by a lock beside the file, where the file system has locks."""
    with path.with_name(NAME + ".lock").open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=NAME + ".", text=True)
    try:
        with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123  (a descriptor)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _warn(verb: str, error: OSError | RuntimeError) -> None:
    reason = getattr(error, "strerror", None) or error
    try:
        where = str(_path())
    except RuntimeError:
        where = NAME
    _say(
        f"cannot {verb} {where}: {reason}. Tiles are tuned in every process. Set FUSEDLIB_CACHE to "
        "a folder you may write to, or FUSEDLIB_AUTOTUNE=0 to keep to the table."
    )


_said: set[str] = set()


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, TilesWarning, stacklevel=2)
