"""INL models: every layout of their checkpoints, their options, and bad input."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from inl import Device, EngineConfig, InferenceEngine
from inl.backend.reference import ReferenceBackend
from inl.checkpoints.checkpoint import open_checkpoint
from inl.dtypes import widen
from inl.engine.core import EngineCore
from inl.errors import CheckpointError, RequestError, WeightMismatch
from inl.executor.tracing import trace
from inl.models import deep
from inl.models.deep_names import canonical
from inl.spec.cache import Slotted
from inl.spec.limits import Limits
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.testing.tiny import MemoryCheckpoint, reference_ranks
from inl.weights.plan import plan_weights

CLOSE = 1e-5


def without(tensors, *parts):
    return {n: x for n, x in tensors.items() if not any(part in n for part in parts)}


def unprefixed(config, tensors):
    return config, {name.removeprefix("model."): x for name, x in tensors.items()}


def numbered_controllers(config, tensors):
    names = {"controller_in": "controller.0", "controller_out": "controller.2"}
    return config, {
        re.sub("controller_(in|out)", lambda found: names[found[0]], name): x
        for name, x in tensors.items()
    }


def gates_apart(config, tensors):
    found = {}
    for name, x in tensors.items():
        if name.endswith("gate_up_proj"):
            gate, up = np.split(x, 2, axis=-1)
            found[name.replace("gate_up", "gate")] = gate
            found[name.replace("gate_up", "up")] = up
        else:
            found[name] = x
    return config, found


def experts_apart(config, tensors):
    found = {}
    for name, x in gates_apart(config, tensors)[1].items():
        part = re.search(r"mlp\.(gate|up|down)_proj$", name)
        if part is None:
            found[name] = x
            continue
        for expert, matrix in enumerate(x):
            at = name[: part.start()]
            found[f"{at}mlp.experts.{expert}.{part[1]}_proj.weight"] = matrix.T
    return config, found


def tied(config, tensors):
    return {**config, "tie_word_embeddings": True}, without(tensors, "lm_head")


def oldest(config, tensors):
    """All changes together: the layout of the first checkpoints."""
    rest = without(tensors, "mu_to_", "mu_proj", "mu_router", "token_to_expert")
    for change in (experts_apart, numbered_controllers, tied, unprefixed):
        config, rest = change(config, rest)
    return config, rest


LAYOUTS = {
    "as it is": (lambda config, tensors: (config, tensors), ()),
    "no prefix": (unprefixed, ()),
    "numbered controllers": (numbered_controllers, ()),
    "gates and ups apart": (gates_apart, ()),
    "experts apart": (experts_apart, ()),
    "tied": (tied, ()),
    "no mu in attention": (lambda c, t: (c, without(t, "mu_to_")), ("mu_to_",)),
    "mu stays": (lambda c, t: (c, without(t, "mu_proj")), ("mu_proj",)),
    "no router": (lambda c, t: (c, without(t, "mu_router")), ("mu_router",)),
    "no table": (
        lambda c, t: (c, without(t, "token_to_expert")), ("token_to_expert",)
    ),
    "oldest": (oldest, ("mu_to_", "mu_proj", "mu_router", "token_to_expert")),
}  # fmt: skip
"""Changes of a checkpoint, and the tensors that it lacks."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_checkpoint_layout_gives_the_same_logits(like_plainly, deep_made, layout):
    change, absent = LAYOUTS[layout]
    config, tensors = change(*deep_made)
    assert like_plainly(config, tensors, without(deep_made[1], *absent)) < CLOSE


def test_the_comparison_can_fail(like_plainly, deep_made):
    config, tensors = deep_made
    assert like_plainly(config, tensors, without(tensors, "mu_router")) > 1e-3


def packed_table(frequencies, experts):
    """Assign ids by descending frequency to the expert with the lowest load."""
    loads, table = [0] * experts, [0] * len(frequencies)
    for token in sorted(range(len(frequencies)), key=lambda t: -frequencies[t]):
        table[token] = loads.index(min(loads))
        loads[table[token]] += frequencies[token]
    return np.array(table)


