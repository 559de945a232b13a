"""The operations of a Llama alone, each beside its rivals and what bounds it.

task       operands -> outputs                                       bounded by
loss       hidden (tokens, hidden), weight (vocabulary, hidden),     its three products
           target (tokens,) -> mean cross entropy
log-probs  the same -> log-probability of each target                its products
entropies  the same -> log-probabilities, entropies                  its products
norm       x, residual (tokens, hidden), weight (hidden,)            a copy of as many bytes
           -> y, s = x + residual
rope       q, k (batch, heads, context, head), cos, sin              a copy of as many bytes
           (1, context, head) -> q, k turned, in memory
           (batch, context, heads, head) as projections are

A task is an experiment of the topic; `operation` registers functions of the operands, named as
above, to the outputs in that order. What bounds a task does as much and no more.

Operands are normal, which makes words nearly equally likely; of `distribution` "zipf" they are like
a trained model's: a word's probability falls with the square of its rank, targets are drawn so, and
the loss is about 2.

Of a share of the tokens the target may be `IGNORED`: they have no loss, and a log-probability, an
entropy and gradients of 0. Entropies are what trainers log, without a gradient.

On CUDA a norm or rope is timed as a CUDA graph of `SETS` calls in a row, each on operands of its
own, all results kept: no host's time, and an L2 that holds little of what comes next. Of tasks with
a vocabulary some rivals wait for the host, so all are launched from Python.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

import fusedlib
from fusedlib import reference
from fusedlib.bench import timing
from fusedlib.bench.arguments import require_least
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.problem import Operands, Results
from fusedlib.bench.turns import Checked, Figures, Turn
from fusedlib.bench.workload import named
from study import allocator, liger, patched, rivals
from study.cases import Case, Row, grid
from study.operation import Operation, capture_call
from study.race import timed
from study.rivals import Bound, Rival, Task, Workload, rival
from study.settings import DTYPES

HEADS, KEY_HEADS = 32, 8
SETS = 8
SECONDS, MOST = 0.5, 30  # rounds go on for so long, and there are at most so many
BOTH = "forward+backward"
EPS, THETA, SCALE = 1e-5, 500_000.0, 0.02  # of Llama-3.2-1B
COMPILER: dict[str, Any] = {"fullgraph": True, "dynamic": False, "mode": "default"}
BOUND, COMPILED = frozenset({"bound"}), frozenset({"on request", "compiled"})
CUTE: dict[str, Any] = {"requires": ("cutlass",), "capability": (9, 0)}
IN_PLACE, WITHOUT_ENTROPIES = "in place", "without entropies"
ZIPF, FALL = "zipf", 2  # words of unlike frequency, which falls with this power of their rank
IGNORED, ROWS = -100, 1024  # a target that does not count; tokens of a checkpoint
OUTPUTS = {"loss": ("loss",), "norm": ("y", "s"), "rope": ("q_out", "k_out"),
           "log-probs": ("log_probs",), "entropies": ("log_probs", "entropy")}  # fmt: skip
"""Names of what each task gives, in rows."""
SCORES = ("log-probs", "entropies")
OF_VOCABULARY = ("loss", *SCORES)
Outputs = tuple[Tensor, ...]
Compute = Callable[..., Outputs]


@dataclass(frozen=True)
class Drawn(Operands):
    """Operands of a case."""

    case: Case = field(default_factory=dict)

    def all(self) -> list[Tensor]:
        """The operands and the outputs' gradients."""
        return [*self.tensors.values(), *self.dy]


TASKS = {name: Task[[Drawn], Workload | Bound](name) for name in OUTPUTS}
OperationRival = Rival[[Drawn], Workload | Bound]


