"""How a plan is learned: the engine's own loader runs on tensors without data, and its copies are written down.

No table of architectures: whatever names, slices, stacks or spreads the loader knows appear as `copy_` from a part of
a checkpoint's tensor to a part of a parameter. What it does otherwise (arithmetic, gathers) is refused by name. A
trace takes no memory and leaves the model as it was; `plan_check` shows whether it is right.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from functional.engine.plan import Copy, Plan, PlanRefused, Target, View, make_plan, overlap
from functional.engine.wire import Slot

_aten = torch.ops.aten
_WRAPPED = "online_process_loader"


def trace_plan(model: nn.Module, slots: Sequence[Slot]) -> Plan:
    """The plan by which vLLM's loader of `model` (all that a rank holds) takes in tensors of these names and shapes.

    Raises PlanRefused, by tensor. Must not be called while a reload is under way.
    """
    places = Places.of(model)
    sources = {slot.name: torch.empty(slot.shape, dtype=slot.dtype, device="meta") for slot in slots}
    with _in_checkpoint_format(model) as blank, torch.no_grad():
        as_given = {place: tensor.detach() for place, tensor in blank.items()}
        targets = {storage_key(tensor): (places.name(place), tensor) for place, tensor in as_given.items()}
        record = _Record(_by_storage(sources), targets)
        _load(model, sources, record)
        for (layer, attribute), tensor in as_given.items():
            now = getattr(layer, attribute, None)
            if now is None or storage_key(now) != storage_key(tensor):
                record.problems[places.name((layer, attribute))] = "the loader puts another tensor in its place"
    if record.problems:
        raise PlanRefused(record.problems)
    plan = make_plan(slots, _targets(record, places, blank), record.copies)
    if unfilled := _unfilled(plan, record):
        raise PlanRefused(unfilled)
    return plan


Place = tuple[nn.Module, str]
"""A layer, and the attribute by which it holds a parameter or buffer."""


@dataclass
class Places:
    """Where a model holds its parameters and buffers, and their names; a tied one has its first name everywhere."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Name → tensor, as the engine holds it."""
    names: dict[Place, str] = field(default_factory=dict)
    paths: dict[nn.Module, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "Places":
        places, first = cls(), dict[int, str]()
        for path, layer in model.named_modules():
            places.paths[layer] = path
            for attribute, tensor in _own(layer).items():
                name = first.setdefault(id(tensor), _join(path, attribute))
                places.names[layer, attribute] = name
                places.tensors.setdefault(name, tensor)
        return places

    def name(self, place: Place) -> str:
        """Also of what the engine dropped after loading, which has the name it had."""
        return self.names.setdefault(place, _join(self.paths[place[0]], place[1]))


class _Record(TorchDispatchMode):
    """Writes down copies from sources to targets, and does not carry them out."""

    def __init__(self, sources: Mapping[int, tuple[str, Tensor]], targets: Mapping[int, tuple[str, Tensor]]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.zeroed: dict[str, list[View]] = defaultdict(list)
        self.problems: dict[str, str] = {}
        self.loading = ""
        self._sources = sources
        self._targets = targets
        self._made: dict[int, str] = {}  # storage → the operation that filled it
        self._kept: list[Tensor] = []  # so that no storage's key is used again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func._schema.is_mutable:
            written = [
                value
                for value, argument in zip(args, func._schema.arguments, strict=False)
                if isinstance(value, Tensor) and argument.alias_info is not None and argument.alias_info.is_write
            ]
            known = [tensor for tensor in written if self._is_known(tensor)]
            for tensor in known:
                self._write(tensor, func, args)
            if known:
                return args[0]
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not self._is_known(tensor):
                self._made.setdefault(storage_key(tensor), str(func))
                self._kept.append(tensor)
        return made

    def _copy(self, into: Tensor, out_of: Tensor) -> None:
        target, source = self._targets.get(storage_key(into)), self._sources.get(storage_key(out_of))
        if target is None:
            if source is not None and storage_key(into) not in self._made:
                self.problems[source[0]] = "the loader puts it where the model has no parameter"
            self._made[storage_key(into)] = f"aten.copy_ of {source[0]}" if source else self._origin(out_of)
            self._kept.append(into)
        elif source is None:
            self.problems[target[0]] = f"the loader computes it from {self.loading} ({self._origin(out_of)})"
        elif (into.dtype, out_of.dtype) != (target[1].dtype, source[1].dtype):
            self.problems[target[0]] = f"the loader takes {self.loading} as another dtype's bits"
        else:
            take, put = View.of(out_of.expand_as(into)), View.of(into)
            put = View(put.offset - target[1].storage_offset(), put.shape, put.strides)
            if put.numel:
                self.copies.append(Copy(source[0], take, target[0], put))

    def _write(self, tensor: Tensor, func: Any, args: tuple[Any, ...]) -> None:
        if storage_key(tensor) in self._sources:
            self.problems[self._sources[storage_key(tensor)][0]] = f"the loader changes the tensor it is given ({func})"
            return
        name, whole = self._targets[storage_key(tensor)]
        is_zero = func is _aten.zero_.default or (func is _aten.fill_.Scalar and args[1] == 0)
        if not is_zero:
            self.problems[name] = f"the loader changes it by {func}"
        elif tensor.numel():
            view = View.of(tensor)
            self.zeroed[name].append(View(view.offset - whole.storage_offset(), view.shape, view.strides))

    def _is_known(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._targets or storage_key(tensor) in self._sources

    def _origin(self, tensor: Tensor) -> str:
        return self._made.get(storage_key(tensor), "a tensor of its own")


@contextlib.contextmanager
def _in_checkpoint_format(model: nn.Module) -> Iterator[dict[Place, Tensor]]:
    """Each layer has its parameters and buffers as they were before its first load, without data; all of them by place.

    vLLM keeps what they were for its layerwise reload; what that never touches stays as it is.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    layers = list(model.modules())
    if any(get_layerwise_info(layer).can_load() for layer in layers):
        raise RuntimeError("a weight update is under way: reset it first")
    held = {
        layer: (dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
        for layer in layers
    }
    try:
        blank: dict[Place, Tensor] = {}
        for layer in layers:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for attribute, tensor in _own(layer).items():
                kind = layer._parameters if attribute in layer._parameters else layer._buffers
                kind[attribute] = blank[layer, attribute] = _with_own_loader(tensor)
        yield blank
    finally:
        for layer, (parameters, buffers, temporary) in held.items():
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(temporary)


def _with_own_loader(tensor: Tensor) -> Tensor:
    """vLLM's record of a parameter has, after a reload, the loader that defers, which would do nothing here. A copy of
    it, with the loader behind that one; what is on a device already (it takes no part in reloads) as it is."""
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    if not tensor.is_meta:
        return tensor
    copy: Any = to_meta_tensor(tensor)
    loader: Any = getattr(copy, "weight_loader", None)
    original = loader
    while getattr(original, "__name__", "") == _WRAPPED:
        original = original.__wrapped__
    if original is not loader:
        copy.weight_loader = original
    return copy


def _load(model: Any, sources: Mapping[str, Tensor], record: _Record) -> None:
    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sources.items():
            record.loading = name
            yield name, tensor

    try:
        with record:
            model.load_weights(named())
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise PlanRefused({record.loading: f"the loader refuses it ({type(error).__name__}: {reason})"}) from error


def _targets(record: _Record, places: Places, blank: Mapping[Place, Tensor]) -> list[Target]:
    """Every parameter, and the buffers that the loader fills; as they are when they are loaded."""
    filled = {copy.target for copy in record.copies} | set(record.zeroed)
    found: dict[str, Target] = {}
    for (layer, attribute), tensor in blank.items():
        name = places.name((layer, attribute))
        if tensor.numel() and (attribute in layer._parameters or name in filled):
            found.setdefault(name, Target(name, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())))
    return list(found.values())


def _unfilled(plan: Plan, record: _Record) -> dict[str, str]:
    """Target → why, where it has elements that the loader neither copies nor sets to zero."""
    problems = {}
    numel = {target.name: target.numel for target in plan.targets}
    puts: dict[str, list[View]] = defaultdict(list)
    for copy in plan.copies:
        puts[copy.target].append(copy.put)
    for name, count in plan.padding().items():
        zeroed = record.zeroed[name]
        whole = any(view.numel == numel[name] for view in zeroed)
        rest = sum(view.numel for view in zeroed) == count and not overlap(numel[name], [*puts[name], *zeroed])
        if not whole and not rest:
            problems[name] = f"no tensor of the checkpoint fills {count} of its {numel[name]} elements"
    return problems


def _own(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in {**layer._parameters, **layer._buffers}.items() if value is not None}


def _by_storage(named: Mapping[str, Tensor]) -> dict[int, tuple[str, Tensor]]:
    return {storage_key(tensor): (name, tensor) for name, tensor in named.items()}


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share memory, while one of them lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute
