"""OpenTelemetry spans of requests."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from http_servers import HashServer
from inl.serve.tracing import Tracing
from waiting import until

PATH = "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class TracedServer(HashServer):
    def make(self):
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)
        return super().make()

    def spans(self, count):
        """Return the spans, which are recorded after the answers are sent."""
        until(lambda: len(self.exporter.get_finished_spans()) >= count)
        return self.exporter.get_finished_spans()


def test_each_request_is_a_span_of_its_clients_trace():
    with TracedServer(max_batch=2, seconds=0.002) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": [1, 2, 3], "max_tokens": 9, "ignore_eos": True}
        sent = server.send("POST", PATH, body, headers)
        server.send("POST", PATH, {**body, "stream": True})
        server.send("POST", PATH, {**body, "priority": "high"})
        server.send("GET", "/health")
        first, second = server.spans(2)
    assert format(first.context.trace_id, "032x") == TRACE
    assert format(first.parent.span_id, "016x") == PARENT
    assert second.parent is None
    found = first.attributes
    assert found["gen_ai.request.id"] == sent[1]["x-request-id"]
    assert found["gen_ai.request.model"] == "hash"
    for span in (first, second):
        found = span.attributes
        assert span.name == f"POST {PATH}"
        assert found["gen_ai.usage.prompt_tokens"] == 3
        assert found["gen_ai.usage.completion_tokens"] == 9
        assert found["gen_ai.response.finish_reasons"] == ("length",)
        names = ("in_queue", "in_model_prefill", "in_model_decode")
        times = [found[f"gen_ai.latency.time_{name}"] for name in names]
        assert all(each >= 0 for each in times)
        assert times[2] >= 8 * 0.002
        seconds = (span.end_time - span.start_time) / 1e9
        assert sum(times) <= seconds + 0.001


def test_a_malformed_parent_starts_a_new_trace():
    with TracedServer(max_batch=2) as server:
        body = {"prompt": [1], "max_tokens": 1}
        assert server.send("POST", PATH, body, {"traceparent": "00-zz"})[0] == 200
        (span,) = server.spans(1)
    assert span.parent is None
