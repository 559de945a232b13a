"""Study 06's cases: steps, MLPs in turns, optimizers, and steps under the profiler."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusedlib import functional, modules
from fusedlib.bench import check, machine, results, roofline, sources, timing
from fusedlib.bench import steps as steps_of_study_01
from fusedlib.models import flops, mlps, transformer

STUDY = "06_end_to_end"
PRECISIONS = {
    "fp32": "weights and products in fp32, torch's setting highest",
    "bf16 autocast": "weights in fp32, products in bf16 by torch.autocast",
    "bf16": "weights, products and the optimizer's state in bf16",
}
MODES = {
    "eager": "plain PyTorch",
    "compiled": "torch.compile of the whole model",
    "compiled blocks": "one block compiled, its graph shared by all layers",
}
OPTIMIZERS = ("for-loop", "foreach", "fused")
Case = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all cases of a run share.

    Attributes:
        device: where it runs; "auto" takes the best there is.
        batch_size: sequences a step.
        warmup: steps before the clock.
        seconds: measuring ends after so long, but not before `least` steps.
        least: fewest measured steps.
        few: fewest where they take more than a second each (`running.LONG_S`), not in turns.
        most: most measured steps.

    Raises:
        ValueError: a number out of its bounds.
    """

    device: str = "auto"
    batch_size: int = transformer.BATCH_SIZE
    warmup: int = 2
    seconds: float = 0.5
    least: int = 5
    few: int = 3
    most: int = 20

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.warmup < 1 or self.few < 1:
            raise ValueError(f"batch_size, warmup and few must be at least 1, got {self}")
        if not 1 <= self.least <= self.most:
            raise ValueError(f"measured steps must be 1 <= least <= most, got {self}")
        if self.device == "auto":
            object.__setattr__(self, "device", machine.device_type())

    def fields(self) -> Case:
        """As fields of a case."""
        return asdict(self)


def code() -> str:
    """Fingerprint of all that measures this study and of the kernels behind the fused MLP."""
    shared = (
        check,
        roofline,
        steps_of_study_01,
        timing,
        flops,
        mlps,
        transformer,
        functional,
        modules,
    )
    own = sources.modules_of(__package__)
    return results.code_fingerprint(*own, *shared, *sources.kernel_modules())


def _check(models: Sequence[str], precisions: Sequence[str], contexts: Sequence[int]) -> None:
    for model in models:
        transformer.config(model)
    if unknown := [p for p in precisions if p not in PRECISIONS]:
        raise ValueError(f"unknown precision {unknown[0]!r}; known: {', '.join(PRECISIONS)}")
    if low := [c for c in contexts if c < 1]:
        raise ValueError(f"a context has at least one token, got {low[0]}")


def steps(
    setting: Setting, models: Sequence[str], contexts: Sequence[int], precisions: Sequence[str],
    *, mode: str = "eager", attention: str = "plain", inference: bool = False,
) -> list[Case]:  # fmt: skip
    """Full training steps with AdamW, a context after the other, sizes as given.

    `inference` times the model without gradients too.

    Raises:
        ValueError: an unknown size, precision or mode, or a context below 1.
    """
    _check(models, precisions, contexts)
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    return [
        {
            "experiment": "step", "model": model, "context_length": context,
            "precision": precision, "mode": mode, "attention": attention,
            "inference": inference, **setting.fields(),
        }
        for context in contexts for model in models for precision in precisions
    ]  # fmt: skip


def mlp_cases(
    setting: Setting, models: Sequence[str], contexts: Sequence[int], precisions: Sequence[str],
    providers: Sequence[str], *, attention: str = "plain",
) -> list[Case]:  # fmt: skip
    """The same step with each provider's MLP; those of one model take turns.

    Raises:
        ValueError: an unknown size, precision or provider, or a context below 1.
    """
    _check(models, precisions, contexts)
    if unknown := [p for p in providers if p not in mlps.PROVIDERS]:
        raise ValueError(f"unknown MLP {unknown[0]!r}; known: {', '.join(mlps.PROVIDERS)}")
    return [
        {
            "experiment": "mlp", "mlp": provider, "model": model, "context_length": context,
            "precision": precision, "attention": attention, "together": ",".join(providers),
            **setting.fields(),
        }
        for context in contexts for model in models for precision in precisions
        for provider in providers
    ]  # fmt: skip


def optimizer_cases(setting: Setting, models: Sequence[str]) -> list[Case]:
    """AdamW's own step on fp32 weights, each way that torch has.

    Raises:
        ValueError: an unknown size.
    """
    _check(models, (), ())
    return [
        {"experiment": "optimizer", "optimizer": kind, "model": model, **setting.fields()}
        for model in models for kind in OPTIMIZERS
    ]  # fmt: skip


def profile_cases(
    setting: Setting, models: Sequence[str], context: int, precisions: Sequence[str]
) -> list[Case]:
    """One eager forward and backward under torch's profiler: kernels, their time, casts.

    Raises:
        ValueError: an unknown size or precision, or a context below 1.
    """
    _check(models, precisions, [context])
    return [
        {
            "experiment": "profile", "model": model, "context_length": context,
            "precision": precision, "attention": "plain", **setting.fields(),
        }
        for model in models for precision in precisions
    ]  # fmt: skip


def label(case: Mapping[str, Any]) -> str:
    """A case in a few words."""
    if case["experiment"] == "ceiling":
        return roofline.label(case)
    if case["experiment"] == "optimizer":
        return f"{case['model']} AdamW {case['optimizer']}"
    who = {"step": case.get("mode"), "mlp": f"MLP {case.get('mlp')}"}
    return (
        f"{case['model']}·{case['context_length']} {case['precision']} "
        f"{who.get(case['experiment'], case['experiment'])} on {case['device']}"
    )
