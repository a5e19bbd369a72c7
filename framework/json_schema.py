"""The schema of a config file as JSON Schema (draft 2020-12), for editors that complete and check YAML.

It says what stands where, of which type, and for which strategy and optimizer; sums, paths and the arguments of classes
are for `shardlight check`. Any value may also be an interpolation, ${vars.NAME}.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union

from shardlight.framework.classes import ClassConfig
from shardlight.framework.optim import DEFAULTS
from shardlight.framework.resolve import SHORT
from shardlight.framework.schema import SECTIONS, Config, OptimizerConfig, StrategyConfig, field_docs
from shardlight.strategies.options import ONLY_FOR, OPTIONS

Schema = dict[str, Any]
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null", Path: "string"}
_INTERPOLATION: Schema = {"$ref": "#/$defs/interpolation"}
_OPTIONAL_SECTIONS = ("run", "vars", "callbacks", "strategy", "trainer", "checkpoint", "extends")
"""Sections that may be empty: null stands for their defaults."""


def config_schema() -> Schema:
    """Makes the schema of a whole config file."""
    schema = _dataclass(Config)
    docs = field_docs(Config)
    properties = schema["properties"]
    for name in _OPTIONAL_SECTIONS:
        properties[name] = _or(properties[name], {"type": "null"})
    properties["extends"] = _or({"type": "string"}, properties["extends"])
    for name in SHORT:
        properties[name] = _or({"type": "string"} if name != "strategy" else {"enum": [*OPTIONS]}, properties[name])
    for name, doc in docs.items():
        properties[name]["description"] = doc
    needed = {"module": ["class"], "data": ["class"], "strategy": ["name"]}
    needed |= {name: _required(cls) for name, cls in SECTIONS.items()}
    rules = {name: {"if": {"type": "object"}, "then": {"required": keys}} for name, keys in needed.items() if keys}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of shardlight",
        **schema,
        # What must be there may also come from a file that this one extends.
        "if": {"not": {"required": ["extends"]}},
        "then": {"properties": rules},
        "$defs": {"interpolation": {"type": "string", "pattern": r"\$\{.+\}"}, "options": _every()},
    }


def _dataclass(cls: type) -> Schema:
    """A mapping with the fields of a dataclass and no others."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    properties = {}
    for field in dataclasses.fields(cls):
        item = _type(hints[field.name])
        if field.name in docs:
            item["description"] = docs[field.name]
        if field.default is not dataclasses.MISSING and not dataclasses.is_dataclass(field.default):
            item["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
        properties[field.name] = item
    made = {"type": "object", "description": inspect.getdoc(cls), "properties": properties}
    if cls is OptimizerConfig:
        made["allOf"] = _per_optimizer()
    return {**made, "additionalProperties": False}


def _required(cls: type) -> list[str]:
    fields = [field for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    return [field.name for field in fields if field.default_factory is dataclasses.MISSING]


def _type(wanted: Any) -> Schema:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is ClassConfig:
        return _class_block()
    if wanted is StrategyConfig:
        return _strategy()
    if dataclasses.is_dataclass(wanted):
        return _dataclass(typing.cast(type, wanted))
    if origin in (Union, types.UnionType):
        return _or(*map(_type, arguments))
    if origin is Literal:
        return _or({"enum": [*arguments]}, _INTERPOLATION)
    if wanted in _SCALARS:
        item: Schema = {"type": _SCALARS[wanted]}
        if wanted is float:
            # 3e-4 is text to YAML 1.1, and a number here.
            item = _or(item, {"type": "string", "pattern": r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"})
            return _or(item, _INTERPOLATION)
        return item if item["type"] in ("string", "null") else _or(item, _INTERPOLATION)
    if origin is tuple:
        many = {} if arguments[-1] is Ellipsis else {"minItems": len(arguments), "maxItems": len(arguments)}
        return _or({"type": "array", "items": _type(arguments[0]), **many}, _INTERPOLATION)
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    return {}


def _or(*choices: Schema) -> Schema:
    """Any of the choices, flat and each once.

    [Note: where an editor points] A fault inside a choice of `anyOf` is told at the place of the choice. What a
    mapping or a list has to be like says nothing about other values, so it stands beside the choice, and its faults
    are told at theirs.
    """
    flat: list[Schema] = []
    beside: Schema = {}
    for choice in choices:
        rest = {key: value for key, value in choice.items() if key not in ("anyOf", "type")}
        if "anyOf" in choice or choice.get("type") in ("object", "array"):
            beside |= rest
            items = choice.get("anyOf", [{"type": choice.get("type")}])
        else:
            items = [choice]
        flat += [item for item in items if item not in flat]
    return {**beside, "anyOf": flat}


def _class_block() -> Schema:
    path = {"type": "string", "description": "Import path, such as my_project.model.LanguageModel.", "pattern": r"\."}
    return {"type": "object", "properties": {"class": path}}


def _strategy() -> Schema:
    """The options of the strategy that is named, which is what an editor proposes; those of all where none is."""
    rules = [_named(name, {"properties": {"name": True, **_options(name)}}) for name in OPTIONS]
    named = {"properties": {"name": {"enum": [*OPTIONS]}}, "required": ["name"]}
    every = {option: _option(option) for option in _every()}
    rules.append({"if": {"not": named}, "then": {"properties": {"name": True, **every}}})
    for rule in rules:
        rule["then"]["additionalProperties"] = False
    name = {"enum": [*OPTIONS], "description": field_docs(StrategyConfig)["name"]}
    return {"type": "object", "properties": {"name": _or(name, _INTERPOLATION)}, "allOf": rules}


def _every() -> Schema:
    """The options of all strategies, each once."""
    return {option: item for kind in OPTIONS.values() for option, item in _dataclass(kind)["properties"].items()}


def _option(option: str) -> Schema:
    return {"$ref": f"#/$defs/options/{option}"}


def _options(name: str) -> Schema:
    """Those of a strategy. What means nothing to it may have its default, and is not proposed."""
    own, every = _dataclass(OPTIONS[name])["properties"], _every()
    found = {option: _option(option) if item == every[option] else item for option, item in own.items()}
    for option, (strategies, _) in ONLY_FOR.items():
        if name not in strategies:
            found[option] = {**_only(own[option]["default"]), "doNotSuggest": True}
    return found


def _per_optimizer() -> list[Schema]:
    optional = [field.name for field in dataclasses.fields(OptimizerConfig) if field.default is None]
    return [_when(name, {key: None for key in optional if key not in own}) for name, own in DEFAULTS.items()]


def _when(name: str, unset: Mapping[str, Any]) -> Schema:
    """With this `name`, some keys have no other value than the one given here, or null."""
    return _named(name, {"properties": {key: _only(value) for key, value in unset.items()}})


def _only(value: Any) -> Schema:
    return {"type": "null"} if value is None else {"enum": [None, value]}


def _named(name: str, then: Schema) -> Schema:
    return {"if": {"properties": {"name": {"const": name}}, "required": ["name"]}, "then": then}
