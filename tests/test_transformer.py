"""The Transformer against an independent, naive one: loops, complex numbers, float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils import flop_counter

from study.models import transformer
from study.models.transformer import Transformer, TransformerConfig, config, loss, plain_attention

TINY = TransformerConfig(
    "tiny", d_model=12, d_ff=20, num_layers=2, num_heads=3, vocab_size=17, context_length=7
)
ATTENTIONS = ("sdpa", "plain")
# fp64 sums of at most 20 terms of O(1): rounding stays orders of magnitude below this.
FP64_TOLERANCE = 1e-10


def make(attention: str = "sdpa", dtype: torch.dtype = torch.float64, **overrides: int):
    torch.manual_seed(3)
    shape = {**vars(TINY), "attention": attention, **overrides}
    model = Transformer(TransformerConfig(**shape), dtype=dtype)
    with torch.no_grad():  # norm weights off 1, or a forgotten weight would not show
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    tokens = torch.randint(TINY.vocab_size, (2, TINY.context_length))
    return model, tokens


# --- the naive model --------------------------------------------------------------------------


def naive_norm(x: Tensor, weight: Tensor) -> Tensor:
    rows = [row / math.sqrt(sum(v * v for v in row.tolist()) / len(row) + 1e-5) for row in x]
    return torch.stack(rows) * weight


def naive_rotate(vector: Tensor, position: int) -> Tensor:
    """Pairs (i, i + half) as complex numbers, each multiplied by exp(i · angle)."""
    half = len(vector) // 2
    turned = vector.clone()
    for i in range(half):
        angle = position / 10_000 ** (2 * i / len(vector))
        z = complex(vector[i], vector[i + half]) * complex(math.cos(angle), math.sin(angle))
        turned[i], turned[i + half] = z.real, z.imag
    return turned


def naive_attention(x: Tensor, weights: dict[str, Tensor], num_heads: int) -> Tensor:
    length, d_model = x.shape
    width = d_model // num_heads
    out = torch.zeros_like(x)
    for head in range(num_heads):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (x @ weights[f"{n}_proj.weight"][rows].T for n in "qkv")
        q = torch.stack([naive_rotate(q[t], t) for t in range(length)])
        k = torch.stack([naive_rotate(k[t], t) for t in range(length)])
        for t in range(length):
            scores = [float(q[t] @ k[s]) / math.sqrt(width) for s in range(t + 1)]
            exps = [math.exp(s - max(scores)) for s in scores]
            out[t, rows] = sum(e / sum(exps) * v[s] for s, e in enumerate(exps))
    return out @ weights["o_proj.weight"].T


def naive_swiglu(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    gate, up = x @ weights["gate_proj.weight"].T, x @ weights["up_proj.weight"].T
    return (gate / (1 + torch.exp(-gate)) * up) @ weights["down_proj.weight"].T


def part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def naive_logits(model: Transformer, tokens: Tensor) -> Tensor:
    weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
    sequences = []
    for sequence in tokens:
        x = torch.stack([weights["embedding.weight"][t] for t in sequence])
        for i in range(model.config.num_layers):
            block = part(weights, f"blocks.{i}.")
            normed = naive_norm(x, block["attention_norm.weight"])
            x = x + naive_attention(normed, part(block, "attention."), model.config.num_heads)
            normed = naive_norm(x, block["mlp_norm.weight"])
            x = x + naive_swiglu(normed, part(block, "mlp."))
        sequences.append(naive_norm(x, weights["norm.weight"]) @ weights["output.weight"].T)
    return torch.stack(sequences)


def assert_same_as_naive(model: Transformer, tokens: Tensor) -> None:
    with torch.no_grad():
        error = (model(tokens).double() - naive_logits(model, tokens)).abs().max().item()
    assert error < FP64_TOLERANCE, f"logits off by {error:.3g}"


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_transformer_forward_vs_naive(attention):
    model, tokens = make(attention)
    logits = model(tokens)
    assert logits.shape == (2, TINY.context_length, TINY.vocab_size)
    assert_same_as_naive(model, tokens)
    assert_same_as_naive(model, tokens[:, :4])  # fewer tokens than the context has room for


# --- broken variants that the comparison above must reject ------------------------------------


BROKEN = {
    "sees the future": (Tensor, "triu", lambda self, diagonal=0: torch.zeros_like(self)),
    "no scale": (
        transformer, "plain_attention", lambda q, k, v: plain_attention(2 * q, k, v)
    ),
    "no rotation": (transformer.RotaryEmbedding, "forward", lambda self, x: x),
    "gate and up swapped": (
        transformer.SwiGLU, "forward",
        lambda self, x: self.down_proj(self.gate_proj(x) * silu(self.up_proj(x))),
    ),
    "no residual": (
        transformer.Block, "forward",
        lambda self, x, rope: self.mlp(
            self.mlp_norm(x + self.attention(self.attention_norm(x), rope))
        ),
    ),
    "no norm weight": (
        transformer.RMSNorm, "forward",
        lambda self, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_comparison_rejects_a_broken_model(name, monkeypatch):
    model, tokens = make("plain")
    expected = naive_logits(model, tokens)
    monkeypatch.setattr(*BROKEN[name])
    monkeypatch.setattr(f"{__name__}.naive_logits", lambda *_: expected)
    with pytest.raises(AssertionError, match="logits off by"):
        assert_same_as_naive(model, tokens)


# --- sizes ---------------------------------------------------------------------------------------

# Worked by hand: embedding and output layer 2·10000·D; a block 4·D² + 3·D·F + 2·D; last norm D.
COUNTS = {
    "small": 15_360_000 + 12 * (2_359_296 + 7_077_888 + 1_536) + 768,
    "medium": 20_480_000 + 24 * (4_194_304 + 12_582_912 + 2_048) + 1_024,
    "large": 25_600_000 + 36 * (6_553_600 + 19_660_800 + 2_560) + 1_280,
    "xl": 32_000_000 + 48 * (10_240_000 + 30_720_000 + 3_200) + 1_600,
    "2.7b": 51_200_000 + 32 * (26_214_400 + 78_643_200 + 5_120) + 2_560,
}


@pytest.mark.parametrize("name", transformer.SIZES)
def test_parameter_count_formula_vs_built_model(name):
    model = Transformer(config(name), device="meta")
    built = sum(p.numel() for p in model.parameters())
    assert built == config(name).num_parameters
    assert built == COUNTS.get(name, built)
    assert config(name).name == name


aten = torch.ops.aten
# torch's own formulas; it only lacks the names that attention has on the CPU.
ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        flop_counter.sdpa_flop_count(q, k, v)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: (
        flop_counter.sdpa_backward_flop_count(dy, q, k, v)
    ),
}


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize("tokens", [16, 7])
def test_flops_are_those_that_torch_counts(attention, tokens):
    shape = config("nano", vocab_size=96, context_length=16, attention=attention, d_ff=200)
    model = Transformer(shape)
    drawn = torch.randint(shape.vocab_size, (3, tokens))
    with flop_counter.FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        loss(model(drawn), drawn).backward()
    # A fused backward computes QKᵀ again, which is no work of the model.
    again = shape.num_layers * 2 * 3 * tokens**2 * shape.d_model if attention == "sdpa" else 0
    assert transformer.flops(shape, 3, tokens) + again == counter.get_total_flops()


# --- gradients, precision, initialisation ---------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_vs_finite_differences(attention):
    torch.manual_seed(0)
    shape = {"d_model": 4, "d_ff": 6, "num_layers": 1, "num_heads": 2, "vocab_size": 5}
    made = TransformerConfig("check", **shape, context_length=3, attention=attention)
    model = Transformer(made, dtype=torch.float64)
    tokens = torch.tensor([[0, 4, 2]])
    names = [name for name, _ in model.named_parameters()]

    def value(*weights: Tensor) -> Tensor:
        logits = torch.func.functional_call(
            model, dict(zip(names, weights, strict=True)), (tokens,)
        )
        return loss(logits, tokens.roll(-1, dims=1))

    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert torch.autograd.gradcheck(value, weights, fast_mode=True)


def test_loss_vs_log_softmax_by_hand():
    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]])
    total = sum(math.exp(v) for v in (0, 1, 2))
    expected = -(math.log(math.exp(1) / total) + math.log(1 / (math.exp(3) + 2))) / 2
    assert loss(logits, torch.tensor([[1, 2]])).item() == pytest.approx(expected, rel=1e-6)
