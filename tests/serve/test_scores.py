"""Embeddings, ranks, scores and classes of encoders over HTTP."""

from __future__ import annotations

import base64
import threading

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from encoder_servers import EncoderServer
from inl.runners.encoder_runner import EncoderRunner
from inl.testing.tiny_encoder import plain_encoding
from waiting import until

BOUND = 1e-4
DOCUMENTS = ["w7 w3", "w9 w40 w3 w9 w80 w11", "w1", "w3 w9 w40"]
QUERY = "w3 w9 w40"


def ids_of(text):
    return [0, *(2 + int(word[1:]) for word in text.split()), 1]


@pytest.fixture(scope="module")
def embedding():
    with EncoderServer() as server:
        yield server


@pytest.fixture(scope="module")
def classifying():
    with EncoderServer(labels=3) as server:
        yield server


@pytest.fixture(scope="module")
def crossing():
    with EncoderServer(labels=1) as server:
        yield server


@pytest.mark.parametrize("form", ["float", "base64"])
@pytest.mark.parametrize("dimensions", [None, 12])
def test_embeddings_of_an_encoder(embedding, form, dimensions):
    status, answer = embedding.post(
        "/v1/embeddings", input=DOCUMENTS, encoding_format=form, dimensions=dimensions
    )
    assert status == 200
    width = dimensions or 48
    for each, text in zip(answer["data"], DOCUMENTS, strict=True):
        row = each["embedding"]
        if form == "base64":
            row = np.frombuffer(base64.b64decode(row), "<f4")
        expected = embedding.row(*ids_of(text))[:width]
        expected = expected / np.linalg.norm(expected)
        assert np.abs(np.array(row) - expected).max() < BOUND
    assert answer["usage"]["prompt_tokens"] == sum(map(len, map(ids_of, DOCUMENTS)))


def test_more_dimensions_than_there_are_are_refused(embedding):
    status, answer = embedding.post("/v1/embeddings", input="w1", dimensions=49)
    assert status == 400
    assert "dimensions: found 49, accepts 1 to 48" in answer["error"]["message"]


@pytest.mark.parametrize("top", [None, 2])
def test_rerank_by_embeddings(embedding, top):
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    body = {} if top is None else {"top_n": top}
    status, answer = embedding.post(
        "/v1/rerank", query=QUERY, documents=documents, **body
    )
    assert status == 200
    query = embedding.row(*ids_of(QUERY))
    scores = np.array([embedding.row(*ids_of(text)) @ query for text in DOCUMENTS])
    results = answer["results"]
    assert [each["index"] for each in results] == np.argsort(-scores)[:top].tolist()
    for each in results:
        assert abs(each["relevance_score"] - scores[each["index"]]) < BOUND
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    assert results[0]["index"] == 3
    bare = embedding.post(
        "/v1/rerank", query=QUERY, documents=["w1"], return_documents=False
    )[1]
    assert "document" not in bare["results"][0]


def test_scores_of_one_text_and_of_pairs(embedding):
    one = embedding.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)[1]
    found = [each["score"] for each in one["data"]]
    query = embedding.row(*ids_of(QUERY))
    scores = [embedding.row(*ids_of(text)) @ query for text in DOCUMENTS]
    assert np.abs(np.array(found) - scores).max() < BOUND
    same = embedding.post("/v1/score", text_1=DOCUMENTS, text_2=DOCUMENTS)[1]
    assert np.allclose([each["score"] for each in same["data"]], 1, atol=BOUND)
    status, answer = embedding.post("/v1/score", text_1=["w1", "w2"], text_2=DOCUMENTS)
    assert status == 400
    assert "text_1: found 2 texts" in answer["error"]["message"]


def test_a_cross_encoder_reads_pairs(crossing):
    status, answer = crossing.post("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert status == 200
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    pairs = crossing.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)[1]["data"]
    by_index = {each["index"]: each["relevance_score"] for each in answer["results"]}
    for each in pairs:
        assert abs(each["score"] - by_index[each["index"]]) < BOUND
    # The second text has the other kind of segment, which the order of a pair shows.
    swapped = crossing.post("/v1/score", text_1=DOCUMENTS, text_2=[QUERY] * 4)[1]
    differences = [
        abs(a["score"] - b["score"])
        for a, b in zip(pairs, swapped["data"], strict=True)
    ]
    assert max(differences[:3]) > 10 * BOUND


