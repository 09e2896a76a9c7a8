"""What tests of several rooms share."""

import pytest
from mpi4py import MPI


def refused(error, words, call, *arguments, **keywords):
    """Show that the call raises this on all ranks."""
    with pytest.raises(error, match=words):
        call(*arguments, **keywords)
    MPI.COMM_WORLD.Barrier()
