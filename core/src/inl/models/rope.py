"""Rotary position embedding in Hugging Face configs, as transformers reads it.

``rope_scaling`` replaces ``rope_parameters``; base and rotating share that neither has
come from the top level; the original context of the top level replaces a nested one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models.config import (
    context_length,
    fields_of,
    flag,
    missing,
    number,
    refuse_unless,
    whole,
)
from inl.models.fields import Fields
from inl.ops.rope import RopeScaling

THETA: Final = 10000.0
"""Default base frequency of most families."""
ORIGINAL: Final = "original_max_position_embeddings"
COMMON: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL)
"""Names that fields of any kind may have."""
SECTIONS: Final = ("mrope_section", "mrope_interleaved")
"""Fields of a rotation by positions along several axes."""
AXES: Final = 3
"""Axes of the positions of images and text: time, height and width."""
FULL, LOCAL = "full_attention", "sliding_attention"
"""Kinds of layers in ``rope_parameters``."""


class Rope(NamedTuple):
    """Rotation of queries and keys."""

    theta: float
    scaling: RopeScaling
    max_tokens: int
    """Context length in tokens, with the scaling."""


def read_rope(hf: Mapping[str, Any], *, theta: float = THETA) -> Rope:
    """Read the rotation of heads that rotate fully. theta: the family's default.

    Raises :class:`CheckpointError` naming the field for an unknown kind and for heads
    that rotate in part.
    """
    rope = rope_fields(hf, theta=theta)
    share = number(rope, "partial_rotary_factor", 1.0)
    if share != 1.0:
        raise CheckpointError(
            f"config field 'partial_rotary_factor': found {share!r}, accepted: 1.0"
        )
    return scaled_rope(rope, hf)


def scaled_rope(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> Rope:
    """Read base, scaling and context of ``rope``, the fields of :func:`rope_fields`."""
    kind = kind_of(rope)
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(
            f"config field 'rope_scaling.rope_type': found {kind!r:.80}, "
            f"accepted: {', '.join(KINDS)}"
        )
    parse, names = KINDS[kind]
    note_unknown(rope, hf, (*names, *SECTIONS))
    base, tokens = number(rope, "rope_theta", THETA), context_length(hf)
    scaling = parse(rope, hf)
    if kind == "yarn":
        tokens = max(tokens, int(scaling.factor * scaling.original))
    if rope.get(SECTIONS[0]) is not None:
        scaling = scaling._replace(axes=axes_of(rope))
    return Rope(base, scaling, tokens)


def axes_of(rope: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the axis by which each plane turns; raises :class:`CheckpointError`.

    ``mrope_section`` has the planes of each axis, one axis after the other or
    interleaved, where those of axis 0 fill the rest.
    """
    name = SECTIONS[0]
    sizes = rope[name]
    if (
        not isinstance(sizes, list | tuple)
        or len(sizes) != AXES
        or not all(type(size) is int and size >= 0 for size in sizes)
    ):
        raise CheckpointError(
            f"config field 'rope_scaling.{name}': found {show(sizes)}, expected {AXES} "
            "numbers of planes"
        )
    if not flag(rope, SECTIONS[1], False):
        return tuple(axis for axis, size in enumerate(sizes) for _ in range(size))
    axes = [0] * sum(sizes)
    for axis in range(1, AXES):
        for plane in range(axis, min(AXES * sizes[axis], len(axes)), AXES):
            axes[plane] = axis
    return tuple(axes)


def kind_of(rope: Mapping[str, Any]) -> Any:
    """Return the kind of scaling, "default" if there is none."""
    return rope.get("rope_type", rope.get("type", "default"))


