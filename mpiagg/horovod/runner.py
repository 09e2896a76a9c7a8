"""Horovod's launcher, which mpiagg has not: to import it raises ImportError, and says what to do."""

raise ImportError("mpiagg has no horovodrun: start the program by 'mpiexec -n 4 python train.py' or srun")
