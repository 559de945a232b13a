"""Plans of the MLP by what computes their products: kernels for few tokens, torch's own beside a
pointwise kernel, split fp32; in Triton's interpreter and on a GPU.
"""

from typing import NamedTuple

import pytest
import torch
from torch.autograd import grad

import broken_kernels
import gradient_checks
import plan_checks
import swiglu_checks as checks
from called import Called
from fusedlib.bench.settings import matmul_settings
from fusedlib.launch import launch
from fusedlib.launch.fixed import fixed_weights
from fusedlib.ops.linear import route as linear_route
from fusedlib.ops.linear.split import parts
from fusedlib.ops.mlp import plan_cache, products, route
from fusedlib.ops.mlp.function import SAVES, path_of, swiglu_mlp
from interpreter import INTERPRETED, passed_in_the_interpreter
from split_families import cut_for_the_interpreter

FORWARD = ["_swiglu_fwd_kernel", "_few_down_kernel"]
POINTWISE = ["_swiglu_bwd_kernel"]
BACKWARD = [*POINTWISE, "_few_gradients_kernel"]
MULTIPLY = ["_split_product_kernel"]
PRODUCT = ["_split_kernel"] * 2 + MULTIPLY
BOTH_SAVES = pytest.mark.parametrize(
    ("dtype", "save"), [("float16", "gate_up"), ("bfloat16", "input")]
)
PAIRS = pytest.mark.parametrize("pair", checks.PAIRS, ids=["packed", "pair"])


class Kind(NamedTuple):
    """What a plan is called, and calls that it takes; of tokens, hidden and inner two of the
    interpreter's tiles each way, the last ones ragged, where the kernels are ours.
    """

    path: str
    dtype: str
    shape: tuple[int, int, int]
    on_gpu: tuple[int, int, int]


FEW = Kind("few tokens", "float16", (37, 48, 80), (37, 64, 80))
# One token more than the kernels for few take.
APART = Kind("apart", "float16", (65, 48, 32), (72, 64, 80))
SPLIT = Kind("split fp32", "float32", (24, 32, 48), (1032, 1024, 4096))
KINDS = {kind.path: kind for kind in (FEW, APART, SPLIT)}


@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_in_the_interpreter(part):
    assert passed_in_the_interpreter("test_plans.py", part) > 40


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Names of the kernels that ran; all plans are made here."""
    return plan_checks.note_launches(monkeypatch)


@pytest.fixture
def apart(monkeypatch):
    """Calls of more than few tokens by torch's products, on a GPU where one chooses them."""
    if INTERPRETED:
        plan_checks.put_apart(monkeypatch)
        return
    plan_checks.without_small_tiles(monkeypatch)
    if route.max_unfused_tokens(torch.device("cuda", 0), 272, route.BACKWARD_N) < 130:
        plan_checks.put_apart(monkeypatch)  # a card that is no Hopper


@pytest.fixture
def split(monkeypatch):
    """fp32 products of any size are split in the interpreter."""
    if INTERPRETED:
        cut_for_the_interpreter(monkeypatch)
        monkeypatch.setattr(route, "is_fp32_on_gpu", lambda dtype, _: dtype == torch.float32)
        for name in ("MIN_SPLIT_SIZE", "MIN_SPLIT_WORK"):
            monkeypatch.setattr(linear_route, name, 1)
        least(monkeypatch, SPLIT.shape)


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param in ("apart", "split fp32"):
        request.getfixturevalue(request.param.split()[0])
    return KINDS[request.param]


def least(monkeypatch, shape, some=True):
    """`some`: tokens·hidden results are too few to be split, so that y and d_x are torch's."""
    monkeypatch.setattr(linear_route, "MIN_SPLIT_RESULTS", some * shape[0] * shape[1] + 1)
    route.any_mlp_product_splits.cache_clear()


def small(kind, shape=None, pair=False):
    return checks.small("cpu", kind.dtype, shape or kind.shape, pair)


def results(leaves, dy, save="gate_up"):
    y = checks.mlp(*leaves, save=save)
    return [y, *grad(y, leaves, dy)]


