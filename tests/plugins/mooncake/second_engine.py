"""An engine of another process that reads prompts from the store, with its counts.

``python second_engine.py ADDRESS``: reads prompts of JSON from the standard input, one
a line, and writes token ids and counts of each.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from inl import EngineConfig, InferenceEngine
from inl.executor.model_loader import LanguageModel
from inl.models.llama import MODEL
from inl.testing.tiny import MemoryCheckpoint, tiny_llama


def main() -> None:
    checkpoint = MemoryCheckpoint(
        *tiny_llama(np.random.default_rng(5), vocab=256, kv_heads=2)
    )
    language = LanguageModel(MODEL, MODEL.config(checkpoint.config), checkpoint)
    config = EngineConfig(
        backend="reference", max_batch=4, context=512, kv_host="16MiB",
        kv_store=f"mooncake:{sys.argv[1]}",
    )  # fmt: skip
    with InferenceEngine(language, config=config) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            found = engine.generate(json.loads(line), max_tokens=6, temperature=0)
            counts = dict(engine.shared_blocks.counts)
            said = [list(found.token_ids), found.cached_tokens, counts]
            print("answer " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
