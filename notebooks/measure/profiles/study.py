"""Study 08: steps by the clock, and then the same steps under the profiler."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from measure import study
from measure.profiles import measure
from measure.profiles.columns import COLUMNS, described
from measure.study import Experiment, PerRun, Positive, Study

AUTOCAST = ["bf16 autocast"]


class Sizes(study.Sizes):
    """Models, contexts and seconds of study 08."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """cuda, mps, cpu, or auto for the best there is"""
    models: list[str] = ["nano", "micro"]
    """sizes of the Transformer, in fp32 and in bf16 autocast"""
    contexts: list[int] = [16]
    """tokens a sequence, for all sizes"""
    spanning: list[str] = ["nano"]
    """sizes at more contexts than those"""
    more_contexts: list[int] = [8]
    """tokens a sequence, for these"""
    fused: list[str] = ["nano"]
    """sizes with fused attention too, under autocast"""
    compiled: list[str] = []
    """sizes compiled by Inductor too, under autocast"""
    batch_size: Positive = 4
    """sequences a step"""
    seconds: Annotated[float, Field(ge=0)] = 0.02
    """a step without the profiler is clocked for so long at least"""


def _cases(experiment: str, sizes: Sizes) -> list[dict[str, Any]]:
    both, first = ["fp32", *AUTOCAST], sizes.contexts[:1]
    cases = partial(
        measure.cases, experiment, batch_size=sizes.batch_size, device=sizes.device
    )  # fmt: skip
    return [
        *cases(sizes.models, sizes.contexts, both),
        *cases(sizes.spanning, sizes.more_contexts, both),
        *cases(sizes.fused, first, AUTOCAST, attention="sdpa"),
        *cases(sizes.compiled, first, AUTOCAST, provider="inductor"),
    ]


def _timed(sizes: Sizes) -> study.Measure:
    return partial(measure.measure, seconds=sizes.seconds, blocks=3, steps=2, settling=6)


STUDY = Study(
    "08_profile", Sizes,
    [  # no step is clocked after the profiler
        Experiment("steps", PerRun(_timed), partial(_cases, "step")),
        Experiment("profiles", measure.measure, partial(_cases, "profile")),
    ],
    COLUMNS, described,
)  # fmt: skip
