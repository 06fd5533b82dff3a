"""How a weight transfer and a proof of weights fail, the same on the trainer's side and the engine's."""

NOT_PROVED = "weights not proved"
"""A refused proof's error begins with this; what the engine raises reaches a trainer as text alone."""


class TransferError(RuntimeError):
    """A transfer failed; its group is broken and has to be formed again."""


class TransferTimeout(TransferError):  # noqa: N818 (the caller reads it as what happened)
    """A transfer, or the forming of its group, missed its deadline."""
