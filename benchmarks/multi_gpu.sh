#!/bin/sh
# Tokens a second and ms a step on 1, 2, 4 and 8 GPUs, as many as there are; see multi_gpu.md.
#   sh benchmarks/multi_gpu.sh [file that results go to [the same, of shared layers]]
# SHAPES, DRAFTERS and EVERY choose what is measured of replicas, SHARED and BATCHES of shared layers;
# REPLICAS=0 leaves replicas out, SHARED=no shared layers. A measurement that fails, or that takes
# longer than LIMIT_S seconds, is named, and the others go on; the script then ends with 1.
set -u
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=.
out=${1:-benchmarks/results/multi_gpu.jsonl}
shared_out=${2:-benchmarks/results/multi_gpu_shared.jsonl}
python=${PYTHON:-python3}
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())") || exit 1
failed=0

measure() {
    timeout -k 10 "${LIMIT_S:-180}" "$python" "$@" || {
        echo "failed with $?: $*" >&2
        failed=1
    }
}

shared=${SHARED:-none eagle3}
[ "$shared" = no ] || for drafter in $shared; do
    for batch in ${BATCHES:-1 32}; do
        for ranks in 1 2 4 8; do
            [ "$ranks" -le "$gpus" ] || continue
            measure benchmarks/multi_gpu_shared.py --drafter "$drafter" --batch "$batch" \
                --ranks "$ranks" --out "$shared_out"
        done
    done
done
[ "${REPLICAS:-1}" = 0 ] || for shape in ${SHAPES:-135m 8b}; do
    for drafter in ${DRAFTERS:-none ngram}; do
        for replicas in 1 2 4 8; do
            [ "$replicas" -le "$gpus" ] || continue
            for every in ${EVERY:-1 8}; do
                measure benchmarks/multi_gpu.py --shape "$shape" --drafter "$drafter" \
                    --exchange-every "$every" --replicas "$replicas" --out "$out"
                [ "$replicas" -gt 1 ] || break # one replica exchanges nothing
            done
        done
    done
done
exit "$failed"
