"""Study 10: whole Llama training steps; who computes them, what they hold, how far they reach.

An *arm* is a rival of the task "llama": it takes a Hugging Face model, changes this one model and
gives what is called with tokens and labels. No class is patched, so that arms share a process, and
in races of forward and backward one set of weights.

experiment  what is measured
step        forward and backward, or a whole step with AdamW, all arms in turns
families    forward and backward of other families of models
fp32        the same in fp32, at a setting of torch's fp32 products
sustained   forward and backward under load, with energy
memory      two steps watched by the allocator's history: what fills the peak
limit       the largest batch or the longest context whose step fits
first-steps losses of a training's first steps, beside those with exact gradients
gradients   errors of gradients at weights of a Hugging Face training, by `Trajectory`
"""

from collections.abc import Iterable
from typing import Any

from fusedlib.bench.arguments import require_known, require_least
from measure.llama.alone import GROWING, MEASURES, measure
from measure.llama.arms import BASELINE, OTHER_ATTENTION, PARTS, TASK, causal_attention
from measure.llama.exact import EXACT, gradients
from measure.llama.models import CONFIGS, build, copy_of, tokens
from measure.llama.races import FP32, LOADED, RACE, few_threads, path_of
from measure.llama.trainer import LlamaTrainer
from measure.llama.training import (
    FIRST_STEPS,
    MOMENT_SEEDS,
    MOMENTS,
    SEEDS,
    Trajectory,
    loss_distances,
    wrong_gradients,
)
from measure.racing import rivals
from measure.racing.cases import device_of, grid
from measure.racing.settings import DTYPES

__all__ = [
    "BASELINE", "CONFIGS", "EXACT", "FIRST_STEPS", "FP32", "LOADED", "MOMENTS", "MOMENT_SEEDS",
    "OTHER_ATTENTION", "PARTS", "RACE", "SEEDS", "TASK",
    "LlamaTrainer", "Trajectory", "build", "cases", "causal_attention", "copy_of",
    "few_threads", "gradients", "loss_distances", "measure", "path_of", "tokens",
    "wrong_gradients",
]  # fmt: skip


def cases(
    experiment: str, arms: Iterable[str], *, model: str, dtype: str = "bfloat16",
    batch_size: int = 4, context_length: int = 2048, device: str = "auto", **more: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case an arm, of an experiment at the top of this file.

    Args:
        dtype: of weights, gradients and moments.
        more: what else makes the case: `optimizer` and `repetitions` of a step, `grows` of a
            limit, `seed`, `learning_rate` and `steps` of a training, of gradients its `step`,
            `precision` of fp32 products.
    """
    require_known("experiment", experiment, ("step", "families", "fp32", "gradients", *MEASURES))
    require_known("model", model, CONFIGS)
    require_known("dtype", dtype, DTYPES)
    require_known("grows", more.get("grows", ()), GROWING)
    require_least(1, batch_size=batch_size)
    require_least(2, context_length=context_length)
    shared = {
        "experiment": experiment, "model": model, "dtype": dtype, "batch_size": batch_size,
        "context_length": context_length, "device": device_of(device), **more,
    }  # fmt: skip
    return grid(shared, provider=rivals.chosen(TASK, arms))
