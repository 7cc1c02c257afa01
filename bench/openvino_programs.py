"""Steps of the default model on OpenVINO's CPU device, beside inl-cpu.

The programs are those that inl-directml exports, with weights as constants, 4-bit ones
as stored. OpenVINO gets a small cache, since it returns a copy of each; its times are
therefore lower bounds. Needs ``pip install openvino``; prints the ratio of the shortest
times of interleaved rounds.

    python bench/openvino_programs.py --rounds 5
    python bench/openvino_programs.py --threads 1 --cpu-time    # a busy machine
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import openvino
from onnx import numpy_helper

from inl import Device, EngineConfig
from inl.checkpoints.hub.resolve import default_model
from inl.executor.model_loader import open_model, start_runner
from inl.plugin import make_backend
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl_directml.backend import DirectmlBackend
from inl_onnx.trace import export

SIZES = (Bucket(1, 1), Bucket(8, 8), Bucket(64, 8), Bucket(256, 8))
CONFIG = {"max_batch": 8, "context": 128, "sampling": "greedy", "prefix_cache": False}


def openvino_step(runner, bucket, threads):
    """A function that computes a step in OpenVINO."""
    executor = runner.executor
    body = executor._body("advance", bucket, None)
    message = executor.dummy_message(bucket)
    args = executor.loaded.weights, message, executor.state
    exported = export(body, args, {})
    tensors = list(leaves(args))
    weights = set(range(len(list(leaves(args[0])))))
    model, feeds = exported.model, {}
    kept = []
    for each, number in zip(model.graph.input, exported.inputs, strict=True):
        data = tensors[number].value.numpy()
        if number in weights:
            model.graph.initializer.append(numpy_helper.from_array(data, each.name))
        else:
            kept.append(each)
            feeds[each.name] = data
    del model.graph.input[:]
    model.graph.input.extend(kept)
    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(model.SerializeToString()),
        "CPU",
        {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"},
    )
    request = compiled.create_infer_request()
    return lambda: request.infer(feeds, share_inputs=True, share_outputs=True)


def native_step(runner, bucket):
    """A function that computes the same step natively."""
    executor = runner.executor

    def run():
        backend = runner._backend
        tokens = executor.advance(bucket, executor.dummy_message(bucket), None)
        return backend.numpy(tokens)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true", help="of the process")
    given = parser.parse_args()
    rounds, clock = given.rounds, time.perf_counter
    if given.cpu_time:
        clock = time.process_time
    os.environ["INL_THREADS"] = str(given.threads)
    os.environ["INL_DIRECTML_PROVIDER"] = "cpu"
    language = open_model(default_model())
    onnx_runner = start_runner(
        language,
        DirectmlBackend(Device("directml:0")),
        EngineConfig(dtype="float32", **CONFIG),
    )
    cpu_runner = start_runner(
        language, make_backend(Device("cpu:0")), EngineConfig(**CONFIG)
    )
    print("tokens  rows  inl-cpu ms  OpenVINO ms  inl-cpu ahead by")
    for bucket in SIZES:
        native = native_step(cpu_runner, bucket)
        steps = native, openvino_step(onnx_runner, bucket, given.threads)
        times = np.array(
            [[timed(step, clock) for step in steps] for _ in range(rounds + 1)]
        )
        ours, theirs = 1e3 * times[1:].min(0)
        print(
            f"{bucket.tokens:6} {bucket.rows:5} {ours:11.1f} {theirs:12.1f} "
            f"{theirs / ours:17.2f}",
            flush=True,
        )


def timed(step, clock):
    """Seconds of a call."""
    began = clock()
    step()
    return clock() - began


if __name__ == "__main__":
    main()
