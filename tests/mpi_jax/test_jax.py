"""Collectives in JAX: right inside jit and outside, in order, differentiated and batched."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
import mpiagg.jax as mj

pytestmark = pytest.mark.mpi

DTYPES = [np.float32, np.float64, np.int32, np.uint8, np.complex64, np.float16, ml_dtypes.bfloat16]
INSIDE = pytest.mark.parametrize("through", [lambda f: f, jax.jit], ids=["outside", "inside jit"])


def given(rank, shape, dtype=np.float64, seed=0):
    """Return what a rank brings: small whole numbers, of which every order has one sum."""
    return np.random.default_rng((seed, rank)).integers(0, 7, shape).astype(dtype)


def everyones(size, shape, dtype=np.float64, seed=0):
    return np.stack([given(r, shape, dtype, seed) for r in range(size)])


@INSIDE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0,), (3001,)])
def test_allreduce(rank, size, through, dtype, shape):
    total = through(mj.allreduce)(given(rank, shape, dtype))
    assert isinstance(total, jax.Array)
    assert total.dtype == dtype
    np.testing.assert_array_equal(total, everyones(size, shape, dtype).sum(0, dtype=dtype))


@INSIDE
@pytest.mark.parametrize(("op", "restated"), [("min", np.min), ("max", np.max), ("prod", np.prod), ("avg", np.mean)])
def test_ops(rank, size, through, op, restated):
    result = through(lambda x: mj.allreduce(x, op))(given(rank, 9))
    np.testing.assert_allclose(result, restated(everyones(size, 9), axis=0), rtol=1e-15)


@INSIDE
@pytest.mark.parametrize("dtype", [bool, np.float32, ml_dtypes.bfloat16])
def test_what_is_moved(rank, size, through, dtype):
    x, rows = given(rank, (2 * size, 3), dtype), everyones(size, (2 * size, 3), dtype)
    np.testing.assert_array_equal(through(mj.allgather)(x), rows)
    np.testing.assert_array_equal(through(lambda x: mj.broadcast(x, root=size - 1))(x), rows[-1])
    turned = np.concatenate([each[2 * rank : 2 * rank + 2] for each in rows])
    np.testing.assert_array_equal(through(mj.alltoall)(x), turned)


@INSIDE
def test_reduce_scatter(rank, size, through):
    part = through(mj.reduce_scatter)(given(rank, (2 * size, 3)))
    np.testing.assert_array_equal(part, everyones(size, (2 * size, 3)).sum(0)[2 * rank : 2 * rank + 2])


def test_what_is_given_stays_as_it_is(rank):
    x = jnp.asarray(given(rank, 50))
    before = np.array(x)
    jax.jit(mj.allreduce)(x).block_until_ready()
    mj.allreduce(x)
    np.testing.assert_array_equal(x, before)


def test_an_algorithm_and_a_communicator_are_taken(rank, size):
    half = MPI.COMM_WORLD.Split(rank % 2, rank)
    mine = [r for r in range(size) if r % 2 == rank % 2]
    total = jax.jit(lambda x: mj.allreduce(x, comm=half, algorithm="ring"))(given(rank, 40))
    np.testing.assert_array_equal(total, sum(given(r, 40) for r in mine))
    bits = mpiagg.allreduce(np.full(40, 0.1 * (rank + 1)), comm=half, algorithm="ring")
    ours = jax.jit(lambda x: mj.allreduce(x, comm=half, algorithm="ring"))(np.full(40, 0.1 * (rank + 1)))
    np.testing.assert_array_equal(ours, bits)


# -- order


def busy(x, rounds):
    """Return x, later: after products of matrices that depend on it."""
    matrix = jnp.eye(64) + 0 * x.sum()
    return x + 0 * jax.lax.fori_loop(0, rounds, lambda _, m: m @ matrix, matrix).sum()


@pytest.mark.parametrize("seed", range(3))
def test_independent_calls_keep_their_order_on_ranks_of_different_speeds(rank, size, seed):
    delays = np.random.default_rng((seed, rank)).integers(0, 200, 24)

    @jax.jit
    def many(x):
        return [mj.allreduce(busy(x + number, int(delay))) for number, delay in enumerate(delays)]

    for number, result in enumerate(many(jnp.full(100, float(rank)))):
        np.testing.assert_array_equal(result, np.full(100, size * number + size * (size - 1) / 2))


def test_calls_whose_results_nobody_uses_are_made(rank, size):
    @jax.jit
    def wasteful(x):
        mj.allreduce(x)
        if rank == 0:
            return mj.allreduce(x + 1)
        mj.allreduce(x + 1)
        return x

    for _ in range(3):
        result = wasteful(jnp.full(10, float(rank)))
    total = mj.allreduce(jnp.ones(3))
    np.testing.assert_array_equal(total, np.full(3, size))
    np.testing.assert_array_equal(result, np.full(10, size * (size - 1) / 2 + size if rank == 0 else rank))


def test_programs_that_run_later_come_before_calls_outside(rank, size):
    f = jax.jit(lambda x: mj.allreduce(busy(x, 100 * (rank + 1))))
    first = f(jnp.full(10, 1.0))
    second = mj.allreduce(jnp.full(10, 2.0))
    np.testing.assert_array_equal(first, np.full(10, size))
    np.testing.assert_array_equal(second, np.full(10, 2 * size))


# -- loops and branches


def test_loops_and_branches(rank, size):
    @jax.jit
    def program(x):
        x, sums = jax.lax.scan(lambda x, _: (mj.allreduce(x) / size, x.sum()), x, length=3)
        x = jax.lax.fori_loop(0, 4, lambda _, x: mj.allreduce(x, "avg"), x)
        x = jax.lax.cond(sums[1] >= 0, lambda x: mj.allreduce(x, "max"), lambda x: -x, x)
        return jax.lax.while_loop(lambda x: x[0] < 100, mj.allreduce, x + 1)

    mean = everyones(size, 5).mean(0) + 1
    if size > 1:
        while mean[0] < 100:
            mean = mean * size
        np.testing.assert_allclose(program(given(rank, 5)), mean, rtol=1e-12)


# -- derivatives


def loss_of_all(x, size):
    """Return the loss that all ranks have, from what all bring."""
    return (jnp.sin(x.sum(0)) ** 2).sum() * size


@INSIDE
def test_the_gradient_of_a_sum(rank, size, through):
    whole = jax.grad(loss_of_all)(jnp.asarray(everyones(size, 6)), size)
    own = through(jax.grad(lambda x: (jnp.sin(mj.allreduce(x)) ** 2).sum() * size))(given(rank, 6))
    np.testing.assert_allclose(own, whole[rank], rtol=1e-12)


VERBS = {
    "average": (lambda x: mj.allreduce(x, "avg"), lambda rows, _: rows.mean(0)),
    "gathered": (mj.allgather, lambda rows, _: rows),
    "given": (lambda x: mj.broadcast(x, root=0), lambda rows, _: rows[0]),
}


@INSIDE
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_gradients_of_what_all_ranks_have(rank, size, through, verb):
    call, restated = VERBS[verb]
    weights = jnp.arange(1.0, 5.0)
    whole = jax.grad(lambda rows: (weights * restated(rows, size) ** 3).sum())(jnp.asarray(everyones(size, 4)))
    own = through(jax.grad(lambda x: (weights * call(x) ** 3).sum()))(given(rank, 4))
    np.testing.assert_allclose(own, whole[rank], rtol=1e-12)


@INSIDE
@pytest.mark.parametrize("verb", ["reduce_scatter", "alltoall"])
def test_gradients_of_parts(rank, size, through, verb):
    """The loss is the sum of what each rank makes of its part."""
    call = getattr(mj, verb)

    def whole_loss(rows):
        parts = rows.sum(0) if verb == "reduce_scatter" else rows
        return (parts**3).sum()

    whole = jax.grad(whole_loss)(jnp.asarray(everyones(size, (size, 2))))
    own = through(jax.grad(lambda x: (call(x) ** 3).sum()))(given(rank, (size, 2)))
    np.testing.assert_allclose(own, whole[rank], rtol=1e-12)


def test_forward_and_second_derivatives(rank, size):
    x = given(rank, 3)
    value, tangent = jax.jit(lambda x: jax.jvp(mj.allreduce, (x,), (2 * x,)))(x)
    np.testing.assert_allclose(tangent, 2 * value)
    # Of the sum of cubes of sums, with respect to this rank's own: 6 times the sums, on the diagonal.
    second = jax.jit(jax.hessian(lambda x: (mj.allreduce(x) ** 3).sum()))(x)
    assert second.shape == (3, 3)
    reached = np.diag(6 * everyones(size, 3).sum(0))
    np.testing.assert_allclose(second, reached * size, rtol=1e-12)


def test_minima_are_not_differentiated():
    with pytest.raises(TypeError, match="'min' cannot be differentiated"):
        jax.grad(lambda x: mj.allreduce(x, "min").sum())(jnp.ones(3))


def test_recomputed_forward_passes(rank):
    f = jax.checkpoint(lambda x: jnp.sin(mj.allreduce(jnp.sin(x))))
    own = jax.jit(jax.grad(lambda x: f(x).sum()))(given(rank, 3))
    plain = jax.jit(jax.grad(lambda x: jnp.sin(mj.allreduce(jnp.sin(x))).sum()))(given(rank, 3))
    np.testing.assert_allclose(own, plain, rtol=1e-12)


# -- batches


@INSIDE
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("verb", ["allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall"])
def test_a_batch_is_one_call(rank, size, through, verb, axis):
    call, x = getattr(mj, verb), given(rank, (3, size, 2) if axis == 0 else (size, 3, 2))
    batched = through(jax.vmap(call, in_axes=axis))(x)
    expected = jnp.stack([call(np.take(x, number, axis)) for number in range(3)])
    np.testing.assert_array_equal(batched, expected)
    text = str(jax.make_jaxpr(jax.vmap(call, in_axes=axis))(x))
    assert text.count("call=") == 1


def test_gradients_of_batches(rank):
    def one(x):
        return jnp.sin(mj.allgather(x)).sum() + (mj.broadcast(x) ** 2).sum()

    x = given(rank, (3, 4))
    batched = jax.jit(jax.vmap(jax.grad(one)))(x)
    np.testing.assert_allclose(batched, jnp.stack([jax.grad(one)(each) for each in x]), rtol=1e-12)


# -- wrong arguments


@pytest.mark.parametrize("through", [lambda f: f, jax.jit])
def test_wrong_arguments_are_refused_before_anything_is_sent(size, through):
    x = jnp.ones((size, 2))
    with pytest.raises(ValueError, match="unknown op 'mean'"):
        through(lambda x: mj.allreduce(x, "mean"))(x)
    with pytest.raises(ValueError, match=r"unknown op <mpi4py.*>; known: sum, avg, min, max, prod(?!,)"):
        through(lambda x: mj.allreduce(x, MPI.SUM))(x)
    with pytest.raises(ValueError, match="unknown algorithm 'rings'"):
        through(lambda x: mj.allreduce(x, algorithm="rings"))(x)
    with pytest.raises(ValueError, match="'pairwise' does not serve allreduce"):
        through(lambda x: mj.allreduce(x, algorithm="pairwise"))(x)
    with pytest.raises(ValueError, match="root"):
        through(lambda x: mj.broadcast(x, root=size))(x)
    with pytest.raises(ValueError, match="rows that they divide"):
        through(mj.reduce_scatter)(jnp.ones(()))
    if size > 1:
        with pytest.raises(ValueError, match="rows that they divide"):
            through(mj.alltoall)(jnp.ones(size + 1))
    with pytest.raises(TypeError, match="int4"):
        through(mj.allreduce)(jnp.ones(3, jnp.int4))
    with pytest.raises(TypeError, match="comm must be"):
        through(lambda x: mj.allreduce(x, comm="world"))(x)
    np.testing.assert_array_equal(mj.allreduce(x), np.full((size, 2), size))


# -- training


def forward(parameters, x):
    for weights, bias in parameters[:-1]:
        x = jnp.tanh(x @ weights + bias)
    weights, bias = parameters[-1]
    return x @ weights + bias


def loss(parameters, x, y):
    return ((forward(parameters, x) - y) ** 2).mean()


def fresh(seed):
    random = np.random.default_rng(seed)
    return [(jnp.asarray(random.normal(size=(a, b)) / a), jnp.zeros(b)) for a, b in [(6, 16), (16, 9), (9, 2)]]


@pytest.mark.parametrize("bucket_bytes", [1, 500, 25 * 2**20])
def test_training_is_that_of_one_process(rank, size, bucket_bytes):
    random = np.random.default_rng(5)
    x, y = random.normal(size=(12 * size, 6)), random.normal(size=(12 * size, 2))

    def stepped(parameters, gradients):
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)

    @jax.jit
    def step(parameters, x, y):
        gradients = jax.grad(loss)(parameters, x, y)
        return stepped(parameters, mj.average_gradients(gradients, bucket_bytes=bucket_bytes))

    ours, one = mj.broadcast_parameters(fresh(rank)), fresh(0)
    for _ in range(10):
        ours = step(ours, x[rank::size], y[rank::size])
        one = stepped(one, jax.grad(loss)(one, x, y))
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-9, rtol=0)
    assert len({x.tobytes() for x in np.asarray(mj.allgather(ours[0][0]))}) == 1


def test_trees_of_several_dtypes(rank, size):
    tree = {"a": jnp.full(3, 1.0), "b": [jnp.full((2, 2), 2, jnp.int32), jnp.float32(rank)], "c": jnp.zeros((0, 4))}
    total = mj.average_gradients(tree, "sum")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), total) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    np.testing.assert_array_equal(total["a"], np.full(3, size))
    np.testing.assert_array_equal(total["b"][0], np.full((2, 2), 2 * size))
    assert float(total["b"][1]) == size * (size - 1) / 2
