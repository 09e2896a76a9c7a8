"""Arrays of the stand-in: NumPy's interface over memory that the host must not touch.

Every function of NumPy's on them is one kernel: work for the present stream, which calls the same function on private
NumPy arrays when its turn has come. What its results look like is found out at once, from a call on other arrays of the
same shapes and dtypes. What CuPy refuses is refused here, too, and some of what it does behind one's back.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from standin_streams import LOG, Entry, Misaligned, TouchedByHost, present


def _names(text):
    return frozenset(text.split())


# What CuPy 14 has not.
ABSENT = _names("""
    asmatrix block bmat datetime_as_string einsum_path geomspace histogram_bin_edges insert isnat matvec nanpercentile
    nanquantile polyder polydiv polyint spacing unstack vecdot vecmat svdvals multi_dot matrix_norm vector_norm
""")

# What is known without a look at values.
FACTS = _names("can_cast common_type iscomplexobj isrealobj may_share_memory ndim result_type shape shares_memory size")

# What needs no kernel where the result can be a view of the argument.
VIEWS = _names("""
    array_split atleast_1d atleast_2d atleast_3d broadcast_to diagonal expand_dims flip moveaxis ravel reshape
    rollaxis split squeeze swapaxes transpose
""")

# What waits for values, since the shape of the result depends on them.
SYNCHRONISING = _names("""
    argwhere bincount compress extract flatnonzero intersect1d nonzero setdiff1d union1d unique
