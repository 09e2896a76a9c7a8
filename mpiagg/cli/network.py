"""A small neural network in NumPy, as the demo trains it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]


class NetworkParameter:
    """A tensor of weights, and the gradient of the loss by it."""

    def __init__(self, data: Values) -> None:
        self.data = data
        self.grad = np.zeros_like(data)


class Network:
    """A perceptron with one hidden layer of tanh units and a softmax output, in float64.

    Parameters
    ----------
    inputs, hidden, classes : int
        The widths of its layers.
    seed : int
        The seed of its first weights.
    """

    def __init__(self, inputs: int, hidden: int, classes: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.into = NetworkParameter(random.normal(0, inputs**-0.5, (inputs, hidden)))
        self.into_bias = NetworkParameter(np.zeros(hidden))
        self.out = NetworkParameter(random.normal(0, hidden**-0.5, (hidden, classes)))
        self.out_bias = NetworkParameter(np.zeros(classes))

    def parameters(self) -> list[NetworkParameter]:
        """Return the tensors, in the order of the forward pass."""
        return [self.into, self.into_bias, self.out, self.out_bias]

    def weights(self) -> Values:
        """Return a copy of all weights, one after another."""
        return np.concatenate([parameter.data.ravel() for parameter in self.parameters()])

    def accuracy(self, images: Values, labels: Labels) -> float:
        """Return the share of images whose label the network predicts."""
        _, scores = self._forward(images)
        return float(np.mean(scores.argmax(axis=1) == labels))

    def backward(self, images: Values, labels: Labels, scale: float) -> float:
        """Set the gradients of the cross-entropy, summed over the images and times ``scale``; return that loss.

        No images at all are an empty sum: a loss and gradients of zero.
        """
        hidden, scores = self._forward(images)
        rows = np.arange(len(labels))
        scores -= scores.max(axis=1, keepdims=True)
        logarithms = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        errors = np.exp(logarithms)
        errors[rows, labels] -= 1
        errors *= scale
        np.matmul(hidden.T, errors, out=self.out.grad)
        np.sum(errors, axis=0, out=self.out_bias.grad)
        errors = (errors @ self.out.data.T) * (1 - hidden**2)
        np.matmul(images.T, errors, out=self.into.grad)
        np.sum(errors, axis=0, out=self.into_bias.grad)
        return -float(logarithms[rows, labels].sum()) * scale

    def _forward(self, images: Values) -> tuple[Values, Values]:
        """Return what the hidden units and the outputs say."""
        hidden = np.tanh(images @ self.into.data + self.into_bias.data)
        return hidden, hidden @ self.out.data + self.out_bias.data


class Momentum:
    """Stochastic gradient descent with momentum."""

    def __init__(self, parameters: list[NetworkParameter], learning_rate: float, momentum: float = 0.9) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum
        self.moving = [(parameter, np.zeros_like(parameter.data)) for parameter in parameters]

    def step(self) -> None:
        """Change the weights by their gradients, in place."""
        for parameter, velocity in self.moving:
            np.multiply(velocity, self.momentum, out=velocity)
            np.add(velocity, parameter.grad, out=velocity)
            parameter.data -= self.learning_rate * velocity
