"""A study as a value: its sizes, what it measures, and what its columns mean.

Each study's module declares one `STUDY`, and everything reads it: the notebook measures with
`STUDY.measure(sizes)`, `make record` and the claims list `STUDY.cases(sizes)`, tables and figures
take labels, units and orders from `STUDY.columns`.

    class Sizes(study.Sizes):
        widths: list[Positive] = [64, 256]
        \"""Hidden sizes of the layer.\"""

    STUDY = Study(
        "03_kernels", Sizes,
        experiments=[Experiment("time", RACE, lambda sizes: cases(sizes.widths))],
        columns={"median_ms": Column("time", "3 ms")},
    )
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fusedlib.bench.cases import Case
from fusedlib.bench.race import Race

if TYPE_CHECKING:
    import pandas as pd

Positive = Annotated[int, Field(ge=1)]


class Sizes(BaseModel):
    """How much a study measures; defaults are those of the profile `quick`.

    Unknown names and values of another type are refused. A docstring below a field says what it
    is; `make list` shows it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """Cases that are measured in one way.

    Attributes:
        name: in progress and errors.
        run: a race, in which the cases of a session are timed in turns; or a function that gives
            the figures of a single case.
        cases: the cases for given sizes, in the order they are measured.
    """

    name: str
    run: Race | Callable[[Case], dict[str, Any]]
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
    """

    name: str
    sizes: type[Sizes]
    experiments: Sequence[Experiment]
    columns: Mapping[str, Column] = field(default_factory=dict)
    derived: "Callable[[pd.DataFrame], pd.DataFrame]" = lambda rows: rows
