"""The README's numbers: four on its first screen, a table, and what the study found."""

import re
from collections.abc import Callable

from press import say
from press.columns import ordered_values, read
from press.factors import counted, factors
from press.formats import formatted
from study.rows import load

FINDINGS = ("anatomy/unrelated", "kernels/fp32", "llama/whole-step")
SHOWN = [
    "huggingface", "liger", "liger-chunks-32", "liger-cute-loss", "liger-inductor-layers",
    "inductor", "inductor-causal", "inductor-causal-loss", "fused", "fused-inductor",
]  # fmt: skip


def numbers() -> str:
    """A few numbers, and over whom."""
    return say.filled(
        "On an H200 ({days}) one line makes forward and backward of Llama-3.2-1B "
        "**{llama/beside/plain} as fast** as Hugging Face's,\nin **{llama/beside/share} of its "
        "memory**. They are **{llama/beside/time} as fast** as with {llama/beside/arm}\n(bf16, "
        "8,192 tokens). A step with AdamW is {llama/adamw/plain} as fast as Hugging Face's, and "
        "hardly faster than with\n{llama/adamw/who} ({llama/adamw/fastest}). Without checkpoints "
        "{llama/limits/fused} sequences of 1,024 tokens fit. With Liger\n{llama/limits/liger} do, "
        "with Hugging Face {llama/limits/huggingface}; torch.compile was not tried. In fp32, at "
        'torch\'s default "highest", a large MLP is **{kernels/fp32-pair/liger} as fast**\n'
        "as Liger's, and on random data its error is smaller; in TF32 it has no lead.",
        "H200",
    )


def table() -> str:
    """Tokens a second and memory of a Llama, by implementation and GPU."""
    rows = load("llama").query("experiment == 'step' and group == 'arms' and dtype == 'bfloat16'")
    cards = ordered_values("machine", rows["machine"])
    lines = [
        ["Llama-3.2-1B, bf16, 4 × 2,048", *(f"{card}, tokens/s" for card in cards), "memory"],
        [":--", *["--:"] * (len(cards) + 1)],
    ]
    for name in SHOWN:
        own = rows[rows["provider"] == name].set_index("machine")
        rates = [formatted(own["tokens_per_s"].get(card), ",d") for card in cards]
        lines.append([read("provider", name), *rates, formatted(own["whole_gib"].max(), "3 GiB")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def findings() -> str:
    """A line a finding: how published factors came out, then claims with their marks."""
    every = map(say.evaluate, FINDINGS)
    return "\n".join([
        "- **What compares mostly carries over or grows, and one report is wrong.** "
        + counted(factors()),
        *(f"- **{one.headline}.** {one.sentence()} *({'; '.join(one.marks())})*" for one in every),
    ])  # fmt: skip


BLOCKS: dict[str, Callable[[], str]] = {"numbers": numbers, "table": table, "findings": findings}


def updated(text: str) -> str:
    """The README with its blocks as the rows have them now.

    Raises:
        ValueError: it lacks a block, or has one twice.
    """
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        pattern = re.compile(f"{begin}.*?{end}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"README.md needs exactly one block from {begin} to {end}")
        before, after = pattern.split(text)
        text = f"{before}{begin}\n{block()}\n{end}{after}"
    return text
