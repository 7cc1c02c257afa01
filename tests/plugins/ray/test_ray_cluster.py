"""How a process joins a cluster; nothing of Ray is started."""

from __future__ import annotations

import threading

import ray

from inl_ray import cluster


def test_engines_that_start_at_once_join_a_cluster_once(monkeypatch):
    """``ray.init`` fails if it is called again, or while it runs."""
    calls, inside, joined = [], threading.Event(), threading.Event()

    def init(**_):
        calls.append(1)
        inside.set()
        # Another thread has time to come, unless it is kept out.
        joined.wait(0.2)
        joined.set()

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", joined.is_set)
    first = threading.Thread(target=cluster.join_cluster)
    first.start()
    assert inside.wait(60)
    cluster.join_cluster()
    first.join(60)
    assert calls == [1]
