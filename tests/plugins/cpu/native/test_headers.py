"""Every header compiles alone: it includes what it uses."""

from __future__ import annotations

import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.full

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16")
FLAGS = {
    "simd/simd_avx2.h": ("-DINL_ISA_AVX2", *AVX2),
    "simd/simd_avx512.h": ("-DINL_ISA_AVX512", "-mavx512vnni", *AVX2, *AVX512),
    "kernels/avx512": ("-DINL_ISA_AVX512", "-mavx512vnni", *AVX2, *AVX512),
    "kernels/amx": (
        "-DINL_ISA_AMX", "-mamx-tile", "-mamx-bf16", "-mavx512vnni", *AVX2, *AVX512,
    ),
}  # fmt: skip
"""Compiler flags by the beginning of a header's path; others need none."""


def syntax_errors(builder, header, flags=()):
    command = [
        *builder.compiler(), "-std=c++17", "-fsyntax-only", f"-I{builder.SOURCES}",
        *flags, "-x", "c++", "-include", str(header), "/dev/null",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.timeout(300)
def test_every_header_is_self_contained(builder):
    def check(header):
        path = header.relative_to(builder.SOURCES).as_posix()
        flags = next((f for begin, f in FLAGS.items() if path.startswith(begin)), ())
        if flags and platform.machine() != "x86_64":
            return ""
        return syntax_errors(builder, header, flags)

    headers = sorted(builder.SOURCES.rglob("*.h"))
    headers = [header for header in headers if header.name != "simd_neon.h"]
    assert len(headers) > 30
    with ThreadPoolExecutor(2) as pool:
        failures = [errors for errors in pool.map(check, headers) if errors]
    assert not failures, "\n".join(failures)


def test_a_missing_include_is_detected(builder, tmp_path):
    header = tmp_path / "needs_vector.h"
    header.write_text("#pragma once\ninline std::vector<int> none() { return {}; }\n")
    assert "vector" in syntax_errors(builder, header)
