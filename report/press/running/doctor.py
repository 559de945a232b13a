"""Can this Python run the study? Names what is missing, by the names that pip knows.

Imports nothing outside the standard library; what is needed stands in pyproject.toml.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Iterator

from fusedlib.bench import paths

# Import names of the packages whose pip name differs by more than dashes and capitals.
_IMPORT_NAMES = {
    "import_linter": "importlinter",
    "nvidia_ml_py": "pynvml",
    "pypandoc_binary": "pypandoc",
    "pytest_xdist": "xdist",
    "pyyaml": "yaml",
}
# What each purpose can do without: JupyterLab and widgets are for `make lab`, NVML adds facts.
_STUDY_WITHOUT = {"ipywidgets", "jupyterlab", "nvidia_ml_py"}
_TEST_TOOLS = {"pytest", "pytest_timeout", "pytest_xdist", "hypothesis", "pyyaml"}
_LINT_TOOLS = {"ruff", "mypy", "import_linter"}
# What only turns executed notebooks into pages; a machine that measures may lack it.
_RENDER_TOOLS = {"nbconvert", "pypandoc_binary", "typst"}
PURPOSES = ("study", "report", "test", "test-gpu", "lint", "docs", "lab")


def needed(purpose: str) -> dict[str, str]:
    """Requirements of a purpose as pyproject.toml writes them, by normalised name."""
    text = (paths.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    base = dict(_named([*project["dependencies"], *extras["study"]]))
    tools = dict(_named(extras["dev"]))
    if purpose == "lint":
        return {name: line for name, line in tools.items() if name in _LINT_TOOLS}
    if purpose == "docs":
        own = dict(_named(project["dependencies"]))
        return own | {name: line for name, line in tools.items() if name == "pdoc"}
    without = _STUDY_WITHOUT - ({"ipywidgets", "jupyterlab"} if purpose == "lab" else set())
    if purpose in ("study", "test-gpu"):
        without = without | _RENDER_TOOLS
    out = {name: line for name, line in base.items() if name not in without}
    if purpose in ("test", "test-gpu"):
        # One process has the card to itself.
        alone = {"pytest_xdist"} if purpose == "test-gpu" else set()
        out |= {name: line for name, line in tools.items() if name in _TEST_TOOLS - alone}
    return out


def problems(requirements: dict[str, str], *, really_import: bool = False) -> list[str]:
    """The requirements that are missing, too old or (if asked) fail to import, with the reason."""
    out = []
    for name, line in requirements.items():
        reason = _problem(name, line, really_import)
        if reason:
            out.append(f"{line}: {reason}")
    return out


def main(arguments: list[str]) -> int:
    """Check and report; 0 when nothing is missing, else 2."""
    parser = argparse.ArgumentParser(prog="python -m press doctor", description=__doc__)
    parser.add_argument("--for", dest="purpose", choices=PURPOSES, default="study")
    parser.add_argument("--quiet", action="store_true", help="only look, do not import")
    options = parser.parse_args(arguments)
    requirements = needed(options.purpose)
    missing = problems(requirements, really_import=not options.quiet)
    if missing:
        print(f"{sys.executable} lacks what `{options.purpose}` needs:", file=sys.stderr)
        for line in missing:
            print(f"  {line}", file=sys.stderr)
        names = " ".join(f"'{line.partition(':')[0]}'" for line in missing)
        print(
            f"Install it there (python -m pip install {names}), or put a folder that holds it on "
            "PYTHONPATH, or run make without VENV= to get an environment of its own.",
            file=sys.stderr,
        )
        return 2
    if not options.quiet:
        print(
            f"{sys.executable} has all {len(requirements)} packages that `{options.purpose}` needs"
        )
        for name in ("torch", "triton", "numpy"):
            print(f"  {name} {_version(name)}")
    return 0


def _named(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Requirements by normalised name, those of another system left out, markers cut off."""
    for line in lines:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if "linux" in marker and sys.platform != "linux":
            continue
        name = re.split(r"[<>=!~\[ ]", requirement, maxsplit=1)[0]
        yield name.lower().replace("-", "_"), requirement


def _problem(name: str, line: str, really_import: bool) -> str | None:
    module = _IMPORT_NAMES.get(name, name)
    version = _version(name)
    stubs_only = "-" in module
    if version is None and (stubs_only or importlib.util.find_spec(module) is None):
        return "not installed"
    least = re.search(r">=\s*([\d.]+)", line)
    if least and version and _numbers(version) < _numbers(least[1]):
        return f"{version} is too old"
    if really_import and not stubs_only:
        # matplotlib and others write caches at import; none of it may go to a display.
        os.environ.setdefault("MPLBACKEND", "Agg")
        try:
            importlib.import_module(module)
        except Exception as error:
            return f"does not import ({type(error).__name__}: {error})"
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