# --- of every kind -------------------------------------------------------------------------------

# At least the 36 that a check takes apart.
TOKENS_OF_CHECKS = {FEW: 37, APART: 72, SPLIT: 36}
# Whose tokens stay as many, and whose operands lie as a plan of split products takes them.
ALIKE = (
    checks.check_backward_twice,
    checks.check_activation_checkpointing,
    checks.check_no_grad_and_inference,
)


@pytest.mark.parametrize("check", plan_checks.HOLDS, ids=plan_checks.name_of)
def test_holds(kind, device, monkeypatch, check):
    if device == "cpu":
        shape, dtype = (TOKENS_OF_CHECKS[kind], *kind.shape[1:]), kind.dtype
    else:
        if kind is SPLIT and check not in ALIKE:
            pytest.skip("compares with products that are torch's and err more")
        shape, dtype = kind.on_gpu, "float32" if kind is SPLIT else "bfloat16"
    plan_checks.run_at(monkeypatch, check, device, dtype, shape)
    assert kind.path in {plan.path for plan in plan_cache._PLANS.values()}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [FEW.on_gpu, APART.on_gpu], ids=str)
def test_frozen_subsets_on_a_gpu(apart, monkeypatch, shape):
    plan_checks.run_at(monkeypatch, checks.check_frozen_subsets, "cuda", "bfloat16", shape)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("save", "pair"), [("gate_up", False), ("input", True)], ids=["gate_up-packed", "input-pair"]
)
def test_frozen_subsets_get_what_they_want_and_cost_no_more(kind, device, started, save, pair):
    leaves, dy = small(kind, pair=pair)
    if kind is not SPLIT:
        again, backward = (FORWARD[:1], BACKWARD) if kind is FEW else (POINTWISE, POINTWISE)
        plan_checks.check_frozen_subsets(started, leaves, dy, save, again, backward)
        return
    for chosen in plan_checks.frozen_subsets(started, leaves, dy, save, checks.same):
        gradient = chosen != {"w_down"}
        again = (PRODUCT + POINTWISE) * (save == "input")
        needed = POINTWISE * (gradient or save == "gate_up")
        of_gate_up = bool(chosen & {"w_gate_up", "w_gate", "w_up"})
        of_weights = PRODUCT * (of_gate_up + ("w_down" in chosen))
        assert started == again + PRODUCT * gradient + needed + of_weights


@pytest.mark.interpreter
@PAIRS
def test_a_second_call_looks_nothing_up(kind, device, monkeypatch, pair):
    plan_checks.check_second_call(monkeypatch, *small(kind, pair=pair))


@pytest.mark.interpreter
@pytest.mark.parametrize("retained", [False, True])
def test_gate_up_is_written_over_only_where_nobody_sees_it(kind, device, retained):
    for pair in checks.PAIRS:
        plan_checks.check_gate_up_written_over(*small(kind, pair=pair), retained)


# --- few tokens ----------------------------------------------------------------------------------

# On a GPU tiles of 16, 32 and 64 columns in each of the kernels, spans of 1, 2 and 4; ragged.
FEW_SHAPES = (
    [FEW.shape, (64, 16, 144), (1, 160, 16)]
    if INTERPRETED
    else [(64, 512, 512), (37, 512, 1056), (1, 256, 512), (33, 16, 16), (50, 8192, 96),
          (64, 48, 8208), (61, 4096, 4112), (64, 8192, 8192)]
)  # fmt: skip


@BOTH_SAVES
@PAIRS
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=str)
def test_few_tokens_vs_float64(device, started, shape, dtype, save, pair):
    assert checks.misses_mlp(device, dtype, shape, save, pair=pair) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path == FEW.path and plan.problem.sizes[1:] == shape[1:]
    assert started == FORWARD + FORWARD[:1] * (save == "input") + BACKWARD or not INTERPRETED


