"""Aggregations: what becomes of a list of arrays when the ranks put theirs together."""

from mpiagg.aggregation.all_reduce import AllReduce
from mpiagg.aggregation.base import Aggregation
from mpiagg.aggregation.decentralized import Decentralized
from mpiagg.aggregation.decoupled_momentum import DeMo
from mpiagg.aggregation.error_feedback import ErrorFeedback
from mpiagg.aggregation.local_sgd import LocalSGD
from mpiagg.aggregation.low_precision import LowPrecisionDecentralized
from mpiagg.aggregation.neighbor_average import NeighborAverage
from mpiagg.aggregation.parameter_server import ParameterServer
from mpiagg.aggregation.power_sgd import PowerSGD
from mpiagg.aggregation.sparse_loco import SparseLoCo
from mpiagg.aggregation.sparsified import Sparsified

__all__ = [
    "Aggregation",
    "AllReduce",
    "DeMo",
    "Decentralized",
    "ErrorFeedback",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "NeighborAverage",
    "ParameterServer",
    "PowerSGD",
    "SparseLoCo",
    "Sparsified",
]
