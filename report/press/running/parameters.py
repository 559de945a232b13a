"""What a notebook is run with: the knobs that its cell tagged `parameters` declares, and its sizes.

Of a notebook that measures, the cell declares one more, the table `sizes`: what is set of its
study's sizes, and the profile.
"""

from collections.abc import Collection, Sequence
from typing import Any

import nbformat

from measure import study as studies
from press.knobs import PROFILE, SIZES, TYPES, Knob, declared
from press.running.config import ConfigError, Study, listed

TAG = "parameters"


def knobs(study: Study) -> dict[str, Knob]:
    """What a notebook's cell declares, by name.

    Raises:
        ConfigError: it is no notebook, not one cell is tagged, or a line has no known type.
    """
    try:
        cells = nbformat.read(study.notebook, as_version=4).cells
    except Exception:
        raise ConfigError(f"{study.notebook} is not a Jupyter notebook") from None
    tagged = [cell for cell in cells if TAG in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        count = len(tagged) or "no"
        raise ConfigError(
            f"{study.notebook}: {count} cells carry the tag '{TAG}'; exactly one must"
        )
    found = declared(tagged[0].source)
    for name, one in found.items():
        if one.kind is None or (one.kind is dict) > (name == SIZES and bool(study.measure)):
            raise ConfigError(
                f"{study.notebook}: parameters cell: {name} must read `name: type = default  "
                f"# help`, the type one of {listed(sorted(TYPES))}"
            )
    return found


def settable(study: Study) -> dict[str, Knob]:
    """What may be set of a notebook, by name: all sizes of its study, and knobs that are none."""
    parameters = {
        name: knob for name, knob in knobs(study).items()
        if knob.kind is not dict and name != PROFILE
    }  # fmt: skip
    if study.measure:
        sizes = studies.declared(study.measure).sizes
        for name, size in sizes.model_fields.items():
            kind, meaning = sizes.kinds()[name], size.description or ""
            parameters[name] = Knob(kind, repr(size.default), meaning)
    return parameters


def choose(
    parts: Sequence[Study], settings: Sequence[str], profile: str
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """What each notebook is run with: the profile, the study file's values, the command line's.

    The last are `name=value`, for every notebook that has the parameter, or `notebook.name=value`.

    Raises:
        ConfigError, SizesError: an unknown name, or a value that is not allowed.
    """
    known = {part.name: settable(part) for part in parts}
    chosen = {part.name: {**part.profiles[profile], PROFILE: profile} for part in parts}
    for name, values in chosen.items():
        _require_known(values, [*known[name], PROFILE], f"study file, {name}, {profile}: ")
    for setting in settings:
        target, equals, text = setting.partition("=")
        notebook, dot, key = target.strip().rpartition(".")
        if not equals or key in ("", PROFILE):
            advice = "write name=value, and for the profile use PROFILE=quick or PROFILE=full"
            raise ConfigError(f"{setting!r} is no setting; {advice}")
        if dot and notebook not in known:
            raise ConfigError(
                f"{setting!r}: notebook {notebook!r} is unknown or not selected; "
                f"known: {listed(sorted(known))}"
            )
        takers = [notebook] if dot else [name for name in known if key in known[name]]
        _require_known([key], {n for taker in takers or known for n in known[taker]})
        for name in takers:
            chosen[name][key] = studies.parsed(f"{name}: {key}", text, known[name][key].kind)
    return {part.name: _injected(part, chosen[part.name]) for part in parts}


def _require_known(names: Collection[str], known: Collection[str], where: str = "") -> None:
    for name in names:
        if name not in known:
            text = listed(sorted({*known} - {PROFILE}))
            raise ConfigError(f"{where}parameter {name!r} is unknown; known: {text}")


def _injected(part: Study, values: dict[str, Any]) -> dict[str, Any]:
    """The knobs among these values, and a table of all sizes; its cases are listed for a check."""
    injected = {name: value for name, value in values.items() if name in knobs(part)}
    if not part.measure:
        return injected
    study = studies.declared(part.measure)
    sizes = {name: value for name, value in values.items() if name in study.sizes.model_fields}
    study.plan(study.sized(sizes))
    return {**injected, SIZES: {PROFILE: values[PROFILE], **sizes}}