@pytest.mark.interpreter
@pytest.mark.parametrize("save", SAVES)
def test_without_a_down_projection_no_product_is_for_few_tokens(device, started, save):
    assert checks.misses_half(device, "float16", FEW.shape, save) == []
    assert set(started) == {FORWARD[0], BACKWARD[0]}
    assert {plan.path for plan in plan_cache._PLANS.values()} == {"fused by tiles"}


@pytest.mark.interpreter
@pytest.mark.parametrize("of", ["gate", "up"])
def test_neither_half_of_d_x_sees_the_other_one_s_weight(device, of):
    """Where inner ends within a block: zeros there by an inf would be nan, and are not seen."""
    leaves, dy = small(FEW, pair=True)
    x, w_gate, w_up, _ = (t.detach() for t in leaves)
    (w_gate if of == "gate" else w_up)[[0, -1], [0, 1]] = float("inf")
    d_gate_up = torch.randn(FEW.shape[0], 2 * FEW.shape[2]).half()
    packed, wants = torch.cat([w_gate, w_up]), (True, False, False, False)
    true = d_gate_up.float() @ packed.float()
    for weights in ((w_gate, w_up), (packed, None)):
        own, pair = (
            plan_cache.plan_for(dy, *weights, leaves[3]).products,
            weights[1] is not None,
        )
        d_x = own.gradients(wants, pair, [None, d_gate_up], dy, x, *weights)[0]
        assert torch.equal(d_x.isposinf(), true.isposinf())
        assert torch.equal(d_x.isneginf(), true.isneginf()) and not d_x.isnan().any()


@pytest.mark.interpreter
def test_a_tensor_left_over_from_torch_func(device):
    """Its wrapper is dead: it has no address of its own."""
    leaves, _ = small(FEW)
    wanted = swiglu_mlp(*leaves)
    left = []
    torch.func.grad(lambda t: (left.append(t * 1), t.sum())[1])(leaves[0].detach())
    assert checks.same([swiglu_mlp(left[0], *leaves[1:])], [wanted])
    with torch.no_grad():
        assert checks.same([swiglu_mlp(left[0], *leaves[1:])], [wanted])


@pytest.mark.interpreter
def test_operands_that_lie_otherwise_are_copied(device, started):
    """Not contiguous, or beginning between 16 bytes; the plan is the same."""
    leaves, dy = small(FEW)
    wanted = [swiglu_mlp(*leaves), *grad(swiglu_mlp(*leaves), leaves, dy)]
    apart = torch.empty(FEW.shape[0] * FEW.shape[1] + 1, dtype=torch.float16)[1:].view(
        FEW.shape[:2]
    )
    moved = apart.copy_(leaves[0].detach()).requires_grad_()
    turned = [t.detach().mT.contiguous().mT.requires_grad_() for t in leaves]
    for own in ([moved, *leaves[1:]], turned):
        y = swiglu_mlp(*own)
        assert checks.same([y, *grad(y, own, dy.mT.contiguous().mT)], wanted)
    assert set(started) == {*FORWARD, *BACKWARD} and len(plan_cache._PLANS) == 1


