"""Study 07: causal attention in turns, and the device's ceilings."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fusedlib.bench import rivals, roofline
from measure import study
from measure.attention import races
from measure.study import Experiment, Positive, Size, Study

Cases = list[dict[str, Any]]


class Sizes(study.Sizes):
    """Contexts, widths and rivals of study 07."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """cuda, mps, cpu, or auto for the best there is"""
    contexts: list[int] = [32, 64, 128]
    """tokens a sequence"""
    widths: list[int] = [64, 16]
    """of the one head; figures show the first"""
    dtypes: list[str] = ["float32"]
    """dtypes of all tensors"""
    ways: list[str] = ["all"]
    """who is measured; all: every registered way that need not compile"""
    compiled: list[str] = []
    """besides: "inductor float32 64", or at one context "flex float32 64 1024\""""
    published_contexts: list[int] = [16, 32]
    """of the published script's grid, fp32"""
    published_widths: list[int] = [256, 1024]
    """of that grid"""
    long_contexts: list[int] = []
    """beyond the course's, until plain attention does not fit"""
    batch_size: Positive = 8
    """sequences"""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 3
    """rounds that are measured"""
    gemm_size: Size = 256
    """rows and columns of the product that is the ceiling"""
    copy_mib: Size = 32
    """size of the copy that is the ceiling"""


def _ceilings(sizes: Sizes) -> Cases:
    return roofline.cases(
        sizes.where, sizes.dtypes, gemm_size=sizes.gemm_size, copy_mib=sizes.copy_mib,
        repetitions=sizes.repetitions,
    )  # fmt: skip


def _races(sizes: Sizes) -> Cases:
    shared: dict[str, Any] = {
        "batch_size": sizes.batch_size, "repetitions": sizes.repetitions, "device": sizes.where
    }  # fmt: skip
    asked = rivals.chosen(races.TASK, sizes.ways)
    few = [name for name in asked if name == races.BASELINE or races.is_fused(name)]
    script = [races.BASELINE, "inductor"] if sizes.compiled else [races.BASELINE]
    contexts, first, dtypes = sizes.contexts, sizes.widths[:1], sizes.dtypes
    more = {"more": sizes.compiled, **shared}
    return [
        *races.cases("course", contexts, first, dtypes, sizes.ways, **more),
        *races.cases("long", sizes.long_contexts, first, dtypes, few, **shared),
        *races.cases(
            "published", sizes.published_contexts, sizes.published_widths, ["float32"], script,
            **shared,
        ),
        *races.cases("course", contexts, sizes.widths[1:], dtypes[:1], few, **more),
        *races.cases("course", contexts[:1], sizes.widths[1:], dtypes[1:], few, **more),
    ]  # fmt: skip


STUDY = Study(
    "07_attention", Sizes,
    [
        Experiment("ceilings", roofline.measure, _ceilings),
        Experiment("attention", races.RACE, _races),
    ],
)  # fmt: skip
