"""AutoRound (Cheng et al., 2023): the tensors of GPTQ, AWQ, FP8 or compressed-tensors.

``extra_config`` gives other bits and groups to single modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, final

from inl.checkpoints.files.tensor_file import show
from inl.checkpoints.quantized.gptq_awq import Awq, Gptq
from inl.checkpoints.quantized.matrix_format import Format, Parts, Shape, option
from inl.checkpoints.quantized.scaled import CompressedTensors, Fp8
from inl.dtypes import HostArray
from inl.errors import CheckpointError

PACKINGS: Final = {
    "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq",
    "auto_round:gptq:exllamav2": "gptq", "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq", "auto_round:fp8_static": "fp8", "auto_round:fp8": "fp8",
    "auto_round:llm_compressor": "compressed-tensors",
}  # fmt: skip
"""Formats of tensors by ``packing_format``."""
PACKING: Final = "packing_format"
OF_MODULE: Final = ("bits", "group_size", "sym")
"""Options that ``extra_config`` may give to a module."""
MAX_NAME: Final = 512
"""Characters of a pattern in ``extra_config``."""
NAME: Final = re.compile(r"\^?[\w.*-]+\$?")
"""Of a module, with ``*`` for any characters."""


def auto_round(config: Mapping[str, Any]) -> Format:
    """Return the format of a config; raises :class:`CheckpointError`."""
    name = PACKING if PACKING in config else "backend"
    packing = PACKINGS[option(config, name, tuple(PACKINGS), "auto_round:auto_gptq")]
    if packing == "fp8":
        block = config.get("weight_block_size") or _block(config)
        fields = {"fmt": config.get("fmt", "e4m3"), "weight_block_size": block}
        form: Format = Fp8(fields)
    elif packing == "compressed-tensors":
        form = CompressedTensors({})
    else:
        return AutoRound(config, packing)
    form.name = f"AutoRound, {packing}"
    return form


def _block(config: Mapping[str, Any]) -> Any:
    """Return ``group_size`` if it is that of blocks of rows and columns."""
    group = config.get("group_size")
    return group if isinstance(group, (list, tuple)) else None


@final
class AutoRound(Format):
    """Words of codes of GPTQ or AWQ, with options that may differ by module."""

    marker = Gptq.marker
    parts = Gptq.parts

    def __init__(self, config: Mapping[str, Any], packing: str) -> None:
        self._packing = packing
        self._base = {name: config[name] for name in OF_MODULE if name in config}
        self._plain = self._form(self._base)
        self.name = f"AutoRound, {self._plain.name}"
        extra = config.get("extra_config") or {}
        if not isinstance(extra, Mapping) or not all(
            isinstance(each, Mapping) for each in extra.values()
        ):
            raise CheckpointError(
                "config field 'quantization_config.extra_config': found "
                f"{show(extra)}, accepted: an object of objects"
            )
        self._extra = {
            _glob(module): form
            for module, fields in extra.items()
            if (form := self._form_of(fields)) is not None
        }

    def spec(self, parts: Parts) -> tuple[str, Shape]:
        return self._of(parts).spec(parts)

    def array(self, parts: Parts, dtype: str) -> HostArray | None:
        return self._of(parts).array(parts, dtype)

    def _of(self, parts: Parts) -> Format:
        """Return the format of a module: by its name, else by the first pattern."""
        module = next(iter(parts.names.values())).rpartition(".")[0]
        if module in self._extra:
            return self._extra[module]
        matching = (p for p in self._extra if "*" in p and fnmatchcase(module, p))
        pattern = next(matching, None)
        return self._plain if pattern is None else self._extra[pattern]

    def _form_of(self, fields: Mapping[str, Any]) -> Format | None:
        """Return the format of a module's own options; ``None`` if it stays floats."""
        bits = fields.get("bits", self._base.get("bits"))
        if isinstance(bits, int) and bits >= 16:
            return None
        given = {name: fields[name] for name in OF_MODULE if name in fields}
        return self._form(self._base | given)

    def _form(self, fields: Mapping[str, Any]) -> Format:
        if self._packing == "awq":
            return Awq(fields)
        return Gptq({**fields, "checkpoint_format": self._packing})


def _glob(pattern: str) -> str:
    """Return a name, or a pattern with ``.*``, as one for :func:`fnmatchcase`.

    Raises :class:`CheckpointError` for any other regular expression.
    """
    plain = pattern.replace("\\.", ".").replace(".*", "*")
    if len(plain) > MAX_NAME or not NAME.fullmatch(plain):
        raise CheckpointError(
            f"config field 'quantization_config.extra_config': found the name "
            f"{show(pattern)}, accepted: names of modules, and patterns with '.*'"
        )
    if plain == pattern:
        return plain
    start, stop = plain.startswith("^"), plain.endswith("$")
    return "*" * (not start) + plain.strip("^$") + "*" * (not stop)
