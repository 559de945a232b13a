"""`rope`: in plain PyTorch, in Triton's interpreter and on a GPU."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

import gradient_checks
from called import Called, note_launches
from fusedlib import reference, rope
from fusedlib.ops.rope import kernels
from gradient_checks import Named, drawn, misses, named_results, same
from interpreter import BACKEND, INTERPRETED, passed_in_the_interpreter
from rewritten import use_broken_kernels

Shape = tuple[int, int, int, int, int]  # batch, heads of q, heads of k, tokens, head_dim
SMALL: Shape = (2, 6, 2, 19, 10)
TOKENS, HEAD_DIM = SMALL[3:]


def test_in_the_interpreter():
    assert passed_in_the_interpreter("test_rope.py") > 30


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(kernels, "PAIRS", 256)


def tables(device: str, batch: int, tokens: int, rotary: int, dtype: torch.dtype = torch.float32):
    """cos and sin (batch, tokens, rotary) of all different angles: no half is the other's copy."""
    angles = torch.arange(batch * tokens * rotary, device=device).reshape(batch, tokens, rotary)
    return (angles * 0.37).cos().to(dtype), (angles * 0.37).sin().to(dtype)


def heads(device: str, dtype: str, shape: Shape, transposed: bool = True) -> tuple[Named, Named]:
    """q and k as a projection leaves them, or contiguous, and what flows back."""
    batch, many, few, tokens, width = shape

    def one(count: int, seed: int) -> Tensor:
        x = drawn(device, getattr(torch, dtype), batch, tokens, count, width, seed=seed)
        return x.transpose(1, 2) if transposed else x.transpose(1, 2).contiguous()

    return {"q": one(many, 0), "k": one(few, 1)}, {"q_out": one(many, 2), "k_out": one(few, 3)}


def small(device: str, rotary: int = HEAD_DIM) -> tuple[Named, Named, Tensor, Tensor]:
    return *heads(device, "float32", SMALL), *tables(device, 1, TOKENS, rotary)


def turning(cos: Tensor, sin: Tensor, compute: Callable[..., tuple[Tensor, Tensor]], **more):
    def function(q: Tensor, k: Tensor) -> Named:
        own = [t.double() if q.dtype == torch.float64 else t for t in (cos, sin)]
        return dict(zip(("q_out", "k_out"), compute(q, k, *own, **more), strict=True))

    return function


def joined(cos: Tensor, sin: Tensor, **more) -> Callable[..., Tensor]:
    """Both results, one after the other, for checks of functions with one."""
    return lambda q, k: torch.cat([*rope(q, k, cos, sin, **more)], dim=1)


def joined_case(device: str) -> tuple[Callable[..., Tensor], Named, Tensor]:
    leaves, upstream, cos, sin = small(device)
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    return joined(cos, sin), leaves, torch.cat([*upstream.values()], dim=1)


