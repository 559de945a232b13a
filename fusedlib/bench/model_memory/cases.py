"""Study 09's cases: watched passes and plans of checkpointing, and what each needs by formula."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusedlib.bench import allocations, machine, results, sources, timing
from fusedlib.bench.model_memory.program import MODES
from fusedlib.models import activations, checkpointed, transformer
from fusedlib.models.checkpointed import Plan
from fusedlib.models.transformer import BATCH_SIZE, TransformerConfig, config

STUDY = "09_model_memory"
Case = dict[str, Any]
# A case is tried unless it is counted at this many times the memory there is.
HOPELESS = 1.5
GIB = 2**30


def code() -> str:
    """Fingerprint of all that measures this study."""
    shared = (allocations, timing, checkpointed, transformer)
    return results.code_fingerprint(*sources.modules_of(__package__), *shared)


def setting(
    model: str, context_length: int, *, attention: str, precision: str, device: str,
    batch_size: int = BATCH_SIZE,
) -> Case:  # fmt: skip
    """What every case of one model and size of work shares; device "auto" takes the best one.

    Raises:
        ValueError: unknown model, attention or precision, a context or batch below 1.
    """
    config(model, context_length=context_length, attention=attention)
    activations.widths(precision)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return {
        "model": model, "context_length": context_length, "batch_size": batch_size,
        "attention": attention, "precision": precision,
        "device": machine.device_type() if device == "auto" else device,
    }  # fmt: skip


def passes(
    model: str, contexts: Sequence[int], *, attentions: Sequence[str],
    precisions: Sequence[str], device: str,
) -> list[Case]:  # fmt: skip
    """Each mode at each context length, attention and precision, the largest context first.

    Without gradients the attention's kind hardly matters, and at shorter contexts less: the first
    kind is run everywhere, the others where they matter most.

    Raises:
        ValueError: as `setting`.
    """
    found = []
    for context in sorted(set(contexts), reverse=True):
        for mode in reversed(MODES):
            whole = context == max(contexts) and mode != MODES[0]
            for attention in attentions if whole else attentions[:1]:
                for precision in precisions:
                    shared = setting(
                        model, context, attention=attention, precision=precision, device=device
                    )
                    found.append({"experiment": "pass", "mode": mode, **shared})
    return found


def checkpoints(
    shared: Case, sizes: Iterable[int], nested: Iterable[int], first: Iterable[int],
    repetitions: int,
) -> list[Case]:  # fmt: skip
    """No checkpoint, then segments, the first blocks alone, and nested segments, of these sizes.

    Raises:
        ValueError: a size that the model's blocks do not allow, or no repetition.
    """
    plans = [Plan("none")]
    for kind, chosen in (("segments", sizes), ("first", first), ("nested", nested)):
        plans += [Plan(kind, size) for size in chosen]  # type: ignore[arg-type]
    layers = config(shared["model"]).num_layers
    for plan in plans:
        plan.segments(layers)
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    return [
        {
            "experiment": "checkpoint", "plan": plan.kind, "blocks": plan.size,
            "repetitions": repetitions, **shared,
        }
        for plan in plans
    ]  # fmt: skip


def label(case: Mapping[str, Any]) -> str:
    """A case in a few words."""
    what = (
        case["mode"]
        if case["experiment"] == "pass"
        else f"checkpoint {case['plan']} {case['blocks']}"
    )
    return (
        f"{case['model']} T={case['context_length']} {case['attention']} {case['precision']} {what}"
    )


def shape_of(case: Mapping[str, Any]) -> TransformerConfig:
    """The configuration that a case or a row speaks of."""
    context, attention = int(case["context_length"]), str(case["attention"])
    return config(str(case["model"]), context_length=context, attention=attention)


def plan_of(case: Mapping[str, Any]) -> Plan:
    """The plan of a case or row of checkpointing."""
    return Plan(case["plan"], int(case["blocks"]))


def counted(case: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by formula of what stays for a while in a pass: `weights`, `gradients`, `optimizer`
    (AdamW's two moments), `activations` and `casts` kept for backward; 0 where the mode has none.
    """
    shape, precision = shape_of(case), str(case["precision"])
    each = shape.num_parameters * activations.widths(precision).weight
    mode, batch = case["mode"], int(case["batch_size"])
    kept = activations.saved_bytes(shape, precision, str(case["device"]), batch)
    return {
        "weights": each,
        "gradients": each if mode == "step" else 0,
        "optimizer": 2 * each if mode == "step" else 0,
        "activations": 0 if mode == MODES[0] else kept,
        "casts": activations.cast_weights(shape, precision),
    }


def moments(case: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes by formula at the moments of which one is the peak, by category.

    `forward`: the loss has been computed; `loss`: its backward has begun; `update`: AdamW has every
    gradient. Temporaries are counted around the loss and in AdamW, which on CUDA takes the square
    roots of all second moments at once, elsewhere weight by weight, divided into a second tensor.
    """
    parts, shape = counted(case), shape_of(case)
    passing = activations.loss_temporaries(shape, str(case["precision"]), int(case["batch_size"]))
    stays = {name: parts[name] for name in ("weights", "optimizer")}
    kept = stays | {name: parts[name] for name in ("activations", "casts")}
    log_softmax = int(case["batch_size"]) * shape.context_length * shape.vocab_size * 4
    without = log_softmax if case["mode"] == MODES[0] else 0
    found = {"forward": kept | {"temporaries": passing["forward"] + without}}
    if case["mode"] == "step":
        each = activations.widths(str(case["precision"])).weight
        widest = max(shape.vocab_size, shape.d_ff, shape.d_model) * shape.d_model * each
        update = parts["weights"] if case["device"] == "cuda" else 2 * widest
        found["loss"] = kept | {"temporaries": passing["backward"]}
        found["update"] = stays | {"gradients": parts["gradients"], "temporaries": update}
    return found


def counted_peak(case: Mapping[str, Any]) -> int:
    """Bytes by formula at the peak of a case, all that is held."""
    if case["experiment"] == "pass":
        return max(sum(held.values()) for held in moments(case).values())
    shape, precision = shape_of(case), str(case["precision"])
    weights = shape.num_parameters * activations.widths(precision).weight
    held = checkpointed.held_bytes(
        shape, precision, str(case["device"]), plan_of(case), int(case["batch_size"])
    )
    return 2 * weights + max(held.values())


def hopeless(case: Mapping[str, Any]) -> str | None:
    """Why a case is not tried; None where it may fit."""
    facts = machine.describe()
    there = facts.device_memory_gib if case["device"] == "cuda" else None
    there = there or facts.memory_gib
    need = counted_peak(case) / GIB
    if there is None or need <= HOPELESS * there:
        return None
    return f"{need:.0f} GiB by formula, more than {HOPELESS:g} times the {there:.0f} GiB there are"
