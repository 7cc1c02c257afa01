"""Mixture-of-experts families against transformers, cached, batched, and mutated.

A mutant is our model with one feature of the config off or changed. Each has to fail
the comparison by ten times its bound: a feature that cannot be seen is not tested.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers

from inl import EngineConfig, InferenceEngine
from inl.backend.reference import ReferenceBackend
from inl.checkpoints.checkpoint import open_checkpoint
from inl.device import Device
from inl.dtypes import widen
from inl.errors import WeightMismatch
from inl.executor.model_loader import open_model
from inl.models import mixtral, moe, qwen2_moe, qwen3_moe
from inl.ops.moe import route
from inl.ops.rope import RopeScaling
from inl.runners.local_runner import start_runner
from inl.spec.limits import Limits
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.model import Model
from inl.spec.step import Bucket
from inl.testing.near_tie import compare
from inl.testing.oracle import prompt_logits
from inl.weights.load import stored_specs
from inl.weights.plan import check_tensors, plan_weights
from inl_cpu.backend import open_cpu

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BOUND = 1e-4
"""Largest relative error of a row of logits in float32."""

BLOCK, WIDTH, VOCAB = 4, 8, 80
LIMITS = Limits(
    slots=6, blocks=(60,), block_size=BLOCK, max_blocks_per_seq=WIDTH, vocab=VOCAB
)
PROMPTS = (
    [3, 5, 60, 22, 1, 9, 33, 7, 70, 11, 2, 64, 40, 41],
    [79, 78, 1, 1, 13, 52, 8, 19, 27, 6, 0],
    [14],
)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


class Family(NamedTuple):
    """A class of transformers, the fields of its config, and our model."""

    name: str
    model: Model
    fields: dict[str, Any]


FAMILIES = (
    Family(
        "Mixtral",
        mixtral.MODEL,
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12,
            "rms_norm_eps": 1e-3,
        },
    ),
    Family(
        "Qwen3Moe",
        qwen3_moe.MODEL,
        {**QWEN, "head_dim": 12, "norm_topk_prob": True},
    ),
    Family(
        "Qwen2Moe",
        qwen2_moe.MODEL,
        {**QWEN, "norm_topk_prob": False, "shared_expert_intermediate_size": 20},
    ),
)  # fmt: skip


class Outside(NamedTuple):
    """A checkpoint that transformers wrote, and its logits [T, V] of each prompt."""

    folder: Any
    fused: Any
    logits: tuple[Any, ...]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def outside(family, tmp_path_factory):
    torch.manual_seed(5)
    made = getattr(transformers, f"{family.name}Config")(**SIZES, **family.fields)
    model = getattr(transformers, f"{family.name}ForCausalLM")(made).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.4 * torch.randn_like(weight))
            if name.endswith("bias"):
                weight.copy_(0.5 * torch.randn_like(weight))
    folders = [tmp_path_factory.mktemp(f"{family.name}-{how}") for how in "ab"]
    for folder, original in zip(folders, (True, False), strict=True):
        model.save_pretrained(folder, save_original_format=original)
    with torch.no_grad():
        logits = tuple(model(torch.tensor([p])).logits[0].numpy() for p in PROMPTS)
    return Outside(*folders, logits)


def backend_of(name, dtype):
    if name == "cpu":
        return open_cpu(Device("cpu"))
    return ReferenceBackend(Device("reference"), dtype=dtype)


def runner_of(language, name, dtype="float32"):
    config = EngineConfig(backend=name, dtype=dtype)
    return start_runner(language, backend_of(name, dtype), config, limits=LIMITS)


def fed(runner, chunks):
    """Logits [V] after each of ``chunks``: steps of (slot, ids), several at once."""
    for slot in range(1, LIMITS.slots):
        table = [list(range(1 + WIDTH * (slot - 1), 1 + WIDTH * slot))]
        runner.submit(admit_frame(slot, table, groups=1, max_blocks_per_seq=WIDTH))
    found = {}
    for number, step in enumerate(chunks, start=1):
        rows = [Row(slot, ids) for slot, ids in step]
        bucket = Bucket(sum(len(ids) for _, ids in step), len(rows))
        frame = step_frame(
            bucket, rows, step=number, groups=1, block_size=BLOCK, decode_rows=0
        )
        logits = runner.logits(frame)
        for (slot, _), row in zip(step, widen(logits), strict=True):
            found.setdefault(slot, []).append(row)
    return found


def one_by_one(ids):
    return [[(1, [token])] for token in ids]


def error(found, expected):
    """Largest relative error of the rows."""
    pairs = list(zip(found, expected, strict=True))
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def prefill_error(language, outside, name="reference"):
    """Of the last tokens of all prompts, and of all tokens of the first by cuts."""
    worst = 0.0
    for ids, logits in zip(PROMPTS, outside.logits, strict=True):
        for stop in {len(ids), 1 + len(ids) // 2}:
            found = fed(runner_of(language, name), [[(1, ids[:stop])]])
            worst = max(worst, error(found[1], [logits[stop - 1]]))
    return worst


@pytest.mark.parametrize("layout", ["folder", "fused"])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_logits_are_transformers(name, layout, outside):
    language = open_model(getattr(outside, layout))
    assert prefill_error(language, outside, name) < BOUND


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_cached_logits_are_the_uncached_ones(name, outside):
    """A prompt and single tokens, then every cut in two."""
    language, (ids, expected) = (
        open_model(outside.folder),
        (PROMPTS[0], outside.logits[0]),
    )
    runner = runner_of(language, name)
    assert error(fed(runner, one_by_one(ids))[1], expected) < BOUND
    steps = [[(1, ids[:6])], *one_by_one(ids[6:])]
    assert error(fed(runner_of(language, name), steps)[1], expected[5:]) < BOUND
    for cut in range(1, len(ids)):
        runner = runner_of(language, name)
        found = fed(runner, [[(1, ids[:cut])], [(1, ids[cut:])]])
        assert error(found[1], expected[[cut - 1, -1]]) < BOUND, cut


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_strangers_in_the_batch_change_nothing(name, outside):
    """Prompts in chunks of other lengths, at other times, beside single tokens."""
    language = open_model(outside.folder)
    one, two, three = PROMPTS
    steps = [
        [(1, one[:5])],
        [(1, one[5:6]), (2, two[:7])],
        [(1, one[6:11]), (2, two[7:8]), (3, three)],
        [(2, two[8:11]), (1, one[11:12])],
        [(1, one[12:])],
    ]
    found = fed(runner_of(language, name), steps)
    stops = {1: (5, 6, 11, 12, 14), 2: (7, 8, 11), 3: (1,)}
    for slot, places in stops.items():
        expected = outside.logits[slot - 1][[place - 1 for place in places]]
        assert error(found[slot], expected) < BOUND


def test_logits_on_jax_are_transformers(jax_module, outside):
    language, backend = open_model(outside.folder), jax_module.jax_backend()
    config = EngineConfig(dtype="float32")
    runner = start_runner(language, backend(Device("jax")), config, limits=LIMITS)
    found = prompt_logits(runner, PROMPTS[0])
    assert error([found], [outside.logits[0][-1]]) < BOUND


def test_answers_of_a_batch_are_transformers_under_the_gap_rule(family, outside):
    """Through the engine, prompts in chunks beside each other's answers."""
    words = {f"word{index}": index for index in range(VOCAB)}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "word0"))
    rules.save(str(outside.folder / "tokenizer.json"))
    model = getattr(transformers, f"{family.name}ForCausalLM")
    model = model.from_pretrained(outside.folder).eval()
    config = EngineConfig(
        backend="cpu", dtype="float32", max_batch=3, context=48, token_budget=8
    )
    with InferenceEngine(open_model(outside.folder), config=config) as engine:
        answers = engine.generate([list(ids) for ids in PROMPTS], max_tokens=24)
    for ids, answer in zip(PROMPTS, answers, strict=True):
        text = [*ids, *answer.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, len(ids) - 1 : -1].double()
        top = logits.topk(2, -1)
        gaps = (top.values[:, 0] - top.values[:, 1]).tolist()
        assert len(answer.token_ids) == 24
        compared = compare(answer.token_ids, top.indices[:, 0].tolist(), gaps)
        assert compared.allowed("float32"), compared


