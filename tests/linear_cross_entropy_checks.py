"""What must hold of `linear_cross_entropy` in plain PyTorch, Triton's interpreter and on a GPU."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn.functional import cross_entropy, linear

import gradient_checks
from fusedlib import linear_cross_entropy, linear_cross_entropy_and_accuracy, reference
from fusedlib.bench import check
from gradient_checks import close, results_of, same, worse

SHAPE = TOKENS, WIDTH, VOCABULARY = 13, 8, 201  # a row is several of the interpreter's blocks
ALL = {"bias": True, "label_smoothing": 0.1, "z_loss": 1e-2, "token_weights": True,
       "class_weights": True, "softcap": 2.0}  # fmt: skip
# Bytes with which TOKENS have chunks of five; what fp32 sums of d_W take is 4·VOCABULARY·WIDTH.
CHUNKS_OF_FIVE = {"float32": 5 * 224 * 4, "bfloat16": 6432, "float16": 6432}
SETTINGS = {
    "plain": {},
    "bias": {"bias": True},
    "sum": {"reduction": "sum"},
    "smoothed": {"label_smoothing": 0.3},
    "only smoothing": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 1e-2},
    "weighted": {"token_weights": True},
    "a class ignored": {"ignore_index": 7},
    "softcapped": {"softcap": 2.0},
    "by class": {"class_weights": True},
    "by class, smoothed, z-loss": {"class_weights": True, "label_smoothing": 0.3, "z_loss": 1e-2},
    "all, mean": ALL,
    "all, sum": {**ALL, "reduction": "sum"},
    "all, by token": {**ALL, "reduction": "none"},
}


def cut_in_four(monkeypatch, kernels) -> None:
    """Rows of VOCABULARY are four blocks in the interpreter, whatever is computed of them.

    By their bytes those of more than a plain loss would be thirteen, and take three times as long.
    """
    cut = kernels.block_and_warps
    monkeypatch.setattr(kernels, "block_and_warps", lambda stride, *_: cut(stride, 4, 0))


def drawn(
    device: str, dtype: str, shape: tuple[int, int, int] = SHAPE, spread: float = 1.0,
    seed: int = 0, bias: bool = False, token_weights: bool = False, class_weights: bool = False,
    **settings,
):  # fmt: skip
    """Leaves by name, target (an ignored one in seven), and the settings; logits are O(spread)."""
    tokens, width, vocabulary = shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(getattr(torch, dtype)).requires_grad_()

    leaves = {"hidden": normal(tokens, width),
              "weight": normal(vocabulary, width, scale=spread * width**-0.5)}  # fmt: skip
    leaves |= {"bias": normal(vocabulary)} if bias else {}
    target = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    target[::7] = settings.get("ignore_index", -100)
    target[-1] = vocabulary - 1
    if token_weights:
        settings["token_weights"] = torch.rand(tokens, generator=generator, device=device)
    if class_weights:
        settings["class_weights"] = torch.rand(vocabulary, generator=generator, device=device)
        settings["class_weights"][1::3] = 0
    return leaves, target, settings


def results(compute: Callable[..., Tensor], leaves, target: Tensor, settings, up: Tensor | None):
    """The loss and the gradients by name; `up` is what comes from above, in any dtype."""
    loss = compute(**leaves, target=target, **settings)
    gradients = grad(loss, list(leaves.values()), None if up is None else up.to(loss))
    found = {f"d_{n}": g for n, g in zip(leaves, gradients, strict=True)}
    return {"loss": loss.detach(), **found}


def wide(leaves):
    return {n: t.detach().double().requires_grad_() for n, t in leaves.items()}


def misses(
    device: str, dtype: str, shape: tuple[int, int, int] = SHAPE, spread: float = 1.0,
    compute: Callable[..., Tensor] = linear_cross_entropy, seed: int = 0, **settings,
) -> list[str]:  # fmt: skip
    """What the one tolerance rule rejects in the loss and the gradients.

    Losses by token have the floor of fp32, which they are computed in. PyTorch's draw of few
    numbers may be lucky: its error is the worst of four, a per cent apart. What comes from above is
    a power of two, as of `backward()` and loss scales: it rounds nothing. A loss by token has any.
    """
    leaves, target, settings = drawn(device, dtype, shape, spread, seed, **settings)
    by_token = settings.get("reduction") == "none"
    up = torch.tensor(4.0, device=device)
    if by_token:
        up = (torch.randn(shape[0], device=device).abs() + 0.5).to(leaves["hidden"].dtype)

    def errors(function: Callable[..., Tensor], scale: float):
        own = {n: (t.detach() * scale).to(t.dtype).requires_grad_() for n, t in leaves.items()}
        found = results(function, own, target, settings, up)
        true = results(reference.linear_cross_entropy, wide(own), target, settings, up)
        kinds = {n: (t.dtype, t.shape) for n, t in found.items()}
        return check.errors(found, true), kinds

    drawn_apart = [errors(reference.linear_cross_entropy, s) for s in (1.0, 1.01, 1.02, 1.03)]
    found, kinds = errors(compute, 1.0)
    assert kinds == drawn_apart[0][1]
    usual = worse(*(each for each, _ in drawn_apart))
    missed = []
    for name in usual:
        floor = torch.float32 if by_token and name == "loss" else getattr(torch, dtype)
        missed += check.misses(found, usual, floor, [name])
    return missed


def step(leaves, target: Tensor, compute=linear_cross_entropy, **settings):
    loss = compute(**leaves, target=target, **settings)
    return [loss.detach(), *grad(loss.sum(), list(leaves.values()))]


def check_leading_dimensions(device: str) -> None:
    leaves, target, _ = drawn(device, "float32", bias=True)
    hidden = leaves["hidden"]
    wanted = step(leaves, target)
    deep = {**leaves, "hidden": torch.stack([hidden[:12].reshape(2, 2, 3, WIDTH)] * 1)[0]}
    losses = linear_cross_entropy(**deep, target=target[:12].reshape(2, 2, 3), reduction="none")
    flat = linear_cross_entropy(**leaves, target=target, reduction="none")
    assert losses.shape == (2, 2, 3) and close([losses.flatten()], [flat[:12]])
    one = linear_cross_entropy(hidden[12], leaves["weight"], target[12], bias=leaves["bias"])
    assert one.shape == () and close([one], [flat[12]])
    assert close([flat[target >= 0].mean()], wanted[:1])


def bound(target: Tensor, **settings) -> Callable[..., Tensor]:
    """The loss of leaves by name."""
    return partial(linear_cross_entropy, target=target, **settings)


ONE = torch.ones(())


def check_any_strides(device: str) -> None:
    leaves, target, settings = drawn(device, "float32", token_weights=True)
    weights = torch.stack([settings["token_weights"]] * 2, dim=-1)[:, 0]
    apart = torch.stack([target, target], dim=-1)[:, 1]
    strided, one = bound(apart, token_weights=weights), ONE.to(device)
    assert close(results_of(strided, leaves, one), step(leaves, target, **settings))
    gradient_checks.check_layouts(strided, leaves, one)


def check_frozen_subsets(device: str) -> None:
    for reduction in ("mean", "none"):
        leaves, target, settings = drawn(device, "float32", bias=True, reduction=reduction)
        up = ONE.to(device).expand(TOKENS if reduction == "none" else ())
        gradient_checks.check_subsets(bound(target, **settings), leaves, up)


def check_backward_twice_and_accumulated(device: str) -> None:
    for dtype, reduction in (("float32", "mean"), ("float32", "none"), ("bfloat16", "mean")):
        leaves, target, settings = drawn(device, dtype, bias=True, reduction=reduction)
        compute, three = bound(target, **settings), 3 * ONE.to(device)
        up = three.expand(TOKENS if reduction == "none" else ()).to(compute(**leaves).dtype)
        gradient_checks.check_repeated(compute, leaves, up)
        own, loss = list(leaves.values()), compute(**leaves)
        first = [t.clone() for t in grad(loss, own, up, retain_graph=True)]
        loss.backward(up)
        assert close([t.grad for t in own], first)
        assert not any(t.grad.requires_grad for t in own)
        compute(**leaves).sum().backward()
        assert close([t.grad for t in own], [t * (4 / 3) for t in first])


def check_gradient_of_token_weights(device: str) -> None:
    leaves, target, settings = drawn(device, "float32", token_weights=True, z_loss=1e-2)
    leaves["token_weights"] = settings.pop("token_weights").requires_grad_()
    for reduction in ("mean", "sum", "none"):
        found = step(leaves, target, **settings, reduction=reduction)
        true = step(
            wide(leaves), target, reference.linear_cross_entropy, **settings, reduction=reduction
        )
        assert all((f - t).norm() <= 1e-5 * t.norm() for f, t in zip(found, true, strict=True))


def check_nothing_to_learn(device: str) -> None:
    """All ignored, no tokens, weights of zero: losses and gradients as torch's."""
    for dtype in ("float32", "float16"):
        leaves, target, _ = drawn(device, dtype)
        ignored = torch.full_like(target, -100)
        empty = {**leaves, "hidden": leaves["hidden"].detach()[:0].requires_grad_()}
        for own, labels in ((leaves, ignored), (empty, target[:0])):
            for settings in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1},
                             {"reduction": "none"}):  # fmt: skip

                def torch_s(hidden, weight, target, **settings):
                    return cross_entropy(linear(hidden, weight).float(), target, **settings)

                found = step(own, labels, **settings)
                wanted = step(own, labels, torch_s, **settings)
                for f, w in zip(found, wanted, strict=True):
                    torch.testing.assert_close(f, w, rtol=0, atol=0, equal_nan=True)
                assert not any(t.any() for t in found[1:])
        zeros = torch.zeros_like(target, dtype=torch.float32)
        summed = step(leaves, target, token_weights=zeros, reduction="sum")
        assert not any(t.any() for t in summed)
        loss, d_hidden, d_weight = step(leaves, target, token_weights=zeros)
        assert loss.isnan() and d_weight.isnan().all()
        assert d_hidden[target != -100].isnan().all() and not d_hidden[target == -100].any()


