"""A transformers model's parameters under the names, and in the shapes, of its checkpoint: those that engines load.

transformers 5 keeps the experts of a layer in one tensor, and takes it apart when it saves. Here its own rules do that
without a copy, so that the views are made once and show every later step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from functional.engine.plan import View


class CheckpointForm:
    """A checkpoint's tensors as parts of a model's parameters, for any set of tensors of the parameters' shapes."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises as `checkpoint_views` does."""
        owners = {parameter.untyped_storage().data_ptr(): name for name, parameter in model.named_parameters()}
        views = checkpoint_views(model)
        self._parts = {name: (owners[view.untyped_storage().data_ptr()], View.of(view)) for name, view in views.items()}

    def of(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Checkpoint name → view of one of these, which are contiguous and have the parameters' names."""
        return {name: part.on(parameters[owner]) for name, (owner, part) in self._parts.items()}

    def each(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same one by one, contiguous, of parameters that come one by one: each is let go with its last part."""
        left, held, coming = Counter(owner for owner, _ in self._parts.values()), {}, iter(parameters)
        for name, (owner, part) in self._parts.items():
            while owner not in held:
                came, tensor = next(coming)
                held[came] = tensor
            yield name, part.on(held[owner]).detach().contiguous()
            left[owner] -= 1
            if not left[owner]:
                del held[owner]
        for _ in coming:  # all ranks of a trainer gather as many
            pass


def checkpoint_views(model: PreTrainedModel) -> dict[str, Tensor]:
    """Checkpoint name → view of a parameter; a tied one appears once.

    Raises ValueError for a tensor that the checkpoint holds in a form that is no part of a parameter.
    """
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with _WithoutCopies():
        views: dict[str, Tensor] = revert_weight_conversion(model, own)
    memory = {parameter.untyped_storage().data_ptr() for parameter in own.values()}
    for name, view in views.items():
        if view.untyped_storage().data_ptr() not in memory:
            raise ValueError(f"{name}: transformers computes it from the parameters when it saves: it cannot be sent")
    return views


class _WithoutCopies(TorchDispatchMode):
    """`contiguous` and `clone` give the tensor itself."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **kwargs or {})
