"""The descriptions of programs, and programs for several lengths."""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.base import ContextLengths, Traits
from inl.backend.programs import takes_info
from inl.backend.reference import ReferenceBackend, body_kernel
from inl.backend.simple import plain_state
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.engine.core import EngineCore
from inl.engine.prompt_embeddings import PromptEmbeddings
from inl.executor.model_step import SCORED_TOKENS
from inl.models.llama import MODEL
from inl.ops import catalog
from inl.plugin import simple_backend
from inl.scheduling.request import Request
from inl.spec.cache_layout import SLOT_GROUP
from inl.spec.kernel import Kernel
from inl.spec.limits import Limits
from inl.spec.message import READ, WRITE, transfer_frame
from inl.spec.program import PROGRAMS
from inl.spec.step import Bucket
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl.testing.traffic import Traffic, play

LIMITS = Limits(
    slots=6, blocks=(70,), block_size=4, max_blocks_per_seq=16, vocab=96, depth=2,
    embedding=48,
)  # fmt: skip
FILES = MemoryCheckpoint(*tiny_llama(np.random.default_rng(3), kv_heads=4))
FIELDS = [
    {"prompt": [5, 6, 7], "max_tokens": 30},
    {"prompt": range(20), "max_tokens": 12, "temperature": 0.7, "seed": 2},
    {"prompt": [8, 9], "max_tokens": 20, "allowed_token_ids": range(30)},
    {"prompt": [1, 2], "max_tokens": 3, "logit_bias": {4: 3.0}},
]


EMBEDDED = [
    {
        "prompt": [0] * count, "max_tokens": 3,
        "embeddings": PromptEmbeddings({start: np.ones((rows, 48))}, count),
    }
    for count, start, rows in ((9, 4, 3), (41, 0, 41))
]  # fmt: skip
EMBEDDED[1]["allowed_token_ids"] = range(30)


def copied(host):
    return np.array(widen(host))


class Told:
    """A NumPy backend that records the descriptions; ``made`` is its class."""

    def __init__(self, lengths=None, buckets=None, **options):
        self.infos, self.tables, self.messages, self.states = [], [], 0, 0
        capabilities = [] if lengths is None else [ContextLengths(lambda _: lengths)]
        self.made = simple_backend(
            tensor=copied, numpy=wrap, kernels=self.kernels, compile=self.compile,
            message=self.message, state=self.state, buckets=buckets,
            traits=Traits(dtypes=("float32",), block_size=4),
            capabilities=capabilities, **options,
        )  # fmt: skip

    def message(self, host):
        self.messages += 1
        return copied(host)

    def state(self, spec, limits):
        self.states += 1
        return plain_state(spec, limits, copied)

    def kernels(self):
        for op in catalog().values():
            if not op.composite:
                run = body_kernel(op, "float32")
                watched = self.watched(run) if op.name == "attention" else run
                yield Kernel(op.name, "body", watched)

    def watched(self, run):
        def attention(q, cache, step, **attrs):
            self.tables.append(step.blocks.shape)
            return run(q, cache, step, **attrs)

        return attention

    def compile(self, function, bucket, consumes, info):
        assert info.bucket == bucket
        assert info.consumes == tuple(consumes)
        self.infos.append(info)
        return function

    def runner(self):
        return local_runner(self.made(Device("told:0")), MODEL, FILES, LIMITS)


def outputs(runner, fields=FIELDS):
    requests = [Request(**each) for each in fields]
    core = EngineCore(runner)
    for request in requests:
        core.add(request)
    while core.has_work:
        assert [e.error for e in core.step() if e.error] == []
    return [each.output_ids for each in requests]


def two_buckets(limits):
    return [Bucket(t, 5, sampler=s) for t in (5, 40) for s in limits.samplers]


