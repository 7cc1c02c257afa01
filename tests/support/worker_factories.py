"""Runner factories for worker processes: ``--factory worker_factories:NAME``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from inl import errors
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.models.llama import MODEL
from inl.protocol.wire_json import read_limits
from inl.runners.startup import StartedRunner
from inl.spec.message import STEP, header
from inl.testing.hash_runner import HashRunner
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama


def hashes(options, progress):
    """Start a HashRunner with the given limits."""
    return _served(HashRunner, options)


def noisy(options, progress):
    """Start a runner that writes to standard output."""
    progress(1, 2)
    print("loading the hashes")
    os.write(1, b"\x00IL not a frame\n")
    return _served(Noisy, options)


def slow(options, progress):
    """Start a runner whose steps are longer than the parent's polling interval."""
    return _served(Slow, options)


def loading(options, progress):
    """Take ``seconds`` for each of six loading steps, and report progress."""
    for done in range(6):
        progress(done, 6)
        time.sleep(options.get("seconds", 0.9))
    return _served(HashRunner, options)


def stuck(options, progress):
    """Start a runner whose step never ends."""
    return _served(Stuck, options)


def dying(options, progress):
    """Start a runner that is killed at a step, once."""
    runner = _served(Dying, options)
    runner.runner.options = options
    return runner


def failing(options, progress):
    """Raise the error class that ``options`` names, or ValueError."""
    kind = getattr(errors, options["raises"], None) or ValueError
    raise kind("the reason, as it was")


def refusing(options, progress):
    """Start a runner that refuses its second step."""
    return _served(Refusing, options)


def unsettled(options, progress):
    """As ``refusing``, and the runner cannot be reset."""
    return _served(Unsettled, options)


def out_of_memory(options, progress):
    """Start a runner that is out of memory in some steps."""
    return _served(Full, options)


def quitting(options, progress):
    """Print a message and exit with status 7."""
    sys.stderr.write("cannot go on like this\n")
    sys.exit(7)


def impossible(options, progress):
    """Start a runner with invalid limits."""
    runner = _served(HashRunner, options)
    object.__setattr__(runner.runner.limits, "slots", -1)
    return runner


def tiny(options, progress):
    """A tiny Llama with random weights on the NumPy reference."""
    config, tensors = tiny_llama(np.random.default_rng(options["seed"]))
    runner = local_runner(
        ReferenceBackend(Device("reference")),
        MODEL,
        MemoryCheckpoint(config, tensors),
        read_limits(options["limits"], "options"),
    )
    return StartedRunner(runner, "reference:0", "float32")


def _served(kind, options):
    return StartedRunner(kind(read_limits(options["limits"], "options")), "hash:0", "")


class Noisy(HashRunner):
    def collect(self):
        print("a step is done")
        sys.stdout.flush()
        return super().collect()


class Slow(HashRunner):
    def collect(self):
        time.sleep(1.3)
        return super().collect()


class Stuck(HashRunner):
    def collect(self):
        time.sleep(600)


class Full(HashRunner):
    """Has no memory for steps of seven tokens."""

    def submit(self, message):
        found = header(message)
        if found.kind == STEP and found.used_tokens == 7:
            self._step = found.step
            raise errors.OutOfMemory("step of 7 tokens: 8 bytes more does not fit")
        super().submit(message)


class Refusing(HashRunner):
    steps = 0

    def collect(self):
        self.steps += 1
        if self.steps == 2:
            raise errors.KernelFailed("rms_norm/test: gave NaN")
        return super().collect()


class Unsettled(Refusing):
    def reset(self):
        raise OSError("nobody is here to be reset")


class Dying(HashRunner):
    steps = 0

    def collect(self):
        self.steps += 1
        flag = Path(self.options["flag"])
        if self.steps == self.options["at"] and not flag.exists():
            flag.touch()
            sys.stderr.write("last words\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().collect()
