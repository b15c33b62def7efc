#!/bin/bash
# Runs podium on the nodes of a SLURM job, with a Ray cluster of its own that ends with the job:
#
#     sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh train recipe.yaml --devices 16
#     sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh resume runs/my-grpo --devices 16
#
# podium and the recipe's files must be the same on all nodes; the current folder must be on a shared file system.
#SBATCH --job-name=podium
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Five minutes before the end of its time the run saves and stops: resume it with another job.
#SBATCH --signal=B:TERM@300
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r address _ < <(hostname --ip-address) # this script runs on the first node
port=$((20000 + SLURM_JOB_ID % 10000))       # two jobs may share a node
# Whoever reaches the ports of a Ray cluster can run code in it: only this job has the token.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | base64 | tr -d '/+=\n')

stop() {
    trap - EXIT
    kill "${started[@]}" 2>/dev/null || true
    wait || true
}
started=()
trap stop EXIT
ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false --disable-usage-stats --block &
started+=($!)
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" \
        ray start --address="$address:$port" --disable-usage-stats --block &
    started+=($!)
done

# podium refuses a cluster that is too small, so all nodes have to be there first.
python - "$address:$port" "${#nodes[@]}" <<'END'
import sys, time, ray
address, num_nodes, deadline_s = sys.argv[1], int(sys.argv[2]), time.monotonic() + 300
while True:
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        if sum(node["Alive"] for node in ray.nodes()) >= num_nodes:
            break
    except ConnectionError:
        pass
    if time.monotonic() > deadline_s:
        sys.exit(f"Ray at {address} does not have {num_nodes} nodes after 300 s: look at what `ray start` printed.")
    time.sleep(1)
END

RAY_ADDRESS="$address:$port" podium "$@" --set placement.launcher=ray &
run=$!
trap 'kill -TERM $run' TERM
status=0
wait $run || status=$?
while kill -0 $run 2>/dev/null; do wait $run || status=$?; done # a signal interrupts the first wait
exit $status
