"""Study 12: a Llama compiled, in five parts, and two on several GPUs."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from fusedlib.bench import roofline
from measure import compilers, distributed, study
from measure.study import Experiment, Positive, Size, Study

FORWARD, INFERENCE, GENERATION, TRAINING, SEVERAL = range(1, 6)
LAYERED = ("inductor-layers", "fused-inductor-layers")
Part = Annotated[int, Field(ge=1, le=6)]
Compiled = Annotated[int, Field(ge=1, le=4)]
Cases = list[dict[str, Any]]


class Sizes(study.Sizes):
    """Parts, arms and models of study 12."""

    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """cuda, cpu, or auto for the best there is"""
    parts: list[Part] = [1, 2, 3, 4, 5]
    """forward, inference, generation, training, two GPUs"""
    arms: list[str] = ["all"]
    """who is measured; all: every arm but the one that searches"""
    compiled: list[Compiled] = [1]
    """parts in which arms that compile do so"""
    searched: list[Compiled] = []
    """parts in which torch.compile also searches (max-autotune)"""
    unmasked: list[Compiled] = [1]
    """parts in which torch.compile also runs without a mask"""
    layered: list[Literal[1, 4]] = [1]
    """parts in which layers are also compiled one by one"""
    model: str = "two small layers"
    """of measure.llama.CONFIGS, in parts 1 to 3"""
    trained: str = "two small layers"
    """the same, in parts 4 and 5"""
    batch_size: Positive = 2
    """sequences of the forward pass"""
    context_length: Annotated[int, Field(ge=16)] = 32
    """tokens a sequence, in parts 1, 4 and 5"""
    generated: Annotated[int, Field(ge=20)] = 40
    """tokens that are generated"""
    iterations: Annotated[int, Field(ge=3)] = 6
    """of a training"""
    limit_s: Annotated[float, Field(ge=0)] = 120.0
    """an arm that is not ready by then is stopped"""
    strategies: list[str] = ["fsdp2-2", "zero-2"]
    """how the processes of part 5 share a model"""
    several: list[str] = ["huggingface"]
    """arms of part 5"""
    processes: list[int] = [1, 2]
    """of part 5, one GPU each"""
    gemm_size: Size = 256
    """rows and columns of the product that is a ceiling"""
    copy_mib: Size = 32
    """size of the copy that is a ceiling"""

    @property
    def training(self) -> dict[str, Any]:
        """Model, batch and longest context of part 4."""
        return {"model": self.trained, "batch_size": 2, "context_length": self.context_length}


def _ceilings(sizes: Sizes) -> Cases:
    """What the card itself reaches: a large product, a copy."""
    return roofline.cases(
        sizes.where, ["bfloat16"], gemm_size=sizes.gemm_size, copy_mib=sizes.copy_mib,
        repetitions=7,
    )  # fmt: skip


def _of_part(
    sizes: Sizes, part: int, variants: list[dict[str, Any]], **size: Any
) -> Cases:  # fmt: skip
    """The arms that a part asks for."""
    more: dict[str, Sequence[int]] = {
        "inductor-graphs-searched": sizes.searched, "inductor-causal": sizes.unmasked,
        **dict.fromkeys(LAYERED, sizes.layered),
    }  # fmt: skip
    asked = [*sizes.arms, *(arm for arm, parts in more.items() if part in parts)]
    limit_s = sizes.limit_s if part in sizes.compiled else 0.0
    return compilers.cases(variants, asked, limit_s=limit_s, device=sizes.where, **size)


def _forward(sizes: Sizes) -> Cases:
    if FORWARD not in sizes.parts:
        return []
    return _of_part(
        sizes, FORWARD, [{"experiment": "forward"}], repetitions=10, model=sizes.model,
        batch_size=sizes.batch_size, context_length=sizes.context_length,
    )  # fmt: skip


def _by_token(sizes: Sizes) -> Cases:
    """Token by token, each arm with both samplers."""
    parts = [part for part in (INFERENCE, GENERATION) if part in sizes.parts]
    if not parts:
        return []
    variants = [{"experiment": "inference", "sampler": "multinomial"}] * (INFERENCE in parts)
    generation = [{"experiment": "generation", "sampler": s} for s in compilers.SAMPLERS]
    variants += generation * (GENERATION in parts)
    return _of_part(
        sizes, parts[0], variants, repetitions=sizes.generated // compilers.TURN,
        model=sizes.model, batch_size=1, context_length=sizes.generated,
    )  # fmt: skip


def _training(sizes: Sizes) -> Cases:
    if TRAINING not in sizes.parts:
        return []
    kinds = [{"experiment": "training", "optimizer": name} for name in compilers.OPTIMIZERS]
    return _of_part(
        sizes, TRAINING, kinds, repetitions=sizes.iterations // 3, **sizes.training
    )  # fmt: skip


def _dynamic(sizes: Sizes) -> Cases:
    """The same training with another length in every step."""
    if TRAINING not in sizes.parts:
        return []
    drawn = [{"experiment": "dynamic", "optimizer": "sgd"}]
    return _of_part(sizes, TRAINING, drawn, repetitions=sizes.iterations, **sizes.training)


def _several(sizes: Sizes) -> Cases:
    """One process under the first strategy, with which all others are compared; then these."""
    if SEVERAL not in sizes.parts:
        return []
    alone = sizes.strategies[:1], sizes.processes[:1]
    return [
        case for strategies, processes in (alone, (sizes.strategies, sizes.processes[1:]))
        for case in distributed.cases(
            strategies, sizes.several, model=sizes.trained, processes=processes, batch_sizes=[2],
            device=sizes.where, context_length=sizes.context_length, steps=sizes.iterations,
            warmup=max(1, sizes.iterations // 9),
        )
    ]  # fmt: skip


STUDY = Study(
    "12_compilers", Sizes,
    [
        Experiment("ceilings", roofline.measure, _ceilings),
        Experiment("forward", compilers.RACE, _forward),
        Experiment("token by token", compilers.RACE, _by_token),
        Experiment("training", compilers.RACE, _training),
        Experiment("other lengths", compilers.dynamic, _dynamic),
        Experiment("several GPUs", distributed.measure, _several),
    ],
)  # fmt: skip
