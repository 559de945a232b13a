"""Which code runs a call: the table of `fusedlib.ops.mlp.route`, on cards that are played."""

from types import SimpleNamespace

import pytest
import torch

from fusedlib.launch import device
from fusedlib.ops.mlp import configs as swiglu_configs
from fusedlib.ops.mlp import plan_cache, route
from fusedlib.ops.mlp.function import path_of
from fusedlib.ops.mlp.route import TILED, UNFUSED, WARP_SPECIALIZED, MLPProblem
from fusedlib.ops.norm import function as norm

CARD = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch):
    """`card(architecture)` plays one with 132 multiprocessors."""
    pytest.importorskip("triton")

    def play(architecture):
        properties = SimpleNamespace(multi_processor_count=132)
        for module in (route, swiglu_configs):
            monkeypatch.setattr(module, "architecture", lambda _: architecture)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    functions = route.max_unfused_tokens, route.length_class_ends
    for each in functions:
        each.cache_clear()
    yield play
    for each in functions:
        each.cache_clear()


def way(tokens, hidden, inner, dtype=torch.bfloat16, precision="ieee"):
    return route.choose_route(MLPProblem(CARD, dtype, precision, tokens, hidden, inner))


@pytest.mark.parametrize(
    ("shape", "path", "forward", "backward"),
    [
        ((64, 8192, 8192), "few tokens", TILED, TILED),
        ((64, 8192, 8200), "fused by tiles", TILED, TILED),
        ((128, 8192, 8192), "fused by tiles", TILED, TILED),
        ((256, 8192, 8192), "dh apart", TILED, UNFUSED),
        ((256, 8200, 8192), "apart", UNFUSED, UNFUSED),
        ((192, 2048, 5632), "fused by tiles", TILED, TILED),
        ((384, 2048, 5632), "dh apart", TILED, UNFUSED),
        ((385, 2048, 5632), "dh apart", WARP_SPECIALIZED, UNFUSED),
        ((768, 2048, 5632), "dh apart", WARP_SPECIALIZED, UNFUSED),
        ((769, 2048, 5632), "fused by roles", WARP_SPECIALIZED, WARP_SPECIALIZED),
        ((768, 2050, 5632), "dh apart", TILED, UNFUSED),
        ((8192, 4096, 14336), "fused by roles", WARP_SPECIALIZED, WARP_SPECIALIZED),
        ((8192, 4096, 14340), "fused by tiles", TILED, TILED),
        ((65, 64, 20000), "dh apart", WARP_SPECIALIZED, UNFUSED),  # more columns than programs
        ((0, 64, 64), "fp32", UNFUSED, UNFUSED),
        ((65, 0, 64), "fp32", UNFUSED, UNFUSED),
        ((65, 64, 0), "fp32", UNFUSED, UNFUSED),
    ],
    ids=str,
)
def test_on_hopper(card, shape, path, forward, backward):
    card(90)
    found = way(*shape)
    assert found[:3] == (path, forward, backward) and found.few >= (path == "few tokens")


@pytest.mark.parametrize(
    ("shape", "few"),
    [
        ((256, 512, 2048), True),
        ((257, 512, 2048), False),
        ((128, 1024, 4096), True),
        ((129, 1024, 4096), False),
        ((65, 1040, 4096), False),
        ((65, 1024, 4090), False),
    ],
)
def test_one_launch_gives_all_gradients_on_hopper(card, shape, few):
    card(90)
    assert way(*shape).few == few
    card(100)
    assert not way(*shape).few


def test_few_tokens_without_a_down_projection(card):
    card(90)
    problem = MLPProblem(CARD, torch.bfloat16, "ieee", 64, 512, 512, down=False)
    assert route.choose_route(problem) == ("fused by tiles", TILED, TILED, False, False)


@pytest.mark.parametrize("architecture", [80, 89, 100])
def test_on_other_cards(card, architecture):
    card(architecture)
    assert way(64, 512, 512).path == "few tokens"
    for shape in ((65, 512, 512), (256, 8192, 8192), (8192, 4096, 14336), (256, 8192, 8190)):
        assert way(*shape) == ("fused by tiles", TILED, TILED, False, False)


@pytest.mark.parametrize("architecture", [80, 90])
def test_fp32_is_apart(card, architecture):
    card(architecture)
    for shape, precision, path in (
        ((1024, 4096, 4096), "ieee", "split fp32"),
        ((1024, 4096, 4096), "tf32", "fp32"),
        ((64, 512, 512), "ieee", "fp32"),
    ):
        found = way(*shape, torch.float32, precision)
        assert found == (path, UNFUSED, UNFUSED, False, path == "split fp32")


def test_lengths_of_one_class_go_one_way(card):
    """Half precision at 2048·5632, and fp32, at every bound of a class and one beyond."""
    card(90)
    for hidden, inner in ((2048, 5632), (512, 2048), (1024, 4096), (512, 512), (4096, 14336)):
        bounds = route.length_class_ends(CARD, hidden, inner)
        assert bounds[:2] == (0, 64)
        for least, most in zip(bounds, (*bounds[1:], 20_000), strict=True):
            lengths = range(least + 1, most + 1)
            assert len({way(tokens, hidden, inner) for tokens in lengths}) == 1
            for direction in ("forward", "backward"):
                if least >= 64:
                    tiles = {
                        swiglu_configs.choose_config(direction, CARD, tokens, hidden, inner)
                        for tokens in lengths
                    }
                    assert len(tiles) == 1
    assert route.length_class_ends(CARD, 2048, 5632) == (0, 64, 128, 192, 384, 768)
    assert route.length_class_ends(CARD, 64, 0)[:2] == (0, 64)  # no columns at all


