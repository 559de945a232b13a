"""A model divided among processes, by FSDP2 or by DeepSpeed."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from study import patched, rivals, step_clock
from study.cases import Case

SEED = 0
OFFLOAD = {
    "stage": 3,
    "offload_param": {"device": "cpu", "pin_memory": True},
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
}
THROTTLE = {
    "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0, "reduce_bucket_size": 100_000,
}  # fmt: skip
# Arguments of `fully_shard`, or the section `zero_optimization` of DeepSpeed's configuration.
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2-2": {"reshard_after_forward": False},
    "fsdp2-3": {"reshard_after_forward": True},
    "zero-2": {"stage": 2},
    "zero-3": {"stage": 3},
    "offload": OFFLOAD,
    "offload-throttled": OFFLOAD | THROTTLE,
}
OPTIMIZERS = {"sgd": 6e-4, "adamw": 1e-4}
"""Learning rates: SGD's is the one that seed 003 published, with its weight decay of 0.1."""
WEIGHT_DECAY = {"sgd": 0.1, "adamw": 0.01}
# fp16 gradients of the logits are about 1e-9 of the loss: scaled they are no zeros. Never changed,
# so that no step is skipped.
LOSS_SCALE = 2.0**14


def is_deepspeed(case: Case) -> bool:
    """Whether DeepSpeed runs the case."""
    return not case["strategy"].startswith("fsdp2")


def tokens_of(case: Case, vocabulary: int) -> Tensor:
    """Random token ids of all processes, (processes · batch, context); the same in every step."""
    shape = case["processes"] * case["batch_size"], case["context_length"]
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(SEED))


def model_of(case: Case, device: torch.device, arm: str) -> tuple[Any, Any]:
    """The model of an arm, and what is called."""
    model: Any = patched.build(case["model"], case["dtype"], device, SEED)
    return model, rivals.get(patched.TASK, arm).build(model)


def loss_of(call: Any, ids: Tensor) -> Tensor:
    """The loss of an arm's call on sequences of tokens, each predicting its next."""
    loss: Tensor = call(ids, labels=ids).loss
    return loss


def optimizer_of(case: Case, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer of a case; with offloaded weights DeepSpeed's Adam on the CPU."""
    kind, rate = case["optimizer"], case["learning_rate"]
    decay = WEIGHT_DECAY[kind]
    if case["strategy"].startswith("offload"):
        adam: Any = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        cpu_adam: torch.optim.Optimizer = adam(parameters, lr=rate, weight_decay=decay)
        return cpu_adam
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    return make(parameters, lr=rate, weight_decay=decay)


class Engine(step_clock.Trainer):
    """An arm's model as a strategy divides it among the processes; `ids` are its own sequences."""

    ids: Tensor

    def __init__(self, case: Case, device: torch.device) -> None:
        model, self.call = model_of(case, device, case["provider"])
        super().__init__(model, device)
        self.model: Any = model
        self.gradient_norm: float | None = None
        if case["checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self) -> Tensor:
        """The loss of this process."""
        return loss_of(self.call, self.ids)

    def clear(self) -> None:
        """Nothing: an update drops the gradients, so that none lie between steps."""


class FSDP2(Engine):
    """`fully_shard` of each layer and of the whole."""

    def __init__(self, case: Case, device: torch.device) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(case, device)
        for module in (*self.model.model.layers, self.model):
            fully_shard(module, **STRATEGIES[case["strategy"]])
        self.optimizer = optimizer_of(case, self.model.parameters())

    def update(self) -> None:
        """The optimizer's step; the first one keeps the gradient's norm."""
        assert self.optimizer is not None
        if self.gradient_norm is None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm: Any = torch.nn.utils.get_total_norm(gradients)
            self.gradient_norm = float(norm.full_tensor())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class DeepSpeed(Engine):
    """DeepSpeed's engine; it keeps fp32 copies of 16-bit weights."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        config = {
            "train_micro_batch_size_per_gpu": case["batch_size"],
            "zero_optimization": STRATEGIES[case["strategy"]],
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # 1.0 by default, which the other strategies do not do
            "fp16": {"enabled": case["dtype"] == "float16", "loss_scale": LOSS_SCALE},
            "bf16": {"enabled": case["dtype"] == "bfloat16"},
        }
        self.optimizer = optimizer_of(case, self.model.parameters())
        initialize = import_module("deepspeed").initialize
        self.call, *_ = initialize(model=self.model, optimizer=self.optimizer, config=config)

    def backward(self, loss: Tensor) -> None:
        """Gradients, averaged over the processes."""
        self.call.backward(loss)

    def update(self) -> None:
        """The optimizer's step; the first one keeps the gradient's norm."""
        self.call.step()
        if self.gradient_norm is None:
            self.gradient_norm = float(self.call.get_global_grad_norm())
