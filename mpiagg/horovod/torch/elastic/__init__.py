"""States that are kept, and taken again when a collective has failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from mpiagg.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from mpiagg.horovod.process_sets import engine_of, global_process_set
from mpiagg.horovod.torch.elastic.sampler import ElasticSampler
from mpiagg.horovod.torch.elastic.state import ObjectState, State, TorchState
from mpiagg.horovod.world import restart

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function of a state train again from what was kept, when a collective has failed.

    All ranks start again together, as by :func:`shutdown` and :func:`init`: what is pending fails on the others, too,
    where one rank alone has failed. The environment variable HOROVOD_ELASTIC_RESET_LIMIT says how often at most.

    Parameters
    ----------
    func : callable
        Called with a :class:`State`, and with more arguments that it is given.

    Returns
    -------
    callable
        A function of the same arguments, which returns what ``func`` does.

    Raises
    ------
    RuntimeError
        If ranks have died, do not come or have called :func:`shutdown` meanwhile: :class:`mpiagg.Loop` goes on without
        them. Also if training was begun anew too often.

    Examples
    --------
    >>> @hvd.elastic.run
    ... def train(state):
    ...     for state.epoch in range(state.epoch, 3):
    ...         hvd.allreduce(torch.ones(2))
    ...         state.commit()
    ...     return state.epoch
    >>> train(hvd.elastic.ObjectState(epoch=0))
    2
    """

    @wraps(func)
    def wrapper(state_: State, *args: Any, **kwargs: Any) -> Any:
        limit, resets, skip = os.environ.get("HOROVOD_ELASTIC_RESET_LIMIT"), 0, False
        while True:
            try:
                if not skip:
                    state_.sync()
                return func(state_, *args, **kwargs)
            except HorovodInternalError as error:
                if not engine_of(global_process_set).usable:
                    raise RuntimeError(
                        "ranks have died or do not come; to go on without them, train by mpiagg.Loop (docs/failures.md)"
                    ) from error
                state_.restore()
                skip = False
            except HostsUpdatedInterrupt as interrupt:
                skip = interrupt.skip_sync
            resets += 1
            if limit is not None and resets > int(limit):
                raise RuntimeError(f"training was reset more than {limit} times")
            restart()
            state_.on_reset()

    return wrapper
