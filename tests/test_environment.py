"""environment.yml, constraints.txt and pyproject.toml describe one environment."""

import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from study import paths

PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"].values()
REQUIREMENTS = [Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS) for line in lines]


def test_conda_installs_what_pip_does_with_a_python_in_range():
    conda = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
    [pip] = [entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict)]
    assert {"-c constraints.txt", "-e .[dev]", "-e notebooks", "-e report"} <= {*pip}
    plain = dict(e.split("=", 1) for e in conda["dependencies"] if isinstance(e, str) and "=" in e)
    assert {*plain} <= {"python", "pip"}, "a package stands in pyproject.toml alone"
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(plain["python"])


def test_every_requirement_is_pinned_once_and_within_its_range():
    lines = (paths.ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(versions) == len(pins)
    for wanted in REQUIREMENTS:
        pinned = versions.get(canonicalize_name(wanted.name))
        assert pinned, f"{wanted.name} is not in constraints.txt: make lock"
        assert wanted.specifier.contains(pinned), f"{wanted} is pinned as {pinned}"


def test_a_package_has_the_same_range_in_every_extra():
    ranges = {one.name: one.specifier for one in REQUIREMENTS}
    assert all(ranges[one.name] == one.specifier for one in REQUIREMENTS)
