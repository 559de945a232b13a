"""The accumulation probe: right numbers in the interpreter, right instructions when compiled."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from fusedlib.bench import formats, precision, tensor_core
from fusedlib.bench.attempt import Unavailable

INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from fusedlib.kernels.accumulate import accumulate_fwd
torch.manual_seed(0)
a, b = torch.randn(128, 192).half(), torch.randn(192, 64).half()
for promote in (False, True):
    out = accumulate_fwd(a, b, promote=promote)
    error = (out.double() - a.double() @ b.double()).norm() / out.double().norm()
    assert out.dtype == torch.float32 and error < 1e-6, (promote, error)
    short = accumulate_fwd(a[:, :16].contiguous(), b[:16], promote=promote)
    assert torch.allclose(short, a[:, :16].float() @ b[:16].float(), rtol=1e-5, atol=1e-5)
    dropped = a[:, :128].double() @ b[:128].double()
    assert (out.double() - dropped).norm() / out.double().norm() > 0.1
print("right")
"""

COMPILED = """
import itertools
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fusedlib.kernels import accumulate
target, folder = GPUTarget("cuda", int(sys.argv[1]), 32), sys.argv[2]
for kind, promote in itertools.product(("fp16", "bf16", "fp32"), (False, True)):
    constants = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, PROMOTE=promote, PRECISION="tf32")
    types = dict(a_ptr="*" + kind, b_ptr="*" + kind, c_ptr="*fp32", n="i32", k="i32", one="fp32")
    source = ASTSource(
        accumulate._accumulate_kernel, {**types, **dict.fromkeys(constants, "constexpr")},
        constants, {(i,): [["tt.divisibility", 16]] for i in range(5)},
    )
    options = dict(num_warps=accumulate.NUM_WARPS, num_stages=accumulate.NUM_STAGES)
    kernel = triton.compile(source, target=target, options=options)
    open(f"{folder}/{kind}-{promote}.cubin", "wb").write(kernel.asm["cubin"])
"""


