"""The tree: two links, no import cycles, entry points that resolve."""

from __future__ import annotations

import ast
import importlib.metadata
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ENTRY_POINTS = [
    (group, name, target)
    for group, points in PYPROJECT["project"]["entry-points"].items()
    for name, target in points.items()
]


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("name", ["stages", "plugins"])
def test_the_package_holds_a_link_to_the_folder_at_the_root(name: str) -> None:
    link = ROOT / "lmcache_async" / name
    cure = (
        f"lmcache_async/{name} is no symbolic link: the tree was checked out with core.symlinks=false or copied by a"
        " tool that drops links, and a wheel built from it has no stages and no plugins. Cure: `git config"
        f" core.symlinks true`, then `git checkout -- lmcache_async/{name}`."
    )

    assert link.is_symlink(), cure
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize(("group", "name", "target"), ENTRY_POINTS, ids=lambda value: str(value))
def test_an_entry_point_is_installed_and_resolves(group: str, name: str, target: str) -> None:
    installed = importlib.metadata.distribution("lmcache-async").entry_points.select(group=group, name=name)

    assert [point.value for point in installed] == [target], "install again: make install"
    assert callable(installed[name].load())


def module_names() -> dict[str, Path]:
    """Every module of the package, by its import name."""
    names = {}
    for folder, prefix in (
        ("lmcache_async", "lmcache_async"),
        ("stages", "lmcache_async.stages"),
        ("plugins", "lmcache_async.plugins"),
    ):
        for path in python_files(folder):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "lmcache_async" and parts[0] in ("stages", "plugins"):
                continue  # reached through the symbolic link
            names[".".join((prefix, *parts)).removesuffix(".__init__")] = path
    return names


def imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, including imports for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return found & modules.keys()


def test_no_modules_import_each_other() -> None:
    modules = module_names()
    graph = {name: imports(path, modules) - {name} for name, path in modules.items()}

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_the_search_for_cycles_sees_imports_for_type_checking(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.b import C\n    import a.d\n"
    )

    assert imports(file, {"a.b": file, "a.d": file, "a": file}) == {"a.b", "a.d"}
