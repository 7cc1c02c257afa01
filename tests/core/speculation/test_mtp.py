"""Layers that predict further tokens, against a plain float64 model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from drafted import outputs, told
from eagle_heads import PLAIN_REQUESTS, VOCAB, proposals
from inl import EngineConfig, InferenceEngine
from inl.backend.base import DeviceMemory
from inl.errors import CheckpointError, RequestError, WeightMismatch
from inl.executor import load_plan
from inl.executor.model_loader import read_model
from inl.plugin import make_backend
from inl.speculation import setup
from inl.speculation.draft_counts import Acceptance, StepTimes
from inl.speculation.drafters import TimedDrafter
from inl.speculation.eagle_drafter import EagleDrafter
from inl.testing.tiny import MemoryCheckpoint, tiny_llama
from mtp_layers import LAYOUTS, PlainMtp, mtp_tensors

PREFIX = [int(x) for x in np.random.default_rng(2).integers(0, VOCAB, 34)]
"""More than two blocks."""


@pytest.fixture(scope="module")
def target():
    return tiny_llama(np.random.default_rng(5), vocab=VOCAB, kv_heads=2, layers=2)


def with_layer(target, layout="qwen"):
    tensors = mtp_tensors(np.random.default_rng(8), target, layout)
    return target[0], target[1] | tensors


@pytest.fixture
def make():
    """Makes engines on tiny models, with or without drafts, and closes them."""
    made = []

    def build(files, **settings):
        defaults = {"backend": "reference", "max_batch": 4, "context": 96}
        if settings.get("speculation"):
            settings = {"max_drafts": 3, "adaptive_drafts": False} | settings
        config = EngineConfig(**defaults | {"dtype": "float64"} | settings)
        made.append(InferenceEngine(read_model(MemoryCheckpoint(*files)), None, config))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def assert_plain(files, layout, seen, least, every=1):
    """Compare recorded drafts with those of the plain model."""
    model = PlainMtp(*files, layout)
    assert len(seen) >= least
    for text, answer in seen[::every]:
        assert answer == model.drafts(text, len(answer)), f"after {len(text)} tokens"


def test_outputs_are_equal_at_any_temperature(make, target):
    files, requests = with_layer(target), PLAIN_REQUESTS[:2]
    assert [each.get("temperature", 0) for each in requests] == [0, 0.8]
    plain = told(outputs(make(target), VOCAB, requests))
    engine = make(files, speculation="mtp")
    seen = proposals(engine)
    assert told(outputs(engine, VOCAB, requests)) == plain
    assert_plain(files, "qwen", seen, 12, every=3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        # Blocks for two of four sequences, in chunks.
        ("qwen", {"cache_bytes": 6 * 16 * 8 * 2 * 2 * 8 * 2 + 1, "token_budget": 7}),
        ("mimo", {}),
    ],
    ids=["preempted", "batched"],
)
def test_outputs_and_drafts_are_those_of_plain_models(make, target, layout, settings):
    files = with_layer(target, layout)
    plain = told(outputs(make(target, **settings), VOCAB, PLAIN_REQUESTS))
    engine = make(files, speculation="mtp", **settings)
    seen = proposals(engine)
    assert told(outputs(engine, VOCAB, PLAIN_REQUESTS)) == plain
    assert bool(engine.stats.preemptions) == ("cache_bytes" in settings)
    assert_plain(files, layout, seen, 50, every=9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_after_a_prefix_hit(make, target, layout):
    files = with_layer(target, layout)
    engine = make(files, speculation="mtp")
    run(engine, [[*PREFIX[:32], 5, 6]], max_tokens=3)
    seen = proposals(engine)
    ends = [[*PREFIX[:32], 9 * at, 8] for at in range(1, 4)]
    assert run(engine, ends, max_tokens=6) == run(make(target), ends, max_tokens=6)
    assert engine.stats.prefix_hit_tokens == 16 * len(ends)
    assert_plain(files, layout, seen, 6)


def run(engine, prompts, **options):
    """The token ids of each prompt's output."""
    done = engine.generate(prompts, ignore_eos=True, **options)
    return [each.token_ids for each in done]


def test_hidden_states_of_other_positions_give_other_drafts(make, target):
    files = with_layer(target)
    engine = make(files, speculation="mtp")
    seen = proposals(engine)
    run(engine, [PREFIX[:9]], max_tokens=8)
    model = PlainMtp(*files, shift=1)
    assert any(answer != model.drafts(text, len(answer)) for text, answer in seen)


def test_each_draft_but_the_first_counts_a_step_of_the_head(make, target):
    engine = make(with_layer(target), speculation="mtp")
    drafter = engine.speculation.drafter
    assert isinstance(drafter, TimedDrafter)
    assert drafter.seconds(1, 3) == 0.0  # not measured
    run(engine, [PREFIX[:9]], max_tokens=8)
    run(engine, [PREFIX[:9]] * 3, max_tokens=8)
    (one, few) = (drafter.seconds(rows, 2) for rows in (1, 3))
    assert min(one, few) > 0
    assert drafter.seconds(1, 1) == 0
    assert drafter.seconds(1, 4) == pytest.approx(3 * one)
    assert drafter.seconds(99, 2) in (one, few)


