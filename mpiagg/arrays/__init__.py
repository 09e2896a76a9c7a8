"""Arrays behind one small face: views, memory, cuts and reductions."""

from mpiagg.arrays.cuts import cuts_of, even_cuts, even_ranges, ranges
from mpiagg.arrays.host import address, as_input, borrow, check_output, flat, same_memory, scratch
from mpiagg.arrays.reductions import OPS, Array, Combine, Reduction, reduction, working_dtype

__all__ = [
    "OPS",
    "Array",
    "Combine",
    "Reduction",
    "address",
    "as_input",
    "borrow",
    "check_output",
    "cuts_of",
    "even_cuts",
    "even_ranges",
    "flat",
    "ranges",
    "reduction",
    "same_memory",
    "scratch",
    "working_dtype",
]
