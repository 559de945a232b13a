"""`notebooks/study.toml`: the notebooks, their order, the parameters of each profile."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedlib.bench import machine, paths

PROFILES = ("quick", "full")
AUTO = "auto"
# Name of the executed frame beside the studies.
FRAME = "report"
STATIC = "FUSEDLIB_STATIC"
"""Set by the runner: no reader is there to move a widget."""
# The published tables were measured on a card of 80 GB; their largest size needs that much.
FULL_MEMORY_BYTES = 80e9

_TEXTS = ("name", "title", "question")
_FILE_KEYS = {"study": list, "frame": str}
_STUDY_KEYS = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(PROFILES, dict)}
_KINDS: dict[Any, str] = {
    str: "a text",
    list: "a list",
    dict: "a table of parameters; an empty one, {}, takes the notebook's own defaults",
}


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
    """

    name: str
    title: str
    question: str
    notebook: Path
    profiles: Mapping[str, Mapping[str, Any]]

    @property
    def reads(self) -> set[str] | None:
        """Studies whose rows it shows: its own, and those that its cells name; None: all."""
        if self.name == FRAME:
            return None
        text = self.notebook.read_text(encoding="utf-8")
        others = {path.stem for path in self.notebook.parent.glob("*.ipynb")}
        return {self.name, *(name for name in others if f'\\"{name}\\"' in text)}


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
                raise ConfigError(f"notebook {name!r} is unknown; known: {listed(names)}")
            chosen |= {name} if name in alike else alike
        return tuple(study for study in self.studies if not only or study.name in chosen)


def listed(names: Iterable[Any]) -> str:
    """Names as they stand in an error message."""
    return ", ".join(map(str, names)) or "none"


def load(path: Path | None = None) -> Config:
    """Read and check a study file, by default `notebooks/study.toml`.

    Raises:
        ConfigError: the file is missing or unreadable, not TOML, has unknown or missing keys, names
            a notebook or a frame that does not exist, or names a notebook twice.
    """
    path = path or paths.NOTEBOOKS / "study.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    data = {"frame": str(paths.REPORT / "report.ipynb"), "study": [], **data}
    _check(data, _FILE_KEYS, str(path))
    if not data["study"]:
        raise ConfigError(f"{path} has no [[study]] table; it needs one for each notebook")
    studies = tuple(_study(table, number, path) for number, table in enumerate(data["study"], 1))
    names = [study.name for study in studies]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: {listed(twice)} stands there more than once")
    frame = (path.parent / data["frame"]).resolve()
    if not frame.is_file():
        raise ConfigError(f"{path}: the report's frame {frame} does not exist")
    return Config(studies, Study(FRAME, "Report", "", frame, {p: {} for p in PROFILES}))


def _check(table: Any, types: Mapping[str, type], where: str) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a table")
    if unknown := sorted(set(table) - set(types)):
        raise ConfigError(f"{where}: unknown key {listed(unknown)}; known keys: {listed(types)}")
    for key, wanted in types.items():
        value = table.get(key)
        if not isinstance(value, wanted) or not str(value).strip():
            raise ConfigError(f"{where}: {key} is missing or not {_KINDS[wanted]}")


def _study(table: Any, number: int, path: Path) -> Study:
    where = f"{path}: [[study]] number {number}"
    if isinstance(table, dict) and "name" in table:
        where += f", {table['name']}"
    _check(table, _STUDY_KEYS, where)
    # The name becomes file names, and the report's frame has taken one of them.
    if not re.fullmatch(r"[A-Za-z0-9_-]+", table["name"]) or table["name"] == FRAME:
        raise ConfigError(
            f"{where}: a name is made of letters, digits, - and _, and is not '{FRAME}'"
        )
    profiles = {profile: table[profile] for profile in PROFILES}
    for profile, values in profiles.items():
        if "profile" in values:
            raise ConfigError(f"{where}: {profile} sets 'profile', which the runner always passes")
    notebook = path.parent / f"{table['name']}.ipynb"
    if not notebook.is_file():
        raise ConfigError(f"{where}: its notebook {notebook} does not exist")
    name, title, question = (table[key] for key in _TEXTS)
    return Study(name, title, question, notebook, profiles)


def choose_profile(asked: str) -> tuple[str, str]:
    """The profile to use, and why, for people; `auto` takes what fits this machine's device.

    Raises:
        ConfigError: an unknown profile.
    """
    if asked in PROFILES:
        return asked, "as asked"
    if asked != AUTO:
        raise ConfigError(f"profile {asked!r} is unknown; known: {listed([AUTO, *PROFILES])}")
    facts = machine.describe()
    return fitting_profile(facts.device_type, facts.device_name, facts.device_memory_gib)


def fitting_profile(device_type: str, name: str, memory_gib: float | None) -> tuple[str, str]:
    """`full` for a CUDA GPU of 80 GB or more, else `quick`; and why."""
    if device_type != "cuda":
        return "quick", "this machine has no CUDA GPU"
    if memory_gib is None:
        return "quick", f"the memory of {name} is unknown; PROFILE=full runs the published sizes"
    if memory_gib * 2**30 < FULL_MEMORY_BYTES:
        return "quick", f"{name} has {memory_gib:g} GiB, the published sizes want 80 GB"
    return "full", f"{name} has {memory_gib:g} GiB"
