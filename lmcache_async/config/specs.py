"""A tier and a layer around it, as the config names them: by entry point, with options of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from lmcache_async.config.explain import disagree
from lmcache_async.config.values import Name, Seconds, parse_list, parse_mapping, unless_none


class Section(BaseModel):
    """A frozen record; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PluginSpec(Section):
    """A plug-in by its entry point's name. Keys that are none of the fields are the plug-in's own options.

    They are in no repr: there may be a password among them.
    """

    kind: ClassVar[str] = "plug-in"

    name: Name = Field(description="Name of the entry point.")
    id: Name = Field(default="", description="What it is called in reports; unique. Its name if not given.")
    options: Annotated[Mapping[str, Any], BeforeValidator(parse_mapping)] = Field(
        default_factory=dict, repr=False, description="Its own options, checked against its config type."
    )

    __hash__ = None  # type: ignore[assignment]  # the options are a dict

    @model_validator(mode="before")
    @classmethod
    def _from_name_or_flat(cls, value: object) -> object:
        if isinstance(value, str):
            value = {"name": value}
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(  # noqa: TRY004 - pydantic reads ValueError
                f"expected a {cls.kind}'s name, or a mapping with `name` and the {cls.kind}'s options"
            )
        fields = {key: item for key, item in value.items() if key in cls.model_fields}
        rest = {str(key): item for key, item in value.items() if key not in cls.model_fields}
        if isinstance(name := fields.get("name"), str):
            fields.setdefault("id", name)
        if rest:
            options = parse_mapping(fields.get("options", {}))
            if twice := sorted(options.keys() & rest.keys()):
                raise ValueError(f"expected {twice[0]} once: it is beside `options` and inside it")
            fields["options"] = options | rest
        return fields


class LayerSpec(PluginSpec):
    """One layer around a tier."""

    kind: ClassVar[str] = "layer"

    name: Name = Field(description="Name of the layer's entry point, such as retry or breaker.")
    id: Name = Field(
        default="",
        description="What this layer is called in reports; unique in its tier. Its name if not given.",
    )
    options: Annotated[Mapping[str, Any], BeforeValidator(parse_mapping)] = Field(
        default_factory=dict,
        repr=False,
        description="The layer's own options, checked against its config type.",
    )


def _parse_layers(value: object) -> list[Any] | None:
    value = unless_none(value)
    return None if value is None else parse_list(value)


class TierSpec(PluginSpec):
    """One tier by its entry point's name. Keys that are none of the fields are the tier's own options."""

    kind: ClassVar[str] = "tier"

    name: Name = Field(description="Name of the tier's entry point, such as cpu or disk.")
    id: Name = Field(
        default="", description="What this tier is called in reports; unique. Its name if not given."
    )
    timeout_s: Seconds = Field(default=30.0, description="Longest time of one call to the tier, in seconds.")
    open_timeout_s: Seconds = Field(
        default=60.0, description="Longest time to open the tier at start-up, in seconds."
    )
    layers: Annotated[tuple[LayerSpec, ...] | None, BeforeValidator(_parse_layers)] = Field(
        default=None,
        description="Layers around the tier, outermost first; none means the usual ones, an empty list no layer.",
    )
    options: Annotated[Mapping[str, Any], BeforeValidator(parse_mapping)] = Field(
        default_factory=dict,
        repr=False,
        description="The tier's own options, checked against its config type.",
    )
    _where: str = PrivateAttr(default="")

    @property
    def where(self) -> str:
        """Where the tier was configured, for messages."""
        return self._where or f"tier {self.id}"

    def placed(self, where: str) -> TierSpec:
        """The same tier, saying that it was configured there."""
        tier = self.model_copy()
        tier._where = where
        return tier

    def __eq__(self, other: object) -> bool:
        """Whether it is the same tier, wherever it was configured."""
        return isinstance(other, TierSpec) and self.model_dump() == other.model_dump()

    __hash__ = None  # the options are a dict

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        seen: dict[str, int] = {}
        for index, layer in enumerate(self.layers or ()):
            if (first := seen.setdefault(layer.id, index)) != index:
                raise disagree(
                    f"layers[{first}] and layers[{index}] both have the id {layer.id!r};"
                    " give one of them another `id`",
                    "layers",
                )
        return self
