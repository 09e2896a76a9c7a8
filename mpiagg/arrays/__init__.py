"""Arrays behind one small interface, wherever they lie: devices, views, memory, cuts and reductions."""

from mpiagg.arrays.codecs import CODECS, EXACT, WIRES, Codec, check_wire_dtype, check_wire_op, codec, codec_of
from mpiagg.arrays.coordinates import INDEX, Coordinates
from mpiagg.arrays.cuts import cuts_of, even_cuts, even_ranges, ranges
from mpiagg.arrays.devices import Accelerator, Device, Stream
from mpiagg.arrays.exact import ExactSum
from mpiagg.arrays.forms import Form, form_of
from mpiagg.arrays.host import HOST, borrow, scratch
from mpiagg.arrays.reductions import OPS, Array, Combine, Reduction, reduction, working_dtype
from mpiagg.arrays.views import (
    address,
    as_input,
    check_output,
    convert,
    flat,
    is_flat,
    joined,
    load,
    overlap,
    same_memory,
    settle,
    to_host,
    writeable,
)
from mpiagg.arrays.where import accelerator_of, device_of, find_device, import_for_cuda, is_array

__all__ = [
    "CODECS",
    "EXACT",
    "HOST",
    "INDEX",
    "OPS",
    "WIRES",
    "Accelerator",
    "Array",
    "Codec",
    "Combine",
    "Coordinates",
    "Device",
    "ExactSum",
    "Form",
    "Reduction",
    "Stream",
    "accelerator_of",
    "address",
    "as_input",
    "borrow",
    "check_output",
    "check_wire_dtype",
    "check_wire_op",
    "codec",
    "codec_of",
    "convert",
    "cuts_of",
    "device_of",
    "even_cuts",
    "even_ranges",
    "find_device",
    "flat",
    "form_of",
    "import_for_cuda",
    "is_array",
    "is_flat",
    "joined",
    "load",
    "ranges",
    "reduction",
    "overlap",
    "same_memory",
    "scratch",
    "settle",
    "to_host",
    "working_dtype",
    "writeable",
]
