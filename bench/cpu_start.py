"""Time first and second starts of a model on the CPU, beside other versions.

    python bench/cpu_start.py MODEL.gguf [--rounds 3] [--beside CHECKOUT ...]
                              [--ik-llama PYTHON] [--chat]

From the start of a process to the first token of a prompt of three tokens, or of the
answer to a chat message with ``--chat``, the model in the page cache. Before each first
start the packed weights are removed (from a cache of this script). ``--beside`` names
checkouts with a built native library, ``--ik-llama`` an interpreter with
ik-llama-cpp-python. In each round all run once, one after another; medians, least and
largest, and the processor time of each process until then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PACKAGES = ("core/src", "plugins/inl-cpu/src")
NAMES = "ready", "CPU"
ENDING = "; import os; t = os.times(); print(t.user + t.system, flush=True)"
INL = """
import sys
from inl import EngineConfig, InferenceEngine
config = EngineConfig(backend="cpu", max_batch=1, context=1024, sampling="greedy")
engine = InferenceEngine.from_pretrained(sys.argv[1], config=config)
engine.generate([PROMPT], max_tokens=1, ignore_eos=True)
"""
PROMPT = "[785, 3974, 13876]"
CHAT = "engine.chat_ids('Why is the sky blue?')"
IK_LLAMA = """
import ctypes, os, sys
from ik_llama_cpp._internals import IkContext, IkModel, make_batch_range
model = IkModel(sys.argv[1])
threads = len(os.sched_getaffinity(0))
context = IkContext(model, n_ctx=1024, n_threads=threads, flash_attn=False)
assert not context.decode(make_batch_range([785, 3974, 13876], pos_start=0))
assert context.get_logits(-1)
"""


def started(python, program, model, environment):
    """Seconds until the first token, and of processor time until then."""
    begun = time.perf_counter()
    command = [python, "-c", program.strip() + ENDING, str(model)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        line = process.stdout.readline()
        took = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{python}: exit code {process.returncode}")
    return took, float(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, nargs="*", default=[])
    parser.add_argument("--ik-llama", metavar="PYTHON")
    parser.add_argument("--chat", action="store_true")
    given = parser.parse_args()
    program = INL.replace("PROMPT", CHAT if given.chat else PROMPT)
    found = {}
    with tempfile.TemporaryDirectory(dir=given.model.parent) as folder:
        for _ in range(given.rounds):
            with given.model.open("rb") as file:
                while file.read(1 << 24):
                    pass
            for number, tree in enumerate([HERE, *given.beside]):
                cache = Path(folder) / str(number)
                shutil.rmtree(cache, ignore_errors=True)
                paths = os.pathsep.join(str(tree.resolve() / one) for one in PACKAGES)
                environment = os.environ | {
                    "INL_CACHE": str(cache),
                    "PYTHONPATH": paths,
                    "INL_PLUGINS": "inl_cpu.plugin",
                }
                for start in ("first", "second"):
                    result = started(sys.executable, program, given.model, environment)
                    found.setdefault(f"{tree.name}, {start}", []).append(result)
            if given.ik_llama:
                result = started(given.ik_llama, IK_LLAMA, given.model, None)
                found.setdefault("ik_llama.cpp", []).append(result)
    for name, results in found.items():
        for what, values in zip(NAMES, zip(*results, strict=True), strict=True):
            middle = statistics.median(values)
            print(f"{name:24s} {what:6s} {middle:6.2f} s", end=" ")
            print(f"({min(values):.2f} to {max(values):.2f})")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
