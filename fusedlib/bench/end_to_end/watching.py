"""The allocator's peak in each step, before the optimizer's part and in the whole."""

from typing import Any

import torch

from fusedlib.bench.steps import Trainer

MIB = 2**20


class Watch:
    """Steps of a trainer with their peaks; elsewhere than on CUDA nothing is told.

    AdamW's temporaries can be larger than all activations, so that the whole step's peak would
    hide what forward and backward hold.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._on_cuda = trainer.device.type == "cuda"
        self._both = 0
        if self._on_cuda and trainer.optimizer is not None:
            trainer.optimizer.register_step_pre_hook(self._before_optimizer)

    def _before_optimizer(self, *_: Any) -> None:
        self._both = torch.cuda.max_memory_allocated()

    def step(self, peaks: dict[str, float]) -> dict[str, float]:
        """One step's times in ms; its peaks raise `both_peak_mib`, `peak_mib` and `held_mib`.

        `held_mib` is what forward and backward hold at most over what there was before the step.
        """
        if not self._on_cuda:
            return self._trainer.step()
        self._trainer.model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = self._trainer.step()
        found = {
            "both_peak_mib": self._both, "peak_mib": torch.cuda.max_memory_allocated(),
            "held_mib": self._both - before,
        }  # fmt: skip
        for name, size in found.items():
            peaks[name] = max(peaks.get(name, 0.0), size / MIB)
        return times
