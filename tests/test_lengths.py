"""Lengths that change: no kernel depends on one, and what a layer can need is listed and built."""

import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import fusedlib
import limits
from ahead import compiled_ahead
from fusedlib.launch import binaries
from fusedlib.launch.config import Config, with_roles
from fusedlib.patch import warm_up as warm

LENGTHS = random.Random(0).sample(range(1, 6001), 70)
# Of classes at 2048·5632, and what Triton sees.
EDGES = (1, 16, 17, 63, 64, 65, 128, 129, 192, 193, 384, 385, 768, 769)
HOPPER, OTHER = (90, 132), (89, 128)
MOST = {  # binaries of an MLP: card, hidden, inner, dtype
    (*HOPPER, 2048, 5632, "bfloat16"): 19,
    (*HOPPER, 512, 2048, "bfloat16"): 23,
    (*HOPPER, 2056, 5000, "bfloat16"): 7,  # rows that TMA does not take
    (*HOPPER, 256, 11008, "bfloat16"): 16,  # so wide that dh is a product apart
    (*OTHER, 2048, 5632, "bfloat16"): 11,
    (*HOPPER, 2048, 5632, "float32"): 8,
}
BROKEN = "broken", *HOPPER, 2048, 5632, "bfloat16", EDGES
WARM = "warm", *HOPPER, 256, 512, "bfloat16", EDGES


def calls(mlp):
    return "calls", *mlp, (*EDGES, *LENGTHS)


@pytest.fixture(scope="module")
def played():
    """What each task finds."""
    tasks = *map(calls, MOST), BROKEN, WARM
    found = compiled_ahead("lengths_played.py", *map(json.dumps, tasks))
    return dict(zip(tasks, found, strict=True))


class TestLayersNeedFewKernels:
    """Played: the calls are real, the card is not."""

    @pytest.mark.slow
    @pytest.mark.parametrize("mlp", MOST, ids=str)
    def test_at_any_length(self, played, mlp):
        found, most = played[calls(mlp)], MOST[mlp]
        assert len(found["listed"]) == len(set(found["listed"])) == most
        assert found["not listed"] == found["shared wrongly"] == []
        assert found["of Triton"] == len(found["met"]) >= most - 2
        assert found["plans"] <= 8  # classes

    @pytest.mark.slow
    def test_one_that_depends_on_the_length_is_found(self, played):
        found = played[BROKEN]
        assert found["shared wrongly"] and found["of Triton"] > 13

    @pytest.mark.slow
    def test_warm_up_compiles_all_of_them_once(self, played):
        found = played[WARM]
        assert found["few"] == [7, 7]
        assert len(found["names"]) == len(set(found["names"])) == found["compiled"] == 23
        assert all(name.endswith("(silu, 256·512, bfloat16)") for name in found["names"])
        assert found["again"] == [23, 0]


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

    @pytest.mark.parametrize("roles", [True, False])
    def test_roles_are_done_without_where_they_do_not_compile(self, monkeypatch, roles):
        errors = pytest.importorskip("triton.errors")
        from fusedlib.ops.mlp import prebuild
        from fusedlib.ops.mlp import tiles as swiglu

        if swiglu.hopper is None:
            pytest.skip("another Gluon")

        def build(device):
            raise errors.TritonError("no compiler")

        config = with_roles(1, 1) if roles else Config()
        launch = SimpleNamespace(config=config, build=build, build_ahead=lambda device: None)
        needed = SimpleNamespace(name="h", launch=launch, matrices=())
        monkeypatch.setattr(warm, "has_kernels", lambda device: True)
        monkeypatch.setattr(swiglu, "hopper", swiglu.hopper)
        monkeypatch.setattr(
            prebuild, "layer_binaries", lambda *_: {} if swiglu.hopper is None else {"key": needed}
        )
        with pytest.warns(RuntimeWarning) if roles else pytest.raises(errors.TritonError):
            fusedlib.warm_up(far_mlp(torch.bfloat16), progress=False)
        assert (swiglu.hopper is None) == roles

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


class TestBinaries:
    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch):
        for name in ("_LOADED", "_COMPILING"):
            monkeypatch.setattr(binaries, name, {})
        monkeypatch.setattr(binaries, "load_kernel", lambda binary: ("loaded", binary))
        monkeypatch.setattr(binaries, "_with_launcher", lambda compiled: compiled())

    def test_threads_that_want_the_same_compile_it_once(self):
        made, together = [], threading.Barrier(4)

        def compiled():
            made.append(1)
            return "kernel"

        def wanted():
            together.wait()
            return binaries.cached_binary("key", compiled)

        with ThreadPoolExecutor(4) as pool:
            found = [future.result() for future in [pool.submit(wanted) for _ in range(4)]]
        assert found == [("loaded", "kernel")] * 4 and made == [1]

    def test_what_was_compiled_ahead_is_loaded_where_it_is_wanted(self):
        threads = []

        def compiled():
            threads.append(threading.current_thread().name)
            return "kernel"

        for _ in range(2):
            binaries.compile_in_background("key", compiled)
            assert binaries.cached_binary("key", compiled) == ("loaded", "kernel")
        assert len(threads) == 1 and threads[0].startswith("fusedlib-compile")

    @pytest.mark.parametrize("ahead", [False, True])
    def test_what_failed_is_tried_again(self, ahead):
        def fails():
            raise RuntimeError("no compiler")

        for _ in range(2):
            if ahead:
                binaries.compile_in_background("key", fails)
            with pytest.raises(RuntimeError, match="no compiler"):
                binaries.cached_binary("key", fails)
        assert binaries.cached_binary("key", lambda: "kernel") == ("loaded", "kernel")


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
