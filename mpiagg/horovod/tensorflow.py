"""Horovod's interface for tensorflow, which mpiagg has not: to import it raises ImportError, and says what to do."""

raise ImportError(
    "mpiagg has Horovod's interface for torch alone, mpiagg.horovod.torch, and not for tensorflow: see docs/horovod.md"
)
