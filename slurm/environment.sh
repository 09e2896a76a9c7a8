# What the batch scripts have in common: source "$SLURM_SUBMIT_DIR/slurm/environment.sh"
#
# It sets two arrays of words: "${launch[@]}" "${within[@]}" python train.py starts a program on all ranks.

# The cluster's own software: MODULES="openmpi/5.0 python/3.12" sbatch slurm/cpu.sbatch. mpi4py must be built on the MPI
# library that is loaded, and MPI_TYPE be what the cluster's documentation names for it.
if [ -n "${MODULES:-}" ]; then
    set +u  # which many a cluster's module command does not bear
    module purge
    # shellcheck disable=SC2086 # several words
    module load $MODULES
    set -u
fi

# Where Python is:
export PATH="${VENV:-$SLURM_SUBMIT_DIR/.venv}/bin:$PATH"
if [ -z "${CONTAINER:-}${SRUN_OPTIONS:-}" ] && [ -z "$(type -P mpiagg)" ]; then
    echo "found no mpiagg in ${VENV:-$SLURM_SUBMIT_DIR/.venv}: install it there, or set VENV=/path/to/venv" >&2
    exit 1
fi

# How srun starts the ranks depends on the MPI library: pmi2 is right for MPICH's wheel, pmix for Open MPI. "srun
# --mpi=list" says what there is.
export MPI_TYPE="${MPI_TYPE:-pmi2}"
# With UCX, its default, MPICH's wheel cannot always start under pmi2 (docs/slurm.md); with libfabric it can. An MPICH of
# the cluster's own may lack it: MPIR_CVAR_CH4_NETMOD=ucx sbatch ...
export MPIR_CVAR_CH4_NETMOD="${MPIR_CVAR_CH4_NETMOD:-ofi}"

# srun does not take the cores a rank from sbatch by itself, since Slurm 22.05.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# One thread of linear algebra for each core of a rank.
export OMP_NUM_THREADS="$SRUN_CPUS_PER_TASK" OPENBLAS_NUM_THREADS="$SRUN_CPUS_PER_TASK"

# What ranks write down when a job goes wrong: a folder for each job.
export MPIAGG_RECORD_DIR="${MPIAGG_RECORD_DIR:-mpiagg-recordings-$SLURM_JOB_ID}"

# --kill-on-bad-exit=1: when a rank dies, srun ends the others. Without it, they wait for the dead until the time is up.
# SRUN_OPTIONS adds to it, as --container-image=... of pyxis.
# shellcheck disable=SC2034,SC2206 # for who sources this; several words
launch=(srun --mpi="$MPI_TYPE" --kill-on-bad-exit=1 ${SRUN_OPTIONS:-})

# An image of Apptainer's (Singularity's) with Python and mpiagg in it: CONTAINER=train.sif sbatch ... It sees the folder
# of submission, and what APPTAINER_BIND names. The ranks of a node have to share /dev/shm and to see each other's
# processes, as they do unless --contain, --ipc or --pid is added.
# shellcheck disable=SC2034
within=()
if [ -n "${CONTAINER:-}" ]; then within=(apptainer exec --nv --bind "$SLURM_SUBMIT_DIR" "$CONTAINER"); fi
