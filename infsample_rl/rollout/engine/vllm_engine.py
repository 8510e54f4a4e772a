"""vLLM as the engine: this package's schedules, pool, noise and streaming, with vLLM computing the tokens.

vLLM is imported here, in the interpreter that has it, when an engine is built.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from infsample_rl.config import Config
from infsample_rl.model.architecture import KVShape, context_of, last_hidden_size
from infsample_rl.model.generation import load_generation_config
from infsample_rl.model.loading import build_outline, load_model_config
from infsample_rl.model.tensor_files import TensorFile
from infsample_rl.model.weight_sync.buckets import unpack_tensors
from infsample_rl.model.weight_sync.sync import Load
from infsample_rl.rollout.engine.call import MicroGroups
from infsample_rl.rollout.engine.kv_cache import free_bytes, total_bytes
from infsample_rl.rollout.engine.length_source import LengthSource
from infsample_rl.rollout.engine.rollout_engine import Call, RolloutEngine, evaluation_config
from infsample_rl.rollout.engine.sampler import truncates_at
from infsample_rl.rollout.engine.vllm_loop import VLLMLoop, last_words
from infsample_rl.rollout.schedule.kv_budget import check_pages, check_total, free_for_pool, num_pool_pages, rows_in
from infsample_rl.rollout.schedule.kv_pool import UNBOUNDED, Parking
from infsample_rl.types import EngineFailed, WeightManifest

OLDEST, NEWEST = (0, 26), (0, 32)  # versions of vLLM that this file was written for
LEAST_BATCH = 2048  # tokens of a step, prompts included
FOLDER = __name__.rpartition(".")[0]
# Read where vLLM is imported: one process beside tensor parallelism's, its older runner, whose sampler can be replaced,
# nothing sent to anybody.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VLLMEngine(RolloutEngine):
    """Samples with vLLM: one request for each sample while its schedule lets it decode."""

    is_exact = False  # vLLM's sums depend on the rows of a step

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sharers: int = 1,
        reserved_bytes: int = 0,
        stop_token_ids: set[int] | None = None,
        shared_probe: bool = False,
    ) -> None:
        """`sharers`, `stop_token_ids`, `shared_probe`: as SamplingEngine's. `reserved_bytes`: that a learner at rest
        holds of the device, now or soon. RuntimeError in one line where this vLLM,
        or vLLM with this model, cannot run."""
        self._device = torch.device("cuda" if config.cluster.rollout_gpus > 0 else "cpu")
        self._gpu_part = config.cluster.rollout_gpus or 1.0
        architecture = load_model_config(config.model)
        rollout = config.rollout
        lengths = LengthSource(rollout, tokenizer, self._device, last_hidden_size(architecture), shared=shared_probe)
        generation = load_generation_config(config.model, architecture)
        super().__init__(rollout, tokenizer, lengths, stop_token_ids, generation)
        self.shared_block = rollout.page_size
        self.vocab_size, self.context = architecture.vocab_size, context_of(architecture)
        dtype = getattr(torch, config.model.dtype)
        self._outline = build_outline(architecture, dtype, trust_remote_code=config.model.trust_remote_code)
        # in each process, as all bytes here
        self._page_bytes = KVShape.of(architecture).page_bytes(rollout.page_size, dtype) // rollout.tensor_parallel
        self._weight_bytes = sum(each.nbytes for each in self._outline.parameters()) // rollout.tensor_parallel
        self._longest = config.data.max_prompt_tokens
        self._pages = self._num_pages(sharers, reserved_bytes)
        self._met_at: str | None = None  # the file of its processes' store, whose name their shared memory has
        self._vllm = _new_vllm()
        # Where its processes meet, by sockets, which live on without their names; one has at most 107 characters.
        with tempfile.TemporaryDirectory(prefix="vllm_", dir="/tmp") as os.environ["VLLM_RPC_BASE_PATH"]:
            self._llm = self._start(config)
        self._rests = False
        if config.takes_turns:
            self.rest()

    @property
    def num_pages(self) -> int:
        return self._pages

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return dict(self._outline.named_parameters())

    @property
    def load(self) -> Load:
        return self._load

    def _preempted(self) -> int:
        """Rows that vLLM has made give way since its start, as it counts them."""
        return sum(int(each.value) for each in self._llm.get_metrics() if each.name == "vllm:num_preemptions")

    def rest(self) -> None:
        """As RolloutEngine's: vLLM's sleep mode of level 2, which on the CPU is this package's own."""
        if self._rests:
            return
        if self._loop is not None:
            self._loop.free()
            self._loop = None
        self._llm.sleep(level=2)
        self._llm.collective_rpc("release_host_memory")
        self._rests = True

    def close(self) -> None:
        """As RolloutEngine's: its processes end, and what they shared is gone."""
        self._llm.llm_engine.engine_core.shutdown()
        if self._met_at is not None:  # a process of its that does not end within 4 s is killed, and leaves its memory
            for left in Path("/dev/shm").glob(f"{glob.escape(Path(self._met_at).name)}-*"):
                left.unlink(missing_ok=True)

    def _num_pages(self, sharers: int, reserved_bytes: int) -> int:
        """Blocks of the pool; each full response of the default budget has one more, for its prompt's last tokens."""
        config, prompts = self.config, [self._longest] * self.config.most_prompts
        free = None
        if config.takes_free_memory:
            free = free_bytes(self._device, self._gpu_part) - unclaimed_bytes(self._device, reserved_bytes)
            free = max(0, free - self._weight_bytes)
            free = free_for_pool(free, on_gpu=self._device.type == "cuda", sharers=sharers)
        pages = num_pool_pages(config, page_bytes=self._page_bytes, prompts=prompts, free_bytes=free)
        pages += 0 if config.has_budget else config.num_slots or 0
        parts = config.tensor_parallel if self._device.type == "cpu" else 1  # in one machine's memory
        check_total(config, pages * self._page_bytes * parts, total_bytes(self._device))
        return pages

    def _start(self, config: Config) -> Any:
        rollout = self.config
        most_rows = max(rows_in(each, self._pages, [1]) for each in (rollout, evaluation_config(rollout)))
        longest = self._longest + rollout.max_new_tokens
        if self.context is not None:  # beyond which no prompt with its response is let in
            longest = min(longest, self.context)
        on_gpu, pool_bytes = self._device.type == "cuda", (self._pages + 1) * self._page_bytes
        try:
            llm = self._vllm.LLM(
                model=config.model.path,
                tokenizer=config.model.tokenizer_path or config.model.path,
                trust_remote_code=config.model.trust_remote_code,
                dtype=config.model.dtype,
                seed=config.run.seed,
                tensor_parallel_size=rollout.tensor_parallel,
                # else, in an actor of Ray's, it asks Ray for actors of its own
                distributed_executor_backend="mp" if rollout.tensor_parallel > 1 else "uni",
                max_model_len=longest,
                block_size=rollout.page_size,
                num_gpu_blocks_override=self._pages + 1,  # vLLM keeps one for itself
                kv_cache_memory_bytes=pool_bytes,
                gpu_memory_utilization=self._share_of_device(pool_bytes),
                max_num_seqs=most_rows,
                max_num_batched_tokens=max(LEAST_BATCH, longest + most_rows * rollout.page_size),
                enable_prefix_caching=True,
                enforce_eager=not on_gpu,
                async_scheduling=False,
                enable_sleep_mode=config.takes_turns and on_gpu,
                disable_log_stats=False,
                use_tqdm_on_load=False,
                logprobs_mode="processed_logprobs",
                logits_processors=[f"{FOLDER}.vllm_worker:NoiseRows"],
                worker_extension_cls=f"{FOLDER}.vllm_worker.WorkerExtension",
            )
            truncation = (rollout.top_p, rollout.top_k, rollout.min_p)
            drawing = (self.vocab_size, len(self.tokenizer), *truncation, rollout.bad_token_ids)
            llm.collective_rpc("draw_as_our_own", args=drawing)
            self._try(llm)
            self._met_at = next(iter(llm.collective_rpc("remove_store_file")))
        except Exception as error:  # of any kind, from any layer of vLLM
            raise RuntimeError(
                f"vLLM {self._vllm.__version__} cannot run model.path={config.model.path}: {last_words(error)}"
            ) from error
        found = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        if found != self._pages + 1:
            raise RuntimeError(f"vLLM made a pool of {found} blocks where {self._pages + 1} were asked for")
        return llm

    def _share_of_device(self, pool_bytes: int) -> float:
        """Of the GPU's memory what must be free as vLLM starts, above 0: a learner may hold the rest. Not read on the
        CPU."""
        if self._device.type != "cuda":
            return 1.0
        total = torch.cuda.mem_get_info(self._device)[1]
        return min(1.0, max(0.01, (self._weight_bytes + pool_bytes) / total))

    def _try(self, llm: Any) -> None:
        """Decode two tokens: what vLLM's kernels do not have is an error now, not in the first step."""
        params = self._vllm.SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False, logprobs=0)
        llm.llm_engine.add_request("trial", {"prompt_token_ids": [0, 0]}, params)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        llm.reset_prefix_cache()

    def _allocate(self, prompt_indices: Sequence[int], sizes: Sequence[int]) -> None:
        if self._rests:
            raise RuntimeError("vLLM has given its weights back, and none have come since")
        for index, size in zip(prompt_indices, sizes, strict=True):
            check_pages(self._pages, self.config, size, f"prompt {index}", page_bytes=self._page_bytes)
            if size > self._longest:
                raise ValueError(f"prompt {index} has {size} tokens, data.max_prompt_tokens is {self._longest}")

    def _new_loop(self, call: Call) -> VLLMLoop:
        groups, config, temperature, _, watch, turns = call
        truncates = truncates_at(temperature, config.top_p, config.top_k, config.min_p, len(self.tokenizer))
        options = {"temperature": temperature, "logprobs": int(truncates), "detokenize": False, "ignore_eos": True}
        sampling, delta = self._vllm.SamplingParams, self._vllm.sampling_params.RequestOutputKind.DELTA

        def params_of(key: int, begun: int, left: int) -> Any:
            return sampling(max_tokens=left, output_kind=delta, extra_args={"noise": [key, begun]}, **options)

        # What gives way holds no page: vLLM computes it again, less what its prefix cache still has.
        planner = self._new_planner(call, Parking(UNBOUNDED), parks=False)
        micro_groups = MicroGroups(groups, config.micro_group, self.policy_version, truncates=truncates)
        engine, stops, page_bytes = self._llm.llm_engine, self._stop_rule(config), self._page_bytes
        return VLLMLoop(engine, params_of, planner, stops, micro_groups, page_bytes, self._preempted, watch, turns)

    def _load(
        self, parameters: Mapping[str, Tensor], manifest: WeightManifest, buckets: Iterable[Tensor | np.ndarray]
    ) -> None:
        """Weights into every process of vLLM; nothing that old weights computed is used again. EngineFailed where not
        all of them came: layers are then neither of one version nor of the other."""
        if self._llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("weights came while vLLM had unfinished requests")
        if self._rests:
            self._llm.wake_up(tags=["weights"])
        tensors = unpack_tensors(manifest, buckets)
        try:
            if self.config.tensor_parallel == 1:  # in this process
                self._llm.collective_rpc("load_tensors", args=(tensors,))
            else:
                shapes = [(name, getattr(torch, dtype), shape) for name, dtype, shape, *_ in manifest.entries]
                with open(os.memfd_create("weights"), "wb") as memory:  # without a name, it is gone with this process
                    path = f"/proc/{os.getpid()}/fd/{memory.fileno()}"
                    file = TensorFile(Path(path), shapes)
                    for name, tensor in tensors:
                        file.write(name, tensor)
                    file.close()
                    self._llm.collective_rpc("load_file", args=(path,))
        except Exception as error:
            raise EngineFailed(f"weights did not all reach vLLM: {last_words(error)}") from error
        if self._rests:
            self._llm.wake_up(tags=["kv_cache"])
            self._rests = False
        self._llm.reset_prefix_cache()


def _new_vllm() -> Any:
    """The module; RuntimeError in one line when it is missing, too old or too new."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # workers of one machine share its cores
    try:
        import vllm
    except ImportError as error:
        raise RuntimeError(
            f"rollout.engine=vllm: this interpreter has no vLLM ({error}); `make vllm` makes one that has"
        ) from None
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if not OLDEST <= version <= NEWEST:
        raise RuntimeError(
            f"rollout.engine=vllm was written for vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, this is "
            f"{vllm.__version__}"
        )
    return vllm


def unclaimed_bytes(device: torch.device, reserved_bytes: int) -> int:
    """What is still to be taken of bytes that another process reserves on a device: on a GPU, what is taken already is
    seen."""
    if device.type != "cuda":
        return reserved_bytes
    free, total = torch.cuda.mem_get_info(device)
    return max(0, reserved_bytes - (total - free))
