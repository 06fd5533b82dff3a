"""Experts as torch computes them, where vLLM has no kernel: the same activation, with no engine's start around it."""

import pytest
import torch
import vllm
from torch.nn import functional

from functional.engine import cpu_experts_patch
from functional.engine.patches import PATCHES

pytestmark = pytest.mark.skipif(
    not any(patch.module is cpu_experts_patch and patch.is_for_here(vllm.__version__) for patch in PATCHES),
    reason="the patch is for a CPU and one vLLM",
)


@pytest.fixture
def experts():
    """vLLM's module, as it is without the patch; put back afterwards."""
    module = cpu_experts_patch._patched_module()
    was = dict(module._CPU_MOE_ACT_FN)
    module._CPU_MOE_ACT_FN[module.MoEActivation.SILU] = lambda x: module.SiluAndMul(compile_native=False)(x)
    yield module
    module._CPU_MOE_ACT_FN.update(was)


def test_the_activation_needs_no_configuration(experts):
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    activation = experts.MoEActivation.SILU
    with pytest.raises(AssertionError, match="config is not set"):
        experts._CPU_MOE_ACT_FN[activation](rows)
    cpu_experts_patch.apply()
    cpu_experts_patch.apply()
    assert cpu_experts_patch.is_applied()
    gate, up = rows.chunk(2, dim=-1)
    assert torch.equal(experts._CPU_MOE_ACT_FN[activation](rows), functional.silu(gate) * up)
