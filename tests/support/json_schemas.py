"""Random JSON schemas of the kinds that public collections contain."""

from __future__ import annotations

import json
from random import Random

WORDS = [
    "id",
    "name",
    "title",
    "status",
    "address",
    "street",
    "city",
    "zip_code",
    "country",
    "email",
    "phone",
    "tags",
    "items",
    "price",
    "amount",
    "currency",
    "created_at",
    "updated_at",
    "active",
    "enabled",
    "score",
    "rating",
    "type",
    "kind",
    "first-name",
    "last.name",
    "@id",
    "$type",
    "名前",
    "größe",
    "user",
    "config",
    "options",
    "metadata",
    "children",
]
VALUES = (
    "red",
    "green",
    "blue",
    'a "quoted" value',
    "back\\slash",
    "naïve",
    "",
    "日本",
)
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
        top = (
            self.any_of(self.depth)
            if random.random() < 0.1
            else self.object(self.depth)
        )
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
            return {
                "type": "string",
                "pattern": random.choice(PATTERNS),
                "maxLength": 12,
            }
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
        return {
            "enum": self.random.sample([*VALUES, 1, False], self.random.randint(1, 5))
        }

    def simple(self, _depth):
        kinds = self.random.choice(["boolean", "null", ["boolean", "null"]])
        return {"type": kinds}


def schemas(count, start=0):
    return [Schemas(seed).schema() for seed in range(start, start + count)]
