"""A rival of one decorated function is in the rows, tables, figures and claims without an edit."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

from fusedlib import reference
from fusedlib.bench.attempt import Unavailable
from study import end_to_end, kernels, liger, memory, mlp, rivals
from study.race import free

MACHINE = "nvidia-h200"


def test_a_rival_of_a_notebook_may_be_registered_again_when_it_was_edited(monkeypatch):
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    factors = []

    def define(factor: float, module: str = "__main__") -> None:
        def mine(x, w_gate, w_up, w_down):
            factors.append(factor)
            return factor * reference.swiglu_mlp(x, w_gate, w_up, w_down)

        mine.__module__ = module
        mlp.swiglu_mlp("mine")(mine)

    statuses = []
    for factor in (2.0, 1.0):
        define(factor)
        options = {"dtype": "float32", "device": "cpu", "repetitions": 2, "group": ""}
        cases = kernels.races(["4·16·16"], ["mine"], directions=["forward"], **options)
        statuses.append({row.status for row in kernels.measure(cases)})
        free()
    assert statuses == [{"wrong"}, {"ok"}] and set(factors) == {2.0, 1.0}
    with pytest.raises(ValueError, match="'eager'"):
        mlp.swiglu_mlp("eager")(reference.swiglu_mlp)


def test_one_function_is_a_rival_in_every_study_that_races_its_operation(monkeypatch, one_thread):
    """Alone, its memory and deep stacks, and in a whole model: right in each."""
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))

    @mlp.swiglu_mlp("swift")
    def swift(x, w_gate, w_up, w_down):
        """Faster than light."""
        return reference.swiglu_mlp(x, w_gate, w_up, w_down)

    small = {"dtype": "float32", "device": "cpu"}
    alone = kernels.races(["8·16·24"], ["all"], repetitions=1, group="", **small)
    tiny = {"stack_fp32": "8·16·24", "layers": [2], "sweep_widths": [16], "grid_widths": []}
    kept = memory.cases(device="cpu", shapes=[], everywhere=["all"], **tiny)
    held = [case for case in kept if case["dtype"] == "float32"]
    shared = end_to_end.setting("cpu", batch_size=1, seconds=0.0, repetitions=1)
    whole = end_to_end.races(shared, "mlp", ["nano"], [8], ["fp32"])
    for cases in (alone, held, whole):
        assert "swift" in {case["provider"] for case in cases}
    for case in held:
        if case["provider"] == "swift":
            assert memory.figures(case)["y_error"] < 1e-6
    for setup, cases in ((mlp.Setup, alone), (end_to_end.Setup, whole)):
        case = next(case for case in cases if case["provider"] == "swift")
        assert setup(case).check(case).figures["settings"] == "Faster than light"


def test_who_is_said_to_have_packed_weights_has_them(monkeypatch):
    """What is ranked is like beside like: ours ran packed beside rivals with two weights."""
    pytest.importorskip("liger_kernel")
    inputs = mlp.draw(mlp.SwiGLUProblem(4, 16, 32, "float32"), "cpu")
    mlp_func = SimpleNamespace(mlp_func=lambda x, *weights, **how: x.clone())
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(mlp=mlp_func))
    monkeypatch.setitem(sys.modules, "quack.mlp", mlp_func)
    monkeypatch.setattr(rivals, "searched", lambda work, dy: work)
    left_out = {"liger-cute", "products"}  # that needs cutlass, and this gives no y
    seen = {
        name: "w_gate_up" in rivals.get(mlp.TASK, name).build(inputs).leaves
        for name in rivals.names(mlp.TASK) if name not in left_out
    }  # fmt: skip
    said = {*rivals.names(mlp.TASK, "packed")} - left_out
    assert {name for name, packed in seen.items() if packed} == said
    assert seen["fused"] and not seen["fused-pair"] and len(seen) > 10


def test_liger_runs_the_kernels_that_are_asked_for_and_rows_name_those_that_ran(monkeypatch):
    pytest.importorskip("liger_kernel")
    from liger_kernel import backends, ops
    from liger_kernel.transformers import swiglu

    cute = SimpleNamespace(__all__=["LigerSiLUMulFunction", liger.FOR_BLACKWELL])
    for name in cute.__all__:
        setattr(cute, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cutedsl.ops", cute)
    monkeypatch.setattr(ops.cutedsl, "ops", cute, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(liger, "has_cute", lambda: True)
    monkeypatch.setattr(liger, "_replaced", liger._replaced.__wrapped__)
    functional = sys.modules["liger_kernel.transformers.functional"]

    def chosen():
        mlp_s, loss_s = swiglu.LigerSiLUMulFunction, getattr(functional, liger.FOR_BLACKWELL)
        return backends.get_impl(), mlp_s, loss_s

    own = chosen()
    assert liger.by(liger.TRITON, chosen)() == (liger.TRITON, *own[1:])
    assert liger.by(liger.CUTE, chosen)() == (liger.CUTE, cute.LigerSiLUMulFunction, own[2])
    with pytest.raises(RuntimeError, match="nobody"), liger.kernels_of(liger.CUTE):
        raise RuntimeError("nobody")
    assert chosen() == own

    ran = {"nvjet_hsh_256x128", "_swiglu_forward_kernel", "kernel_cutlass__rope_tma_kernel_0"}
    assert liger._path(ran) == f"{liger.CUTE} and {liger.TRITON}"
    assert [liger._path({name}) for name in sorted(ran)] == [
        liger.TRITON, liger.CUTE, "no kernel of Liger's"
    ]  # fmt: skip


@pytest.mark.parametrize("package", ["nowhere", "nowhere.inside", "fusedlib.nowhere"])
def test_a_package_inside_one_that_is_not_there_is_not_there(package):
    rivals_own = dataclasses.replace(rivals.get(mlp.TASK, "eager"), requires=(package,))
    with pytest.raises(Unavailable, match=package):
        rivals_own.check_available("cpu", "float32")
    dataclasses.replace(rivals_own, requires=("fusedlib.bench",)).check_available("cpu", "float32")