def test_experts_come_from_a_stored_table(like_plainly, deep_made):
    config, tensors = deep_made
    rng = np.random.default_rng(2)
    packed = packed_table(rng.integers(1, 1000, config["vocab_size"]).tolist(), 4)
    changed = {
        name: packed if name.endswith("token_to_expert") else x
        for name, x in without(tensors, "mu_router").items()
    }
    assert like_plainly(config, changed) < CLOSE
    plain = without(tensors, "mu_router")
    assert like_plainly(config, changed, plain) > 1e-3


@pytest.mark.parametrize("window", [1, 5, 32, 33])
def test_a_sliding_window(like_plainly, deep_made, window):
    config, tensors = deep_made
    assert like_plainly({**config, "sliding_window": window}, tensors) < CLOSE


@pytest.mark.parametrize("highway", [0.0, 0.3])
def test_mu_highway_is_read_from_the_config(like_plainly, deep_made, highway):
    config, tensors = deep_made
    config = {**config, "mu_highway": highway}
    assert like_plainly(config, tensors, highway=highway) < CLOSE


def test_large_velocities_are_clamped(like_plainly, deep_made):
    config, tensors = deep_made
    large = {n: 20 * x if n.endswith("dynamics.mu") else x for n, x in tensors.items()}
    assert like_plainly(config, large) < CLOSE


def test_half_precision_stays_close(recorded, apart):
    """bfloat16 has 2 to 3 digits; clamps and routing do not amplify its error."""
    known = recorded("inl-v040", "reference")
    known.backend = ReferenceBackend(Device("reference"), dtype="bfloat16")
    fed = known.runner()
    fed.admit(1)
    (found,) = fed((1, known.prompts[1]))
    assert 1e-4 < apart(found, known.logits[1]) < 0.1


def one_more_token(checkpoint):
    """A vocabulary that two ranks can split: 98 ids, the last of which never wins."""
    tensors = {name: widen(checkpoint.tensor(name)) for name in checkpoint.names()}
    for name, x in tensors.items():
        if x.shape[:1] == (97,):
            tensors[name] = np.concatenate([x, 0 * x[:1]])
    return {**checkpoint.config, "vocab_size": 98}, tensors


@pytest.mark.parametrize("version", ["inl-v013", "inl-v040"])
def test_ranks_compute_the_same(recorded, opened, answered, version):
    known = recorded(version, "reference")
    stored = open_checkpoint(known.language.checkpoint.path)
    language = opened(*one_more_token(stored), known.language.model)
    # The config already has the features of the checkpoint's layout.
    model = replace(language.model, config=lambda _hf: language.config)
    limits = Limits(
        slots=6,
        blocks=(60,),
        block_size=8,
        max_blocks_per_seq=16,
        vocab=98,
        sampler="greedy",
    )
    runner = reference_ranks(
        Device("reference"), model, language.checkpoint, limits, ranks=2
    )
    assert answered(EngineCore(runner), known.prompts, 24) == known.greedy
    runner.close()


def test_velocity_is_state_only_if_carried(deep_made):
    config, _ = deep_made
    (paged,) = deep.MODEL.state(deep.config(config))
    assert paged.layers == (0, 1, 2)
    _, held = deep.MODEL.state(deep.config({**config, "velocity": "carry"}))
    assert held == Slotted("velocity", (64,), "float32", "replay")


@pytest.mark.parametrize("version", ["inl-v013", "inl-v040"])
def test_id_0_ends_a_text_unless_the_config_says_otherwise(recorded, version):
    model = recorded(version, "reference").language.model
    for fields, told in (
        ({}, ()),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": None}, ()),
    ):
        stored = MemoryCheckpoint(fields, {})
        stored.eos_token_ids = told
        _, adapted = model.adapt(recorded(version, "reference").language.config, stored)
        assert adapted.eos_token_ids == ((0,) if not fields else told)


