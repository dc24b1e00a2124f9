"""The package's compiled modules. All else is in pyproject.toml.

They are optional: without a C compiler the installation goes on. Copies then take the slower way through NumPy
(`lmcache_async/memory/copies.py`), and files are written by single calls from Python
(`lmcache_async/plugins/disk/files.py`).
"""

from typing import Any

from setuptools import Extension, setup

COMMON: dict[str, Any] = {
    "define_macros": [("Py_LIMITED_API", "0x030B0000")],  # one wheel for 3.11 and all that follow
    "extra_compile_args": ["-O3", "-Wall", "-Wextra"],
    "py_limited_api": True,
    "optional": True,
}

setup(
    ext_modules=[
        Extension(
            "lmcache_async.memory._rows",
            ["lmcache_async/memory/_rows.c"],
            depends=["lmcache_async/memory/_xxh3.h"],  # also what puts it into the source distribution
            **COMMON,
        ),
        Extension("lmcache_async.plugins.disk._publish", ["lmcache_async/plugins/disk/_publish.c"], **COMMON),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
