"""environment.yml, constraints.txt and pyproject.toml describe one environment."""

import re
import tomllib

import pytest
import yaml

from measure.recording import paths

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
PINS = [
    line
    for line in (paths.ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def requirement_lines() -> list[str]:
    extras = PROJECT["optional-dependencies"].values()
    return [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


@pytest.fixture(scope="module")
def conda() -> dict:
    return yaml.safe_load((paths.ROOT / "environment.yml").read_text())


def test_conda_installs_the_project_with_its_extras_but_deepspeed(conda):
    [pip] = [entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict)]
    editable = [line for line in pip if line.startswith("-e")]
    assert editable == ["-e .[dev]", "-e notebooks", "-e report"]
    assert "-c constraints.txt" in pip
    for folder, asked in ((paths.NOTEBOOKS, "fusedlib[study]"), (paths.REPORT, "fusedlib-measure")):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["dependencies"] == [asked]


def test_what_the_study_was_asked_for_is_required():
    names = {line.partition(">")[0] for line in requirement_lines()}
    asked = {"torch", "triton", "jupyterlab", "pandas", "matplotlib", "papermill", "nbconvert"}
    assert asked <= names


def test_a_package_has_the_same_range_in_every_extra():
    ranges: dict[str, set[str]] = {}
    for line in requirement_lines():
        requirement = line.partition(";")[0].strip()
        ranges.setdefault(re.split(r"[<>=]", requirement)[0], set()).add(requirement)
    assert {name: lines for name, lines in ranges.items() if len(lines) > 1} == {}


def test_conda_names_no_package_that_pyproject_would_have_to_follow(conda):
    plain = [entry for entry in conda["dependencies"] if isinstance(entry, str)]
    assert {entry.partition("=")[0] for entry in plain} == {"python", "pip"}


def test_conda_python_is_in_the_range_of_pyproject(conda):
    [python] = [e for e in conda["dependencies"] if isinstance(e, str) and e.startswith("python")]
    least = re.fullmatch(r">=([\d.]+)", PROJECT["requires-python"])[1]
    assert numbers(python) >= numbers(least)


@pytest.mark.parametrize("line", requirement_lines())
def test_every_requirement_is_pinned_within_its_range(line):
    requirement = line.partition(";")[0].strip()
    name, least, end = re.fullmatch(r"([\w.-]+)>=([\d.]+)(?:,<([\d.]+))?", requirement).groups()
    pins = {normal(pin.partition("==")[0]): pin.partition("==")[2] for pin in PINS}
    assert normal(name) in pins, f"{name} is in pyproject.toml, not in constraints.txt: make lock"
    assert numbers(pins[normal(name)]) >= numbers(least)
    assert end is None or numbers(pins[normal(name)]) < numbers(end)


@pytest.mark.parametrize("pin", PINS)
def test_a_pin_is_an_exact_public_version(pin):
    assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", pin)


def test_no_package_is_pinned_twice():
    names = [normal(pin.partition("==")[0]) for pin in PINS]
    assert sorted(set(names)) == sorted(names)
