"""``inl/ops/protocol.py`` is what the generator writes, and covers the catalog."""

from __future__ import annotations

import inspect
from pathlib import Path

import inl.ops.protocol
from inl.ops import catalog
from inl.ops.protocol import Ops
from inl.testing.ops_protocol import ops_protocol


def test_the_module_is_current():
    assert Path(inl.ops.protocol.__file__).read_text() == ops_protocol(), (
        "write it again: python -m inl.testing.ops_protocol > "
        "core/src/inl/ops/protocol.py"
    )


def test_every_op_is_a_method_with_the_parameters_of_its_body():
    for name, spec in catalog().items():
        method = inspect.signature(getattr(Ops, name)).parameters
        body = dict(inspect.signature(spec.body).parameters)
        body.pop("ops", None)
        assert list(method) == ["self", *body]
        for parameter in body.values():
            assert method[parameter.name].default == parameter.default
            keyword = parameter.kind is parameter.KEYWORD_ONLY
            expected = parameter.KEYWORD_ONLY if keyword else parameter.POSITIONAL_ONLY
            assert method[parameter.name].kind is expected
