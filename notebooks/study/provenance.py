"""Which code measured: its commit, and the hash of each of its files.

Where the code lies without git, or with that of another commit, on a machine that it was carried
to, both come from `code.json`, which `make pack` writes beside it.
"""

import hashlib
import json
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from study import paths
from study.files import write_whole

PACKED = "code.json"
CODE = ("fusedlib", "notebooks")  # `report` measures nothing
Commit = tuple[str | None, bool | None]


@cache
def files() -> dict[str, str]:
    """Git's hash of each file of the library and of what measures, by its path."""
    files_of_code = [path for folder in CODE for path in (paths.ROOT / folder).rglob("*.py")]
    named = {path.relative_to(paths.ROOT).as_posix(): path for path in sorted(files_of_code)}
    return {name: _blob(path.read_bytes()) for name, path in named.items()}


def _blob(content: bytes) -> str:
    """The name that git gives a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@cache
def commit() -> Commit:
    """The commit, and whether the code differs from it; None for what cannot be found out.

    Rows and products do not count: measuring itself must not make the tree dirty. A repository
    whose commit lacks this code is another's.
    """
    if carried := packed():
        return carried["commit"], bool(differing(carried["files"]))
    if _git("rev-parse", "--verify", f"HEAD:{CODE[0]}") is None:
        return None, None
    changes = _status()
    return _git("rev-parse", "HEAD"), None if changes is None else bool(changes)


def packed() -> dict[str, Any]:
    """What `make pack` wrote, where there is no git, or one that does not know its commit."""
    try:
        content: dict[str, Any] = json.loads((paths.ROOT / PACKED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    known = _git("cat-file", "-e", str(content.get("commit"))) is not None
    return {} if known else content


def changed() -> list[str]:
    """Paths of the code that are not the commit's."""
    if carried := packed():
        return differing(carried["files"])
    return [line[3:] for line in (_status() or "").splitlines()]


def differing(then: Mapping[str, str]) -> list[str]:
    """Paths of the files whose content is not in the hashes of `then`, or is gone; moved ones do
    not differ.
    """
    now = files()
    new = [name for name, content in now.items() if content not in then.values()]
    left = [n for n, content in then.items() if n not in now and content not in now.values()]
    return sorted([*new, *left])


def pack(**more: Any) -> Path:
    """Write commit, hashes and more beside the code, for a machine without git; the file."""
    content = {"commit": commit()[0], "files": files(), **more}
    return write_whole(paths.ROOT / PACKED, json.dumps(content, separators=(",", ":")) + "\n")


def _status() -> str | None:
    """A line for each file of the code that is not the commit's, whatever the user's git hides."""
    return _git("status", "--porcelain", "--untracked-files=all", "--", *CODE)


def _git(*arguments: str) -> str | None:
    """What the git of this folder itself answers, never that of a folder around it; None where
    there is none, and where git refuses.
    """
    command = ["git", f"--git-dir={paths.ROOT / '.git'}", f"--work-tree={paths.ROOT}", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=paths.ROOT
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip()