def test_files_without_such_a_layer_are_refused(make, target):
    with pytest.raises(CheckpointError, match="layer of further tokens: not found"):
        make(target, speculation="mtp")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mtp.norm.weight": None}, "missing model.norm.weight"),
        ({"mtp.layers.0.x.weight": np.ones(3)}, "unused model.layers.0.x.weight"),
        ({"mtp.fc.weight": np.ones((48, 48))}, r"join.weight has shape \[48, 48\]"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(make, target, changes, sentence):
    config, tensors = with_layer(target)
    kept = {name: x for name, x in (tensors | changes).items() if x is not None}
    with pytest.raises(WeightMismatch, match=sentence):
        make((config, kept), speculation="mtp")


def test_settings_that_do_not_fit_are_refused():
    for settings, sentence in (
        ({"draft_model": "x"}, "EngineConfig.draft_model: found 'x'"),
        ({"tensor_parallel": 2}, "EngineConfig.tensor_parallel: found 2, accepted: 1"),
    ):
        with pytest.raises(RequestError) as caught:
            EngineConfig(speculation="mtp", **settings)
        assert sentence in str(caught.value)


PAYS = StepTimes({2: 1.05, 4: 1.1, 8: 4.0, 64: 40.0}, {1: 1.0, 4: 1.05})
"""Drafts pay for one and two rows."""
HEAD = StepTimes({1: 0.05, 64: 0.5})
NEVER = StepTimes({1: 2.0, 64: 90.0}, {1: 1.0, 64: 1.0})


@pytest.fixture
def measured(monkeypatch):
    """Replaces the times that are measured at the start."""

    def replaced(times):
        monkeypatch.setattr(setup, "measure_step_times", lambda *_, **__: times)

        def measure(drafter, _rows):
            drafter._times = HEAD

        monkeypatch.setattr(EagleDrafter, "measure", measure)

    return replaced


def test_the_layer_is_used_by_default_where_the_times_say_so(
    make, target, measured, caplog
):
    files, requests = with_layer(target), PLAIN_REQUESTS[:2]
    plain = told(outputs(make(files, speculation=None), VOCAB, requests))
    measured(PAYS)
    engine = make(files)
    seen = proposals(engine)
    assert told(outputs(engine, VOCAB, requests)) == plain
    assert engine.config.speculation == "mtp"
    assert_plain(files, "qwen", seen, 3)
    assert engine.speculation.drafted
    assert make(target).speculation is None  # no such layer
    assert make(files, max_batch=1, decode_steps=2).speculation is None
    caplog.set_level("INFO", "inl")
    measured(NEVER)
    engine = make(files)
    assert engine.speculation is None
    assert told(outputs(engine, VOCAB, requests)) == plain
    (line,) = [each.message for each in caplog.records if "speculation" in each.message]
    assert line.endswith("verifying drafts takes longer than it saves on this device")


def test_requests_that_begin_while_drafts_do_not_pay_are_not_followed(
    make, target, measured
):
    measured(PAYS)
    engine = make(with_layer(target), depth=2, prefix_cache=False)
    steps = steps_of(engine)
    run(engine, [PREFIX[:9]] * 4, max_tokens=12)
    assert not any(steps.heads)
    assert not any(steps.tapped)
    assert max(steps.depths) == 2
    run(engine, [PREFIX[:9]], max_tokens=12)
    assert any(steps.heads)
    assert steps.tapped == sorted(steps.tapped)
    # Its drafts were wrong: none is followed now.
    run(engine, [PREFIX[:9]], max_tokens=12)
    assert not steps.tapped[-2]
    # One that is followed is left once others join it for long.
    engine.speculation.followed.acceptance = Acceptance()
    engine.submit(PREFIX[:9], max_tokens=60, ignore_eos=True)
    for _ in range(3):
        engine.step()
    assert engine.speculation.drafter.followed
    others = [
        engine.submit(PREFIX[:5], max_tokens=40, ignore_eos=True) for _ in range(3)
    ]
    while not all(each.completed for each in others):
        engine.step()
    assert not engine.speculation.drafter.followed


def test_a_layer_that_is_slower_than_measured_is_not_followed(make, target, measured):
    """As first steps are, which compile: drafting is tried again later."""
    measured(PAYS)
    engine = make(with_layer(target), prefix_cache=False)
    engine.speculation.drafter._times = StepTimes({1: 0.3, 64: 3.0})
    followed, buckets = engine.speculation.followed, engine.core.scheduler.buckets

    def took(seconds):
        followed.processed([])
        followed.drafted(1, 3, seconds)

    assert followed.pays(1, buckets)
    for _ in range(30):
        took(0.0)  # other work does not count
    assert followed.pays(1, buckets)
    for _ in range(30):
        took(9.0)
    assert not followed.pays(1, buckets)
    steps = steps_of(engine)
    run(engine, [PREFIX[:9]], max_tokens=12)
    assert not any(steps.heads)
    for _ in range(120):
        run(engine, [PREFIX[:9]], max_tokens=2)
    run(engine, [PREFIX[:9]], max_tokens=12)
    assert any(steps.heads)


def test_a_prompt_with_few_tokens_after_it_is_not_read(make, target, measured):
    measured(PAYS)
    engine = make(with_layer(target), prefix_cache=False)
    engine.speculation.drafter._token_seconds = 1.0
    steps = steps_of(engine)
    run(engine, [PREFIX[:9]], max_tokens=12)
    assert not any(steps.heads)
    engine.speculation.drafter._token_seconds = 0.01
    run(engine, [PREFIX[:9]], max_tokens=12)
    assert any(steps.heads)


def test_shared_blocks_without_entries_are_not_followed(make, target, measured):
    measured(PAYS)
    engine = make(with_layer(target))
    drafter = engine.speculation.drafter
    run(engine, [[*PREFIX[:33], at] for at in range(4)], max_tokens=3)
    steps = steps_of(engine)
    run(engine, [[*PREFIX[:33], 9]], max_tokens=8)  # shares blocks of the others
    assert engine.stats.prefix_hit_tokens >= 32
    assert not any(steps.heads)
    drafter._filled[:] = True  # a fault
    run(engine, [[*PREFIX[:33], 10]], max_tokens=8)
    assert any(steps.heads)


def steps_of(engine):
    """Record, of each planned step, whether it has taps, and steps of the head."""
    drafter, scheduler = engine.speculation.drafter, engine.core.scheduler
    steps = SimpleNamespace(heads=[], tapped=[], depths=[])
    run_head, plan = drafter._run, scheduler.plan

    def ran(*args, **options):
        steps.heads[-1] = 1
        return run_head(*args, **options)

    def planned():
        found = plan()
        steps.tapped.append(int(drafter._target.executor.is_tapped))
        steps.heads.append(0)
        steps.depths.append(len(scheduler.in_flight))
        return found

    drafter._run, scheduler.plan = ran, planned
    return steps


def test_memory_is_left_for_the_layer(target, monkeypatch):
    files = with_layer(target)
    config = EngineConfig(backend="reference", dtype="float32", speculation="mtp")
    backend = make_backend("reference")
    free = 1 << 30
    monkeypatch.setattr(type(backend), "memory", lambda _: DeviceMemory(free, free))
    monkeypatch.setattr(load_plan, "is_host_memory", lambda _: False)
    reserved = []
    sizes = load_plan.plan_limits

    def seen(*args, **options):
        reserved.append((options["reserved"], options["beside"]))
        return sizes(*args, **options)

    monkeypatch.setattr(load_plan, "plan_limits", seen)
    language = read_model(MemoryCheckpoint(*files))
    for each in (language, setup.with_draft_head(language, config)):
        load_plan.LoadPlan.of(each, backend, config)
    (without, none), (found, group) = reserved
    layer = mtp_tensors(np.random.default_rng(8), target)
    assert found - without == sum(x.nbytes for x in layer.values())
    assert none is None
    assert group.layers == (0,)


@pytest.mark.parametrize("settings", [
    {},
    # Blocks for two of four sequences, in chunks, with blocks in host memory.
    {
        "cache_bytes": 6 * 16 * 8 * 2 * 2 * 4 * 2 + 1, "token_budget": 7,
        "kv_host": "1MB",
    },
], ids=["room", "preempted"])  # fmt: skip
def test_requests_that_come_and_go_have_the_same_outputs(
    make, target, measured, settings
):
    files = with_layer(target)
    settings = {"depth": 2, "dtype": "float32", **settings}
    plain = staggered(make(files, speculation=None, **settings))
    measured(PAYS)
    engine = make(files, **settings)
    engine.speculation.followed.acceptance = Certain()
    steps = steps_of(engine)
    assert staggered(engine) == plain
    counts = engine.speculation
    assert counts.drafted > 20
    assert {0, 1} == set(steps.heads) == set(steps.tapped)
    assert max(steps.depths) == 2
    assert engine.stats.prefix_hit_tokens > 0
    assert bool(engine.stats.preemptions) == ("cache_bytes" in settings)


class Certain(Acceptance):
    """Expects that all drafts are right, whatever was observed."""

    rate = 1.0


def staggered(engine):
    """Outputs of requests with common prefixes, which begin in different steps."""
    rng, handles = np.random.default_rng(4), []
    for at in range(14):
        prompt = [*PREFIX[: int(rng.choice([5, 20, 33]))], at, 3]
        handles.append(
            engine.submit(
                prompt, max_tokens=int(rng.integers(2, 40)), ignore_eos=True, seed=at,
                temperature=[0.0, 0.8][at % 2],
            )
        )  # fmt: skip
        for _ in range(int(rng.choice([0, 1, 12, 40]))):
            engine.step()
    while not all(each.completed for each in handles):
        engine.step()
    return [each.token_ids for each in handles]
