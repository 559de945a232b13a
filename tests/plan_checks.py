"""What must hold of every kind of plan of the MLP, in Triton's interpreter and on a GPU."""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch.autograd import grad

import called
import swiglu_checks as checks
from fusedlib.ops.mlp import configs as swiglu_configs
from fusedlib.ops.mlp import function as functional
from fusedlib.ops.mlp import plan_cache, route
from gradient_checks import subsets

HOLDS = (
    checks.check_leading_dimensions,
    checks.check_any_strides,
    checks.check_backward_twice,
    checks.check_changed_in_place,
    checks.check_activation_checkpointing,
    checks.check_no_grad_and_inference,
)


def name_of(check: Callable[[str], None]) -> str:
    return check.__name__.removeprefix("check_")


def run_at(monkeypatch, check, device: str, dtype: str, shape: tuple[int, int, int]) -> None:
    """A check of `swiglu_checks` with leaves that a plan takes."""
    monkeypatch.setattr(checks, "HIDDEN", shape[1])
    monkeypatch.setattr(checks, "INNER", shape[2])
    drawn = checks.small
    monkeypatch.setattr(
        checks, "small", lambda device, pair=False: drawn(device, dtype, shape, pair)
    )
    check(device)


def put_apart(monkeypatch, forward: bool = True, backward: bool = True) -> None:
    """Route calls of more than few tokens there, or to one fused kernel; plans are made anew."""
    most = {route.FORWARD_N: forward, route.BACKWARD_N: backward}
    monkeypatch.setattr(
        route,
        "max_unfused_tokens",
        lambda device, inner, n: 1 << 40 if most[n] else route.FEW_TOKENS,
    )
    without_small_tiles(monkeypatch)


def without_small_tiles(monkeypatch) -> None:
    """Route calls as a card without `ONE_WAVE_CONFIGS`, their gradients in several launches."""
    monkeypatch.setattr(swiglu_configs, "ONE_WAVE_CONFIGS", {})
    monkeypatch.setattr(route, "max_one_launch_tokens", lambda *_: route.FEW_TOKENS)
    monkeypatch.setattr(route, "length_class_ends", cache(route.length_class_ends.__wrapped__))
    monkeypatch.setattr(plan_cache, "_PLANS", {})


def only_tiles(monkeypatch) -> None:
    """Route calls as a card that is no Hopper does."""
    put_apart(monkeypatch, False, False)
    monkeypatch.setattr(route, "_runs_warp_specialized", lambda device: False)


def note_launches(monkeypatch) -> list[str]:
    """Names of the kernels that are started from now on; plans are made anew."""
    monkeypatch.setattr(plan_cache, "_PLANS", {})
    return called.note_launches(monkeypatch)


def frozen_subsets(started, leaves, dy, save, agree):
    """Each subset of operands of which some want gradients; `started` holds their backward."""
    named = dict(zip(checks.names(leaves), leaves, strict=True))
    compute = partial(checks.mlp_by_name, save=save)
    return filter(None, subsets(compute, named, dy, agree, before=started.clear))


def check_frozen_subsets(started, leaves, dy, save, again, backward) -> None:
    """Each subset's gradients are there, are right, and start what they need and no more.

    `again` is what computes gate|up once more with save="input", `backward` what a whole pass
    starts, the kernel of d(gate|up) first.
    """
    for chosen in frozen_subsets(started, leaves, dy, save, checks.close):
        # d_Wd of an h computed again needs neither dh nor another pass over gate|up.
        alone = chosen == {"w_down"} and save == "input"
        assert started == again * (save == "input") + backward[alone:]


def check_second_call(monkeypatch, leaves, dy) -> None:
    """A call that has a plan is checked no more; any other is."""
    wanted = checks.mlp(*leaves)
    monkeypatch.setattr(functional, "check_mlp", None)
    again = checks.mlp(*leaves)
    assert checks.same([again, *grad(again, leaves, dy)], [wanted, *grad(wanted, leaves, dy)])
    with torch.no_grad():
        assert checks.same([checks.mlp(*leaves)], [wanted])
    *others, w_down = leaves
    for other in (
        [leaves[0][:, :-1], *leaves[1:]],
        [leaves[0].bfloat16(), *leaves[1:]],
        [*others, w_down.detach().mT],
        [*others[:-1], others[-1].detach()[:-1], w_down],
        [*others[:-1], others[-1].detach().bfloat16(), w_down],
        [*others[:-1], others[-1].detach().to("meta"), w_down],
    ):
        with pytest.raises(TypeError, match="NoneType"):
            checks.mlp(*other)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="NoneType"):
        checks.mlp(*leaves)


def check_gate_up_written_over(leaves, dy, retained: bool) -> None:
    """By d(gate|up), and only where nobody sees it: graphs not retained, and no hooks."""
    y = checks.mlp(*leaves)
    own = y.grad_fn.private_gate_up
    before = own.clone()
    first = grad(y, leaves, dy, retain_graph=retained)
    assert torch.equal(own, before) == retained
    if retained:
        assert checks.same(grad(y, leaves, dy), first)
    with pytest.raises(RuntimeError, match="second time"):
        grad(y, leaves, dy)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = checks.mlp(*leaves)
    before = [t.detach().clone() for t in kept]
    assert checks.same(grad(y, leaves, dy), first)
    assert checks.same(kept, before) and len(kept) == len(leaves) + 1
