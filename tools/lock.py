"""Write constraints.txt: the exact version of every package of the environment.

`make lock` runs it. A fresh virtual environment is made in a temporary folder, everything that
pyproject.toml asks for (with all extras) is installed there, and what pip resolved is written
down. Local versions are dropped (`2.13.0+cpu` becomes `2.13.0`), so that one file serves
machines with and without a GPU. Run it with the oldest supported Python: what installs there
installs on the newer ones.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Chosen by hand, everything else is what pip resolves from them:
# torch: without a pin pip takes the newest one, tested by nobody here; triton: the one that
# torch 2.13 with CUDA asks for, and the first whose interpreter works with every numpy tried;
# numpy: 2.3 is the last that also serves triton 3.6.
CHOSEN = {"torch": "2.13.0", "triton": "3.7.1", "numpy": "2.3.5"}

# pip leaves these out of `freeze`, and torch itself pins its CUDA libraries exactly.
LEFT_OUT = re.compile(r"^(nvidia-.*-cu\d+|nvidia-.*|cuda-.*|fusedlib)$")
KEPT = {"nvidia-ml-py"}

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


def pins(frozen: str) -> list[str]:
    """The `name==version` lines of `pip freeze`, without local versions, paths and addresses."""
    lines = []
    for line in frozen.splitlines():
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^+\s]+)(\+\S+)?", line.strip())
        if not match:
            continue
        name, version = match[1], match[2]
        if LEFT_OUT.match(name.lower()) and name.lower() not in KEPT:
            continue
        lines.append(f"{name}=={version}")
    return sorted(lines, key=str.lower)


def main() -> None:
    """Resolve in a fresh environment and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "constraints.txt")
    target = parser.parse_args().out
    wanted = requirements(ROOT / "pyproject.toml")
    with tempfile.TemporaryDirectory(prefix="fusedlib-lock-") as folder:
        chosen = Path(folder) / "chosen.txt"
        chosen.write_text("".join(f"{name}=={v}\n" for name, v in CHOSEN.items()))
        print(f"resolving {len(wanted)} requirements in a fresh environment (minutes) ...")
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True)
        pip = [f"{folder}/venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "-c", str(chosen), *wanted], check=True)
        subprocess.run([*pip, "check"], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True)
    lines = pins(frozen.stdout)
    target.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{target}: {len(lines)} pins")


if __name__ == "__main__":
    main()
