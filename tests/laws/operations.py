"""The library's operations, an entry each: what the laws of `test_laws.py` know of them.

**To add an operation**, write an entry in `operations`: the call, the same in plain PyTorch, its
operands with their shapes, the shapes of its results, and sizes. It has all laws then, in plain
PyTorch, in Triton's interpreter and on a GPU. Then say what it promises: an error bound, what it
keeps for backward, what it refuses; and in `faults.py` what its kernels must not survive.

Shapes are letters: "t h" is t rows of h numbers, "2i h" are twice i rows, "" is a single number;
t counts tokens, b sequences, of either there may be none. A shape that begins with t is of each
token: its tokens may have several dimensions. Sizes are drawn for all letters but d, r and w, the
widths of heads. The table is made for a library, because broken copies of it are tried too
(`copied.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import bounds
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import pad

from fusedlib import reference
from fusedlib.launch import Config

Named = dict[str, Tensor]
Sizes = dict[str, int]
FP32, HALF = ("float32",), ("float16", "bfloat16")


@dataclass(frozen=True)
class Operand:
    """Standard normal numbers, or what `draw` makes of them and of the sizes.

    Attributes:
        shape: in letters.
        draw: normal numbers of that shape and all sizes, to the operand's values.
        learned: it wants a gradient.
        own_dtype: it may have another floating-point dtype than the first operand.
    """

    shape: str
    draw: Callable[[Tensor, Sizes], Tensor] = lambda normal, sizes: normal
    learned: bool = True
    own_dtype: bool = False


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What the laws know of an operation.

    Attributes:
        call: takes operands by name, gives a tensor or a tuple of them.
        plain: the same in plain PyTorch, also of float64.
        operands: by name; the first has tokens, wants a gradient and has the results' dtype.
        outputs: their shapes, by name.
        sizes: what the letters stand for on a CPU; `gpu_sizes` on a GPU.
        more_sizes: further ones at which results and gradients are compared, such as the borders
            of routes; of `sizes` only what differs. `more_gpu_sizes` on a GPU.
        huge_gpu_sizes: with more than 2³¹ elements in an operand, a result or what is kept; of
            `gpu_sizes` only what differs.
        size_multiple: drawn sizes are multiples of it.
        dtypes: those it has kernels for. Most laws take the first, on a GPU the last.
        tuning: for `fusedlib.tuning.override` in the interpreter, so that small operands are cut
            into several tiles or take the route of large ones. `gpu_tuning` on a GPU.
        reads: by operand, the operands and outputs that its gradient needs.
        keeps: shapes of all else that is kept for backward; in fp32 where `keeps_fp32`.
        casts: under autocast operands are cast, as a linear layer's.
        bound: how far an element of a result or gradient may be off, of `bounds`. Plain PyTorch is
            held to it too, at the borders and at drawn sizes. The tolerance rule, of PyTorch's own
            error, holds besides, at `sizes`.
        stated: by result or gradient, how far its worst element may be off at such sizes, to its
            root mean square, however small PyTorch's own error is there; not at `sizes`.
        refused: settings that are errors; `call` takes them in place of its own.
        dense: so are sparse and nested operands.
        public: checks its operands, and has registered operators; or part of a patched model.
        watched: the numbers by which a call that is watched, or goes into a CUDA graph, computes.
        exceptions: laws that kernels do not keep, by a part of their name, and why. Plain PyTorch
            keeps them.
    """

    call: Callable[..., Any]
    plain: Callable[..., Any]
    operands: dict[str, Operand]
    outputs: dict[str, str]
    sizes: Sizes
    gpu_sizes: Sizes
    more_sizes: tuple[Sizes, ...] = ()
    more_gpu_sizes: tuple[Sizes, ...] = ()
    huge_gpu_sizes: Sizes = field(default_factory=dict)
    size_multiple: int = 1
    dtypes: tuple[str, ...] = (*FP32, *HALF)
    tuning: dict[str, Any] = field(default_factory=dict)
    gpu_tuning: dict[str, Any] = field(default_factory=dict)
    reads: dict[str, str] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()
    keeps_fp32: bool = False
    casts: bool = False
    bound: Callable[..., bounds.Bounds] | None = None
    stated: dict[str, Callable[[Sizes], float]] = field(default_factory=dict)
    refused: tuple[dict[str, Any], ...] = ()
    dense: bool = False
    public: bool = True
    watched: dict[str, Any] = field(default_factory=dict)
    exceptions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first, operands = next(iter(self.operands.values())), self.operands.values()
        shapes = *(each.shape for each in operands), *self.outputs.values(), *self.keeps
        letters = {word[-1] for word in " ".join(shapes).split()}
        for sizes, more in (
            (self.sizes, self.more_sizes),
            (self.gpu_sizes, (*self.more_gpu_sizes, self.huge_gpu_sizes)),
        ):
            assert letters <= sizes.keys(), f"no size of {letters - sizes.keys()} in {sizes}"
            unknown = {letter for each in more for letter in each} - sizes.keys()
            assert not unknown, f"further sizes of {unknown}, which {sizes} lacks"
            fits = first.learned and "t" in first.shape.split() and sizes["t"] >= 6
            assert fits, "the first operand needs tokens, 6 at least, and a gradient"

    def kept_itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of a number that is kept beside operands and results."""
        return 4 if self.keeps_fp32 else dtype.itemsize


def shape_of(letters: str, sizes: Sizes) -> tuple[int, ...]:
    """The numbers of a shape in letters."""
    return tuple(int(word[:-1] or 1) * sizes[word[-1]] for word in letters.split())


def weights(shape: str) -> Operand:
    """Of a product whose results are about as large as what it is given."""
    return Operand(shape, lambda normal, _: normal * normal.shape[-1] ** -0.5)


def constant(shape: str, draw: Callable[[Tensor], Tensor]) -> Operand:
    """Numbers without a gradient."""
    return Operand(shape, lambda normal, _: draw(normal), learned=False, own_dtype=True)


def indices(shape: str, below: str, ignored: int | None = None) -> Operand:
    """Whole numbers below a size, the largest among them; one in seven is an ignored one."""

    def draw(normal: Tensor, sizes: Sizes) -> Tensor:
        numbers = (normal.abs() * 1000).long() % sizes[below]
        numbers[-1:] = sizes[below] - 1
        if ignored is not None:
            numbers[::7] = ignored
        return numbers

    return Operand(shape, draw, learned=False)


def of_module(module: nn.Module, state: dict[str, str], inputs: str) -> Callable[..., Any]:
    """A call of a module, with operands in the place of its parameters and buffers."""

    def call(**given: Tensor) -> Any:
        own = {name: given[operand] for name, operand in state.items()}
        return functional_call(module, own, tuple(given[name] for name in inputs.split()))

    return call


# --- gated MLPs ----------------------------------------------------------------------------------

MLP_SIZES = {"sizes": {"t": 37, "h": 41, "i": 35}, "gpu_sizes": {"t": 517, "h": 384, "i": 1072}}
# Few and many tokens, aligned and not, apart, by roles and by tiles.
MLP_BORDERS = tuple(
    {"t": t, "h": h, "i": i} for t, h, i in (
        (1, 256, 512), (1, 1, 1), (64, 512, 1056), (65, 512, 1056), (128, 512, 1056),
        (129, 512, 1056), (257, 1040, 2720), (1030, 16, 16), (37, 501, 1003), (261, 517, 1003),
        (300, 1040, 2720), (250, 2048, 8192), (1024, 256, 4096), (2064, 80, 2016),
        (2064, 2320, 2016), (400, 2048, 5632), (65, 64, 20000),
    )
)  # fmt: skip
FEW_BORDERS = tuple(  # tiles of 16, 32 and 64 columns; spans of 1, 2 and 4
    {"t": t, "h": h, "i": i} for t, h, i in (
        (33, 16, 16), (50, 8192, 96), (64, 48, 8208), (61, 4096, 4112), (64, 8192, 8192),
    )
)  # fmt: skip


def gated(
    call: Callable[..., Tensor], plain: Callable[..., Tensor], *, packed: bool = False,
    save: str = "gate_up", down: bool = True, **more: Any,
) -> Operation:  # fmt: skip
    """Of a pair of weights or a packed one, with the down projection or without."""
    first = ["w_gate_up"] if packed else ["w_gate", "w_up"]
    names = ["x", *first, *["w_down"] * down]

    def ours(x: Any, *, save: str = save, **given: Any) -> Tensor:
        gate_up = [given.pop(name) for name in first]
        return call(x, gate_up[0] if packed else gate_up, **given, save=save)

    def theirs(x: Tensor, **given: Tensor) -> Tensor:
        gate_up = [given.pop(name) for name in first]
        return plain(x, *(gate_up[0].chunk(2) if packed else gate_up), **given)

    operands = {"x": Operand("t h"), "w_down": weights("h i")}
    operands |= {name: weights("2i h" if packed else "i h") for name in first}
    reads, keeps = dict.fromkeys(names, " ".join(names)), ()
    if save == "gate_up":
        reads |= {"w_down": ""} | dict.fromkeys(first, "x w_down")
        keeps = ("t 2i",)
    return Operation(
        call=ours, plain=theirs, operands={name: operands[name] for name in names},
        outputs={"y": "t h" if down else "t i"}, reads=reads, keeps=keeps, casts=True,
        huge_gpu_sizes={"t": 2**18 + 65, "h": 256, "i": 4112}, refused=({"save": "all"},),
        **MLP_SIZES | more,
    )  # fmt: skip


PAIR = {"gate_proj.weight": "w_gate", "up_proj.weight": "w_up", "down_proj.weight": "w_down"}
EVEN = {"t": 37, "h": 48, "i": 80}
# Products and a pointwise kernel, as on Hopper between few tokens and many.
APART = {"mlp_unfused_tokens": 1 << 40}
# The kernels of cards that are no Hopper.
ONLY_TILES = {"mlp_warp_specialized": False, "mlp_unfused_tokens": 64}
SPLIT = {  # every fp32 product, in tiles of one block and spans of one tile
    "split_least_size": 1, "split_least_results": 1, "split_least_work": 1, "split_span": 128,
    "split_interpreter_config": Config(128, 128, 64, 4, 1, group_m=2),
}  # fmt: skip


# --- linear layers -------------------------------------------------------------------------------


def linear(call: Callable[..., Tensor], apart: int | None = None) -> Operation:
    """Of numbers alike, or where rows (0) or terms (1) are up to 2³⁰ apart."""

    def draw(normal: Tensor, sizes: Sizes) -> Tensor:
        if apart is None:
            return normal
        powers = torch.arange(normal.shape[apart]) * 7 % 31 - 15.0
        return normal * powers.exp2().unsqueeze(1 - apart)

    return Operation(
        call=call, plain=plain_linear,
        operands={"x": Operand("t h", draw), "weight": weights("o h"), "bias": Operand("o")},
        outputs={"y": "t o"}, dtypes=FP32, tuning=SPLIT, casts=True, bound=bounds.linear,
        sizes={"t": 140, "h": 300, "o": 134}, gpu_sizes={"t": 2050, "h": 1030, "o": 2070},
        more_sizes=({"t": 1}, {"h": 1}, {"o": 1}, {"t": 257, "h": 129}),
        more_gpu_sizes=({"t": 1024, "h": 2048, "o": 2048}, {"t": 1023}, {"t": 4096}, {"o": 255},
                        {"t": 1024, "h": 10300, "o": 2560}),
        huge_gpu_sizes={"t": 2**22 + 130, "h": 520, "o": 520},
        reads={"x": "weight", "weight": "x", "bias": ""},
    )  # fmt: skip


NEVER_JOINED = {"qkv_joined_elements": 0}


def of_each(call: Callable[..., Any]) -> Callable[..., Any]:
    """Of x by the weights of q, k and v, with their biases."""
    return lambda x, **given: call(x, *([given.get(f"{kind}_{n}") for n in "qkv"] for kind in "wb"))


def projections(
    library: ModuleType, *, biased: bool = True, split: bool = False, **more: Any
) -> Operation:  # fmt: skip
    """q, k and v of one x."""
    call = import_module(f"{library.__name__}.ops.qkv.function").projections
    vectors = {"b_q": Operand("q"), "b_k": Operand("k"), "b_v": Operand("k")}
    matrices = {"w_q": weights("q h"), "w_k": weights("k h"), "w_v": weights("k h")}
    return Operation(
        call=of_each(partial(call, split=split)),
        plain=of_each(lambda x, *given: tuple(map(partial(plain_linear, x), *given))),
        operands={"x": Operand("t h")} | matrices | (vectors if biased else {}),
        outputs={"q": "t q", "k": "t k", "v": "t k"}, casts=True, public=False,
        sizes={"t": 37, "h": 48, "q": 80, "k": 16},
        gpu_sizes={"t": 37, "h": 896, "q": 896, "k": 128},
        more_sizes=({"t": 1}, {"t": 64}, {"t": 65}, {"t": 260}),
        more_gpu_sizes=(
            *({"t": t} for t in (1, 64, 65, 700)), {"t": 70, "h": 80, "q": 144, "k": 48},
            {"t": 300, "h": 2048, "q": 2048, "k": 512},
        ),
        reads={"x": "w_q w_k w_v", **dict.fromkeys(matrices, "x")},
        **more,
    )  # fmt: skip


# --- RMSNorm and RoPE ----------------------------------------------------------------------------


def rms_norm(ours: Callable[..., Any], names: str, width: int = 43, **settings: Any) -> Operation:
    """A norm of the named operands; with a residual it gives the sum, too."""
    hf, residual = settings.get("cast", "hf") == "hf", "residual" in names

    def plain(x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None) -> Any:
        s = x if residual is None else x + residual
        y = reference.rms_norm(s, weight, **settings)
        return y if residual is None else (y, s)

    def call(x: Tensor, weight: Tensor | None = None, **more: Any) -> Any:
        return ours(x, weight, **settings | more)

    operands = {"x": Operand("t h"), "residual": Operand("t h"),
                "weight": Operand("h", lambda t, _: 1 + t / 2, own_dtype=True)}  # fmt: skip
    widths = ({"h": 1}, {"h": 127}, {"h": 128}, {"h": 129}, {"t": 1}, {"t": 3, "h": 300})
    return Operation(
        call=call, plain=plain, operands={name: operands[name] for name in names.split()},
        outputs={"y": "t h"} | ({"s": "t h"} if residual else {}),
        bound=partial(bounds.rms_norm, casts=2 if hf and "weight" in names else 1),
        sizes={"t": 37, "h": width}, gpu_sizes={"t": 1111, "h": width * 50}, more_sizes=widths,
        huge_gpu_sizes={"t": 2**20 + 33, "h": 2112},
        more_gpu_sizes=({"t": 2048, "h": 1024}, {"t": 2049, "h": 1024}, {"t": 3, "h": 8193},
                        {"t": 4097, "h": 64}, {"t": 1, "h": 16384}, {"t": 550, "h": 8192},
                        {"t": 280, "h": 32768}, {"t": 9_000_000, "h": 8}),
        tuning={"norm_tile": 128, "norm_widest": 128}, keeps=("t",), keeps_fp32=True,
        reads=dict.fromkeys(names.split(), f"{'s' if residual else 'x'} weight"),
        refused=({"cast": "gpt"}, {"eps": "1"}), dense=True,
    )  # fmt: skip


def rope(
    call: Callable[..., Any], *, at_positions: bool = False, width: int = 0, learned: bool = False
) -> Operation:  # fmt: skip
    """By tables of angles that all differ, maybe learned; at positions of a longer table."""

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Any = None) -> Any:
        if positions is not None:
            cos, sin = cos[positions][None], sin[positions][None]
        turned = [reference.rope(x, cos, sin) for x in (q, k)]
        return tuple(pad(x, (0, max(0, width - x.shape[-1]))) for x in turned)

    def table(of: Callable[[Tensor], Tensor]) -> Operand:
        rows = "l r" if at_positions else "b t r"
        made = constant(rows, lambda t: of(torch.arange(t.numel()) * 0.37).view_as(t))
        return replace(made, learned=learned)

    def as_projected(normal: Tensor, _: Sizes) -> Tensor:
        return normal.transpose(1, 2).contiguous().transpose(1, 2)

    operands = {"q": Operand("b n t d", as_projected), "k": Operand("b m t d", as_projected)}
    operands |= {"cos": table(torch.cos), "sin": table(torch.sin)}
    operands |= {"positions": indices("t", below="l")} if at_positions else {}
    wide, settings = ("w", {"width": width}) if width else ("d", {})
    heads = {"b": 2, "m": 2, "d": 10, "r": 8 if width else 10, "w": width}
    models = () if width else (
        {"n": 32, "m": 8, "d": 64, "r": 64}, {"n": 9, "m": 3, "d": 100, "r": 50},
        {"n": 8, "m": 4, "d": 256, "r": 256}, {"b": 3, "t": 1}, {"n": 5, "m": 5, "d": 66, "r": 66},
        {"b": 70_000, "n": 8, "t": 1, "d": 16, "r": 16}, {"n": 1, "t": 5_000_000, "d": 8, "r": 8},
    )  # fmt: skip
    return Operation(
        call=lambda **given: call(**settings | given), plain=plain, operands=operands,
        outputs={"q_out": f"b n t {wide}", "k_out": f"b m t {wide}"},
        bound=partial(bounds.rope, plain=plain), more_gpu_sizes=models,
        huge_gpu_sizes={} if at_positions else {
            "b": 1, "n": 32, "m": 1, "t": 2**20 + 33, "d": 66, "r": 66,
        },
        sizes=heads | {"n": 6, "t": 19, "l": 50}, gpu_sizes=heads | {"n": 14, "t": 129, "l": 200},
        more_sizes=({"t": 1}, {"b": 1, "n": 1}, {} if width else {"d": 66, "r": 66},
                    {"n": 8, "m": 4, "t": 5}),
        tuning={"rope_pairs": 256}, reads=dict.fromkeys("qk", "cos sin positions"),
        refused=({"width": 4}, {"width": "16"}, {"width": True}), dense=True,
        exceptions={"written_to": "wider results are views of a Function"} if width else {},
    )  # fmt: skip


# --- the loss, and log-probabilities -------------------------------------------------------------


NO_POLICY = (
    {"temperature": 0}, {"temperature": torch.nan}, {"temperature": "hot"},
    {"logit_scale": 0.0}, {"logit_scale": torch.inf}, {"logit_scale": "a"},
)  # fmt: skip
NO_LOSS = (
    {"label_smoothing": "a"}, {"label_smoothing": 1.5}, {"label_smoothing": torch.nan},
    {"z_loss": None}, {"z_loss": -1.0}, {"reduction": "avg"},
    *({"memory": budget} for budget in ("most", 0, True, 1.5e9, None)),
)  # fmt: skip


def of_each_p(sizes: Sizes, softcap: float | None = None) -> float:
    """An error of `fusedlib.ops.loss.kernels`; the largest magnitude of a row is about log V, and
    with a softcap as much more as that lets through. Logits before it are at most four times it.
    """
    largest = math.log(sizes["v"]) + (softcap or 0.0)
    error = 8 + math.log2(sizes["v"]) + largest
    if softcap:
        error += (20 * largest + 8 + 6 * 4) / 2
    return error * 2**-23


def loss(
    call: Callable[..., Any], names: str,
    plain: Callable[..., Any] = reference.linear_cross_entropy, *, learns: str = "",
    **settings: Any,
) -> Operation:  # fmt: skip
    """Of the named operands; in the interpreter five tokens are a chunk, 64 classes are a slice of
    the vocabulary, and each has several blocks.
    """
    labels = indices("t", below="v", ignored=settings.get("ignore_index", -100))
    every = {
        "hidden": Operand("t h"), "weight": weights("v h"), "bias": Operand("v"),
        "target": labels, "tokens": labels, "token_weights": constant("t", torch.abs),
        "class_weights": constant("v", lambda t: t.abs() * (torch.arange(len(t)) % 3 > 0)),
    }  # fmt: skip
    operands = {name: every[name] for name in names.split()}
    operands |= {name: replace(operands[name], learned=True) for name in learns.split()}
    alone = settings.get("reduction") == "none" or "tokens" in operands
    by_token = alone or learns  # their gradient wants each loss
    memory = {} if "tokens" in operands else {"memory": "least"}
    chunks = {"loss_logits_bytes": 4480, "loss_rows": 1}
    blocks = {"loss_scaled_block": 32, "loss_block_bytes": 1024}
    return Operation(
        call=lambda **given: call(**memory | settings | given), plain=partial(plain, **settings),
        operands=operands, outputs={"loss": "t" if alone else ""}, tuning=chunks | blocks,
        casts=True, sizes={"t": 9, "h": 8, "v": 201}, gpu_sizes={"t": 133, "h": 64, "v": 40003},
        huge_gpu_sizes={"t": 2**20 + 33, "h": 2112, "v": 999} if by_token else {},
        more_sizes=({"t": 1}, {"v": 1}, {"v": 2}, {"h": 1}, {"t": 16, "v": 64}),
        more_gpu_sizes=(
            {"t": 1}, {"v": 1}, {"v": 128256, "t": 65}, {"t": 512, "h": 2048, "v": 32000},
            {"t": 517, "h": 384, "v": 1003}, {"t": 33, "h": 77, "v": 16385},
            {"t": 1030, "h": 16, "v": 16},
            {"t": 9_000_000, "h": 8, "v": 5},
        ),
        reads=dict.fromkeys(names.split(), names if by_token else ""),
        # By token statistics, weights and losses; else the gradients, that of a half's W in fp32,
        # and which tokens count.
        keeps=("10t", "v") if by_token else ("t h", "v h", "v", "t", ""), keeps_fp32=True,
        gpu_tuning={"loss_logits_bytes": 2**22},
        stated={"d_bias": partial(of_each_p, softcap=settings.get("softcap"))},
        refused=(
            *({"ignore_index": number} for number in (1.5, True, 2**70, -(2**63) - 1)),
            {"softcap": 0.0}, {"softcap": "a"}, *(NO_POLICY if "tokens" in operands else NO_LOSS),
        ),
        dense=True,
    )  # fmt: skip


def skipping(made: Operation) -> Operation:
    """The same where ignored tokens are left out before the first product, at any size."""
    always = {"loss_skip_from": 0}
    return replace(
        made, tuning=made.tuning | always, gpu_tuning=made.gpu_tuning | always,
        watched={"loss_skip_from": math.inf},
    )  # fmt: skip


def with_accuracy(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss, and how many of the targets have the largest logit."""
    hits, valid = (hidden @ weight.mT).argmax(-1) == target, target != -100
    return reference.linear_cross_entropy(hidden, weight, target), hits.sum() / valid.sum()


