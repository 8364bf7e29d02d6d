"""vLLM computes with the experts that are pushed. Processes that train them: test_layouts.py."""

import pytest

from benchmarks.support import forked
from tests.support.mixtures import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_computes_with_pushed_experts(kind, tmp_path):
    """A first and a second push arrive: on CPUs vLLM packs experts by itself only at its start."""
    output = tmp_path / "output"
    status = forked.run("tests.support.pushed_experts", [kind, tmp_path], output)
    assert status == 0, output.read_text()[-3000:]
    assert output.read_text().endswith("pushed\n")
