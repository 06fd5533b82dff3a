"""A plan is accepted only if random bits come back: loaded by the engine, and copied by the plan, every byte is equal.

The engine's way is the one of an update by the checkpoint protocol: vLLM's layerwise reload, loader, processing. It is
gone twice, with other bits, so that what the engine works out of the weights beside its parameters is seen too.
Afterwards the weights are random: an update has to follow.
"""

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from functional.engine.plan import Copy, Plan, PlanRefused, Target
from functional.engine.plan_trace import Places, storage_key
from functional.engine.wire import Slot

PACKED = "its layer packs it, and computes with that"
_SEEDS = (1, 2)
_DEPTH = 3
"""How far below a layer its tensors are looked for: its method, that method's kernel, that one's configuration."""


def check_plan(
    model: nn.Module, model_config: Any, plan: Plan, slots: Sequence[Slot], device: torch.device
) -> dict[str, str]:
    """Load random bits of two seeds and compare. Returns target → why, of those that cannot be written in place.

    slots: all that the plan was traced with.

    On a CPU these are the weights that a layer packs and then drops; they are compared where it packs them. Elsewhere
    none may be left. Raises PlanRefused where a byte differs, or where the engine keeps something computed from the
    weights. Takes memory for one layer's tensors and one parameter more.
    """
    check = _Check(plan, Places.of(model), device)
    states = []
    for seed in _SEEDS:
        check.seed = seed
        with torch.device(device), _packing_watched(model, device, check.compare_layer):
            _reload(model, model_config, ((slot.name, random_bits(slot, seed, device)) for slot in slots))
        check.compare_resident()
        states.append(_state(model, device, check.resident_storages()))
    before, after = states
    for name, value in before.items():
        if after.get(name, value) != value:
            check.problems.setdefault(name, "the engine computes it from the weights after loading")
    if check.problems:
        raise PlanRefused(check.problems)
    return check.packed


def random_bits(slot: Slot, seed: int, device: torch.device) -> Tensor:
    """A tensor of random bits, infinities and NaNs included: the same for the same name and seed on the same device."""
    number = int.from_bytes(hashlib.sha256(f"{seed}/{slot.name}".encode()).digest()[:7], "big")
    generator = torch.Generator(device).manual_seed(number)
    words = torch.empty(-(-slot.nbytes // 8), dtype=torch.int64, device=device)
    words.random_(-(2**63), 2**63 - 1, generator=generator)
    return words.view(torch.uint8)[: slot.nbytes].view(slot.dtype).view(slot.shape)


class _Check:
    def __init__(self, plan: Plan, places: Places, device: torch.device) -> None:
        self.seed = 0
        self.places = places
        self.problems: dict[str, str] = {}
        self.packed: dict[str, str] = {}
        self._loaded: set[str] = set()  # seen when their layers had loaded them
        self._device = device
        self._targets = {target.name: target for target in plan.targets}
        self._slots = {slot.name: slot for slot in plan.sources}
        self._copies: dict[str, list[Copy]] = defaultdict(list)
        for copy in plan.copies:
            self._copies[copy.target].append(copy)

    def compare_layer(self, layer: nn.Module) -> None:
        """The layer is loaded, and packs its weights next."""
        for attribute, tensor in layer._parameters.items():
            name = self.places.name((layer, attribute))
            if tensor is not None and name in self._targets:
                self._loaded.add(name)
                if problem := self._difference(name, tensor, "the plan gives other bytes than the loader"):
                    self.problems[name] = problem

    def compare_resident(self) -> None:
        """What is as planned no more, but was when its layer packed, is packed."""
        for name in self._targets:
            if name in self.packed or name in self.problems:
                continue
            tensor = self.places.tensors.get(name)
            problem: str | None = "the engine drops it after loading"
            if tensor is not None:
                other = "the loader, or the processing after it, gives other bytes than a copy"
                problem = self._difference(name, tensor, other)
            if problem is not None and name in self._loaded:
                self.packed[name] = PACKED
            elif problem is not None:
                self.problems[name] = problem

    def resident_storages(self) -> set[int]:
        return {storage_key(self.places.tensors[name]) for name in self._targets if name in self.places.tensors}

    def _difference(self, name: str, tensor: Tensor, problem: str) -> str | None:
        """`problem`, or what else is wrong with a parameter; None if it is as planned."""
        target = self._targets[name]
        is_same = (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())) == (
            target.dtype,
            target.shape,
            target.strides,
        )
        if not is_same:
            return f"processing after loading makes it {tensor.dtype} {tuple(tensor.shape)}"
        return None if same_bytes(self._expected(target), tensor.detach()) else problem

    def _expected(self, target: Target) -> Tensor:
        expected = torch.empty_strided(target.shape, target.strides, dtype=target.dtype, device=self._device).zero_()
        source, bits = "", expected
        for copy in self._copies[target.name]:
            if copy.source != source:
                source, bits = copy.source, random_bits(self._slots[copy.source], self.seed, self._device)
            copy.put.on(expected).copy_(copy.take.on(bits))
        return expected


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bits (a NaN equals itself, zero is not minus zero)."""
    if one.dtype.itemsize == 1:
        words = torch.uint8
    else:
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return torch.equal(one.view(words), other.view(words))


def _reload(model: Any, model_config: Any, named: Iterator[tuple[str, Tensor]]) -> None:
    """As the engine's `start_weight_update`, `update_weights` and `finish_weight_update` do, and nothing left unset."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory, so that what nobody writes shows
    try:
        with torch.no_grad():
            initialize_layerwise_reload(model)
            model.load_weights(named)
            finalize_layerwise_reload(model, model_config)
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)


