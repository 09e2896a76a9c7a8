"""torch.distributed on MPI: importing this registers the backend ``"mpiagg"``.

PyTorch's wheels have no MPI. With this package a script that was started by ``mpiexec`` or ``srun`` needs two lines::

    import mpiagg.torch

    mpiagg.torch.init_process_group()

and all of ``torch.distributed`` runs on mpiagg's collectives: ``dist.all_reduce`` and the others, torch's own
``DistributedDataParallel``, FSDP2, DTensor, distributed checkpoints. ``dist.init_process_group("mpiagg", ...)`` with
torch's own arguments does as well.
"""

import torch.distributed as dist

from mpiagg.torch.buckets import share_buckets
from mpiagg.torch.process_group import ProcessGroup
from mpiagg.torch.starting import BACKEND, init_process_group
from mpiagg.torch.versions import HAVE_RECORDERS

__all__ = ["BACKEND", "ProcessGroup", "init_process_group", "share_buckets"]

HAVE_RECORDERS.add(BACKEND)

if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, ProcessGroup.create, extended_api=True, devices=["cpu", "cuda"])
