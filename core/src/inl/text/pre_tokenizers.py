"""Pre-tokenizer patterns of byte-level vocabularies, by ``tokenizer.ggml.pre``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from inl.text.tokenizer import library

SPACES: Final = r"\s+(?!\S)|\s+"
ENDINGS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LINES: Final = rf"\s*[\r\n]+|{SPACES}"
LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST: Final = r" ?[^\s\p{L}\p{N}]+"

GPT2: Final = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{REST}|{SPACES}"
LLAMA3: Final = rf"{ENDINGS}|{LETTERS}|\p{{N}}{{1,3}}|{REST}[\r\n]*|{LINES}"
QWEN2: Final = rf"{ENDINGS}|{LETTERS}|\p{{N}}|{REST}[\r\n]*|{LINES}"
QWEN35: Final = (
    rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}"
)
SEED: Final = rf"{ENDINGS}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}"

UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*",
)
TEKKEN: Final = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{REST}[\r\n/]*|{LINES}"
GPT4O: Final = (
    rf"{CASED[0]}{ENDINGS}?|{CASED[1]}{ENDINGS}?|\p{{N}}{{1,3}}|{REST}[\r\n/]*|{LINES}"
)
DEEPSEEK3: Final = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}"
)
HAN: Final = "".join(
    f"{chr(first)}-{chr(last)}"
    for first, last in (
        (0x2E80, 0x2E99), (0x2E9B, 0x2EF3), (0x2F00, 0x2FD5), (0x3005, 0x3005),
        (0x3007, 0x3007), (0x3021, 0x3029), (0x3038, 0x303B), (0x3400, 0x4DBF),
        (0x4E00, 0x9FFF), (0xF900, 0xFA6D), (0xFA70, 0xFAD9), (0x16FE2, 0x16FE3),
        (0x16FF0, 0x16FF1), (0x20000, 0x2A6DF), (0x2A700, 0x2B739), (0x2B740, 0x2B81D),
        (0x2B820, 0x2CEA1), (0x2CEB0, 0x2EBE0), (0x2EBF0, 0x2EE5D), (0x2F800, 0x2FA1D),
        (0x30000, 0x3134A), (0x31350, 0x323AF),
    )
)  # fmt: skip
"""Ranges of the script Han of Unicode 16, which :mod:`re` does not know by name."""
KIMI: Final = (
    rf"[{HAN}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?(?:(?![{HAN}]){UPPER})*(?:(?![{HAN}]){LOWER})+{ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?(?:(?![{HAN}]){UPPER})+(?:(?![{HAN}]){LOWER})*{ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{REST}[\r\n]*|{LINES}"
)
WORDS: Final = " ?[^(\\s|.,!?…。，、।۔،)]+"

PATTERNS: Final[Mapping[str, Sequence[str]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"),
    "llama-bpe": (LLAMA3,),
    "qwen2": (QWEN2,),
    "qwen35": (QWEN35,),
    "seed-coder": (SEED,),
    "tekken": (TEKKEN,),
    "gpt-4o": (GPT4O,),
    "kimi-k2": (KIMI,),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        DEEPSEEK3,
    ),
    "bloom": (WORDS,),
    "viking": (WORDS, r"\p{N}"),
}
"""Split patterns of each pre-tokenizer, applied in turn."""

_SAME: Final = {
    "gpt-2": "phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v2-code gigachat "
    "a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx "
    "smaug-bpe glm4 chatglm-bpe",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open "
    "grok-2",
    "gpt-4o": "llama4 kanana2 minimax-m2",
    "deepseek-v3": "hunyuan-dense",
    "bloom": "poro-chat gpt3-finnish",
}

PRE: Final = {
    **{name: name for name in PATTERNS},
    **{name: rule for rule, names in _SAME.items() for name in names.split()},
}
"""Value of ``tokenizer.ggml.pre`` -> key of :data:`PATTERNS`."""

WHOLE_WORDS: Final = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"}
    | {"midm-2.0", "lfm2", "tekken", "kimi-k2"}
)
"""Vocabularies in which a word that is a token is not split by merges."""

BEGINS_WITH_BOS: Final = WHOLE_WORDS - {"kimi-k2"}
"""Vocabularies in which ``add_bos_token`` defaults to true."""

COMPOSED: Final = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen", "stablelm2"})
"""Vocabularies whose text is normalized to NFC first."""


def pre_tokenizer(name: str) -> Any:
    """Build the ``tokenizers`` pre-tokenizer of ``name``, a key of PRE."""
    lib = library()
    splits = [
        lib.pre_tokenizers.Split(lib.Regex(pattern), "isolated")
        for pattern in PATTERNS[PRE[name]]
    ]
    to_bytes = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return lib.pre_tokenizers.Sequence([*splits, to_bytes])
