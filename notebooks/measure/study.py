"""A study as a value: its sizes, what it measures, and what its columns mean.

Each study's module declares one `STUDY`, and everything reads it: a notebook measures with
`study.measure("03_kernels", sizes)`, `make record` and the claims list its cases, tables and
figures take labels, units and orders from its columns.

    class Sizes(study.Sizes):
        widths: list[Positive] = [64, 256]
        \"""Hidden sizes of the layer.\"""

    STUDY = Study(
        "03_kernels", Sizes,
        experiments=[Experiment("time", RACE, lambda sizes: cases(sizes.widths))],
        columns={"median_ms": Column("time", "3 ms")},
    )
"""

import ast
import contextlib
import importlib
import site
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from measure.racing.cases import Case, device_of
from measure.recording import paths
from measure.recording.results import Recorder, case_id
from study.errors import SentenceError, SizesError

if TYPE_CHECKING:
    import pandas as pd

    from measure.racing.race import Race

PROFILES = ("quick", "full")
Positive = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=65536)]
"""Rows, columns or tokens of a tensor that fits any device, or MiB of it."""
Measure = Callable[[Case], dict[str, Any]]
"""Gives the figures of a single case."""


class Sizes(BaseModel):
    """How much a study measures; defaults are those of the profile `quick`.

    Unknown names and values of another type are refused. A docstring below a field says what it
    is; `make list` shows it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )  # fmt: skip
    device: str = "auto"
    """cuda, cpu, or auto for the best there is"""

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """The type of each size, with its bounds."""
        return {
            name: Annotated[info.annotation, info] for name, info in cls.model_fields.items()
        }  # fmt: skip

    @property
    def where(self) -> str:
        """The device's type; of "auto" the best that this machine has."""
        return device_of(self.device)


@dataclass(frozen=True)
class PerRun:
    """A way to measure that is made anew for each run, from its sizes."""

    make: Callable[[Any], Measure]


@dataclass(frozen=True)
class Experiment:
    """Cases that are measured in one way.

    Attributes:
        name: what it is about, for people.
        run: a race, in which the cases of a session are timed in turns; or what gives the figures
            of a single case.
        cases: the cases for given sizes, in the order they are measured.
    """

    name: str
    run: "Race | Measure | PerRun"
    cases: Callable[[Any], Iterable[Case]]


@dataclass(frozen=True)
class Column:
    """What a column of the rows means to a reader.

    Attributes:
        label: on axes and in the heads of tables.
        format: of its values with their unit, such as "3 ms"; see `press.formats`.
        names: how its values read, such as {"bfloat16": "bf16"}; their order is the order in which
            they are shown, those that are not named last.
        log: whether its axis is logarithmic.
    """

    label: str
    format: str = ""
    names: Mapping[Any, str] = field(default_factory=dict)
    log: bool = False


@dataclass(frozen=True)
class Study:
    """A study: what it measures and what its rows mean.

    Attributes:
        name: of its rows' file, such as "03_kernels".
        sizes: the type of its sizes.
        experiments: in the order in which they are measured.
        columns: by name, those that tables and figures show.
        derived: adds columns that follow from others, such as a model's name from its sizes.
        repeats: fields that tell repetitions of a measurement apart, over which a picture takes the
            median.
        shown: statuses of the rows whose figures may be shown; a study whose subject is wrong shows
            "wrong" too.
        registers: a module beside the notebooks whose rivals this study alone measures.
    """

    name: str
    sizes: type[Sizes]
    experiments: Sequence[Experiment]
    columns: Mapping[str, Column] = field(default_factory=dict)
    derived: "Callable[[pd.DataFrame], pd.DataFrame]" = lambda rows: rows
    repeats: Sequence[str] = ("round", "seed", "repetitions", "seconds")
    shown: Sequence[str] = ("ok",)
    registers: str | None = None

    @cached_property
    def fields(self) -> list[str]:
        """Names of the fields of its cases."""
        every = self.cases(self.sizes()).values()
        return [*dict.fromkeys(name for case in every for name in case if name != "provider")]

    def sized(self, values: Mapping[str, Any]) -> Any:
        """The sizes with these values, defaults for all others.

        Raises:
            SizesError: an unknown name, or a value that is not allowed.
        """
        try:
            return self.sizes.model_validate(dict(values))
        except ValidationError as error:
            raise SizesError(f"{self.name}: {self._reason(error, values)}") from None

    def _reason(self, error: ValidationError, values: Mapping[str, Any]) -> str:
        """The first of pydantic's errors as a sentence."""
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            return f"{name!r} is unknown; known: {', '.join(self.sizes.model_fields)}"
        if first["type"] == "value_error":
            return f"{name}: {first['ctx']['error']}".removeprefix(": ")
        return refusal(name, self.sizes.kinds()[name], values[name])

    def plan(self, sizes: Sizes) -> list[tuple[Experiment, list[Case]]]:
        """Each experiment that has cases, with them.

        Raises:
            SizesError: the sizes name something unknown, or do not fit together.
        """
        try:
            listed = [(one, list(one.cases(sizes))) for one in self.experiments]
        except ValueError as error:
            raise SizesError(f"{self.name}: {error}") from None
        return [(one, cases) for one, cases in listed if cases]

    def cases(self, sizes: Sizes) -> dict[str, Case]:
        """The cases of all experiments by their ids, in the order they are measured."""
        return {case_id(self.name, case): case for _, some in self.plan(sizes) for case in some}

    def measure(self, sizes: Sizes, recorder: Recorder) -> Recorder:
        """Measure what the recorder lacks, and give it back."""
        for experiment, cases in self.plan(sizes):
            run = experiment.run
            if isinstance(run, PerRun):
                run = run.make(sizes)
            if callable(run):
                recorder.sweep(cases, run)
            else:
                recorder.race(run, cases)
        return recorder


