"""`notebooks/study.toml`: the notebooks, their order, the parameters of each profile."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedlib.bench import machine
from measure.recording import paths
from measure.study import PROFILES

AUTO = "auto"
# Name of the executed frame beside the studies.
FRAME = "report"
SECTIONS = "sections"
"""Folder of `report` that holds topics' pages, and what only the appendix needs of a study."""
DETAILS = "_details"
"""Ends the name of a notebook in `report/sections`, which shows what only the appendix needs."""
# The published tables were measured on a card of 80 GB; their largest size needs that much.
FULL_MEMORY_BYTES = 80e9
_TEXTS = "name", "title", "question"
_KEYS: dict[str, type] = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(PROFILES, dict)}
_FORMS = _KEYS, {**_KEYS, "measure": str}  # a notebook that measures nothing has no such module


class ConfigError(ValueError):
    """Something asked for does not exist or does not fit; the message says what is allowed."""


@dataclass(frozen=True)
class Study:
    """One notebook of the study, or a topic's page; its rows lie in `<name>.jsonl`.

    Attributes:
        profiles: the sizes of what it measures, by profile.
        measure: the module that declares what it measures; empty where it measures nothing.
    """

    name: str
    title: str
    question: str
    notebook: Path
    profiles: Mapping[str, Mapping[str, Any]]
    measure: str = ""

    @property
    def only_shows(self) -> bool:
        """Whether it shows rows and does nothing else, as a topic's page."""
        return self.notebook.parent == paths.REPORT / SECTIONS

    @property
    def reads(self) -> set[str] | None:
        """Studies whose rows it shows: its own, and those that its cells name; None: all."""
        if self.name == FRAME:
            return None
        own = self.name.removesuffix(DETAILS)
        text = self.notebook.read_text(encoding="utf-8")
        topics = (paths.NOTEBOOKS / "study").glob("*.py")
        others = {path.stem for path in (*self.notebook.parent.glob("*.ipynb"), *topics)}
        return {own, *(name for name in others if f'\\"{name}\\"' in text)}


@dataclass(frozen=True)
class Config:
    """All studies in their order, and the notebook that frames them in the report.

    `details` are the notebooks beside the frame, in `sections`, that have a study's name: what the
    appendix needs of it. `guides` are notebooks that study nothing of their own: they
    are executed and have pages, and are no part of the paper.
    """

    studies: tuple[Study, ...]
    frame: Study
    details: tuple[Study, ...] = ()
    guides: tuple[Study, ...] = ()

    @property
    def parts(self) -> tuple[Study, ...]:
        """What is executed, in this order: guides show what studies measured."""
        return (*self.with_details(self.studies), *self.guides, self.frame)

    def with_details(self, studies: Iterable[Study]) -> tuple[Study, ...]:
        """These studies, each followed by its details."""
        more = {part.name: part for part in self.details}
        names = ((study, more.get(study.name + DETAILS)) for study in studies)
        return tuple(part for pair in names for part in pair if part)

    def select(self, only: Sequence[str]) -> tuple[Study, ...]:
        """The named studies and guides in the order in which they run; all for an empty `only`.

        A name may be the part of one before or after its first underscore.
        """
        every = (*self.studies, *self.guides)
        names = [study.name for study in every]
        chosen = set()
        for name in only:
            alike = {n for n in names if name in (n, n.partition("_")[0], n.partition("_")[2])}
            if not alike:
                raise ConfigError(f"notebook {name!r} is unknown; known: {listed(names)}")
            chosen |= {name} if name in alike else alike
        return tuple(study for study in every if not only or study.name in chosen)


def listed(names: Iterable[Any]) -> str:
    """Names as they stand in an error message."""
    return ", ".join(map(str, names)) or "none"


def load(path: Path | None = None) -> Config:
    """A study file, by default `notebooks/study.toml`."""
    path = path or paths.NOTEBOOKS / "study.toml"
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {why}") from None
    tables = data.get("study") or {}
    tables = tables if isinstance(tables, list) else [tables]
    for table in tables:
        if not isinstance(table, dict) or {k: type(table[k]) for k in table} not in _FORMS:
            raise ConfigError(
                f"{path}: a [[study]] has {listed(_TEXTS)}, which are texts, perhaps measure, "
                f"which is one, and tables of parameters, {listed(PROFILES)}, and nothing else; "
                f"not so {table}"
            )
    names = [table["name"] for table in tables]
    if len({*names, FRAME}) <= len(names):
        raise ConfigError(f"{path}: names of studies differ, and none is {FRAME}; not so {names}")
    if unknown := data.keys() - {"study", "frame", "guides"}:
        raise ConfigError(
            f"{path}: unknown {listed(sorted(unknown))}; known are study, frame and guides"
        )
    studies = tuple(_study(path.parent, **table) for table in tables)
    notebook = (path.parent / str(data.get("frame", paths.REPORT / "report.ipynb"))).resolve()
    frame = Study(FRAME, "Report", "", notebook, {profile: {} for profile in PROFILES})
    for study in (*studies, frame):
        if not study.notebook.is_file():
            raise ConfigError(f"{path}: the notebook {study.notebook} does not exist")
    folder = notebook.parent / SECTIONS
    details = tuple(
        Study(study.name + DETAILS, study.title, "", file, {profile: {} for profile in PROFILES})
        for study in studies
        if (file := folder / f"{study.name}.ipynb").is_file() and file != study.notebook
    )  # fmt: skip
    guides = tuple(_guide(path, str(name)) for name in data.get("guides", []))
    return Config(studies, frame, details, guides)


def _guide(path: Path, name: str) -> Study:
    """A guide of a study file, titled by its first heading up to a colon."""
    notebook = path.parent / f"{name}.ipynb"
    if not notebook.is_file():
        raise ConfigError(f"{path}: the notebook {notebook} does not exist")
    first = "".join(json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"])
    title = first.partition("\n")[0].removeprefix("# ").partition(":")[0]
    return Study(name, title, "", notebook, {profile: {} for profile in PROFILES})


def _study(
    folder: Path, name: str, title: str, question: str, measure: str = "", **profiles: Any
) -> Study:  # fmt: skip
    notebook, page = folder / f"{name}.ipynb", paths.REPORT / SECTIONS / f"{name}.ipynb"
    is_page = not notebook.is_file() and page.is_file()
    return Study(name, title, question, page if is_page else notebook, profiles, measure)


def choose_profile(name: str) -> tuple[str, str]:
    """The profile to use, and why, for people; `auto` takes what fits this machine's device."""
    if name in PROFILES:
        return name, "as asked"
    if name != AUTO:
        raise ConfigError(f"profile {name!r} is unknown; known: {listed([AUTO, *PROFILES])}")
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
