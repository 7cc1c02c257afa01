"""What a checkpoint says about its KV cache: fp8, with a scale per layer.

compressed-tensors has ``kv_cache_scheme``, modelopt also ``kv_cache_quant_algo``. Their
scales are factors: a cached number times the scale is the key or value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.checkpoints.files.tensor_file import show
from inl.dtypes import widen
from inl.errors import CheckpointError
from inl.spec.cache import KvScales

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint

FIELD: Final = "quantization_config"
"""Field of a model's config that describes matrices that are stored quantized."""

SCHEME, ALGORITHM = "kv_cache_scheme", "kv_cache_quant_algo"
ACCEPTED: Final = {
    "num_bits": (8,), "type": ("float",), "strategy": (None, "tensor"),
    "symmetric": (None, True), "dynamic": (None, False),
}  # fmt: skip
"""Supported values of the options of a scheme."""

SCALE: Final = re.compile(
    r"layers\.(\d+)\.(?:\w+\.)*?(?:(?:([kv])_proj\.)?([kv])_scale|(kv)_scale"
    r"|([kv])_proj\.output_scale)$"
)
SCALE_DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class CacheScheme:
    """The cache that a checkpoint was calibrated for."""

    asked_by: str = ""
    """Config field that asks for a cache in fp8; empty if none does."""
    scales: Mapping[int, KvScales] = field(default_factory=dict)
    """Scales of each layer; empty if the file has none."""
    unsupported: str = ""
    """Why the scheme of the config cannot be used; empty if it can be, or is absent."""

    def layer_scales(self, layers: tuple[int, ...]) -> tuple[KvScales, ...]:
        """Return the scales of ``layers``; empty if the file has none.

        Raises :class:`CheckpointError` for a layer without scales among others.
        """
        if not self.scales:
            return ()
        missing = [str(layer) for layer in layers if layer not in self.scales]
        if missing:
            raise CheckpointError(
                f"KV cache: found k_scale and v_scale of {len(self.scales)} layers, "
                f"none of layer {', '.join(missing[:5])}; accepted: those of every "
                "layer that has a cache, or none"
            )
        return tuple(self.scales[layer] for layer in layers)


def cache_scheme(checkpoint: Checkpoint) -> CacheScheme:
    """Read the scheme of a quantized checkpoint, and its scales.

    Raises :class:`CheckpointError` for scales of another shape or dtype, that are not
    above 0, and for keys without values.
    """
    config = checkpoint.config[FIELD]
    name, reason = _asked(config)
    if reason:
        return CacheScheme(unsupported=f"config field '{FIELD}.{name}': {reason}")
    asked = f"{FIELD}.{name}" if name else ""
    return CacheScheme(asked, _scales(checkpoint))


def _asked(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field that asks for a cache, and why it is not supported."""
    scheme, algorithm = config.get(SCHEME), config.get(ALGORITHM)
    if isinstance(scheme, Mapping):
        for option, accepted in ACCEPTED.items():
            value = scheme.get(option)
            if not any(value == one and type(value) is type(one) for one in accepted):
                listed = ", ".join(str(one) for one in accepted if one is not None)
                reason = f"found {option} {show(value)}, accepted: {listed}"
                return SCHEME, reason
        return SCHEME, ""
    if scheme:
        return SCHEME, f"found {show(scheme)}, accepted: an object"
    if algorithm:
        reason = "" if algorithm == "FP8" else f"found {show(algorithm)}, accepted: FP8"
        return ALGORITHM, reason
    return "", ""


def _scales(checkpoint: Checkpoint) -> dict[int, KvScales]:
    found: dict[int, dict[str, float]] = {}
    for name in checkpoint.names():
        if match := SCALE.search(name):
            kind = next(part for part in match.groups()[2:] if part)
            layer = found.setdefault(int(match[1]), {})
            value = _number(checkpoint, name)
            for one in kind:
                if layer.setdefault(one, value) != value:
                    raise CheckpointError(
                        f"tensor {name!r}: found {value:g}, another tensor of layer "
                        f"{match[1]} has {layer[one]:g}; accepted: one {one}_scale"
                    )
    for number, parts in found.items():
        for one, other in ("kv", "vk"):
            if one not in parts:
                raise CheckpointError(
                    f"layer {number}: found {other}_scale without {one}_scale; "
                    "accepted: both, or none"
                )
    return {number: KvScales(**parts) for number, parts in sorted(found.items())}


def _number(checkpoint: Checkpoint, name: str) -> float:
    dtype, shape = checkpoint.spec(name)
    if dtype not in SCALE_DTYPES or shape not in ((), (1,), (1, 1)):
        raise CheckpointError(
            f"tensor {name!r}: found {dtype}{list(shape)}, accepted: one number per "
            f"layer, of {', '.join(SCALE_DTYPES)}"
        )
    value = float(widen(checkpoint.tensor(name)).reshape(()))
    if not (np.isfinite(value) and value > 0):
        raise CheckpointError(
            f"tensor {name!r}: found {value:g}, accepted: a finite number above 0"
        )
    return value