def measure(name: str, sizes: Mapping[str, Any], **knobs: Any) -> Recorder:
    """Measure of a study what this machine's recording lacks: what a notebook calls.

    While rows are replayed nothing is measured, and the recorder reads them.

    Args:
        name: of the study, such as "03_kernels".
        sizes: by name, and `profile`, which has all others and whose name the rows are filed under;
            by default `quick`.
        knobs: further sizes, which come first. One that is as `quick` has it is not set: another
            profile has its own.

    Raises:
        SizesError: an unknown name, or a value that is not allowed.
    """
    study, values = load(name), dict(sizes)
    profile, profiles = values.pop("profile", "quick"), _entries()[study.name]
    if profile not in PROFILES:
        known = " or ".join(PROFILES)
        raise SizesError(f"{study.name}: profile must be {known}, not {profile!r}")
    quick = dict(study.sized({}))
    turned = {k: v for k, v in knobs.items() if profile == "quick" or v != quick.get(k)}
    sized = study.sized({**profiles.get(profile, {}), **values, **turned})
    return study.measure(sized, Recorder(study.name, profile=profile))


# --- values in words -----------------------------------------------------------------------------


def parsed(name: str, text: str, kind: Any) -> Any:
    """The value of a type that a text of the command line stands for.

    Entries of a list are separated by commas, or written as Python's; a text is taken as it is, but
    for quotes around it.

    Raises:
        SizesError: it stands for none; the sentence begins with the name.
    """
    value: Any = _unquoted(text.strip())
    if kind_in_words(kind).startswith("list"):
        entries = [_unquoted(entry.strip()) for entry in value.split(",") if entry.strip()]
        value = _literal(value) if value.startswith("[") else entries
    try:
        adapter = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
        return adapter.validate_python(value, strict=False)
    except ValidationError:
        meant = [*map(_literal, value)] if isinstance(value, list) else _literal(value)
        with contextlib.suppress(ValidationError):
            return adapter.validate_python(meant)  # a number among the choices
        raise SizesError(refusal(name, kind, meant)) from None


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] in ("'", '"') else text


def _literal(text: Any) -> Any:
    """What a text reads as in Python, else the text."""
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def kind_in_words(kind: Any) -> str:
    """A type as an error names it, such as "list of int in [1..100]" or "auto, cuda or cpu"."""
    bounds: dict[str, Any] = {}
    while get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        for note in (part for one in notes for part in getattr(one, "metadata", [one])):
            bounds |= {name: getattr(note, name) for name in ("ge", "le") if hasattr(note, name)}
    if get_origin(kind) is list:
        return f"list of {kind_in_words(get_args(kind)[0])}"
    if get_origin(kind) is Literal:
        *most, last = map(str, get_args(kind))
        return f"{', '.join(most)} or {last}" if most else last
    within = f" in [{bounds.get('ge', '')}..{bounds.get('le', '')}]" if bounds else ""
    return f"{kind.__name__}{within}"


def refusal(name: str, kind: Any, value: Any) -> str:
    """The sentence that refuses a value, with what is allowed."""
    return f"{name} must be {kind_in_words(kind)}, not {value!r}"


# --- the studies that there are ------------------------------------------------------------------


def load(name: str) -> Study:
    """The study of that name in `notebooks/study.toml`, or of the part after its underscore.

    Raises:
        ValueError: unknown, with those that are known.
    """
    known = names()
    [*matching] = (full for full in known if name in (full, full.partition("_")[2]))
    if not matching:
        raise SentenceError(f"study {name!r} is unknown; known: {', '.join(known)}")
    return declared(_entries()[matching[0]]["measure"])


def declared(module: str) -> Study:
    """The study that a module declares, after what registers rivals for it."""
    study: Study = importlib.import_module(module).STUDY
    if study.registers:
        site.addsitedir(str(paths.NOTEBOOKS))
        importlib.import_module(study.registers)
    return study


@cache
def full_cases(name: str) -> dict[str, Case]:
    """What the profile `full` measures of a study on a CUDA GPU, by the cases' ids, in order."""
    study = load(name)
    return study.cases(full_sizes(study))


def full_sizes(study: Study) -> Any:
    """The sizes of the profile `full` on a CUDA GPU."""
    return study.sized({"device": "cuda"} | _entries()[study.name]["full"])


def names() -> list[str]:
    """Names of the studies, in the report's order."""
    return [name for name, entry in _entries().items() if "measure" in entry]


@cache
def _entries() -> dict[str, dict[str, Any]]:
    text = (paths.NOTEBOOKS / "study.toml").read_text(encoding="utf-8")
    return {entry["name"]: entry for entry in tomllib.loads(text)["study"]}
