"""A running request that leaves its engine, for another one of the same model."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from inl.bounded_json import parse_object
from inl.engine.options import NEUTRAL_SAMPLING, is_empty
from inl.errors import InvalidJson, ProtocolError
from inl.guidance.structured import with_kind
from inl.kv_transfer.spans import TokenSpan
from inl.protocol.wire_arrays import contents, read_contents
from inl.scheduling.sampling_params import TokenLogprob

if TYPE_CHECKING:
    from inl.engine.request_handle import RequestHandle
    from inl.scheduling.request import Request

FORMAT = "inl request 1"
DIGEST = 32
LENGTH = struct.Struct("<Q")
MAX_HEAD = 64 << 20
"""Longest description, in bytes: token ids and a grammar."""

_INVALID = InvalidJson, KeyError, TypeError, ValueError, OverflowError, struct.error
"""What reading bytes of another origin may raise."""

Logprobs = Sequence[TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class MovedRequest:
    """Everything that another engine needs to continue a request.

    Uniform numbers belong to positions, and the state of a grammar to the tokens, so
    that the seed and the tokens stand for both. Blocks save the other engine computing
    them, and change no token.
    """

    model: str
    """Digest of the model."""
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Tokens that were generated."""
    options: Mapping[str, Any]
    """Options of :class:`~inl.engine.options.GenerationOptions`, of types of JSON."""
    adapter_digest: str = ""
    """Digest of the adapter that ``options`` name."""
    token_logprobs: Logprobs = ()
    """Of ``output_ids``, if the options ask for them."""
    prompt_logprobs: Logprobs = ()
    """Of the prompt's tokens so far."""
    identity: str = ""
    """Digest of all that contents of blocks depend on beside the tokens."""
    spans: Sequence[TokenSpan] = field(default=(), repr=False)
    """Contents of the blocks of both, as far as the device has them."""

    def to_bytes(self) -> bytes:
        """Return all of it, behind a checksum."""
        head = {
            "format": FORMAT,
            "model": self.model,
            "prompt": self.prompt_ids,
            "output": self.output_ids,
            "options": self.options,
            "adapter": self.adapter_digest,
            "logprobs": [self.token_logprobs, self.prompt_logprobs],
            "identity": self.identity,
            "spans": [(each.group, each.start, each.block_size) for each in self.spans],
        }
        pieces = [json.dumps(head).encode(), *(contents(x.parts) for x in self.spans)]
        data = b"".join(LENGTH.pack(len(piece)) + piece for piece in pieces)
        return sha256(data).digest() + data

    @classmethod
    def from_bytes(cls, data: bytes) -> MovedRequest:
        """Read what :meth:`to_bytes` has returned.

        Raises :class:`~inl.errors.ProtocolError` for anything else.
        """
        if sha256(memoryview(data)[DIGEST:]).digest() != data[:DIGEST]:
            raise ProtocolError("moved request: the checksum is wrong")
        try:
            head, *pieces = _divided(data)
            found = parse_object(head, "moved request", max_bytes=MAX_HEAD)
            if found.get("format") != FORMAT:
                raise ProtocolError(
                    f"moved request: found format {found.get('format')!r:.40}, accepts "
                    f"{FORMAT!r}"
                )
            options = dict(found["options"])
            if bias := options.get("logit_bias"):
                options["logit_bias"] = {int(key): bias[key] for key in bias}
            tokens, prompt = (list(map(_logprob, part)) for part in found["logprobs"])
            places = [(int(g), int(at), int(size)) for g, at, size in found["spans"]]
            spans = [
                TokenSpan(*place, read_contents(piece))
                for place, piece in zip(places, pieces, strict=True)
            ]
            return cls(
                found["model"], tuple(found["prompt"]), tuple(found["output"]), options,
                found["adapter"], tokens, prompt, found["identity"], spans,
            )  # fmt: skip
        except _INVALID as error:
            raise ProtocolError(f"moved request: {error}") from error


def _divided(data: bytes) -> list[bytes]:
    pieces, at = [], DIGEST
    while at < len(data):
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        pieces.append(data[at : at + size])
        at += size
    return pieces


def _logprob(found: Any) -> TokenLogprob | None:
    if found is None:
        return None
    token, logprob, top = found
    return TokenLogprob(token, logprob, tuple((int(t), float(x)) for t, x in top))


def portable_options(options: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Return the options of one request without what an engine decides itself.

    options: with the sampling options that the model recommends.
    """
    found = {**NEUTRAL_SAMPLING, **options, "seed": request.seed, "n": 1}
    if not is_empty(found):  # type: ignore[arg-type]
        found["max_tokens"] = request.max_tokens
    if request.prompt_logprobs is None:
        found["prompt_logprobs"] = None
    return found


def moved_request(
    handle: RequestHandle, spans: Sequence[TokenSpan], *, model: str, identity: str
) -> MovedRequest:
    """Return a request that has ended here."""
    request, options = handle.request, dict(handle.options)
    if options.get("structured") is not None:
        options["structured"] = with_kind(options["structured"])
    # As JSON would give them to the other engine; keys of a bias are numbers.
    bias = options.pop("logit_bias", None)
    options = json.loads(json.dumps(options, default=_plain))
    if bias:
        options["logit_bias"] = {int(token): float(bias[token]) for token in bias}
    return MovedRequest(
        model, tuple(request.tokens[: request.prompt_tokens]),
        tuple(request.output_ids), options, request.adapter_digest,
        tuple(request.token_logprobs), tuple(request.prompt_token_logprobs), identity,
        spans,
    )  # fmt: skip


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)
