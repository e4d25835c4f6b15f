"""Tokens a second of `LLM.generate` on several GPUs; needs no more than the library itself.

    python benchmarks/multi_gpu.py --replicas 4 --shape 8b --out benchmarks/results/multi_gpu.jsonl

Weights are random: what is generated does not matter here, the work does. A line of JSON a
measurement is appended to `--out`.
"""

import argparse
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.provenance import collect_provenance
from runner.loader import LoadedTarget, resolve_device, resolve_dtype
from runner.models.hf import HFModel
from specdec import LLM, SamplingParams
from specdec.config import EngineConfig
from specdec.parallel.launch import launch
from specdec.parallel.placement import check_host

_LLAMA: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "135m": {
        **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536},
        **{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    },
    "8b": {
        **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    },
}


@dataclass(frozen=True)
class Measurement:
    """What is measured.

    Args:
        replicas: ranks, one replica each.
        shape: of the target, a key of SHAPES.
        drafter: a name; K = 4.
        num_reqs: requests side by side on each replica.
        prompt_len, max_tokens: of each request.
        exchange_every: see `specdec.config.EngineConfig`.
        device: "auto", "cpu" or "cuda".
    """

    replicas: int = 1
    shape: str = "135m"
    drafter: str = "none"
    num_reqs: int = 64
    prompt_len: int = 128
    max_tokens: int = 256
    exchange_every: int = 1
    device: str = "auto"


def measure(task: Measurement, out: str) -> None:
    """Measure on this rank; the first one writes."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = resolve_device(task.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
    dtype = resolve_dtype("auto", device)
    with torch.device(device):
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPES[task.shape], **_LLAMA, max_position_embeddings=4096)
        torch.set_default_dtype(dtype)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    llm = LLM(
        LoadedTarget(task.shape, HFModel(model), None),
        task.drafter,
        "greedy",
        device=task.device,
        max_num_reqs=task.num_reqs,
        data_parallel_size=task.replicas,
        exchange_every=task.exchange_every,
    )
    shape = task.num_reqs * task.replicas, task.prompt_len
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocab_size, shape, generator=generator).tolist()

    def timed(max_tokens: int) -> tuple[int, float]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return sum(len(o.token_ids) for o in outputs), time.perf_counter() - started

    timed(4)
    num_tokens, seconds = timed(task.max_tokens)
    if os.environ.get("RANK", "0") != "0":
        return
    line = dataclasses.asdict(task) | {"tokens_per_s": num_tokens / seconds, "wall_s": seconds}
    line["provenance"] = collect_provenance("benchmarks/multi_gpu.py", 0, device, dtype)
    with Path(out).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    name = f"{task.shape} {task.drafter}, {task.replicas} x {task.num_reqs} requests"
    print(f"{name}: {line['tokens_per_s']:.0f} tokens/s in {seconds:.1f} s")


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Measurement):
        kind: Any = int if field.type in (int, "int") else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    parser.add_argument("--out", default="benchmarks/results/multi_gpu.jsonl")
    given = vars(parser.parse_args())
    out = given.pop("out")
    task = Measurement(**given)
    if task.replicas == 1:
        measure(task, out)
        return
    check_host(EngineConfig(device=task.device, data_parallel_size=task.replicas))
    launch(measure, task.replicas, (task, out))


if __name__ == "__main__":
    main()
