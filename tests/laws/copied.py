"""A copy of the library under another name, a few characters of its text exchanged.

The copy is a whole package with operators of its own, so nothing of the library is replaced, and a
fault reaches wherever its text is used.
"""

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import fusedlib

SOURCE = Path(str(fusedlib.__file__)).parent
NUMBERS = itertools.count()


@contextmanager
def library_with(file: str, right: str, wrong: str, folder: Path) -> Iterator[ModuleType]:
    """The library with `wrong` for `right` in one of its files."""
    texts = {path.relative_to(SOURCE): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
    assert right in texts[Path(file)], f"{right!r} does not stand in {file}"
    texts[Path(file)] = texts[Path(file)].replace(right, wrong)
    name = f"fusedlib_copy_{next(NUMBERS)}"
    for path, text in texts.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text.replace("fusedlib", name), "utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        for module in [m for m in sys.modules if m.partition(".")[0] == name]:
            del sys.modules[module]