class Mutant(NamedTuple):
    """What one change makes of a model: of its config, of a layer's weights, of ops."""

    families: tuple[str, ...]
    config: Any = None
    """Config fields as of now, numbers added to what is there."""
    weights: Any = None
    """(layer's weights) -> others."""
    ops: Any = None
    """Name of an op -> what computes it instead."""


def changed(config, fields):
    given = {
        name: getattr(config, name) + value if type(value) is int else value
        for name, value in fields.items()
    }
    return dataclasses.replace(config, **given)


class OtherOps:
    """Ops of which some are computed by others, once there are numbers."""

    def __init__(self, ops, others):
        self._ops, self._others = ops, others

    def __getattr__(self, name):
        right, other = getattr(self._ops, name), self._others.get(name)

        def run(x, *args, **attrs):
            numbers = other is not None and isinstance(x, np.ndarray)
            return (other if numbers else right)(x, *args, **attrs)

        return run


def mutated(model, mutant):
    """The model with a change that its loading does not see."""

    def embed(ops, c, w, step):
        return model.embed(ops, changed(c, mutant.config or {}), w, step)

    def layer(ops, c, w, carry, step, state, *, index):
        c = changed(c, mutant.config or {})
        w = mutant.weights(w) if mutant.weights else w
        ops = OtherOps(ops, mutant.ops or {})
        return model.layer(ops, c, w, carry, step, state, index=index)

    def head(ops, c, w, carry, step):
        return model.head(ops, changed(c, mutant.config or {}), w, carry, step)

    return dataclasses.replace(model, embed=embed, layer=layer, head=head)


