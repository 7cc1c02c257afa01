"""OpenTelemetry spans, one for each request that generates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from inl.errors import MissingPackage
from inl.install_command import install_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inl.serve.request_log import Record

NAME = "inl.serve"


class Tracing:
    """Makes spans; the extra ``inl-core[otel]`` has what it needs.

    provider: an OpenTelemetry ``TracerProvider``. Its exporter sends spans from a
    thread of its own.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation import tracecontext

        self._provider = provider
        self._tracer = provider.get_tracer(NAME)
        self._context = tracecontext.TraceContextTextMapPropagator()

    def record(self, record: Record, headers: Mapping[str, str]) -> None:
        """Export a finished request, in the trace of its ``traceparent`` header."""
        from opentelemetry.trace import SpanKind, StatusCode

        end = time.time_ns()
        span = self._tracer.start_span(
            f"{record.method} {record.path}",
            context=self._context.extract(headers),
            kind=SpanKind.SERVER,
            start_time=end - int(record.seconds * 1e9),
            attributes=attributes_of(record),
        )
        if record.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send what is not sent yet."""
        self._provider.shutdown()


def attributes_of(record: Record) -> dict[str, Any]:
    """Return the attributes of a request's span, by the names of vLLM."""
    fields: dict[str, Any] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "gen_ai.request.id": record.number,
        "gen_ai.request.model": record.model,
        "gen_ai.response.finish_reasons": list(record.reasons),
        "gen_ai.latency.e2e": record.seconds,
    }
    if record.usage is not None:
        fields["gen_ai.usage.prompt_tokens"] = record.usage.prompt_tokens
        fields["gen_ai.usage.cached_tokens"] = record.usage.cached_tokens
        fields["gen_ai.usage.completion_tokens"] = record.usage.completion_tokens
    if record.phases is not None:
        fields["gen_ai.latency.time_in_queue"] = record.phases.queue
        fields["gen_ai.latency.time_in_model_prefill"] = record.phases.prefill
        fields["gen_ai.latency.time_in_model_decode"] = record.phases.decode
        fields["gen_ai.latency.time_to_first_token"] = record.phases.first_token
    return {name: value for name, value in fields.items() if value is not None}


def exporting_tracing() -> Tracing:
    """Return the tracing that sends spans where the environment variables say.

    They are those of OpenTelemetry, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``. Raises
    :class:`~inl.errors.MissingPackage`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingPackage(
            f"{error.name}, which spans need, is not installed. "
            f"Try: {install_command('inl-core[otel]')}"
        ) from error
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are used before this name.
    provider = TracerProvider(resource=Resource.create({"service.name": NAME}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
