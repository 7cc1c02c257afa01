"""An engine on hashes that computes prompts for others, and stops before a span.

``python prefill_process.py SPANS [state]``: writes its address to the standard output,
and "now" before it sends the span of that number, of three blocks at most. With
"state", its model has state that every token changes.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from inl import EngineConfig, InferenceEngine
from inl.engine import block_copies, scheduler_setup
from inl.executor.model_loader import LanguageModel
from inl.kv_transfer.link import Kind, Link
from inl.models.llama import MODEL
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner
from inl.testing.tiny import MemoryCheckpoint, tiny_llama

LIMITS = Limits(
    slots=5, blocks=(97,), block_size=4, max_blocks_per_seq=24, vocab=256, depth=2,
    sampler="sample_filtered", token_budget=8,
)  # fmt: skip


def main() -> None:
    left, send = int(sys.argv[1]), Link.send
    has_state = "state" in sys.argv
    scheduler_setup.is_recurrent = lambda _: has_state
    runner = HashRunner(LIMITS, recurrent=has_state)

    def counted(link, kind, fields, parts=None):
        nonlocal left
        if kind is Kind.SPAN:
            left -= 1
            if not left:
                print("now", flush=True)
                time.sleep(3600)
        send(link, kind, fields, parts)

    Link.send, block_copies.MAX_TRANSFER = counted, 3
    tiny = tiny_llama(np.random.default_rng(5), vocab=256, kv_heads=2)
    checkpoint = MemoryCheckpoint(*tiny)
    language = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    config = EngineConfig(role="prefill", kv_peer="127.0.0.1:0", context=96)
    with InferenceEngine(language, config=config, runner=runner) as engine:
        print(engine.prefill_port.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
