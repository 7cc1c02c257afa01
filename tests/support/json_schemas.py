<<<<<<< HEAD
"""Random JSON schemas of the kinds that public collections contain."""

from __future__ import annotations

import json
from random import Random

WORDS = (
    "id name title status address street city zip_code country email phone tags items "
    "price amount currency created_at updated_at active enabled score rating type kind "
    "first-name last.name @id $type 名前 größe user config options metadata children"
).split()
VALUES = ("red", "green", "blue", 'a "quoted" value', "back\\slash", "naïve", "", "日本")
PATTERNS = ("^[A-Z]{3}-[0-9]{4}$", "^(foo|bar)+$", "^[a-z]{1,8}$", "^#[0-9a-f]{6}$")
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4")


class Schemas:
    """Makes one schema per seed, at most ``depth`` levels deep."""

    def __init__(self, seed, depth=3):
        self.random = Random(seed)
        self.depth = depth
        self.definitions = {}

    def schema(self):
        random = self.random
        top = self.any_of(self.depth) if random.random() < 0.1 else self.object(self.depth)
        if self.definitions:
            top["$defs"] = self.definitions
        return json.loads(json.dumps(top))

    def value(self, depth):
        leaves = [self.string, self.integer, self.number, self.choice, self.simple]
        nested = [self.object, self.array, self.any_of, self.reference, self.tuple]
        pool = leaves * 2 + nested if depth > 0 else leaves
        return self.random.choice(pool)(depth - 1)

    def object(self, depth):
        random = self.random
        names = random.sample(WORDS, random.randint(0 if depth < 2 else 1, 4))
        schema = {
            "type": "object",
            "properties": {name: self.value(depth) for name in names},
            "required": random.sample(names, random.randint(0, len(names))),
            "additionalProperties": False,
        }
        if random.random() < 0.1:
            schema["patternProperties"] = {"^[a-z]{1,6}$": {"type": "boolean"}}
            schema["maxProperties"] = 1 + len(names)
            schema["properties"] = {}
            schema["required"] = []
        if random.random() < 0.3:
            schema["description"] = "Some text that does not matter"
        return schema

    def array(self, depth):
        least = self.random.randint(0, 2)
        most = least + self.random.randint(0, 2)
        return {
            "type": "array",
            "items": self.value(depth),
            "minItems": least,
            "maxItems": most,
        }

    def tuple(self, depth):
        items = [self.value(depth) for _ in range(self.random.randint(1, 3))]
        return {
            "type": "array",
            "prefixItems": items,
            "items": False,
            "minItems": len(items),
        }

    def any_of(self, depth):
        branches = [self.value(depth) for _ in range(self.random.randint(1, 3))]
        return {"anyOf": branches}

    def reference(self, depth):
        name = f"part{self.random.randint(0, 2)}"
        if name not in self.definitions:
            self.definitions[name] = True  # no cycles: these may be endless
            self.definitions[name] = self.value(0)
        return {"$ref": f"#/$defs/{name}"}

    def string(self, _depth):
        random = self.random
        kind = random.random()
        if kind < 0.25:
            return {"type": "string", "pattern": random.choice(PATTERNS), "maxLength": 12}
        if kind < 0.5:
            return {"type": "string", "format": random.choice(FORMATS), "maxLength": 40}
        least = random.randint(0, 5)
        return {
            "type": "string",
            "minLength": least,
            "maxLength": least + random.randint(0, 20),
        }

    def integer(self, _depth):
        low = self.random.randint(-1_000, 1_000)
        bounds = [
            {"minimum": low, "maximum": low + self.random.randint(0, 5_000)},
            {"exclusiveMinimum": low, "exclusiveMaximum": low + 10},
        ]
        return {"type": "integer", **self.random.choice(bounds)}

    def number(self, _depth):
        low = self.random.randint(-50, 50) / 4
        return {"type": "number", "minimum": low, "maximum": low + 10}

    def choice(self, _depth):
        if self.random.random() < 0.3:
            return {"const": self.random.choice([*VALUES, 0, 1.5, None, True, [1, 2]])}
        return {"enum": self.random.sample([*VALUES, 1, False], self.random.randint(1, 5))}

    def simple(self, _depth):
        kinds = self.random.choice(["boolean", "null", ["boolean", "null"]])
        return {"type": kinds}


def schemas(count, start=0):
    return [Schemas(seed).schema() for seed in range(start, start + count)]
=======
"""Hypothesis strategies for JSON values: of a schema, close to one, and any."""

from __future__ import annotations

from hypothesis import strategies as st

TEXTS = st.text(max_size=8)

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def values(schema, components):
    """Return values of a schema, as ``msgspec`` describes types."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: values(components[name], components))
    if "anyOf" in schema:
        return st.one_of(*(values(each, components) for each in schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    return KINDS[schema.get("type", "any")](schema, components)


def _number(schema, _):
    least = schema.get("minimum", schema.get("exclusiveMinimum", -1e3))
    most = schema.get("maximum", 1e3)
    is_open = "exclusiveMinimum" in schema
    return st.floats(least, most, exclude_min=is_open, allow_nan=False)


def _integer(schema, _):
    return st.integers(schema.get("minimum", -1000), schema.get("maximum", 1000))


def _array(schema, components):
    least, most = schema.get("minItems", 0), min(schema.get("maxItems", 3), 3)
    items = values(schema.get("items", {}), components)
    return st.lists(items, min_size=least, max_size=most)


def _object(schema, components):
    fields = schema.get("properties")
    if fields is None:
        return st.dictionaries(TEXTS, ANY, max_size=2)
    required = {
        name: values(fields[name], components) for name in schema.get("required", ())
    }
    optional = {
        name: values(each, components)
        for name, each in fields.items()
        if name not in required
    }
    some = st.sets(st.sampled_from(sorted(optional)), max_size=4) if optional else None
    if some is None:
        return st.fixed_dictionaries(required)
    return some.flatmap(
        lambda names: st.fixed_dictionaries(
            {**required, **{name: optional[name] for name in names}}
        )
    )


KINDS = {
    "any": lambda _schema, _components: ANY,
    "null": lambda _schema, _components: st.none(),
    "boolean": lambda _schema, _components: st.booleans(),
    "string": lambda schema, _: st.text(min_size=schema.get("minLength", 0), max_size=8),
    "number": _number,
    "integer": _integer,
    "array": _array,
    "object": _object,
}


@st.composite
def damaged(draw, valid):
    """Return values close to valid ones: a field replaced, removed or added."""
    body = dict(draw(valid))
    name = draw(st.sampled_from(sorted(body)) | TEXTS) if body else draw(TEXTS)
    if draw(st.booleans()):
        body[name] = draw(ANY)
    else:
        body.pop(name, None)
    return body
>>>>>>> h/serve
