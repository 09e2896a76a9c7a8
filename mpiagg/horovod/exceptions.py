"""The errors that Horovod's users catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective has failed: the ranks have asked for different things, or a rank has not come.

    Examples
    --------
    >>> try:
    ...     result = hvd.allreduce(torch.ones(2 + rank % 2), name="lengths differ")
    ... except hvd.HorovodInternalError as error:  # on every rank
    ...     assert "disagree" in str(error)
    """


class InvalidRequestError(ValueError, RuntimeError):
    """A call was refused before anything was sent: a name that is in use, or splits that do not fit."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The hosts of the job have changed.

    Parameters
    ----------
    skip_sync : bool
        Whether the states of the ranks are the same all the same.

    Examples
    --------
    >>> hvd.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    True
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
