"""Tiers, stages and layers by the names of their entry points: read as metadata, imported on use."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import TYPE_CHECKING

from lmcache_async.errors import ConfigError, MissingDependencyError, UnknownPluginError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TIERS = "lmcache_async.tiers"
STAGES = "lmcache_async.stages"
LAYERS = "lmcache_async.layers"
DISTRIBUTION = "lmcache-async"
_KINDS = {TIERS: "tier", STAGES: "stage", LAYERS: "layer"}

REMOVED_TIERS = {
    "peer": "the tier peer and the daemon's server for it were removed in version 0.2;"
    " use the tier valkey, mooncake or s3 to share records between hosts",
}
"""Error messages for tiers of earlier versions, by name."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """What the metadata say of one plug-in.

    Attributes:
        name: The entry point's name, which the config uses.
        distribution: The distribution that brings it.
        version: That distribution's version.
        value: Where it lies, as `package.module:Class`.
    """

    name: str
    distribution: str
    version: str
    value: str

    @property
    def bundled(self) -> bool:
        return self.distribution == DISTRIBUTION


class Registry:
    """The plug-ins that were installed when it was made.

    The first distribution of a name on the path is the one that Python imports; later ones are passed over.
    """

    def __init__(self, path: Sequence[str] | None = None) -> None:
        """Read the metadata on `path`; on `sys.path` if it is None. Nothing is imported."""
        self._plugins: dict[str, list[Plugin]] = {group: [] for group in _KINDS}
        self._requires: dict[str, list[str]] = {}
        seen: set[str] = set()
        for distribution in distributions() if path is None else distributions(path=list(path)):
            name = _normal(distribution.name or "")
            if name and name not in seen:
                seen.add(name)
                self._read(name, distribution)

    def available(self, group: str, *, third_party: bool = True) -> dict[str, Plugin]:
        """The plug-ins of a group by name; where a name is there more than once, ours or the first."""
        found: dict[str, Plugin] = {}
        for plugin in sorted(
            self._plugins[group], key=lambda plugin: (not plugin.bundled, plugin.distribution)
        ):
            if plugin.bundled or third_party:
                found.setdefault(plugin.name, plugin)
        return dict(sorted(found.items()))

    def load(self, group: str, name: str, *, third_party: bool = True) -> object:
        """Import the plug-in.

        Raises:
            UnknownPluginError: No such name.
            ConfigError: Two distributions offer it, and neither is ours; or it is not where its entry point says.
            MissingDependencyError: A package that it needs is not installed.
        """
        plugin = self.available(group, third_party=third_party).get(name)
        if plugin is None:
            raise UnknownPluginError(self._unknown(group, name, third_party=third_party))
        offers = [other for other in self._plugins[group] if other.name == name]
        if not plugin.bundled and len(offers) > 1:
            both = " and ".join(f"{offer.distribution} {offer.version}" for offer in offers)
            raise ConfigError(f"the {_kind(group)} {name} is offered by {both}; uninstall one of them")
        try:
            loaded: object = EntryPoint(name, plugin.value, group).load()
        except ModuleNotFoundError as error:
            raise self._missing(group, plugin, error) from error
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the {_kind(group)} {name} of {plugin.distribution} {plugin.version}"
                f" cannot be loaded from {plugin.value}: {error}"
            ) from error
        return loaded

    def _read(self, name: str, distribution: Distribution) -> None:
        points = [point for point in distribution.entry_points if point.group in self._plugins]
        for point in points:
            self._plugins[point.group].append(Plugin(point.name, name, distribution.version, point.value))
        if points:
            self._requires[name] = distribution.requires or []

    def _unknown(self, group: str, name: str, *, third_party: bool) -> str:
        if group == TIERS and name in REMOVED_TIERS:
            return REMOVED_TIERS[name]
        names = list(self.available(group, third_party=third_party))
        text = f"there is no {_kind(group)} {name}; there are: {', '.join(names) or 'none'}"
        if not third_party and (hidden := self.available(group).get(name)):
            return f"{text}; {hidden.distribution} has one, but plugins.third_party is off"
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        return f"{text}; did you mean {close[0]}?" if close else text

    def _missing(
        self, group: str, plugin: Plugin, error: ModuleNotFoundError
    ) -> MissingDependencyError | ConfigError:
        """What to install; a ConfigError where the plug-in's own package is what is not there."""
        module = (error.name or "").partition(".")[0]
        what = f"the {_kind(group)} {plugin.name} of {plugin.distribution} {plugin.version}"
        if not module or module == plugin.value.partition(":")[0].partition(".")[0]:
            return ConfigError(f"{what} cannot be loaded from {plugin.value}: {error}")
        extra = _extra_for(module, plugin.name, self._requires[plugin.distribution])
        package = f"{plugin.distribution}[{extra}]" if extra else module
        return MissingDependencyError(
            f"{what} needs the package {module}, which is not installed: pip install '{package}'"
        )


def _extra_for(module: str, plugin: str, requires: Iterable[str]) -> str | None:
    """The extra that brings `module`: the plug-in's own, where several do or the names are not the same."""
    extras: dict[str, list[str]] = {}
    for requirement in requires:
        if match := re.match(r"\s*([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['\"]([^'\"]+)['\"]", requirement):
            extras.setdefault(match[2], []).append(_normal(match[1]))
    bring = [extra for extra, names in extras.items() if _normal(module) in names]
    own = [extra for extra in bring or extras if extra == plugin]
    return next(iter(own + bring), None)


def _kind(group: str) -> str:
    return _KINDS[group]


def _normal(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