def test_a_program_is_compiled_with_its_name_limits_and_context():
    told = Told(buckets=two_buckets)
    runner = told.runner()
    outputs(runner)
    outputs(runner, EMBEDDED[:1])
    outputs(runner, EMBEDDED[1:])
    outputs(runner, [{"prompt": [5, 9], "pooled": True}])
    outputs(runner, [{"prompt": [5, 9], "prompt_logprobs": 1}])
    for group in (0, SLOT_GROUP):
        runner.submit(transfer_frame(READ, group, [1]))
        runner.write(transfer_frame(WRITE, group, [2]), runner.read())
    # Without loops on the device, no program repeats steps; a Llama is no encoder.
    unused = {"repeat", "draft", "encode", "encode_part"}
    assert {info.name for info in told.infos} == set(PROGRAMS) - unused
    for info in told.infos:
        arguments = PROGRAMS[info.name].partition(")")[0].split(", ")
        consumed = [] if info.name.startswith("read_") else ["state"]
        assert [arguments[at].strip("()") for at in info.consumes] == consumed
        assert info.limits == runner.limits
        assert info.limits.block_size == 4
        assert info.context == 64
        between_steps = info.name in (
            "admit", "set_token_bias", "read_blocks", "write_blocks", "read_slot",
            "write_slot",
        )  # fmt: skip
        assert (info.bucket is None) == between_steps


def test_a_simple_backend_makes_messages_and_state():
    told = Told()
    runner = told.runner()
    assert told.states == 1
    outputs(runner)
    assert told.messages == sum(len(shape) == 3 for shape in told.tables) / 2
    runner.executor._is_consuming = True
    runner.reset()
    assert told.states == 2


@pytest.mark.parametrize("buckets", [None, two_buckets])
def test_a_step_reads_the_shortest_table_that_holds_its_sequences(buckets):
    expected = outputs(Told(buckets=buckets).runner())
    told = Told((22, 33, 999), buckets)
    runner = told.runner()
    assert outputs(runner) == expected
    # 22 and 33 tokens are 6 and 9 blocks of 4; the table has 16.
    assert {shape[-1] for shape in told.tables} == {6, 9}
    contexts = {(info.name, info.context) for info in told.infos}
    assert {("logits", 24), ("masked", 24), ("advance", 36)} <= contexts
    assert len(set(told.infos)) == len(told.infos)


def test_random_traffic_reads_all_of_its_tokens():
    """Blocks that steps assign count: admissions give only the first ones."""
    reference = ReferenceBackend(Device("reference:0"))
    runners = (
        Told((8, 16, 32)).runner(),
        local_runner(reference, MODEL, FILES, LIMITS),
    )
    texts = []
    for runner in runners:
        traffic = Traffic(np.random.default_rng(4), LIMITS, sampler="greedy")
        texts.append(play(runner, traffic.frames(40)))
    assert texts[0] == texts[1]


def test_a_warm_up_compiles_every_length():
    told = Told((8, 16), two_buckets)
    told.runner().warm_up()
    steps = [(i.bucket, i.context) for i in told.infos if i.name == "advance"]
    sizes = {8, 16, 64}
    assert (
        len(steps) == len(set(steps)) == len(sizes) * len(told.infos[0].limits.buckets)
    )
    assert {context for _, context in steps} == sizes


def test_functions_with_and_without_the_parameter():
    assert takes_info(lambda function, bucket, consumes, info: function)
    assert takes_info(lambda function, **more: function)
    assert not takes_info(lambda function, bucket, consumes: function)
    assert not takes_info(dict.update)


def test_a_scored_step_binds_kernels_of_as_many_samples_as_it_computes():
    """Not those of the one token that a step of one prompt samples."""
    runner = local_runner(ReferenceBackend(Device("reference")), MODEL, FILES, LIMITS)
    traced = {
        is_scored: runner.loaded.tracer(Bucket(300, 1), LIMITS, is_scored=is_scored)
        for is_scored in (False, True)
    }
    found = {}
    for is_scored, tracer in traced.items():
        calls = [call for call in tracer.log if call.spec.name == "norm_logits"]
        found[is_scored] = [call.args[2].shape[0] for call in calls]
    assert found == {False: [1], True: [SCORED_TOKENS, SCORED_TOKENS, 44]}
    names = {call.spec.name for call in traced[True].log}
    assert "prune_last_layer" not in names
