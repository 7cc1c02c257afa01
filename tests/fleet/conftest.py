"""Tests of fleets; those of KV cache events need pyzmq."""

from needed_packages import needing

pytest_pycollect_makemodule = needing(
    "zmq", modules={"test_kv_events.py", "test_vllm_router.py"}
)
