"""Faults of optional features: ``inl check`` finds each and names what is wrong.

Kernels are found by the cases of their op; what a backend does to programs is found by
the checks of the feature.
"""

from __future__ import annotations

import numpy as np
import pytest

from inl.backend.reference import body_kernel
from inl.ops import catalog
from inl.spec.kernel import Kernel
from planted_kernels import failures, target_of, with_fault


def leaking(run):
    """Sequences see each other, as padding of a batch may let them."""

    def full_attention(q, k, v, starts, **attrs):
        return run(q, k, v, starts[[0, -1]], **attrs)

    return full_attention


def causal(run):
    def full_attention(q, k, v, starts, *, scale, window):
        out = run(q, k, v, starts, scale=scale, window=window)
        first = starts[:-1][starts[1:] > starts[:-1]]
        out[first] = v[first].repeat(q.shape[1] // v.shape[1], 1)
        return out

    return full_attention


def near_only(run):
    def biased_attention(q, k, v, starts, w, **attrs):
        near = w._replace(weight=w.weight[1:-1])
        return run(q, k, v, starts, near, **attrs)

    return biased_attention


def padded_mean(run):
    def pool(x, starts, *, kind):
        out = run(x, starts, kind=kind)
        if kind != "mean":
            return out
        counts = np.maximum(np.diff(starts), 1)[:, None]
        return out * counts / counts.max()

    return pool


def next_first(run):
    def pool(x, starts, *, kind):
        if kind != "last":
            return run(x, starts, kind=kind)
        return x[np.clip(starts[1:], 0, len(x) - 1)]

    return pool


def zero_rows(_run):
    def unit_rows(x):
        with np.errstate(all="ignore"):
            return x / np.sqrt(np.square(x).sum(-1, keepdims=True))

    return unit_rows


def later_unseen(run):
    def span_attention(q, cache, step, spans, **attrs):
        return run(q, cache, step, np.zeros_like(spans), **attrs)

    return span_attention


def before_window(run):
    """A span is seen wholly, those of its keys before the window too."""

    def span_attention(q, cache, step, spans, *, window, **attrs):
        wide = np.where(spans[:, 1] > 0, None, window)
        parts = {
            each: run(q, cache, step, spans, window=each, **attrs)
            for each in set(wide.tolist())
        }
        rows = [parts[each][at] for at, each in enumerate(wide.tolist())]
        return np.stack(rows)

    return span_attention


def first_axis(run):
    """An infinite divisor is taken for none, so that every plane turns."""

    def rope_table(positions, *, dim, theta, scaling):
        divisors = tuple(1.0 if np.isinf(d) else d for d in scaling.divisors)
        scaling = scaling._replace(divisors=divisors)
        return run(positions, dim=dim, theta=theta, scaling=scaling)

    return rope_table


KERNELS = {
    "leaking": ("full_attention", leaking, "full_attention/planted", "several"),
    "causal": ("full_attention", causal, "full_attention/planted", "several"),
    "near only": ("biased_attention", near_only, "biased_attention/planted", ""),
    "padded mean": ("pool", padded_mean, "pool/planted", "mean"),
    "next first": ("pool", next_first, "pool/planted", "last"),
    "zero rows": ("unit_rows", zero_rows, "unit_rows/planted", "zeros"),
    "later unseen": ("span_attention", later_unseen, "span_attention/planted", ""),
    "before window": ("span_attention", before_window, "span_attention/planted",
                      "window"),
    "first axis": ("axis_rope_table", first_axis, "rope_table/planted is wrong first",
                   ""),
}  # fmt: skip
"""Fault -> op whose cases find it, wrong kernel, and two parts of the report."""


@pytest.mark.parametrize("fault", KERNELS)
def test_a_wrong_kernel_of_a_feature_is_named(fault):
    name, wrong, label, part = KERNELS[fault]
    planted = "rope_table" if name == "axis_rope_table" else name
    found = failures(target_of(with_fault(planted, wrong), only=(name,)), "kernel")
    assert found
    text = "\n".join(line for each in found for line in each.lines())
    assert label in text
    assert part in text


@pytest.mark.parametrize("op", sorted({name for name, *_ in KERNELS.values()}))
def test_right_kernels_of_features_pass(op):
    assert failures(target_of(only=(op,)), "kernel") == []


def keeping_first(name, argument):
    """Return compile, whose programs of a name keep an argument of the first call."""

    def compile_program(function, _bucket, _consumes, info):
        kept = []

        def program(*arguments):
            if info.name != name:
                return function(*arguments)
            kept.append(arguments[argument])
            own = (*arguments[:argument], kept[0], *arguments[argument + 1 :])
            return function(*own)

        return program

    return compile_program


INPUTS = ["axis_positions", "layer_features", "spans", "windowed_spans", "embedded_id"]


@pytest.mark.parametrize("feature", INPUTS)
def test_inputs_of_an_earlier_step_are_found(feature):
    target = target_of(compile=keeping_first("logits_embedded", 2))
    (found,) = failures(target, "feature", f"feature/{feature}")
    text = "\n".join(found.lines())
    assert f"{feature} of the tokens of a step" in text
    assert "logits_embedded" in text


def of_one_program(name):
    """Return kernels of an op that keep a result until the next program, and compile.

    As of a compiler that takes two calls of a program for one.
    """
    kept = {}

    def wrong(run):
        def kernel(*args, **attrs):
            if kept.get("shape") != args[0].shape:
                kept.update(shape=args[0].shape, value=run(*args, **attrs))
            return kept["value"]

        return kernel

    def compile_program(function, _bucket, _consumes, info):
        del info

        def program(*arguments):
            kept.clear()
            return function(*arguments)

        return program

    return with_fault(name, wrong), compile_program


def test_a_table_that_is_looked_up_once_is_found():
    kernels, compile_program = of_one_program("embedding")
    target = target_of(kernels, compile=compile_program)
    (found,) = failures(target, "feature", "feature/embedded_id")
    assert "embedded_id of the tokens of a step" in "\n".join(found.lines())
    assert failures(target, "feature", "feature/spans") == []


def test_spans_that_all_layers_see_are_found():
    """The mask of the layers before is kept for the layers without spans."""
    spans = []

    def kernels():
        for op in catalog().values():
            if op.composite:
                continue
            run = body_kernel(op, "float32")
            if op.name == "span_attention":

                def run(q, cache, step, given, *, run=run, **attrs):
                    spans[:] = [given]
                    return run(q, cache, step, given, **attrs)
            elif op.name == "attention":
                wide = body_kernel(catalog()["span_attention"], "float32")

                def run(q, cache, step, *, run=run, wide=wide, **attrs):
                    if spans and len(spans[0]) == len(q) == len(step.tokens):
                        return wide(q, cache, step, spans[0], **attrs)
                    return run(q, cache, step, **attrs)

            yield Kernel(op.name, "planted", run)

    target = target_of(kernels)
    (found,) = failures(target, "feature", "feature/windowed_spans")
    assert "windowed_spans of the tokens of a step" in "\n".join(found.lines())
    assert failures(target, "feature", "feature/spans") == []


@pytest.mark.parametrize("feature", ["encoders", "pooled"])
def test_sequences_of_an_earlier_batch_are_found(feature):
    def compile_program(function, _bucket, _consumes, info):
        kept = {}

        def program(*arguments):
            if info.name != "encode":
                return function(*arguments)
            # As a captured graph whose inputs are not copied.
            batch = kept.setdefault(arguments[1].starts.tobytes(), arguments[1])
            return function(arguments[0], batch)

        return program

    target = target_of(compile=compile_program)
    (found,) = failures(target, "feature", f"feature/{feature}")
    assert "the program encode of a tiny BERT" in "\n".join(found.lines())


def one_program(kept, function, _info):
    """Parts of a batch are found by the name of their program, which they share."""
    return kept.setdefault("encode_part", function)


def first_arrays(kept, function, _info):
    """A captured program reads the arrays of the batch that it was captured with."""

    def program(weights, batch, arrays):
        own = kept.setdefault((function.args[3], batch.starts.tobytes()), arrays)
        return function(weights, batch, own)

    return program


@pytest.mark.parametrize("fault", [one_program, first_arrays])
def test_parts_of_another_batch_are_found(fault):
    kept = {}

    def compile_program(function, _bucket, _consumes, info):
        return fault(kept, function, info) if info.name == "encode_part" else function

    target = target_of(compile=compile_program)
    (found,) = failures(target, "feature", "feature/encoder_parts")
    assert "encode_part" in "\n".join(found.lines())


def without(*names):
    def kernels():
        for op in catalog().values():
            if not op.composite and op.name not in names:
                yield Kernel(op.name, "planted", body_kernel(op, "float32"))

    return kernels


def test_a_backend_without_the_ops_of_features_passes():
    """It refuses by name what needs them, which the checks of features require."""
    names = [op.name for op in catalog().values() if op.since == (2, 0)]
    assert set(names) == {
        "full_attention", "biased_attention", "span_attention", "pool", "unit_rows",
    }  # fmt: skip
    target = target_of(without(*names))
    assert failures(target, "feature") == []
    tested = {check.name.partition("/")[0] for check in checks(target)}
    assert tested.isdisjoint(names)


def checks(target):
    from inl.testing.conformance import checks_of

    return checks_of(target, ["kernel"])
