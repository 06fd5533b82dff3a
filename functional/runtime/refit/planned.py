"""The trainer's side of updates by plan: agreed on once a transfer group, then sent and proved in one go."""

from collections.abc import Callable

from functional.engine.group import Group
from functional.engine.plan_copy import Packer, make_buffers
from functional.engine.plan_wire import Agreement, Verdict, prove_sender, send_planned
from functional.engine.transports import ProofKind
from functional.runtime.refit.expected import NamedTensors


class PlannedSender:
    """Rank 0 of a group that has agreed on updates by plan."""

    def __init__(self, group: Group, agreement: Agreement, kind: ProofKind, timeout_s: float, resident: bool) -> None:
        self._group = group
        self._kind = kind
        self._timeout_s = timeout_s
        self._agreement = agreement
        schedule, _ = agreement.parts
        self._packer = Packer(schedule, make_buffers(schedule.largest, group.device), resident=resident)

    def send(
        self, named: NamedTensors, on_wire: Callable[[NamedTensors], NamedTensors] = lambda named: named
    ) -> Verdict:
        """As `send_planned`."""
        return send_planned(self._group, self._agreement, self._packer, named, self._kind, self._timeout_s, on_wire)

    def prove(self, named: NamedTensors) -> Verdict:
        """As `prove_sender`."""
        return prove_sender(self._group, self._agreement, named, self._kind, self._timeout_s)
