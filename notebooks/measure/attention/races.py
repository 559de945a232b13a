"""Attention's rivals and races: who computes it, on which problems, and how each is checked."""

import re
import warnings
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedlib.bench import check, machine, turns
from fusedlib.bench.arguments import require_known, require_least
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.problem import Operands
from fusedlib.bench.turns import Checked
from measure.attention import exact, footprint
from measure.attention.problem import AttentionProblem, draw, operands_bytes, plain_peak
from measure.racing import rivals, roofline
from measure.racing.cases import Case
from measure.racing.cases import grid as cases_of
from measure.racing.memory import TooLarge, require_memory
from measure.racing.race import Race
from measure.racing.rivals import Task, Workload, rival
from measure.racing.settings import DIRECTIONS
from models.transformer import plain_attention

EXPERIMENT = "attention"
TASK = Task[[Operands], Workload](EXPERIMENT)
BASELINE = "plain"
FUSED = "fused"
GRIDS = ("course", "published", "long")
"""Of the course behind seed 001, of what its script ran, and beyond what fits a card."""
PROBE = 128
_SHAPE = ("context_length", "head_dim", "batch_size", "dtype")
# How torch begins its refusal, on CUDA and elsewhere.
_REFUSED = ("No available kernel", "No viable backend")
_KEEPS_NO_SQUARE = frozenset({FUSED})


@rival(TASK, BASELINE, label="plain", slot=1)
def plain(operands: Operands) -> Workload:
    """Every step an operation of its own, as in `models.transformer`."""
    leaves = operands.leaves()
    return Workload(lambda: plain_attention(*leaves.values()), leaves)


def _backend(operands: Operands, backend: SDPBackend) -> Workload:
    query, key, value = operands.leaves().values()

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            forward()
        except RuntimeError as error:
            if not str(error).startswith(_REFUSED):
                raise
            raise Unavailable(_reasons(error, given)) from error
    return Workload(forward, operands.leaves())


for _name, _label, _slot, _traits, _sdpa in (
    ("math", "SDPA math", 3, frozenset[str](), SDPBackend.MATH),
    ("flash", "SDPA flash", 14, _KEEPS_NO_SQUARE, SDPBackend.FLASH_ATTENTION),
    ("efficient", "SDPA efficient", 4, _KEEPS_NO_SQUARE, SDPBackend.EFFICIENT_ATTENTION),
    ("cudnn", "SDPA cuDNN", 5, _KEEPS_NO_SQUARE, SDPBackend.CUDNN_ATTENTION),
):
    rival(
        TASK, _name, label=_label, slot=_slot, traits=_traits,
        settings=f"scaled_dot_product_attention, backend {_sdpa.name}",
    )(partial(_backend, backend=_sdpa))  # fmt: skip


@rival(
    TASK, "flash-4", label="FlashAttention-4", slot=7, traits=_KEEPS_NO_SQUARE,
    requires=("flash_attn.cute", "cutlass"), needs_cuda=True, dtypes=rivals.HALVES,
    capability=(9, 0),
)  # fmt: skip
def flash_4(operands: Operands) -> Workload:
    """flash_attn.cute.flash_attn_func, causal=True, written in CuTe's DSL."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    leaves = operands.leaves()

    def forward() -> Tensor:  # it takes tokens before heads
        turned = (leaf.transpose(1, 2) for leaf in leaves.values())
        mixed: Tensor = flash_attn_func(*turned, causal=True)[0]
        return mixed.transpose(1, 2)

    return Workload(forward, leaves)


@rival(TASK, "flex", label="FlexAttention", slot=6, traits=_KEEPS_NO_SQUARE | {"on request"})
def flex(operands: Operands) -> Workload:
    """FlexAttention with a causal block mask, torch.compile, fullgraph=True, dynamic=False."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = operands.leaves().values()
    device = query.device
    if device.type != "cuda":
        raise Unavailable(f"torch has FlexAttention's backward pass on CUDA only, not {device}")
    length = query.shape[-2]
    mask = create_block_mask(_causal, None, None, length, length, device=str(device))
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def forward() -> Tensor:
        mixed = compiled(query, key, value, block_mask=mask)
        assert isinstance(mixed, Tensor)  # it gives the logsumexp too, when asked for it
        return mixed

    return Workload(forward, operands.leaves())


@rival(TASK, "inductor", traits=frozenset({"on request"}))
def inductor(operands: Operands) -> Workload:
    """The plain one through torch.compile, default mode, fullgraph=True, dynamic=False."""
    leaves = operands.leaves()
    compiled = torch.compile(plain_attention, fullgraph=True, dynamic=False)
    return Workload(lambda: compiled(*leaves.values()), leaves)