PLAIN, POLICY = "hidden weight target", "hidden weight tokens bias"
EVERY = "hidden weight target bias token_weights class_weights"
ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 2.0}
COOL = {"temperature": 0.7, "softcap": 2.0, "logit_scale": 1.5}


# --- all of them ---------------------------------------------------------------------------------


def operations(library: ModuleType) -> dict[str, Operation]:
    """Those that all laws hold for."""
    swiglu_mlp = partial(gated, library.swiglu_mlp, reference.swiglu_mlp)
    half = partial(swiglu_mlp, bound=bounds.swiglu_mlp, dtypes=HALF)
    norm, xent = partial(rms_norm, library.rms_norm), partial(loss, library.linear_cross_entropy)
    return {
        "swiglu_mlp": swiglu_mlp(
            packed=True, bound=bounds.swiglu_mlp, more_gpu_sizes=MLP_BORDERS,
            gpu_sizes={"t": 1500, "h": 272, "i": 3088},  # on Hopper warps with roles
        ),
        "swiglu_mlp of a pair": swiglu_mlp(
            save="input", bound=bounds.swiglu_mlp, more_gpu_sizes=MLP_BORDERS,
        ),
        "swiglu_mlp of few tokens": half(
            packed=True, sizes=EVEN, gpu_sizes={"t": 37, "h": 512, "i": 1056},
            more_sizes=({"t": 1}, {"t": 64}, {"t": 65}, {"h": 160, "i": 16}),
            more_gpu_sizes=FEW_BORDERS,
        ),
        "swiglu_mlp apart": half(
            sizes={"t": 65, "h": 48, "i": 32}, tuning=APART, gpu_tuning=APART
        ),
        "swiglu_mlp by tiles": half(
            gpu_sizes={"t": 165, "h": 208, "i": 336}, gpu_tuning=ONLY_TILES,
            more_gpu_sizes=({"t": 517, "h": 384, "i": 1072}, *MLP_BORDERS[4:8]),
        ),
        "swiglu_mlp split": swiglu_mlp(
            bound=bounds.swiglu_mlp, dtypes=FP32, sizes={"t": 130, "h": 48, "i": 80},
            gpu_sizes={"t": 1032, "h": 1024, "i": 4096}, tuning=SPLIT | {"mlp_fuses_fp32": False},
            more_gpu_sizes=(  # all products split, none, y and d_x not; ragged
                {"t": 2048, "h": 2048, "i": 2048}, {"t": 256, "h": 4096, "i": 4096},
                {"t": 256, "h": 2048, "i": 8192}, {"h": 1040, "i": 4112}, *MLP_BORDERS[:10],
            ),
        ),
        "geglu_mlp": gated(library.geglu_mlp, reference.geglu_mlp, more_gpu_sizes=MLP_BORDERS[2:8]),
        "swiglu": gated(library.swiglu, reference.swiglu, down=False, packed=True),
        "linear": linear(library.linear),
        "q, k and v": projections(library),
        "rms_norm of a sum": norm("x weight residual"),
        "rms_norm of wide rows": norm("x weight", 200, cast="litgpt"),
        "rope": rope(library.rope),
        "rope at positions": rope(library.rope, at_positions=True, width=16),
        "mean loss": xent(EVERY, **ALL),
        "loss by token": xent(EVERY, **ALL, reduction="none", learns="token_weights"),
        "log_probs": log_probs(library, POLICY, **COOL),
        "mean loss without ignored tokens": skipping(xent(EVERY, **ALL)),
        "log_probs without ignored tokens": skipping(log_probs(library, POLICY, **COOL)),
    }  # fmt: skip


