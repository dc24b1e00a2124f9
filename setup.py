"""The package's one compiled module. All else is in pyproject.toml.

It is optional: without a C compiler the installation goes on, and copies take the slower way through NumPy
(`lmcache_async/device/rows.py`).
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "lmcache_async.device._rows",
            ["lmcache_async/device/_rows.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],  # one wheel for 3.11 and all that follow
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
