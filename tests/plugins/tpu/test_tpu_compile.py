"""The Pallas kernels compiled by the real TPU compiler, for chips that are not here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CHIPS = {"v5e:2x2": "TPU v5 lite", "v6e:2x2": "TPU v6 lite", "tpu7x:2x2x1": "TPU7x"}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install 'inl-tpu[compiler]'",
)


def compiled(*arguments, worker="aot_worker.py"):
    done = subprocess.run(
        [sys.executable, str(FOLDER / worker), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("topology", CHIPS)
def test_paged_attention_compiles(topology, capsys):
    found = compiled(topology, "")
    with capsys.disabled():
        print(f"\n{found}")
    assert found["device"] == CHIPS[topology]
    assert len(found["results"]) == 4
    for name, temporary_bytes in found["results"].items():
        assert isinstance(temporary_bytes, int), f"{name}: {temporary_bytes}"


def test_a_kernel_with_too_much_vmem_is_refused_by_name():
    found = compiled("v5e:2x2", "vmem")
    reason = found["results"]["planted"]
    assert "ragged_paged_attention" in str(reason)
    assert "vmem" in str(reason).lower()


@pytest.mark.parametrize("steps", ["1", "8"])
def test_a_whole_step_compiles_in_place(capsys, steps):
    """Two layers of the default model, decoding 32 rows, also as a repeated step."""
    facts = compiled("v6e:2x2", "135M", "32", steps, worker="aot_steps.py")
    with capsys.disabled():
        print(f"\n{facts}")
    assert facts["kernel"] == "attention/pallas"
    assert facts["attentions"] == 2
    assert facts["cache copies"] == facts["callbacks"] == 0
    assert facts["aliased bytes"] >= facts["state bytes"]