""")

# What writes to the first argument.
WRITING = _names("copyto fill_diagonal place put put_along_axis putmask")


class Block:
    """Memory of a device."""

    def __init__(self, device, memory):
        self.device, self.memory = device, memory
        self.descriptor, self.opened, self.closed = None, False, False
        self.owner = ()

    def kept_with(self, owner):
        """Return the same block, which lives as long as an array in it does, and its owner as long."""
        block = Block.__new__(Block)
        vars(block).update(vars(self), owner=(self, owner))
        return block

    @property
    def whole(self):
        """The block itself, of which this may be one that was borrowed."""
        return self.owner[0].whole if self.owner else self

    def array(self, start, shape, dtype, strides=None):
        """Return an array that begins at some byte."""
        return DeviceArray(np.ndarray(shape, dtype, self.memory, start, strides), self)


class Flags(NamedTuple):
    c_contiguous: bool
    f_contiguous: bool


def _fact(name):
    return property(lambda self: getattr(self._array, name))


def _forbidden(name):
    def touch(self, *_, **__):
        raise TouchedByHost(f"{name} of {self!r}")

    return touch


def _function(function):
    def method(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return method


class DeviceArray(NDArrayOperatorsMixin):
    """An array on a device."""

    __module__ = "standin"  # by which mpiagg knows it
    __slots__ = ("__weakref__", "_array", "_block", "base")

    def __init__(self, array, block, base=None):
        self._array, self._block, self.base = array, block, base
        start = array.__array_interface__["data"][0]
        if array.size and start % array.itemsize:
            raise Misaligned(f"{array.dtype} at {start:#x}")

    dtype, shape, size, nbytes = _fact("dtype"), _fact("shape"), _fact("size"), _fact("nbytes")
    itemsize, ndim, strides = _fact("itemsize"), _fact("ndim"), _fact("strides")
    device = property(lambda self: self._block.device)

    @property
    def flags(self):
        return Flags(self._array.flags.c_contiguous, self._array.flags.f_contiguous)

    def __len__(self):
        return len(self._array)

    def __repr__(self):
        pointer = self._array.__array_interface__["data"][0]
        return f"<DeviceArray {self.dtype} {self.shape} at {pointer:#x} on {self.device.name}>"

    @property
    def __cuda_array_interface__(self):
        interface = self._array.__array_interface__
        return {key: interface[key] for key in ("shape", "typestr", "data", "strides")} | {"version": 3, "stream": None}

    # -- what host code must not do

    __array__, __bool__, __int__, __float__ = map(_forbidden, ("__array__", "__bool__", "__int__", "__float__"))
    __complex__, __index__, __bytes__ = map(_forbidden, ("__complex__", "__index__", "__bytes__"))
    __contains__, __str__ = map(_forbidden, ("__contains__", "__str__"))
    __format__, __reduce_ex__ = map(_forbidden, ("__format__", "__reduce_ex__"))

    def __iter__(self):
        """Yield rows, which are views; numbers are for the device to see."""
        if self.ndim < 2:
            raise TouchedByHost(f"__iter__ of {self!r}")
        return (self[row] for row in range(len(self)))

    tolist, tobytes = map(_forbidden, ("tolist", "tobytes"))
    __array_interface__ = property(_forbidden("__array_interface__"))

    # -- views

    def _view(self, array):
        return DeviceArray(array, self._block, self if self.base is None else self.base)

    def view(self, dtype=None):
        return self._view(self._array.view(self.dtype if dtype is None else dtype))

    def reshape(self, *shape, order="C"):
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)

    def transpose(self, *axes):
        return np.transpose(self, *axes if len(axes) < 2 else [axes])

    T = property(np.transpose)
    swapaxes, ravel, squeeze = _function(np.swapaxes), _function(np.ravel), _function(np.squeeze)

    def __getitem__(self, key):
        if not _fancy(key):
            key = key if isinstance(key, tuple) else (key,)
            # With an ellipsis, NumPy returns a view even of a single value.
            return self._view(self._array[key if ... in key else (*key, ...)])
        if any(x.dtype == bool for x in _leaves(key)):
            return synchronised("getitem", lambda array, key: array[key], (self, key), {})
        return launch("getitem", lambda array, key: array[key], (self, key), {})

    def __setitem__(self, key, value):
        if _fancy(key):
            launch("setitem", lambda array, key, value: array.__setitem__(key, value), (self, key, value), {}, self)
            return
        target = self[key]
        # After x[1:] += 1 Python sets x[1:] to itself.
        if not (isinstance(value, DeviceArray) and _same(target._array, value._array)):
            launch("setitem", partial(np.copyto, casting="unsafe"), (target, value), {}, target)

    # -- kernels

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__" or ufunc.__name__ in ABSENT:
            return NotImplemented
        if any(isinstance(x, list | tuple) for x in inputs):
            raise TypeError(f"{ufunc.__name__} of a list")
        out = kwargs.get("out", (None,))
        if len(out) != 1:
            raise ValueError("more than one out")
        return launch(ufunc.__name__, ufunc, inputs, kwargs, *out)

    def __array_function__(self, function, types, args, kwargs):
        del types
        name = function.__name__
        if name in ABSENT:
            return NotImplemented
        if name in FACTS:
            return function(*_mapped(args, _private), **_mapped(kwargs, _private))
        if name in VIEWS:
            found = function(*_mapped(args, _private), **_mapped(kwargs, _private))
            if not self.size or all(np.may_share_memory(x, self._array) for x in _leaves(found, RESULT)):
                return _mapped(found, self._view, RESULT)
        if name == "empty_like":
            return self.device.like(np.empty_like(self._array, *args[1:], **kwargs))
        if name in SYNCHRONISING:
            return synchronised(name, function, args, kwargs)
        return launch(name, function, args, kwargs, args[0] if name in WRITING else kwargs.get("out"))

    def astype(self, dtype, copy=True):
        if not copy and self.dtype == dtype:
            return self
        return launch("astype", lambda array: array.astype(dtype), (self,), {})

    def copy(self):
        return launch("copy", lambda array: array.copy(), (self,), {})

    def fill(self, value):
        launch("fill", lambda array, value: array.fill(value), (self, value), {}, self)

    def sort(self, axis=-1):
        launch("sort", lambda array: array.sort(axis), (self,), {}, self)

    def partition(self, kth, axis=-1):
        launch("partition", lambda array: array.partition(kth, axis), (self,), {}, self)

    sum, prod, mean, min, max = map(_function, (np.sum, np.prod, np.mean, np.min, np.max))
    all, any, argmax, argmin, cumsum = map(_function, (np.all, np.any, np.argmax, np.argmin, np.cumsum))
    take, dot, nonzero, clip = map(_function, (np.take, np.dot, np.nonzero, np.clip))

    def item(self):
        return fetch(self, "item").item()


def fetch(x, name):
    """Return a copy of an array as a NumPy array; the host waits for it."""
    stream = present(x.device)
    stream.ask("out", name, lambda: None, reads=[_private(x)], nbytes=x.nbytes)
    stream.finish()
    LOG.append(Entry("synchronise", name, 0, stream.number))
    return np.array(x._array)


def launch(name, function, args, kwargs, *written):
    """Ask for one kernel, and return what it will have computed, as arrays."""
    device, args, kwargs = _checked(name, args, kwargs)
    written = [x for x in written if x is not None]
    models = {id(x): _ones_like(x) for x in _leaves((args, kwargs))}
    with np.errstate(all="ignore"):
        model = function(*_mapped(args, lambda x: models[id(x)]), **_mapped(kwargs, lambda x: models[id(x)]))
    outs = {id(models[id(x)]): x for x in written}
    results = _mapped(model, lambda x: outs[id(x)] if id(x) in outs else device.like(x), RESULT)
    fresh = [x._array for x in _leaves(results) if not _among(x, written)]
    private_args, private_kwargs = _mapped(args, _private), _mapped(kwargs, _private)

    def kernel():
        found = function(*private_args, **private_kwargs)
        for target, value in zip(fresh, _leaves(found, RESULT), strict=True) if fresh else ():
            assert target.shape == np.shape(value), f"the shape of what {name} returns depends on values"
            target[...] = value

    reads = [_private(x) for x in _leaves((args, kwargs)) if not _among(x, written)]
    present(device).ask("kernel", name, kernel, reads=reads, writes=[*fresh, *map(_private, written)])
    return results


def synchronised(name, function, args, kwargs):
    """Return what a function computes whose results' shapes depend on values; the host waits for them."""
    device, args, kwargs = _checked(name, args, kwargs)
    stream = present(device)
    stream.ask("kernel", name, lambda: None, reads=list(map(_private, _leaves((args, kwargs)))))
    stream.finish()
    LOG.append(Entry("synchronise", name, 0, stream.number))

    def keep(value):
        result = device.like(value)
        result._array[...] = value
        return result

    return _mapped(function(*_mapped(args, _private), **_mapped(kwargs, _private)), keep, RESULT)


