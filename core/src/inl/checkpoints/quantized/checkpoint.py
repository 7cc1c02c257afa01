"""Checkpoints with a ``quantization_config``: matrices of codes under plain names.

Each matrix ``x.weight`` is stored as several tensors, by which its format is known.
A matrix whose codes and scales fit a block dtype is repacked without loss; any other is
decoded to float32 when it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from inl.checkpoints.blocks.codes import FLOAT8_SCALED
from inl.checkpoints.blocks.encode import encode
from inl.checkpoints.files.tensor_file import show
from inl.checkpoints.quantized.kv_cache_scheme import FIELD, cache_scheme
from inl.checkpoints.quantized.matrix import BLOCK
from inl.checkpoints.quantized.matrix_format import Format, Parts
from inl.checkpoints.quantized.methods import METHODS
from inl.checkpoints.wrapped import WrappedCheckpoint
from inl.dtypes import HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint


def quantized(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with plain names for matrices that its config describes.

    Raises :class:`~inl.errors.CheckpointError` for an unknown ``quant_method``, for
    options of a format that are not supported and for tensors that do not fit it.
    """
    config = checkpoint.config[FIELD]
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{checkpoint.path}: config field {FIELD!r}: found {show(config)}, "
            "expected an object"
        )
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{checkpoint.path}: config field '{FIELD}.quant_method': found "
            f"{show(method)}, accepted: {', '.join(METHODS)}"
        )
    try:
        return QuantizedCheckpoint(checkpoint, METHODS[method](config))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None


@final
class QuantizedCheckpoint(WrappedCheckpoint):
    """Wraps a checkpoint and decodes or repacks its quantized matrices on access."""

    def __init__(
        self, inner: Checkpoint, form: Format, decoded: str | None = None
    ) -> None:
        """decoded: of :meth:`rounded`; ``None`` if nothing may be rounded."""
        super().__init__(inner)
        self._form, self._rounding = form, decoded is not None
        stored = set(inner.names())
        stems = [
            name.removesuffix(form.marker)
            for name in inner.names()
            if name.endswith(form.marker)
        ]
        self._parts = {f"{stem}.weight": self._read(stem, stored) for stem in stems}
        self._stored = {
            name: _kept(form.spec(parts), decoded)
            for name, parts in self._parts.items()
        }
        self._specs = {
            name: (_dtype_of(spec, decoded or "float32"), spec[1])
            for name, spec in self._stored.items()
        }
        taken = {f"{stem}{form.joint}{part}" for stem in stems for part in form.parts}
        self._plain = {
            name: name
            for name in inner.names()
            if name not in taken and not name.endswith(form.ignored)
        }
        self.notes = (*inner.notes, self._note())
        self.cache_scheme = cache_scheme(inner)

    def _read(self, stem: str, stored: set[str]) -> Parts:
        names = {part: f"{stem}{self._form.joint}{part}" for part in self._form.parts}
        return Parts(
            self._inner,
            self._form.name,
            {part: name for part, name in names.items() if name in stored},
            self._rounding,
        )

    def rounded(self, decoded: str) -> Checkpoint:
        return QuantizedCheckpoint(self._inner, self._form, decoded)

    def _note(self) -> str:
        counts = Counter(
            "decoded when they are loaded" if dtype == "float32"
            else f"rounded to {dtype}" if self._stored[name][0] == "float32"
            else f"repacked as {dtype}"
            for name, (dtype, _) in self._specs.items()
        )  # fmt: skip
        listed = (f"{count} matrices {way}" for way, count in counts.items())
        return f"{self._form.name}: {', '.join(listed) or 'no quantized matrices'}"

    def names(self) -> list[str]:
        return [*self._plain, *self._parts]

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name in self._specs:
            return self._specs[name]
        if name not in self._plain:
            raise self.missing(name)
        return self._inner.spec(name)

    def tensor(self, name: str) -> HostArray:
        if name in self._specs:
            return self._decoded(name)
        if name not in self._plain:
            raise self.missing(name)
        return self._inner.tensor(name)

    def _decoded(self, name: str) -> HostArray:
        dtype, _ = self._stored[name]
        try:
            array = self._form.array(self._parts[name], dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if array is None:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: {self._form.name}: found zeros or "
                f"scales that {dtype} cannot store; accepted: those that the config "
                "describes"
            )
        return array if dtype == self._specs[name][0] else encode(array.data, "q8_0")


def _kept(
    spec: tuple[str, tuple[int, ...]], decoded: str | None
) -> tuple[str, tuple[int, ...]]:
    """Return a spec with float32 for float8, unless that is to stay as it is."""
    dtype, shape = spec
    return "float32" if dtype == FLOAT8_SCALED != decoded else dtype, shape


def _dtype_of(spec: tuple[str, tuple[int, ...]], decoded: str) -> str:
    """Return the dtype of a matrix; ``decoded`` for those that no blocks store."""
    dtype, shape = spec
    if decoded == FLOAT8_SCALED or dtype != "float32" or shape[-1] % BLOCK:
        return dtype
    return decoded
