"""A tokenizer and chat template as the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.bounded_json import parse_json
from inl.checkpoints.gguf.special_tokens import GGUF_NAMES
from inl.errors import CheckpointError
from inl.text.gguf_fields import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from inl.text.gguf_vocabulary import read_tokenizer
from inl.text.pre_tokenizers import COMPOSED, PATTERNS, WHOLE_WORDS, pre_tokenizer
from inl.text.tokenizer import BYTE_TOKEN, SPACE, Tokenizer, library

if TYPE_CHECKING:
    from inl.checkpoints.checkpoint import Checkpoint

PROBES: Final = (
    "Hello World, it's 2024! I'LL they'Ve x",
    "  two  spaces\tand\ttabs \n\n lines\r\n end   ",
    "1 12 123 1234 12345 3.14 1,000,000 v1.2.3",
    "naïve café – “quoted” … №5 ½ ², e\u0301 A\u030a",
    "日本語のテキスト 中文字符 한국어 русский עברית العربية हिन्दी ไทย",
    "def f(x):\n    return x**2 + foo_bar['a']  # comment\n\n\n",
    "CamelCase HTTPServer iPhone McDonald ABCdef 🎉👍🏽 a/b/c/ !?!? $$ ^|~`",
    "don't DON'T ' s 's's\n 'S 12a a12 _under_ ーー „a“ x²y \u00a0 \u3000z",
)
"""Texts on which the written tokenizer has to agree with the original."""


def vocabulary(checkpoint: Checkpoint, tokenizer: Tokenizer, size: int) -> dict:  # type: ignore[type-arg]
    """Return ``tokenizer.*`` of a model whose embedding has ``size`` rows.

    The result is read again and compared with the tokenizer on some texts. Raises
    :class:`CheckpointError` for a tokenizer that GGUF files cannot describe.
    """
    where = f"{checkpoint.path}: tokenizer"
    rules = parse_json(tokenizer.rules.to_str(), "tokenizer")
    model = rules["model"]
    if model.get("type") != "BPE":
        raise _refusal(where, f"the model {model.get('type')}", "BPE")
    tokens, types = _tokens(rules, size, where)
    fields: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if model.get("byte_fallback"):
        fields |= {"model": "llama", "scores": _scores(model, tokens)}
        fields["add_space_prefix"] = _has_prefix(tokenizer)
        if not any(BYTE_TOKEN.fullmatch(token) for token in tokens):
            raise _refusal(where, "byte_fallback without tokens of bytes", "all bytes")
    else:
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        fields |= {"model": "gpt2", "merges": merges}
        fields["pre"] = pre_tokenizer_name(tokenizer, model, where)
    fields |= _special_ids(checkpoint, tokenizer, tokens)
    fields |= _frame(tokenizer, fields)
    written = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    _check(tokenizer, written, where)
    return written | _templates(checkpoint)


def pre_tokenizer_name(
    tokenizer: Tokenizer, model: Mapping[str, Any], where: str
) -> str:
    """Return the name of the rules that split :data:`PROBES` as the tokenizer does."""
    rules = tokenizer.rules
    splitter, normalizer = rules.pre_tokenizer, rules.normalizer
    if splitter is None:
        raise _refusal(where, "no pre-tokenizer", "one of byte-level BPE")
    composed = library().normalizers.NFC()

    def agrees(name: str) -> bool:
        ours = pre_tokenizer(name)
        for text in PROBES:
            theirs = text if normalizer is None else normalizer.normalize_str(text)
            mine = composed.normalize_str(text) if name in COMPOSED else text
            if theirs != mine:
                return False
            if splitter.pre_tokenize_str(mine) != ours.pre_tokenize_str(mine):
                return False
        return bool(model.get("ignore_merges")) == (name in WHOLE_WORDS)

    found = next((name for name in PATTERNS if agrees(name)), None)
    if found is None:
        raise _refusal(
            where, "rules that split texts as no known GGUF file does",
            f"those of {', '.join(PATTERNS)}",
        )  # fmt: skip
    return found


def _tokens(
    rules: Mapping[str, Any], size: int, where: str
) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int32]]]:
    """Return text and type of each id; ids without a token are unused."""
    model, unknown = rules["model"], rules["model"].get("unk_token")
    texts = {index: token for token, index in model["vocab"].items()}
    kinds = {
        index: UNKNOWN if token == unknown
        else BYTE if model.get("byte_fallback") and BYTE_TOKEN.fullmatch(token)
        else NORMAL
        for index, token in texts.items()
    }  # fmt: skip
    for added in rules.get("added_tokens") or ():
        index = added["id"]
        texts[index] = added["content"]
        if kinds.get(index) != UNKNOWN:
            kinds[index] = CONTROL if added["special"] else USER_DEFINED
    count = max(size, max(texts, default=-1) + 1)
    if count > size:
        raise _refusal(where, f"{count} tokens", f"at most {size}, the embedding's")
    tokens = [texts.get(index, f"[PAD{index}]") for index in range(count)]
    types = np.array([kinds.get(index, UNUSED) for index in range(count)], np.int32)
    return tokens, types


def _scores(model: Mapping[str, Any], tokens: list[str]) -> Any:
    """Return scores in the order of merges: tokens that are merged first are highest.

    Single characters have 0, as merges never produce them.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault("".join(pair), rank)
    last = len(model["merges"])
    return np.array(
        [-ranks.get(token, last if len(token) > 1 else -1) - 1 for token in tokens],
        np.float32,
    )


