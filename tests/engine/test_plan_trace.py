"""What a loader may do and be planned, and what is refused, by tensor; on small modules with loaders of their own.

Real models and their loaders are in test_plan_families.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import composed_weight_loader, default_weight_loader

from functional.engine import reload_patch
from functional.engine.plan import Copy, Plan, PlanRefused, View
from functional.engine.plan_check import PACKED, check_plan
from functional.engine.plan_trace import trace_plan
from functional.engine.wire import Slot

CPU = torch.device("cpu")
Loader = Callable[[Tensor, Tensor], None]
"""vLLM calls them by position, and binds their arguments by the names `param` and `loaded_weight`."""
reload_patch.apply()


class Layer(nn.Module):
    """One parameter, [4, 6] bfloat16, with the loader given, and one that needs nothing special."""

    def __init__(self, loader: Loader, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6, dtype=dtype), requires_grad=False)
        self.weight.weight_loader = loader
        self.norm = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("table", torch.zeros(3, dtype=torch.bfloat16))


class Model(nn.Module):
    def __init__(self, loader: Loader = default_weight_loader, **options: Any) -> None:
        super().__init__()
        self.layer = Layer(loader, **options)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters()) | dict(self.named_buffers())
        loaded = set()
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        return loaded


SLOTS = [Slot("layer.weight", torch.bfloat16, (4, 6)), Slot("layer.norm", torch.bfloat16, (4,))]


def learn(model: Model, slots: list[Slot] = SLOTS) -> Plan:
    plan = trace_plan(model, slots)
    assert check_plan(model, None, plan, slots, CPU) == {}
    assert trace_plan(model, slots) == plan  # also after a reload
    return plan


def transposed(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight.reshape(6, 4).t())


def half_and_padding(param: Tensor, loaded_weight: Tensor) -> None:
    param.data[:2].copy_(loaded_weight[2:])
    param.data[2:].fill_(0)


def cleared_first(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.zero_()
    param.data[1:3, 2:].copy_(loaded_weight[:2, :4])


def row_by_row(param: Tensor, loaded_weight: Tensor) -> None:
    for row in range(4):
        param.data[row].copy_(loaded_weight[3 - row])


def broadcast(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight[1:2].expand_as(param))


@pytest.mark.parametrize(
    ("loader", "copies"),
    [
        (default_weight_loader, [(View(0, (24,), (1,)), View(0, (24,), (1,)))]),
        (transposed, [(View(0, (4, 6), (1, 4)), View(0, (4, 6), (6, 1)))]),
        (half_and_padding, [(View(12, (12,), (1,)), View(0, (12,), (1,)))]),
        (cleared_first, [(View(0, (2, 4), (6, 1)), View(8, (2, 4), (6, 1)))]),
        (row_by_row, [(View(18 - 6 * row, (6,), (1,)), View(6 * row, (6,), (1,))) for row in range(4)]),
        (broadcast, [(View(6, (4, 6), (0, 1)), View(0, (4, 6), (6, 1)))]),
    ],
)
def test_copies_of_any_shape_are_planned(loader: Loader, copies: list[tuple[View, View]]) -> None:
    plan = learn(Model(loader))
    found = [(copy.take, copy.put) for copy in plan.copies if copy.target == "layer.weight"]
    assert found == copies


def test_a_cast_is_planned() -> None:
    plan = learn(Model(dtype=torch.float32))
    dtypes = {target.name: target.dtype for target in plan.targets}
    assert dtypes == {"layer.weight": torch.float32, "layer.norm": torch.bfloat16}


def test_a_buffer_that_the_loader_fills_is_planned() -> None:
    plan = learn(Model(), [*SLOTS, Slot("layer.table", torch.bfloat16, (3,))])
    assert plan.copies[-1] == Copy("layer.table", View(0, (3,), (1,)), "layer.table", View(0, (3,), (1,)))


def plus_one(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight + 1)


def plus_one_in_place(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)
    param.data.add_(1)


def shuffled(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight[torch.tensor([2, 0, 3, 1])])


def cloned(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight.t().contiguous().t())


def reinterpreted(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.view(torch.int16).copy_(loaded_weight.view(torch.int16))


def replaced(param: Tensor, loaded_weight: Tensor) -> None:
    param.data = loaded_weight


def judged(param: Tensor, loaded_weight: Tensor) -> None:
    if loaded_weight.sum().item() > 0:
        param.data.copy_(loaded_weight)


def spoilt(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight.mul_(2))


def in_part(param: Tensor, loaded_weight: Tensor) -> None:
    param.data[:3].copy_(loaded_weight[:3])


def twice(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)
    param.data[1].copy_(loaded_weight[2])


def set_to_seven(param: Tensor, loaded_weight: Tensor) -> None:
    param.data[:3].copy_(loaded_weight[:3])
    param.data[3].fill_(7)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (plus_one, r"computes it from layer.weight \(aten.add"),
        (plus_one_in_place, "changes it by aten.add_"),
        (composed_weight_loader(default_weight_loader, lambda x: -torch.exp(x)), r"computes it .* \(aten.neg"),
        (shuffled, r"computes it .* \(aten.index"),
        (cloned, r"computes it .* \(aten.clone"),
        (reinterpreted, "another dtype's bits"),
        (replaced, "puts another tensor in its place"),
        (judged, "the loader refuses it"),
        (spoilt, "changes the tensor it is given"),
        (in_part, "no tensor of the checkpoint fills 6 of its 24 elements"),
        (twice, "writes some of its elements twice"),
        (set_to_seven, "changes it by aten.fill_"),
    ],
)
def test_what_is_no_copy_is_refused_by_name(loader: Loader, reason: str) -> None:
    with pytest.raises(PlanRefused, match=rf"layer\.weight: .*{reason}") as refusal:
        trace_plan(Model(loader), SLOTS)
    assert list(refusal.value.problems) == ["layer.weight"]


def test_what_goes_elsewhere_than_into_a_parameter_is_refused() -> None:
    kept = torch.zeros(4, 6, dtype=torch.bfloat16)

    def aside(param: Tensor, loaded_weight: Tensor) -> None:
        kept.copy_(loaded_weight)
        param.data.copy_(loaded_weight)

    with pytest.raises(PlanRefused, match=r"layer\.weight: the loader puts it where the model has no parameter"):
        trace_plan(Model(aside), SLOTS)


def test_a_parameter_without_a_source_and_a_source_without_a_parameter_are_refused() -> None:
    with pytest.raises(PlanRefused, match=r"layer\.norm: no tensor of the checkpoint fills 4 of its 4"):
        trace_plan(Model(), SLOTS[:1])
    with pytest.raises(PlanRefused, match=r"layer\.odd: the loader refuses it \(KeyError"):
        trace_plan(Model(), [*SLOTS, Slot("layer.odd", torch.bfloat16, (4,))])


class Method(QuantizeMethodBase):
    """Keeps a tensor worked out of the weight, as vLLM's MLA layers do; no copy of parameters brings it up to date."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.factors = [layer.weight.float().nan_to_num().sum(0)]


