"""Sample texts and the metadata of a small vocabulary, shared by several tests."""

from __future__ import annotations

TEXTS = [
    "",
    " ",
    "Hello world",
    "1234567 and 3.14159",
    "x   y\n\n\n  z \t\t w   7",
    "naïve café, Straße, Ёлка, 日本語テキスト",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji!",
    "def f(x):\n    return x**2  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "it's I'll we've DON'T can't",
    "١٢٣ ½ Ⅷ ²",
    "\u00a0\u2003\u3000nbsp\u200b",
    "a\r\nb\rc",
    "\x00\x01\x7f\ufeff",
    "e\u0301 vs é",
    "العربية हिन्दी ไทย",
]


def metadata(**changes):
    """GGUF metadata of a six-token vocabulary; ``None`` removes a field."""
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<s>", "</s>", "a", "b", "ab", "aba"],
        "token_type": [3, 3, 1, 1, 1, 4],
        "merges": ["a b"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    fields |= changes
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in fields.items()
        if value is not None
    }