def with_gradients(call: Callable[..., Any], **given: Any) -> tuple[Tensor, ...]:
    """Of a token's scores those that have a gradient."""
    return tuple(call(**given)[:3])


def log_probs(library: ModuleType, names: str, **settings: Any) -> Operation:
    """Log-probabilities of tokens, entropies and logsumexps."""
    call = partial(with_gradients, library.linear_log_probs, logsumexp=True)
    plain = partial(with_gradients, reference.linear_log_probs)
    made = loss(call, names, plain, **settings)
    return replace(made, outputs=dict.fromkeys(("log_probs", "entropy", "logsumexp"), "t"))


def more_calls(library: ModuleType) -> dict[str, Operation]:
    """Further settings, and the modules: results and gradients are compared, and little else."""
    swiglu_mlp = partial(gated, library.swiglu_mlp, reference.swiglu_mlp)
    exact_geglu, exact_plain = (
        partial(of.geglu_mlp, approximate="none") for of in (library, reference)
    )
    norm, xent = partial(rms_norm, library.rms_norm), partial(loss, library.linear_cross_entropy)
    split_loss = partial(
        replace, dtypes=FP32, tuning=SPLIT | {"loss_logits_bytes": 20 * 896, "loss_rows": 10},
        sizes={"t": 70, "h": 136, "v": 201}, gpu_sizes={"t": 1024, "h": 1024, "v": 10000},
        more_sizes=(), more_gpu_sizes=({"v": 10016}, {"t": 3000}),
    )  # fmt: skip
    return {
        "swiglu_mlp of few tokens, a pair": swiglu_mlp(
            dtypes=HALF, sizes=EVEN, gpu_sizes={"t": 37, "h": 512, "i": 1056},
            more_sizes=({"t": 64, "h": 16, "i": 144}, {"t": 1, "h": 160, "i": 16}),
        ),
        "swiglu_mlp split, packed": swiglu_mlp(
            packed=True, save="input", dtypes=FP32, sizes={"t": 130, "h": 48, "i": 80},
            gpu_sizes={"t": 1032, "h": 1024, "i": 4096}, tuning=SPLIT | {"mlp_fuses_fp32": False},
            bound=bounds.swiglu_mlp, more_gpu_sizes=({"h": 1040, "i": 4112},),
        ),
        "geglu_mlp apart": gated(
            library.geglu_mlp, reference.geglu_mlp, dtypes=HALF, tuning=APART, gpu_tuning=APART,
            sizes={"t": 65, "h": 48, "i": 32},
        ),
        "exact geglu_mlp": gated(exact_geglu, exact_plain, packed=True, save="input"),
        "swiglu of a pair": gated(library.swiglu, reference.swiglu, down=False, save="input"),
        "q, k and v apart": projections(library, tuning=NEVER_JOINED, gpu_tuning=NEVER_JOINED),
        "q, k and v without biases": projections(library, biased=False),
        "q, k and v split": projections(library, split=True, dtypes=FP32, tuning=SPLIT),
        "linear with rows far apart": linear(library.linear, 0),
        "linear with terms far apart": linear(library.linear, 1),
        "rms_norm of x alone": norm("x"),
        "rms_norm of a sum alone": norm("x residual"),
        "rms_norm, litgpt's of a sum": norm("x weight residual", cast="litgpt"),
        "rms_norm of a wide sum": norm("x weight residual", 300),
        "rope by tables that learn": replace(rope(library.rope, learned=True), bound=None),
        "mean loss, plain": xent(PLAIN),
        "summed loss": xent(EVERY, **ALL, reduction="sum"),
        "mean loss of split products": split_loss(xent(EVERY, **ALL)),
        "loss by token of split products": split_loss(xent(EVERY, **ALL, reduction="none")),
        "loss by token, plain": xent(PLAIN, reduction="none"),
        "smoothed loss": xent(PLAIN, label_smoothing=0.3),
        "only smoothing": xent(PLAIN, label_smoothing=1.0),
        "z-loss": xent(PLAIN, z_loss=1e-2),
        "softcapped loss": xent(PLAIN, softcap=2.0),
        "a class ignored": xent(PLAIN, ignore_index=2),
        "classes that differ": xent(f"{PLAIN} class_weights", label_smoothing=0.3, z_loss=1e-2),
        "tokens' weights that learn": xent(f"{PLAIN} token_weights", learns="token_weights"),
        "log_probs, plain": log_probs(library, "hidden weight tokens"),
        "log_probs, a token ignored": log_probs(library, "hidden weight tokens", ignore_index=2),
        "loss by token without ignored ones": skipping(xent(EVERY, **ALL, reduction="none")),
        "loss and accuracy": replace(
            loss(library.linear_cross_entropy_and_accuracy, PLAIN, with_accuracy),
            outputs={"loss": "", "accuracy": ""}, dtypes=FP32, sizes={"t": 13, "h": 8, "v": 5},
        ),
        "SwiGLUMLP": replace(swiglu_mlp(), call=of_module(library.SwiGLUMLP(1, 1), PAIR, "x")),
        "GeGLUMLP": replace(
            gated(library.geglu_mlp, reference.geglu_mlp),
            call=of_module(library.GeGLUMLP(1, 1), PAIR, "x"),
        ),
        "Linear": replace(linear(library.linear), call=of_module(
            library.Linear(1, 1), {"weight": "weight", "bias": "bias"}, "x")),
        "RMSNorm": replace(norm("x weight residual"), call=of_module(
            library.RMSNorm(1), {"weight": "weight"}, "x residual")),
        "RMSNorm without a weight": replace(norm("x"), call=of_module(
            library.RMSNorm(1, elementwise_affine=False), {}, "x")),
        "LinearCrossEntropyLoss": replace(xent(EVERY, **ALL), call=of_module(
            library.LinearCrossEntropyLoss(**ALL, class_weights=torch.ones(1)),
            {"class_weights": "class_weights"}, "hidden weight target bias token_weights")),
        "LinearLogProbs": replace(
            log_probs(library, POLICY, **COOL),
            call=partial(with_gradients, of_module(
                library.LinearLogProbs(**COOL, logsumexp=True), {}, POLICY)),
        ),
    }  # fmt: skip
