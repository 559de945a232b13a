"""Compiles kernels for architectures without a GPU and says what came out.

Run in a process of its own, without Triton's interpreter:
    python kernels_ahead.py FAMILY PART/PARTS ARCHITECTURE[,ARCHITECTURE ...] [name ...]
prints one JSON object a kernel, of all kernels of a family or of the calls named, as `sass.show`
says; of part 1/3 every third call, from the second on. The library's own launchers start them, on
matrices of torch's meta device, which have no memory; what Triton would start is compiled and kept.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product

import torch
from torch import Tensor
from triton.runtime import JITFunction

from fusedlib import tuning
from fusedlib.launch import Config
from fusedlib.ops import blocks
from fusedlib.ops.loss import function as linear_cross_entropy
from fusedlib.ops.matmul import function as matmul
from fusedlib.ops.mlp import few_tokens, hopper
from fusedlib.ops.mlp import kernels as swiglu
from fusedlib.ops.mlp.kernels import UNALIGNED
from fusedlib.ops.norm import function as rms_norm
from fusedlib.ops.qkv import kernels as projections
from fusedlib.ops.rope import function as rope
from played_driver import play_driver
from sass import show
from study.product_kernel import accumulate_fwd

Calls = Iterator[tuple[str, Callable[[], object]]]  # what is called, by name
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BACKWARD = swiglu.Variant(product=True, gradient=True, output=True)
POINTWISE = BACKWARD._replace(product=False)
WIDE = 8192  # hidden and inner size, a multiple of 16; 8193 is ragged


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def forward(config: Config, width: int = WIDE, activation: str = "silu") -> None:
    x, h = meta(300, width), meta(300, width)
    launch = swiglu.fwd_launch(x.device, 300, width, width, 0, True, activation, config)
    launch(x, *[meta(width, width)] * 2, meta(300, 2 * width), h)


def backward(
    variant: swiglu.Variant, config: Config, width: int = WIDE, dtype: torch.dtype = BF16,
    activation: str = "silu",
) -> None:  # fmt: skip
    dy, w_down, gate_up = (meta(n, width, dtype=dtype) for n in (300, width, 300))
    launch = swiglu.bwd_launch(dy.device, 300, width, width, variant, activation, config)
    launch(dy, w_down, *[gate_up] * 3)


def calls_of_swiglu(arch: int) -> Calls:
    """Everything that may be launched there."""
    directions = {
        "fwd half": (forward, "forward", swiglu.FORWARD),
        "bwd half": (partial(backward, BACKWARD), "backward", swiglu.BACKWARD),
    }
    for name, (call, direction, table) in directions.items():
        yield name, partial(call, table[arch])
        for small in swiglu.few_tokens_configs(direction, arch):
            yield f"{name} few tokens {small.block_n} wide", partial(call, small)
        yield f"{name} unaligned", partial(call, UNALIGNED, WIDE + 1)
        for activation in ("gelu", "gelu_tanh"):
            yield f"{name} {activation}", partial(call, table[arch], activation=activation)
    for (kind, dtype), (even, width) in product(
        {"half": BF16, "ieee": FP32}.items(), {"": WIDE, " unaligned": WIDE + 1}.items()
    ):
        call = partial(backward, POINTWISE, swiglu.POINTWISE, width, dtype)
        yield f"bwd {kind} pointwise{even}", call
        for activation in ("gelu", "gelu_tanh"):
            yield f"bwd {kind} pointwise{even} {activation}", partial(call, activation=activation)
    for module in (blocks, projections):
        module.architecture = lambda _: arch
    card, widths = torch.device("meta"), (WIDE, 1024, 1024)
    deepest = 256 if arch in blocks.D_X_CONFIGS else 64
    for config in projections.PRODUCT_CONFIGS.get(arch, blocks.DEFAULT_CONFIGS):
        projections.few_tokens_config = lambda *_, config=config, **__: config
        size = f"{config.block_m} by {config.block_n}"
        for biased in (False, True):
            launch = projections.projections_launch(card, 37, WIDE, widths, biased)
            name = f"few projections {size}{', biased' * biased}"
            yield name, partial(launch, *[meta(37, WIDE)] * 10)
    projections.SMALL_WEIGHTS = 1 << 40
    for config, tokens in product(
        blocks.D_X_CONFIGS.get(arch, blocks.DEFAULT_CONFIGS), (64, 128, 256)
    ):
        if tokens > deepest:
            continue
        blocks.few_tokens_config = lambda *_, config=config, **__: config
        size = f"{config.block_m} by {config.block_n} of {tokens} tokens"
        if tokens <= 128:
            launch = few_tokens.gradients_launch((True, True, True), card, tokens, WIDE, WIDE)
            yield f"few gradients {size}", partial(launch, *[meta(tokens, WIDE)] * 9)
        launch = projections.gradients_launch(card, tokens, WIDE, widths)
        yield f"few gradients of projections {size}", partial(launch, *[meta(tokens, WIDE)] * 11)


def calls_of_hopper(arch: int) -> Calls:
    """The kernels with fixed roles."""
    widths = {
        "fwd": 4096,
        "bwd": hopper.MAX_HIDDEN_TO_PREFETCH + 16,
        "bwd ahead": hopper.MAX_HIDDEN_TO_PREFETCH,
    }
    variants = [*product(widths, (True, False), (BF16, FP16), ("silu",))]
    variants += product(("fwd", "bwd"), (True,), (BF16,), ("gelu", "gelu_tanh"))
    for name, store, dtype, activation in variants:
        hidden = widths[name]
        matrix = meta(300, hidden, dtype=dtype)
        if name == "fwd":
            launch = hopper.forward_launch(matrix.device, 300, hidden, hidden, 0, store, activation)
        else:
            launch = hopper.backward_launch(matrix.device, 300, hidden, hidden, store, activation)
        words = f"{name} {dtype}{' storing' * store}{f' {activation}' * (activation != 'silu')}"
        yield words, partial(launch, *[matrix] * 5)


def calls_of_split(arch: int) -> Calls:
    """Products of factors that lie as they are and transposed, and what splits factors."""
    matmul.INTERPRETER = matmul.CONFIGS[arch]
    sizes = 300, 1024, 500, 1024
    halves, words = meta(512, 512, dtype=FP16), meta(512, dtype=torch.int32)
    matrices = halves, halves, words, words, meta(300, 1024, dtype=FP32)
    for turned in product((False, True), repeat=2):
        name = f"{turned[0]:d}{turned[1]:d}"
        yield f"tl {name}", partial(matmul._launch(halves.device, sizes, turned), *matrices)
        if arch == 90:
            launch = matmul._hopper_launch(halves.device, sizes, turned)
            yield f"gluon {name}", partial(launch, *matrices)
    for name, columns in (("even", 1024), ("ragged", 1025)):
        source = meta(300, columns, dtype=FP32)
        for by_columns in (False, True):
            matmul.INTERPRETED_LINES = matmul.COLUMNS if by_columns else matmul.ROWS
            splitting = matmul.FactorSplitter(source.device, source, by_columns)
            yield f"{name} {'columns' if by_columns else 'rows'}", partial(splitting, source)


def calls_of_rows(arch: int) -> Calls:
    """Every kind of kernel of `rms_norm` and `rope`, with the strides of real calls."""
    rms_norm.multiprocessors = lambda _: 132
    for kind, dtype in (("half", BF16), ("fp32", FP32)):
        for width in (64, 80, 128, 2048, 3072, 4096, 8192, 16384, 32768):
            x, weight, rstd = (
                meta(*shape, dtype=of)
                for shape, of in (((300, width), dtype), ((width,), dtype), ((300,), FP32))
            )
            call = partial(rms_norm.rms_norm_fwd, x, weight, x, 1e-6, True)
            yield f"fwd {kind} {width}", call
            call = partial(rms_norm.rms_norm_bwd, x, x, x, weight, rstd, True, True)
            yield f"bwd {kind} {width}", call
            if width in (128, 16384):
                call = partial(rms_norm.rms_norm_fwd, x, None, x, 1e-6, True)
                yield f"fwd without a weight {kind} {width}", call
                call = partial(rms_norm.rms_norm_bwd, x, x, x, None, rstd, True, False)
                yield f"bwd without a weight {kind} {width}", call
        for head_dim, rotary in ((64, 64), (128, 128), (80, 80), (96, 32), (10, 6)):
            q, k = (meta(2, 64, h, head_dim, dtype=dtype).transpose(1, 2) for h in (32, 8))
            cos, at = meta(1, 64, rotary, dtype=dtype), meta(64, dtype=torch.int64)
            name = f"{kind} {rotary} of {head_dim}"
            yield f"rope {name}", partial(rope.rope_fwd, q, k, cos, cos, None, None)
            call = partial(rope.rope_fwd, q, k, cos, cos, None, head_dim + 4)
            yield f"rope of wider heads {name}", call
            call = partial(rope.rope_bwd, q, k, cos[0], cos[0], at, head_dim)
            yield f"rope back at positions {name}", call
            if rotary == head_dim and dtype == BF16:
                of_norms = cos[0, 0], cos[0, 0], cos, cos, 1e-6
                yield f"normed rope {name}", partial(rope.normed_rope_fwd, q, k, *of_norms)
                call = partial(rope.normed_rope_bwd, q, k, q, k, *of_norms)
                yield f"normed rope back {name}", call


def calls_of_loss(arch: int) -> Calls:
    """`linear_cross_entropy`'s and `linear_log_probs`', at any vocabulary."""
    kernels, cut = linear_cross_entropy, CUT
    kernels.block_and_warps = lambda stride, itemsize, _, more: cut(stride, itemsize, arch, more)
    variants = {  # weights, smoothing, softcap, gradient
        "gradient": (None, 0.0, 0.0, True), "gradient, all": (True, 0.1, 30.0, True),
        "gradient, smoothed": (None, 0.1, 0.0, True), "gradient, capped": (None, 0.0, 30.0, True),
        "loss alone": (None, 0.0, 0.0, False),
    }  # fmt: skip
    for dtype, name, vocabulary in (
        (BF16, "gradient", 128255), (BF16, "gradient", 63), (BF16, "gradient, all", 128255),
        (BF16, "gradient, smoothed", 128255), (BF16, "gradient, capped", 128255),
        (BF16, "loss alone", 128255), (FP16, "gradient, all", 128255),
        (FP32, "gradient, all", 128255),
    ):  # fmt: skip
        stride = kernels.row_stride(vocabulary, dtype.itemsize)
        logits, losses = meta(300, stride, dtype=dtype)[:, :vocabulary], meta(300, dtype=FP32)
        weighted, smoothing, softcap, gradient = variants[name]
        call = partial(
            kernels.cross_entropy_rows, logits, meta(300, dtype=torch.int64), weighted and losses,
            weighted and meta(vocabulary, dtype=FP32), meta(1, dtype=FP32), losses,
            weighted and losses, kernels.Settings(-100, smoothing, 1e-2, softcap),
            gradient=gradient,
        )  # fmt: skip
        yield f"{dtype} {name}, {stride} a row", call
    numbers, statistics = meta(300, dtype=FP32), meta(kernels.STATISTICS, 300, dtype=FP32)
    for dtype, name, settings in (
        (BF16, "log-probabilities", kernels.Settings(wants_entropy=True)),
        (BF16, "everything", kernels.Settings(-100, 0.1, 1e-2, 30.0, -1, True, 0.7, True, True)),
        (FP32, "everything", kernels.Settings(-100, 0.1, 1e-2, 30.0, -1, True, 0.7, True, True)),
    ):
        by_class = meta(128255, dtype=FP32) if name == "everything" else None
        shared = meta(300, 30400, dtype=dtype), meta(300, dtype=torch.int64), by_class, statistics
        sums = numbers if settings.wants_logsumexp else None
        for way, upstreams in ("alone", ()), ("backward", (numbers, numbers, sums)):
            call = partial(kernels.by_token_rows, *shared, 30400, 128255, settings, *upstreams)
            yield f"{dtype} {name} by token, {way}", call
    factor, result = meta(1, dtype=FP32), meta(2**20)
    yield "scaled in place", partial(kernels.fill_scaled, result, result, factor, factor)
    source, counts = meta(2**20, dtype=FP32), meta(2**10, dtype=torch.bool)
    yield "scaled fp32", partial(kernels.fill_scaled, source, result, factor, counts)


def calls_of_accumulate(arch: int) -> Calls:
    """The accumulation probe."""
    for dtype, promote in product((FP16, BF16, FP32), (False, True)):
        a, b = meta(128, 192, dtype=dtype), meta(192, 128, dtype=dtype)
        call = partial(accumulate_fwd, a, b, promote=promote, precision="tf32")
        yield f"{dtype} {promote}", call


CUT = linear_cross_entropy.block_and_warps
RUN = JITFunction.run


def compiled(family: str, part: str, arch: int, names: list[str]) -> Iterator[tuple[dict, object]]:
    """(what is said of it, kernel); of a call's further kernels their own name too."""
    play_driver(arch)
    tuning.forget()
    started: list[tuple[str, object]] = []

    def run(self: JITFunction, *arguments: object, warmup: bool, **named: object) -> None:
        started.append((self.__name__, RUN(self, *arguments, warmup=True, **named)))

    JITFunction.run = run
    first, step = map(int, part.split("/"))
    for name, call in islice(globals()[f"calls_of_{family}"](arch), first, None, step):
        if name in names or not names:
            started.clear()
            call()
            assert started
            for nth, (kernel_name, kernel) in enumerate(started):
                yield {"name": f"{name} {kernel_name}" if nth else name, "arch": arch}, kernel


if __name__ == "__main__":
    family, part, archs, *names = sys.argv[1:]
    show(made for arch in archs.split(",") for made in compiled(family, part, int(arch), names))
