"""Hypothesis strategies for JSON values: of a schema, close to one, and any."""

from __future__ import annotations

from hypothesis import strategies as st

TEXTS = st.text(max_size=8)

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
    ),
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
    "string": lambda schema, _: st.text(
        min_size=schema.get("minLength", 0), max_size=8
    ),
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
