"""The Triton kernel: results equal to the CPU copier's, and 128-bit accesses in the GPU code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("copier_kernels_interpreted.py")


def test_in_the_interpreter_the_kernel_copies_as_the_cpu_copier(tmp_path):
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }

    ended = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr


def global_accesses(words, **constants):
    """Kinds of accesses to global memory in the code for an H100, but for those of 64 bits that load the table."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from lmcache_async.device.kernels import _move_rows

    signature = {"table": "*i64", "staging": words, "num_entries": "i32"} | dict.fromkeys(
        constants, "constexpr"
    )
    names = list(signature)
    source = ASTSource(
        _move_rows,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in (0, 1)},
    )
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]
    return set(re.findall(r"(?:ld|st)\.global\S*", ptx)) - {"ld.global.b64"}


@pytest.mark.parametrize("to_staging", [True, False])
@pytest.mark.parametrize(("alignment", "wide"), [(16, True), (8, False)])
def test_compiled_for_a_gpu_it_moves_128_bits_at_a_time_where_rows_are_aligned(
    to_staging, alignment, wide, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    accesses = global_accesses(
        "*i64", ROW_WORDS=4096, TO_STAGING=to_staging, UNIFORM=True, ALIGNMENT=alignment, BLOCK=2048
    )

    assert accesses == ({"ld.global.v2.b64", "st.global.v2.b64"} if wide else {"st.global.b64"})


@pytest.mark.parametrize(("words", "word_bytes"), [("*u8", 1), ("*i16", 2), ("*i32", 4), ("*i64", 8)])
def test_rows_of_several_lengths_and_words_of_every_size_compile_for_a_gpu(
    words, word_bytes, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    accesses = global_accesses(
        words, ROW_WORDS=7, TO_STAGING=True, UNIFORM=False, ALIGNMENT=word_bytes, BLOCK=8
    )

    assert f"st.global.b{8 * word_bytes}" in accesses
