"""`python -m tools.gpu.offline pack FOLDER`: package vLLM for a GPU machine without network, in about 50 MB.

The wheel of vLLM has 330 MB, mostly machine code for other GPUs and kernels of other models. The package has vLLM's Python
code, the two compiled modules that models without quantisation need, with the machine code of one architecture, and the
wheels in `vllm_wheels.txt` (Python 3.12). On the other machine, `python -m tools.gpu.offline install FOLDER TARGET`
installs it next to torch 2.11, which must be there.
"""

from __future__ import annotations

import argparse
import compileall
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from struct import Struct

from tools.gpu.checkout import write_metadata

VLLM = "0.32.0"
WHEELS = Path(__file__).with_name("vllm_wheels.txt")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 26, 24, 17, 5)]

MODULES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
"""Operators of vLLM, and attention for Hopper GPUs."""

_FAT_BINARY = Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all entries
_START = _FAT_BINARY.pack(0xBA55ED50, 1, _FAT_BINARY.size, 0)[:8]
_ENTRY = Struct("<HHIQ")  # kind, version, bytes of this header, bytes of the code
_ARCHITECTURE = Struct("<I")  # 28 bytes after the start of an entry, such as 90
_ARCHITECTURE_OFFSET = 28
_PTX, _MACHINE_CODE = 1, 2


def keep_architecture(module: bytearray, architecture: int) -> None:
    """Replace the device code of a compiled module for other GPUs by zeros, which compress to nothing.

    Where a fat binary has no machine code for `architecture` (such as 90 for sm_90), its PTX is kept.
    """
    start = module.find(_START)
    while start >= 0:
        entries = list(_entries(module, start))
        fits = [kind == _MACHINE_CODE and built_for == architecture for kind, built_for, _ in entries]
        for (kind, _, code), fit in zip(entries, fits, strict=True):
            if not (fit or (kind == _PTX and not any(fits))):
                module[code] = bytes(code.stop - code.start)
        start = module.find(_START, start + 1)


def _entries(module: bytearray, start: int) -> Iterator[tuple[int, int, slice]]:
    """Kind, architecture and code of each entry of the fat binary at `start`."""
    _, _, header, size = _FAT_BINARY.unpack_from(module, start)
    place, end = start + header, start + header + size
    while place < end:
        kind, _, header, size = _ENTRY.unpack_from(module, place)
        (architecture,) = _ARCHITECTURE.unpack_from(module, place + _ARCHITECTURE_OFFSET)
        yield kind, architecture, slice(place + header, place + header + size)
        place += header + size


def pack(folder: Path, architecture: int) -> None:
    """Download vLLM and its requirements, and write the package to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _download(folder / "wheels", "-r", str(WHEELS))
    with tempfile.TemporaryDirectory() as temporary:
        wheel = _download(Path(temporary), f"vllm=={VLLM}")[0]
        tree = Path(temporary, "vllm")
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(_is_needed, archive.namelist()):
                archive.extract(name, tree)
        for name in MODULES:
            module = bytearray((tree / name).read_bytes())
            keep_architecture(module, architecture)
            (tree / name).write_bytes(module)
        with tarfile.open(folder / "vllm.tar.xz", "w:xz") as packed:
            packed.add(tree, ".")


def _is_needed(name: str) -> bool:
    path = PurePosixPath(name)
    if path.suffix == ".so":
        return name in MODULES
    return path.suffix != ".json" and not name.startswith("vllm/vllm-rs") and "include" not in path.parts


def _download(folder: Path, *requirements: str) -> list[Path]:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    python = ["--python-version", "3.12", "--implementation", "cp", *platforms]
    _pip("download", "--only-binary=:all:", *python, "--dest", str(folder), *requirements)
    return sorted(folder.glob("*.whl"))


def _pip(verb: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", verb, "--quiet", "--no-deps", *arguments], check=True)


def install(folder: Path, target: Path) -> None:
    """Install the package, and the entry points of this checkout, to a directory for `PYTHONPATH`."""
    wheels = map(str, sorted((folder / "wheels").glob("*.whl")))
    _pip("install", "--no-index", "--no-compile", "--target", str(target), *wheels)
    with tarfile.open(folder / "vllm.tar.xz") as packed:
        packed.extractall(target, filter="data")
    compileall.compile_dir(target, quiet=2, workers=0)  # on all cores; the first import compiles on one
    write_metadata(target)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu.offline", description="vLLM for a GPU machine without network."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="download vLLM and its requirements, and reduce them")
    packing.add_argument("folder", type=Path, help="directory of the package")
    packing.add_argument("--architecture", type=int, default=90, help="compute capability of the GPU; 90")
    installing = verbs.add_parser("install", help="install a package")
    installing.add_argument("folder", type=Path, help="directory of the package")
    installing.add_argument("target", type=Path, help="directory for PYTHONPATH")
    given = parser.parse_args(arguments)
    if given.verb == "pack":
        pack(given.folder, given.architecture)
    else:
        install(given.folder, given.target)


if __name__ == "__main__":
    main()
