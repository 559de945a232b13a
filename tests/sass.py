"""What compiled kernels use, read from their binaries: for `kernels_ahead.py`."""

import json
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import triton.backends.nvidia as nvidia

TOOLS = Path(nvidia.__file__).parent / "bin"
INSTRUCTIONS = {i: i for i in ("HGMMA", "UTMALDG", "HMMA", "UTC.?MMA", "FFMA2?", "STL", "LDL")}
INSTRUCTIONS |= {i: rf"{i}\S*\.128\S*" for i in ("LDG", "STG")}  # by 16 bytes
NARROW = re.compile(r"ld\.global\S*\.b16\b")  # in PTX
WORD = 16  # bytes of an instruction
LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@\S+\s+)?([A-Z]\S*)", re.MULTILINE)


def show(kernels: Iterable[tuple[dict, object]]) -> None:
    """Print a JSON object a kernel: what is said of it, registers, stack bytes, shared memory, how
    many loads are of two bytes, and how many instructions of each kind there are, if any.
    """
    of_target: dict[int, list[tuple[dict, object]]] = {}
    for said, kernel in kernels:
        of_target.setdefault(kernel.metadata.target.arch, []).append((said, kernel))
    for arch, made in of_target.items():
        texts = [text_of(kernel.asm["cubin"]) for _, kernel in made]
        for (said, kernel), found in zip(made, disassembled(arch, texts), strict=True):
            counts = {
                name: sum(n for op, n in found.items() if re.search(rf"\b(?:{pattern})\b", op))
                for name, pattern in INSTRUCTIONS.items()
            }
            used = resources(kernel.asm["cubin"]) | {"shared": kernel.metadata.shared}
            used["narrow"] = len(NARROW.findall(kernel.asm["ptx"]))
            print(json.dumps(said | used | {k: v for k, v in counts.items() if v}), flush=True)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = run("cuobjdump", "-res-usage", file.name)
    return {key: int(re.search(rf"\b{key}:(\d+)", text)[1]) for key in ("REG", "STACK")}


def text_of(cubin: bytes) -> bytes:
    """The instructions in an ELF file."""
    [start] = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    table = sections[names][4]
    return b"".join(
        cubin[place : place + length]
        for name, _, _, _, place, length in sections
        if cubin.startswith(b".text.", table + name)
    )


def disassembled(arch: int, texts: list[bytes]) -> list[Counter[str]]:
    """How often each instruction stands in each of the texts.

    nvdisasm takes 0.4 s to begin with and a few hundredths for a kernel: it gets all at once.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(texts))
        file.flush()
        lines = run("nvdisasm", "-b", f"SM{arch}{'a' * (arch >= 90)}", file.name)
    found = [op for _, op in LINE.findall(lines)]
    assert len(found) * WORD == sum(map(len, texts)), "nvdisasm left instructions out"
    places = iter(found)
    return [Counter(next(places) for _ in range(len(text) // WORD)) for text in texts]


def run(tool: str, *arguments: str) -> str:
    return subprocess.run(
        [TOOLS / tool, *arguments], capture_output=True, text=True, check=True
    ).stdout
