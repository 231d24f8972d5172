"""Small rules of large automata: what a client may send to occupy a server."""

from __future__ import annotations

from typing import Any


def hostile_rules() -> dict[str, dict[str, Any]]:
    """Return rules of ``structured`` by name; each is at most some 100 KB of JSON."""
    schemas: dict[str, Any] = {
        "any_of_patterns": {"anyOf": [_string(f"[a-z]{{1,{n}}}{n}") for n in range(1, 300)]},
        "nested_repeats": _string("^((a{0,100}){0,100}){0,100}$"),
        "nested_all_of": _nested_all_of(41),
        "objects": _objects(100, 100),
        "optional_letters": _string("(1 )?" * 3000),
        "deep_nesting": _nested({"type": "string"}, 300),
        "large_enum": {"enum": [f"{n * 7919:x}-{n}" for n in range(20_000)]},
        "large_counts": {
            "type": "array",
            "items": {"type": "string", "minLength": 2_000},
            "minItems": 40_000,
        },
        "overlapping_one_of": {"oneOf": [_string(f"(a|b)*a(a|b){{{n}}}") for n in range(12, 20)]},
        "recursive_ref": _recursive(8),
        "unicode_classes": _string(r"([^\x00-ÿ]|[ऀ-鿿]|[^a-z가-힯]){1,400}"),
        "exponential": _string("(a|b)*a(a|b){30}"),
        "optional_properties": _counted(60),
    }
    rules = {name: {"json_schema": schema} for name, schema in schemas.items()}
    rules["regex_counts"] = {"regex": "(([a-z]{0,50}x){0,50}y){0,50}"}
    rules["look_around"] = {"regex": "(?=a{0,1000}b)" * 50 + "a*"}
    rules["giant_grammar"] = {"grammar": _grammar(3_000)}
    rules["regex_of_grammar"] = {"grammar": "start: /((a{0,1000}){0,1000}b){0,1000}/"}
    rules["graph"] = {"graph": [[f"{a}", "r", f"{b}"] for a in range(40) for b in range(40)]}
    rules["choice"] = {"choice": [f"{n * 7919 % 100_003:017d}" * 4 for n in range(2_000)]}
    rules["transitions"] = {
        "trie": [[n % 13, n * 7 % 13, n * 11 % 13] for n in range(1_000)],
        "form": "transitions",
    }
    return rules


def _string(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def _nested_all_of(count: int) -> dict[str, Any]:
    """Return definitions each of which names the next one twice."""
    named = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**named, f"d{count}": {"type": "string"}}}


def _objects(outer: int, inner: int) -> dict[str, Any]:
    fields = {f"p{i}": {"type": "number"} for i in range(inner)}
    table = {"type": "object", "properties": fields}
    return {"type": "object", "properties": {f"o{i}": table for i in range(outer)}}


def _nested(schema: Any, depth: int) -> Any:
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _recursive(width: int) -> dict[str, Any]:
    """Return a tree each of whose nodes holds itself in every property."""
    node = {"type": "object", "properties": {f"c{i}": {"$ref": "#/$defs/n"} for i in range(width)}}
    return {"$ref": "#/$defs/n", "$defs": {"n": node}}


def _counted(count: int) -> dict[str, Any]:
    """Return an object whose optional properties have values of two kinds, and are counted."""
    value = {"oneOf": [{"type": "number", "multipleOf": 9973}, {"type": "integer", "maximum": 7}]}
    fields = {f"p{i}": value for i in range(count)}
    return {"type": "object", "properties": fields, "minProperties": count // 2}


def _grammar(count: int) -> str:
    """Return rules each of which names two others, thousands of them."""
    rules = [f'r{n}: r{(n * 7 + 1) % count} r{(n * 5 + 2) % count} | "{n}"' for n in range(count)]
    return "\n".join(["start: r0", *rules])
