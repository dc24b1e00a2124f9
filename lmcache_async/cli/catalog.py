"""What plug-ins are installed, and what each can do. One that is broken is told of, and harms nobody."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_origin

from pydantic import BaseModel

from lmcache_async.cli.options import Option, options_of
from lmcache_async.errors import LMCacheAsyncError
from lmcache_async.pipeline.stage import describe
from lmcache_async.registry import LAYERS, STAGES, TIERS, Plugin, Registry
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.layers.base import ConfiguredLayer

KINDS = {"tier": TIERS, "layer": LAYERS, "stage": STAGES}
OVERRIDABLE = (
    "bind",
    "contains_many",
    "count_prefix",
    "get_many",
    "put_many",
    "remove",
    "reject",
    "scrub",
    "keys",
    "clear",
    "statistics",
)
"""Methods of a tier that have working defaults."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One plug-in.

    Attributes:
        kind: `tier`, `layer` or `stage`.
        name: As the config names it.
        distribution: Which brings it.
        version: Of that.
        value: Where it lies.
        problem: Why it cannot be used here, and what to do; "" where it can.
        summary: The first line of what it says of itself.
        options: What can be set.
        details: What it can do, by name.
    """

    kind: str
    name: str
    distribution: str
    version: str
    value: str
    problem: str = ""
    summary: str = ""
    options: tuple[Option, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def catalog(registry: Registry) -> list[Entry]:
    """All plug-ins; each is imported."""
    return [
        examine(kind, plugin, registry)
        for kind, group in KINDS.items()
        for plugin in registry.available(group).values()
    ]


def examine(kind: str, plugin: Plugin, registry: Registry) -> Entry:
    """Import a plug-in and look at it."""
    known = (kind, plugin.name, plugin.distribution, plugin.version, plugin.value)
    try:
        target = registry.load(KINDS[kind], plugin.name)
    except LMCacheAsyncError as error:
        return Entry(*known, problem=str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever somebody else's module does
        return Entry(*known, problem=f"it cannot be imported from {plugin.value}: {_short(error)}")
    try:
        options, details = _look(kind, plugin.name, target)
    except Exception as error:  # noqa: BLE001 - as above
        return Entry(*known, problem=_short(error), summary=_summary(target))
    return Entry(*known, summary=_summary(target), options=options, details=details)


def options_type(kind: str, target: Any) -> type[BaseModel] | None:
    """The type of a tier's or a layer's options.

    Raises:
        TypeError: It is none.
    """
    if kind == "stage":
        return None
    wanted: type = Tier if kind == "tier" else ConfiguredLayer
    if not (isinstance(target, type) and issubclass(target, wanted)):
        raise TypeError(f"{target!r} is no subclass of {wanted.__name__}")
    found: Any = getattr(target, "config_type" if kind == "tier" else "options_type")
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise TypeError(f"its options are {found!r}, which is no pydantic model")
    return found


def _look(kind: str, name: str, target: Any) -> tuple[tuple[Option, ...], dict[str, Any]]:
    model = options_type(kind, target)
    if model is None:
        info = describe(name, target)
        wants = inspect.signature(target).parameters if inspect.isclass(target) else ()
        facts = {
            "takes": _type_name(info.takes),
            "gives": _type_name(info.gives),
            "uses": list(wants),
            "per_request": info.per_request,
            "ordered": info.ordered,
        }
        return (), facts
    if kind == "layer":
        return options_of(model), {"fits_arena": target.fits_arena}
    overrides = [method for method in OVERRIDABLE if getattr(target, method) is not getattr(Tier, method)]
    return options_of(model), {"capabilities": _capabilities(target, model), "overrides": overrides}


def _capabilities(target: type[Tier], model: type[BaseModel]) -> dict[str, Any] | None:
    """As they are with default options; None where only real options tell."""
    needed = {
        name: _sample(info.annotation) for name, info in model.model_fields.items() if info.is_required()
    }
    config = model.model_construct(**needed)
    bare = object.__new__(target)
    bare.config = config
    vars(bare)["_config"] = config
    return _asked(lambda: target(config)) or _asked(lambda: bare)


def _asked(make: Callable[[], Tier]) -> dict[str, Any] | None:
    try:
        return asdict(make().capabilities)
    except Exception:  # noqa: BLE001 - it cannot be asked in this way
        return None


def _sample(annotation: Any) -> Any:
    """Something of the kind, for options that have no default."""
    kind = get_origin(annotation) or annotation
    return {int: 1, float: 1.0, str: "", tuple: (None,), list: [None], dict: {}}.get(kind)


def _summary(target: Any) -> str:
    text = inspect.getdoc(target) or ""
    return text.partition("\n")[0]


def _type_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error!s:.300}".replace("\n", " ")
