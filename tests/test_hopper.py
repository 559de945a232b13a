"""Around the kernels with fixed roles, without a GPU: how they start."""

import weakref

import pytest
import torch

from fusedlib.launch.cache import BoundedCache

KNOWN = ["of dy", "of w_down", "of gate|up"]


class TestTensorMaps:
    @pytest.fixture
    def launch(self):
        hopper = pytest.importorskip("fusedlib.ops.mlp.hopper.kernel")
        return hopper.backward_launch(torch.device("cpu"), 9, 9, 9, True)

    @pytest.fixture
    def card(self, launch, monkeypatch):
        """What was encoded, and what was started, as far as Triton's C function."""
        driver = pytest.importorskip("triton.backends.nvidia.driver")
        from fusedlib.launch import hopper as hopper_launch

        encoded, started = [], []

        def encode(descriptor, known):
            encoded.append((descriptor.base.data_ptr(), known))
            return [encoded[-1], *descriptor.shape, *descriptor.strides]

        monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
        monkeypatch.setattr(hopper_launch, "current_index", lambda: -1)
        monkeypatch.setattr(hopper_launch, "_TENSOR_MAPS", BoundedCache())
        monkeypatch.setattr(hopper_launch, "current_stream", lambda _: 0)
        monkeypatch.setattr(hopper_launch, "bind_context", lambda: None)
        signature = dict(enumerate(["tensordesc<bf16[128,64]>"] * 3 + ["*bf16"] * 2))
        wrapper = driver.wrap_handle_tensordesc(lambda *a: started.append(a), signature, KNOWN)
        launch._run, launch._index, launch._prefix = wrapper, -1, tuple("function etc")
        launch._launcher = hopper_launch.unwrap_launcher(wrapper)
        return encoded, started

    def test_are_encoded_once_and_passed_as_triton_passes_them(self, launch, card):
        encoded, started = card
        matrices = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(5)]
        for _ in range(2):
            launch(*matrices)
        addresses = [t.data_ptr() for t in matrices]
        assert encoded == list(zip(addresses[:3], KNOWN, strict=True))
        maps = [v for found in encoded for v in (found, 64, 64, 64, 1)]
        wanted = (*launch.programs, 0, *launch._prefix, *maps, *addresses[3:], *launch._suffix)
        assert started == [wanted, wanted]

    def test_serve_every_launch(self, launch, card):
        """A weight's at another length: what was encoded for the same looks."""
        encoded, _ = card
        matrices = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(5)]
        launch(*matrices)
        launch._maps = [{} for _ in launch.blocks]  # as of another launch
        launch(torch.zeros(96, 64, dtype=torch.bfloat16), *matrices[1:])
        assert len(encoded) == 4 and encoded[3][1] == KNOWN[0]

    def test_keep_no_tensor_alive(self, launch, card):
        matrices = [torch.zeros(64, 64, dtype=torch.float16) for _ in range(5)]
        launch(*matrices)
        watched = weakref.ref(matrices[0])
        del matrices
        assert watched() is None

    def test_are_not_without_number(self, launch, card, monkeypatch):
        from fusedlib.launch import hopper as hopper_launch

        monkeypatch.setattr(BoundedCache, "most", 2)
        matrices = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(5)]
        moved = [torch.zeros_like(matrices[0]) for _ in range(5)]
        for x in moved:
            launch(x, *matrices[1:])
        assert len(launch._maps[0]) <= 2 and len(hopper_launch._TENSOR_MAPS) <= 2

    def test_go_by_triton_itself_where_its_wrapper_is_unknown(self):
        from fusedlib.launch.internals import unwrap_launcher

        def wrapper(*arguments):
            return launcher, tensordesc_meta

        launcher, tensordesc_meta = print, [None]
        assert [unwrap_launcher(run) for run in (None, print, lambda: 0, wrapper)] == [None] * 4
        tensordesc_meta = ["known"]
        assert unwrap_launcher(wrapper) == (print, ["known"])
