"""What fills memory in a training step of a whole model, counted, watched and traded for time.

A *pass* is watched by the allocator's history from before the model is built. A *plan* of
checkpointing is watched too, its gradients are held against those of another plan, and it is timed
in turns with no checkpoint at all. A plan is a race's `provider`, such as "segments 2".
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fusedlib.bench import check, timing
from fusedlib.bench.attempt import Unavailable, Wrong, free_memory, is_out_of_memory
from study.allocator import at_peak, kept, total, watching
from study.cases import Case, Row, device_of, grid
from study.fits import require_memory
from study.models import activations, checkpointed, transformer
from study.models.checkpointed import CheckpointPlan
from study.models.transformer import BATCH_SIZE, config
from study.race import each
from study.run import sized
from study.settings import MIB
from study.trainers import TransformerTrainer, gradients_of, moments_of, shape_of, watched_steps

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, cpu, or auto for the best there is
    "model": "micro",  # size of the model whose passes are watched
    "contexts": [16, 32],  # tokens a sequence
    "attentions": ["plain"],  # plain (as published), sdpa
    "precisions": ["fp32", "bf16 autocast", "bf16"],  # of weights and products
    "plan_model": "micro",  # size of the model that is checkpointed
    "plan_context": 32,  # tokens a sequence there
    "plan_attention": "plain",
    "plan_precisions": ["fp32"],
    "segments": [1, 2, 4],  # blocks of a checkpointed segment
    "nested": [2],  # the same, its blocks checkpointed again
    "first": [2],  # how many of the first blocks are checkpointed alone
}
FULL: dict[str, Any] = QUICK | {
    "model": "2.7b", "contexts": [128, 256, 512], "attentions": ["plain", "sdpa"],
    "plan_model": "2.7b", "plan_context": 2944, "plan_attention": "sdpa",
    "plan_precisions": ["bf16", "bf16 autocast"],
    "segments": [1, 2, 4, 6, 16], "nested": [6], "first": [16],
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
MODES = ("forward, no_grad", "forward", "step")
STEPS = 2  # the second has AdamW's moments from its beginning
WHOLE = CheckpointPlan("none")
REPETITIONS = 3  # timed passes a plan
GIB = 2**30


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """Each mode at each context and precision, the largest context first; then plans of one model.

    Without gradients the attention's kind hardly matters, and at shorter contexts less: the first
    kind is run everywhere, the others where they matter most.
    """
    s = sized(PROFILES, profile, sizes)
    listed = [
        {"experiment": "pass", "mode": mode,
         **setting(s.model, context, attention, precision, s.device)}
        for context in sorted({*s.contexts}, reverse=True) for mode in reversed(MODES)
        for attention in (
            s.attentions if context == max(s.contexts) and mode != MODES[0] else s.attentions[:1]
        )
        for precision in s.precisions
    ]  # fmt: skip
    plans = [WHOLE, *(CheckpointPlan("segments", size) for size in s.segments)]
    plans += [CheckpointPlan("first", size) for size in s.first]
    plans += [CheckpointPlan("nested", size) for size in s.nested]
    for plan in plans:
        plan.segments(config(s.plan_model).num_layers)
    for precision in s.plan_precisions:
        shared = setting(s.plan_model, s.plan_context, s.plan_attention, precision, s.device)
        listed += grid(
            {"experiment": "checkpoint", "repetitions": REPETITIONS, **shared},
            provider=[f"{plan.kind} {plan.size}" for plan in plans],
        )  # fmt: skip
    return listed


def setting(
    model: str, context_length: int, attention: str, precision: str, device: str,
    batch_size: int = BATCH_SIZE,
) -> dict[str, Any]:  # fmt: skip
    """What every case of one model and size of work shares; device "auto" takes the best one."""
    config(model, context_length=context_length, attention=attention)
    activations.widths(precision)
    return {
        "model": model, "context_length": context_length, "batch_size": batch_size,
        "attention": attention, "precision": precision, "device": device_of(device),
    }  # fmt: skip


def plan_of(case: Mapping[str, Any]) -> CheckpointPlan:
    """The plan of a case or row of checkpointing."""
    kind, size = str(case["provider"]).split()
    return CheckpointPlan(kind, int(size))  # type: ignore[arg-type]


def measure(race: list[Case]) -> list[Row]:
    """A row a case: a pass watched, or the plans of one model, in MiB and ms."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a CPU small models wait longer for a second than it helps
    try:
        return each(race, Plans() if race[0]["experiment"] == "checkpoint" else watched)
    finally:
        torch.set_num_threads(threads)
        clear(race[0]["device"])