def rope_fields(hf: Mapping[str, Any], *, theta: float = THETA) -> dict[str, Any]:
    """Return ``rope_scaling`` or else ``rope_parameters``, with top-level fields.

    Raises :class:`CheckpointError` if they differ between kinds of layers.
    """
    scaling, parameters = fields_of(hf, "rope_scaling"), hf.get("rope_parameters")
    rope = dict(scaling or fields_of(hf, "rope_parameters"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(
            f"config field 'rope_parameters': found {show(rope)}, accepted: the same "
            "fields for every layer"
        )
    base = _given(hf, "rope_theta", theta)
    if scaling and "rope_theta" not in scaling and isinstance(parameters, Mapping):
        old = parameters.get("rope_theta")
        if old is not None and old != base:
            ignored(hf, f"rope_parameters.rope_theta = {show(old)} (rope_scaling has "
                        f"none, which makes it {show(base)})")  # fmt: skip
    rope.setdefault("rope_theta", base)
    share = hf.get("partial_rotary_factor")
    if share is not None:
        rope.setdefault("partial_rotary_factor", share)
    if hf.get(ORIGINAL) is not None:
        rope[ORIGINAL] = hf[ORIGINAL]
    return rope


def local_ropes(
    hf: Mapping[str, Any], theta: float, local_theta: float, local_name: str = ""
) -> tuple[Rope, Rope]:
    """Return the rotations of layers without and with a window.

    ``rope_parameters`` has fields for each kind of layer, or else ``rope_scaling`` is
    that of layers without a window. A family whose kinds share a base may have its
    fields without a kind, as of layers without a window. theta, local_theta: the
    family's defaults. local_name: top-level field with the base of layers with a
    window, if there is one.
    """
    nested = fields_of(hf, "rope_parameters")
    if not local_name and nested and not {FULL, LOCAL} & set(nested):
        # The fields of one rotation: layers with a window share its base alone.
        base = {name: nested[name] for name in ("rope_theta",) if name in nested}
        nested = {FULL: nested, LOCAL: base}
    scaling = fields_of(hf, "rope_scaling")
    if "type" in scaling and "rope_type" not in scaling:
        raise CheckpointError(
            f"config field 'rope_scaling.type': found {show(scaling['type'])}, which "
            "transformers ignores here, expected rope_type"
        )
    full = {**fields_of(nested, FULL), **scaling}
    local = dict(fields_of(nested, LOCAL))
    flat = sorted(set(nested) - {FULL, LOCAL})
    if flat and not {FULL, LOCAL} <= set(nested):
        raise CheckpointError(
            f"config field 'rope_parameters': found {', '.join(flat)}, accepted: "
            f"fields of {FULL} and {LOCAL}"
        )
    for name in flat:
        ignored(hf, f"rope_parameters.{name}")
    full.setdefault("rope_theta", _given(hf, "rope_theta", theta))
    local.setdefault("rope_theta", _given(hf, local_name, local_theta))
    ropes = full, local
    for rope in ropes:
        if kind_of(rope) in ("yarn", "llama3") and ORIGINAL not in rope:
            raise missing(f"rope_parameters.{ORIGINAL}", "an integer")
        for name, accepted in (("partial_rotary_factor", 1.0), ("truncate", True)):
            refuse_unless(rope, name, accepted)
    return scaled_rope(full, hf), scaled_rope(local, hf)


def _given(hf: Mapping[str, Any], name: str, default: float) -> Any:
    value = hf.get(name)
    return default if value is None else value


def note_unknown(
    rope: Mapping[str, Any], hf: Mapping[str, Any], names: tuple[str, ...]
) -> None:
    """Record the fields of ``rope`` that are neither common nor in ``names``."""
    for name in rope:
        if name not in COMMON and name not in names:
            ignored(hf, f"rope_scaling.{name}")


def ignored(hf: Mapping[str, Any], name: str) -> None:
    """Record that a part of a field is ignored, for the warning."""
    if isinstance(hf, Fields):
        hf.ignored[name] = None


def factor_of(rope: Mapping[str, Any]) -> float:
    """Return the ``factor``; raises :class:`CheckpointError` if it is missing."""
    if rope.get("factor") is None:
        raise missing("rope_scaling.factor", "a number")
    return number(rope, "factor", 1.0)


def original(rope: Mapping[str, Any]) -> int:
    """Return the context length in training; raises :class:`CheckpointError`."""
    if rope.get(ORIGINAL) is None:
        raise missing(f"rope_scaling.{ORIGINAL}", "an integer")
    return whole(rope, ORIGINAL)


def _plain(_rope: Mapping[str, Any], _hf: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling()


def _dynamic(rope: Mapping[str, Any], _hf: Mapping[str, Any]) -> RopeScaling:
    """Scaled only beyond ``max_position_embeddings``, the limit of the context."""
    factor_of(rope)
    return RopeScaling()


def _linear(rope: Mapping[str, Any], _hf: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling("linear", factor_of(rope))


def _llama3(rope: Mapping[str, Any], _hf: Mapping[str, Any]) -> RopeScaling:
    for name in ("low_freq_factor", "high_freq_factor"):
        if rope.get(name) is None:
            raise missing(f"rope_scaling.{name}", "a number")
    low, high = (
        number(rope, "low_freq_factor", 1.0),
        number(rope, "high_freq_factor", 4),
    )
    if high <= low:
        raise CheckpointError(
            f"config field 'rope_scaling.high_freq_factor': found {high:g}, expected "
            f"more than low_freq_factor, {low:g}"
        )
    return RopeScaling("llama3", factor_of(rope), low, high, original(rope))


def _yarn(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> RopeScaling:
    """YaRN (Peng et al., 2023), with the scale of attention of DeepSeek's variant."""
    size = original(rope)
    if "factor" in rope and rope["factor"] is None:
        factor = context_length(hf) / size
    else:
        factor = factor_of(rope)
    low, high = number(rope, "beta_slow", 1.0), number(rope, "beta_fast", 32.0)
    gain = _warmth(rope, factor)
    whole_planes = flag(rope, "truncate", True)
    return RopeScaling(
        "yarn", factor, low, high, size, gain=gain, whole_planes=whole_planes
    )


def _warmth(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor on cosines and sines."""

    def scale(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        weight = number(rope, "mscale", 1.0)
        usual = scale(weight) / scale(number(rope, "mscale_all_dim", 1.0))
    else:
        usual = scale(1.0)
    return number(rope, "attention_factor", usual)


Parser = Callable[[Mapping[str, Any], Mapping[str, Any]], RopeScaling]

KINDS: Final[dict[str, tuple[Parser, tuple[str, ...]]]] = {
    "default": (_plain, ()),
    "linear": (_linear, ("factor",)),
    "dynamic": (_dynamic, ("factor", "alpha")),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": (
        _yarn,
        ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale",
         "mscale_all_dim"),
    ),
}  # fmt: skip
"""Parsers by ``rope_type``, and the names of the fields that they read."""


def rotating_lanes(share: float, dim: int) -> int:
    """Return how many of the ``dim`` lanes of a head rotate; 0 is all of them.

    Raises :class:`CheckpointError` for an odd number.
    """
    lanes = int(dim * share + 1e-6)  # a decimal third may be rounded down
    if share > 1 or lanes % 2 or not lanes:
        raise CheckpointError(
            f"config field 'partial_rotary_factor': found {share!r}, accepted: a "
            f"share that selects an even number of the {dim} lanes of a head"
        )
    return lanes if lanes < dim else 0
