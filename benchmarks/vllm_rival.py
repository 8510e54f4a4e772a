"""vLLM on a workload: a script for the interpreter that has vLLM (rivals.vllm_python). Standard library, vllm and what
it brings only.

vllm_rival.py SPEC RESULT, both JSON: a string, and the file to write. The caller ends the process group.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind

PLAIN = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "detokenize": False}
PLAIN |= {"output_kind": RequestOutputKind.FINAL_ONLY}


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds, lengths, engine steps and memory of a run after a full one that warms up."""
    imported = _status_bytes(os.getpid(), "VmRSS")
    llm = _new_vllm(spec)
    _forget_peaks()
    if spec["trajectories"]:
        return _take_turns(llm, spec, imported)
    _run(llm.llm_engine, spec, "warm")
    preempted = _preempted(llm)
    seconds, lengths, steps = _run(llm.llm_engine, spec, "timed")
    found = {"seconds": seconds, "lengths": lengths, "running_steps": steps, "peak_memory_bytes": _peak(imported)}
    found["preemptions"] = _preempted(llm) - preempted
    return found | {"vllm": vllm.__version__, "torch": torch.__version__}


def _take_turns(llm: Any, spec: dict[str, Any], imported: int) -> dict[str, Any]:
    """As main(), of trajectories; the run that warms up is of the first of each prompt, without waits."""
    each = spec["group_size"]
    first = [one | {"seconds": [0.0] * len(one["seconds"])} for one in spec["trajectories"][::each]]
    _run_turns(llm.llm_engine, spec | {"trajectories": first}, "warm")
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be emptied after the run that warms up")
    preempted = _preempted(llm)
    found = _run_turns(llm.llm_engine, spec, "timed") | {"peak_memory_bytes": _peak(imported)}
    found["preemptions"] = _preempted(llm) - preempted
    return found | {"vllm": vllm.__version__, "torch": torch.__version__}


def _forget_peaks() -> None:
    """Count resident sets from the loaded model on, as those of the other engines; where the kernel does not allow it
    loading counts too."""
    for process in _group():
        with contextlib.suppress(OSError):  # also of one that has just ended
            Path(f"/proc/{process}/clear_refs").write_text("5")


def _peak(imported: int) -> int:
    """Bytes: what the device has given away, else those of each process of the engine, less the imports, which are
    about the same in all."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free  # its allocator gives nothing back
    return sum(max(0, _status_bytes(process, "VmHWM") - imported) for process in _group())


def _run_turns(engine: Any, spec: dict[str, Any], name: str) -> dict[str, Any]:
    """Seconds, tokens and engine steps of trajectories, each turn a request that is sent once its observation is there;
    `recomputed_tokens`: of requests, those that were computed before and not found in the prefix cache."""
    plain = PLAIN | {"ignore_eos": True}
    trajectories = spec["trajectories"]
    ids = [list(spec["prompts"][each["prompt"]]) for each in trajectories]
    turns, known = [0] * len(ids), [0] * len(ids)  # that have ended; tokens that were computed
    started, steps, recomputed, left = time.perf_counter(), 0, 0, len(ids)
    due = [(0.0, index) for index in range(left)]
    while left:
        now = time.perf_counter() - started
        while due and due[0][0] <= now:
            index = heapq.heappop(due)[1]
            length = trajectories[index]["lengths"][turns[index]]
            params = vllm.SamplingParams(max_tokens=length, **plain)
            engine.add_request(f"{name}-{index}-{turns[index]}", {"prompt_token_ids": list(ids[index])}, params)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, due[0][0] - now))
            continue
        steps += 1
        for output in engine.step():
            if not output.finished:
                continue
            index = int(output.request_id.split("-")[1])
            recomputed += max(0, known[index] - (output.num_cached_tokens or 0))
            ids[index] += output.outputs[0].token_ids
            known[index], turn = len(ids[index]) - 1, turns[index]
            turns[index] += 1
            if turns[index] == len(trajectories[index]["lengths"]):
                left -= 1
                continue
            dice = random.Random(f"{index}/{turn}")
            ids[index] += dice.choices(range(*spec["words"]), k=trajectories[index]["observed"][turn])
            heapq.heappush(due, (time.perf_counter() - started + trajectories[index]["seconds"][turn], index))
    seconds = time.perf_counter() - started
    lengths = [sum(each["lengths"]) for each in trajectories]
    return {"seconds": seconds, "lengths": lengths, "running_steps": steps, "recomputed_tokens": recomputed}


def _new_vllm(spec: dict[str, Any]) -> Any:
    options = {"load_format": "dummy", "skip_tokenizer_init": True} if spec["random_weights"] else {}
    return vllm.LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        seed=spec["seed"],
        max_model_len=spec["prompt_tokens"] + spec["max_new_tokens"],
        block_size=spec["block_size"],
        num_gpu_blocks_override=spec["num_blocks"],
        enable_prefix_caching=True,
        max_num_seqs=spec["max_num_seqs"],
        max_num_batched_tokens=max(2048, spec["prompt_tokens"] * len(spec["prompts"])),
        enforce_eager=spec["enforce_eager"],
        disable_log_stats=False,
        use_tqdm_on_load=False,
        **options,
    )


def _run(engine: Any, spec: dict[str, Any], name: str) -> tuple[float, list[int], int]:
    """Seconds, completion lengths and engine steps. No seed per request: it ends the CPU engine on larger batches."""
    started, lengths, steps = time.perf_counter(), [], 0
    for index, (prompt, params) in enumerate(_requests(spec)):
        engine.add_request(f"{name}-{index}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        steps += 1
        for output in engine.step():
            if output.finished:
                lengths += [len(completion.token_ids) for completion in output.outputs]
    return time.perf_counter() - started, lengths, steps


def _requests(spec: dict[str, Any]) -> Iterator[tuple[list[int], Any]]:
    """Prompts with their sampling: one of each for its whole group, or, where `lengths` are to be those of another
    engine, one for every sample."""
    size, ends = spec["group_size"], not spec["ignore_eos"]
    stop_ids = spec["stop_ids"] if ends else None
    for index, prompt in enumerate(spec["prompts"]):
        if spec["lengths"]:
            for length in spec["lengths"][index * size : (index + 1) * size]:
                yield prompt, vllm.SamplingParams(max_tokens=length, ignore_eos=True, **PLAIN)
        else:
            asked = {"max_tokens": spec["max_new_tokens"], "ignore_eos": not ends, "stop_token_ids": stop_ids}
            yield prompt, vllm.SamplingParams(n=size, **asked, **PLAIN)


def _preempted(llm: Any) -> int:
    """Rows that vLLM has made give way since its start."""
    return sum(int(each.value) for each in llm.get_metrics() if each.name == "vllm:num_preemptions")


def _group() -> list[int]:
    """Processes of this one's group, those that vLLM started included."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == os.getpgid(0):
                found.append(int(folder.name))
        except ProcessLookupError:
            continue  # it has just ended
    return found


def _status_bytes(process: int, field: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0  # a process that has ended and is not yet collected


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(sys.argv[1]))))
