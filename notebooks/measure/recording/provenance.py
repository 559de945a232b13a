"""Which code measured: its commit, and the hash of each of its files.

Where the code lies without git, or with that of another commit, on a machine that it was carried
to, both come from `code.json`, which `make pack` writes beside it.
"""

import hashlib
import json
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from measure.recording import paths

PACKED = "code.json"
CODE = ("fusedlib", "notebooks")  # `report` measures nothing
Commit = tuple[str | None, bool | None]


@cache
def files() -> dict[str, str]:
    """Git's hash of each file of the library and of what measures, by its path."""
    files_of_code = [path for folder in CODE for path in (paths.ROOT / folder).rglob("*.py")]
    files_of_code.append(paths.NOTEBOOKS / "study.toml")
    named = {path.relative_to(paths.ROOT).as_posix(): path for path in sorted(files_of_code)}
    return {name: _blob(path.read_bytes()) for name, path in named.items()}


def _blob(content: bytes) -> str:
    """The name that git gives a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@cache
def commit() -> Commit:
    """The commit, and whether the code differs from it; None for what cannot be found out.

    Rows and products do not count: measuring itself must not make the tree dirty.
    """
    head = None if packed() else _git("rev-parse", "--verify", "HEAD")
    if head and re.fullmatch(r"[0-9a-f]{40,64}", head):
        changes = _git("status", "--porcelain", "--", *CODE)
        return head, None if changes is None else bool(changes)
    carried = packed()
    return (carried["commit"], bool(differing(carried["files"]))) if carried else (None, None)


def packed() -> dict[str, Any]:
    """What `make pack` wrote, where there is no git, or one that does not know its commit."""
    try:
        content: dict[str, Any] = json.loads((paths.ROOT / PACKED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    answer = (paths.ROOT / ".git").exists() and _git("cat-file", "-e", str(content.get("commit")))
    return {} if answer == "" else content


def changed() -> list[str]:
    """Paths of the code that are not the commit's."""
    if carried := packed():
        return differing(carried["files"])
    return [line[3:] for line in (_git("status", "--porcelain", "--", *CODE) or "").splitlines()]


def differing(then: Mapping[str, str]) -> list[str]:
    """Paths of the files whose content is not in the hashes of `then`, or is gone.

    A file that only moved does not differ.
    """
    now = files()
    new = [name for name, content in now.items() if content not in then.values()]
    left = [n for n, content in then.items() if n not in now and content not in now.values()]
    return sorted([*new, *left])


def pack() -> Path:
    """Write commit and hashes beside the code, for a machine without git; returns the file."""
    path = paths.ROOT / PACKED
    content = {"commit": commit()[0], "files": files()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def _git(*arguments: str) -> str | None:
    command = ["git", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=paths.ROOT
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip()
