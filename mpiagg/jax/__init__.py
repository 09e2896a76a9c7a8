"""Collectives for JAX, inside ``jax.jit`` and outside: on jaxlib's wheel alone, without a compiler.

::

    import jax
    import mpiagg.jax

    @jax.jit
    def step(parameters, batch):
        gradients = jax.grad(loss)(parameters, batch)
        gradients = mpiagg.jax.average_gradients(gradients)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)

Calls keep the order of the program on every rank. They can be differentiated, batched by ``vmap``, and used in
``scan``, ``while_loop``, ``cond`` and ``remat``. Arrays lie on the CPU.
"""

from mpiagg.jax.functions import allgather, allreduce, alltoall, broadcast, reduce_scatter
from mpiagg.jax.trees import average_gradients, broadcast_parameters

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "average_gradients",
    "broadcast",
    "broadcast_parameters",
    "reduce_scatter",
]
