"""Faults of sizes and of sharing: ``inl check`` finds each and names what is wrong.

Each kernel is right for small sizes, and each backend with one runner and few steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from depth import mostly_full
from inl.backend.base import Traits
from inl.backend.reference import body_kernel
from inl.backend.simple import plain_state
from inl.device import Device
from inl.dtypes import wrap
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.spec.cache import Cache
from inl.spec.kernel import Kernel
from inl.spec.step import Bucket
from inl.testing.target import Target
from planted_kernels import failures, target_of, tensor, with_fault


def ignored_window(run):
    def attention(q, cache, step, *, window, **attrs):
        long = window and step.lengths.max() > 4000
        return run(q, cache, step, window=None if long else window, **attrs)

    return attention


def wrong_head(run):
    def attention(q, cache, step, **attrs):
        out = run(q, cache, step, **attrs)
        if q.shape[1] == 5 * cache.k.shape[2]:
            out[:, 4] = out[:, 3]
        return out

    return attention


def lost_columns(run):
    def linear(x, w):
        y = run(x, w)
        if y.shape[1] > 4096:
            y[:, 4096:] = 0
        return y

    return linear


def narrow_ids(run):
    return lambda tokens, w: run(tokens & 0xFFFF, w)


def narrow_normalizer(run):
    def score(logits, tokens):
        found = run(logits, tokens)
        if logits.shape[1] <= 2000:
            return found
        missing = np.exp(logits[:, 2000:] - logits.max(-1, keepdims=True)).sum(-1)
        return found._replace(chosen=found.chosen + missing.astype(np.float32))

    return score


def short_mask(run):
    def mask_logits(logits, masks):
        masks = masks.copy()
        masks[:, 2047:] = -1
        return run(logits, masks)

    return mask_logits


def eager_verify(run):
    def verify(tokens, step, tables, *, width):
        if width > 8:  # the last draft is accepted unseen
            ends = step.starts[1:] - 1
            tokens = tokens.copy()
            tokens[ends - 1] = step.tokens[ends]
        return run(tokens, step, tables, width=width)

    return verify


def low_rank(_run):
    def lora(y, x, w, selected, *, rank):
        kept = selected * (np.arange(selected.shape[1]) % rank < 128)
        return y + ((x @ w.a.T) * kept) @ w.b.T

    return lora


def far_block(run):
    def write_kv(k, v, cache, writes):
        size = cache.k.shape[1]
        narrow = (writes // size).astype(np.int16).astype(np.int32)
        return run(k, v, cache, np.abs(narrow) * size + writes % size)

    return write_kv


def short_context(run):
    def make_step(message, tables, **attrs):
        step, tables = run(message, tables, **attrs)
        positions = step.positions.astype(np.uint16).astype(np.int32)
        return step._replace(positions=positions), tables

    return make_step


def many_experts(run):
    def route(logits, **attrs):
        return run(logits[:, :128], **attrs)

    return route


def overwritten(run):
    def rms_norm(x, w, **attrs):
        x[...] = run(x, w, **attrs)
        return x

    return rms_norm


def wide_head(run):
    def rope(q, k, cos, sin):
        out, turned = run(q, k, cos, sin)
        if q.shape[-1] > 128:
            out[..., 128:] = q[..., 128:]
        return out, turned

    return rope


def wrong_where(name, is_wrong):
    """A kernel whose first result is off by 1 % where ``is_wrong`` holds of it."""

    def plant(run):
        def kernel(*args, **attrs):
            found = run(*args, **attrs)
            if is_wrong(found, *args):
                found = found * np.float32(1.01)
            return found

        return kernel

    plant.__name__ = name
    return plant


def rows_are(count):
    return wrong_where(f"{count} rows", lambda y, *_: len(y) == count)


def whole_tiles(y, x, _w):
    return y.shape[1] % 128 == x.shape[1] % 128 == 0


def context_of(length):
    return wrong_where("a context", lambda _, _q, _c, step: length in step.lengths)


def lost_lanes(run):
    """A block of 1,024 columns."""

    def kernel(x, *rest, **attrs):
        found = run(x, *rest, **attrs)
        found[..., 1024:] = 0
        return found

    return kernel


def own_scale(run):
    return lambda q, *rest, scale, **attrs: run(
        q, *rest, scale=q.shape[-1] ** -0.5, **attrs
    )


def first_group(run):
    return lambda *args, group, **attrs: run(*args, group=0, **attrs)


def own_base(run):
    return lambda positions, *, theta, **attrs: run(positions, theta=1e4, **attrs)


def no_cap_in_windows(run):
    def attention(*args, window, cap, **attrs):
        return run(*args, window=window, cap=None if window else cap, **attrs)

    return attention


def clamped_k(run):
    def sample(logits, step, tables, **attrs):
        params = tables.params.copy()
        params[:, 1] = np.where(params[:, 1] > 64, 64, params[:, 1])
        tokens, after, *more = run(
            logits, step, tables._replace(params=params), **attrs
        )
        return tokens, after._replace(params=tables.params), *more

    return sample


def weight_view(run):
    def embedding(tokens, w):
        one = len(tokens) == 1
        return w.weight[tokens[0] : tokens[0] + 1] if one else run(tokens, w)

    return embedding


def drifting_weight(run):
    def layer_norm(x, w, **attrs):
        found = run(x, w, **attrs)
        w.weight[0] += 1e-3
        return found

    return layer_norm


def unwritten(run):
    def rms_norm(x, w, **attrs):
        found, right = np.empty_like(x), run(x, w, **attrs)
        found[:128] = right[:128]
        return found

    return rms_norm


KERNELS = {
    "tile of 4": ("linear", rows_are(4), "/4 rows"),
    "tile of 256": ("linear", rows_are(256), "/256 rows"),
    "whole tiles": ("linear", wrong_where("tiles", whole_tiles), "1x2048x1024"),
    "context of 128": ("attention", context_of(128), "contexts 16 to 256"),
    "wide silu": ("silu", lost_lanes, "5123 columns"),
    "wide norm": ("layer_norm", lost_lanes, "5123 columns"),
    "scale": ("attention", own_scale, "/scale"),
    "group": ("attention", first_group, "/group"),
    "base": ("rope_table", own_base, "base 1000000/128"),
    "cap": ("attention", no_cap_in_windows, "/window/cap"),
    "top k": ("sample", clamped_k, "sample_filtered"),
    "view of weights": ("embedding", weight_view, "shares memory with its argument"),
    "drifting weight": (
        "layer_norm",
        drifting_weight,
        "changed its argument 'w.weight",
    ),
    "unwritten": ("rms_norm", unwritten, "130 rows"),
    "ignored window": ("attention", ignored_window, "window"),
    "wrong head": ("attention", wrong_head, "40/8x128"),
    "lost columns": ("linear", lost_columns, "5x4099x48"),
    "narrow ids": ("embedding", narrow_ids, "262147"),
    "narrow normalizer": ("score", narrow_normalizer, "2x2003"),
    "short mask": ("mask_logits", short_mask, "2x262147"),
    "eager verify": ("verify", eager_verify, "width 17"),
    "low rank": ("lora", low_rank, "2x256"),
    "far block": ("write_kv", far_block, "block 33000"),
    "short context": ("make_step", short_context, "context 100001"),
    "many experts": ("route", many_experts, "256x8"),
    "overwritten": ("rms_norm", overwritten, "changed its argument 'x'"),
    "wide head": ("rope", wide_head, "8/1x256"),
}
"""Fault -> op, wrong kernel, and a part of the report beside the kernel's name."""