@pytest.mark.interpreter
def test_weights_changed_between_the_passes(device):
    leaves, dy = small(FEW)
    wanted = grad(swiglu_mlp(*leaves), leaves, dy)
    y = swiglu_mlp(*leaves)
    leaves[1].data = leaves[1].detach().mT.contiguous().mT  # torch does not notice
    assert checks.close(grad(y, leaves, dy), wanted)
    y = swiglu_mlp(*leaves)
    with torch.no_grad():
        leaves[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.interpreter
def test_other_sizes_and_dtypes_go_another_way(device):
    for shape, dtype in (
        ((37, 40, 80), "float16"),
        ((37, 48, 72), "float16"),
        (FEW.shape, "float32"),
    ):
        leaves, _ = checks.small("cpu", dtype, shape)
        assert path_of(*leaves) == "fused by tiles"
    leaves, _ = small(FEW)
    assert path_of(*leaves) == "few tokens"


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", broken_kernels.BROKEN_FEW)
def test_a_broken_product_of_few_tokens_is_rejected(device, monkeypatch, tmp_path, fault):
    broken_kernels.forget(monkeypatch)
    started = broken_kernels.put_few(monkeypatch, tmp_path, fault, off=0.5)
    assert all(checks.misses_mlp(device, "float16", FEW.shape, pair=p) for p in checks.PAIRS)
    assert broken_kernels.names(started) == set(broken_kernels.FEW_NAMES)


SMALL_TILES = [(65, 512, 512), (128, 1024, 2064), (130, 272, 528), (256, 512, 2048),
               (300, 256, 4096), (1000, 64, 2048), (250, 2048, 8192),
               (100, 4096, 14336)]  # fmt: skip


@pytest.mark.gpu
@BOTH_SAVES
@PAIRS
@pytest.mark.parametrize("shape", SMALL_TILES, ids=str)
def test_small_tiles_and_gradients_vs_float64(shape, dtype, save, pair):
    assert checks.misses_mlp("cuda", dtype, shape, save, pair=pair) == []
    [plan] = plan_cache._PLANS.values()
    if route.architecture(plan.problem.device) == 90:
        assert plan.path in ("fused by tiles", "dh apart")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check", (*plan_checks.HOLDS, checks.check_frozen_subsets), ids=plan_checks.name_of
)
def test_small_tiles_hold(monkeypatch, check):
    plan_checks.run_at(monkeypatch, check, "cuda", "bfloat16", (100, 64, 80))
    assert plan_cache._PLANS


@pytest.mark.gpu
def test_who_asks_triton_is_told_of_every_launch():
    import triton

    leaves, dy = checks.small("cuda", "bfloat16", (64, 64, 64))
    wanted = grad(swiglu_mlp(*leaves), leaves, dy)
    told = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(note := lambda metadata: told.append(metadata.get()["name"]))
    try:
        assert checks.same(grad(swiglu_mlp(*leaves), leaves, dy), wanted)
    finally:
        hook.remove(note)
    assert told == FORWARD + BACKWARD
    assert checks.same(grad(swiglu_mlp(*leaves), leaves, dy), wanted) and len(told) == 4


# --- torch's products ----------------------------------------------------------------------------

FUSED = {"nothing": "apart", "forward": "dh apart", "both": "fused by tiles"}


def fuse(monkeypatch, fused):
    plan_checks.put_apart(monkeypatch, fused == "nothing", fused != "both")


@pytest.mark.interpreter
def test_one_plan_serves_every_length_of_its_class(device, apart, monkeypatch):
    """A new length launches the same kernels, and gives what it gives by a plan of its own."""
    for tokens in (65, 96, 130, 72):
        leaves, dy = small(APART, (tokens, *APART.shape[1:]))
        actual = [swiglu_mlp(*leaves), *grad(swiglu_mlp(*leaves), leaves, dy)]
        [plan] = plan_cache._PLANS.values()
        with monkeypatch.context() as anew:
            anew.setattr(plan_cache, "_PLANS", {})
            wanted = [swiglu_mlp(*leaves), *grad(swiglu_mlp(*leaves), leaves, dy)]
        assert checks.same(actual, wanted)
    kept = {key[-1] for key in launch.LAUNCHES if key[0] is plan}
    assert kept == {65, 96, 130, 72}
    swiglu_mlp(*small(APART, (64, *APART.shape[1:]))[0])
    assert len(plan_cache._PLANS) == 2


@pytest.mark.interpreter
@BOTH_SAVES
@pytest.mark.parametrize("fused", FUSED)
def test_torch_s_products_vs_float64(device, started, monkeypatch, fused, dtype, save):
    fuse(monkeypatch, fused)
    assert checks.misses_mlp(device, dtype, APART.shape, save) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path == FUSED[fused]
    assert set(started) == {*POINTWISE, *FORWARD[: fused != "nothing"]}


@pytest.mark.gpu
@BOTH_SAVES
@pytest.mark.parametrize(
    "shape", [(65, 64, 80), (130, 208, 272), (517, 384, 1072), (1024, 256, 4096)], ids=str
)
def test_torch_s_products_on_a_gpu_vs_float64(apart, shape, dtype, save):
    """Both directions on cuBLAS, ragged tokens; the forward one fused kernel."""
    assert checks.misses_mlp("cuda", dtype, shape, save) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path in ("apart", "dh apart")


