"""The keywords of torch's ``DistributedDataParallel``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from mpi4py import MPI
from torch.utils._pytree import tree_map_only

from mpiagg.common.arguments import check_flag


@dataclass
class TorchKeywords:
    """The keywords of torch's ``DistributedDataParallel``; see :class:`TorchDDP`."""

    device_ids: Any = None
    output_device: Any = None
    dim: int = 0
    broadcast_buffers: bool | None = None
    init_sync: bool = True
    forward_sync_buffers: bool | None = None
    process_group: Any = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    batched_grad_copy: bool = False
    skip_all_reduce_unused_params: bool = False
    device_mesh: Any = None
    delay_all_reduce_named_params: Any = None
    param_to_hook_all_reduce: Any = None
    mixed_precision: Any = None
    bucket_cap_mb_list: Any = None

    def __post_init__(self) -> None:
        """Settle what two names say of buffers, as torch does: the newer one, if it is given."""
        names = ("broadcast_buffers", "forward_sync_buffers")
        self._given = {name: value for name in names if (value := getattr(self, name)) is not None}
        self.broadcast_buffers = self.forward_sync_buffers = [True, *self._given.values()][-1]

    def check(self, module: torch.nn.Module) -> str:
        """Validate them, and describe what all ranks must have alike."""
        for name in ("delay_all_reduce_named_params", "param_to_hook_all_reduce", "bucket_cap_mb_list"):
            if getattr(self, name) is not None:
                raise ValueError(f"mpiagg.DDP does not have {name}")
        if self.mixed_precision is not None:
            raise ValueError("mpiagg.DDP does not have mixed_precision; use torch.autocast, or AllReduce(wire='bf16')")
        flags = ("init_sync", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        for name, value in ({name: getattr(self, name) for name in flags} | self._given).items():
            check_flag(name, value)
        where = {x.device for x in module.parameters()}
        if self.device_ids and (len(self.device_ids) > 1 or where != {self.device} or where == {torch.device("cpu")}):
            names = ", ".join(sorted(map(str, where)))
            raise ValueError(
                f"device_ids must be None, or the CUDA device of a module, not {self.device_ids} for {names}"
            )
        return f"broadcast_buffers={self.broadcast_buffers}, init_sync={self.init_sync}, of buffers {self.init_buffers}"

    @property
    def init_buffers(self) -> bool:
        """Whether buffers are broadcast with the parameters, of which the newer name says nothing."""
        return "forward_sync_buffers" in self._given or self.broadcast_buffers is True

    @property
    def device(self) -> torch.device | None:
        """The device to which inputs are brought, if there is one."""
        if not self.device_ids:
            return None
        first = self.device_ids[0]
        return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)

    def on_device(self, inputs: Any) -> Any:
        """Return inputs, in what containers they are, with their tensors on the device, if there is one."""
        device = self.device
        return inputs if device is None else tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)

    def comm(self, given: MPI.Intracomm | None) -> MPI.Intracomm | None:
        """Return the communicator that is meant, by itself or by a process group; TypeError for other groups."""
        group = self.process_group if self.device_mesh is None else self.device_mesh.get_group()
        if group is None:
            return given
        if given is not None:
            raise ValueError("the ranks are given by comm, or by a process group, not by both")
        found = getattr(group, "comm", None)
        if not isinstance(found, MPI.Intracomm):
            raise TypeError("the process group must be of the backend 'mpiagg'; give the ranks by comm= otherwise")
        return found


NAMES: Final = frozenset(field.name for field in fields(TorchKeywords))