def _has_prefix(tokenizer: Tokenizer) -> bool:
    """Whether a space is put before texts."""
    tokens = tokenizer.rules.encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith(SPACE)


def _special_ids(
    checkpoint: Checkpoint, tokenizer: Tokenizer, tokens: list[str]
) -> dict[str, int]:
    """Return the ids of special tokens that the model's files name."""
    ids = {token: index for index, token in enumerate(tokens)}
    named, config = checkpoint.special_tokens, checkpoint.config
    found = {
        f"{name}_token_id": ids[text]
        for field, name in GGUF_NAMES.items()
        if (text := named.get(field)) in ids
    }
    for name in ("bos", "pad"):
        value = config.get(f"{name}_token_id")
        key = "padding" if name == "pad" else name
        if type(value) is int and 0 <= value < len(tokens):
            found.setdefault(f"{key}_token_id", value)
    ends = [index for index in checkpoint.eos_token_ids if index < len(tokens)]
    if ends:
        found["eos_token_id"] = end = found.get("eos_token_id", ends[0])
        others = [index for index in ends if index != end]
        found |= dict(zip(("eot_token_id", "eom_token_id"), others, strict=False))
        if len(others) > 2:
            raise _refusal(
                str(checkpoint.path), f"{len(ends)} tokens that end answers", "3"
            )
    unknown = tokenizer.rules.token_to_id(
        parse_json(tokenizer.rules.to_str(), "tokenizer")["model"].get("unk_token")
        or ""
    )
    return found if unknown is None else found | {"unknown_token_id": unknown}


def _frame(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether texts begin with BOS, and end with EOS."""
    plain = tokenizer.encode("a", add_special=False)
    framed = tokenizer.encode("a")
    before = framed[:1] == [fields.get("bos_token_id")] and framed != plain
    after = framed[-1:] == [fields.get("eos_token_id")] and framed != plain
    return {"add_bos_token": before, "add_eos_token": after}


def _templates(checkpoint: Checkpoint) -> dict[str, str]:
    template, key = checkpoint.chat_template, "tokenizer.chat_template"
    if template is None:
        return {}
    tools = template.tool_use
    return {
        key: template.source,
        **({} if tools is None else {f"{key}.tool_use": tools.source}),
    }


def _check(tokenizer: Tokenizer, written: Mapping[str, Any], where: str) -> None:
    """Raise if the written tokenizer encodes a probe in another way."""
    again = read_tokenizer(written, where)
    for text in PROBES:
        expected, found = tokenizer.encode(text), again.encode(text)
        if found != expected:
            raise _refusal(
                where, f"{expected[:20]} for {text[:40]!r}",
                f"{found[:20]}, which its GGUF form gives",
            )  # fmt: skip


def _refusal(where: str, found: str, accepted: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: cannot be written as GGUF: found {found}; accepted: {accepted}"
    )
