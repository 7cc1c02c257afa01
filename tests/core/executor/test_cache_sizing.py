"""Bytes of the cache of an engine whose config sets none."""

import pytest

from inl.backend.base import CacheBytes, DeviceMemory, Traits
from inl.config import EngineConfig
from inl.errors import OutOfMemory
from inl.executor.cache_sizing import plan_limits
from inl.models import llama
from inl.spec.cache import Paged

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 4096,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
}  # fmt: skip
BLOCK = 2 * 2 * (2 * 8 * 16 * 4)
"""Bytes of a block of 16 tokens: keys and values of two layers in float32."""

GIB = 1 << 30


class Free:
    """A backend of which only free memory, traits and the layout are asked."""

    def __init__(self, free, share, layout=None):
        self.traits = Traits(cache_share=share, token_budget=1024)
        self._free, self._layout = free, layout

    def offers(self, kind):
        return self._layout if kind is CacheBytes else None

    def memory(self):
        return DeviceMemory(2 * self._free, self._free)


def planned(free, share, layout=None, reserved=0, beside=None, **settings):
    shaped = llama.MODEL.config(SIZES)
    config = EngineConfig(max_batch=512, **settings)
    limits = plan_limits(
        llama.MODEL, shaped, Free(free, share, layout), config,
        reserved=reserved, beside=beside,
    )  # fmt: skip
    return (limits.blocks[0] - 1) * BLOCK


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_host_memory_is_shared_with_others(share):
    assert planned(8 * GIB, share) == pytest.approx(share * 8 * GIB, rel=1e-3)


def test_a_device_leaves_room_for_its_programs():
    found, most = planned(80 * GIB, 0.9), 0.9 * 80 * GIB
    # The gated layer of the largest step has 1024 rows of 4096 float32 numbers.
    assert most - 3 * GIB < found < most - 2 * GIB - 4 * 1024 * 4096
    wider = planned(80 * GIB, 0.9, token_budget=1 << 17)
    assert found - wider >= 4 * ((1 << 17) - 1024) * 4096


def test_a_small_device_keeps_a_quarter():
    assert planned(GIB, 0.9) == pytest.approx(GIB / 4, rel=1e-3)


def test_memory_that_something_else_will_take_is_left():
    whole = planned(80 * GIB, 0.9)
    left = planned(80 * GIB, 0.9, reserved=10 * GIB)
    assert whole - left == pytest.approx(9 * GIB, rel=1e-3)
    with pytest.raises(OutOfMemory):
        planned(GIB, 0.9, reserved=GIB)


def test_the_cache_of_a_draft_head_has_its_part():
    head = Paged((0,), 2, 8, "float32")  # half of the model's layers
    settings = {"speculation": "mtp", "max_drafts": 20}
    whole = planned(8 * GIB, 0.25, **settings)
    left = planned(8 * GIB, 0.25, beside=head, **settings)
    scratch = 3 * 512 * BLOCK / 2  # for 20 drafts and a part of a block, of each slot
    assert left * 1.5 + scratch == pytest.approx(whole, rel=1e-3)
    assert planned(8 * GIB, 0.25, beside=head, cache_bytes=GIB) == pytest.approx(
        GIB, rel=1e-3
    )


def test_the_config_decides():
    assert planned(80 * GIB, 0.9, cache_bytes=GIB) == pytest.approx(GIB, rel=1e-3)


def test_the_backend_says_what_a_block_takes():
    layout = CacheBytes(lambda group, size: 3 * group.token_bytes * size)
    found = planned(80 * GIB, 0.9, layout, cache_bytes=GIB)
    assert found == pytest.approx(GIB / 3, rel=1e-3)
