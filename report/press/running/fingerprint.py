"""What an executed notebook was made from: when none of it changed, it need not run again."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fusedlib.bench import machine, paths, results
from press.running.config import FRAME
from press.running.products import copy_path

Fingerprint = dict[str, str]
_PACKAGES = ("torch", "triton")
CODE = ("fusedlib", "notebooks/measure", "notebooks/models", "report/press")


def before_run(notebook: Path, parameters: Mapping[str, Any]) -> Fingerprint:
    """Everything that the run itself does not change, one digest each, by name."""
    only = os.environ.get(results.CASES, "")
    return {
        "notebook": _notebook(notebook),
        "parameters": _digest([json.dumps(dict(parameters), sort_keys=True, default=str)]),
        "code": _files((p for f in CODE for p in (paths.ROOT / f).rglob("*.py")), paths.ROOT),
        "helpers": _files(notebook.parent.glob("*.py"), notebook.parent),
        "published": _files(paths.PUBLISHED.rglob("*"), paths.PUBLISHED),
        "versions": _digest(
            [platform.python_version(), *(f"{p} {machine.version_of(p)}" for p in _PACKAGES)]
        ),
        "asked": _digest([os.environ.get(results.RECORDING, ""), only and Path(only).read_text()]),
        "machine": _digest([os.environ.get("FUSEDLIB_MACHINE", ""), platform.node()]),
    }


def rows(studies: Iterable[str] | None) -> Fingerprint:
    """The recorded rows of these studies on all machines; for None, the report's frame, of all.

    It is taken after a run, whose own rows belong to what its notebook shows. The frame shows what
    the executed notebooks claim, so that these count too.
    """
    names = ["*"] if studies is None else sorted(studies)
    folder = paths.results_dir()
    files = [path for name in names for path in folder.glob(f"*/*/{name}.jsonl")]
    known = {"rows": _files(files, folder)}
    if studies is None:
        copies = copy_path(FRAME).parent
        others = [path for path in copies.glob("*.ipynb") if path != copy_path(FRAME)]
        known["executed"] = _files(others, copies)
    return known


def changed(old: Any, new: Fingerprint) -> list[str]:
    """Names of the parts that differ."""
    if not isinstance(old, dict):
        return list(new)
    return [name for name, value in new.items() if old.get(name) != value]


def _notebook(path: Path) -> str:
    """Digest of the cells; outputs and the metadata that editors change do not count."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        tags = cell.get("metadata", {}).get("tags", [])
        parts.append(json.dumps([cell["cell_type"], "".join(cell["source"]), tags]))
    return _digest(parts)


def _files(files: Iterable[Path], base: Path) -> str:
    parts = []
    for path in sorted(path for path in files if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        parts.append(f"{path.relative_to(base)} {content}")
    return _digest(parts)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