def python(code: str, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, env=environment, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def disassembled(cubin: Path) -> tuple[str, str]:
    """Resource usage and instructions of the cubin."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this triton wheel has no cuobjdump")
    return tuple(  # type: ignore[return-value]
        subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True).stdout
        for flag in ("-res-usage", "-sass")
    )


def test_probe_vs_float64_in_the_interpreter():
    pytest.importorskip("triton")
    assert python(INTERPRETED).strip() == "right"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_probe_compiles_without_spills(capability: int, tmp_path: Path):
    pytest.importorskip("triton")
    python(COMPILED, str(capability), str(tmp_path))
    cubins = sorted(tmp_path.glob("*.cubin"))
    assert len(cubins) == 6
    for cubin in cubins:
        usage, sass = disassembled(cubin)
        assert re.search(r"STACK:0\b", usage), (cubin.stem, usage)
        assert not re.search(r"\b(STL|LDL)\b", sass), cubin.stem
        assert ("HGMMA" if capability == 90 else "MMA") in sass, cubin.stem
        # Promotion is a fused multiply-add for each element, which the other kernel lacks: were it
        # folded into the matrix instruction again, the two would be the same kernel.
        assert ("FFMA" in sass) == cubin.stem.endswith("True"), cubin.stem


# --- the models ----------------------------------------------------------------------------------


def errors_of(model: Callable[..., torch.Tensor], k: int) -> dict[str, object]:
    left, right = tensor_core.operands("uniform", "fp16", k, 16, "cpu")
    return tensor_core.errors(
        model(left, right, 16), *tensor_core.reference("uniform", "fp16", k, 16, "cpu")
    )


def test_chopping_is_biased_and_linear_rounding_neither():
    chopped, rounded = (
        [errors_of(model, k) for k in (1024, 8192)]
        for model in (tensor_core.aligned, tensor_core.rounded)
    )
    assert chopped[1]["toward_zero_share"] == 1.0
    assert chopped[1]["bias_share"] > 0.95 > 0.4 > rounded[1]["bias_share"]
    assert 6 < chopped[1]["relative_error"] / chopped[0]["relative_error"] < 10  # as K: 8
    assert rounded[1]["relative_error"] / rounded[0]["relative_error"] < 5  # as sqrt(K): 2.8


def exponent(value: Fraction) -> int:
    return math.frexp(float(value))[1] - 1


def aligned_by_fractions(left: list[float], right: list[float], together: int, extra: int) -> float:
    """The model's definition for one element, written with exact fractions."""
    total = Fraction(0)
    for start in range(0, len(left), together):
        factors = list(zip(left, right, strict=True))[start : start + together]
        places = [exponent(Fraction(x)) + exponent(Fraction(y)) for x, y in factors if x * y]
        last = Fraction(2) ** (max([*places, *([exponent(total)] if total else [])]) - 23 - extra)
        summands = [Fraction(x) * Fraction(y) for x, y in factors] + [total]
        total = sum((math.trunc(s / last) * last for s in summands), Fraction(0))
        if total:
            unit = Fraction(2) ** (exponent(total) - 23)
            total = math.trunc(total / unit) * unit
    return float(total)


@pytest.mark.parametrize(("together", "extra"), [(16, 2), (8, 2), (4, 0)])
def test_aligned_model_vs_fractions(together: int, extra: int):
    generator = np.random.default_rng(0)
    raw = generator.standard_normal((2, 3, 64)) * 2.0 ** generator.integers(-6, 6, (2, 3, 64))
    raw[0, 0, :3] = 0.0
    left, right = formats.round_to(raw.astype(np.float32), "fp16")
    out = tensor_core.aligned(torch.from_numpy(left), torch.from_numpy(right.T), together, extra)
    wanted = [
        [aligned_by_fractions(x.tolist(), y.tolist(), together, extra) for y in right] for x in left
    ]
    assert out.tolist() == wanted


@pytest.mark.parametrize(
    ("small", "kept"), [(2.0**-25, 2.0**-25), (2.0**-26, 0.0), (3 * 2.0**-26, 2.0**-25)]
)
def test_aligned_model_of_one_group_by_hand(small: float, kept: float):
    # Two halves and two small numbers: in fp32's last place only what is not cut off can add up.
    left = torch.tensor([[0.5, 0.5, small, small]])
    out = tensor_core.aligned(left, torch.ones(4, 1), 4, extra_bits=2)
    unit = 2.0**-23
    assert out.item() == 1.0 + math.floor(2 * kept / unit) * unit
    assert tensor_core.aligned(left, torch.ones(4, 1), 4, extra_bits=9).item() >= out.item()


def test_recorded_bits_are_of_another_model_than_rounding():
    left, right = tensor_core.operands("uniform", "fp16", 1024, 16, "cpu")
    chopped, rounded = (
        model(left, right, 16) for model in (tensor_core.aligned, tensor_core.rounded)
    )
    assert (chopped == rounded).double().mean() < 0.2
    fewer = tensor_core.aligned(left, right, 16, extra_bits=1)
    assert (fewer == chopped).double().mean() < 0.2


def test_errors_vs_a_worked_example():
    ref = torch.tensor([[2.0, -2.0]], dtype=torch.float64)
    out = torch.tensor([[1.0, -1.0]])
    figures = tensor_core.errors(out, ref, ref.abs())
    assert figures["relative_error"] == 0.5
    assert figures["toward_zero_error"] == 0.5
    assert figures["signed_relative_error"] == 0.0
    assert (figures["toward_zero_share"], figures["bias_share"]) == (1.0, 1.0)


def test_operand_products_are_exact_in_fp32():
    for dtype in tensor_core.DTYPES:
        left, right = tensor_core.operands("normal", dtype, 16, 64, "cpu")
        product = left.float()[:, :1] * right.float()[:1]
        assert torch.equal(product.double(), left.double()[:, :1] * right.double()[:1])


@pytest.mark.skipif(tensor_core.has_tensor_cores(), reason="there is a GPU with tensor cores")
def test_without_a_gpu_the_cases_are_unavailable():
    case = precision.tensor_cores(16)[0]
    assert case["device"] == "cuda"
    with pytest.raises(Unavailable, match="needs a CUDA GPU with tensor cores"):
        tensor_core.measure_tensor_core(case)


@pytest.mark.gpu
@pytest.mark.skipif(not tensor_core.has_tensor_cores(), reason="needs a GPU with tensor cores")
@pytest.mark.parametrize("dtype", list(tensor_core.DTYPES))
def test_promotion_beats_the_tensor_core_whose_bits_the_model_gives(dtype: str):
    figures = {
        c["provider"]: tensor_core.measure_tensor_core(c)
        for c in precision.tensor_cores(16384, dtypes=[dtype])
        if (c["k"], c["distribution"]) == (16384, "uniform")
    }
    errors = {name: found["relative_error"] for name, found in figures.items()}
    assert max(errors.values()) < 1e-3
    assert errors["promoted"] < errors["in the tensor core"]
    assert figures["promoted"]["modelled_share"] < 0.5
    if torch.cuda.get_device_capability() == (9, 0):
        assert figures["in the tensor core"]["modelled_share"] == 1.0


def test_launcher_says_what_it_takes():
    pytest.importorskip("triton")
    from fusedlib.kernels.accumulate import accumulate_fwd

    half = torch.zeros(64, 64, dtype=torch.float16)
    for a, b, options, words in [
        (half[:32], half, {}, "multiples of 64"),
        (half, half[:, :16], {}, "multiples of 64"),
        (half[:, :32], half, {}, "a must be"),
        (half, half.float(), {}, "both be"),
        (half.double(), half.double(), {}, "float64"),
        (half.T[:, :], half, {}, "contiguous"),
        (half, half, {"precision": "tf32x3"}, "tf32, ieee"),
    ]:
        a = a if words == "contiguous" else a.contiguous()
        with pytest.raises(ValueError, match=words):
            accumulate_fwd(a, b.contiguous(), promote=True, **options)