def test_what_the_engine_computes_from_the_weights_is_found() -> None:
    model = Model()
    model.layer.quant_method = Method()
    plan = trace_plan(model, SLOTS)
    with pytest.raises(PlanRefused, match=r"layer\.factors\.0: the engine computes it from the weights"):
        check_plan(model, None, plan, SLOTS, CPU)


def test_weights_that_a_layer_packs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared before; one that is no more as it was then cannot be written in place."""
    model = Model()
    model.layer.quant_method = Method()
    monkeypatch.setattr(Method, "process_weights_after_loading", lambda self, layer: layer.weight.data.zero_())
    plan = trace_plan(model, SLOTS)
    packed = check_plan(model, None, plan, SLOTS, CPU)
    assert packed == {"layer.weight": PACKED}
    assert "process_weights_after_loading" not in vars(model.layer.quant_method)


def turned_with_data(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight if param.is_meta else loaded_weight.flip(0))


def test_what_the_trace_does_not_show_is_found() -> None:
    model = Model(turned_with_data)
    plan = trace_plan(model, SLOTS)
    with pytest.raises(PlanRefused, match=r"layer\.weight: the loader, or the processing after it, gives other bytes"):
        check_plan(model, None, plan, SLOTS, CPU)


@pytest.mark.parametrize("change", ["offset", "swap", "less", "source"])
def test_a_wrong_plan_is_not_accepted(change: str) -> None:
    model = Model(half_and_padding)
    plan = trace_plan(model, SLOTS)
    weight = next(copy for copy in plan.copies if copy.target == "layer.weight")
    wrong = {
        "offset": Copy("layer.weight", View(11, (12,), (1,)), "layer.weight", weight.put),
        "swap": Copy("layer.weight", View(12, (2, 6), (1, 2)), "layer.weight", View(0, (2, 6), (6, 1))),
        "less": Copy("layer.weight", View(12, (11,), (1,)), "layer.weight", View(0, (11,), (1,))),
        "source": Copy("layer.norm", View(0, (12,), (0,)), "layer.weight", weight.put),
    }[change]
    copies = tuple(wrong if copy is weight else copy for copy in plan.copies)
    with pytest.raises(PlanRefused, match=r"layer\.weight"):
        check_plan(model, None, Plan(plan.sources, plan.targets, copies), SLOTS, CPU)


def test_a_trace_leaves_the_model_as_it_was() -> None:
    model = Model()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    trace_plan(model, SLOTS)
    with pytest.raises(PlanRefused):
        trace_plan(model, [*SLOTS, Slot("layer.odd", torch.bfloat16, (4,))])
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_no_trace_while_an_update_is_under_way() -> None:
    model = Model()
    initialize_layerwise_reload(model)
    with pytest.raises(RuntimeError, match="a weight update is under way"):
        trace_plan(model, SLOTS)
    finalize_layerwise_reload(model, None)
    trace_plan(model, SLOTS)
