"""The autotuner on a GPU that it is told not to know."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import plan_checks
import pytest
import swiglu_checks as checks
import torch

pytest.importorskip("triton")
from fusedlib import paths, swiglu_mlp
from fusedlib.kernels import autotune, plan, route
from fusedlib.kernels.autotune import __main__ as command
from fusedlib.kernels.autotune import store, trials

pytestmark = pytest.mark.gpu

FEW, MIDDLE = (37, 528, 1040), (100, 528, 1040)  # tokens, hidden, inner
SIZES = ["--tokens", "37", "--hidden", "528", "--inner", "1040"]


@pytest.fixture(autouse=True)
def unknown(monkeypatch, tmp_path):
    """This card in no table, nothing kept, the file in an empty folder."""
    monkeypatch.setenv("FUSEDLIB_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "MEASURED", ())
    monkeypatch.setattr(command, "MEASURED", ())
    monkeypatch.setattr(autotune, "_CHOSEN", {})
    forget_launches(monkeypatch)


def forget_launches(monkeypatch) -> None:
    monkeypatch.setattr(route, "_PLANS", {})


@pytest.mark.parametrize(("shape", "dtype"), [(FEW, "bfloat16"), (MIDDLE, "float16")])
def test_tuned_results_vs_float64(monkeypatch, shape, dtype):
    """At more than few tokens as on all cards but Hopper's."""
    plan_checks.only_tiles(monkeypatch)
    assert checks.misses_mlp("cuda", dtype, shape) == []
    kernels = {key.split(" | ")[4].split()[0] for key in autotune.chosen()}
    assert kernels == {"_swiglu_fwd_kernel", "_swiglu_bwd_kernel"}


def test_cublas_s_products_tune_nothing(monkeypatch):
    """Where they are faster than a fused kernel, as on Hopper at this size."""
    plan_checks.put_apart(monkeypatch)
    assert checks.misses_mlp("cuda", "float16", MIDDLE) == []
    assert not autotune.chosen() and route._PLANS


@pytest.mark.parametrize("tokens", [64, 128])
def test_tuned_tiles_are_no_slower_than_the_default(monkeypatch, tokens):
    """At more than few tokens as on all cards but Hopper's, where 128 of them go apart."""
    plan_checks.only_tiles(monkeypatch)
    makes = []

    def recording(make, matrices):
        makes.append((make, matrices))
        return autotune.tuned(make, matrices)

    monkeypatch.setattr(plan, "tuned", recording)
    command.run_variants(tokens, 2048, 2048, torch.bfloat16, torch.device("cuda", 0))
    assert makes
    for make, matrices in makes:
        own, default, chosen = trials._drawn_like(matrices), make(), autotune.tuned(make, matrices)
        pairs = [(trials._time(chosen, own), trials._time(default, own)) for _ in range(5)]
        ours, theirs = map(median, zip(*pairs, strict=True))
        assert ours < 1.1 * theirs, (chosen.config, ours, theirs)


def test_a_second_process_reads_and_does_not_tune(tmp_path):
    code = (
        "import sys\n"
        "from fusedlib.kernels import autotune\n"
        "from fusedlib.kernels.autotune import __main__ as command, trials\n"
        "autotune.MEASURED = command.MEASURED = ()\n"
        "fastest, calls = trials.fastest, []\n"
        "trials.fastest = lambda *a: calls.append(1) or fastest(*a)\n"
        "status = command.main(sys.argv[1:])\n"
        "print('tuned', len(calls))\n"
        "sys.exit(status)\n"
    )

    def run() -> list[str]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
        }
        done = subprocess.run(
            [sys.executable, "-c", code, *SIZES],
            capture_output=True, text=True, env=environment, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    first, second = run(), run()
    found = json.loads((tmp_path / store.NAME).read_text(encoding="utf-8"))["tiles"]
    assert first[-1] == f"tuned {len(found)}" and second[-1] == "tuned 0"
    assert first[:-1] == second[:-1]


def test_a_captured_first_call_tunes_nothing_and_is_right(monkeypatch):
    leaves, _ = checks.small("cuda", "bfloat16", FEW)
    operands = [leaf.detach() for leaf in leaves]
    monkeypatch.setenv("FUSEDLIB_AUTOTUNE", "0")
    wanted = swiglu_mlp(*operands)
    monkeypatch.delenv("FUSEDLIB_AUTOTUNE")
    forget_launches(monkeypatch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = swiglu_mlp(*operands)
    graph.replay()
    assert torch.equal(y, wanted)
    assert not autotune.chosen() and not (paths.cache_dir() / store.NAME).exists()


def test_random_numbers_go_on_as_without_tuning():
    leaves, _ = checks.small("cuda", "bfloat16", FEW)
    torch.manual_seed(1)
    wanted = torch.randn(3, device="cuda")
    torch.manual_seed(1)
    with torch.no_grad():
        swiglu_mlp(*leaves)
    assert autotune.chosen() and torch.equal(torch.randn(3, device="cuda"), wanted)


def test_a_measured_card_tunes_nothing(monkeypatch, capsys):
    name = torch.cuda.get_device_name()
    monkeypatch.setattr(autotune, "MEASURED", (name,))
    monkeypatch.setattr(command, "MEASURED", (name,))
    assert command.main(SIZES) == 0
    assert "nothing to tune" in capsys.readouterr().out
    assert checks.misses_mlp("cuda", "bfloat16", FEW) == []
    assert not autotune.chosen()