def check_one_class_and_few(device: str) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for vocabulary in (1, 64, 65):
            shape = TOKENS, WIDTH, vocabulary
            assert misses(device, dtype, shape, **ALL) == [], (dtype, vocabulary)
        leaves, target, _ = drawn(device, dtype, (TOKENS, WIDTH, 1))
        assert not any(t.any() for t in step(leaves, target))


def check_huge_logits(device: str) -> None:
    """±10⁴, where a softmax that subtracts no maximum, or a rounded one, is far off."""
    for dtype in ("float32", "bfloat16", "float16"):
        for settings in ({}, {**ALL, "z_loss": 1e-4}):  # 1e-2 takes fp16 past its largest number
            assert misses(device, dtype, spread=3e3, **settings) == []
    leaves, target, _ = drawn(device, "float32")
    for extreme in (float("inf"), float("nan")):
        with torch.no_grad():
            leaves["weight"][5, 0] = extreme
        assert linear_cross_entropy(**leaves, target=target).isnan()


def check_token_accuracy(device: str) -> None:
    """As argmax of the logits has it: the first of the largest. Whole numbers have many of these,
    and products without rounding."""
    for dtype in ("float32", "bfloat16"):
        leaves, target, _ = drawn(device, dtype)
        with torch.no_grad():
            for leaf in leaves.values():
                leaf.copy_((leaf * 2).round().clamp(-2, 2))
            leaves["weight"][VOCABULARY // 2 :] = leaves["weight"][: (VOCABULARY + 1) // 2].clone()
        best = linear(leaves["hidden"], leaves["weight"]).argmax(-1)
        target[1::2] = best[1::2]
        target[2] = best[2] + VOCABULARY // 2  # as large, and not the first
        valid = target != -100
        hits = ((best == target) & valid).float()
        assert hits[1] == 1 and hits[2] == 0 and 0 < hits.sum() < valid.sum()
        plain = linear_cross_entropy(**leaves, target=target)
        share = hits.sum() / valid.sum()
        for reduction, wanted in (("none", hits), ("mean", share), ("sum", share)):
            loss, accuracy = linear_cross_entropy_and_accuracy(
                **leaves, target=target, reduction=reduction
            )
            assert torch.equal(accuracy, wanted) and not accuracy.requires_grad
            if reduction == "mean":
                gradients = grad(loss, list(leaves.values()))
                assert close([loss, *gradients], [plain, *grad(plain, list(leaves.values()))])
        capped = linear_cross_entropy_and_accuracy(**leaves, target=target, softcap=50.0)
        assert torch.equal(capped[1], share)
        ignored = torch.full_like(target, -100)
        assert linear_cross_entropy_and_accuracy(**leaves, target=ignored)[1].isnan()


def check_accuracy_of_nan_is_no_hit(device: str) -> None:
    leaves, target, _ = drawn(device, "float32")
    target = target.where(target != 0, 1)
    with torch.no_grad():
        leaves["weight"][VOCABULARY - 2] = float("nan")  # of every token, behind all targets
        target[-1] = VOCABULARY - 3
    for own in (leaves, {name: leaf * float("nan") for name, leaf in leaves.items()}):
        for reduction in ("mean", "none"):
            _, hits = linear_cross_entropy_and_accuracy(**own, target=target, reduction=reduction)
            assert not hits.any()


def check_gradients_of_a_mean_do_not_depend_on_the_weights_size(device: str) -> None:
    """In fp16 they neither vanish nor overflow: a mean's weights count by their shares."""
    for dtype in ("float16", "bfloat16"):
        leaves, target, settings = drawn(device, dtype, class_weights=True, token_weights=True)
        for name in ("class_weights", "token_weights"):
            true = step(
                wide(leaves), target, reference.linear_cross_entropy, **{name: settings[name]}
            )
            for size in (1e-8, 1.0, 1e5):
                found = step(leaves, target, **{name: settings[name] * size})
                for one, other in zip(found, true, strict=True):
                    assert (one - other).norm() <= 2e-2 * other.norm(), (dtype, name, size)


def check_class_weights_are_torch_s(device: str) -> None:
    leaves, target, settings = drawn(device, "float32", class_weights=True)
    by_class = settings["class_weights"]
    logits = linear(leaves["hidden"], leaves["weight"])
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.3):
            shared = {"reduction": reduction, "label_smoothing": smoothing}
            found = linear_cross_entropy(
                **leaves, target=target, class_weights=by_class.double(), **shared
            )
            torch.testing.assert_close(found, cross_entropy(logits, target, by_class, **shared))


