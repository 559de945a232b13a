"""Write the API reference of the library and of its timing utilities from the docstrings.

`make docs` runs it; `report/build/docs/index.html` is where to begin.
"""

from pathlib import Path
from pkgutil import iter_modules

import pdoc
import pdoc.render

import fusedlib
import fusedlib.bench
from study import paths


def write(folder: Path) -> Path:
    """Write the pages, and return the first one's path."""
    for name in fusedlib.__all__:  # they are imported when asked for; pdoc does not ask
        setattr(fusedlib, name, getattr(fusedlib, name))
    modules = [f"fusedlib.bench.{module.name}" for module in iter_modules(fusedlib.bench.__path__)]
    pdoc.render.configure(docformat="google", footer_text=fusedlib.__version__)
    pdoc.pdoc("fusedlib", *modules, output_directory=folder)
    return folder / "index.html"


if __name__ == "__main__":
    print(write(paths.build_dir() / "docs").as_uri())
