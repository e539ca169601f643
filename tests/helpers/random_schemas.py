"""Random JSON schemas, such as clients send."""

import random
from typing import Any


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """What clients send: objects of all kinds of values, some optional, unions, references, limits."""
    leaves = [_string, _integer, _number, _enum, _constant, lambda _: {"type": "boolean"}, lambda _: {"type": "null"}]
    if depth >= 3 or (depth and rng.random() < 0.6):
        return rng.choice(leaves)(rng)
    if depth and rng.random() < 0.3:
        low = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if depth and rng.random() < 0.3:
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
    names = rng.sample(["name", "age", "x y", "ключ", 'q"uote', "items", "type", "a", "b", "ref"], rng.randint(1, 4))
    schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "additionalProperties": False,
    }
    schema["required"] = [name for name in names if rng.random() < 0.8]
    if depth == 0 and rng.random() < 0.3:
        schema["$defs"] = {"Point": {"type": "object", "properties": {"x": _integer(rng)}, "required": ["x"]}}
        schema["$defs"]["Point"]["additionalProperties"] = False
        schema["properties"]["point"] = {"$ref": "#/$defs/Point"}
        schema["required"].append("point")
    return schema


def _string(rng: random.Random) -> dict[str, Any]:
    limits = [{"maxLength": rng.randint(0, 12)}, {"minLength": 2, "maxLength": 9}, {"pattern": "^[a-c]{1,4}-[0-9]{2}$"}]
    limits += [{"format": "date"}, {"format": "uuid"}, {"format": "ipv4"}]
    return {"type": "string", **rng.choice(limits)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-2000, 2000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random) -> dict[str, Any]:
    return {"type": "number", "minimum": 0, rng.choice(["maximum", "exclusiveMaximum"]): rng.randint(1, 9)}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", "dark\nblue", 7, None, True, "€"], rng.randint(1, 4))}


def _constant(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 3, "a\\b"])}
