"""Can this Python run the study? Names what is missing, by the names that pip knows.

    python tools/doctor.py --for study|report|test|test-gpu|lint|docs|lab

Imports nothing outside the standard library; what is needed stands in pyproject.toml.
"""

import argparse
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

# JupyterLab is for `make lab`; NVML adds facts, which nothing waits for.
_LAB_TOOLS, _FACTS = {"jupyterlab"}, {"nvidia_ml_py"}
_TEST_TOOLS = {"pytest", "pytest_timeout", "pytest_xdist", "hypothesis", "pyyaml"}
# What only turns executed notebooks into pages; a machine that measures may lack it.
_RENDER_TOOLS = {"nbconvert", "pypandoc_binary", "typst"}
PURPOSES = ("study", "report", "test", "test-gpu", "lint", "docs", "lab")


def needed(purpose: str) -> dict[str, str]:
    """Requirements of a purpose as pyproject.toml writes them, by normalised name."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    library, dev = _by_name(project["dependencies"]), _by_name(extras["dev"])
    lab = {*library, *_by_name(extras["study"])} - _FACTS
    report = lab - _LAB_TOOLS
    study = report - _RENDER_TOOLS
    names = {
        "lab": lab,
        "report": report,
        "study": study,
        "test": report | _TEST_TOOLS,
        "test-gpu": study | _TEST_TOOLS - {"pytest_xdist"},  # one process has the card to itself
        "lint": {"ruff", "mypy", "import_linter"},
        "docs": {*library, "pdoc"},
    }
    lines = library | _by_name(extras["study"]) | dev
    return {name: line for name, line in lines.items() if name in names[purpose]}


def problems(requirements: dict[str, str]) -> list[str]:
    """The requirements that are missing or too old, with the reason."""
    reasons = {line: _problem(name, line) for name, line in requirements.items()}
    return [f"{line}: {reason}" for line, reason in reasons.items() if reason]


def main(arguments: list[str]) -> int:
    """0 when nothing is missing, else 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="purpose", choices=PURPOSES, default="study")
    parser.add_argument("--quiet", action="store_true", help="say nothing where all is there")
    options = parser.parse_args(arguments)
    requirements = needed(options.purpose)
    missing = problems(requirements)
    if missing:
        names = " ".join(f"'{line.partition(':')[0]}'" for line in missing)
        print(
            f"{sys.executable} lacks what `{options.purpose}` needs:",
            *(f"  {line}" for line in missing),
            f"Install it there (python -m pip install {names}), or put a folder that holds it on "
            "PYTHONPATH, or run make without VENV= to get an environment of its own.",
            sep="\n", file=sys.stderr,
        )  # fmt: skip
        return 2
    if not options.quiet:
        count = len(requirements)
        print(f"{sys.executable} has all {count} packages that `{options.purpose}` needs")
    return 0


def _by_name(lines: Iterable[str]) -> dict[str, str]:
    """Requirements by normalised name, those of another system left out, markers cut off."""
    named = {}
    for line in lines:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if "linux" not in marker or sys.platform == "linux":
            name = re.split(r"[<>=!~\[ ]", requirement, maxsplit=1)[0]
            named[name.lower().replace("-", "_")] = requirement
    return named


def _problem(name: str, line: str) -> str | None:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    least = re.search(r">=\s*([\d.]+)", line)
    return f"{version} is too old" if least and _numbers(version) < _numbers(least[1]) else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