@pytest.mark.interpreter
def test_rows_that_are_not_even_go_the_same_way(device, apart, started):
    assert checks.misses_mlp(device, "float16", (65, 41, 33)) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path == "apart" and set(started) == {*POINTWISE}


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", ["wrong derivative", "up left out of the recomputed h"])
def test_a_broken_pointwise_kernel_is_rejected(device, apart, monkeypatch, tmp_path, fault):
    broken_kernels.forget(monkeypatch)
    started = broken_kernels.put(monkeypatch, tmp_path, fault, off=0.5)
    assert checks.misses_mlp(device, "float16", APART.shape) != []
    assert POINTWISE[0] in broken_kernels.names(started) and plan_cache._PLANS


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["chosen", "d_w_down first"])
def test_the_peak_is_that_of_the_chosen_order(apart, monkeypatch, order):
    """d_w_down last, where the tokens are few for the width."""
    tokens, hidden, inner = 512, 2048, 4096
    if order != "chosen":
        monkeypatch.setattr(products, "is_d_w_down_last", lambda *_, **_named: False)
    leaves, dy = checks.small("cuda", "bfloat16", (tokens, hidden, inner))

    def step():
        y = swiglu_mlp(*leaves)
        return [y, *grad(y, leaves, dy)]

    peak = checks.peak_over(step)
    f, d, w = (2 * n for n in (tokens * inner, tokens * hidden, hidden * inner))
    first = d + 2 * f + w + max(f, d + 2 * w)
    last = d + f + d + 2 * w + max(2 * f, w)
    assert last < first
    assert abs(peak - (last if order == "chosen" else first)) <= 2**21


# --- split products ------------------------------------------------------------------------------

LONG = (264, 256, 272)  # sums long enough that the parts' own error is not the largest
SEVERAL = (130, 48, 80)  # more than one 128-tile of tokens and of 2·inner, the last ones ragged
# On a GPU a model 1024 wide; y and d_x torch's, of few results; more tokens.
MODEL, FEW_RESULTS, ALL = (1024, 1024, 4096), (256, 2048, 8192), (2048, 2048, 2048)
on_split = pytest.mark.usefixtures("split")


@pytest.mark.interpreter
@on_split
@pytest.mark.parametrize(
    ("some", "save", "pair"),
    [(True, "input", False), (True, "input", True), (False, "gate_up", True)],
)
def test_split_products_vs_float64(device, monkeypatch, some, save, pair):
    least(monkeypatch, LONG, some)
    assert checks.misses_mlp(device, "float32", LONG, save, pair=pair) == []
    [plan] = plan_cache._PLANS.values()
    assert plan.path == SPLIT.path


