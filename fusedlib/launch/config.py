"""How kernels are cut into tiles, and how many warps run a program."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Config:
    """How one kernel is cut: each field is the kernel's argument of that name in capitals.

    A number that a kernel has no argument for is 0.

    Attributes:
        block_m: rows of its result that a program computes.
        block_n: columns of each of its results.
        block_k: terms of the sum at a time.
        num_warps: of a program; with roles, of its first role.
        num_stages: blocks of the sum in flight, by Triton's pipeliner.
        group_m: row tiles that share the other factor's blocks in the L2 cache.
        lines: rows or columns of a factor that a program splits.
        stages: blocks in the ring of a kernel whose warps have roles.
        consumer_registers: of a thread that multiplies, where warps have roles.
        other_registers: of a thread of the other roles.
        persistent: one program a multiprocessor starts, and takes several tiles.
        descriptors: the first matrices come by TMA.
    """

    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 0
    group_m: int = 8
    lines: int = 0
    stages: int = 0
    consumer_registers: int = 0
    other_registers: int = 0
    persistent: bool = False
    descriptors: bool = False

    def launch(self) -> dict[str, int]:
        """The keyword arguments of a kernel's launch, also of some that it may not take."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name if name in ("num_warps", "num_stages") else name.upper(): value
            for name, value in values.items()
            if value or isinstance(value, bool)
        }


def with_roles(consumer_registers: int, other_registers: int, group_m: int = 8) -> Config:
    """The configuration of a kernel whose warps have roles: registers of a thread of each."""
    return Config(
        block_k=64, stages=3, group_m=group_m, descriptors=True,
        consumer_registers=consumer_registers, other_registers=other_registers,
    )  # fmt: skip
