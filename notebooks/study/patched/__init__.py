"""Hugging Face's Llamas and models of other families, and the arms that patch or compile them.

An *arm* is a rival of the task "llama": it takes a model, changes this one alone and gives what is
called with tokens and labels. No class is patched, so that arms share a process, and in races of
forward and backward one set of weights.
"""

from study.patched.arms import (
    BASELINE,
    OTHER_ATTENTION,
    PARTS,
    TASK,
    alone,
    causal_attention,
    require_possible,
)
from study.patched.exact import EXACT, ExactModel, gradients, plain_loss
from study.patched.models import CONFIGS, Call, build, copy_of, tokens
from study.patched.trainer import LlamaTrainer

__all__ = [
    "BASELINE", "CONFIGS", "EXACT", "OTHER_ATTENTION", "PARTS", "TASK", "Call", "ExactModel",
    "LlamaTrainer", "alone", "build", "causal_attention", "copy_of", "gradients",
    "plain_loss", "require_possible", "tokens",
]  # fmt: skip