@pytest.mark.interpreter
@on_split
@PAIRS
@pytest.mark.parametrize(
    ("shape", "some", "save", "scale"),
    [(SPLIT.shape, True, "input", 1e-20), (SPLIT.shape, False, "gate_up", 1e-20),
     (SEVERAL, True, "gate_up", 1.0)],
    ids=["some, input", "all", "ragged"],
)  # fmt: skip
def test_gives_what_the_operators_give(
    device, started, monkeypatch, shape, some, save, scale, pair
):
    """Bit by bit, by the same kernels, badly scaled weights and leading dimensions too."""
    least(monkeypatch, shape, some)
    (x, *gate_up, w_down), dy = small(SPLIT, shape, pair=pair)
    w_down = (w_down.detach() * scale).requires_grad_()
    deep = x.detach().view(2, shape[0] // 2, -1).requires_grad_()
    leaves = deep, *gate_up, w_down
    started.clear()
    planned, by_plan = results(leaves, dy.view_as(deep), save), started.copy()
    assert plan_cache._PLANS
    started.clear()
    with Called():
        assert checks.same(results(leaves, dy.view_as(deep), save), planned)
    assert started == by_plan and MULTIPLY[0] in started


@pytest.mark.interpreter
@on_split
@pytest.mark.parametrize(
    ("shape", "some", "save"), [(SPLIT.shape, False, "input"), (SEVERAL, True, "gate_up")], ids=str
)
def test_a_pair_gives_what_the_packed_weight_gives(device, started, monkeypatch, shape, some, save):
    """Bit by bit where a product is split, in as many launches: the parts are the same."""
    least(monkeypatch, shape, some)
    leaves, dy = small(SPLIT, shape)
    packed, by_packed = results(leaves, dy, save), started.copy()
    started.clear()
    paired = results(small(SPLIT, shape, pair=True)[0], dy, save)
    actual = [*paired[:2], torch.cat(paired[2:4]), paired[4]]
    assert started == by_packed and MULTIPLY[0] in started
    # d_x is torch's, of two products, where `some` are.
    assert checks.close(actual, packed)
    assert checks.same(actual[:1] + actual[2:], packed[:1] + packed[2:])
    assert some or torch.equal(actual[1], packed[1])


@pytest.mark.interpreter
@on_split
def test_a_weight_changed_in_place_is_seen(device):
    """Nothing of a weight is kept from call to call, not even unknown to its version counter."""
    leaves, dy = small(SPLIT, pair=True)
    first = results(leaves, dy)
    for weight in leaves[1:]:
        weight.data.mul_(2.0)
    changed = results(leaves, dy)
    assert not torch.equal(changed[0], first[0])
    fresh = [t.detach().clone().requires_grad_() for t in leaves]
    assert checks.same(changed, results(fresh, dy))


@pytest.mark.interpreter
@on_split
@PAIRS
def test_fixed_weights_are_split_once_an_axis(device, started, monkeypatch, pair):
    """Bit by bit the same, for a second batch too; what is no parameter is split anew."""
    least(monkeypatch, SPLIT.shape, some=False)
    (x, *weights), dy = small(SPLIT, pair=pair)
    weights = [torch.nn.Parameter(w.detach()) for w in weights]
    other = (x.detach() + 1).requires_grad_()
    wanted = [results([batch, *weights], dy) for batch in (x, other)]
    counts = []
    with fixed_weights():
        for batch, of_batch in zip((x, other), wanted, strict=True):
            started.clear()
            with fixed_weights():  # the outermost block counts
                assert checks.same(results([batch, *weights], dy), of_batch)
            counts.append(started.count(PRODUCT[0]))
        started.clear()
        results([x, *(w.detach().requires_grad_() for w in weights)], dy)
        counts.append(started.count(PRODUCT[0]))
    assert counts == [12, 8, 12]
    weights[0].data.mul_(2.0)
    assert not checks.same(results([x, *weights], dy), wanted[0])


@pytest.mark.interpreter
@on_split
def test_a_fixed_weight_that_changes_raises(device, monkeypatch):
    least(monkeypatch, SPLIT.shape, some=False)
    (x, *weights), dy = small(SPLIT)
    weights = [torch.nn.Parameter(w.detach()) for w in weights]
    with fixed_weights():
        results([x, *weights], dy)
        with torch.no_grad():
            weights[1].mul_(2.0)
        with pytest.raises(RuntimeError, match=r"weight of shape \(32, 48\) was changed in place"):
            results([x, *weights], dy)
    results([x, *weights], dy)


@pytest.mark.interpreter
@on_split
def test_the_next_block_splits_its_weights_anew(device, monkeypatch):
    """Also those that changed in between unknown to their version counter, as by fused AdamW."""
    least(monkeypatch, SPLIT.shape, some=False)
    (x, *weights), dy = small(SPLIT)
    weights = [torch.nn.Parameter(w.detach()) for w in weights]
    with fixed_weights():
        before = results([x, *weights], dy)
    for weight in weights:
        weight.data.mul_(2.0)
    wanted = results([x, *weights], dy)
    with fixed_weights():
        assert checks.same(results([x, *weights], dy), wanted)
    assert not checks.same(before, wanted)


@pytest.mark.interpreter
@on_split
def test_fixed_weights_that_share_memory_count_their_changes_apart(device, monkeypatch):
    least(monkeypatch, SPLIT.shape, some=False)
    (x, *weights), dy = small(SPLIT)
    weights = [torch.nn.Parameter(w.detach()) for w in weights]
    tied = [torch.nn.Parameter(torch.empty_like(w)) for w in weights]
    for one, other in zip(tied, weights, strict=True):
        one.data = other.data
    with torch.no_grad():
        weights[0].mul_(2.0)
    assert tied[0]._version != weights[0]._version
    with fixed_weights():
        by_owner = [results([x, *each], dy) for each in (weights, tied)]
    assert checks.same(*by_owner)


@pytest.mark.interpreter
@on_split
def test_another_precision_goes_another_way(device, started):
    """Between calls, and between forward and backward."""
    leaves, dy = small(SPLIT)
    results(leaves, dy)
    y = swiglu_mlp(*leaves)
    with matmul_settings("high", False):
        started.clear()
        grad(y, leaves, dy)
        assert started == POINTWISE
        started.clear()
        results(leaves, dy)
        assert started == POINTWISE * 2
        assert path_of(*leaves) == "fp32"


@pytest.mark.interpreter
@on_split
@pytest.mark.parametrize(
    ("some", "save", "pair"),
    [(True, "gate_up", False), (True, "input", True), (False, "gate_up", True),
     (False, "input", False)],
)  # fmt: skip
def test_a_mode_that_watches_the_backward_sees_its_products(device, monkeypatch, some, save, pair):
    least(monkeypatch, SPLIT.shape, some)
    leaves, dy = small(SPLIT, pair=pair)
    wanted = grad(checks.mlp(*leaves, save=save), leaves, dy)
    y = checks.mlp(*leaves, save=save)
    with Called() as called:
        assert checks.same(grad(y, leaves, dy), wanted)
    # d_x is torch's, of few results.
    again = save == "input"
    by_gate_up = ((not some) + again) * pair
    assert called.names.count("split_mm_gate_up") == by_gate_up
    assert called.names.count("split_mm") == 3 + (not some) + again - by_gate_up
    assert called.names.count("mm") + called.names.count("addmm_") == some * (1 + pair)


@pytest.mark.interpreter
@on_split
def test_lengths_share_two_plans(device, started, monkeypatch):
    """One where no product is split; in the other each is split from its own length on."""
    hidden, inner = SPLIT.shape[1:]
    monkeypatch.setattr(linear_route, "MIN_SPLIT_SIZE", 6)
    monkeypatch.setattr(linear_route, "MIN_SPLIT_RESULTS", 8 * 2 * inner)
    route.any_mlp_product_splits.cache_clear()
    plans, split = {}, {}
    for tokens in (1, 5, 6, 8, 15, 16, 40):
        leaves, dy = small(SPLIT, (tokens, hidden, inner))
        started.clear()
        results(leaves, dy)
        operands = *leaves[:2], None, leaves[2]
        plans[tokens], split[tokens] = plan_cache.plan_for(*operands), started.count(MULTIPLY[0])
        assert plans[tokens] is plan_cache.lookup_plan(*operands)
    assert [plans[t].path for t in (5, 6)] == ["fp32", SPLIT.path]
    assert plans[1] is plans[5] and len({plans[t] for t in (6, 8, 15, 16, 40)}) == 1
    # The gradients of both weights; gate|up from 8 tokens on, dh from 16, y and d_x from 24.
    assert split == {1: 0, 5: 0, 6: 2, 8: 3, 15: 3, 16: 4, 40: 6}


@pytest.mark.interpreter
@on_split
def test_where_nothing_is_split_products_are_torch_s(device, monkeypatch):
    leaves, _ = small(SPLIT)
    assert path_of(*leaves) == SPLIT.path
    assert path_of(*small(SPLIT, (24, 40, 56))[0]) == SPLIT.path  # whatever the sizes
    monkeypatch.setattr(linear_route, "is_faster_split", lambda *_: False)
    monkeypatch.setattr(plan_cache, "_PLANS", {})
    route.any_mlp_product_splits.cache_clear()
    assert path_of(*leaves) == "fp32"


@pytest.mark.interpreter
@on_split
def test_a_broken_plan_is_rejected(device, monkeypatch):
    broken_kernels.without_scales(monkeypatch)
    for pair in checks.PAIRS:
        assert checks.misses_mlp(device, "float32", LONG, pair=pair) != []


@pytest.mark.interpreter
@on_split
def test_gate_s_rows_taken_for_up_s_are_rejected(device, monkeypatch):
    split_factor = parts.FactorSplitter.__call__
    monkeypatch.setattr(
        parts.FactorSplitter,
        "__call__",
        lambda self, source, below=None: split_factor(self, source),
    )
    assert checks.misses_mlp(device, "float32", LONG, pair=True) != []


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MODEL, ALL, (1000, 1056, 4112)], ids=str)
def test_a_pair_gives_what_the_packed_weight_gives_on_a_gpu(shape):
    """Bit by bit, by the same parts; all gate and up products are split there."""
    actual = [results(*checks.small("cuda", "float32", shape, pair)) for pair in checks.PAIRS]
    assert same_numbers(
        [actual[1][0], actual[1][1], torch.cat(actual[1][2:4]), actual[1][4]], actual[0]
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("save", "scale", "pair"),
    [("gate_up", 1.0, False), ("input", 1e-20, True), ("gate_up", 1e20, True)],
)
@pytest.mark.parametrize("shape", [MODEL, FEW_RESULTS, ALL, (1000, 1056, 4112)], ids=str)
def test_gives_what_the_operators_give_on_a_gpu(shape, save, scale, pair):
    """Badly scaled weights, and other weights in the same storage."""
    (x, *weights, w_down), dy = checks.small("cuda", "float32", shape, pair)
    leaves = x, *weights, (w_down.detach() * scale).requires_grad_()
    planned = [results(leaves, dy, save) for _ in range(3)]
    [plan] = plan_cache._PLANS.values()
    assert plan.path == "split fp32"
    leaves[1].data.mul_(2.0)
    changed = results(leaves, dy, save)
    leaves[1].data.mul_(0.5)
    with Called():  # calls go by the registered operators
        wanted = results(leaves, dy, save)
        assert all(same_numbers(each, wanted) for each in planned)
        leaves[1].data.mul_(2.0)
        assert same_numbers(changed, results(leaves, dy, save))