def check_autocast(device: str) -> None:
    leaves, target, _ = drawn(device, "float32", bias=True)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=dtype):
            loss = linear_cross_entropy(**leaves, target=target)
        assert loss.dtype == torch.float32
        found = grad(loss, list(leaves.values()))
        half = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
        by_hand = step(half, target)
        assert all(t.dtype == torch.float32 for t in found)
        assert same([loss, *(t.to(dtype) for t in found)], by_hand)


def check_activation_checkpointing_and_hooks(device: str) -> None:
    leaves, target, _ = drawn(device, "bfloat16")
    loss, one = bound(target), ONE.to(device)
    one = one.to(loss(**leaves).dtype)
    gradient_checks.check_checkpointed(loss, leaves, one)
    with torch.autograd.graph.save_on_cpu():
        found = results_of(loss, leaves, one)
    assert same(found, step(leaves, target))


def check_no_grad_and_inference(device: str) -> None:
    leaves, target, _ = drawn(device, "float32")
    gradient_checks.check_no_grad(bound(target), leaves)


def check_functional_transforms(device: str) -> None:
    leaves, target, _ = drawn(device, "float32")
    gradient_checks.check_transforms(bound(target), leaves, ONE.to(device), by_row=False)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def check_bound(
    device: str, magnitude: float, vocabulary: int = VOCABULARY, softcap: float = 0.0
) -> None:
    """What the kernel's docstring promises of a row, in fp32."""
    from fusedlib.ops.loss import kernels

    rows, smoothing, z_loss, unit = 8, 0.1, 1e-2, 2**-24
    stride = kernels.row_stride(vocabulary, 4)
    logits = (torch.randn(rows, stride, device=device) * magnitude)[:, :vocabulary]
    target = torch.randint(vocabulary, (rows,), device=device)
    losses, one = torch.empty(rows, device=device), torch.ones((), device=device)
    true = before = logits.double()
    slope = torch.ones_like(true)
    if softcap:
        true = softcap * torch.tanh(before / softcap)
        slope = 1 / torch.cosh(before / softcap).square()
    lse = true.logsumexp(-1)
    largest = torch.maximum(true.abs().amax(-1), lse.abs())
    one_hot = torch.nn.functional.one_hot(target, vocabulary)
    share = (1 - smoothing) * one_hot + smoothing / vocabulary
    true_losses = lse - (share * true).sum(-1) + z_loss * lse.square()
    p = true.softmax(-1)
    kernels.cross_entropy_rows(
        logits, target, None, None, one, losses, None,
        kernels.Settings(-100, smoothing, z_loss, softcap), gradient=True,
    )  # fmt: skip
    steps = 8 + torch.tensor(vocabulary).log2()
    squared = 1 + 2 * z_loss * largest
    capped = 20 * largest if softcap else torch.zeros_like(largest)
    bound = (steps * (1 + largest) + capped) * squared * unit
    assert ((losses - true_losses).abs() <= bound).all()
    times = (1 + 2 * z_loss * lse)[:, None]
    of_p = (2 * (steps + largest) + capped)[:, None] * p * times.abs() * unit
    off = (logits.double() - (p * times - share) * slope).abs()
    of_slope = (8 + 6 * before.abs() / softcap) * unit if softcap else 0.0
    rounding = (4 * unit + of_slope) * (p * times.abs() + share)
    assert (off <= (of_p + rounding) * slope + torch.finfo(torch.float32).tiny).all()


def check_compiled(
    device: str, dtype: str = "float32", memory: str | int = "balanced"
) -> None:  # fmt: skip
    """In one graph, with shapes of its own and with any."""
    torch._dynamo.reset()
    compiled = partial(torch.compile(linear_cross_entropy, fullgraph=True), memory=memory)
    assert misses(device, dtype, compute=compiled, **ALL) == []
    torch._dynamo.reset()
    dynamic = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=True)
    dynamic = partial(dynamic, memory=memory)
    for tokens in (TOKENS, 9):
        shape = tokens, WIDTH, VOCABULARY
        assert misses(device, dtype, shape, compute=dynamic, **SETTINGS["all, by token"]) == []
