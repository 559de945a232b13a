"""Rows of study 09 as a GPU would give them if the formulas were right to the byte."""

import card_rows

from fusedlib.bench.model_memory import cases
from fusedlib.bench.model_memory.timeline import CATEGORIES
from fusedlib.models import activations, checkpointed

MACHINE = card_rows.head(cases.STUDY)
MIB = 2**20
LINE = "mm ← fusedlib/models/transformer.py:264 forward"


def watched(case, **fields):
    """A row of a watched pass: one event a moment, the peak where the formula says."""
    parts, moments = cases.counted(case), cases.moments(case)
    at = max(moments, key=lambda name: sum(moments[name].values()))
    held = {name: moments[at].get(name, 0) / MIB for name in CATEGORIES}
    peak = sum(held.values())
    ends = {"forward": "forward 1", "loss": "backward 1", "update": "step 1"}
    names = ["built", "begin 1", *(ends[name] for name in moments)]
    places = list(range(1, len(names) + 1))
    figures = {
        "events": len(names), "events_peak_mib": peak, "peak_mib": peak + 1.0,
        "requested_peak_mib": peak, "reserved_peak_mib": peak + 100.0,
        "peak_at": places[names.index(ends[at])] - 1, "moment_names": names, "moment_at": places,
        "live_at": [place - 1 for place in places], "weights_bytes": parts["weights"],
        "gradients_bytes": parts["gradients"], "state_bytes": parts["optimizer"],
        "largest_count": [64], "largest_bytes": [8 * MIB], "largest_category": ["activations"],
        "largest_where": [LINE], **_one_size(case),
        **{f"peak_{name}_mib": v for name, v in held.items()},
        **{f"forward_{name}_mib": parts.get(name, 0) / MIB for name in CATEGORIES},
        **{f"live_{name}_mib": _live(moments, name, parts) for name in CATEGORIES},
        **_sections(moments), **(_saved(case) if case["mode"] == "forward" else {}),
    }  # fmt: skip
    return MACHINE | case | figures | fields


def _live(moments, name, parts):
    before = parts["weights"] / MIB if name == "weights" else 0.0
    return [before, before, *(held.get(name, 0) / MIB for held in moments.values())]


def _sections(moments):
    names = {"forward": "forward", "loss": "backward", "update": "step"}
    return {f"peak_in_{names[n]}_mib": sum(h.values()) / MIB for n, h in moments.items()}


def _saved(case):
    shape, batch = cases.shape_of(case), case["batch_size"]
    found = {"casts": activations.cast_weights(shape, case["precision"])}
    items = shape.num_layers * activations.of_block(shape, case["precision"], "cuda", batch)
    for item in items + activations.of_head(shape, case["precision"], batch):
        found[item.part] = found.get(item.part, 0) + item.nbytes
    return {f"saved_{part.replace(' ', '_')}_bytes": n for part, n in found.items()}


def _one_size(case):
    shape = cases.shape_of(case)
    each = activations.tensor_bytes(shape, case["precision"], case["batch_size"])
    return {"kept_sizes_bytes": [each], "kept_sizes_count": [7]}


def plan(case, **fields):
    """A row of a plan that takes 100 ms a pass through the blocks and holds what is counted."""
    shape, one = cases.shape_of(case), cases.plan_of(case)
    held = checkpointed.held_bytes(shape, case["precision"], "cuda", one, case["batch_size"])
    passes = one.passes(shape.num_layers)
    time = 100.0 * (passes + 2)
    figures = {
        "kept_mib": 1.0, "peak_mib": max(held.values()) / MIB, "median_ms": time,
        "median_low_ms": time - 1, "median_high_ms": time + 1, "num_layers": shape.num_layers,
    }  # fmt: skip
    if one.kind != "none":
        figures |= {"ratio": time / 300, "ratio_low": time / 301, "ratio_high": time / 299}
    return MACHINE | case | figures | fields


def oom(case, reason="CUDA out of memory. Tried to allocate 2 GiB.", **fields):
    """A row that did not fit."""
    return MACHINE | case | {"status": "oom", "reason": reason} | fields


def full():
    """What profile full asks for; under autocast the large context needs checkpoints."""
    precisions = activations.PRECISIONS
    asked = cases.passes(
        "2.7b", [128, 256, 512], attentions=["plain", "sdpa"], precisions=precisions, device="cuda"
    )
    rows = [watched(case) for case in asked]
    for precision in ("bf16 autocast", "bf16"):
        shared = cases.setting("2.7b", 5120, attention="sdpa", precision=precision, device="cuda")
        for case in cases.checkpoints(shared, [1, 2, 4, 6, 8, 32], [4, 6], [16], 5):
            fits = precision == "bf16" or case["plan"] != "none"
            rows.append(plan(case) if fits else oom(case))
    return rows
