"""Around the kernels with fixed roles, without a GPU: how they start, and what they compile to."""

import weakref

import pytest
import torch
from ahead import compiled_ahead, faults


class TestTensorMaps:
    @pytest.fixture
    def launch(self):
        hopper = pytest.importorskip("fusedlib.kernels.hopper")
        from fusedlib.kernels.hopper_launch import HopperLaunch, backward_config

        config = backward_config(4096)
        variant = {"FORWARD": False, "STORE": True}
        kernel = hopper._hopper_swiglu_kernel
        return HopperLaunch(kernel, config, 132, config.backward_blocks(), (9, 9, 9), variant)

    def test_are_kept_by_address(self, launch):
        matrices = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3)]
        first, again = launch._described(*matrices), launch._described(*matrices)
        assert all(a is b for a, b in zip(first, again, strict=True))
        assert [m.base.data_ptr() for m in first] == [t.data_ptr() for t in matrices]
        moved = launch._described(matrices[1], matrices[0], matrices[2])
        assert [m.base.data_ptr() for m in moved[:2]] == [t.data_ptr() for t in matrices[1::-1]]
        assert moved[2] is first[2]

    def test_keep_no_tensor_alive(self, launch):
        matrices = [torch.zeros(64, 64, dtype=torch.float16) for _ in range(3)]
        launch._described(*matrices)
        watched = weakref.ref(matrices[0])
        del matrices
        assert watched() is None

    def test_are_not_without_number(self, launch, monkeypatch):
        monkeypatch.setattr("fusedlib.kernels.hopper_launch.MOST_MAPS", 2)
        matrices = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3)]
        for x in [torch.zeros_like(matrices[0]) for _ in range(5)]:
            launch._described(x, *matrices[1:])
        assert len(launch._kept[0]) <= 2

    def test_are_encoded_once_and_passed_as_triton_passes_them(self, launch, monkeypatch):
        driver = pytest.importorskip("triton.backends.nvidia.driver")
        from fusedlib.kernels import hopper_launch

        encoded, started = [], []

        def encode(descriptor, known):
            encoded.append((descriptor.base.data_ptr(), known))
            return [encoded[-1], *descriptor.shape, *descriptor.strides]

        monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
        monkeypatch.setattr(hopper_launch, "current_index", lambda: -1)
        monkeypatch.setattr(hopper_launch, "_stream", lambda _: 0)
        signature = dict(enumerate(["tensordesc<bf16[128,64]>"] * 3 + ["*bf16"] * 2))
        known = ["of dy", "of w_down", "of gate|up"]
        wrapper = driver.wrap_handle_tensordesc(lambda *a: started.append(a), signature, known)
        launch._run, launch._index, launch._binary = wrapper, -1, tuple("function etc")
        launch._inner = hopper_launch.unwrapped(wrapper)
        matrices = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(5)]
        for _ in range(2):
            launch(*matrices)
        addresses = [t.data_ptr() for t in matrices]
        assert encoded == list(zip(addresses[:3], known, strict=True))
        maps = [v for found in encoded for v in (found, 64, 64, 64, 1)]
        wanted = (*launch.programs, 0, *launch._binary, *maps, *addresses[3:], *launch._tail)
        assert started == [wanted, wanted]

    def test_go_by_triton_itself_where_its_wrapper_is_unknown(self):
        from fusedlib.kernels.hopper_launch import unwrapped

        def wrapper(*arguments):
            return launcher, tensordesc_meta

        launcher, tensordesc_meta = print, [None]
        assert [unwrapped(run) for run in (None, print, lambda: 0, wrapper)] == [None] * 4
        tensordesc_meta = ["known"]
        assert unwrapped(wrapper) == (print, ["known"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_for_hopper_nothing_is_spilled_and_it_fits():
    rows = compiled_ahead("hopper_ahead.py")
    assert len({row["name"] for row in rows}) == 12
    for row in rows:
        assert faults(row, True) == []
        assert row["UTMALDG"], row
        assert row["REG"] == 168, row  # what 384 threads get; setmaxnreg deals them out anew