@pytest.mark.parametrize("version", ["Client", "ClientV2"])
def test_coheres_client(embedding, version):
    cohere, httpx = map(pytest.importorskip, ("cohere", "httpx"))
    with httpx.Client() as http:
        client = getattr(cohere, version)(
            "none", base_url=embedding.url, httpx_client=http
        )
        found = client.rerank(model="hash", query=QUERY, documents=DOCUMENTS, top_n=3)
    query = embedding.row(*ids_of(QUERY))
    scores = np.array([embedding.row(*ids_of(text)) @ query for text in DOCUMENTS])
    assert [each.index for each in found.results] == np.argsort(-scores)[:3].tolist()
    for each in found.results:
        assert abs(each.relevance_score - scores[each.index]) < BOUND


@pytest.mark.parametrize("name", ["score", "classify", "rerank"])
def test_paths_without_a_version(classifying, embedding, name):
    model = classifying if name == "classify" else embedding
    body = {
        "score": {"text_1": QUERY, "text_2": DOCUMENTS},
        "classify": {"input": DOCUMENTS},
        "rerank": {"query": QUERY, "documents": DOCUMENTS},
    }[name]
    (status, found), (_, other) = (
        model.post(path, **body) for path in (f"/{name}", f"/v1/{name}")
    )
    assert status == 200
    kept = "results" if name == "rerank" else "data"
    assert found[kept] == other[kept]


def test_classes_of_texts(classifying):
    status, answer = classifying.post("/v1/classify", input=DOCUMENTS)
    assert status == 200
    for each, text in zip(answer["data"], DOCUMENTS, strict=True):
        hf, tensors = classifying.hf, classifying.tensors
        logits = plain_encoding(hf, tensors, ids_of(text), "first", unit=False)
        expected = np.exp(logits) / np.exp(logits).sum()
        assert np.abs(np.array(each["probs"]) - expected).max() < BOUND
        assert each["label"] == f"kind {expected.argmax()}"
        assert each["num_classes"] == 3


@pytest.mark.parametrize(
    ("model", "path", "body", "part"),
    [
        ("embedding", "/v1/classify", {"input": "w1"}, "has no head that classifies"),
        ("classifying", "/v1/embeddings", {"input": "w1"}, "classifies; use classify"),
        ("classifying", "/v1/score", {"text_1": "w1", "text_2": "w2"}, "has 3 labels"),
        ("embedding", "/v1/completions", {"prompt": "w1"}, "is an encoder"),
        ("embedding", "/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("embedding", "/v1/rerank",
         {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)  # fmt: skip
def test_refusals_name_the_reason(model, path, body, part, request):
    status, answer = request.getfixturevalue(model).post(path, **body)
    assert status == 400
    assert part in answer["error"]["message"]


def test_an_encoder_is_ready(embedding):
    assert embedding.send("GET", "/ready")[0] == 200


def test_calls_of_one_text_share_programs(monkeypatch):
    """What waits while a program runs is computed by the next one."""
    sizes, started, go_on = [], threading.Event(), threading.Event()
    encode = EncoderRunner.encode

    def counted(self, sequences):
        sizes.append(len(sequences))
        if len(sizes) == 1:
            started.set()
            assert go_on.wait(300)
        return encode(self, sequences)

    with EncoderServer() as server:
        _, first = server.post("/v1/embeddings", input="w0")
        monkeypatch.setattr(EncoderRunner, "encode", counted)
        queue = server.engine._sequences
        texts = [f"w{number}" for number in range(8)]
        held = server.begin("POST", "/v1/embeddings", {"input": texts[0]})
        assert started.wait(300)
        others = [
            server.begin("POST", "/v1/embeddings", {"input": text})
            for text in texts[1:]
        ]
        until(lambda: len(queue._waiting) == 7)
        go_on.set()
        for text, each in zip(texts, [held, *others], strict=True):
            status, _, answer = each.result(300)
            assert status == 200
            row = np.array(answer["data"][0]["embedding"])
            assert np.abs(row - server.row(*ids_of(text))).max() < BOUND
    assert sizes == [1, 7]
    assert first["data"]