def rejected(
    device: str, dtype: str, shape: Shape, rotary: int | None = None, transposed: bool = True,
    batches: int = 1, compute: Callable[..., tuple[Tensor, Tensor]] = rope,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects of both results and of both gradients."""

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rope(q, cos, sin), reference.rope(k, cos, sin)

    leaves, upstream = heads(device, dtype, shape, transposed)
    of = tables(device, batches, shape[3], rotary or shape[4], getattr(torch, dtype))
    return misses(turning(*of, compute), turning(*of, plain), leaves, upstream)


def through_wider_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `rope`: zeros that fill a head are seen, and so is what their gradient does."""
    head_dim = q.shape[-1]
    width = head_dim + 6
    turned = rope(q, k, cos, sin, width=width)
    first, last = (x[..., :head_dim] + x[..., head_dim:].sum(-1, keepdim=True) for x in turned)
    assert all(x.shape[-1] == width for x in turned)
    return first, last


# --- against float64 -----------------------------------------------------------------------------

# On a GPU Llama-1B, Llama-8B, Qwen2-0.5B, SmolLM, open_llama_3b, heads of 256, of 66 and 10.
SHAPES = (
    [SMALL, (1, 3, 3, 33, 66), (1, 8, 4, 5, 32)]
    if INTERPRETED
    else [(2, 32, 8, 517, 64), (1, 32, 8, 300, 128), (2, 14, 2, 129, 64), (3, 9, 3, 100, 64),
          (1, 32, 32, 77, 100), (1, 8, 4, 65, 256), (2, 5, 5, 33, 66), SMALL]
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_vs_float64(device, monkeypatch, shape, dtype):
    started = note_launches(monkeypatch)
    for transposed, part in ((True, 1), (False, 2)):  # all of each head, and a part of it
        rotary = shape[4] // part // 2 * 2
        assert rejected(device, dtype, shape, rotary, transposed, shape[0]) == []
    assert started == ["_rope_kernel"] * 4 or not INTERPRETED


def test_plain_pytorch_vs_float64():
    for dtype in ("float32", "bfloat16", "float16"):
        assert rejected("cpu", dtype, SMALL, 6) == []


@pytest.mark.plain
def test_heads_filled_to_a_width(device):
    for dtype, rotary, transposed in (("float32", 6, True), ("bfloat16", 10, False)):
        compute = through_wider_heads
        assert rejected(device, dtype, SMALL, rotary, transposed, compute=compute) == []


def test_bound_of_the_docstring(device):
    for dtype in ("float32", "bfloat16"):
        leaves, _ = heads(device, dtype, SMALL)
        cos, sin = tables(device, 2, TOKENS, HEAD_DIM, leaves["q"].dtype)
        for x, y in zip(leaves.values(), rope(**leaves, cos=cos, sin=sin), strict=True):
            wide = [t.double() for t in (x, cos, sin)]
            true = reference.rope(*wide)
            # Both products as magnitudes: |a c| + |b e|, and so on.
            a, b = wide[0].abs().chunk(2, -1)
            parts = wide[0].abs() * wide[1].abs()[:, None]
            parts = parts + torch.cat([b, a], -1) * wide[2].abs()[:, None]
            v = torch.finfo(x.dtype).eps / 2
            assert ((y.double() - true).abs() <= 3 * 2**-24 * parts + v * true.abs() * 1.01).all()


@pytest.mark.plain
def test_backward_turns_back(device):
    """A rotation proper: its gradient is its inverse, and lengths are kept."""
    leaves, _, cos, sin = small(device)
    half = cos[..., :5].double().acos()
    cos, sin = (torch.cat([t, t], -1).float() for t in (half.cos(), half.sin()))
    q = leaves["q"].requires_grad_()
    turned, _ = rope(q, leaves["k"], cos, sin)
    torch.testing.assert_close(grad(turned, q, turned)[0], q.detach())
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))


@pytest.mark.plain
def test_positions_choose_rows_of_the_tables(device):
    leaves, upstream, _, _ = small(device)
    cos, sin = (t[0] for t in tables(device, 1, 50, 8))
    for shape, dtype in (((19,), torch.int32), ((1, 19), torch.int64), ((2, 19), torch.int32)):
        generator = torch.Generator(device).manual_seed(4)
        at = torch.randint(50, shape, generator=generator, device=device)
        rows = at.reshape(-1, 19)
        wanted = named_results(turning(cos[rows], sin[rows], rope), leaves, upstream)
        by = turning(cos, sin, rope, positions=at.to(dtype))
        assert same(named_results(by, leaves, upstream).values(), wanted.values()), (shape, dtype)


def test_a_position_outside_the_table_gives_nan_there_alone(device, monkeypatch):
    """Of the kernel, where nobody looks at positions first: the turned elements of that token."""
    monkeypatch.setattr(kernels, "refuse_outside", lambda *_: None)
    leaves, _, _, _ = small(device)
    cos, sin = (t[0] for t in tables(device, 1, 50, 8))
    at = torch.arange(19, device=device)
    at[[3, 5, 7]] = torch.tensor([50, -1, 2**40], device=device)
    expected = torch.zeros(19, 10, dtype=torch.bool, device=device)
    expected[[3, 5, 7], :8] = True
    for turned in rope(**leaves, cos=cos, sin=sin, positions=at):
        assert torch.equal(turned.isnan(), expected.expand_as(turned))