def test_canonical_names():
    assert canonical("lm_head.weight") == "lm_head.weight"
    assert canonical("model.lm_head.weight") == "lm_head.weight"
    assert canonical("norm.weight") == canonical("model.norm.weight")
    assert canonical("norm.weight") == "model.norm.weight"


def spoiled(tensors, **changes):
    found = dict(tensors)
    for name, change in changes.items():
        real = name.replace("__", ".")
        found.pop(real, None)
        if change is not None:
            found[real] = change
    return found


AT = "model__layers__1__"
BAD_TENSORS = {
    "missing": (
        {f"{AT}dynamics__mu": None}, "missing model.layers.1.dynamics.mu [64]"
    ),
    "extra": (
        {f"{AT}dynamics__nu": np.zeros(3, np.float32)},
        "unused model.layers.1.dynamics.nu",
    ),
    "mis-shaped": (
        {f"{AT}mlp__down_proj": np.zeros((4, 24, 63), np.float32)},
        "model.layers.1.mlp.down_proj has shape [4, 24, 63], expected [4, 24, 64]",
    ),
    "half of an optional term": (
        {f"{AT}self_attn__mu_to_k__weight": None},
        "missing model.layers.1.self_attn.mu_to_k.weight [32, 64]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_named(opened, deep_made, case):
    config, tensors = deep_made
    changes, sentence = BAD_TENSORS[case]
    with pytest.raises(WeightMismatch, match=re.escape(sentence)):
        opened(config, spoiled(tensors, **changes))


def test_all_bad_tensors_are_named_in_one_error(opened, deep_made):
    config, tensors = deep_made
    changes = {name: x for part in BAD_TENSORS.values() for name, x in part[0].items()}
    with pytest.raises(WeightMismatch) as caught:
        opened(config, spoiled(tensors, **changes))
    for _, sentence in BAD_TENSORS.values():
        assert sentence in str(caught.value)


def test_mismatched_expert_tensors_are_named(opened, deep_made):
    config, tensors = experts_apart(*deep_made)
    at = "model__layers__2__mlp__experts__"
    changed = spoiled(
        tensors,
        **{
            f"{at}3__up_proj__weight": None,
            f"{at}0__down_proj__weight": np.zeros((64, 23), np.float32),
            f"{at}4__gate_proj__weight": np.zeros((24, 64), np.float32),
        },
    )
    with pytest.raises(WeightMismatch) as caught:
        opened(config, changed)
    told = str(caught.value)
    assert "missing model.layers.2.mlp.experts.3.up_proj.weight [24, 64]" in told
    assert "experts.0.down_proj.weight has shape [64, 23], expected [64, 24]" in told
    _, tensors = experts_apart(*deep_made)
    extra = spoiled(tensors, **{f"{at}4__gate_proj__weight": np.zeros((24, 64), "f4")})
    with pytest.raises(WeightMismatch, match=r"unused .*experts\.4\.gate_proj"):
        opened(config, extra)


def test_a_tensor_under_two_names_raises(opened, deep_made):
    config, tensors = deep_made
    twice = {**tensors, "norm.weight": tensors["model.norm.weight"]}
    with pytest.raises(
        CheckpointError, match=r"'norm\.weight': is also stored as 'mod"
    ):
        opened(config, twice)


@pytest.mark.parametrize("expert", [-1, 4])
def test_a_table_with_an_unknown_expert_raises(opened, deep_made, expert):
    config, tensors = deep_made
    name = "model.layers.0.mlp.token_to_expert"
    table = tensors[name].copy()
    table[5] = expert
    language = opened(config, {**tensors, name: table})
    with pytest.raises(CheckpointError, match=f"found expert {expert}, accepted: 0 to"):
        language.checkpoint.tensor(name)


BAD_FIELDS = {
    "num_attention_heads": (3, "expected a divisor of hidden_size, 64"),
    "num_key_value_heads": (3, "expected a divisor of num_attention_heads, 4"),
    "num_experts": (97, "expected at most intermediate_size, 96"),
    "use_token_routed_mlp": (False, "found false, accepted: true"),
    "velocity": ("keep", "found 'keep', accepted: reset, carry"),
    "mu_highway": (-1, "expected a number from 0"),
    "dynamics_dt": (0, "expected a number above 0"),
    "dynamics_controller_hidden": ("64", "expected an integer"),
    "sliding_window": (0, "expected an integer of 1 or more"),
}


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_bad_fields_are_named(deep_made, field):
    value, sentence = BAD_FIELDS[field]
    with pytest.raises(CheckpointError, match=f"{field}.*{sentence}"):
        deep.config({**deep_made[0], field: value})


@pytest.fixture
def engine_on(recorded, byte_tokenizer):
    made = []

    def make(version="inl-v013", **settings):
        language = recorded(version, "reference").language
        config = EngineConfig(backend="reference", context=128, **settings)
        made.append(InferenceEngine(language, byte_tokenizer, config))
        return made[-1]

    yield make
    for engine in made:
        engine.runner.close()


def test_an_engine_takes_the_velocity_from_its_config(
    engine_on, recorded, plain_deep, deep_made
):
    known = recorded("inl-v013", "reference")
    reset, carried = engine_on(), engine_on(velocity="carry")
    differ = 0
    for ids, greedy in zip(known.prompts, known.greedy, strict=True):
        options = {"max_tokens": 24, "ignore_eos": True}
        assert list(reset.generate(ids, **options).token_ids) == greedy
        plain = plain_deep(*deep_made, prompt=len(ids), carry=True)
        logits = [plain.feed(token) for token in ids][-1]
        want = []
        for _ in range(24):
            want.append(int(np.argmax(logits)))
            logits = plain.feed(want[-1])
        assert list(carried.generate(ids, **options).token_ids) == want
        differ += want != greedy
    assert differ


def test_the_velocity_option_raises_for_other_models(engine_on):
    with pytest.raises(
        RequestError, match="velocity: found 'carry', but inl-v040 is no"
    ):
        engine_on("inl-v040", velocity="carry")


def test_an_unknown_velocity_raises():
    with pytest.raises(
        RequestError, match="velocity: found 'kept', accepted: None, re"
    ):
        EngineConfig(velocity="kept")


def ops_met(config, tokens):
    """Number of ops in one step of a model."""
    kernels = tuple(ReferenceBackend(Device("reference")).kernels())
    groups = plan_weights(deep.MODEL.weights(config), kernels, {})
    limits = Limits(slots=9, blocks=(20,), block_size=8, max_blocks_per_seq=9, vocab=97)
    bucket = Bucket(tokens, 8)
    found = trace(deep.MODEL, config, groups, bucket, limits, KernelSelection(kernels))
    return sum(found.counts.values())


def test_the_number_of_ops_is_that_of_layers(deep_made):
    config, _ = deep_made
    base = deep.config(config)
    count = ops_met(base, 9)
    assert count == ops_met(base, 512)
    assert count == ops_met(replace(base, experts=32), 9)
    assert count < ops_met(replace(base, layers=4), 9)


def test_a_model_that_routes_by_token_refuses_embeddings(engine_on):
    engine = engine_on()
    width = engine.model.config.hidden_size
    with pytest.raises(RequestError, match="this model accepts token ids only"):
        engine.generate([1, np.ones((2, width))], max_tokens=1)


@pytest.mark.parametrize("version", ["inl-v013", "inl-v040"])
def test_room_for_adapters_changes_no_token(engine_on, version):
    prompts = [[5, 6, 7, 8], [9, 3]]
    plain = engine_on(version).generate(prompts, max_tokens=8)
    room = engine_on(version, max_adapters=2).generate(prompts, max_tokens=8)
    assert [a.token_ids for a in plain] == [a.token_ids for a in room]
