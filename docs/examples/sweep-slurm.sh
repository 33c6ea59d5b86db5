#!/bin/bash
# A sweep on the nodes of a SLURM job: each GPU of each node measures one cell at a time.
#
#     sbatch sweep-slurm.sh --model small,medium,large --seq-len 128,256,512,1024
#
# Ray and stepscope are installed on every node, as `pip install 'stepscope[ray]'`, or in an environment on a shared file
# system. The runs land in ./runs of the folder from which the job was submitted. A job that ran out of time goes on where
# it stopped when it is submitted again with the same options. Where Ray is older than 2.49 and has no symmetric-run,
# start `ray start --head --block` on the first node and `ray start --address HOST:PORT --block` on the others by `srun`,
# each in the background, and the sweep on the first node.
#SBATCH --job-name=stepscope-sweep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=04:00:00

set -euo pipefail
export RAY_USAGE_STATS_ENABLED=0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# One task a node: the first starts the head of the cluster and, once all nodes have joined, the sweep; when the sweep
# ends, Ray ends on all of them.
srun ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-gpus "$SLURM_GPUS_ON_NODE" --num-cpus "$SLURM_CPUS_PER_TASK" --include-dashboard=false -- \
    stepscope sweep "$@" --on auto --runs "$SLURM_SUBMIT_DIR/runs"