def routed_as(**other):
    return {"route": lambda logits, **given: route.body(logits, **given | other)}


def worst_experts(logits, **given):
    return route.body(-logits, **given)[0], route.body(logits, **given)[1]


def equal_weights(logits, **given):
    ids, weights = route.body(logits, **given)
    return ids, np.full_like(weights, 1 / weights.shape[1])


def attention_without(*parts):
    return lambda w: w._replace(attention=w.attention._replace(**dict.fromkeys(parts)))


def no_biases(w):
    qkv = w.attention.qkv
    plain = qkv._replace(q_bias=None, k_bias=None, v_bias=None)
    return w._replace(attention=w.attention._replace(qkv=plain))


def in_mixtures(change):
    """Change the feed-forward of sparse layers."""

    def run(w):
        return w._replace(mlp=change(w.mlp)) if isinstance(w.mlp, moe.Moe) else w

    return run


def gate_and_up_swapped(w):
    experts = w.experts
    return w._replace(experts=experts._replace(gate=experts.up, up=experts.gate))


ALL, QWENS = ("Mixtral", "Qwen2Moe", "Qwen3Moe"), ("Qwen2Moe", "Qwen3Moe")
SUMMING, SHARING, NORMED = ("Mixtral", "Qwen3Moe"), ("Qwen2Moe",), ("Qwen3Moe",)
MUTANTS = {
    "an expert fewer": Mutant(ALL, {"experts_per_token": -1}),
    "an expert more": Mutant(ALL, {"experts_per_token": 1}),
    "renormalize off": Mutant(SUMMING, {"renormalize": False}),
    "renormalize on": Mutant(SHARING, {"renormalize": True}),
    "softmax after top-k": Mutant(SHARING, ops=routed_as(kind="topk_softmax")),
    "sigmoid router": Mutant(ALL, ops=routed_as(kind="sigmoid")),
    "worst experts": Mutant(ALL, ops={"route": worst_experts}),
    "equal weights": Mutant(ALL, ops={"route": equal_weights}),
    "gate and up swapped": Mutant(ALL, weights=in_mixtures(gate_and_up_swapped)),
    "gelu": Mutant(ALL, {"activation": "gelu_tanh"}),
    "shared expert off": Mutant(
        SHARING, weights=in_mixtures(lambda w: w._replace(shared=None))
    ),
    "shared expert ungated": Mutant(
        SHARING, weights=in_mixtures(lambda w: w._replace(shared_gate=None))
    ),
    "query norm off": Mutant(NORMED, weights=attention_without("q_norm")),
    "key norm off": Mutant(NORMED, weights=attention_without("k_norm")),
    "biases off": Mutant(SHARING, weights=no_biases),
    "another eps": Mutant(ALL, {"norm_eps": 3e-2}),
    "another theta": Mutant(ALL, {"rope_theta": 3e4}),
    "scaled rope": Mutant(ALL, {"rope_scaling": RopeScaling("linear", 2.0)}),
}
"""Which families each is for, and what it changes."""


