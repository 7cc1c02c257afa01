"""First token of a second process whose system prompt is in files, against computing.

``python bench/second_start.py [MODEL]`` starts a process that fills the files, and then
in each of ``--rounds`` rounds one without files and one that reads them. Each answers
the same prompt of ``--tokens`` tokens; the answers must be equal. Figures are medians;
CPU times are of all threads, which other work of the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any


def answer(model: str | None, tokens: int, folder: str | None) -> dict[str, Any]:
    """Answer a short prompt and then a long one twice, in this process."""
    from inl import EngineConfig, InferenceEngine

    disk = f"8GiB:{folder}" if folder else None
    config = EngineConfig(backend="cpu", kv_disk=disk, context=tokens + 200)
    with InferenceEngine.from_pretrained(model, config) as engine:
        ids = list(engine.tokenizer.encode("The quick brown fox jumps over the dog. "))
        prompt = (ids * (tokens // len(ids) + 1))[:tokens]
        engine.generate([5, 6, 7], max_tokens=4, temperature=0)  # warm up
        started, used = time.perf_counter(), time.process_time()
        first = engine.generate(prompt, max_tokens=1, temperature=0)
        seconds = time.perf_counter() - started
        used = time.process_time() - used
        text = engine.generate(prompt, max_tokens=24, temperature=0)
        found = {
            "seconds": seconds,
            "cpu": used,
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="child process: folder of the files")
    parser.add_argument("--child", action="store_true", help="answer in this process")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(answer(options.model, options.tokens, options.folder)))
        return
    with tempfile.TemporaryDirectory() as base:
        folder = str(Path(base) / "kv")
        filled = child(options, folder)
        runs = [filled]
        rounds: dict[str, list[Any]] = {"computed": [], "from files": []}
        for _ in range(options.rounds):
            for name, each in (("computed", None), ("from files", folder)):
                runs.append(child(options, each))
                rounds[name].append(runs[-1])
        size = sum(path.stat().st_size for path in Path(folder).glob("*.kv"))
    wall, used = (
        [median(run[unit] for run in found) for found in rounds.values()]
        for unit in ("seconds", "cpu")
    )
    for name, seconds, cpu in zip(rounds, wall, used, strict=True):
        print(f"{name:10} first token {seconds:.3f} s, {cpu:.3f} s of CPU time")
    print(
        f"{runs[-1]['cached']} tokens of {size / 1e6:.0f} MB of files: "
        f"{wall[0] / wall[1]:.1f} times as fast as computing, by CPU time "
        f"{used[0] / used[1]:.1f}; written in {filled['close seconds']:.2f} s"
    )
    is_same = len({tuple(each["tokens"]) for each in runs}) == 1
    print("the same tokens" if is_same else "DIFFERENT TOKENS")
    sys.exit(not is_same)


def child(options: argparse.Namespace, folder: str | None) -> dict[str, Any]:
    """Answer in another process."""
    command = [sys.executable, __file__, "--child", f"--tokens={options.tokens}"]
    command += [options.model] if options.model else []
    command += [f"--folder={folder}"] if folder else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