def draw(case: Case, seed: int) -> Drawn:
    """Random operands of a case, the same ones for the same seed and device; target, cos and sin
    want no gradient.
    """
    on, dtype = {"device": case["device"]}, getattr(torch, case["dtype"])
    generator = torch.Generator(**on).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, **on)

    fixed: dict[str, Tensor] = {}
    batch, length, width = case["batch_size"], case["context_length"], case["hidden_size"]
    tokens = batch * length
    if case["experiment"] in OF_VOCABULARY:
        classes = case["vocabulary"]
        leaves = {"hidden": normal(tokens, width), "weight": SCALE * normal(classes, width)}
        if case.get("distribution") == ZIPF:
            rank = torch.arange(1, classes + 1, **on, dtype=torch.float64)
            leaves["hidden"] += 1  # so that what a row adds to all of a word's weights is its bias
            leaves["weight"] -= (FALL * rank.log() / width).float()[:, None]
            target = torch.multinomial(rank**-FALL, tokens, replacement=True, generator=generator)
        else:
            target = torch.randint(classes, (tokens,), generator=generator, **on)
        if ignored := tokens - counted(case):
            target[torch.randperm(tokens, generator=generator, **on)[:ignored]] = IGNORED
        fixed, outputs = {"target": target}, OUTPUTS[case["experiment"]]
        is_loss = case["experiment"] == "loss"
        dy = [torch.ones((), **on) if is_loss else normal(tokens) for _ in outputs]
    elif case["experiment"] == "norm":
        leaves = {"x": normal(tokens, width), "residual": normal(tokens, width),
                  "weight": 1 + 0.1 * normal(width)}  # fmt: skip
        dy = [normal(tokens, width).to(dtype) for _ in range(2)]
    else:
        head = width // case["heads"]
        q, k, dq, dk = (
            normal(batch, length, heads, head).transpose(1, 2)
            for heads in 2 * (case["heads"], case["key_heads"])
        )
        steps = THETA ** -(torch.arange(0, head, 2, **on) / head)
        angles = torch.outer(torch.arange(length, **on), steps).repeat(1, 2)[None]
        leaves, dy = {"q": q, "k": k}, [dq.to(dtype), dk.to(dtype)]
        fixed = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    drawn = {name: tensor.to(dtype).requires_grad_() for name, tensor in leaves.items()}
    return Drawn({**drawn, **fixed}, tuple(dy), case)


def results(work: Workload | Bound, dy: Outputs, direction: str) -> Results:
    """The outputs and, going backward, the gradients, of which none is copied into a leaf."""
    if isinstance(work, Bound):
        work.run(direction)
        return {}
    outputs = work.forward()
    given = {name: output.detach() for name, output in named(outputs).items()}
    if direction == "forward":
        return given
    wanted = {f"d_{name}": leaf for name, leaf in work.leaves.items() if leaf.requires_grad}
    sources = [y for y in outputs if y.requires_grad]
    upstream = [d for y, d in zip(outputs, dy, strict=True) if y.requires_grad]
    gradients = torch.autograd.grad(sources, list(wanted.values()), upstream)
    return given | dict(zip(wanted, gradients, strict=True))


# --- rivals --------------------------------------------------------------------------------------


def plain_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """linear, float() and cross_entropy, as transformers' models have them."""
    logits = linear(hidden, weight)
    return (cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target),)


def plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """The residual stream first, then its norm."""
    s = x + residual
    return reference.rms_norm(s, weight, EPS), s


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    """q and k one after the other."""
    return reference.rope(q, cos, sin), reference.rope(k, cos, sin)


