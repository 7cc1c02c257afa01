"""Instruction sets that the engines are held to, for all of them or none."""

from __future__ import annotations

from typing import NamedTuple

from peers.catalog import Row, Unknown


class InstructionSet(NamedTuple):
    """What ``--isa`` sets."""

    inl: str
    """Value of INL_CPU_ISA."""
    ggml: tuple[str, ...]
    """ggml's options of a build without the host's own instructions."""


_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
ISAS = {
    "avx2": InstructionSet("avx2", _AVX2),
    "avx512": InstructionSet(
        "avx512", (*_AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
    ),
}
FORCED = ("inl", "llama.cpp")
"""Peers that can be held to an instruction set. ik_llama.cpp's wheel is AVX2 anyway."""


def check_rows(isa: str | None, rows: list[Row]) -> None:
    """Raise :class:`Unknown` for a row that would use other instructions."""
    allowed = {*FORCED, "ik_llama.cpp"} if isa == "avx2" else set(FORCED)
    others = sorted({row.peer for row in rows} - allowed)
    if isa and others:
        raise Unknown(
            f"--isa {isa}: found {', '.join(others)} among the rows, accepted: "
            f"{', '.join(sorted(allowed))}; name them with --peers"
        )


def build_options(isa: str) -> list[str]:
    """Give ggml's options for exactly these instructions."""
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ISAS[isa].ggml)]