def _reasons(error: RuntimeError, given: list[warnings.WarningMessage]) -> str:
    """Torch's reasons: it warns of each before it raises, and of the other backends too."""
    texts = [str(w.message).partition(" (Triggered internally")[0].strip() for w in given]
    others = ("not used because", "has been runtime disabled")
    reasons = [text for text in texts if not any(part in text for part in others)]
    return " ".join(dict.fromkeys(reasons)) or str(error).strip().splitlines()[0]


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def is_fused(name: str) -> bool:
    """Whether a rival keeps no T × T matrix."""
    return FUSED in rivals.get(TASK, name).traits


def counted_form(name: str) -> str | None:
    """The form by which `problem.kept` counts a rival; None where it is the compiler's choice."""
    return FUSED if is_fused(name) else name if name in (BASELINE, "math") else None


# --- what is measured ----------------------------------------------------------------------------


def cases(
    grid: str, contexts: Sequence[int], widths: Sequence[int], dtypes: Sequence[str],
    rival_names: Sequence[str], *, batch_size: int, repetitions: int, device: str,
    more: Iterable[str] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """One case a shape, dtype, direction and rival; dtype by dtype as they are given.

    Args:
        grid: one of `GRIDS`, for the notebook's selections.
        rival_names: `all` for every one but those that compile for long.
        more: a rival at one dtype and width besides, "inductor float32 64", or at one context of
            these, "flex float32 64 1024".
    """
    require_known("grid", grid, GRIDS)
    require_least(1, repetitions=repetitions)
    added = [_added(text) for text in more]
    shared = {
        "experiment": EXPERIMENT, "grid": grid, "repetitions": repetitions, "device": device
    }  # fmt: skip
    listed = []
    for dtype, width, context in product(dtypes, widths, contexts):
        problem = AttentionProblem(context, width, batch_size, dtype)
        shape = {name: getattr(problem, name) for name in _SHAPE}
        here = [
            name for name, at in added
            if all(str(shape[field]) == value for field, value in at.items())
        ]  # fmt: skip
        names = rivals.chosen(TASK, [*rival_names, *here])
        listed += cases_of(shared | shape, direction=DIRECTIONS, provider=names)
    return listed


def _added(text: str) -> tuple[str, dict[str, str]]:
    """A rival's name and the fields at which it is measured besides."""
    match = re.fullmatch(r"(\S+) (?P<dtype>\S+) (?P<head_dim>\d+)( (?P<context_length>\d+))?", text)
    if match is None:
        raise ValueError(
            "give a rival, a dtype, a width and at will a context, 'inductor float32 64' or "
            f"'flex float32 64 1024', got {text!r}"
        )
    fields = {name: value for name, value in match.groupdict().items() if value}
    return rivals.get(TASK, match[1]).name, fields


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, asked at a small context."""
    if reason := _refusal(*(case[n] for n in ("provider", "head_dim", "dtype", "device"))):
        raise Unavailable(reason)


@cache
def _refusal(name: str, head_dim: int, dtype: str, device: str) -> str | None:
    if device not in ("cpu", machine.device_type()):
        return f"this machine has no {device.upper()} device"
    one = rivals.get(TASK, name)
    try:
        one.check_available(device, dtype)
        one.build(draw(AttentionProblem(PROBE, head_dim, 1, dtype), device))
    except Unavailable as error:
        return str(error)
    except Exception:
        return None  # its own case tells what is wrong
    return None


def check_size(name: str, problem: AttentionProblem, device: str) -> None:
    """Whether a rival that holds T × T tensors is worth a try.

    Raises:
        TooLarge: it is counted far above the memory there is.
    """
    if not is_fused(name):
        need = plain_peak(problem, device) + operands_bytes(problem)
        require_memory(need / 2**30, device)


class Setup:
    """One problem, drawn, with the truth and the errors that plain attention makes on it."""

    def __init__(self, case: Case) -> None:
        self.problem, self.device = AttentionProblem.of(case), case["device"]
        self.operands = draw(self.problem, self.device)
        self.true = exact.results(self.operands)
        try:
            check_size(BASELINE, self.problem, self.device)
            whole = True
        except TooLarge:
            whole = False
        self.baseline = exact.baseline_errors(self.operands, self.true, whole=whole)

    def check(self, case: Case) -> Checked:
        """Set a rival up, hold all that it gives against the truth, and weigh what it holds."""
        name, dout = case["provider"], self.operands.dy
        check_size(name, self.problem, self.device)
        one = rivals.get(TASK, name)
        work = one.build(self.operands)
        errors = exact.errors(check.results_of(work, dout), self.true)
        figures = one.facts() | check.require(errors, self.baseline, self.problem.torch_dtype)
        figures |= footprint.measure(work, dout)
        return Checked(
            figures, lambda timed: turns.workload_turn(work, dout, timed, lambda again: {})
        )


RACE = Race(
    setup=Setup, fields=(*_SHAPE, "device"), available=available, warmup=1,
    settings=lambda case: roofline.precision_of("highest"),
)  # fmt: skip