def test_compiled_in_one_graph(device):
    torch._dynamo.reset()
    compiled = torch.compile(rope, fullgraph=True, backend=BACKEND)
    dtype = "float32" if INTERPRETED else "bfloat16"
    assert rejected(device, dtype, SMALL, 6, compute=compiled) == []


# What stands in the kernels' file, and what shall.
BROKEN = {
    "backward turns on": ("        e, f = -f, -e\n", "        e, f = e, f\n"),
    "backward with the other half's sine": ("e, f = -f, -e", "e, f = -e, -f"),
    "other half's cosine": ("b * d + a * f", "b * c + a * f"),
    "turned the other way": ("a * c - b * e", "a * c + b * e"),
    "rest of the head left out": ("    if REST + ZEROS:", "    if False:"),
    "zeros left out": ("(j < REST + ZEROS)", "(j < REST)"),
    "the next head's instead of zeros": ("present & (j < REST), other", "present, other"),
    "last token left out": ("(token < tokens)[:, None]", "(token < tokens - 1)[:, None]"),
    "first token's angles for all": ("batch * table_batch + token * table_row",
                                     "batch * table_batch + token * 0"),
    "first sequence's angles for all": ("batch * table_batch + token", "token"),
    "k's first head for all": ("batch, head - heads, token", "batch, head * 0, token"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_rejected(device, monkeypatch, tmp_path, fault):
    use_broken_kernels(monkeypatch, tmp_path, kernels, BROKEN[fault])
    case = (SMALL, 6) if INTERPRETED else ((2, 6, 2, 300, 20), 12)
    wider = rejected(device, "float32", *case, batches=2, compute=through_wider_heads)
    assert wider and ("zeros" in fault or rejected(device, "float32", *case, batches=2))


# --- layouts and autograd ------------------------------------------------------------------------


@pytest.mark.plain
def test_any_strides_and_empty(device):
    leaves, upstream, cos, sin = small(device, 6)
    wanted = named_results(turning(cos, sin, rope), leaves, upstream)
    batch, many, few, tokens, width = SMALL
    packed = torch.cat([t.transpose(1, 2).flatten(2) for t in leaves.values()], dim=-1)
    views = packed.split([many * width, few * width], dim=-1)
    ways = {
        "heads first": {n: t.contiguous() for n, t in leaves.items()},
        "packed": {n: t.view(batch, tokens, -1, width).transpose(1, 2)
                   for n, t in zip(leaves, views, strict=True)},
        "every other": {n: t.repeat_interleave(2, -1)[..., ::2] for n, t in leaves.items()},
    }  # fmt: skip
    for how, own in ways.items():
        actual = named_results(turning(cos, sin, rope), own, upstream)
        assert same(actual.values(), wanted.values()), how
    across = cos.mT.contiguous().mT.expand(2, -1, -1), sin.expand(2, -1, -1)
    actual = named_results(turning(*across, rope), leaves, upstream)
    assert same(actual.values(), wanted.values())
    for empty in ((0, 6, 2, 19, 10), (2, 6, 2, 0, 10)):
        own, _ = heads(device, "float32", empty)
        q = own["q"].requires_grad_()
        turned, _ = rope(q, own["k"], *tables(device, 1, empty[3], 6))
        assert turned.shape == q.shape == grad(turned.sum(), q)[0].shape


def test_results_lie_as_q_does(device):
    """Also in a projection of q, k and v together: attention's own order."""
    packed = torch.randn(2, 19, 10, 10, device=device)
    q, k = packed[:, :, :6].transpose(1, 2), packed[:, :, 6:8].transpose(1, 2)
    for turned in rope(q, k, *tables(device, 1, 19, 10)):
        assert turned.transpose(1, 2).is_contiguous()


@pytest.mark.plain
def test_frozen_and_repeated(device):
    """Frozen q or k, one output alone, backward twice, checkpointing, inputs left as they were."""
    leaves, upstream, cos, sin = small(device)
    wanted = named_results(turning(cos, sin, rope), leaves, upstream)
    for chosen in product((False, True), repeat=2):
        own = [t.detach().clone().requires_grad_(c) for t, c in zip(leaves.values(), chosen)]  # noqa: B905
        turned = rope(*own, cos, sin)
        assert same(turned, [wanted["q_out"], wanted["k_out"]]) and same(own, leaves.values())
        for leaf, out, dy, true in zip(own, turned, upstream.values(), ("d_q", "d_k"), strict=True):
            assert out.requires_grad == leaf.requires_grad
            if leaf.requires_grad:
                for _ in range(2):
                    assert same(grad(out, leaf, dy, retain_graph=True), [wanted[true]])
    gradient_checks.check_checkpointed(*joined_case(device))


@pytest.mark.plain
def test_functional_transforms(device):
    """Plain PyTorch runs."""
    gradient_checks.check_transforms(*joined_case(device), by_row=False)


@pytest.mark.interpreter
def test_gradients_are_of_what_forward_read(device):
    """Tables and positions may be overwritten afterwards, too."""
    (cos, sin), at = tables(device, 1, TOKENS, HEAD_DIM), torch.arange(TOKENS).flip(0)
    _, leaves, upstream = joined_case(device)
    for others in ((cos, sin), (cos[0], sin[0], at)):

        def turned(q, k, others=others):
            return joined(*others[:2], positions=others[2] if others[2:] else None)(q, k)

        gradient_checks.check_what_forward_read(turned, leaves, upstream, others)


@pytest.mark.interpreter
def test_tables_alone_are_kept_for_backward(device):
    leaves, _, cos, sin = small(device)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rope(*(t.requires_grad_() for t in leaves.values()), cos, sin)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]


@pytest.mark.interpreter
def test_watched_calls_go_by_the_registered_operators(device):
    compute, leaves, upstream = joined_case(device)
    wanted = gradient_checks.results_of(compute, leaves, upstream)
    with Called() as called:
        actual = gradient_checks.results_of(compute, leaves, upstream)
    assert called.names.count("rope_forward") == called.names.count("rope_backward") == 1
    assert same(actual, wanted)


@pytest.mark.interpreter
def test_a_second_derivative_raises(device):
    leaves, _, cos, sin = small(device)
    q = leaves["q"].requires_grad_()
    turned = rope(q, leaves["k"], cos, sin)[0]
    dq = torch.ones_like(turned).requires_grad_()
    [d_q] = grad(turned, q, dq, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(d_q.sum(), dq, retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (d_q * q).sum().backward()
    gradient_checks.refuses_transforms_of_backward(rope(q, leaves["k"], cos, sin)[0], q)


def test_derivatives_of_both_orders_in_float64():
    q, k = (torch.randn(2, h, 3, 6, dtype=torch.float64, requires_grad=True) for h in (2, 1))
    operands = q, k, *(t.requires_grad_() for t in tables("cpu", 1, 3, 4, torch.float64))
    assert gradcheck(rope, operands) and gradgradcheck(rope, operands)


@pytest.mark.interpreter
def test_opcheck(device):
    leaves, upstream, cos, sin = small(device, 6)
    operands = [t.requires_grad_() for t in leaves.values()]
    torch.library.opcheck(kernels.rope_operator, (*operands, cos, sin, None, None))
    at = torch.arange(TOKENS)
    torch.library.opcheck(kernels.rope_operator, (*operands, cos[0], sin[0], at, HEAD_DIM + 2))
    dq, dk = upstream.values()
    for given in ((dq, dk), (None, dk), (dq, None)):
        torch.library.opcheck(kernels._backward, (*given, cos, sin, None, HEAD_DIM))


# --- what is refused -----------------------------------------------------------------------------

Q, COS, AT = torch.zeros(2, 4, 3, 8), torch.zeros(1, 3, 8), torch.zeros(3, dtype=torch.int64)
SPARSE, NESTED = Q.to_sparse(), torch.nested.nested_tensor([Q[0], Q[0, :2]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rope(Q[0], Q, COS, COS), r"q must be \(batch, heads, tokens, head_dim\), got"),
        (lambda: rope(Q, Q[:, :, :2], COS, COS), r"k must be \(2, heads, 3, 8\), got \(2, 4, 2, 8"),
        (lambda: rope(Q, Q.half(), COS, COS), "k must be torch.float32 as q, got torch.float16"),
        (lambda: rope(Q, Q, COS, COS[:, :2]), r"sin must be \(1, 3, 8\) as cos, got \(1, 2, 8\)"),
        (lambda: rope(Q, Q, *2 * [COS[..., :3]]), r"an even width of at most 8.*\(1, 3, 3\)"),
        (lambda: rope(Q, Q, *2 * [torch.zeros(1, 3, 10)]), r"at most 8.*\(1, 3, 10\)"),
        (lambda: rope(Q, Q, *2 * [torch.zeros(3, 3, 8)]), r"cos must be \(2 or 1, 3, rotary_dim\)"),
        (lambda: rope(Q, Q, COS[0], COS[0]), r"\(2 or 1, 3, rotary_dim\).*got \(3, 8\)"),
        (lambda: rope(Q, Q, COS.to("meta"), COS), "cos is on meta, q on cpu"),
        (lambda: rope(Q, Q, COS, COS, positions=AT), r"with positions cos must be \(length"),
        (lambda: rope(Q, Q, COS[0], COS[0], positions=AT[:2]), r"positions must be.*got \(2,\)"),
        (lambda: rope(Q, Q, COS[0], COS[0], positions=AT.float()), "int32 or int64, got torch.fl"),
        (lambda: rope(Q, Q, COS, COS, width=4), "width must be at least head_dim, 8, got 4"),
        (lambda: rope(Q, Q, COS, COS, width="16"), "width must be a whole number .* got '16'"),
        (lambda: rope(Q, Q, COS, COS, width=True), "width must be a whole number .* got True"),
        (lambda: rope(Q, SPARSE, COS, COS), "k must be a dense tensor .*, got one of layout .*coo"),
        (lambda: rope(NESTED, Q, COS, COS), "q must be a dense tensor with strides, got a nested"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.plain
def test_a_position_outside_the_table_is_named_on_a_cpu(device):
    if device == "cuda":
        pytest.skip("gives NaN, and nobody waits for the device")
    for wrong in (3, -1):
        with pytest.raises(IndexError, match=f"position {wrong} is .* cos and sin of 3 rows"):
            rope(Q, Q, COS[0], COS[0], positions=AT.int() + wrong)


# --- sizes past those of 32 bits -----------------------------------------------------------------


@pytest.mark.interpreter
def test_heads_far_apart(device):
    """More than 2³¹ elements, of which no more than a few are ever touched."""
    leaves, _ = heads(device, "float16", (1, 4, 4, 3, 8))
    memory = torch.empty(3 * 2**30 + 24, dtype=torch.float16)
    far = memory.as_strided((1, 4, 3, 8), (1, 2**30, 8, 1))
    q, k = far.copy_(leaves["q"]), leaves["k"]
    cos, sin = tables(device, 1, 3, 8, torch.float16)
    assert same(rope(q, k, cos, sin), rope(**leaves, cos=cos, sin=sin))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    q = torch.ones(1, 2**17 + 1, 128, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    cos, sin = tables("cuda", 1, q.shape[2], 128, torch.bfloat16)
    turned, _ = rope(q, q[:, :1], cos, sin)
    wanted, _ = rope(q[:, -1:, -9:], q[:, :1, -9:], cos[:, -9:], sin[:, -9:])
    assert torch.equal(turned[:, -1:, -9:], wanted)


@pytest.mark.gpu
def test_a_cuda_graph_replays_what_a_call_gives_bit_by_bit():
    leaves, upstream = heads("cuda", "bfloat16", (2, 32, 8, 2048, 64))
    own = [t.requires_grad_() for t in leaves.values()]
    cos, sin = (t[0] for t in tables("cuda", 1, 4096, 64, torch.bfloat16))
    at = torch.arange(2048, device="cuda")

    def step():
        turned = rope(*own, cos, sin, positions=at)
        return *turned, *grad(turned, own, tuple(upstream.values()))

    gradient_checks.check_cuda_graph(step, lambda: at.add_(7))
