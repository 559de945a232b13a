"""Write constraints.txt: the exact version of every package of the environment.

`make lock` runs it. A fresh virtual environment is made in a temporary folder, everything that
pyproject.toml asks for (with all extras) is installed there, and what pip resolved is
written down. Local versions are dropped (`2.13.0+cpu` becomes `2.13.0`), so that one file serves
machines with and without a GPU. Run it with the oldest supported Python: what installs there
installs on the newer ones. Each `--also PYTHON` adds the packages that only that one needs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Chosen by hand, everything else is what pip resolves from them:
# torch: without a pin pip takes the newest one, tested by nobody here; triton: the one that
# torch 2.13 with CUDA asks for, and the first whose interpreter works with every numpy tried;
# numpy: 2.3 is the last that also serves triton 3.6; transformers: the one on the GPU machine.
CHOSEN = {"torch": "2.13.0", "triton": "3.7.1", "numpy": "2.3.5", "transformers": "5.17.0"}

# torch itself pins its CUDA libraries exactly, by the CUDA that it was built with.
LEFT_OUT = re.compile(r"(?!nvidia-ml-py$)(nvidia-|cuda-).*|fusedlib|pip|setuptools|wheel")

HEADER = """\
# Exact versions of the whole environment. Written by `make lock` (tools/lock.py): do not edit.
# pyproject.toml says what is needed and in which ranges; this file says what was tested.
# It serves Python 3.11 to 3.13. torch's own requirements pin the CUDA libraries.
"""


def requirements(pyproject: Path) -> list[str]:
    """Every requirement of pyproject.toml, the extras' included."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    return [*project["dependencies"], *(line for extra in extras for line in extra)]


def pins(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """`name==version` lines by normalised name, without local versions."""
    lines = {}
    for name, version in found:
        key = re.sub(r"[-_.]+", "-", name).lower()
        if not LEFT_OUT.fullmatch(key):
            lines[key] = f"{name}=={version.partition('+')[0]}"
    return lines


def new_pip(python: str, folder: Path) -> list[str]:
    """The command of pip in a fresh virtual environment of a Python."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def installed(pip: list[str], constraints: Path, wanted: list[str]) -> dict[str, str]:
    """Pins of what pip installs for the requirements."""
    subprocess.run([*pip, "install", "-qq", "-c", str(constraints), *wanted], check=True)
    subprocess.run([*pip, "check"], check=True)
    text = subprocess.run([*pip, "list", "--format=json"], check=True, stdout=subprocess.PIPE)
    return pins((entry["name"], entry["version"]) for entry in json.loads(text.stdout))


def resolved(pip: list[str], constraints: Path, wanted: list[str], report: Path) -> dict[str, str]:
    """Pins of what pip would install for the requirements."""
    command = [*pip, "install", "-qq", "--dry-run", "--report", str(report)]
    subprocess.run([*command, "-c", str(constraints), *wanted], check=True)
    entries = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return pins((entry["name"], entry["version"]) for entry in entries)


def main() -> None:
    """Resolve in fresh environments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--also", action="append", default=[], metavar="PYTHON")
    options = parser.parse_args()
    wanted = requirements(ROOT / "pyproject.toml")
    with tempfile.TemporaryDirectory(prefix="fusedlib-lock-") as name:
        folder = Path(name)
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(f"{name}=={v}\n" for name, v in CHOSEN.items()))
        print(f"resolving {len(wanted)} requirements in a fresh environment (minutes) ...")
        lines = installed(new_pip(sys.executable, folder / "first"), constraints, wanted)
        for number, python in enumerate(options.also):
            constraints.write_text("\n".join(lines.values()))
            pip = new_pip(python, folder / f"also-{number}")
            lines = resolved(pip, constraints, wanted, folder / "report.json") | lines
    text = "\n".join(sorted(lines.values(), key=str.lower))
    unfinished = options.out.with_name(f".{options.out.name}.{os.getpid()}")
    unfinished.write_text(f"{HEADER}{text}\n", encoding="utf-8")
    unfinished.replace(options.out)
    print(f"{options.out}: {len(lines)} pins")


if __name__ == "__main__":
    main()
