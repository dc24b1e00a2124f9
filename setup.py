"""The package's one compiled module. All else is in pyproject.toml.

It is optional: without a C compiler the installation goes on, and copies take the slower way through NumPy
(`lmcache_async/memory/copies.py`).
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "lmcache_async.memory._rows",
            ["lmcache_async/memory/_rows.c"],
            depends=["lmcache_async/memory/_xxh3.h"],  # also what puts it into the source distribution
            define_macros=[("Py_LIMITED_API", "0x030B0000")],  # one wheel for 3.11 and all that follow
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