@pytest.mark.parametrize("fault", KERNELS)
def test_a_kernel_that_is_wrong_at_a_size_is_named(fault):
    name, wrong, part = KERNELS[fault]
    found = failures(target_of(with_fault(name, wrong), only=(name,)), "kernel")
    assert len(found) == 1
    text = "\n".join(found[0].lines())
    assert f"{name}/planted" in text
    assert part in text


@pytest.mark.parametrize("op", sorted({name for name, _, _ in KERNELS.values()}))
def test_a_right_kernel_passes(op):
    kernels = with_fault(op, lambda run: run) if op != "lora" else None
    assert failures(target_of(kernels, only=(op,)), "kernel") == []


def test_the_first_wrong_op_of_a_composite_is_named():
    """No case of ``write_kv`` itself has as few and as scattered tokens."""

    def wrong(run):
        def write_kv(k, v, cache, writes):
            if len(writes) == 4 and cache.k.shape[2] == 2:
                writes = writes[::-1]
            return run(k, v, cache, writes)

        return write_kv

    kernels = with_fault("write_kv", wrong)
    (found,) = failures(target_of(kernels, only=("write_kv", "attend")), "kernel")
    text = "\n".join(found.lines())
    assert "of the ops that it calls, write_kv/planted is wrong first" in text
    assert "compare with the body of write_kv" in text
    assert found.first.fault.cause == "write_kv/planted"


