#!/bin/sh
# Tokens a second on 1, 2, 4 and 8 GPUs, as many as there are; see multi_gpu.md.
#   sh benchmarks/multi_gpu.sh [file that results go to]
# SHAPES, DRAFTERS and EVERY choose what is measured.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH=.
out=${1:-benchmarks/results/multi_gpu.jsonl}
python=${PYTHON:-python3}
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
for shape in ${SHAPES:-135m 8b}; do
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
