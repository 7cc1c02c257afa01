"""Free memory of a device while a server is awake and asleep.

    python bench/serve_sleep.py --device cuda:0
    python bench/serve_sleep.py --device cuda:0 --model 8b.gguf

Starts ``inl serve``, lets it sleep and wake twice, and prints the free memory of the
device, of which another process has the rest, in MB. Asleep, only what a context of the
device takes is missing from the first figure. The tokens after each wake-up must be
those before. Needs torch for the GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

READY = re.compile(r" at (http\S+),")
BODY = {"prompt": list(range(40, 90)), "max_tokens": 32, "temperature": 0}


def post(url: str, body: Any = None, key: str = "") -> Any:
    """Return the parsed answer to a request."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"x-api-key": key}, method="POST")
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def measure(given: argparse.Namespace) -> None:
    place = torch.device(given.device)

    def free() -> float:
        return torch.cuda.mem_get_info(place)[0] / 1e6

    command = [sys.executable, "-m", "inl", "serve", "--device", given.device]
    command += [given.model] if given.model else []
    command += ["--port", "0", "--admin-key", "operator", "--frontends", "0"]
    before = free()
    print(f"before         {before:9.0f} MB free", flush=True)
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            while not (found := READY.search(Path(log.name).read_text())):
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.1)
            url = found[1]
            tokens = None
            for _ in range(2):
                body = {**BODY, "return_token_ids": True}
                answer = post(f"{url}/v1/completions", body)
                ids = answer["choices"][0]["token_ids"]
                assert tokens in (None, ids), "other tokens than before it slept"
                tokens = ids
                print(f"awake          {free():9.0f} MB free", flush=True)
                began = time.perf_counter()
                post(f"{url}/sleep", key="operator")
                seconds = time.perf_counter() - began
                now = free()
                print(
                    f"asleep         {now:9.0f} MB free, {before - now:.0f} MB less "
                    f"than before; {seconds:.2f} s to sleep",
                    flush=True,
                )
                began = time.perf_counter()
                post(f"{url}/wake_up", key="operator")
                print(f"woken in {time.perf_counter() - began:.2f} s", flush=True)
        finally:
            process.terminate()
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", help="folder or file; default: the default model")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
