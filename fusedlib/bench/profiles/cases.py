"""Study 08's cases: one training step each, taken apart by `torch.profiler`."""

from collections.abc import Mapping, Sequence
from typing import Any

from fusedlib.bench import results, sources, steps, timing
from fusedlib.models import ranges, transformer

STUDY = "08_profile"
# By name: dtype of the weights, and autocast's dtype or None.
PRECISIONS: dict[str, tuple[str, str | None]] = {
    "fp32": ("float32", None),
    "bf16 autocast": ("float32", "bfloat16"),
    "bf16": ("bfloat16", None),
}
PROVIDERS = ("eager", "inductor")
Case = dict[str, Any]


def code() -> str:
    """Fingerprint of all that decides this study's numbers."""
    own = sources.modules_of(__package__)
    return results.code_fingerprint(*own, ranges, steps, timing, transformer)


def cases(
    models: Sequence[str], contexts: Sequence[int], precisions: Sequence[str], *,
    attention: str = "plain", batch_size: int = transformer.BATCH_SIZE, provider: str = "eager",
    device: str, repetitions: int,
) -> list[Case]:  # fmt: skip
    """A case a size, context and precision, context by context in the order given.

    Args:
        models: sizes of the Transformer.
        contexts: tokens a sequence.
        precisions: names of `PRECISIONS`.
        attention: "plain" or "sdpa".
        batch_size: sequences a step.
        provider: "eager", or "inductor" for `torch.compile`.
        device: where it runs.
        repetitions: steps timed without the profiler.

    Raises:
        ValueError: an unknown size, precision or provider; a size that is not positive.
    """
    for model in models:
        transformer.config(model, attention=attention)
    if unknown := [p for p in precisions if p not in PRECISIONS]:
        raise ValueError(f"unknown precision {unknown[0]!r}; known: {', '.join(PRECISIONS)}")
    if provider not in PROVIDERS:
        raise ValueError(f"unknown provider {provider!r}; known: {', '.join(PROVIDERS)}")
    if min((*contexts, batch_size, repetitions), default=1) < 1:
        raise ValueError(
            f"contexts {list(contexts)}, batch_size {batch_size} and repetitions {repetitions} "
            "must be at least 1"
        )
    return [
        {
            "experiment": "profile", "model": model, "context_length": context,
            "batch_size": batch_size, "precision": precision, "attention": attention,
            "provider": provider, "device": device, "repetitions": repetitions,
        }
        for context in contexts for precision in precisions for model in models
    ]  # fmt: skip


def label(case: Mapping[str, Any]) -> str:
    """A case in a few words."""
    text = f"{case['model']} context {case['context_length']} {case['precision']}"
    others = [case["attention"]] if case["attention"] != "plain" else []
    others += [case["provider"]] if case["provider"] != "eager" else []
    return " ".join([text, *others])
