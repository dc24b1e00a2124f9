"""A tier and a layer around it, as the config names them: by entry point, with options of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from lmcache_async.config.explain import Origin, disagree
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

    _origin: Origin | None = PrivateAttr(default=None)

    @property
    def origin(self) -> Origin:
        """Where the plug-in was configured, with the lines of its options."""
        return self._origin or Origin(f"{self.kind} {self.id}")

    @property
    def where(self) -> str:
        """The same as text, for messages."""
        return self.origin.at(())

    def placed(self, origin: Origin) -> Self:
        """The same plug-in, configured there."""
        spec = self.model_copy()
        spec._origin = origin
        return spec

    def __eq__(self, other: object) -> bool:
        """Whether it is the same plug-in with the same options, wherever it was configured."""
        return isinstance(other, type(self)) and self.model_dump() == other.model_dump()

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
                raise disagree("it is given twice, beside `options` and inside it", twice[0])
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

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        seen: dict[str, int] = {}
        for index, layer in enumerate(self.layers or ()):
            if (first := seen.setdefault(layer.id, index)) != index:
                raise disagree(
                    f"layers[{first}] and layers[{index}] both have the id {layer.id!r};"
                    " give one of them another `id`",
                    f"layers.{index}.id",
                )
        return self