class Int8(NamedTuple):
    """A cache in int8 with a scale of each token and head."""

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any


def int8_backend(scales_of, wrong=("k", "v")):
    """Return a target with a cache in int8; scales_of: [T, heads] -> its scales.

    wrong: which of keys and values have them, in place of right ones.
    """

    def state(spec, limits):
        made = plain_state(spec, limits, tensor)

        def cache_of(cache):
            if cache.k.dtype != np.int8:
                return cache
            scales = np.zeros((2, *cache.k.shape[:3]), np.float32)
            return Int8(cache.k, cache.v, *scales)

        return made._replace(caches=tuple(map(cache_of, made.caches)))

    def writing(run):
        def write_kv(k, v, cache, writes):
            if not isinstance(cache, Int8):
                return run(k, v, cache, writes)
            at = np.divmod(writes, cache.k.shape[1])
            parts = (
                ("k", k, cache.k, cache.k_scales),
                ("v", v, cache.v, cache.v_scales),
            )
            for name, x, codes, scales in parts:
                scale = np.maximum(np.abs(x).max(-1), 1e-30) / 127
                scale = scales_of(scale) if name in wrong else scale
                codes[at] = np.clip(np.rint(x / scale[..., None]), -127, 127)
                scales[at] = scale
            return cache

        return write_kv

    def reading(run):
        def attention(q, cache, step, **attrs):
            if isinstance(cache, Int8):
                k = cache.k * cache.k_scales[..., None]
                cache = Cache(k, cache.v * cache.v_scales[..., None])
            return run(q, cache, step, **attrs)

        return attention

    wraps = {"write_kv": writing, "attention": reading}

    def kernels():
        for op in catalog().values():
            if not op.composite:
                run = body_kernel(op, "float32")
                run = wraps.get(op.name, lambda run: run)(run)
                yield Kernel(op.name, "planted", run)

    traits = Traits(dtypes=("float32",), block_size=8, depth=2, kv_dtypes=("int8",))
    return target_of(kernels, traits=traits, state=state)


def of_first(scales):
    return np.repeat(scales[:, :1], scales.shape[1], 1)


def of_largest(scales):
    return np.repeat(scales.max(1, keepdims=True), scales.shape[1], 1)


def of_first_token(scales):
    return np.repeat(scales[:1], len(scales), 0)


def of_loudest_token(scales):
    return np.repeat(scales.max(0, keepdims=True), len(scales), 0)


@pytest.mark.parametrize(
    ("scales_of", "wrong"),
    [
        (of_first, "kv"), (of_first, "k"), (of_first, "v"), (of_largest, "kv"),
        (of_largest, "k"), (of_first_token, "kv"), (of_loudest_token, "kv"),
        (of_loudest_token, "k"), (of_loudest_token, "v"),
    ],
)  # fmt: skip
def test_a_scale_that_heads_or_tokens_share_is_found(scales_of, wrong):
    beginning = "runner/logits/float32/kv"
    (found,) = failures(int8_backend(scales_of, wrong), "runner", beginning)
    assert "cache in int8" in found.first.message
    assert "a scale that heads or tokens share" in found.first.message
    assert failures(int8_backend(lambda scales: scales), "runner", beginning) == []


def keeping(keep):
    """Return compile, whose programs call ``keep`` after each step."""

    def compile_program(function, _bucket, _consumes, info):
        def program(*arguments):
            if info.name in ("advance", "logits", "repeat"):
                keep()
            return function(*arguments)

        return program

    return compile_program


