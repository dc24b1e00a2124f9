"""Registry of tiers, stages and layers by entry point. Plug-ins are imported on use."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, TypeVar

from lmcache_async.errors import ConfigError, MissingDependencyError, UnknownPluginError

T = TypeVar("T")

TIERS = "lmcache_async.tiers"
STAGES = "lmcache_async.stages"
LAYERS = "lmcache_async.layers"
DISTRIBUTION = "lmcache-async"
_KINDS = {TIERS: "tier", STAGES: "stage", LAYERS: "layer"}

REMOVED_TIERS = {
    "peer": "the tier peer and the daemon's server for it were removed in version 0.2;"
    " use the tier valkey, mooncake or s3 to share records between hosts",
}
"""Error messages for the tiers of earlier versions, by name."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """Metadata of one plug-in."""

    name: str
    distribution: str
    version: str
    value: str  # `package.module:Class`

    @property
    def bundled(self) -> bool:
        return self.distribution == DISTRIBUTION


class Registry:
    """Plug-ins that were installed when the registry was created.

    If the path contains several distributions of one name, only the first is used, as by Python's imports.
    """

    def __init__(self, path: Sequence[str] | None = None) -> None:
        """Read the metadata on `path`, or on `sys.path` if it is None. No plug-in is imported."""
        self._plugins: dict[str, list[Plugin]] = {group: [] for group in _KINDS}
        self._requires: dict[str, list[str]] = {}
        context: dict[str, Any] = {} if path is None else {"path": list(path)}
        # Parsing the metadata of all installed distributions takes 0.2 s, and most have no plug-ins.
        with_plugins = [each for each in distributions(**context) if _mentions_plugins(each)]
        for name in dict.fromkeys(_normal(each.name or "") for each in with_plugins):
            if name:
                self._read(name, next(iter(distributions(name=name, **context))))

    def available(self, group: str, *, third_party: bool = True) -> dict[str, Plugin]:
        """Return the plug-ins of a group by name. `third_party` includes those of other distributions.

        If several distributions offer a name, the bundled plug-in takes precedence, then the first
        distribution in alphabetical order.
        """
        found: dict[str, Plugin] = {}
        for plugin in sorted(
            self._plugins[group], key=lambda plugin: (not plugin.bundled, plugin.distribution)
        ):
            if plugin.bundled or third_party:
                found.setdefault(plugin.name, plugin)
        return dict(sorted(found.items()))

    def load(self, group: str, name: str, *, third_party: bool = True) -> object:
        """Import a plug-in and return the object of its entry point.

        Raises:
            UnknownPluginError: There is no plug-in with this name.
            MissingDependencyError: The plug-in imports a package that is not installed.
            ConfigError: Its module or object does not exist, or several third-party distributions offer it.
        """
        plugin = self.available(group, third_party=third_party).get(name)
        if plugin is None:
            raise UnknownPluginError(self._unknown(group, name, third_party=third_party))
        offers = [other for other in self._plugins[group] if other.name == name]
        if not plugin.bundled and len(offers) > 1:
            both = " and ".join(f"{offer.distribution} {offer.version}" for offer in offers)
            raise ConfigError(f"the {_KINDS[group]} {name} is offered by {both}; uninstall one of them")
        try:
            loaded: object = EntryPoint(name, plugin.value, group).load()
        except ModuleNotFoundError as error:
            raise self._missing(group, plugin, error) from error
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the {_KINDS[group]} {name} of {plugin.distribution} {plugin.version}"
                f" cannot be loaded from {plugin.value}: {error}"
            ) from error
        return loaded

    def load_class(
        self, group: str, name: str, base: type[T], *, where: str = "", third_party: bool = True
    ) -> type[T]:
        """Import a plug-in as in `load`. Raise ConfigError at `where` if it is not a subclass of `base`."""
        loaded = self.load(group, name, third_party=third_party)
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            place = f"{where}: " if where else ""
            raise ConfigError(f"{place}{name!r} is {loaded!r}, which is not a subclass of {base.__name__}")
        return loaded

    def _read(self, name: str, distribution: Distribution) -> None:
        points = [point for point in distribution.entry_points if point.group in self._plugins]
        if not points:
            return
        version = distribution.version  # parses the metadata
        for point in points:
            self._plugins[point.group].append(Plugin(point.name, name, version, point.value))
        self._requires[name] = distribution.requires or []

    def _unknown(self, group: str, name: str, *, third_party: bool) -> str:
        if group == TIERS and name in REMOVED_TIERS:
            return REMOVED_TIERS[name]
        names = list(self.available(group, third_party=third_party))
        text = f"there is no {_KINDS[group]} {name}; there are: {', '.join(names) or 'none'}"
        if not third_party and (hidden := self.available(group).get(name)):
            return f"{text}; {hidden.distribution} has one, but plugins.third_party is off"
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        return f"{text}; did you mean {close[0]}?" if close else text

    def _missing(
        self, group: str, plugin: Plugin, error: ModuleNotFoundError
    ) -> MissingDependencyError | ConfigError:
        """Return an error that names the package to install; a ConfigError if the plug-in's own package is missing."""
        module = (error.name or "").partition(".")[0]
        what = f"the {_KINDS[group]} {plugin.name} of {plugin.distribution} {plugin.version}"
        if not module or module == plugin.value.partition(":")[0].partition(".")[0]:
            return ConfigError(f"{what} cannot be loaded from {plugin.value}: {error}")
        extra = _extra_for(module, plugin.name, self._requires[plugin.distribution])
        package = f"{plugin.distribution}[{extra}]" if extra else module
        return MissingDependencyError(
            f"{what} needs the package {module}, which is not installed: pip install '{package}'"
        )


def _extra_for(module: str, plugin: str, requires: Iterable[str]) -> str | None:
    """Return the extra that installs `module`; of several, the one named `plugin` is preferred.

    If no extra installs it, return the extra named `plugin`, or None if there is none.
    """
    extras: dict[str, list[str]] = {}
    for requirement in requires:
        if match := re.match(r"\s*([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['\"]([^'\"]+)['\"]", requirement):
            extras.setdefault(match[2], []).append(_normal(match[1]))
    bring = [extra for extra, names in extras.items() if _normal(module) in names]
    own = [extra for extra in bring or extras if extra == plugin]
    return next(iter(own + bring), None)


def _mentions_plugins(distribution: Distribution) -> bool:
    text = distribution.read_text("entry_points.txt") or ""
    return any(group in text for group in _KINDS)


def _normal(name: str) -> str:
    """Return the normalised name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
