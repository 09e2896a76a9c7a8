"""Aggregations: what becomes of a list of arrays when the ranks put theirs together."""

from mpiagg.aggregation.all_reduce import AllReduce
from mpiagg.aggregation.base import Aggregation
from mpiagg.aggregation.decentralized import Decentralized
from mpiagg.aggregation.parameter_server import ParameterServer

__all__ = ["Aggregation", "AllReduce", "Decentralized", "ParameterServer"]
