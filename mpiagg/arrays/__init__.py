"""Arrays behind one small face: views, memory, cuts and reductions."""

from mpiagg.arrays.codecs import CODECS, Codec, check_wire_dtype, codec
from mpiagg.arrays.conversions import convert
from mpiagg.arrays.cuts import cuts_of, even_cuts, even_ranges, ranges
from mpiagg.arrays.host import address, as_input, borrow, check_output, flat, joined, same_memory, scratch
from mpiagg.arrays.reductions import OPS, Array, Combine, Reduction, reduction, working_dtype

__all__ = [
    "CODECS",
    "OPS",
    "Array",
    "Codec",
    "Combine",
    "Reduction",
    "address",
    "as_input",
    "borrow",
    "check_output",
    "check_wire_dtype",
    "codec",
    "convert",
    "cuts_of",
    "even_cuts",
    "even_ranges",
    "flat",
    "joined",
    "ranges",
    "reduction",
    "same_memory",
    "scratch",
    "working_dtype",
]
