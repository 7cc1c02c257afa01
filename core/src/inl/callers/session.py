"""One caller: opens a model and streams requests of it over two byte streams."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import fields
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, cast, final

from inl.callers import frames
from inl.callers.frames import Frame, Kind
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.engine.options import GenerationOptions, check_one_sample
from inl.errors import InlError, ProtocolError, RequestError, message

if TYPE_CHECKING:
    from inl.engine.request_handle import RequestHandle


@final
class Session:
    """Answers the frames of ``source`` on ``sink`` until CLOSE or the end of source.

    An error of one request is sent with its number. One of the connection is sent with
    number 0 and ends it: a broken frame, another version, a model that does not open.
    """

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink
        self._sending = threading.Lock()
        self._handles: dict[int, RequestHandle] = {}
        self._sent: dict[int, int] = {}
        """Tokens that were sent, by request."""
        self._changed: SimpleQueue[int] = SimpleQueue()
        """Requests with news; 0 ends the thread that sends them."""
        self._registering = threading.Lock()

    def run(self) -> bool:
        """Serve; returns whether the connection ended without an error."""
        try:
            if (engine := self._open()) is not None:
                self._serve(engine)
        except InlError as error:
            self._error(0, error)
            return False
        return True

    def _open(self) -> InferenceEngine | None:
        first = self._read(Kind.HELLO)
        if first is None:
            return None
        version = frames.read_number(first.payload, "HELLO")
        if version != frames.VERSION:
            raise ProtocolError(
                f"caller: found protocol version {version}, this inl has "
                f"{frames.VERSION}"
            )
        self._send(Kind.HELLO, frames.NUMBER.pack(frames.VERSION))
        second = self._read(Kind.OPEN)
        if second is None:
            return None
        value = frames.read_object(second.payload, "OPEN")
        engine = InferenceEngine.from_pretrained(
            value.pop("model", None), _config(value.pop("config", {}), value)
        )
        self._send(Kind.READY, frames.numbered(engine.context, str(engine.device)))
        return engine

    def _serve(self, engine: InferenceEngine) -> None:
        sender = threading.Thread(target=self._send_news, name="inl-caller")
        sender.start()
        try:
            while (frame := frames.read(self._source)) is not None:
                if frame.kind is Kind.CLOSE:
                    return
                self._handle(engine, frame)
        finally:
            with self._registering:
                handles = list(self._handles.values())
            for handle in handles:
                engine.cancel(handle)
            self._changed.put(0)
            sender.join()
            engine.close()

    def _handle(self, engine: InferenceEngine, frame: Frame) -> None:
        number = frames.read_number(frame.payload, frame.kind.name)
        if frame.kind is Kind.CANCEL:
            with self._registering:
                handle = self._handles.get(number)
            if handle is not None:  # else it has finished: DONE is on its way
                engine.cancel(handle)
                self._changed.put(number)
            return
        if frame.kind is not Kind.REQUEST:
            raise ProtocolError(
                f"caller: found {frame.kind.name}, accepted: REQUEST, CANCEL, CLOSE"
            )
        if number == 0 or number in self._handles:
            raise ProtocolError(
                f"caller: REQUEST: found number {number}, accepted: one above 0 that "
                "no open request has"
            )
        try:
            self._start(engine, number, frame.payload[frames.NUMBER.size :])
        except InlError as error:
            self._error(number, error)

    def _start(self, engine: InferenceEngine, number: int, payload: bytes) -> None:
        options = frames.read_object(payload, "REQUEST")
        prompt = _prompt(engine, options)
        if isinstance(bias := options.get("logit_bias"), dict):
            options["logit_bias"] = _integer_keys(bias)
        if unknown := sorted(options.keys() - {*GenerationOptions.__annotations__}):
            raise RequestError(f"options: found {', '.join(unknown):.200}")
        check_one_sample(cast("GenerationOptions", options))
        with self._registering:
            self._handles[number] = engine.start(
                prompt, listener=lambda: self._changed.put(number), **options
            )
            self._sent[number] = 0

    def _send_news(self) -> None:
        while number := self._changed.get():
            with self._registering:
                handle = self._handles.get(number)
            if handle is not None:
                self._send_output(number, handle)

    def _send_output(self, number: int, handle: RequestHandle) -> None:
        """Send what is new of a request."""
        # Read before the tokens are, so that the last ones are not lost.
        completed = handle.completed
        ids, text = handle.token_ids[self._sent[number] :], handle.take()
        if ids or text:
            self._sent[number] += len(ids)
            self._send(Kind.TOKENS, frames.tokens(number, ids, text))
        if not completed:
            return
        # Before the caller reads the end, after which it may use the number again.
        with self._registering:
            del self._handles[number], self._sent[number]
        try:
            done = handle.completion()
        except InlError as error:
            self._error(number, error)
        else:
            head = frames.PAIR.pack(number, done.prompt_tokens)
            self._send(Kind.DONE, head + done.finish_reason.encode())

    def _read(self, kind: Kind) -> Frame | None:
        frame = frames.read(self._source)
        if frame is not None and frame.kind is not kind:
            raise ProtocolError(
                f"caller: found {frame.kind.name}, accepted: {kind.name}"
            )
        return frame

    def _error(self, number: int, error: InlError) -> None:
        text = f"{type(error).__name__}: {message(error)}"
        self._send(Kind.ERROR, frames.numbered(number, text))

    def _send(self, kind: Kind, payload: bytes) -> None:
        try:
            with self._sending:
                self._sink.write(frames.encode(kind, payload))
                self._sink.flush()
        except OSError:
            pass  # the caller has gone; the end of the source follows


def _config(given: Any, others: Mapping[str, Any]) -> EngineConfig:
    known = {field.name for field in fields(EngineConfig)}
    if others or not isinstance(given, dict) or given.keys() - known:
        found = sorted(others) or (
            sorted(given.keys() - known) if isinstance(given, dict) else given
        )
        raise RequestError(
            f"OPEN: found {found!r:.200}, accepted: model, and config with fields of "
            "EngineConfig"
        )
    return EngineConfig(**given)


def _prompt(engine: InferenceEngine, options: dict[str, Any]) -> Any:
    """Take the prompt out of the options: a text, token ids, or a conversation."""
    given = [name for name in ("prompt", "messages") if name in options]
    if len(given) != 1:
        raise RequestError(
            f"REQUEST: found {' and '.join(given) or 'neither'}, accepted: one of "
            "prompt and messages"
        )
    value = options.pop(given[0])
    if given == ["messages"]:
        return engine.chat_ids(value)
    if not isinstance(value, str | list):
        raise RequestError(
            f"prompt: found {value!r:.60}, accepted: a string or token ids"
        )
    return value


def _integer_keys(value: Mapping[str, Any]) -> dict[int, Any]:
    try:
        return {int(name): each for name, each in value.items()}
    except ValueError as error:
        raise RequestError(f"logit_bias: accepted: token ids: {error}") from None
