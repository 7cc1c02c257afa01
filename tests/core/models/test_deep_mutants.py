"""Each feature of the INL models affects the recorded logits.

A mutant is a model that lacks one feature; its error must exceed the bound ten times.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inl.executor.model_loader import open_model
from inl.models import deep, deep_v04
from inl.spec.weights import Group

BOUND = 1e-4


def kernel_of(op, changed):
    """A change of one op's kernel; ``changed`` receives its run first."""

    def change(kernel):
        run = kernel.run
        if kernel.op != op:
            return kernel
        return replace(kernel, run=lambda *args, **attrs: changed(run, *args, **attrs))

    return change


def still_layers(model):
    """The velocity of the previous layer is dropped."""

    def layer(ops, c, w, carry, step, state, *, index):
        carry = carry._replace(velocity=ops.zeros_like(carry.velocity))
        return model.layer(ops, c, w, carry, step, state, index=index)

    return replace(model, layer=layer)


def late_norm(model):
    """Queries and keys are normalized after their rotation."""

    class Late:
        def __init__(self, ops):
            self.ops, self.norms = ops, []

        def __getattr__(self, name):
            return getattr(self.ops, name)

        def rms_norm(self, x, w, *, eps):
            if len(x.shape) == 2:
                return self.ops.rms_norm(x, w, eps=eps)
            self.norms.append((w, eps))
            # The op must be traced with these shapes.
            self.ops.rms_norm(x, w, eps=eps)
            return x

        def rope(self, q, k, cos, sin):
            found = self.ops.rope(q, k, cos, sin)
            return tuple(
                self.ops.rms_norm(x, w, eps=eps)
                for x, (w, eps) in zip(found, self.norms, strict=True)
            )

    def layer(ops, *rest, **named):
        return model.layer(Late(ops), *rest, **named)

    return replace(model, layer=layer)


def no_start(model):
    """No mu is added in the first layer's attention."""

    def embed(ops, c, w, step):
        carry = model.embed(ops, c, w, step)
        return carry._replace(mu=ops.zeros_like(carry.mu))

    return replace(model, embed=embed)


def tied_head(model):
    """The embedding is the projection to logits too."""

    def weights(c):
        tree = model.weights(c)
        table = tree.embed.params["weight"]._replace(axis=0)
        return tree._replace(head=Group("linear", weight=table))

    return replace(model, weights=weights)


def first_expert(run, x, tokens, mu, w):
    return run(x, tokens * 0, mu, w._replace(router=None, experts=None))


def unclamped(run, *args, most_beta, limit, **attrs):
    return run(*args, most_beta=None, limit=limit, **attrs)


def unlimited(run, *args, most_beta, limit, **attrs):
    return run(*args, most_beta=most_beta, limit=None, **attrs)


def explicit(run, x, v, mu, controller, *, dt, **attrs):
    """Explicit Euler: the position moves by the old velocity."""
    _, new = run(x, v, mu, controller, dt=dt, **attrs)
    gate = 1 / (1 + np.exp(-controller[..., 2 * x.shape[-1] :]))
    return x + np.float32(dt) * gate * v, new


def without_dynamics(run, x, v, mu, controller, **attrs):
    return x, v


DEEP = {
    "mu highway": {"mu_highway": 0.0},
    "mu in attention": {"mu_attention": False},
    "mu in the router": {"mu_router": False},
    "mu moves with the position": {"mu_context": False},
    "norm of queries and keys": {"qk_norm": False},
    "base of rotation": {"rope_theta": 100.0},
    "time step": {"dt": 0.05},
    "own head": tied_head,
    "velocity across layers": still_layers,
    "norm before rotation": late_norm,
    "experts by token": kernel_of("token_routed_mlp", first_expert),
    "dynamics": kernel_of("inl_dynamics_step", without_dynamics),
    "the new velocity moves": kernel_of("inl_dynamics_step", explicit),
    "beta's clamp": kernel_of("inl_dynamics_step", unclamped),
    "the velocity's clamp": kernel_of("inl_dynamics_step", unlimited),
}
GUIDED = {
    "mu in attention": {"mu_attention": False},
    "shared expert": {"shared": False},
    "norm of queries and keys": {"qk_norm": False},
    "base of rotation": {"rope_theta": 100.0},
    "own head": tied_head,
    "the first layer's mu": no_start,
    "norm before rotation": late_norm,
    "experts by token": kernel_of("token_routed_mlp", first_expert),
    "clamps of mu": kernel_of("clip", lambda run, x, *, low, high: x),
    "clamp of the learned mu": kernel_of(
        "clip",
        lambda run, x, *, low, high: x if low == 0 else run(x, low=low, high=high),
    ),
}


MODELS = still_layers, late_norm, no_start, tied_head
"""Mutants that change the model, not its kernels."""


def worst(recorded, apart, version, mutant):
    """The largest difference over all prompts, with one feature off."""
    options = {}
    if isinstance(mutant, dict):
        options = dict(mutant)
    known = recorded(version, "reference", **options)
    if callable(mutant) and mutant in MODELS:
        model = mutant(known.language.model)
        known.language = replace(known.language, model=model)
    elif callable(mutant):
        known.kernels = mutant
    differences = []
    for ids, want in zip(known.prompts, known.logits, strict=True):
        fed = known.runner()
        fed.admit(1)
        differences.append(apart(fed((1, ids))[0], want))
    return max(differences)


CASES = [("inl-v013", name) for name in DEEP] + [("inl-v040", name) for name in GUIDED]


@pytest.mark.parametrize("version", ["inl-v013", "inl-v040"])
def test_the_full_model_is_within_the_bound(recorded, apart, version):
    assert worst(recorded, apart, version, {}) < BOUND / 10


@pytest.mark.parametrize(("version", "name"), CASES)
def test_a_mutant_exceeds_the_bound_ten_times(recorded, apart, version, name):
    mutant = (DEEP if version == "inl-v013" else GUIDED)[name]
    found = worst(recorded, apart, version, mutant)
    assert found > 10 * BOUND


def test_the_models_are_those_of_the_files(recorded):
    known = recorded("inl-v013", "reference").language
    assert known.model is deep.MODEL
    assert recorded("inl-v040", "reference").language.model is deep_v04.MODEL
    assert open_model(known.checkpoint.path).config == known.config