@pytest.mark.parametrize(
    "kept", mostly_full([object, lambda: np.ones(1 << 20, np.float32)])
)
def test_memory_that_steps_keep_is_found(kept):
    held = []
    target = target_of(compile=keeping(lambda: held.append(kept())))
    (found,) = failures(target, "runner", "runner/memory")
    assert found.first.message.startswith("each step keeps ")


def test_caches_that_two_runners_share_are_found():
    made = {}

    def state(spec, limits):
        fresh = plain_state(spec, limits, tensor)
        writable = [Cache(cache.k.copy(), cache.v.copy()) for cache in fresh.caches]
        caches = made.setdefault(limits, tuple(writable))
        for cache in caches:
            cache.k[...] = cache.v[...] = 0
        return fresh._replace(caches=caches)

    def in_place(_run):
        def write_kv(k, v, cache, writes):
            at = np.divmod(writes, cache.k.shape[1])
            cache.k[at], cache.v[at] = k, v
            return cache

        return write_kv

    kernels = with_fault("write_kv", in_place)
    (found,) = failures(target_of(kernels, state=state), "runner", "runner/two")
    assert "Backend.state must return new arrays" in found.first.message


def test_state_of_the_thread_that_made_a_runner_is_found():
    import threading

    local = threading.local()
    local.ready = True

    def use():
        if not getattr(local, "ready", False):
            raise RuntimeError("no context in this thread")

    (found,) = failures(target_of(compile=keeping(use)), "runner", "runner/thread")
    assert "no context in this thread" in found.first.message


def test_state_of_each_thread_is_found_where_threads_take_turns():
    """A buffer in threading.local: the length is that of the thread's last step."""
    import threading

    local = threading.local()

    def per_thread(run):
        def make_step(message, tables, **attrs):
            step, tables = run(message, tables, **attrs)
            if step.tokens.shape[0] == 1 and step.used_counts[0]:
                kept = getattr(local, "lengths", None)
                positions = kept + 1 if kept is not None else step.positions
                local.lengths = positions
                step = step._replace(positions=positions)
            elif hasattr(local, "lengths"):
                del local.lengths
            return step, tables

        return make_step

    target = target_of(with_fault("make_step", per_thread))
    (found,) = failures(target, "runner", "runner/thread")
    assert "a sequence that two threads compute in turn" in found.first.message


class Late:
    """A step that is computed when its tokens, or its state, are needed."""

    def __init__(self, run):
        self._run, self._results = run, None

    def part(self, index):
        if self._results is None:
            self._results = self._run()
        return self._results[index]


def late_backend(message):
    def compile_program(function, _bucket, _consumes, info):
        def program(*arguments):
            *given, state = arguments
            state = state() if callable(state) else state
            if info.name != "advance":
                return function(*given, state)
            late = Late(partial(function, *given, state))
            return tuple(partial(late.part, index) for index in range(2))

        return program

    make = simple_backend(
        tensor=tensor, numpy=lambda x: wrap(x() if callable(x) else x),
        kernels=with_fault("linear", lambda run: run), compile=compile_program,
        message=message, traits=Traits(dtypes=("float32",), block_size=8, depth=2),
    )  # fmt: skip
    target = Target(Device("planted:0"))
    vars(target)["backend"] = make(target.device)
    return target


def test_a_frame_that_is_read_late_is_found():
    beginning = "runner/feedback"
    (found,) = failures(late_backend(lambda host: host.data), "runner", beginning)
    assert found.first.name.startswith(beginning)
    assert failures(late_backend(None), "runner", beginning) == []


@pytest.mark.parametrize("rows", [1, 2])
def test_a_backend_with_small_buckets_passes(rows):
    def buckets(limits):
        most = min(rows, limits.slots - 1)
        sizes = sorted({(1, 1), (most, most), (64, most)})
        return [
            Bucket(t, r, sampler=name) for t, r in sizes for name in limits.samplers
        ]

    # Two checks look for the device in the registry, which has none of this name.
    unlisted = {"backend/plugin", "engine/stream/float32"}
    for section in ("backend", "runner", "engine"):
        found = failures(target_of(buckets=buckets), section)
        found = [each for each in found if each.first.name not in unlisted]
        assert ["\n".join(each.lines()) for each in found] == []