def test_mutants_fail_by_ten_times_the_bound(family, outside, capsys):
    language = open_model(outside.folder)
    errors = {}
    for name, mutant in MUTANTS.items():
        if family.name in mutant.families:
            other = mutated(language.model, mutant)
            other = dataclasses.replace(language, model=other)
            errors[name] = prefill_error(other, outside)
    with capsys.disabled():
        shown = ", ".join(f"{name} {size:.2g}" for name, size in errors.items())
        print(f"\n{family.name}, errors of mutants: {shown}")
    assert len(errors) > 10
    assert not [name for name, size in errors.items() if not size > 10 * BOUND]


def test_a_model_that_is_mutated_by_nothing_passes(outside):
    language = open_model(outside.folder)
    same = dataclasses.replace(language, model=mutated(language.model, Mutant(ALL)))
    assert prefill_error(same, outside) < BOUND


MISFITS = {
    "Mixtral": ({"num_local_experts": 4}, {"num_local_experts": 6}),
    "Qwen2Moe": ({"decoder_sparse_step": 1}, {"mlp_only_layers": []}),
    "Qwen3Moe": ({"decoder_sparse_step": 1}, {"mlp_only_layers": []}),
}
"""Features that are seen before any number is, for other tensors are asked for."""


def test_other_layers_and_experts_do_not_fit_the_files(family, outside):
    checkpoint = open_checkpoint(outside.folder)
    stored = stored_specs(checkpoint)

    def check(**fields):
        config = family.model.config({**checkpoint.config, **fields})
        groups = plan_weights(family.model.weights(config), (), stored)
        check_tensors(groups, stored, "here")

    check()
    for fields in MISFITS[family.name]:
        with pytest.raises(WeightMismatch, match="do not fit the config"):
            check(**fields)


NEAR = 2.0**-6
"""Routing margin, relative to the largest logit, that bfloat16 may not tell."""


def margins(language, run=None):
    """Of every token, in float64: the least routing margin of all layers.

    That is the gap between the logits of the last expert taken and the first left,
    relative to the token's largest. And the logits that ``run`` gives, by default
    those of :func:`alone`.
    """
    seen = []

    def watched(logits, **given):
        size = np.sort(logits, axis=-1)[:, ::-1]
        gap = size[:, given["k"] - 1] - size[:, given["k"]]
        seen.append(gap / np.abs(logits).max(-1))
        return route.body(logits, **given)

    layers = language.config.layers - len(language.config.dense_layers)

    watching = mutated(language.model, Mutant(ALL, ops={"route": watched}))
    watching = dataclasses.replace(language, model=watching)
    logits = (run or alone)(runner_of(watching, "reference", "float64"))
    steps = [
        np.min(seen[at : at + layers], axis=0) for at in range(0, len(seen), layers)
    ]
    return np.concatenate(steps), logits


def alone(runner):
    """Logits of every token as a prompt of its own, so that none attends to another."""
    return np.array([fed(runner, [[(1, [token])]])[1][0] for token in range(VOCAB)])


def test_float32_leaves_no_token_out(outside):
    """Of the prompts above none lies where float32 may choose another expert."""
    language = open_model(outside.folder)
    assert margins(language)[0].min() > 0
    gaps, _ = margins(language, fed_prompts)
    assert len(gaps) == sum(map(len, PROMPTS))
    assert gaps.min() > 1e-5


def fed_prompts(runner):
    return [fed(runner, [[(1, ids)]])[1][0] for ids in PROMPTS]


def test_bfloat16_but_for_tokens_that_may_go_elsewhere(family, outside, capsys):
    """Where rounding may choose another expert, another answer is no error."""
    language = open_model(outside.folder)
    gaps, expected = margins(language)
    found = alone(runner_of(language, "cpu", "bfloat16"))
    errors = np.abs(found - expected).max(-1) / np.abs(expected).max(-1)
    sure = gaps > NEAR
    with capsys.disabled():
        print(
            f"\n{family.name} in bfloat16: {(~sure).sum()} of {VOCAB} tokens left out, "
            f"error of the others {errors[sure].max():.3f}, of these "
            f"{errors[~sure].max():.3f}"
        )
    assert sure.mean() > 0.6
    assert errors[sure].max() < 0.1
