"""Reader of tiktoken.model: a byte-level vocabulary, as metadata of GGUF files.

A line for each token: its bytes in base64, and its id, which is also its rank. Two
adjacent tokens whose bytes together are a token merge, the lowest rank first. Control
tokens and the pattern that splits texts are not in the file.
https://github.com/openai/tiktoken
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.text.gguf_fields import CONTROL, NORMAL, USER_DEFINED
from inl.text.gguf_vocabulary import MAX_TOKENS
from inl.text.spelling import LETTERS

if TYPE_CHECKING:
    from inl.text.tokenizer import Tokenizer

MAX_PIECE: Final = 256
"""Limit of the bytes of a token; real ones have up to 128."""
BEGINNING: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|\Z)")
"""First line of a file."""
SPELLED: Final = {byte: ord(letter) for byte, letter in enumerate(LETTERS)}

LLAMA_3: Final = (
    "begin_of_text", "end_of_text", "reserved_special_token_0",
    "reserved_special_token_1", "finetune_right_pad_id", "reserved_special_token_2",
    "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag",
)  # fmt: skip
"""Control tokens of Llama 3.1 behind its vocabulary; reserved ones follow."""


class Rules(NamedTuple):
    """What the tokenizer of a family adds to its file."""

    pattern: str
    """Key of :data:`inl.text.pre_tokenizers.PRE`."""
    control: tuple[str, ...] = ()
    """Control tokens behind the vocabulary where no file lists them."""
    reserved: str = "<|reserved_token_{id}|>"
    """Text of a control token that no file lists."""
    begins: str = ""
    """Token at the beginning of texts, if no file names it."""
    ends: str = ""
    """Token at the end of texts, if no file names it."""


LLAMA: Final = Rules(
    "llama-bpe",
    (
        *(f"<|{name}|>" for name in LLAMA_3),
        *(f"<|reserved_special_token_{index}|>" for index in range(3, 248)),
    ),
    begins="<|begin_of_text|>",
    ends="<|end_of_text|>",
)
KIMI: Final = Rules("kimi-k2", begins="[BOS]", ends="[EOS]")
FAMILIES: Final = {
    "llama": LLAMA, "kimi_k2": KIMI, "llama4": Rules("llama4"),
    "llama4_text": Rules("llama4"),
}  # fmt: skip
"""Rules by ``model_type``."""
CLASSES: Final = {"TikTokenTokenizer": KIMI}
"""Rules by ``tokenizer_class``: that of Kimi K2 and Moonlight."""


def is_tiktoken(data: bytes) -> bool:
    """Return whether a file begins as a vocabulary of tiktoken."""
    return BEGINNING.match(data) is not None


def parse_tiktoken(
    data: bytes,
    where: str,
    rules: Rules,
    added: Mapping[int, tuple[str, bool]],
    named: Mapping[str, str],
    frame: Mapping[str, bool],
) -> Tokenizer:
    """Build the tokenizer of a file; raises :class:`CheckpointError`.

    added: text of tokens behind the vocabulary and whether they are special, by id.
    named: texts of ``bos_token`` and ``eos_token``. frame: values of ``add_bos_token``
    and ``add_eos_token``.
    """
    from inl.text.gguf_vocabulary import open_tokenizer

    tokens = _tokens(data, where)
    merges = list(_merges(tokens, where))
    types = [NORMAL] * len(tokens)
    behind = {index: one for index, one in added.items() if index >= len(tokens)}
    default = dict(enumerate(rules.control, len(tokens))) if not behind else {}
    last = max([*behind, *default], default=-1)
    if last >= MAX_TOKENS:
        raise _refused(where, f"an added token of id {last}", f"below {MAX_TOKENS}")
    for index in range(len(tokens), last + 1):
        spare = default.get(index, rules.reserved.format(id=index))
        text, special = behind.get(index, (spare, True))
        tokens.append(text)
        types.append(CONTROL if special else USER_DEFINED)
    ids = {
        f"{name}_token_id": tokens.index(text)
        for name, default_text in (("bos", rules.begins), ("eos", rules.ends))
        if (text := named.get(f"{name}_token", default_text)) in tokens
    }
    fields = {
        "model": "gpt2", "pre": rules.pattern, "tokens": tokens, "token_type": types,
        "merges": merges, **ids, **frame,
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return open_tokenizer(metadata, where)


def rules_of(kind: Any, tokenizer_class: Any, where: str) -> Rules:
    """Return the rules for a ``model_type`` and a ``tokenizer_class``.

    Raises :class:`CheckpointError` for others than the known ones.
    """
    for name, known in ((tokenizer_class, CLASSES), (kind, FAMILIES)):
        if isinstance(name, str) and name in known:
            return known[name]
    raise CheckpointError(
        f"{where}: the file does not say how texts are split: found tokenizer_class "
        f"{show(tokenizer_class)} and model_type {show(kind)}; accepted: "
        f"{', '.join((*CLASSES, *FAMILIES))}, or a tokenizer.json"
    )


def _tokens(data: bytes, where: str) -> list[str]:
    """Return the tokens in GPT-2's byte letters, by id."""
    pieces: dict[int, str] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        text, _, rank = line.partition(b" ")
        try:
            piece, index = base64.b64decode(text, validate=True), int(rank)
        except (binascii.Error, ValueError):
            piece, index = b"", -1
        if not 0 < len(piece) <= MAX_PIECE or not 0 <= index < MAX_TOKENS:
            raise _refused(
                where,
                f"{show(line)} in line {number}",
                f"a token of up to {MAX_PIECE} bytes in base64, and its id",
            )
        if index in pieces:
            raise _refused(where, f"id {index} twice", "each id once")
        pieces[index] = piece.decode("latin-1").translate(SPELLED)
    missing = set(range(len(pieces))) - set(pieces)
    if missing or not pieces:
        found = f"no token of id {min(missing)}" if missing else "no tokens"
        raise _refused(where, found, "ids from 0 without a hole")
    return [pieces[index] for index in range(len(pieces))]


def _merges(tokens: Sequence[str], where: str) -> Iterator[str]:
    """Yield the pairs of tokens that merge, the lowest rank first."""
    ranks = {token: index for index, token in enumerate(tokens)}
    count = 0
    for token in tokens:
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        count += len(pairs)
        if count > MAX_TOKENS:
            raise _refused(where, f"over {MAX_TOKENS} merges", "fewer")
        for left, right in sorted(pairs, key=lambda pair: ranks[pair[0]]):
            yield f"{left} {right}"


def _refused(where: str, found: str, accepted: str) -> CheckpointError:
    return CheckpointError(f"{where}: found {found}; accepted: {accepted}")