@contextlib.contextmanager
def _packing_watched(model: nn.Module, device: torch.device, see: Callable[[nn.Module], None]) -> Iterator[None]:
    """On a CPU, `see` is called with each layer just before vLLM processes, and packs, its loaded weights."""
    methods = {id(m): m for layer in model.modules() if (m := getattr(layer, "quant_method", None)) is not None}
    if device.type != "cpu":
        methods.clear()

    def watched(original: Any) -> Any:
        def process_weights_after_loading(layer: nn.Module) -> None:
            see(layer)
            original(layer)

        return process_weights_after_loading

    for method in methods.values():
        method.process_weights_after_loading = watched(method.process_weights_after_loading)
    try:
        yield
    finally:
        for method in methods.values():
            del method.process_weights_after_loading


def _state(model: nn.Module, device: torch.device, known: set[int]) -> dict[str, int]:
    """A sum over the bytes of every tensor's memory that the model's layers hold beside what the plan writes."""
    sums: dict[str, int] = {}
    seen = set(known)
    for path, layer in model.named_modules():
        for name, tensor in _held(layer, _DEPTH, {id(layer)}):
            if storage_key(tensor) not in seen and tensor.device.type == device.type and tensor.numel():
                seen.add(storage_key(tensor))
                sums[f"{path}.{name}"] = _sum(tensor)
    return sums


def _held(thing: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    inside: Mapping[str, Any] = {}
    if isinstance(thing, dict):
        inside = {str(key): value for key, value in thing.items()}
    elif isinstance(thing, list | tuple):
        inside = {str(index): value for index, value in enumerate(thing)}
    elif isinstance(thing, nn.Module) or type(thing).__module__.startswith("vllm"):
        inside = {key: value for key, value in getattr(thing, "__dict__", {}).items() if key != "_modules"}
    for name, value in inside.items():
        if isinstance(value, Tensor):
            yield name, value
        elif depth and id(value) not in seen and not isinstance(value, nn.Module):
            seen.add(id(value))
            for below, tensor in _held(value, depth - 1, seen):
                yield f"{name}.{below}", tensor


def _sum(tensor: Tensor) -> int:
    """Over all of its storage, as it lies there: nothing is copied, however large (a KV cache is one of them)."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    words = memory.view(torch.int64) if memory.numel() % 8 == 0 else memory
    return int(words.sum(dtype=torch.int64))
