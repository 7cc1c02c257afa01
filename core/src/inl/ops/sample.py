"""Choosing the next token. No randomness here: the host sends uniform numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from inl.ops.sample_cases import choose_cases, score_cases
from inl.spec.op import Case, Spec, op
from inl.spec.step import PARAMS, TOP, Array, Scores, Step, Tables


def _shapes(_logits: Spec, step: Step, tables: Tables, **_: Any) -> tuple[Any, Any]:
    return Spec(step.samples.shape, "int32"), tables


@op(shapes=_shapes, cases=choose_cases, consumes=("tables",), rounds=False)
def sample(
    logits: Array, step: Step, tables: Tables, *, sampler: str
) -> tuple[Array, Tables]:
    """Pick one token per sample from ``logits`` [S, V], and remember each row's last.

    "greedy" takes the highest logit, ties to the lowest id. "sample" scales by the
    slot's temperature (0 is greedy) and takes the first id at which the cumulative
    probability, in the order of ids, exceeds the host's uniform number. "sample_filtered" does
    the same with changed logits, of fewer tokens, in this order:

    1. the fed token of each decoding row counts as one more of its answer
    2. repetition penalty r, for tokens of prompt and answer: logits above 0 are divided
       by r, others multiplied; then frequency penalty times the token's count in the
       answer, and presence penalty if that is not 0, are subtracted
    3. the bias is added
    4. division by the temperature
    5. top-k (0 is all), then top-p of what is left (the likeliest tokens whose
       predecessors have less than p of the probability), then min-p (at least that
       share of the likeliest's probability): each keeps the first few of the tokens
       sorted by falling logit, equal ones by rising id, and never none

    Neutral parameters give the bits of "sample". "sample_filtered" is defined for one sample a row.
    Returns tokens int32 [S].
    """
    if sampler == "sample_filtered":
        tables = _counted(step, tables)
        logits = _penalized(logits, step.slots, tables)
    tokens = np.argmax(logits, axis=-1)
    if sampler != "greedy":
        width = step.samples.shape[0] // step.slots.shape[0]
        params = np.repeat(tables.params[step.slots], width, axis=0)[:, :, None]
        hot = params[:, 0] > 0
        scaled = _scaled(logits, np.where(hot, params[:, 0], 1))
        kept = _kept(scaled, params) if sampler == "sample_filtered" else True
        drawn = _drawn(np.where(kept, np.exp(scaled), 0), step.uniforms)
        tokens = np.where(hot[:, 0], drawn, tokens)
    tokens = tokens.astype(np.int32)
    last = tables.last.copy()
    last[step.slots] = tokens.reshape(step.slots.shape[0], -1)[:, -1]
    return tokens, tables._replace(last=last)


def is_decided(
    logits: Sequence[Any], step: Step, tables: Tables, margin: float, *, full: bool
) -> bool:
    """Whether no draw of one sample a row lies so close to another token.

    logits: several [S, V] that may be drawn from. The drawn number, and the shares
    top-p and min-p of what is kept, may each be ``margin`` more or less.
    """
    slots = np.tile(step.slots, len(logits))
    rows = np.concatenate(list(logits))
    if full:
        tables = _counted(step, tables)
        rows = _penalized(rows, slots, tables)
    draws, shares = margin * np.array([(0, 1, -1, 0, 0), (0, 0, 0, 1, -1)])
    copies = len(draws)
    params = np.tile(tables.params[slots].astype(np.float64), (copies, 1))[:, :, None]
    hot = params[:, 0] > 0
    scaled = _scaled(np.tile(rows, (copies, 1)), np.where(hot, params[:, 0], 1))
    params[:, 2:4] *= 1 + np.repeat(shares, len(slots))[:, None, None]
    kept = _kept(scaled, params) if full else True
    uniforms = np.tile(step.uniforms.view(np.float32), len(logits) * copies)
    uniforms = (uniforms + np.repeat(draws, len(slots))).astype(np.float32)
    drawn = np.where(hot[:, 0], _drawn(np.where(kept, np.exp(scaled), 0), uniforms), 0)
    drawn = drawn.reshape(copies, -1)
    return bool((drawn == drawn[0]).all())


def _counted(step: Step, tables: Tables) -> Tables:
    fed = step.tokens[np.minimum(step.starts[:-1], step.tokens.shape[0] - 1)]
    decoding = np.arange(fed.shape[0]) < step.used_counts[0]
    counts = tables.token_counts.copy()
    counts[step.slots, fed] += 2 * decoding.astype(np.int32)
    return tables._replace(token_counts=counts)


def _penalized(logits: Any, slots: Any, tables: Tables) -> Any:
    counts = tables.token_counts[slots]
    param = dict(zip(PARAMS, tables.params[slots].T[:, :, None], strict=True))
    factor = param["repetition_penalty"]
    factor = np.where((counts > 0) & (factor > 0), factor, 1)
    logits = np.where(logits > 0, logits / factor, logits * factor)
    answered = counts >> 1
    frequency = param["frequency_penalty"] * answered.astype(np.float32)
    presence = param["presence_penalty"] * (answered > 0)
    return logits - frequency - presence + tables.bias[slots]


def _scaled(logits: Any, temperature: Any) -> Any:
    # Less its maximum first: a tiny temperature then gives -inf at worst, and no NaN.
    with np.errstate(over="ignore"):
        return (logits - logits.max(-1, keepdims=True)) / temperature


def _kept(scaled: Any, params: Any) -> Any:
    """Which tokens top-k, top-p and min-p leave, [S, V]."""
    top_k, top_p, min_p = params[:, 1], params[:, 2], params[:, 3]
    order = np.argsort(-scaled, axis=-1, kind="stable")
    rank = np.arange(scaled.shape[-1])
    mass = np.exp(np.take_along_axis(scaled, order, -1))
    kept = (rank < top_k) | (top_k < 1)
    total = np.cumsum(np.where(kept, mass, 0), axis=-1)
    before = np.concatenate([np.zeros_like(total[:, :1]), total[:, :-1]], axis=-1)
    kept &= (before < top_p * total[:, -1:]) | (top_p >= 1)
    kept &= mass >= min_p
    kept[:, 0] = True
    result = np.empty_like(kept)
    np.put_along_axis(result, order, kept, -1)
    return result


def _drawn(mass: Any, uniforms: Any) -> Any:
    total = np.cumsum(mass, axis=-1)
    below = total <= uniforms.view(np.float32)[:, None] * total[:, -1:]
    return np.minimum(below.sum(-1), mass.shape[-1] - 1)


def _score_shapes(logits: Spec, tokens: Spec) -> Scores:
    top = (logits.shape[0], min(TOP, logits.shape[1]))
    return Scores(
        Spec(tokens.shape, "float32"), Spec(top, "int32"), Spec(top, "float32")
    )


@op(shapes=_score_shapes, cases=score_cases, rounds=False)
def score(logits: Array, tokens: Array) -> Scores:
    """Tell the log-probabilities of ``tokens`` [S] and of the likeliest.

    They are those of the model: ``log_softmax(logits)``, before penalties, bias,
    temperature and filters, as users of vLLM and OpenAI expect, and so of one scale
    whatever the parameters. Equal logits come in the order of ids. Float32.
    """
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP].astype(np.int32)
    chosen = np.take_along_axis(logs, tokens[:, None], -1)[:, 0]
    return Scores(chosen, ids, np.take_along_axis(logs, ids, -1))


def _mask_cases(rng: np.random.Generator) -> Iterable[Case]:
    for vocab in (5, 64, 77):
        words = rng.integers(-(2**31), 2**31, (3, -(-vocab // 32))).astype(np.int32)
        yield Case(f"3x{vocab}", (rng.standard_normal((3, vocab)), words))


@op(
    shapes=lambda logits, masks: Spec(logits.shape, "float32"),  # noqa: ARG005
    cases=_mask_cases,
    rounds=False,
)
def mask_logits(logits: Array, masks: Array) -> Array:
    """Keep ``logits`` [S, V] where bit ``t % 32`` of ``masks[s, t // 32]`` is set.

    Elsewhere they become -1e30, so that a row with no token allowed is no NaN.
    The result is float32, which holds that.
    """
    index = np.arange(logits.shape[-1])
    allowed = (masks[:, index // 32] >> (index % 32).astype(np.int32)) & 1
    return np.where(allowed == 1, logits, np.float32(-1e30))
