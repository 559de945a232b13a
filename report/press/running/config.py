"""`notebooks/study.toml`: the notebooks, their order, the parameters of each profile."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedlib.bench import paths

PROFILES = ("quick", "full")
AUTO = "auto"
# Name of the executed frame beside the studies.
FRAME = "report"
STATIC = "FUSEDLIB_STATIC"
"""Set by the runner: no reader is there to move a widget."""
# The published tables were measured on a card of 80 GB; their largest size needs that much.
FULL_MEMORY_BYTES = 80e9

_TOP_KEYS = {"study", "frame"}
_TEXT_KEYS = ("name", "title", "question")
_STUDY_KEYS = {*_TEXT_KEYS, *PROFILES, "reads"}


class ConfigError(ValueError):
    """Something asked for does not exist or does not fit; the message says what is allowed."""


@dataclass(frozen=True)
class Study:
    """One notebook of the study.

    Attributes:
        name: the notebook's file name without `.ipynb`; its rows lie in `<name>.jsonl`.
        title: heading of its section in the report.
        question: what it asks, one sentence.
        notebook: path of the notebook.
        profiles: parameters of each profile, by profile and name.
        reads: other studies whose rows it shows as well.
    """

    name: str
    title: str
    question: str
    notebook: Path
    profiles: Mapping[str, Mapping[str, Any]]
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Config:
    """All studies in their order, and the notebook that frames them in the report."""

    studies: tuple[Study, ...]
    frame: Study

    @property
    def parts(self) -> tuple[Study, ...]:
        """What the report is made of."""
        return (*self.studies, self.frame)

    def select(self, only: Sequence[str]) -> tuple[Study, ...]:
        """The named studies in the report's order; all of them for an empty `only`.

        Args:
            only: names of notebooks, or the part of one before or after its first underscore.

        Raises:
            ConfigError: a name is not among the studies.
        """
        names = [study.name for study in self.studies]
        chosen = set()
        for name in only:
            alike = {n for n in names if name in (n, n.partition("_")[0], n.partition("_")[2])}
            if not alike:
                raise ConfigError(f"notebook {name!r} is unknown; known: {known(names)}")
            chosen |= {name} if name in alike else alike
        return tuple(study for study in self.studies if not only or study.name in chosen)


def known(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Names as they stand in an error message."""
    return ", ".join(names) or "none"


def load(path: Path | None = None) -> Config:
    """Read and check a study file, by default `notebooks/study.toml`.

    Raises:
        ConfigError: the file is missing or unreadable, not TOML, has unknown or missing keys, names
            a notebook or a frame that does not exist, or names a notebook twice.
    """
    path = path or paths.NOTEBOOKS / "study.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; it lists the notebooks of the study") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    _check_keys(data, _TOP_KEYS, str(path))
    tables = data.get("study", [])
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{path} has no [[study]] table; it needs one for each notebook")
    studies = tuple(_study(table, number, path) for number, table in enumerate(tables, 1))
    names = [study.name for study in studies]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: {known(twice)} stands there more than once")
    for study in studies:
        if strange := [name for name in study.reads if name not in names]:
            raise ConfigError(
                f"{path}: {study.name} reads {known(strange)}, unknown; known: {known(names)}"
            )
    frame = data.get("frame")
    if frame is not None and not isinstance(frame, str):
        raise ConfigError(f"{path}: frame must be a path as a string, not {frame!r}")
    notebook = (path.parent / frame).resolve() if frame else paths.REPORT / "report.ipynb"
    if not notebook.is_file():
        raise ConfigError(f"{path}: the report's frame {notebook} does not exist")
    return Config(studies, Study(FRAME, "Report", "", notebook, {p: {} for p in PROFILES}))


def _check_keys(table: Mapping[str, Any], allowed: set[str], where: str) -> None:
    if unknown := sorted(set(table) - allowed):
        raise ConfigError(
            f"{where}: unknown key {known(unknown)}; known keys: {known(sorted(allowed))}"
        )


def _study(table: Any, number: int, path: Path) -> Study:
    where = f"{path}: [[study]] number {number}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a table")
    _check_keys(table, _STUDY_KEYS, where)
    for key in _TEXT_KEYS:
        if not isinstance(table.get(key), str) or not table[key].strip():
            raise ConfigError(f"{where}: {key} is missing or not a text; each study needs one")
    where = f"{path}: {table['name']}"
    # The name becomes file names, and the report's frame has taken one of them.
    if not re.fullmatch(r"[A-Za-z0-9_-]+", table["name"]) or table["name"] == FRAME:
        raise ConfigError(
            f"{where}: a name is made of letters, digits, - and _, and is not '{FRAME}'"
        )
    for profile in PROFILES:
        if not isinstance(table.get(profile), dict):
            raise ConfigError(
                f"{where}: {profile} is missing or not a table of parameters; "
                "an empty table {} takes the notebook's own defaults"
            )
        if "profile" in table[profile]:
            raise ConfigError(f"{where}: {profile} sets 'profile', which the runner always passes")
    reads = table.get("reads", [])
    if not isinstance(reads, list) or not all(isinstance(name, str) for name in reads):
        raise ConfigError(f"{where}: reads must be a list of study names, not {reads!r}")
    notebook = path.parent / f"{table['name']}.ipynb"
    if not notebook.is_file():
        raise ConfigError(f"{where}: its notebook {notebook} does not exist")
    profiles = {p: table[p] for p in PROFILES}
    name, title, question = (table[key] for key in _TEXT_KEYS)
    return Study(name, title, question, notebook, profiles, tuple(reads))


def choose_profile(asked: str) -> tuple[str, str]:
    """The profile to use, and why, for people.

    `auto` becomes `full` where a CUDA GPU of 80 GB or more is there, else `quick`.

    Raises:
        ConfigError: an unknown profile.
    """
    if asked in PROFILES:
        return asked, "as asked"
    if asked != AUTO:
        raise ConfigError(f"profile {asked!r} is unknown; known: {known([AUTO, *PROFILES])}")
    from fusedlib.bench import machine

    facts = machine.describe()
    return fitting_profile(facts.device_type, facts.device_name, facts.device_memory_gib)


def fitting_profile(device_type: str, name: str, memory_gib: float | None) -> tuple[str, str]:
    """The profile that a device is made for, and why."""
    if device_type != "cuda":
        return "quick", "this machine has no CUDA GPU"
    if memory_gib is None:
        return "quick", f"the memory of {name} is unknown; PROFILE=full runs the published sizes"
    if memory_gib * 2**30 < FULL_MEMORY_BYTES:
        return "quick", f"{name} has {memory_gib:g} GiB, the published sizes want 80 GB"
    return "full", f"{name} has {memory_gib:g} GiB"
