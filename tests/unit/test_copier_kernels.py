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


def test_under_the_interpreter_the_kernel_moves_what_the_cpu_copier_moves(tmp_path):
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


@pytest.mark.parametrize("to_staging", [True, False])
@pytest.mark.parametrize(("alignment", "wide"), [(16, True), (8, False)])
def test_compiled_for_a_gpu_it_moves_128_bits_at_a_time_where_rows_are_aligned(
    to_staging, alignment, wide, tmp_path, monkeypatch
):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from lmcache_async.device.kernels import _move_rows

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        "ROW_WORDS": 4096,
        "TO_STAGING": to_staging,
        "UNIFORM": True,
        "ALIGNMENT": alignment,
        "BLOCK": 2048,
    }
    signature = {"table": "*i64", "staging": "*i64", "num_entries": "i32"} | dict.fromkeys(
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

    accesses = set(re.findall(r"(?:ld|st)\.global\S*", ptx)) - {"ld.global.b64"}  # this one loads the table
    assert accesses == ({"ld.global.v2.b64", "st.global.v2.b64"} if wide else {"st.global.b64"})
