"""Study 12: what a compiler gives a Llama on one device, and what it costs.

An *arm* is a rival of the task "compiler": whose operations run, transformers' or fusedlib's, and
what compiles them. Each takes turns with Hugging Face's eager model in a heat of its own, so that a
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

from fusedlib.bench import check, code, distributed, llama, race, rivals, step_clock, timing
from fusedlib.bench.compilers.arms import BASELINE, TASK
from fusedlib.bench.compilers.case import OPTIMIZERS, SUBJECTS, Case, cases, label, require_possible
from fusedlib.bench.compilers.changing import dynamic
from fusedlib.bench.compilers.courses import (
    TURN,
    Course,
    Decoding,
    Forward,
    Session,
    Training,
    taken,
)  # fmt: skip
from fusedlib.bench.compilers.ready import cold, in_fp32, limited, settled
from fusedlib.bench.compilers.samplers import SAMPLERS, misfit
from fusedlib.bench.end_to_end.course import ALONE
from fusedlib.bench.race import Event

__all__ = [
    "BASELINE", "EVENT", "OPTIMIZERS", "SAMPLERS", "STUDY", "TASK", "TURN", "cases", "dynamic",
    "label", "study_code",
]  # fmt: skip

STUDY = "12_compilers"
COURSES: dict[str, type[Course]] = {
    "forward": Forward, "decoding": Decoding, "training": Training,
}  # fmt: skip


def work(case: Case) -> dict[str, Any]:
    """Tokens of a sample."""
    decoding = case["subject"] == "decoding"
    return {"tokens": TURN if decoding else case["batch_size"] * case["context_length"]}


def _code(*own: Any) -> code.Code:
    common = (llama.build, llama.tokens, Course, settled, in_fp32, cold)
    return code.Code((race, timing, check), (*common, *own), rivals.fingerprints(TASK))


def study_code() -> code.Code:
    """Fingerprints of study 12's rows."""
    tokenwise, trained = (_code(Session, Decoding, misfit), (llama.Program, Training))
    codes = {
        "ceiling": ALONE["ceiling"], distributed.EXPERIMENT: distributed.CODE,
        "forward": _code(Forward), "inference": tokenwise, "generation": tokenwise,
        "training": _code(*trained, step_clock.lap, taken),
        "dynamic": _code(*trained, dynamic, limited),
    }  # fmt: skip
    return code.ByExperiment((), (), codes=codes)


EVENT = Event(
    course=lambda case: COURSES[SUBJECTS[case["experiment"]]](case), available=require_possible,
    fields=("subject", "model", "batch_size", "context_length", "dtype", "device"),
    work=work, warmup=1, bursts=False, label=label,
)  # fmt: skip
