"""What is tested here needs no MPI, though the package imports it: this process must stay able to start MPI jobs."""

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
