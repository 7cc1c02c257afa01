"""The same model in other GGUF kinds, by the quantizer that ik_llama.cpp brings."""

from __future__ import annotations

from pathlib import Path

from peers.catalog import PEERS
from peers.commands import Failed, run_logged
from peers.environments import environment
from peers.models import folder_of

SECONDS = 1800


def requantized(source: Path, kind: str, cache: Path) -> Path:
    """Quantize a file to a kind such as ``Q5_K_M``, unless it is there; gives its path.

    From numbers that were rounded once already: for speed, and for comparing engines on
    one file, not for comparing kinds. Raises :class:`Failed`.
    """
    peer = next(each for each in PEERS if each.name == "ik_llama.cpp")
    target = folder_of(source, cache / "requantized") / f"{source.stem}-{kind}.gguf"
    if target.exists():
        return target
    python = environment(cache, peer.name, peer.requirements, peer.removed)
    log = cache / "logs" / "requantize.log"
    find = "from ik_llama_cpp.quantize import find_quantize_bin as f; print(f() or '')"
    program = run_logged([python, "-c", find], log, limit=60).strip()
    if not program:
        raise Failed(f"{peer.name}: this wheel has no llama-quantize")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    command: list[object] = [program, "--allow-requantize", source, part, kind]
    run_logged(command, log, limit=SECONDS)
    part.rename(target)
    return target
