"""Decoding of quantized checkpoints beside GGUF matrices of the same bits, on the CPU.

``python bench/format_speed.py`` quantizes the default model in each format and, with
the ``gguf`` package, to the GGUF type of as many bits; the other tensors are the same.
Both generate in turns, so that what else the machine does hits both alike; the ratio of
the least times is the figure. Needs what ``bench/format_quality.py`` needs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter

import gguf
from format_quality import FORMATS, MATRICES, decoded, quantized

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.hub.resolve import resolve_model
from inl.checkpoints.wrapped import WrappedCheckpoint
from inl.dtypes import HostArray
from inl.executor.model_loader import open_model, read_model

TYPES = {
    "gptq": "Q4_0", "compressed-int4": "Q4_0", "torchao-int4": "Q4_0", "awq": "Q4_1",
    "gptq-8": "Q8_0", "torchao-int8": "Q8_0", "compressed-int8": "Q8_0",
    "bnb-int8": "Q8_0", "fp8-tensor": "Q8_0", "fp8-blocks": "Q8_0",
}  # fmt: skip
"""Formats, and the GGUF types of as many bits."""


class Gguf(WrappedCheckpoint):
    """A plain checkpoint whose matrices have a GGUF type."""

    def __init__(self, inner, kind):
        super().__init__(inner)
        self._kind, self._dtype = gguf.GGMLQuantizationType[kind], kind.lower()

    def names(self):
        return self._inner.names()

    def spec(self, name):
        dtype, shape = self._inner.spec(name)
        return (self._dtype if name.endswith(MATRICES) else dtype), shape

    def tensor(self, name):
        array = self._inner.tensor(name)
        if not name.endswith(MATRICES):
            return array
        data = gguf.quants.quantize(array.data, self._kind)
        return HostArray(data, self._dtype, array.shape)


def seconds(engine, tokens):
    start = perf_counter()
    engine.generate([5, 6, 7, 8], max_tokens=tokens, ignore_eos=True)
    return perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--formats", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    checkpoint = open_model(resolve_model(given.model)).checkpoint
    plain = decoded(checkpoint)
    fields = {
        name: value for name, value in checkpoint.config.items() if value is not None
    }
    config = EngineConfig(backend="cpu", max_batch=1, context=256)
    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "plain"
        FORMATS["plain"] = (lambda weight: (weight, {"weight": weight}), None)
        quantized(plain, "plain", base, fields)
        for form in given.formats:
            folder = Path(place) / form
            try:
                quantized(plain, form, folder, fields)
            except ImportError as error:
                print(f"{form:<16} left out: {error}")
                continue
            other = Gguf(open_checkpoint(base), TYPES[form])
            engines = [
                InferenceEngine(language, config=config)
                for language in (open_model(folder), read_model(other))
            ]
            for engine in engines:
                seconds(engine, given.tokens)
            times = [[], []]
            for number in range(given.rounds):
                for at in (0, 1) if number % 2 else (1, 0):
                    times[at].append(seconds(engines[at], given.tokens))
            for engine in engines:
                engine.close()
            ours, theirs = map(min, times)
            print(
                f"{form:<16} {given.tokens / ours:6.1f} tokens/s, GGUF {TYPES[form]} "
                f"{given.tokens / theirs:6.1f}, ratio {theirs / ours:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
