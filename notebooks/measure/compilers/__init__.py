"""Study 11: what a compiler gives a Llama on one device, and what it costs.

An *arm* is a rival of the task "compiler": whose operations run, transformers' or fusedlib's, and
what compiles them. Each takes turns with Hugging Face's eager model in turns of its own, so that a
run that is stopped keeps the arms that were done. Before its turns an arm is compiled from an empty
cache, called until it compiles no more, and held against the same weights in fp32 at full size.

experiment   what is timed                                                          part
forward      one forward pass of a batch, no gradients                                 1
inference    a token at a time with a static cache; the sampler stays eager            2
generation   the same, the sampler compiled as the model is                            3
training     forward, backward and optimizer of one shape                              4
dynamic      the same from the first step on, every step another length                4
"""

from typing import Any

from measure.compilers.arms import BASELINE, TASK
from measure.compilers.case import OPTIMIZERS, SUBJECTS, cases, require_possible
from measure.compilers.changing import dynamic
from measure.compilers.samplers import SAMPLERS
from measure.compilers.subjects import TURN, Decoding, Forward, Setup, Training
from measure.racing.cases import Case
from measure.racing.race import Race

__all__ = [
    "BASELINE", "OPTIMIZERS", "RACE", "SAMPLERS", "TASK", "TURN", "cases", "dynamic",
]  # fmt: skip

SETUPS: dict[str, type[Setup]] = {
    "forward": Forward, "decoding": Decoding, "training": Training,
}  # fmt: skip


def work(case: Case) -> dict[str, Any]:
    """Tokens of a sample."""
    decoding = case["subject"] == "decoding"
    return {"tokens": TURN if decoding else case["batch_size"] * case["context_length"]}


RACE = Race(
    setup=lambda case: SETUPS[SUBJECTS[case["experiment"]]](case), available=require_possible,
    fields=("subject", "model", "batch_size", "context_length", "dtype", "device"),
    work=work, warmup=1, bursts=False,
)  # fmt: skip
