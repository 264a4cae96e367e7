"""The configuration as a JSON schema, out of what its dataclasses declare: for editors, and whoever checks a file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any

from vllm_specrollout.config.budgets import OPTIONS
from vllm_specrollout.config.by_name import QUALIFIED
from vllm_specrollout.config.checks import Declared, declared
from vllm_specrollout.config.engine import SpecRolloutConfig

_QUALIFIED = {"type": "string", "pattern": f"^{QUALIFIED}$"}
# a class of the user's with its options
_NAMED = {"type": "object", "properties": {"name": _QUALIFIED}, "required": ["name"]}
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}


def schema() -> dict[str, Any]:
    """What `--spec-rollout` takes. It says of single values what can be; what of them goes together, an engine says."""
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "vllm-specrollout"}
    return top | _object(SpecRolloutConfig)


def field_docs(cls: type) -> dict[str, str]:
    """The text below each field: Python keeps it in the source alone."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for node, after in zip(body, body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[node.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return docs


def _object(cls: type, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Args:
    extra: keys beside the fields.
    """
    docs, own = field_docs(cls), {}
    needed = list(extra or {})
    for field in dataclasses.fields(cls):
        if field.name not in declared(cls):
            continue
        value = _value(declared(cls)[field.name])
        if (cls, field.name) == (SpecRolloutConfig, "budget"):
            value = _budget()
        if (cls, field.name) == (SpecRolloutConfig, "drafters"):
            value["items"] = {"anyOf": [value["items"], _NAMED]}
        default = field.default
        if field.default_factory is not dataclasses.MISSING and "properties" not in value:
            default = field.default_factory()
        if default is not dataclasses.MISSING:
            value["default"] = json.loads(json.dumps(default))
        elif field.default_factory is dataclasses.MISSING:
            needed.append(field.name)
        if field.name in docs:
            value["description"] = docs[field.name]
        own[field.name] = value
    found = {"type": "object", "properties": {**(extra or {}), **own}, "additionalProperties": False}
    if needed:
        found["required"] = needed
    return {"description": " ".join((inspect.getdoc(cls) or "").split()), **found}


def _value(one: Declared) -> dict[str, Any]:
    if one.nested is not None:
        return _object(one.nested)
    if one.item is not None:
        return {"type": "array", "items": _value(one.item)}
    # to a schema, a number may be whole
    names = [_NAMES[kind] for kind in _NAMES if kind in one.types and not (kind is int and float in one.types)]
    kinds = [*names, *(["null"] if one.is_optional else [])]
    found: dict[str, Any] = {"type": kinds if len(kinds) > 1 else kinds[0]}
    for rule in one.rules:
        found |= rule.schema
    return found


def _budget() -> dict[str, Any]:
    """A name, or an object with it and its options."""
    objects = [_object(options, {"name": {"const": name}}) for name, options in OPTIONS.items()]
    return {"anyOf": [{"enum": list(OPTIONS)}, _QUALIFIED, *objects, _NAMED]}
