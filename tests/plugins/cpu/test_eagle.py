"""EAGLE-3 heads change no output of the native backend, and draft as they should."""

from __future__ import annotations

from eagle_heads import PLAIN_REQUESTS, assert_backend_drafts


def test_a_head_changes_no_output(backend, tmp_path):
    requests = [PLAIN_REQUESTS[at] for at in (0, 1, 2, 5)]
    assert_backend_drafts(backend, tmp_path, requests)
