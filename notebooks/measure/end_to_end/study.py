"""Study 06: whole training steps, alone, in turns, under load and under the profiler."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fusedlib.bench import roofline, sustained
from fusedlib.bench.cases import Case
from measure import study
from measure.end_to_end import cases, races
from measure.end_to_end.measure import measure
from measure.study import Experiment, Positive, Study

AUTOCAST = ["fp32", "bf16 autocast"]
DTYPES = ["float32", "bfloat16"]
Cases = list[dict[str, Any]]


class Sizes(study.Sizes):
    """Models, contexts and seconds of study 06."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """cuda, mps, cpu, or auto for the best there is"""
    models: list[str] = ["nano", "micro"]
    """sizes of the Transformer, smallest first"""
    contexts: Annotated[list[int], Field(min_length=1)] = [16]
    """tokens a sequence; the first is the one looked at closely"""
    precisions: list[str] = ["fp32", "bf16 autocast", "bf16"]
    """see the method"""
    whole: list[str] = []
    """sizes that are also compiled, at the first context"""
    chosen: list[str] = ["nano"]
    """sizes with other MLPs, and with sdpa in place of plain attention"""
    providers: list[str] = ["all"]
    """MLPs by rival, `all` for every one"""
    split: list[str] = ["nano"]
    """sizes with every fp32 projection by fusedlib.linear"""
    loaded: list[str] = ["nano"]
    """sizes whose other MLPs also run sustained, with energy"""
    load_seconds: Annotated[float, Field(ge=0.01, le=60)] = 0.2
    """seconds of a sustained measurement, after heating"""
    profiled: list[str] = ["nano"]
    """sizes also run under the profiler"""
    cpu: list[str] = []
    """sizes also run on the CPU at the first context"""
    mps: list[str] = ["small"]
    """sizes also run on Apple's GPU, where there is one"""
    seconds: Annotated[float, Field(ge=0)] = 0.05
    """a step alone is measured for so long at least"""
    gemm_size: Positive = 256
    """of the square product taken as ceiling"""

    @property
    def shared(self) -> dict[str, Any]:
        """What all cases share."""
        return cases.setting(self.device, seconds=self.seconds)

    @property
    def first(self) -> list[int]:
        """The context that is looked at closely."""
        return self.contexts[:1]

    @property
    def longest(self) -> list[int]:
        """The longest context."""
        return [max(self.contexts)]


def _alone(sizes: Sizes) -> Cases:
    shared, precisions = sizes.shared, sizes.precisions
    listed = cases.steps(shared, sizes.models, sizes.first, precisions, inference=True)
    listed += roofline.cases(
        sizes.where, DTYPES, gemm_size=sizes.gemm_size, copy_mib=64, repetitions=7
    )
    listed += cases.steps(shared, sizes.models, sizes.contexts[1:], precisions)
    listed += cases.steps(shared, sizes.chosen, sizes.longest, precisions, attention="sdpa")
    listed += cases.optimizers(shared, sizes.models)
    for device, models in (("mps", sizes.mps), ("cpu", sizes.cpu)):
        elsewhere = cases.setting(device, seconds=sizes.seconds)
        listed += cases.steps(elsewhere, models, sizes.first, ["fp32"])
    return listed


def _turns(sizes: Sizes) -> Cases:
    shared, first = sizes.shared, sizes.first
    halves = ["bf16", "bf16 autocast"]
    return [
        *cases.races(shared, "mlp", sizes.chosen, first, ["fp32"], sizes.providers),
        *cases.races(shared, "mlp", sizes.chosen, sizes.longest, halves, sizes.providers),
        *cases.races(shared, "model", sizes.whole, first, AUTOCAST),
        *cases.races(shared, "model", sizes.split, first, ["fp32"], ["eager", "linear"]),
    ]


def _under_load(sizes: Sizes) -> list[Case]:
    shared, names = sizes.shared, sizes.providers
    listed = cases.races(shared, "mlp", sizes.loaded, sizes.first, ["fp32"], names)
    listed += cases.races(shared, "mlp", sizes.loaded, sizes.longest, ["bf16"], names)
    return [*sustained.loaded_cases(listed, seconds=sizes.load_seconds)]


def _products(sizes: Sizes) -> Cases:
    return sustained.products(
        sizes.where, DTYPES, size=sizes.gemm_size, seconds=sizes.load_seconds
    )  # fmt: skip


def _profiles(sizes: Sizes) -> Cases:
    return cases.steps(
        sizes.shared, sizes.profiled, sizes.first, AUTOCAST, experiment="profile"
    )  # fmt: skip


STUDY = Study(
    "06_end_to_end", Sizes,
    [
        Experiment("steps alone", measure, _alone),
        Experiment("steps in turns", races.RACE, _turns),
        Experiment("steps under load", races.LOADED, _under_load),
        Experiment("products under load", sustained.product, _products),
        # The profiler comes last: what it leaves behind could slow a step.
        Experiment("profiles", measure, _profiles),
    ],
)  # fmt: skip