# -- what calls are made of: arrays, and tuples, lists and dictionaries of them

RESULT = np.ndarray | np.generic | bool
"""What NumPy returns for what is an array here."""


def _leaves(tree, kind=DeviceArray):
    """Return the arrays in a tree."""
    leaves = []
    _mapped(tree, leaves.append, kind)
    return leaves


def _mapped(tree, change, kind=DeviceArray):
    """Return a tree with its arrays changed."""
    if isinstance(tree, dict):
        return {key: _mapped(value, change, kind) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [_mapped(part, change, kind) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return change(tree) if isinstance(tree, kind) else tree


def _checked(name, args, kwargs):
    """Return on which device a function works, and its arguments as they are now; all arrays must be there."""

    def by_value(x):
        if x.ndim:
            raise TypeError(f"{name} is given a NumPy array of shape {x.shape} beside arrays on a device")
        return x.copy()

    args, kwargs = _mapped((args, kwargs), by_value, np.ndarray)
    devices = {x.device for x in _leaves((args, kwargs))}
    if len(devices) > 1:
        raise ValueError(f"{name} is given arrays on {', '.join(sorted(device.name for device in devices))}")
    return devices.pop(), args, kwargs


def _private(x):
    """Return the NumPy array of an array, for kernels."""
    assert not x._block.whole.closed, f"{x!r} lies in memory that was closed"
    return x._array


def _ones_like(x):
    # Whole numbers may be indices, and there most surely is a 0.
    return np.full_like(x._array, x.dtype.kind not in "iu")


def _fancy(key):
    """Whether a key selects elements by an array."""
    parts = key if isinstance(key, tuple) else (key,)
    if any(isinstance(part, list) for part in parts):
        raise TypeError("an index is a list of the host's")
    return any(isinstance(part, DeviceArray) or (isinstance(part, np.ndarray) and part.ndim) for part in parts)


def _among(x, others):
    return any(x is other for other in others)


def _same(x, y):
    """Whether two arrays are the same elements in the same order."""
    pointers = [array.__array_interface__["data"][0] for array in (x, y)]
    return pointers[0] == pointers[1] and (x.dtype, x.shape, x.strides) == (y.dtype, y.shape, y.strides)
