"""The split products on a GPU."""

import pytest
import split_checks as checks
import torch
from rewritten import rewritten

import fusedlib
from fusedlib.kernels import launch, split_exact, split_product

split_hopper, split_thirds = split_product.split_hopper, split_exact.split_thirds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
TURNS = [(False, False), (False, True), (True, False), (True, True)]
# More than 2²² results, fewer than which are torch's: ragged, and of several tiles each way.
SHAPES = [(2050, 300, 2054), (1500, 4100, 2900)]


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """Gives a module another instead of the one it uses, a few characters of whose text differ."""

    def put(user, module, right, wrong, times=1):
        copy = rewritten(monkeypatch, tmp_path, module, right, wrong, times)
        monkeypatch.setattr(user, module.__name__.rpartition(".")[2], copy)
        monkeypatch.setattr(launch, "_LAUNCHES", {})  # they hold the module's kernels

    return put


@pytest.mark.parametrize("turned", TURNS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", checks.FAMILIES)
def test_product_vs_ieee_fp32(name, shape, turned):
    checks.check_family(name, "cuda", shape, turned)


@pytest.mark.parametrize("shape", [checks.SHAPE, (1, 256, 1), (129, 385, 2)])
def test_few_results_vs_ieee_fp32(shape):
    """cuBLAS shares such sums among programs and errs less: the library leaves them to it."""
    a, b = (t.cuda() for t in checks.drawn(shape))
    assert not split_product.split_pays(shape[0], shape[2], shape[1])
    assert checks.misses(checks.product(a, b), a, b, 4.0) == []


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_not_finite_in_the_same_places(value):
    checks.check_not_finite("cuda", value, SHAPES[0])


@pytest.mark.parametrize("turned", TURNS)
@pytest.mark.parametrize("shape", [(2050, 8300, 2054), (4100, 8300, 4104)])
def test_long_sums_vs_ieee_fp32(shape, turned):
    """Of two spans, and of so many results that they are not cut into spans."""
    checks.check_family("normal", "cuda", shape, turned)


# Sums that cuBLAS shares among programs, so that they are short: (m, k, n), A stored (m, k).
SHARED = [(2048, 10240, 2560), (1024, 20480, 4096), (2048, 20480, 2560), (2048, 14336, 6400)]


@pytest.mark.parametrize("shape", SHARED)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("turned", [(False, True), (False, False)])
def test_the_largest_element_where_torch_shares_sums(shape, trained, turned):
    """y and d_x of h as a trained MLP has it; torch in two products as well, as gate and up are."""
    a, b = (t.cuda() for t in checks.drawn(shape))
    if trained:
        a = torch.nn.functional.silu(3 * a) * torch.randn_like(a)
    stored = b.mT.contiguous() if turned[1] else b
    as_stored = (lambda t: t.mT) if turned[1] else (lambda t: t)
    halves = [t.contiguous() for t in a.chunk(2, 1)], b.chunk(2)
    apart = torch.cat([a @ as_stored(t) for t in stored.chunk(2, 0 if turned[1] else 1)], 1)
    added = halves[0][0] @ halves[1][0] + halves[0][1] @ halves[1][1]
    _, own = checks.errors(checks.product(a, b, *turned), a, b)
    its = {
        name: checks.errors(c, a, b)[1]
        for name, c in (("whole", a @ as_stored(stored)), ("apart", apart), ("added", added))
    }
    assert own <= min(its.values()), (own, its)


RULES = {
    "rows of one element": ("LEAST_OF_ROW", 0, SHAPES[1]),
    "six of seven zero": ("LEAST_HEARD", 2**20, SHAPES[1]),
}


@pytest.mark.parametrize("name", RULES)
def test_without_a_rule_of_terms_the_parts_err_more(monkeypatch, name):
    rule, value, shape = RULES[name]
    make, _ = checks.FAMILIES[name]
    a, b = (t.cuda() for t in make(*checks.drawn(shape)))
    assert not checks.by_parts(a, b).all() and checks.misses(checks.product(a, b), a, b) == []
    monkeypatch.setattr(split_exact, rule, value)
    monkeypatch.setattr(launch, "_LAUNCHES", {})
    assert (checks.paths(a, b) != checks.EXACT).all()
    assert checks.misses(checks.product(a, b), a, b) != []


def test_terms_far_below_the_largest_are_not_counted(broken):
    family, shape = "one term a row heard", SHAPES[1]
    checks.check_family(family, "cuda", shape)
    broken(split_product, split_exact, "largest[:, None] - 13", "largest[:, None] - 99")
    with pytest.raises(AssertionError):
        checks.check_family(family, "cuda", shape)


POSITIVE = {
    "uniform": torch.rand_like,
    "magnitudes": torch.abs,
    "half of them zero": torch.relu,
    "of mean and deviation 1": lambda t: t + 1,
    "lognormal": torch.exp,
    "by weight": torch.nn.functional.gelu,
    "bf16": lambda t: t.abs().bfloat16().float(),
    "integers": lambda t: (8 * t).round().abs(),
}


@pytest.mark.parametrize("shape", [(4096, 256, 4096), (2050, 2048, 2054), (2048, 10240, 2560)])
@pytest.mark.parametrize("name", POSITIVE)
def test_sums_of_one_sign_vs_ieee_fp32(name, shape):
    """Where truncation and roundings add up; cuBLAS shares the longer ones."""
    a, b = (t.cuda() for t in checks.drawn(shape))
    a, b = POSITIVE[name](a), b.abs()
    missed = checks.misses(checks.product(a, b, False, True), a, b)
    assert not checks.by_parts(a, b).any() and not missed, missed


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_that_fp32_holds_are_exact(shape):
    a, b = (t.cuda() for t in checks.drawn(shape))
    for left, right in (
        (torch.ones_like(a), torch.ones_like(b)),
        ((8 * a).round(), (8 * b).round()),
    ):
        assert torch.equal(checks.product(left, right).double(), left.double() @ right.double())


def test_without_the_rule_of_one_sign_the_parts_err_more(broken):
    """And thirds, where few terms make most of a sum."""
    peaked = checks.FAMILIES["positive and peaked"][0]
    a, b = (t.cuda() for t in peaked(*checks.drawn((2050, 2048, 2054))))
    assert (checks.paths(a, b) == checks.EXACT).all()
    assert checks.misses(checks.product(a, b), a, b) == []
    every = "signs = tl.max(signs, axis=1)"
    for right, wrong in (("few = signs > ONE_SIGN", "few = signs < 0"), (every, every + " & 0")):
        broken(split_product, split_exact, right, wrong)
        assert checks.misses(checks.product(a, b), a, b) != [], wrong


CHECKS = (
    checks.check_strides, checks.check_empty, checks.check_edge, checks.check_beyond_edge,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_holds(check):
    check("cuda")


# --- thirds --------------------------------------------------------------------------------------

BEYOND = ((1500, 4100, 2900), (2048, 1024, 2176))


def beyond(shape):
    """Factors of which every tile wants thirds."""
    make, _ = checks.FAMILIES["every other row 2^-34 of the others"]
    a, b = (t.cuda() for t in make(*checks.drawn(shape)))
    assert (checks.paths(a, b) == checks.THIRDS).all()
    return a, b


@pytest.mark.parametrize("turned", TURNS)
@pytest.mark.parametrize("shape", BEYOND)
def test_thirds_vs_ieee_fp32(shape, turned):
    """Half of torch's error, and not the exact path's, which errs by one rounding."""
    a, b = beyond(shape)
    found = checks.product(a, b, *turned)
    own, its = checks.errors(found, a, b), checks.errors(a @ b, a, b)
    assert own[0] < 0.6 * its[0] and own[1] < its[1], (own, its)
    if HOPPER:
        assert not torch.equal(found, (a.double() @ b.double()).float())


def test_one_tile_in_thirds_changes_no_other():
    """Beside tiles by parts and tiles on the exact path, at places that programs come to late."""
    a, b = (t.cuda() for t in checks.drawn((2304, 300, 4096)))
    usual = checks.product(a, b)
    a[1024:1152] *= torch.where(torch.arange(128, device="cuda") % 2 == 0, 1.0, 2.0**-34)[:, None]
    b[:, 2944:3072] *= 1e-20
    taken, found = checks.paths(a, b), checks.product(a, b)
    assert set(taken[8].tolist()) == {checks.THIRDS, checks.EXACT}
    assert (taken[:, 23] == checks.EXACT).all()
    assert checks.misses(found, a, b) == []
    same = (taken == checks.PARTS).repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(found[same], usual[same]) and (taken == checks.PARTS).sum() == 17 * 31


WRONG = {
    "the last third left out": ("store((block - second.to(gl.float32))", "store((block * 0.0)"),
    "the middle third of B twice": ("b_ring, stage * 3 + 2", "b_ring, stage * 3 + 1"),
    "the first tile's factor": ("start // TILE * a_step", "0 * a_step"),
    "the first tile's unit": ("start // TILE * step", "0 * step"),
    "a K block dropped": ("_cut(block, power, ring, stage)\n",
                          "_cut(block * (start < last).to(gl.float32), power, ring, stage)\n"),
    "the first of its tiles only": ("(flags + tile) != 0:",
                                    "(flags + tile) * (tile < gl.num_programs(0)) != 0:", 2),
    "the last span alone": ("_join(c, acc, begin, ", "_join(c, acc, begin * 0, "),
    "first flags looked at": ("first + which < count", "first + which < gl.num_programs(0)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_broken_thirds_are_rejected(broken, fault):
    if not HOPPER:
        pytest.skip("thirds are Hopper's")
    if fault == "first flags looked at":  # 544 tiles, of which the last row's alone want thirds
        a, b = (t.cuda() for t in checks.drawn((4352, 300, 2048)))
        a[-128::2] *= 2.0**-34
    else:
        a, b = beyond(BEYOND[0])
        if "factor" in fault or "unit" in fault:
            a[:, 128:] *= 2.0**-10  # still heard
            assert (checks.paths(a, b) != checks.PARTS).all()
    assert checks.misses(checks.product(a, b), a, b) == []
    broken(split_exact, split_thirds, *WRONG[fault])
    assert checks.misses(checks.product(a, b), a, b) != []


WRONG_PARTS = {
    "the last span alone": ("inside & (begin > 0)", "inside & (begin < 0)"),
    "factors of the first span": ("(a_words + start //", "(a_words + (start - begin) //"),
    "the last rows not stored": ("(i < m)[:, None]", "(i < m - 1)[:, None]"),
    "the right half on the left": ("row, column + half, m", "row, column, m"),
    "the low part of B left out": ("warpgroup_mma(ah, bl, zeros", "warpgroup_mma(al, bl, zeros"),
    "the first tile's factor": ("start // TILE * a_step", "0 * a_step"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_PARTS)
def test_broken_parts_are_rejected(broken, fault):
    if not HOPPER:
        pytest.skip("this kernel is Hopper's")
    a, b = (t.cuda() for t in checks.drawn((1500, 8300, 2900)))
    a *= torch.exp2(-(torch.arange(8300, device="cuda") // 128 % 5).float())  # of a tile's factor
    assert checks.by_parts(a, b).all()
    assert checks.misses(checks.product(a, b), a, b) == []
    broken(split_product, split_hopper, *WRONG_PARTS[fault])
    torch.full((len(a), b.shape[1]), 7.0, device="cuda")  # what is not stored is not right by luck
    assert checks.misses(checks.product(a, b), a, b) != []


def test_what_is_cut_off_is_made_good(broken):
    """Of sums that are mostly of one sign."""
    if not HOPPER:
        pytest.skip("this kernel is Hopper's")
    a, b = (t.cuda() + 0.2 for t in checks.drawn((2050, 2048, 2054)))
    assert checks.by_parts(a, b).all()
    true = a.double() @ b.double()

    def short() -> float:
        lost = (true - checks.product(a, b).double()) * true.sign()
        return (lost.sum() / true.abs().sum()).item()

    assert abs(short()) < 0.6e-7
    broken(split_product, split_hopper, " | (of_a & of_b) >> 22 & 1", "")
    assert short() > 0.6e-7


@pytest.mark.parametrize("shape", [(1024, 1040, 1032), (1024, 1024, 2048)])
def test_mlp_and_gradients_vs_ieee_fp32(shape):
    found, usual = checks.mlp_errors("cuda", shape)
    assert all(found[name] <= usual[name] for name in usual), (found, usual)


@pytest.mark.parametrize("save", ["gate_up", "input"])
def test_the_public_function_vs_ieee_fp32(save):
    """Twice, the second time with kept launches."""
    for _ in range(2):
        found, usual = checks.public_errors("cuda", (2048, 2048, 2048), fusedlib.swiglu_mlp, save)
        assert all(found[name] < 0.6 * usual[name] for name in usual), (found, usual)


def test_other_streams_and_threads_find_the_same():
    a, b = (t.cuda() for t in checks.drawn(SHAPES[0]))
    wanted = checks.product(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [checks.product(a, b) for _ in range(3)]
    stream.synchronize()
    assert all(torch.equal(f, wanted) for f in found)


def test_captured_in_a_graph():
    """Replayed over other values, ones that take the other path among them."""
    a, b = (t.cuda() for t in checks.drawn(SHAPES[0]))
    checks.product(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = checks.product(a, b)
    for name in ("normal", "every other row 2^-34 of the others", "outlier channels"):
        make, _ = checks.FAMILIES[name]
        for ours, drawn in zip((a, b), make(*checks.drawn(SHAPES[0], 7)), strict=True):
            ours.copy_(drawn)
        graph.replay()
        assert checks.misses(c, a, b) == []


def test_more_than_2_to_the_31_elements():
    """Rows past 2³¹ elements of a factor and of the result, against torch's own."""
    m, k, n = 2**22 + 130, 520, 520  # 2.2e9 elements each
    a = torch.randn(256, k, device="cuda").repeat(m // 256 + 1, 1)[:m]
    b = torch.randn(k, n, device="cuda")
    c = checks.product(a, b)
    for rows in (slice(0, 256), slice(m - 200, m)):
        assert checks.misses(c[rows].clone(), a[rows], b, 1.5) == []
