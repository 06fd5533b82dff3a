"""Errors of a weight transfer, the same on the sending and the receiving side."""


class TransferError(RuntimeError):
    """A transfer failed; its group is broken and has to be formed again."""


class TransferTimeout(TransferError):  # noqa: N818 (the caller reads it as what happened)
    """A transfer, or the forming of its group, missed its deadline."""
