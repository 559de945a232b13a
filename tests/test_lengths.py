"""Lengths that change: no kernel depends on one, and `warm_up` compiles all that a layer needs."""

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fusedlib
import limits
from fusedlib.patch import warm_up as warm

pytest.importorskip("triton")
from fusedlib.ops.mlp import kernels, plan
from fusedlib.ops.mlp.route import MLPProblem

LENGTHS = random.Random(0).sample(range(1, 6001), 70)
# Of classes at these sizes, and what Triton sees.
EDGES = (1, 16, 17, 63, 64, 65, 128, 129, 192, 193, 256, 257, 384, 385, 512, 513, 768, 769, 1024,
         1025, 2048, 2049)  # fmt: skip
HOPPER, OTHER = (90, 132), (89, 128)
MOST = {  # binaries of an MLP: card, hidden, inner, dtype
    (*HOPPER, 2048, 5632, "bfloat16"): 12,
    (*HOPPER, 512, 2048, "bfloat16"): 13,
    (*HOPPER, 2056, 5000, "bfloat16"): 7,  # rows that TMA does not take
    (*HOPPER, 256, 11008, "bfloat16"): 13,  # so wide that dh is a product apart
    (*OTHER, 2048, 5632, "bfloat16"): 10,
    (*HOPPER, 2048, 5632, "float32"): 8,
}


def keys_of(problem, tokens):
    """What the binaries are compiled for that a call of so many tokens starts."""
    made = plan.make_plan(problem._replace(tokens=tokens, down=True, pair=False))
    device = plan.device_index(problem)
    return {one.launch.binary_key(device, *one.matrices) for one in made.launches()}


@pytest.fixture
def problem(request, monkeypatch):
    """An MLP on a card that is played: its launches are the real ones, and nothing is started."""
    arch, processors, hidden, inner, dtype = request.param
    card = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(arch, 10))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    device = torch.device("cuda", arch)  # no other test asks for it
    return MLPProblem(device, getattr(torch, dtype), "ieee", 0, hidden, inner, activation="silu")


@pytest.mark.parametrize(
    ("problem", "most"), MOST.items(), ids=map(str, MOST), indirect=["problem"]
)
def test_a_new_length_compiles_nothing_that_warm_up_has_not(problem, most):
    warmed = plan.layer_binaries(problem)
    assert 0 < len(warmed) <= most
    for tokens in (*EDGES, *LENGTHS):
        assert keys_of(problem, tokens) <= warmed.keys(), tokens


@pytest.mark.parametrize("problem", [next(iter(MOST))], indirect=True)
def test_a_kernel_that_depends_on_the_length_is_found(problem, monkeypatch):
    for parameter in kernels._swiglu_bwd_kernel.params:
        monkeypatch.setattr(parameter, "do_not_specialize", False)
    warmed = plan.layer_binaries(problem)
    assert any(not keys_of(problem, tokens) <= warmed.keys() for tokens in LENGTHS)


class Far(torch.Tensor):
    """It says that it is on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)


def far_mlp(dtype):
    mlp = fusedlib.SwiGLUMLP(16, 32, dtype=dtype)
    del mlp.down_proj.weight
    mlp.down_proj.weight = torch.empty(16, 32, dtype=dtype).as_subclass(Far)
    mlp.weights = lambda: (None, mlp.down_proj.weight)
    return mlp


class TestWarmUp:
    @pytest.mark.parametrize(
        "module, why",
        [
            (fusedlib.SwiGLUMLP(16, 32), "it lies on cpu, the kernels are for NVIDIA GPUs"),
            (fusedlib.SwiGLUMLP(16, 32, device="meta"), "the weights lie on meta"),
            (torch.nn.Linear(2, 2), "there is no SwiGLUMLP"),
            (far_mlp(torch.float64), "it is in float64"),
        ],
    )
    def test_says_why_there_is_nothing_to_do(self, monkeypatch, module, why):
        if "weights" in vars(module):
            monkeypatch.setattr(warm, "has_kernels", lambda device: True)
        warmed = fusedlib.warm_up(module)
        assert warmed.names == () and str(warmed).startswith(f"0 kernels in 0.0 s: {why}")

    def test_a_range_of_lengths_is_not_run_through(self):
        assert warm._lengths(range(10**12, 0, -1)) == range(1, 10**12 + 1)

    @pytest.mark.parametrize(
        "arguments, kind, message",
        [
            (("model",), TypeError, "takes a torch.nn.Module, got str"),
            ((None, (torch.float64,)), ValueError, "dtypes must be among .*got torch.float64"),
            ((None, ("bf16",)), TypeError, "dtypes must be torch dtypes, got 'bf16'"),
            ((None, "bfloat16"), TypeError, "dtypes must be torch dtypes, got 'bfloat16'"),
            ((None, 4096), TypeError, "got 4096; tokens=4096 is for a number of tokens"),
            ((None, []), ValueError, r"dtypes must be at least one, .* got \[\]"),
            ((None, None, range(0, 5)), ValueError, "tokens must be at least 1, got range"),
            ((None, None, range(5, 5)), ValueError, "tokens must be at least 1"),
            ((None, None, 2.5), TypeError, "a range, a whole number or None, got 2.5"),
        ],
    )
    def test_says_what_is_wrong(self, arguments, kind, message):
        module, dtypes, tokens = (*arguments, None, None)[:3]
        module = fusedlib.SwiGLUMLP(16, 32) if module is None else module
        with pytest.raises(kind, match=message):
            fusedlib.warm_up(module, dtypes, tokens=tokens)


@pytest.mark.gpu
class TestOnACard:
    def test_70_lengths_after_warm_up_compile_nothing(self, tmp_path):
        """In a process with a cache of its own, where the calls' results are checked elsewhere."""
        code = (
            "import sys, threading, torch, triton, fusedlib\n"
            "compiled = []\n"
            "hook = lambda **given: compiled.append(given['fn'].name) or False\n"
            "triton.knobs.runtime.jit_post_compile_hook = hook\n"
            "mlp = fusedlib.SwiGLUMLP(512, 1408, device='cuda', dtype=torch.bfloat16)\n"
            "warmed = fusedlib.warm_up(mlp, progress=False)\n"
            "built = len(compiled)\n"
            "ones = torch.ones(1024, 512, device='cuda', dtype=torch.bfloat16)\n"
            "mlp(ones).backward(ones)  # autograd's thread has done nothing yet\n"
            "for tokens in map(int, sys.argv[1:]):\n"
            "    x = torch.randn(tokens, 512, device='cuda').bfloat16().requires_grad_()\n"
            "    for save in ('gate_up', 'input'):\n"
            "        mlp.save = save\n"
            "        mlp(x).sum().mul(1).backward(retain_graph=True)\n"
            "        mlp(x).backward(torch.ones_like(x))\n"
            "    with torch.no_grad():\n"
            "        mlp(x)\n"
            "torch.cuda.synchronize()\n"
            "x, results = torch.randn(2048, 512, device='cuda').bfloat16(), []\n"
            "other = threading.Thread(target=lambda: results.append(mlp(x)))\n"
            "other.start(); other.join()\n"
            "assert torch.equal(*results, mlp(x)), 'another thread'\n"
            "print(len(warmed.names), built, len(compiled))\n"
        )
        environment = {"TRITON_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, (*EDGES, *LENGTHS))],
            capture_output=True, text=True, check=False, timeout=limits.PROCESS_S,
            env=os.environ | environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        names, built, compiled = map(int, done.stdout.split())
        assert names == built == compiled <= 23
