"""Data is never executed: no unpickling, no eval, no loader that runs what it reads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("lmcache_async", "stages", "plugins", "examples", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "stages" not in path.parts[len(ROOT.parts) + 1 :]
    and "plugins" not in path.parts[len(ROOT.parts) + 1 :]
]
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "yaml.Loader",
    "yaml.FullLoader",
    "yaml.UnsafeLoader",
    "msgpack.Unpacker",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
}
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def unsafe_in(source: str) -> list[str]:
    """Return the calls in a file that may execute data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in CALLS:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in {"shell", "allow_pickle"}:
            found.append(f"{node.arg}={ast.unparse(node.value)}")
        elif isinstance(node, ast.FunctionDef) and node.name in {
            "__reduce__",
            "__reduce_ex__",
            "__setstate__",
        }:
            found.append(node.name)
    return found


def test_no_source_runs_what_it_reads():
    found = {str(path.relative_to(ROOT)): unsafe_in(path.read_text(encoding="utf-8")) for path in SOURCES}

    # It checks the syntax of a mutant.
    assert {name: calls for name, calls in found.items() if calls} == {
        "tools/mutants/mutation.py": ["compile"]
    }


def test_the_source_files_are_found():
    names = {str(path.relative_to(ROOT)) for path in SOURCES}

    assert {"lmcache_async/memory/record.py", "stages/verify.py", "plugins/disk/tier.py"} <= names


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "import a.b, joblib",
        "torch.load(path)",
        "x = eval",
        "yaml.load(text, yaml.FullLoader)",
        "np.load(path, allow_pickle=True)",
        "run(command, shell=True)",
        "class A:\n    def __reduce__(self): ...",
    ],
)
def test_unsafe_calls_are_detected(source):
    assert unsafe_in(source)
