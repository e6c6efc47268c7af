"""Forty JSON schemas of many kinds, each of which a random output can come to an end under."""

from __future__ import annotations

from typing import Any

WORD = {"type": "string", "maxLength": 6}
INT = {"type": "integer"}


def obj(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """A closed object; all its properties are required unless said otherwise."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def array(items: Any, most: int = 3, **more: Any) -> dict[str, Any]:
    """A list of at most `most` items."""
    return {"type": "array", "items": items, "maxItems": most, **more}


NODE = obj(["value"], value=INT, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
TREE = obj(["name"], name=WORD, children=array({"$ref": "#"}, 1))

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": obj(a=INT, b=WORD),
    "one optional": obj(["a"], a=INT, b=WORD),
    "all optional": obj([], a=INT, b=WORD, c={"type": "boolean"}),
    "no properties": obj(),
    "nested": obj(a=obj(b=obj(c=obj(d=INT)))),
    "nested with siblings": obj(a=obj(x=INT, y=INT), b=obj(x=WORD)),
    "enum of strings": obj(colour={"enum": ["red", "green", "blue"]}),
    "enum of kinds": obj(x={"enum": [1, "one", None, True, 1.5]}),
    "enum with quotes": obj(x={"enum": ['a "b"', "c\\d", "e\nf", "é"]}),
    "const": obj(kind={"const": "circle"}, r={"type": "number"}),
    "array of integers": obj(xs=array(INT)),
    "array with bounds": obj(xs=array({"type": "boolean"}, 4, minItems=2)),
    "empty array": obj(xs=array(INT, 0)),
    "array of arrays": obj(m=array(array(INT, 2), 2)),
    "array of objects": obj(rows=array(obj(id=INT, name=WORD), 2)),
    "tuple": obj(t={"type": "array", "prefixItems": [INT, WORD], "items": False, "minItems": 2}),
    "tuple and rest": obj(t={"type": "array", "prefixItems": [INT], "items": WORD, "minItems": 1, "maxItems": 3}),
    "array at the root": array(INT, 3, minItems=1),
    "string at the root": {"type": "string", "maxLength": 8},
    "string lengths": obj(s={"type": "string", "minLength": 2, "maxLength": 4}),
    "pattern": obj(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "pattern without anchors": obj(s={"type": "string", "pattern": "[a-c]{1,3}", "maxLength": 6}),
    "pattern with choices": obj(s={"type": "string", "pattern": "^(yes|no|may be)$"}),
    "pattern with escapes": obj(s={"type": "string", "pattern": "^\\d{1,2}\\.\\d{2}$"}),
    "date": obj(d={"type": "string", "format": "date"}),
    "time and date": obj(d={"type": "string", "format": "date-time"}),
    "uuid": obj(u={"type": "string", "format": "uuid"}),
    "ipv4": obj(ip={"type": "string", "format": "ipv4"}),
    "integer bounds": obj(n={"type": "integer", "minimum": -5, "maximum": 17}),
    "exclusive bounds": obj(n={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}),
    "number bounds": obj(n={"type": "number", "minimum": 0, "maximum": 1}),
    "multiple": obj(n={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    "nullable": obj(a={"type": ["integer", "null"]}, b={"type": ["string", "null"], "maxLength": 4}),
    "union": obj(x={"anyOf": [INT, WORD, {"type": "null"}]}),
    "union of objects": {
        "anyOf": [obj(kind={"const": "a"}, x=INT), obj(kind={"const": "b"}, y={"type": "boolean"})],
    },
    "disjoint oneOf": obj(x={"oneOf": [INT, {"type": "boolean"}]}),
    "all of": {"allOf": [{"type": "object", "properties": {"a": INT}, "required": ["a"]}, obj(a={"maximum": 9})]},
    "reference": {
        **obj(home={"$ref": "#/$defs/place"}, work={"$ref": "#/$defs/place"}),
        "$defs": {"place": obj(x=INT)},
    },
    "list by reference": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "tree by reference": TREE,
}
assert len(SCHEMAS) == 40
