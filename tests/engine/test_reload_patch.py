"""vLLM's layerwise reload finalises a layer too early without the patch, and does not with it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded
from vllm.model_executor.model_loader.weight_utils import composed_weight_loader, default_weight_loader

from functional.engine import reload_patch


class TwoParameters(nn.Module):
    """`first` is loaded by a composed loader, as vLLM's Mamba layers load theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.second = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.first.weight_loader = composed_weight_loader(default_weight_loader, lambda x: -x)
        self.second.weight_loader = default_weight_loader


def reload(model: TwoParameters) -> None:
    layerwise.initialize_layerwise_reload(model)
    for parameter in dict(model.named_parameters()).values():  # collected first, as vLLM's load_weights does
        parameter.weight_loader(parameter, torch.full((8,), 3.0))
    layerwise.finalize_layerwise_reload(model, None)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> TwoParameters:
    monkeypatch.setattr(layerwise, "get_numel_loaded", get_numel_loaded)
    model = TwoParameters()
    layerwise.record_metadata_for_reloading(model)
    return model


def test_without_the_patch_the_last_parameter_is_lost(model: TwoParameters) -> None:
    """But for an image with NeMo RL, whose marker says that vLLM's files have its own patch."""
    repaired = Path(sys.prefix, "VLLM_BACKPORTS").exists()
    reload(model)
    assert model.first.tolist() == [-3.0] * 8
    assert (model.second.tolist() == [3.0] * 8) == repaired


def test_with_the_patch_all_is_loaded(model: TwoParameters) -> None:
    reload_patch.apply()
    assert reload_patch.is_applied()
    reload(model)
    assert model.first.tolist() == [-3.0] * 8
    assert model.second.tolist() == [3.0] * 8
