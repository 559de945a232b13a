"""What an executed notebook was made from: when none of it changed, it need not run again."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fusedlib.bench import machine
from measure.recording import paths, results
from press.running.config import FRAME
from press.running.products import copy_path

CODE = (
    "fusedlib", "notebooks/measure", "notebooks/models", "notebooks/study", "report/press",
    "report/claims",
)  # fmt: skip


def before_run(notebook: Path, parameters: Mapping[str, Any]) -> str:
    """A digest of everything that the run itself does not change.

    Of the notebook its cells count; outputs and the metadata that editors change do not.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [path for folder in CODE for path in (paths.ROOT / folder).rglob("*.py")]
    parts = [
        *([c["cell_type"], "".join(c["source"]), c["metadata"].get("tags")] for c in cells),
        dict(parameters),
        _files([*code, *notebook.parent.glob("*.py"), *paths.PUBLISHED.rglob("*")]),
        [platform.python_version(), machine.version_of("torch"), machine.version_of("triton")],
        [os.environ.get(name) for name in (results.RECORDING, machine.NAME)],
        [platform.node()],
    ]
    return _digest(json.dumps(parts, sort_keys=True, default=str).encode())


def rows(studies: Iterable[str] | None) -> str:
    """A digest of the recorded rows of these studies on all machines; None: the frame, of all.

    It is taken after a run, whose own rows belong to what its notebook shows. The frame shows what
    the executed notebooks claim, so that these count too.
    """
    folder = paths.results_dir()
    if studies is not None:
        patterns = [f"*/*/{name}.jsonl" for name in studies] + [
            f"*/{name}.jsonl" for name in studies
        ]
        return _files(path for pattern in patterns for path in folder.glob(pattern))
    copies = {*copy_path(FRAME).parent.glob("*.ipynb")} - {copy_path(FRAME)}
    return _files([*folder.glob("*/*/*.jsonl"), *folder.glob("*/*.jsonl"), *copies])


def _files(files: Iterable[Path]) -> str:
    existing = sorted(path for path in files if path.is_file())
    lines = (f"{path} {_digest(path.read_bytes())}" for path in existing)
    return _digest(os.fsencode("\n".join(lines)))  # a folder's name may be of any bytes


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
