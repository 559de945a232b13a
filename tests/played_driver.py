"""A driver of a card that is not there: Triton compiles for it, and starts nothing."""

from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget


class Launcher:
    """Starts nothing."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, source, metadata):
        pass

    def launch(self, *arguments):
        pass

    __call__ = launch


class Driver:
    """As much of a driver as Triton asks before a kernel runs."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda *_: ("module", "function", 100, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232_448},
    )

    def __init__(self, arch: int):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # Triton keeps kernels by device

    def get_current_stream(self, device):
        return 0


def play_driver(arch: int) -> None:
    triton.runtime.driver.set_active(Driver(arch))
