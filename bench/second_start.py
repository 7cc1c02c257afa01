"""First token of a second process whose system prompt is in files, against computing.

``python bench/second_start.py [MODEL]`` starts three processes one after the other: one
without files, one that fills them, and one that reads them. Each answers the same
prompt of ``--tokens`` tokens; the answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def answer(model: str | None, tokens: int, folder: str | None) -> dict[str, object]:
    """Answer a long prompt once and then a short one, in this process."""
    from inl import EngineConfig, InferenceEngine

    disk = f"8GiB:{folder}" if folder else None
    config = EngineConfig(backend="cpu", kv_disk=disk, context=tokens + 200)
    with InferenceEngine.from_pretrained(model, config) as engine:
        ids = list(engine.tokenizer.encode("The quick brown fox jumps over the dog. "))
        prompt = (ids * (tokens // len(ids) + 1))[:tokens]
        engine.generate([5, 6, 7], max_tokens=4, temperature=0)  # warm up
        started = time.perf_counter()
        first = engine.generate(prompt, max_tokens=1, temperature=0)
        seconds = time.perf_counter() - started
        text = engine.generate(prompt, max_tokens=24, temperature=0)
        found = {
            "seconds": seconds,
            "tokens": list(text.token_ids),
            "cached": first.cached_tokens,
            "hits": dict(engine.tiers.hits) if engine.tiers else {},
        }
        closing = time.perf_counter()
    return {**found, "close seconds": time.perf_counter() - closing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--folder", help="child process: folder of the files")
    parser.add_argument("--child", action="store_true", help="answer in this process")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(answer(options.model, options.tokens, options.folder)))
        return
    with tempfile.TemporaryDirectory() as base:
        folder = str(Path(base) / "kv")
        runs = {}
        names = ("without files", None), ("fills them", folder), ("reads them", folder)
        for name, each in names:
            command = [
                sys.executable,
                __file__,
                "--child",
                *filter(None, [options.model]),
            ]
            command += [f"--tokens={options.tokens}"]
            command += [f"--folder={each}"] if each else []
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            runs[name] = found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{name:14} first token {found['seconds']:.3f} s, "
                f"{found['cached']} tokens cached, close {found['close seconds']:.2f} s"
            )
        size = sum(path.stat().st_size for path in Path(folder).glob("*.kv"))
        texts = {json.dumps(found["tokens"]) for found in runs.values()}
        speed = runs["without files"]["seconds"] / runs["reads them"]["seconds"]
        print(f"{size / 1e6:.0f} MB of files; {speed:.1f} times as fast as computing")
        print("the same tokens" if len(texts) == 1 else "DIFFERENT TOKENS")
        sys.exit(len(texts) > 1)


if __name__ == "__main__":
    main()