def same_numbers(actual, wanted) -> bool:
    return all(
        torch.equal(f.nan_to_num(), w.nan_to_num()) for f, w in zip(actual, wanted, strict=True)
    )


@pytest.mark.gpu
def test_captured_in_a_graph():
    leaves, dy = checks.small("cuda", "float32", MODEL)
    gradient_checks.check_cuda_graph(
        lambda: [t.detach() for t in results(leaves, dy)], lambda: leaves[1].mul_(2.0)
    )


@pytest.mark.gpu
def test_another_precision_goes_another_way_on_a_gpu():
    leaves, dy = checks.small("cuda", "float32", MODEL)
    split = results(leaves, dy)
    torch.set_float32_matmul_precision("high")
    try:
        coarse = results(leaves, dy)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not torch.equal(split[0], coarse[0]) and same_numbers(split, results(leaves, dy))


@pytest.mark.gpu
@PAIRS
def test_holds_what_is_counted(pair):
    """Peak over what was there: gate|up and h, dy, dh and the parts of the largest product."""
    leaves, dy = checks.small("cuda", "float32", MODEL, pair)
    peak = checks.peak_over(lambda: results(leaves, dy))
    f, d, w = (4 * n for n in (1024 * 4096, 1024 * 1024, 1024 * 4096))
    # y, d_x, d_w_down and d_w_gate_up, d(gate|up), and the parts of d(gate|up) and x.
    last = 2 * d + w + 2 * w + 2 * f + (2 * f + d)
    assert abs(peak - last) <= 2**21
