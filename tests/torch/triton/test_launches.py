"""Launches that pass arguments on to a compiled program, on a kernel that records."""

from __future__ import annotations

import pytest
import torch

from inl_torch.triton.launches import MAX_PROGRAMS, Launch


class Program:
    """Like ``triton.compiler.CompiledKernel``: indexed by a grid, it launches."""

    packed_metadata = ()

    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *args: self.calls.append((grid, args))


class Kernel:
    """Like ``triton.JITFunction``; its launches are slow, those of programs are not."""

    arg_names = ("x", "y", "count", "factor", "WIDE", "BLOCK")
    pre_run_hooks = ()

    def __init__(self, result=Program):
        self.slow, self.fast, self.result = [], [], result

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.slow.append((grid, args, constants))
            return self.result(self.fast)

        return run


def test_arguments_and_constants_are_passed_in_the_order_of_the_kernel():
    kernel = Kernel()
    launch = Launch(kernel, (3, 2), BLOCK=8, WIDE=True, num_warps=4)
    x, y = torch.zeros(8), torch.ones(8)
    launch(x, y, 5, 0.5)
    assert kernel.slow == [((3, 2, 1), (x, y, 5, 0.5),
                            {"BLOCK": 8, "WIDE": True, "num_warps": 4})]  # fmt: skip
    other = torch.ones(8)
    launch(x, other, 5, 0.25)
    (((grid, args)),) = kernel.fast
    assert grid == (3, 2, 1)
    assert args[1] is other
    assert args[2:] == (5, 0.25, True, 8)
    assert len(kernel.slow) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (
            x,
            y,
            6,
            0.5,
        ),  # is it a multiple of 16?
        lambda x, y: (x.double(), y, 5, 0.5),
        lambda x, y: (torch.zeros(9)[1:], y, 5, 0.5),  # not at a multiple of 16 bytes
    ],
    ids=["number", "dtype", "alignment"],
)
def test_another_program_is_looked_up_by_triton(change):
    kernel = Kernel()
    launch = Launch(kernel, (1,), BLOCK=8, WIDE=True)
    x, y = torch.zeros(8), torch.ones(8)
    launch(x, y, 5, 0.5)
    launch(*change(x, y))
    assert len(kernel.slow) == 2
    assert not kernel.fast


def test_an_interpreted_kernel_and_one_with_hooks_are_always_launched_by_triton():
    hooked = Kernel()
    hooked.pre_run_hooks = (print,)
    for kernel in (Kernel(lambda _: None), hooked):
        launch = Launch(kernel, (1,), BLOCK=8, WIDE=True)
        for _ in range(3):
            launch(torch.zeros(8), torch.zeros(8), 5, 0.5)
        assert len(kernel.slow) == 3
        assert not kernel.fast


def test_programs_are_forgotten_beyond_a_number():
    kernel = Kernel()
    launch = Launch(kernel, (1,), BLOCK=8, WIDE=True)
    x = torch.zeros(8)
    for count in range(MAX_PROGRAMS + 2):
        launch(x, x, count, 0.5)
    launch(x, x, MAX_PROGRAMS + 1, 0.5)
    assert len(kernel.fast) == 1
    launch(x, x, 0, 0.5)
    assert len(kernel.fast) == 1
