"""Study 09: what fills memory in a training step of a whole model, counted, watched and traded for
time.

A *pass* is watched by the allocator's history from before the model is built. A *plan* of
checkpointing is watched too, its gradients are held against those of another plan, and it is timed
in turns with no checkpoint at all.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor, nn

from fusedlib.bench import check, timing
from fusedlib.bench.arguments import require_least
from fusedlib.bench.attempt import Unavailable, Wrong, is_out_of_memory
from measure import allocator_history, study
from measure.allocator_history import History, KnownAddresses, watching
from measure.pass_memory import noting_saved
from measure.racing.cases import device_of, grid
from measure.racing.memory import require_memory
from measure.racing.settings import MIB
from measure.recording import paths
from measure.step_memory import Casts, curve, gradients_of, moments_of, total, watched_steps
from measure.study import Column, Experiment, PerRun, Positive, Study
from measure.transformer_trainer import Trainer
from models import activations, checkpointed, transformer
from models.checkpointed import CheckpointPlan
from models.transformer import BATCH_SIZE, TransformerConfig, config

MODES = ("forward, no_grad", "forward", "step")
STEPS = 2  # the second has AdamW's moments from its beginning
WHOLE = CheckpointPlan("none")
POINTS, LARGEST = 400, 8
GIB = 2**30
SETTING = ("model", "context_length", "batch_size", "attention", "precision", "device")
# The parts that `models.activations` names, by the modules' names.
PARTS = {
    "attention_norm": "attention norm", "attention": "attention", "mlp_norm": "mlp norm",
    "mlp": "mlp", "norm": "last norm", "output": "output",
}  # fmt: skip
Case = dict[str, Any]


# --- cases ---------------------------------------------------------------------------------------


def setting(
    model: str, context_length: int, *, attention: str, precision: str, device: str,
    batch_size: int = BATCH_SIZE,
) -> Case:  # fmt: skip
    """What every case of one model and size of work shares; device "auto" takes the best one."""
    config(model, context_length=context_length, attention=attention)
    activations.widths(precision)
    require_least(1, batch_size=batch_size)
    return {
        "model": model, "context_length": context_length, "batch_size": batch_size,
        "attention": attention, "precision": precision, "device": device_of(device),
    }  # fmt: skip


def passes(
    model: str, contexts: Sequence[int], *, attentions: Sequence[str],
    precisions: Sequence[str], device: str,
) -> list[Case]:  # fmt: skip
    """Each mode at each context length and precision, the largest context first.

    Without gradients the attention's kind hardly matters, and at shorter contexts less: the first
    kind is run everywhere, the others where they matter most.
    """
    cases = []
    for context in sorted(set(contexts), reverse=True):
        for mode in reversed(MODES):
            every = context == max(contexts) and mode != MODES[0]
            for attention in attentions if every else attentions[:1]:
                for precision in precisions:
                    shared = setting(
                        model, context, attention=attention, precision=precision, device=device
                    )
                    cases.append({"experiment": "pass", "mode": mode, **shared})
    return cases


def checkpoints(
    shared: Case, sizes: Iterable[int], nested: Iterable[int], first: Iterable[int],
    repetitions: int,
) -> list[Case]:  # fmt: skip
    """No checkpoint, then segments, the first blocks alone, and nested segments, of these sizes."""
    plans = [WHOLE]
    for kind, chosen in (("segments", sizes), ("first", first), ("nested", nested)):
        plans += [CheckpointPlan(kind, size) for size in chosen]  # type: ignore[arg-type]
    for plan in plans:
        plan.segments(config(shared["model"]).num_layers)
    require_least(1, repetitions=repetitions)
    fields = [{"plan": plan.kind, "blocks": plan.size} for plan in plans]
    return grid({"experiment": "checkpoint", "repetitions": repetitions, **shared}, plan=fields)


def shape_of(case: Mapping[str, Any]) -> TransformerConfig:
    """The configuration that a case or a row speaks of."""
    context, attention = int(case["context_length"]), str(case["attention"])
    return config(str(case["model"]), context_length=context, attention=attention)


def plan_of(case: Mapping[str, Any]) -> CheckpointPlan:
    """The plan of a case or row of checkpointing."""
    return CheckpointPlan(case["plan"], int(case["blocks"]))


# --- counts --------------------------------------------------------------------------------------


def moments(case: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes of a pass by formula at the moments of which one is the peak, by category.

    `forward`: the loss has been computed; `loss`: its backward has begun; `update`: AdamW has every
    gradient. Temporaries are counted around the loss and in AdamW, which on CUDA takes the square
    roots of all second moments at once, elsewhere weight by weight, divided into a second tensor.
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
    kept = stays | {"activations": saved, "casts": casts}
    counts = {"forward": kept | {"temporaries": passing["forward"]}}
    if mode == "step":
        widest = max(shape.vocab_size, shape.d_ff, shape.d_model) * shape.d_model * width
        update = weights if device == "cuda" else 2 * widest
        counts["loss"] = kept | {"temporaries": passing["backward"]}
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
    kept = activations.of_block(shape, precision, str(row["device"]), batch)
    return activations.tensor_bytes(shape, precision, batch), activations.total(kept)


# --- what runs -----------------------------------------------------------------------------------


class Program(Trainer):
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


def saved_bytes(program: Program) -> dict[str, int]:
    """Bytes that one forward keeps by part of the model, `casts` apart; weights and data left out.

    Autograd's saved-tensor hooks see each; what runs outside all parts is the loss.
    """
    model, nbytes = program.model, Counter[str]()
    given = [*model.parameters(), *model.buffers(), program.tokens, program.targets]
    casts = Casts(model.parameters())
    with _current_part(model) as part:

        def note(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            cast = storage.data_ptr() in casts.addresses
            nbytes["casts" if cast else part[-1]] += storage.nbytes()

        with noting_saved(given, note), casts:
            program.loss_by(WHOLE)
    return dict(nbytes)


@contextmanager
def _current_part(model: nn.Module) -> Iterator[list[str]]:
    """The part that runs now, on top of a stack."""
    stack, hooks = ["loss"], []
    for name, module in model.named_modules():
        if part := PARTS.get(name.rpartition(".")[2]):
            enter = module.register_forward_pre_hook(lambda *_, part=part: stack.append(part))
            leave = module.register_forward_hook(lambda *_: (stack.pop(), None)[1])
            hooks += [enter, leave]
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


# --- measuring -----------------------------------------------------------------------------------


class Measure:
    """Measures a case; one model at a time stays for the next plan of checkpointing."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._program: Program | None = None
        self._true: list[Tensor] = []
        self._baseline = 0.0
        self._whole_fits = True
        self._saved: set[tuple[str, str]] = set()

    def __call__(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The row's figures, in MiB and ms.

        Raises:
            Unavailable: this device's allocator tells nothing.
            TooLarge: a formula says that it is hopeless.
            Wrong: a plan's gradients differ from another plan's.
        """
        if case["device"] not in ("cuda", "cpu"):
            raise Unavailable(
                f"the allocator of {case['device']} keeps neither a history nor a peak"
            )
        check_size(case)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # on a CPU small models wait longer for a second than it helps
        try:
            return self._plan(case) if case["experiment"] == "checkpoint" else self._pass(case)
        finally:
            torch.set_num_threads(threads)

    def _pass(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """A snapshot takes up to 80 MB: the first of each mode and precision is kept."""
        self._forget(case["device"])
        kind = (case["mode"], case["precision"])
        figures = _watched(case, None if kind in self._saved else snapshot_path(case))
        self._saved.add(kind)
        return figures

    def _plan(self, case: Mapping[str, Any]) -> dict[str, Any]:
        program, plan = self._prepared(case), plan_of(case)
        both = {"plan": plan, "none": WHOLE}
        if plan == WHOLE or not self._fits(program):
            del both["none"]
        figures = _held(program, plan)
        error = gradient_error(gradients_of(program), self._true)
        figures |= {"gradient_error": error, "num_layers": program.shape.num_layers}
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
            ratio = times["plan"].ratio_to(times["none"])
            figures |= {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}
        return figures

    def _prepared(self, case: Mapping[str, Any]) -> Program:
        """The case's model. Its gradients are there from the beginning, as in accumulation, and
        those of a checkpoint at every block, run twice, say what is true and how true it is.
        """
        key = tuple(case[name] for name in SETTING)
        if self._program is None or key != self._key:
            self._forget(case["device"])
            program = Program.of(case, "forward+backward")
            for weight in program.model.parameters():
                weight.grad = torch.zeros_like(weight)
            program.run(CheckpointPlan("segments", 1))
            self._true = [g.clone() for g in gradients_of(program)]
            _zero(program)
            program.run(CheckpointPlan("segments", 1))
            self._baseline = gradient_error(gradients_of(program), self._true)
            self._key, self._program, self._whole_fits = key, program, True
        _clear(case["device"], workspaces=False)
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
                _clear(program.device.type, workspaces=False)
        return self._whole_fits

    def _forget(self, device: str) -> None:
        self._program, self._true = None, []
        _clear(device)


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


def _held(program: Program, plan: CheckpointPlan) -> dict[str, Any]:
    """MiB over base, weights and gradients, at the end of the forward and at the peak, and the
    largest blocks there. On CUDA the peak is the allocator's own count.
    """
    _zero(program)
    with _counted(program.device.type) as counters, watching(program.device) as watch:
        loss = program.loss_by(plan)
        watch.mark("forward")
        loss.backward()
    counters.pop("reserved_peak_mib", None)  # of the pass without checkpoints just before
    every = allocator_history.blocks(watch.history)
    held = total(allocator_history.live(every, len(watch.history.changes)))
    at, forward = int(np.argmax(held)), watch.history.moments["forward"]
    groups = _listed(allocator_history.largest(every, at + 1, LARGEST))
    del groups["largest_category"]  # nothing was named here
    return {
        "kept_mib": int(held[forward - 1]) / MIB, "events_peak_mib": int(held[at]) / MIB,
        "peak_mib": int(held[at]) / MIB, "peak_in": "forward" if at < forward else "backward",
        **groups, **counters,
    }  # fmt: skip


def _watched(case: Mapping[str, Any], kept_at: Path | None) -> dict[str, Any]:
    device, whole = case["device"], case["mode"] == "step"
    adam = "foreach" if device == "cuda" else "single"
    make = partial(Program.of, case, "step" if whole else "forward", adam=adam)
    quiet = torch.no_grad() if case["mode"] == MODES[0] else nullcontext()
    with _counted(device) as counters, quiet:
        program, watch, addresses = watched_steps(
            make, torch.device(device), STEPS if whole else 1, note_casts=True
        )
    figures = _figures(watch.history, addresses)
    figures |= {"peak_mib": figures["events_peak_mib"], **counters}
    if kept_at and device == "cuda":
        figures |= {"snapshot": kept_at.name, "snapshot_mib": watch.save(kept_at) / MIB}
    moments = moments_of(program.optimizer)
    held = {"weights": program.model.parameters(), "gradients": gradients_of(program)}
    for name, tensors in (held | {"state": moments}).items():
        figures[f"{name}_bytes"] = sum(t.nbytes for t in tensors)
    if case["mode"] == "forward":
        assert isinstance(program, Program)
        saved = saved_bytes(program)
        figures |= {f"saved_{part.replace(' ', '_')}_bytes": n for part, n in saved.items()}
    return figures


def snapshot_path(case: Mapping[str, Any]) -> Path:
    """Where CUDA's snapshot of a case lies, under the products."""
    names = ("attention", "precision", "mode")
    name = f"{case['model']} T{case['context_length']} {' '.join(case[name] for name in names)}"
    return paths.build_dir() / "snapshots" / f"{name.replace(' ', '-').replace(',', '')}.pickle"


def _figures(history: History, addresses: KnownAddresses) -> dict[str, Any]:
    """The timeline, its peak, the moments, and what the last forward left."""
    every = allocator_history.classify(history, addresses)
    held = allocator_history.live(every, len(history.changes))
    together, marks = total(held), history.moments
    forward = marks[addresses.forwards[-1][1]]
    before = ("weights", "gradients", "optimizer")  # there without the forward
    figures: dict[str, Any] = {
        "events_peak_mib": int(together.max()) / MIB,
        "moment_names": list(marks), "moment_at": list(marks.values()),
        **curve(held, POINTS, [m - 1 for m in marks.values()]),
        **_listed(allocator_history.largest(every, forward, LARGEST, before)),
    }  # fmt: skip
    for name, series in held.items():
        figures[f"forward_{name}_mib"] = int(series[forward - 1]) / MIB
    edges = list(marks.items())[list(marks).index(addresses.forwards[-1][0]) :]  # of the last pass
    for (_, low), (name, high) in pairwise(edges):
        figures[f"peak_in_{name.split()[0]}_mib"] = int(together[low - 1 : high].max()) / MIB
    return figures


def _listed(groups: Sequence[tuple[int, int, str, str]]) -> dict[str, list[Any]]:
    """Groups of blocks as a row's lists."""
    names = ("largest_count", "largest_bytes", "largest_category", "largest_where")
    return {name: [group[at] for group in groups] for at, name in enumerate(names)}


@contextmanager
def _counted(device: str) -> Iterator[dict[str, float]]:
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


def _clear(device: str, *, workspaces: bool = True) -> None:
    """Leave nothing of the case before on a GPU, also when that one ended in an exception.

    But for cuBLAS's workspaces, when the same model runs on.
    """
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


# --- the study -----------------------------------------------------------------------------------


class Sizes(study.Sizes):
    """Models, contexts and plans of study 09."""

    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"
    """cuda, cpu, or auto for the best there is"""
    model: str = "micro"
    """size of the model whose passes are watched"""
    contexts: list[int] = [16, 32]
    """tokens a sequence"""
    attentions: list[str] = ["plain"]
    """plain (as published), sdpa"""
    precisions: list[str] = ["fp32", "bf16 autocast", "bf16"]
    """of weights and products"""
    plan_model: str = "micro"
    """size of the model that is checkpointed"""
    plan_context: Positive = 32
    """tokens a sequence there"""
    plan_attention: Literal["plain", "sdpa"] = "plain"
    """plain or sdpa there"""
    plan_precisions: list[str] = ["fp32"]
    """of weights and products there"""
    segments: list[int] = [1, 2, 4]
    """blocks of a checkpointed segment"""
    nested: list[int] = [2]
    """the same, its blocks checkpointed again"""
    first: list[int] = [2]
    """how many of the first blocks are checkpointed alone"""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 3
    """timed passes a plan"""


def _cases(sizes: Sizes) -> list[Case]:
    cases = passes(
        sizes.model, sizes.contexts, attentions=sizes.attentions, precisions=sizes.precisions,
        device=sizes.device,
    )  # fmt: skip
    for precision in sizes.plan_precisions:
        shared = setting(
            sizes.plan_model, sizes.plan_context, attention=sizes.plan_attention,
            precision=precision, device=sizes.device,
        )  # fmt: skip
        plans = sizes.segments, sizes.nested, sizes.first
        cases += checkpoints(shared, *plans, sizes.repetitions)
    return cases


PHASES = {"forward": "forward pass", "backward": "backward pass", "step": "update"}
KINDS = {
    "other": "workspaces and data", "weights": "weights", "gradients": "gradients",
    "optimizer": "AdamW's moments", "activations": "kept activations",
    "casts": "bf16 copies of weights", "temporaries": "temporary tensors",
}  # fmt: skip
KEEPERS = {
    "mlp": "MLP", "attention": "attention", "attention_norm": "norms", "mlp_norm": "norms",
    "last_norm": "norms", "output": "output and loss", "loss": "output and loss",
    "casts": "bf16 copies of weights",
}  # fmt: skip
PLANS = {
    "none": "no checkpoint", "first": "some blocks", "segments": "all blocks", "nested": "nested",
}  # fmt: skip
COLUMNS = {
    "experiment": Column(
        "experiment", names={"pass": "passes", "checkpoint": "forward and backward"}
    ),
    "mode": Column(
        "mode",
        names={"forward, no_grad": "forward pass without gradients", "forward": "forward pass",
               "step": "training step"},
    ),
    "model": Column("model"),
    "context_length": Column("tokens a sequence", ",d", log=True),
    "attention": Column("attention", names={"plain": "plain attention", "sdpa": "fused attention"}),
    "precision": Column(
        "precision", names={"fp32": "fp32", "bf16 autocast": "bf16 autocast", "bf16": "bf16"}
    ),
    "setting": Column("model"),
    "peak_gib": Column("peak, GiB", "3", log=True),
    "counted_gib": Column("by hand, GiB", "3"),
    "over": Column("above the count", "2%"),
    "in_weights": Column("held, over the weights", "3×"),
    "moment": Column("highest in the", names={name: name for name in PHASES.values()}),
    "part": Column("held", names={name: name for name in KINDS.values()}),
    "part_gib": Column("held", "3 GiB"),
    "keeper": Column("kept by", names={name: name for name in KEEPERS.values()}),
    "kept_gib": Column("kept for the backward pass", "3 GiB"),
    "plan": Column("checkpoints", names=PLANS),
    "plan_name": Column("checkpoint"),
    "blocks": Column("blocks of a segment", ",d", log=True),
    "ratio": Column("times as long", "3×"),
    "counted_ratio": Column("by hand", "3×"),
    "cost": Column("GiB, or times as long", "3"),
    "what": Column("figure", names={
        "peak_gib": "peak, GiB", "ratio": "time, over that without checkpoints",
    }),
    "events_peak_mib": Column("sum of the history, MiB", ",d"),
    "requested_peak_mib": Column("asked for, MiB", ",d"),
    "peak_mib": Column("handed out, MiB", ",d"),
    "reserved_peak_mib": Column("in reserve, MiB", ",d"),
}  # fmt: skip


def described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what follows from them.

    Of every row `setting`, the model with its tokens; `peak_gib` and `counted_gib`, the peak
    measured and by formula, and `over`, by what share it lies above. Of a plan `plan_name`;
    `ratio`, its time over that of no checkpoint in the same turns, which is 1 for no checkpoint
    where that ran; `counted_ratio`, the same by counting passes.
    """
    used = ["peak_mib", "ratio", "mode", "plan", "blocks", *SETTING]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    cases = rows.to_dict("records")
    plans = {at: plan_of(case) for at, case in enumerate(cases) if case["plan"] in PLANS}
    names = [plan_name(plans[at]) if at in plans else None for at in range(len(cases))]
    ordered = sorted({*plans.values()}, key=lambda plan: ([*PLANS].index(plan.kind), plan.size))
    passes = {at: plan.passes(shape_of(cases[at]).num_layers) for at, plan in plans.items()}
    peak, counted = rows["peak_mib"].astype(float), pd.Series(map(counted_mib, cases), rows.index)
    whole = (rows["plan"] == "none") & (rows["status"] == "ok")
    return rows.assign(
        setting=[f"{c['model']}, {c['context_length']:,.0f} tokens" for c in cases],
        peak_gib=peak * MIB / GIB, counted_gib=counted * MIB / GIB, over=peak / counted - 1,
        plan_name=pd.Categorical(names, list(map(plan_name, ordered))),
        ratio=rows["ratio"].astype(float).mask(whole, 1.0),
        counted_ratio=[(passes[at] + 2) / 3 if at in passes else None for at in range(len(cases))],
    )  # fmt: skip


def plan_name(plan: CheckpointPlan) -> str:
    """Such as "every 2 blocks", as a reader would say it."""
    every = "every block" if plan.size == 1 else f"every {plan.size} blocks"
    first = "first block" if plan.size == 1 else f"first {plan.size} blocks"
    return {
        "none": "no checkpoint", "first": first, "segments": every, "nested": f"{every}, nested",
    }[plan.kind]  # fmt: skip


def by_cost(plans: pd.DataFrame) -> pd.DataFrame:
    """Of each plan two rows, its peak and its time over that of no checkpoint: `what` and `cost`.

    A machine on which a pass without checkpoints did not fit has no such time.
    """
    return _melted(plans, {"peak_gib": "peak_gib", "ratio": "ratio"}, "what", "cost")


def by_keeper(forwards: pd.DataFrame) -> pd.DataFrame:
    """Of each forward a row a part of the model: `keeper`, and `kept_gib`, what it keeps."""
    names = {f"saved_{name}_bytes": keeper for name, keeper in KEEPERS.items()}
    gib = {name: forwards.get(name, np.nan) / GIB for name in names}
    parts = _melted(forwards.assign(**gib), names, "keeper", "kept_gib")
    others = [name for name in ("machine", "recording", "case", "keeper") if name in parts]
    kept = parts.groupby(others, observed=True)["kept_gib"].transform("sum")
    summed = parts.assign(kept_gib=kept).drop_duplicates(others)
    summed.attrs = dict(forwards.attrs)
    return summed


def by_moment(steps: pd.DataFrame) -> pd.DataFrame:
    """Of each step a row a part at the highest moment of each phase of its second step.

    `moment` is the phase and `in_weights` its highest over the weights; `part` and `part_gib` are
    what is held at the highest of the moments that the row lists.
    """
    columns = [name for name in steps if not str(name).startswith("live_")]
    found = []
    for at, row in steps[steps["mode"] == "step"].iterrows():
        if row["status"] != "ok":
            continue
        held = pd.DataFrame({part: row[f"live_{kind}_mib"] for kind, part in KINDS.items()})
        ends = dict(zip(row["moment_names"], row["moment_at"], strict=True))
        for (_, low), (name, high) in pairwise([*ends.items()][-len(PHASES) - 1 :]):
            inside = held[[low - 1 <= moment <= high for moment in row["live_at"]]]
            highest = inside.loc[inside.sum(axis=1).idxmax()]
            phase = name.split()[0]
            over = row[f"peak_in_{phase}_mib"] * MIB / row["weights_bytes"]
            found += [(at, PHASES[phase], over, part, mib * MIB / GIB)
                      for part, mib in highest.items()]  # fmt: skip
    names = ["at", "moment", "in_weights", "part", "part_gib"]
    rows = steps[columns].join(pd.DataFrame(found, columns=names).set_index("at"), how="inner")
    rows.attrs = dict(steps.attrs)
    return rows


def _melted(rows: pd.DataFrame, names: Mapping[str, str], name: str, value: str) -> pd.DataFrame:
    """A row for each of some columns, by their names."""
    pieces = [rows.assign(**{name: text, value: rows[column]}) for column, text in names.items()]
    every = pd.concat(pieces, ignore_index=True)
    every.attrs = dict(rows.attrs)
    return every


STUDY = Study(
    "09_model_memory", Sizes,
    [Experiment("passes and plans", PerRun(lambda sizes: Measure()), _cases)], COLUMNS, described,
)  # fmt: skip
