"""ik_llama.cpp: its C functions in this process, one request after the other.

The package's own Python sampler reads each logit in Python, which takes longer than
the model; here NumPy takes the largest. The package decodes one sequence at a time.
"""

from __future__ import annotations

import ctypes
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import Answered, Facts, Loaded, ggml_instructions, main

CONTEXT = 1024


class Model:
    """A loaded model and its context."""

    def __init__(self, job: dict[str, Any]) -> None:
        from ik_llama_cpp._internals import IkContext, IkModel

        self._model = IkModel(str(job["model"]))
        self._context = IkContext(
            self._model,
            n_ctx=CONTEXT,
            n_threads=job["threads"],
            # Its kernels abort on some prompts; the package advises against it.
            flash_attn=False,
        )

    def _next(self, tokens: list[int], start: int) -> int:
        """Compute tokens from position ``start``; return the most likely next one."""
        import numpy as np
        from ik_llama_cpp import _ctypes_api as lib
        from ik_llama_cpp._internals import make_batch_range

        batch = make_batch_range(tokens, pos_start=start)
        try:
            if self._context.decode(batch):
                raise RuntimeError("llama_decode failed")
        finally:
            lib.llama_batch_free(batch)
        logits = ctypes.cast(self._context.get_logits(-1), ctypes.c_void_p)
        size = self._model.n_vocab * ctypes.sizeof(ctypes.c_float)
        return int(np.frombuffer(ctypes.string_at(logits, size), np.float32).argmax())

    def _answer(self, prompt: list[int], tokens: int) -> Answered:
        began = time.perf_counter()
        self._context.kv_cache_clear()
        ids = [self._next(prompt, 0)]
        first = time.perf_counter() - began
        while len(ids) < tokens:
            ids.append(self._next(ids[-1:], len(prompt) + len(ids) - 1))
        return Answered([ids], first)

    def answer(self, prompts: list[list[int]], tokens: int) -> Answered:
        found = [self._answer(prompt, tokens) for prompt in prompts]
        return Answered([each.ids[0] for each in found], found[0].first_seconds)


def load(job: dict[str, Any]) -> Loaded:
    import ik_llama_cpp

    name, model = Path(job["model"]).name, Model(job)
    library = Path(ik_llama_cpp.__file__).parent / "lib" / "libllama.so"
    return Loaded(
        model.answer,
        lambda: Facts(
            {"ik-llama-cpp-python": version("ik-llama-cpp-python")},
            f"the wheel's build, {name}, KV float16, one request at a time; "
            f"{ggml_instructions(library)}",
        ),
        is_serial=True,
    )


if __name__ == "__main__":
    main(load)
