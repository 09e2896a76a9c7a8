"""Horovod's interfaces on mpiagg: ``import mpiagg.horovod.torch as hvd``."""
