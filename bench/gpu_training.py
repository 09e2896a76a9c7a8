"""A part of ``bench/gpu.py``: the digits network of ``mpiagg demo``, trained on a device and on the host by DDP."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpiagg
from bench.gpu_collectives import NEVER, unknown
from bench.gpu_rank import Setting
from bench.gpu_report import TRAINED
from mpiagg.arrays import HOST, Array, Device, settle
from mpiagg.cli.network import Network
from mpiagg.cli.training import CLASSES, HIDDEN, Digits, load

EPOCHS, BATCH = 5, 32
LEARNING_RATE, MOMENTUM = 0.2, 0.9

WAYS = dict(zip(TRAINED, ({}, {"BY_WAY_OF_HOST": NEVER}), strict=True))
"""How gradients go, and the constants of the package that make them go so."""


class Trained(NamedTuple):
    """What came out of a training.

    Attributes
    ----------
    weights : numpy.ndarray
        All of them, in float64.
    step_us : float
        The median step, on the slowest rank.
    """

    weights: npt.NDArray[np.float64]
    step_us: float


def training(setting: Setting) -> None:
    """Train on the device and on the host, and compare the weights; what float32 rounds shows float64 on the host.

    The network is so small that its gradients go by way of the host; a second time they must not.
    """
    digits, epochs = load(seed=0), 1 if setting.quick else EPOCHS
    exact = train(setting.comm, HOST, np.float64, digits, epochs)
    on_host = train(setting.comm, HOST, np.float32, digits, epochs)
    for way, values in WAYS.items():
        with unknown(setting.comm, **values):
            on_device = train(setting.comm, setting.device, np.float32, digits, epochs)
        everyone = np.empty((setting.comm.size, on_device.weights.size))
        setting.comm.Allgather(on_device.weights, everyone)
        setting.save(
            {
                "way": way,
                "epochs": epochs,
                "difference": largest(on_device.weights - on_host.weights),
                "rounding": largest(on_host.weights - exact.weights),
                "between_ranks": largest(everyone - everyone[0]),
                "accuracy": accuracy(on_device.weights, digits),
                "step_us": {"on the device": on_device.step_us, "on the host": on_host.step_us},
            }
        )


def train(comm: MPI.Intracomm, device: Device, dtype: npt.DTypeLike, digits: Digits, epochs: int) -> Trained:
    """Train on a device, in a dtype; collective."""
    network = Network(digits.images.shape[1], HIDDEN, CLASSES, seed=0)
    weights = [device.from_host(parameter.data.astype(dtype)) for parameter in network.parameters()]
    moving = [device.from_host(np.zeros(w.shape, dtype)) for w in weights]
    wanted = np.eye(CLASSES)[digits.labels]
    random, steps = np.random.default_rng(0), []
    with mpiagg.DDP(weights, comm) as ddp:
        ddp.broadcast_parameters()
        gradients = ddp.gradient_views()
        for _ in range(epochs):
            order = random.permutation(len(digits.labels))
            for first in range(0, len(order), BATCH):
                batch = order[first : first + BATCH]
                mine = np.array_split(batch, comm.size)[comm.rank]
                images, targets = (device.from_host(x[mine].astype(dtype)) for x in (digits.images, wanted))
                start = time.perf_counter()
                # The average over the ranks of these is the mean over the batch, also where shares are uneven.
                backward(weights, gradients, images, targets, comm.size / len(batch))
                ddp.sync_gradients()
                step(weights, moving, gradients)
                settle(*weights)
                steps.append(time.perf_counter() - start)
    taken = np.array(steps)
    comm.Allreduce(MPI.IN_PLACE, taken, MPI.MAX)
    found = np.concatenate([device.to_host(w).ravel() for w in weights]).astype(np.float64)
    return Trained(found, 1e6 * float(np.median(taken)))


def backward(weights: list[Array], gradients: list[Array], images: Array, wanted: Array, scale: float) -> None:
    """Write the gradients of the cross-entropy, summed over the images and times ``scale``."""
    into, into_bias, out, out_bias = weights
    hidden = np.tanh(np.matmul(images, into) + into_bias)
    scores = np.matmul(hidden, out) + out_bias
    errors = np.exp(scores - scores.max(axis=1, keepdims=True))
    errors = errors / errors.sum(axis=1, keepdims=True)
    errors = (errors - wanted) * scale
    np.matmul(hidden.T, errors, out=gradients[2])
    np.sum(errors, axis=0, out=gradients[3])
    errors = np.matmul(errors, out.T) * (1 - hidden * hidden)
    np.matmul(images.T, errors, out=gradients[0])
    np.sum(errors, axis=0, out=gradients[1])


def step(weights: list[Array], moving: list[Array], gradients: list[Array]) -> None:
    """Change the weights by their gradients, with momentum."""
    for weight, velocity, gradient in zip(weights, moving, gradients, strict=True):
        np.multiply(velocity, MOMENTUM, out=velocity)
        np.add(velocity, gradient, out=velocity)
        np.subtract(weight, LEARNING_RATE * velocity, out=weight)


def accuracy(weights: npt.NDArray[np.float64], digits: Digits) -> float:
    """Return the share of held-out digits that a network with these weights tells."""
    network, start = Network(digits.images.shape[1], HIDDEN, CLASSES, seed=0), 0
    for parameter in network.parameters():
        parameter.data[...] = weights[start : start + parameter.data.size].reshape(parameter.data.shape)
        start += parameter.data.size
    return network.accuracy(digits.test_images, digits.test_labels)


def largest(differences: npt.NDArray[np.float64]) -> float:
    """Return the largest of them, without its sign."""
    return float(np.abs(differences).max())