def test_without_kernels_it_is_plain_pytorch():
    x, w_gate_up, w_down = torch.zeros(3, 16), torch.zeros(32, 16), torch.zeros(16, 16)
    assert not route.runs_kernels(x, w_gate_up)
    for weights in (w_gate_up, (w_gate_up[:16], w_gate_up[16:])):
        assert path_of(x, weights, w_down) == path_of(x, weights) == "plain PyTorch"


def test_a_plan_is_of_a_packed_weight_or_of_a_pair(monkeypatch):
    """Whose shapes, dtypes and devices are all looked at: a plan that is known checks nothing."""
    monkeypatch.setattr(plan_cache, "_PLANS", {})
    monkeypatch.setattr(route, "FUSED_KERNEL_DTYPES", (torch.float32,))
    monkeypatch.setattr(plan_cache, "make_plan", lambda problem: problem)
    x, packed, w_down = torch.zeros(3, 16), torch.zeros(32, 16), torch.zeros(16, 16)
    pair = packed[:16], packed[16:]
    whole, apart = (
        plan_cache.plan_for(x, packed, None, w_down),
        plan_cache.plan_for(x, *pair, w_down),
    )
    assert (whole.pair, apart.pair) == (False, True) and whole.sizes == apart.sizes == (3, 16, 16)
    assert plan_cache.lookup_plan(x, packed, None, w_down) is whole
    assert plan_cache.lookup_plan(x, *pair, w_down) is apart
    for other in (pair[1][:8], pair[1][:, :8], pair[1].half(), pair[1].to("meta"), packed):
        assert plan_cache.lookup_plan(x, pair[0], other, w_down) is None
    assert (
        plan_cache.lookup_plan(x, packed, packed, w_down)
        is plan_cache.lookup_plan(x, pair[0], None, w_down)
        is None
    )


@pytest.mark.parametrize(("most", "kernels"), [(64, False), (1 << 16, True)])
def test_an_export_keeps_the_number_of_tokens_of_fp32_open(monkeypatch, most, kernels):
    """No guard on what an open number is: its bounds alone decide."""
    monkeypatch.setattr(device, "_find_kernels", lambda _: True)
    weights = [torch.empty(4096, 4096, device="meta")] * 2
    seen = []

    class Module(torch.nn.Module):
        def forward(self, x):
            looks = SimpleNamespace(
                dtype=x.dtype, is_cuda=True, device=CARD, numel=lambda: x.shape[0] * 4096
            )
            seen.append(route._is_large_fp32(looks, *weights))
            return x * 2

    tokens = torch.export.Dim("tokens", min=2, max=most)
    torch.export.export(Module(), (torch.zeros(9, 8),), dynamic_shapes=({0: tokens},), strict=False)
    assert seen == [kernels]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("cast", "weighted"), [("hf", True), ("litgpt", True), ("hf", False)])
def test_a_small_norm_by_torch_has_the_casts_of_the_formula(dtype, cast, weighted):
    """y rounds as often as asked, and its gradients are those of `torch.rms_norm`."""
    x, dy = torch.randn(2, 5, 48, dtype=dtype, requires_grad=True), torch.randn(2, 5, 48).to(dtype)
    weight = (1 + torch.rand(48)).to(dtype).requires_grad_() if weighted else None
    leaves = [x] if weight is None else [x, weight]
    y = norm._by_torch(x, weight, 1e-6, cast)
    wanted = norm._plain(x, weight, 1e-6, None, cast)
    assert (y != wanted).float().mean() < (2e-3 if dtype == torch.bfloat16 else 0.5)
    torch.testing.assert_close(y, wanted)
    plain = torch.rms_norm(x, (48,), weight, 1e-6)
    for ours, of_torch in zip(
        *(torch.autograd.grad(t, leaves, dy) for t in (y, plain)), strict=True
    ):
        assert torch.equal(ours, of_torch)
    with torch.no_grad():
        assert torch.equal(norm._by_torch(x, weight, 1e-6, cast), y)


class OnGpu(SimpleNamespace):
    """What the route of a norm reads of a tensor on a GPU."""

    is_cuda = True

    def numel(self):
        return self.shape[0] * self.shape[1]


def test_which_norms_torch_takes(monkeypatch):
    monkeypatch.setattr(norm, "PLAIN_TYPES", (OnGpu,))
    monkeypatch.setattr(norm, "is_capturing", lambda: False)

    def takes(rows=2048, width=1024, dtype=torch.bfloat16, device=0, eps=1e-6, cast="hf"):
        x = OnGpu(shape=(rows, width), dtype=dtype, device=device)
        return norm._suits_torch(x, OnGpu(dtype=torch.bfloat16, device=0), eps, cast)

    assert takes() and takes(cast="litgpt") and takes(1, 8192)
    for other in (
        {"rows": 2049, "width": 8}, {"width": 1040}, {"rows": 1, "width": 8200}, {"rows": 0},
        {"dtype": torch.float64}, {"dtype": torch.float32}, {"device": 1}, {"eps": 0}, {"cast": ""},
    ):  # fmt: skip
        assert not takes(**other), other
    with torch.autocast("cpu"):
        assert not takes()
    monkeypatch.setattr(norm, "is_capturing", lambda: True)
    assert not takes()


def test_what_torch_refuses_of_a_small_norm_is_refused_in_our_words(monkeypatch):
    monkeypatch.setattr(norm, "_suits_torch", lambda *_: True)
    x = torch.zeros(3, 8)
    for wrong, words in (
        ((x, torch.zeros(7)), r"weight must be \(8,\).*got \(7,\)"),
        ((x[0, 0], None), r"x must be \(..., width\).*got \(\)"),
    ):
        with pytest.raises(ValueError, match=words):
            norm.rms_norm(*wrong)
