"""Precompilation of kernels without launching them."""

from __future__ import annotations

import pytest
from triton_process import run_program

pytest.importorskip("triton")

SCRIPT = """
import threading
import torch, triton
import triton.language as tl
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor
from compile_kernels import Stub, target_of
from inl_torch.triton.precompile import precompile

driver.set_active(Stub(target_of("cuda:90")))

@triton.jit
def fill(x, count, WIDE: tl.constexpr):
    at = tl.arange(0, WIDE)
    tl.store(x + at, at, mask=at < count)

@triton.jit
def copy(source, target, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(target + at, source.load([0, 0]))

def copied():
    x, y = torch.empty(2, 64, 32)
    copy[(1,)](TensorDescriptor.from_tensor(x, [16, 32]), y, ROWS=16)
    copy[(1,)](TensorDescriptor.from_tensor(y, [16, 32]), x, ROWS=16)
    copy[(1,)](TensorDescriptor.from_tensor(x, [32, 32]), y, ROWS=32)

def known():
    return sum(len(cache[0]) for cache in fill.device_caches.values())

seen, elsewhere = [], []
plain = JITFunction.run

def other():
    elsewhere.append(JITFunction.run)
    fill.run(torch.zeros(4), 4, 64, grid=(1,), warmup=True)

def call():
    x = torch.empty(4, dtype=torch.int32)
    assert not x.any() and not torch.empty_like(x).any() and not x.new_empty(3).any()
    fill[(1,)](x, 4, WIDE=16)
    fill[(1,)](x, 5, WIDE=16)      # the same code: neither is 1, nor counts 16s
    fill[(1,)](x, 16, WIDE=16)
    fill[(1,)](x, 4, WIDE=32)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    seen.append(known())

def broken():
    fill[(1,)](torch.empty(4), 4, WIDE=16)
    raise ValueError("no step")

place = torch.device("cpu")
assert precompile([call, broken], place) == 4
assert seen == [1], seen            # launches of other threads are unaffected
assert known() == 5, known()
assert JITFunction.run is plain and "torch._dynamo" not in __import__("sys").modules
assert precompile([call], place) == 3 and known() == 5
# Launches now need no further compilation.
for count, wide in ((4, 16), (16, 16), (4, 32)):
    x = torch.zeros(4, dtype=torch.int32)
    fill.run(x, count, grid=(1,), warmup=True, WIDE=wide)
assert known() == 5
# Code depends on a descriptor's element type and block, not on its memory.
assert precompile([copied], place) == 2
assert sum(len(cache[0]) for cache in copy.device_caches.values()) == 2
print("right")
"""


def test_suppressed_launches_are_compiled(tmp_path):
    assert run_program(SCRIPT, tmp_path) == "right"