def plain_scores(hidden: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> Outputs:
    """linear, float(), log_softmax and gather."""
    logits = linear(hidden, weight)
    every = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    outputs = [every.gather(-1, target.clamp(min=0)[:, None])[:, 0]]
    if entropy:
        known = every.detach()
        outputs.append(-(known.exp() * known).sum(-1))
    return tuple(each.masked_fill(target == IGNORED, 0.0) for each in outputs)


def scores_of(task: str, compute: Compute) -> Compute:
    """A function that may give entropies, as one of a task of log-probabilities."""

    @wraps(compute)
    def given(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        each, *logged = compute(hidden, weight, target, task == "entropies")
        return each, *(entropy.detach() for entropy in logged)

    return given


PLAIN: dict[str, Compute] = {"loss": plain_loss, "norm": plain_norm, "rope": plain_rope}
PLAIN |= {task: scores_of(task, plain_scores) for task in SCORES}


def operation(
    task: str, name: str, *, path: str | None = None, **options: Any
) -> Callable[[Compute], Compute]:  # fmt: skip
    """Register a function of a task's operands as its rival; `path` is which code it runs, where
    its package has several implementations.
    """
    traits = options.get("traits", ())

    def register(compute: Compute) -> Compute:
        def build(operands: Drawn) -> Workload:
            leaves = operands.leaves()
            called = compiled(compute) if "compiled" in traits else compute
            work = Workload(lambda: called(**leaves), leaves, path=path)
            return rivals.searched(work, operands.dy) if "searched" in traits else work

        build.__doc__ = compute.__doc__
        rival(TASKS[task], name, **options)(build)
        return compute

    return register


def scores(name: str, **options: Any) -> Callable[[Compute], Compute]:
    """Register a function whose last argument is whether entropies are wanted, for both tasks."""

    def register(compute: Compute) -> Compute:
        for task in SCORES:
            operation(task, name, **options)(scores_of(task, compute))
        return compute

    return register


def on_copies(one: OperationRival) -> OperationRival:
    """What works in place, with copies of its operands and of the gradients that come in."""

    def build(operands: Drawn) -> Workload:
        def forward() -> Outputs:
            copies = {name: 1 * tensor for name, tensor in operands.leaves().items()}
            own = rivals.workload(one, replace(operands, tensors=copies))
            return tuple(1 * output for output in own.forward())

        path = rivals.workload(one, operands).path
        return Workload(forward, operands.leaves(), path=path)

    return replace(one, build=build)


@cache
def compiled(compute: Compute) -> Compute:
    """A function through torch.compile."""
    return torch.compile(compute, **COMPILER)


class _Norm(NamedTuple):
    """What LlamaRMSNorm's forward reads of its module."""

    weight: Tensor
    variance_epsilon: float = EPS


def llama_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """transformers' LlamaRMSNorm after an addition."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    s = x + residual
    return LlamaRMSNorm.forward(_Norm(weight), s), s


def llama_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    """transformers' apply_rotary_pos_emb."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    turned: Outputs = apply_rotary_pos_emb(q, k, cos, sin)
    return turned


for _task, _compute in (PLAIN | {"norm": llama_norm, "rope": llama_rope}).items():
    _packages: tuple[str, ...] = () if _task in OF_VOCABULARY else ("transformers",)
    operation(_task, patched.BASELINE, requires=_packages)(_compute)
    # Not of "all": a compilation takes longer than everything else in `quick`.
    operation(_task, "inductor", requires=_packages, traits=COMPILED)(_compute)


def liger_loss(hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any) -> Outputs:
    """Liger's fused linear cross entropy."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return (liger_fused_linear_cross_entropy(hidden, weight, target, **settings),)


_liger = "Liger's fused linear cross entropy"
operation(
    "loss", "liger", path=liger.TRITON,
    settings=f"{_liger} as it comes: d_weight summed in the weight's dtype",
)(liger.by(liger.TRITON, liger_loss))  # fmt: skip
operation("loss", "liger-fp32", path=liger.TRITON, settings=f"{_liger}, accum_dtype=torch.float32")(
    liger.by(liger.TRITON, partial(liger_loss, accum_dtype=torch.float32))
)
operation(
    "loss", "liger-chunks", path=liger.TRITON,
    settings=f"{_liger}, chunk_mem_const=8: chunks of eight times as many tokens",
)(liger.by(liger.TRITON, partial(liger_loss, chunk_mem_const=8)))  # fmt: skip
operation("loss", "liger-chunks-32", path=liger.TRITON, settings=f"{_liger}, chunk_mem_const=32")(
    liger.by(liger.TRITON, partial(liger_loss, chunk_mem_const=32))
)


@operation("loss", "liger-flce-cute", **CUTE)
def liger_loss_cute(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """liger_kernel.functional's fused_linear_cross_entropy, impl="nvidia-cutedsl"."""
    from liger_kernel.functional import fused_linear_cross_entropy

    loss, *_ = fused_linear_cross_entropy(hidden, weight, target, impl=liger.CUTE)
    return (loss,)


@operation("loss", "liger-cute", **CUTE)
def liger_loss_hopper(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """Liger's liger_fused_linear_cross_entropy_sm90, in CuTe for Hopper."""
    return (liger.hopper_loss(hidden, weight, target),)


@operation("norm", "liger", path=liger.TRITON)
def liger_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """Liger's fused add RMSNorm, in_place=False: its default writes over the incoming gradient."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    outputs: Outputs = liger_fused_add_rms_norm(x, residual, weight, EPS, in_place=False)
    return outputs


@operation("norm", "liger-cute", **CUTE)
def liger_norm_cute(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """liger_kernel.functional.fused_add_rms_norm, impl="nvidia-cutedsl", in_place=False."""
    from liger_kernel.functional import fused_add_rms_norm

    given = fused_add_rms_norm(x, residual, weight, EPS, in_place=False, impl=liger.CUTE)
    outputs: Outputs = given
    return outputs


def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    """Liger's RoPE, in place on operands and incoming gradients that nobody else reads."""
    from liger_kernel.transformers import liger_rotary_pos_emb

    turned: Outputs = liger_rotary_pos_emb(q, k, cos, sin)
    return turned


_rope, _in_place = (liger_rope.__doc__ or "").rstrip("."), frozenset({IN_PLACE})
operation("rope", "liger", path=liger.TRITON, settings=_rope, traits=_in_place)(
    liger.by(liger.TRITON, liger_rope)
)
operation(
    "rope", "liger-cute", settings=f"{_rope}, LIGER_KERNEL_IMPL=cutedsl", traits=_in_place, **CUTE
)(liger.by(liger.CUTE, liger_rope))


@operation("loss", "torch-chunked")
def torch_chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """torch.nn.functional.linear_cross_entropy, options=LinearCrossEntropyOptions()."""
    options = torch.nn.LinearCrossEntropyOptions()
    return (torch.nn.functional.linear_cross_entropy(hidden, weight, target, options=options),)


def quack_loss(hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any) -> Outputs:
    """QuACK's chunked_linear_cross_entropy as it comes: it chooses its way, and searches tiles."""
    from quack.linear_cross_entropy import (  # type: ignore[import-not-found]
        chunked_linear_cross_entropy,
    )

    try:
        return (chunked_linear_cross_entropy(hidden, weight, target, **settings),)
    except ValueError as problem:  # its own, where a chunk has as many tokens as the width
        raise Unavailable(f"QuACK raises {problem}") from problem


_searched: dict[str, Any] = {"traits": frozenset({"searched"})}
operation("loss", "quack-searched", **_searched)(quack_loss)
operation("loss", "quack", settings="The same with its search off, tuned=False")(
    partial(quack_loss, tuned=False)
)
operation(
    "loss", "quack-base", settings="The same, use_scaled_exp=False, with its search", **_searched
)(partial(quack_loss, use_scaled_exp=False))
operation(
    "loss", "quack-chunks", settings="The same as it comes, chunk_size=2048", **_searched
)(partial(quack_loss, chunk_size=2048))  # fmt: skip


@operation("norm", "quack-rmsnorm")
def quack_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """quack.rmsnorm with its residual, prenorm=True, which searches nothing."""
    from quack import rmsnorm  # type: ignore[import-not-found]

    outputs: Outputs = rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)
    return outputs


def cut_loss(hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any) -> Outputs:
    """Cut cross entropy."""
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    return (linear_cross_entropy(hidden, weight, target, **settings),)


@cache
def _searching_cut() -> Any:
    """cut_cross_entropy imported once more, for CCE_AUTOTUNE counts while it is imported."""
    name = "cut_cross_entropy"

    def taken_out() -> dict[str, Any]:
        own = [each for each in sys.modules if each.partition(".")[0] == name]
        return {each: sys.modules.pop(each) for each in own}

    kept = taken_out()
    with patch.dict(os.environ, {"CCE_AUTOTUNE": "1"}):
        searching = importlib.import_module(name)
    taken_out()
    sys.modules.update(kept)
    return searching


@operation(
    "loss", "cut-searched", traits=frozenset({"searched"}),
    settings="Cut cross entropy as it comes, CCE_AUTOTUNE=1: it searches its tiles",
)  # fmt: skip
def cut_searched(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """Cut cross entropy with its search."""
    return (_searching_cut().linear_cross_entropy(hidden, weight, target),)


def cut_scores(hidden: Tensor, weight: Tensor, target: Tensor, _: bool, **how: Any) -> Outputs:
    """Log-probabilities as cut cross entropy's negative losses."""
    return (-cut_loss(hidden, weight, target, reduction="none", **how)[0],)


_CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "cut": ("as it comes: skips blocks of gradients below a 32nd of the dtype's eps", {}),
    "cut-fp32": (
        "accum_e_fp32=True, accum_c_fp32=True: skips blocks, fp32 sums",
        {"accum_e_fp32": True, "accum_c_fp32": True},
    ),
    "cut-full-c": (
        'impl="cce_kahan_full_c": skips blocks of d_hidden alone, fp32 sums',
        {"impl": "cce_kahan_full_c"},
    ),
    "cut-kahan": ('impl="cce_exact": skips nothing, fp32 sums', {"impl": "cce_exact"}),
}
for _name, (_how, _set) in _CUT.items():
    _options: dict[str, Any] = {"settings": f"Cut cross entropy {_how}"}
    operation("loss", _name, **_options)(partial(cut_loss, **_set))
    if _name in ("cut", "cut-kahan"):
        _options["traits"] = frozenset({WITHOUT_ENTROPIES})
        scores(_name, **_options)(partial(cut_scores, **_set))


@scores("trl", requires=("trl",))
def trl_scores(hidden: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> Outputs:
    """TRL's ChunkedLogProbFunction as its add_fused_lm_head calls it: of tokens that count."""
    from trl.trainer import utils  # type: ignore[import-not-found]

    counts, outputs = target != IGNORED, ("log_probs", "entropy")[: 1 + entropy]
    given = utils._ChunkedLogProbFunction.apply(
        hidden[counts], weight, None, target[counts], 1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None,
        1.0, outputs,
    )  # fmt: skip
    return tuple(
        each.new_zeros(counts.shape).masked_scatter(counts, each)
        for each in given if each is not None
    )  # fmt: skip


@scores("liger", traits=frozenset({WITHOUT_ENTROPIES}))
def liger_scores(hidden: Tensor, weight: Tensor, target: Tensor, _: bool) -> Outputs:
    """What LigerFusedLinearGRPOLoss has of a chunk, in its own chunks of 2,048 tokens."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    given = LigerFusedLinearPPOBase.chunk_forward(hidden[None], weight, target.clamp(min=0)[None])
    return (given[0].masked_fill(target == IGNORED, 0.0),)


@scores("liger-scaled")
def liger_scaled(hidden: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> Outputs:
    """LigerFusedLinearScaledCrossEntropyFunction, on Hopper by CuTe kernels."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Scaled

    given = Scaled.apply(hidden, weight, target, return_entropy=entropy)
    return (-given[0], given[1]) if entropy else (-given,)


@scores("checkpointed")
def checkpointed_scores(hidden: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> Outputs:
    """log_softmax of 1,024 tokens at a time, each under torch.utils.checkpoint."""
    parts = [
        checkpoint(plain_scores, some, weight, theirs, entropy, use_reentrant=False)
        for some, theirs in zip(hidden.split(ROWS), target.split(ROWS), strict=True)
    ]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


@scores("fused")
def fused_scores(hidden: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> Outputs:
    """fusedlib.linear_log_probs, which computes the logits again in backward."""
    given = fusedlib.linear_log_probs(hidden, weight, target, entropy=entropy)
    return (given.log_probs,) if given.entropy is None else (given.log_probs, given.entropy)


@operation("loss", "fused")
def fused_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """fusedlib.linear_cross_entropy as it comes, memory="balanced"; d_weight summed in fp32."""
    return (fusedlib.linear_cross_entropy(hidden, weight, target),)


@operation("loss", "fused-least")
def fused_loss_least(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """fusedlib.linear_cross_entropy, memory="least"."""
    return (fusedlib.linear_cross_entropy(hidden, weight, target, memory="least"),)


@operation("norm", "fused")
def fused_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    """fusedlib.rms_norm with its residual."""
    return tuple(fusedlib.rms_norm(x, weight, EPS, residual=residual))


@operation("rope", "fused")
def fused_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    """fusedlib.rope of q and k."""
    return fusedlib.rope(q, k, cos, sin)


def products(operands: Drawn) -> Bound:
    """Logits, d_hidden and d_weight of what counts by torch.mm, each into a tensor that exists."""
    hidden, weight, target = (t.detach() for t in operands.leaves().values())
    hidden, target = hidden[target != IGNORED], target[target != IGNORED]
    logits = hidden @ weight.mT
    d_logits = torch.softmax(logits, -1, dtype=torch.float32).to(logits.dtype)
    d_logits[torch.arange(len(target), device=target.device), target] -= 1
    d_logits /= len(target)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run(direction: str) -> None:
        torch.mm(hidden, weight.mT, out=logits)
        if direction == BOTH:
            torch.mm(d_logits, weight, out=d_hidden)
            torch.mm(d_logits.mT, hidden, out=d_weight)

    return Bound(run)


def copy(operands: Drawn) -> Bound:
    """A copy of as many bytes as the operation must move, one a pass, by a kernel: x · 1 in fp32.

    `copy_` is the driver's, which took 1.5 times as long for 64 MiB.
    """

    @cache
    def buffers(direction: str) -> tuple[int, Tensor, Tensor]:
        passes = direction.count("+") + 1
        moved = work({**operands.case, "direction": direction})["compulsory_bytes"]
        source = torch.rand(moved // passes // 2 // 4, device=operands.case["device"])
        return passes, source, torch.empty_like(source)

    def run(direction: str) -> None:
        passes, source, target = buffers(direction)
        for _ in range(passes):
            torch.mul(source, 1.0, out=target)

    return Bound(run)


for _task in TASKS:
    _name, _bound = ("products", products) if _task in OF_VOCABULARY else ("copy", copy)
    rival(TASKS[_task], _name, traits=BOUND)(_bound)


# --- cases ---------------------------------------------------------------------------------------


def cases(
    experiment: str, rival_names: Iterable[str], *, widths: Sequence[int], vocabulary: int,
    ignored_share: float = 0.0, distribution: str | None = None, **shared: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a width, direction and rival of a task; `rival_names` may be "all" for every one that
    does not compile for long. Of `rope` a width is of all heads together. Where a share of the
    tokens is ignored, the cases say so.
    """
    heads = {"heads": HEADS, "key_heads": KEY_HEADS} if experiment == "rope" else {}
    if odd := [width for width in widths if heads and width % (2 * HEADS)]:
        raise ValueError(f"width {odd[0]} is no multiple of {2 * HEADS}: {HEADS} heads turn pairs")
    require_least(1, widths=widths, vocabulary=vocabulary)
    wide = experiment in OF_VOCABULARY
    graph = not wide and torch.device(shared["device"]).type == "cuda"
    more: dict[str, Any] = {"vocabulary": vocabulary} if wide else {**heads}
    more |= {"ignored_share": ignored_share} if ignored_share else {}
    more |= {"distribution": distribution} if distribution else {}
    more |= {"experiment": experiment, "launch": "graph" if graph else "python"}
    names = rivals.chosen(TASKS[experiment], rival_names)
    directions = (BOTH,) if experiment == "loss" else ("forward", BOTH)
    return grid(shared | more, hidden_size=widths, direction=directions, provider=names)


def counted(case: Case) -> int:
    """How many of the tokens are not ignored."""
    tokens = case["batch_size"] * case["context_length"]
    return int(tokens - round(tokens * case.get("ignored_share", 0.0)))


def work(case: Case) -> Figures:
    """FLOPs of what counts of a vocabulary; the fewest bytes of a norm or a rope, each pass for
    itself.

    In a step both passes lie apart: what backward needs it reads again. Forward of a norm x,
    residual, weight, y, s; backward dy, ds, s, weight, d_weight and one gradient, which is that of
    x and of residual. Of a rope q, k, both results, cos and sin, or the gradients instead.
    """
    length, width = case["context_length"], case["hidden_size"]
    tokens = case["batch_size"] * length
    if case["experiment"] in OF_VOCABULARY:
        number = 3 if case["direction"] == BOTH else 1
        return {"tokens": tokens, "flops": number * 2 * counted(case) * width * case["vocabulary"]}
    if case["experiment"] == "norm":
        passes = [4 * tokens * width + width, 4 * tokens * width + 2 * width]
    else:
        head = width // case["heads"]
        passes = 2 * [2 * tokens * (case["heads"] + case["key_heads"]) * head + 2 * length * head]
    numbers = sum(passes[: len(case["direction"].split("+"))])
    return {"tokens": tokens, "compulsory_bytes": numbers * DTYPES[case["dtype"]]}


# --- the race ------------------------------------------------------------------------------------


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, before anything is drawn."""
    one = rivals.get(TASKS[case["experiment"]], case["provider"])
    one.check_available(case["device"], case["dtype"])
    if one.name == "torch-chunked" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy in chunks")
    if case["experiment"] == "entropies" and WITHOUT_ENTROPIES in one.traits:
        raise Unavailable("it gives log-probabilities without entropies")
    hopper = case["device"] == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    if one.name == "liger-scaled" and hopper and not liger.has_cute():
        raise Unavailable("on Hopper it needs nvidia-cutlass-dsl, which Liger does not bring")
    if one.name in ("cut-full-c", "cut-kahan"):
        from cut_cross_entropy import LinearCrossEntropyImpl

        impl = _CUT[one.name][1]["impl"]
        if not hasattr(LinearCrossEntropyImpl, impl.upper()):
            raise Unavailable(f"this cut_cross_entropy has no {impl}: install it from GitHub")


class Setup(Operation):
    """Sets of operands, the first of which is checked."""

    def __init__(self, case: Case) -> None:
        number, task = SETS if case["launch"] == "graph" else 1, case["experiment"]
        self.draw = lambda: [draw(case, seed) for seed in range(number)]
        self.sets = self.draw()
        super().__init__(task, self.sets[0], PLAIN[task], OUTPUTS[task])

    def changed(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Other values of what wants a gradient: of cos and sin a rival may read one half alone."""
        leaves, drawn = self.inputs.leaves(), self.drawn.values
        return {n: change(old) if leaves[n].requires_grad else old for n, old in drawn.items()}

    def check(self, case: Case) -> Checked:
        """Hold a case's rival against the truth, one that works in place on copies."""
        one = rivals.get(TASKS[case["experiment"]], case["provider"])
        checked = self.checked(on_copies(one) if IN_PLACE in one.traits else one, self.inputs)
        sets = self.draw() if IN_PLACE in one.traits else self.sets
        return replace(checked, turn=partial(self._turn, one, sets))

    def _turn(self, one: OperationRival, sets: list[Drawn], timed: Case) -> Turn:
        """The turns of one call, or of a graph of all, of which the first one's results are held
        against the truth.
        """
        judged = "bound" not in one.traits
        calls = [partial(results, one.build(each), each.dy, timed["direction"]) for each in sets]
        if timed["launch"] != "graph":

            def once() -> None:
                calls[0]()

            weighed = judged and timed["device"] == "cuda"
            peak = {"peak_mib": allocator.peak(once, "cuda")} if weighed else {}
            return Turn(once, figures=peak)
        kept: list[Results] = []

        def every() -> None:
            kept.clear()
            kept.extend(call() for call in calls)

        replay, clock = capture_call(every).replay, timing.clock_for(timed["device"])
        figures: Figures = {}
        if judged:
            for own, drawn in zip(sets[0].all(), self.inputs.all(), strict=True):
                own.data.copy_(drawn)
            replay()
            required = self.required(self.inputs, timed["direction"])
            figures = self.error_figures(one.name, self.called(kept[0]), required)

        def run() -> Mapping[str, float]:
            replay()  # the device is busy while the host issues what is timed
            start = clock.mark()
            replay()
            return {"total": clock.elapsed_ms(start, clock.mark()) / len(calls)}

        return Turn(run, figures=figures)


def race(cases: Sequence[Case]) -> list[Row]:
    """The rivals of a task at one width and direction, in turns."""
    same = ("experiment", "batch_size", "context_length", "hidden_size", "vocabulary",
            "ignored_share", "distribution", "dtype", "launch", "device")  # fmt: skip
    return timed(
        cases, Setup, same=same, available=available, work=work,
        rounds=int(cases[0]["repetitions"]), seconds=SECONDS, most=MOST, bursts=False,
    )  # fmt: skip