# --- counts --------------------------------------------------------------------------------------


def moments(case: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes of a pass by formula, by category, when the loss has been computed, when its backward
    has begun, and when AdamW has every gradient. On CUDA AdamW takes the square roots of all second
    moments at once, elsewhere weight by weight, divided into a second tensor.
    """
    shape, precision = shape_of(case), str(case["precision"])
    mode, batch, device = case["mode"], int(case["batch_size"]), str(case["device"])
    width = activations.widths(precision).weight
    weights = shape.num_parameters * width
    passing = activations.loss_temporaries(shape, precision, batch)
    casts = activations.cast_weights(shape, precision)
    if mode == MODES[0]:  # nothing is kept, and the log-softmax goes with the rest
        log_softmax = 4 * batch * shape.context_length * shape.vocab_size
        temporaries = passing["forward"] + log_softmax
        return {"forward": {"weights": weights, "casts": casts, "temporaries": temporaries}}
    stays = {"weights": weights, "optimizer": 2 * weights if mode == "step" else 0}
    saved = activations.saved_bytes(shape, precision, device, batch)
    held = stays | {"activations": saved, "casts": casts}
    counts = {"forward": held | {"temporaries": passing["forward"]}}
    if mode == "step":
        widest = max(shape.vocab_size, shape.d_ff, shape.d_model) * shape.d_model * width
        update = weights if device == "cuda" else 2 * widest
        counts["loss"] = held | {"temporaries": passing["backward"]}
        counts["update"] = stays | {"gradients": weights, "temporaries": update}
    return counts


def counted_mib(case: Mapping[str, Any]) -> float:
    """Peak by formula, of what `peak_mib` measures: a pass whole, a plan over what it stands on."""
    if case["experiment"] == "pass":
        return max(sum(held.values()) for held in moments(case).values()) / MIB
    held = checkpointed.held_bytes(
        shape_of(case), str(case["precision"]), str(case["device"]), plan_of(case),
        int(case["batch_size"]),
    )  # fmt: skip
    return max(held.values()) / MIB


def check_size(case: Mapping[str, Any]) -> None:
    """Raise `TooLarge` for a case that is counted far above the memory there is."""
    width = activations.widths(str(case["precision"])).weight
    held = 2 * shape_of(case).num_parameters * width if case["experiment"] == "checkpoint" else 0
    require_memory((counted_mib(case) * MIB + held) / GIB, case["device"])


def block_bytes(row: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of a block's input and of all that the block keeps for its backward pass."""
    shape, precision, batch = shape_of(row), str(row["precision"]), int(row["batch_size"])
    held = activations.block_bytes(shape, precision, str(row["device"]), batch)
    return activations.tensor_bytes(shape, precision, batch), held


# --- what runs -----------------------------------------------------------------------------------


class Program(TransformerTrainer):
    """A Transformer whose forward follows a plan; autocast keeps its casts until a forward ends."""

    plan = WHOLE

    def around_forward(self) -> AbstractContextManager[object]:
        """Autocast where the precision asks for it, the loss included."""
        return self.precise()

    def forward(self) -> Tensor:
        """The loss, a scalar; the logits are given up with it."""
        logits = checkpointed.forward(self.model, self.tokens, self.plan)
        return transformer.loss(logits, self.targets)

    def loss_by(self, plan: CheckpointPlan) -> Tensor:
        """The loss of a forward with this plan."""
        self.plan = plan
        with self.around_forward():
            return self.forward()

    def run(self, plan: CheckpointPlan) -> None:
        """Forward and backward; gradients are added to those that are there."""
        self.loss_by(plan).backward()


# --- measuring -----------------------------------------------------------------------------------


def available(case: Case) -> None:
    """Raise `Unavailable` for a device whose allocator tells nothing."""
    if case["device"] not in ("cuda", "cpu"):
        raise Unavailable(f"the allocator of {case['device']} keeps neither a history nor a peak")


def watched(case: Case) -> dict[str, Any]:
    """The peak of a pass and its parts, and the bytes that its forward keeps, casts among them."""
    available(case)
    check_size(case)
    device, whole = case["device"], case["mode"] == "step"
    clear(device)
    adam = "foreach" if device == "cuda" else "single"
    make = partial(Program.of, case, "step" if whole else "forward", adam=adam)
    quiet = torch.no_grad() if case["mode"] == MODES[0] else nullcontext()
    with counted_by_cuda(device) as counters, quiet:
        program, watch = watched_steps(make, torch.device(device), STEPS if whole else 1)
    held = watch.held()
    figures = at_peak(held) | counters
    tensors = {"weights": program.model.parameters(), "gradients": gradients_of(program)}
    for name, own in (tensors | {"state": moments_of(program.optimizer)}).items():
        figures[f"{name}_bytes"] = sum(t.nbytes for t in own)
    if whole:
        low, high = (watch.history.moments[f"{name} {STEPS}"] for name in ("forward", "backward"))
        figures["peak_in_backward_mib"] = int(total(held)[low - 1 : high].max()) / MIB
    if case["mode"] == "forward":
        assert isinstance(program, Program)
        figures["saved_whole_bytes"] = saved_bytes(program)
    return figures


def saved_bytes(program: Program) -> int:
    """Bytes that one forward keeps, weights and data left out, by autograd's own hooks."""
    model = program.model
    given = [*model.parameters(), *model.buffers(), program.tokens, program.targets]
    return sum(one.nbytes for one in kept(partial(program.loss_by, WHOLE), given))


class Plans:
    """Measures the plans of one model, which stays for the next plan."""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._true: list[Tensor] = []
        self._baseline = 0.0
        self._whole_fits = True

    def __call__(self, case: Case) -> dict[str, Any]:
        """A plan's memory, its gradients' error, and its time beside no checkpoint."""
        available(case)
        check_size(case)
        program, plan = self._prepared(case), plan_of(case)
        both = {"plan": plan, "none": WHOLE}
        if plan == WHOLE or not self._fits(program):
            del both["none"]
        figures = held_by(program, plan)
        error = gradient_error(gradients_of(program), self._true)
        figures["gradient_error"] = error
        dtype = torch.float32 if case["precision"] == "fp32" else torch.bfloat16
        allowed = check.allowed(self._baseline, dtype)
        if not error <= allowed:
            raise Wrong(f"gradients: error {error:.2e}, allowed {allowed:.2e}", figures)
        times = timing.in_turns(  # all in it have just run once: no round to warm them up
            {name: lambda one=one: program.run(one) for name, one in both.items()},  # type: ignore[misc]
            device=program.device, warmup=0, repetitions=case["repetitions"], flush_l2=False,
        )  # fmt: skip
        figures |= times["plan"].figures()
        if "none" in times:
            figures["ratio"] = times["plan"].ratio_to(times["none"]).value
        return figures

    def _prepared(self, case: Case) -> Program:
        """The model. Its gradients are there from the beginning, as in accumulation, and
        those of a checkpoint at every block, run twice, say what is true and how true it is.
        """
        if self._program is None:
            clear(case["device"])
            program = Program.of(case, "forward+backward")
            for weight in program.model.parameters():
                weight.grad = torch.zeros_like(weight)
            program.run(CheckpointPlan("segments", 1))
            self._true = [g.clone() for g in gradients_of(program)]
            _zero(program)
            program.run(CheckpointPlan("segments", 1))
            self._baseline = gradient_error(gradients_of(program), self._true)
            self._program = program
        clear(case["device"], workspaces=False)
        return self._program

    def _fits(self, program: Program) -> bool:
        """Whether a pass without any checkpoint fits, which warms it up; not tried again if not."""
        if self._whole_fits:
            try:
                program.run(WHOLE)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._whole_fits = False
            if not self._whole_fits:
                clear(program.device.type, workspaces=False)
        return self._whole_fits


def gradient_error(gradients: list[Tensor], true: list[Tensor]) -> float:
    """The largest ‖g − g₀‖ / ‖g₀‖ of all weights; NaN where one is, or one is missing."""
    if len(gradients) != len(true):
        return float("nan")
    errors = [
        ((g.float() - t.float()).norm() / t.float().norm()).item()
        for g, t in zip(gradients, true, strict=True)
    ]
    return float(np.max(errors))


def _zero(program: Program) -> None:
    for gradient in gradients_of(program):
        gradient.zero_()


def held_by(program: Program, plan: CheckpointPlan) -> dict[str, Any]:
    """MiB over base, weights and gradients, at the peak, on CUDA by the allocator's own count, and
    the pass in which that lies.
    """
    _zero(program)
    with counted_by_cuda(program.device.type) as counters, watching(program.device) as watch:
        loss = program.loss_by(plan)
        watch.mark("forward")
        loss.backward()
    counters.pop("reserved_peak_mib", None)  # of the pass without checkpoints just before
    held, forward = total(watch.held()), watch.history.moments["forward"]
    peak_in = "forward" if int(np.argmax(held)) < forward else "backward"
    return {"peak_mib": int(held.max()) / MIB, "peak_in": peak_in, **counters}


@contextmanager
def counted_by_cuda(device: str) -> Iterator[dict[str, float]]:
    """Peaks of what is done inside as CUDA's allocator counts them itself: handed out and asked
    for over what there was, and held in reserve. Nothing elsewhere.
    """
    figures: dict[str, float] = {}
    if device != "cuda":
        yield figures
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    yield figures
    after = torch.cuda.memory_stats()
    for row_name, name in (("", "allocated"), ("requested_", "requested")):
        peak, held = f"{name}_bytes.all.peak", f"{name}_bytes.all.current"
        figures[f"{row_name}peak_mib"] = (after[peak] - before[held]) / MIB
    figures["reserved_peak_mib"] = after["reserved_bytes.all.peak"] / MIB


def clear(device: str, *, workspaces: bool = True) -> None:
    """Leave nothing of the case before on a GPU, but cuBLAS's workspaces when the model runs on."""
    if device == "cuda" and workspaces and torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    free_memory()


# --- rows ----------------------------------------------------------------------------------------

_ALLOCATOR = {"requested_peak_mib": "asked_gib", "reserved_peak_mib": "reserved_gib"}


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the peak measured and by formula, `over`, by what share it lies above, and what was
    asked of CUDA's allocator and held in reserve; a plan with its name and its time over that of no
    checkpoint in the same turns, which is 1 for no checkpoint where that ran.
    """
    used = ["peak_mib", *_ALLOCATOR, "ratio", "mode", "experiment", "provider", "status"]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    listed = rows.to_dict("records")
    plans = [plan_of(c) if c["experiment"] == "checkpoint" else None for c in listed]
    peak = rows["peak_mib"].astype(float)
    counted = pd.Series(map(counted_mib, listed), rows.index, dtype=float)
    whole = pd.Series([plan == WHOLE for plan in plans], rows.index, dtype=bool)
    return rows.assign(
        plan=[plan.kind if plan else None for plan in plans],
        blocks=[plan.size if plan else np.nan for plan in plans],
        plan_name=[plan_name(plan) if plan else None for plan in plans],
        setting=[f"{c['model']}, {c['context_length']:,.0f} tokens" for c in listed],
        peak_gib=peak * MIB / GIB, counted_gib=counted * MIB / GIB, over=peak / counted - 1,
        **{name: rows[mib].astype(float) / 1024 for mib, name in _ALLOCATOR.items()},
        ratio=rows["ratio"].astype(float).mask(whole & (rows["status"] == "ok"), 1.0),
    )  # fmt: skip


def plan_name(plan: CheckpointPlan) -> str:
    """Such as "every 2 blocks", as a reader would say it."""
    every = "every block" if plan.size == 1 else f"every {plan.size} blocks"
    first = "first block" if plan.size == 1 else f"first {plan.size} blocks"
    return {
        "none": "no checkpoint", "first": first, "segments": every, "nested": f"{every}, nested",
    }[plan.kind]  # fmt: skip
