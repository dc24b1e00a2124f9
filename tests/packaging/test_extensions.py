"""The distributions of examples/ and docs/write-a-tier.md: installed with their commands, tested, and used by name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_async.registry import STAGES, TIERS, Registry
from lmcache_async.testing.rig import Rig
from tests.support.engines import hits, store
from tests.support.projects import install, run_tests

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-tier.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
EXAMPLES = ("custom_tier", "custom_stage")
COMMANDS = ["pip install '.[test]'", "pytest"]
TOKENS = list(range(20))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The source of each distribution, and a directory with it installed."""
    found = {}
    for example in EXAMPLES:
        checkout = tmp_path_factory.mktemp("checkout")
        source = checkout / "examples" / example
        ignored = shutil.ignore_patterns("build", "*.egg-info")
        shutil.copytree(ROOT / "examples" / example, source, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", checkout)
        found[example] = (source, tmp_path_factory.mktemp("site"))
        run_command(COMMANDS[0], *found[example])
    source = tmp_path_factory.mktemp("my_tiers")
    for name, text in FILES.items():
        (source / name).write_text(text, encoding="utf-8")
    found["page"] = (source, tmp_path_factory.mktemp("site"))
    install(*found["page"])
    return found


def run_command(command: str, folder: Path, site: Path) -> None:
    """Run a command of an example's README without the network, with the packages installed here."""
    env = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_TARGET": str(site),
    }
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture
def installed(
    sites: dict[str, tuple[Path, Path]], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Make the distribution of the test's parameter importable."""
    _, site = sites[request.param]
    monkeypatch.syspath_prepend(str(site))
    yield site
    for path in site.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_commands_of_the_readme_run_inside_of_a_checkout(
    example: str, sites: dict[str, tuple[Path, Path]]
) -> None:
    """Only with the example's own requirements, without plug-ins of our suite.

    `sites` has run the first command. The second runs in a process that has imported torch before.
    """
    source, site = sites[example]
    readme = (source / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)

    assert [block.splitlines() for block in blocks] == [COMMANDS]
    assert list(site.glob("lmcache_async_*.py"))
    run_tests(source, site=site)


def test_a_whole_tier_has_at_most_thirty_lines() -> None:
    lines = [line for line in FILES["my_tiers.py"].splitlines() if line.strip()]

    assert set(FILES) == {"my_tiers.py", "pyproject.toml", "test_my_tiers.py"}
    assert 10 < len(lines) <= 30


def test_the_pages_tier_passes_the_pages_test(sites: dict[str, tuple[Path, Path]]) -> None:
    source, site = sites["page"]
    run_tests(source, site=site)


@pytest.mark.parametrize(
    ("installed", "tier"), [("custom_tier", "sqlite"), ("page", "folder")], indirect=["installed"]
)
async def test_an_installed_tier_is_used_by_name_and_survives_a_restart(
    installed: Path, tier: str, tmp_path: Path
) -> None:
    path = tmp_path / "kv.sqlite" if tier == "sqlite" else tmp_path
    settings = {"tiers": ["cpu", {"name": tier, "path": str(path)}]}
    rig, again = Rig(), Rig()
    async with rig.open(**settings) as engine:
        assert (await store(rig, engine, TOKENS)).stored == 3

    async with again.open(**settings) as engine:
        assert await hits(again, engine, TOKENS) == 20
        assert engine.statistics().counts[f"{tier}.hits"] == 3


@pytest.mark.parametrize("installed", ["custom_stage"], indirect=True)
async def test_installed_stages_stand_in_the_chains_and_spare_the_disk(
    installed: Path, tmp_path: Path
) -> None:
    sizes = {}
    for name, stages in {"plain": ([], []), "small": (["zlib"], ["unzlib"])}.items():
        settings = {
            "store.stages": ["hash", "lookup", "allocate", "device_to_host", "seal", *stages[0], "write"],
            "retrieve.stages": ["hash", "plan", "fetch", *stages[1], "verify", "host_to_device"],
            "tiers": [
                "cpu",
                {"name": "disk", "path": str(tmp_path / name), "max_bytes": "16MiB", "odirect": "auto"},
            ],
        }
        rig = Rig(head_dim=256, slabs=32)
        content = rig.content(TOKENS).round(decimals=1)
        rig.write(range(20), content)
        async with rig.open(**settings) as engine:
            await engine.store(TOKENS, range(20))
            assert await engine.flush(timeout_s=30)
        sizes[name] = sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file())

        again = Rig(head_dim=256, slabs=32)
        async with again.open(**settings) as engine:
            mask = await engine.retrieve(TOKENS, range(40, 60))
        assert mask.all()
        assert torch.equal(again.read(range(40, 60)), content)

    assert sizes["small"] < 0.75 * sizes["plain"]


@pytest.mark.parametrize(
    ("installed", "group", "names", "distribution"),
    [
        ("custom_tier", TIERS, {"sqlite"}, "lmcache-async-sqlite"),
        ("custom_stage", STAGES, {"zlib", "unzlib"}, "lmcache-async-zlib"),
    ],
    indirect=["installed"],
)
def test_the_registry_returns_the_distribution_of_a_plugin(
    installed: Path, group: str, names: set[str], distribution: str
) -> None:
    found = Registry().available(group)

    assert {(found[name].distribution, found[name].bundled) for name in names} == {(distribution, False)}
    assert not names & set(Registry().available(group, third_party=False))
