#!/bin/sh
# Tokens a second on 1, 2, 4 and 8 GPUs, as many as there are; see multi_gpu.md.
#   sh benchmarks/multi_gpu.sh [file that results go to [the same, of shared layers]]
# SHAPES, DRAFTERS and EVERY choose what is measured of replicas, SHARED and BATCHES of shared layers;
# REPLICAS=0 leaves replicas out.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH=.
out=${1:-benchmarks/results/multi_gpu.jsonl}
shared_out=${2:-benchmarks/results/multi_gpu_shared.jsonl}
python=${PYTHON:-python3}
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
[ "${REPLICAS:-1}" = 0 ] || for shape in ${SHAPES:-135m 8b}; do
    for drafter in ${DRAFTERS:-none ngram}; do
        for every in ${EVERY:-1 8}; do
            for replicas in 1 2 4 8; do
                [ "$replicas" -le "$gpus" ] || continue
                "$python" benchmarks/multi_gpu.py --shape "$shape" --drafter "$drafter" \
                    --exchange-every "$every" --replicas "$replicas" --out "$out"
            done
        done
    done
done
for drafter in ${SHARED:-none eagle3}; do
    for batch in ${BATCHES:-1 32}; do
        for ranks in 1 2 4 8; do
            [ "$ranks" -le "$gpus" ] || continue
            "$python" benchmarks/multi_gpu_shared.py --drafter "$drafter" --batch "$batch" \
                --ranks "$ranks" --out "$shared_out"
        done
    done
done
