"""The frozen reference policy of the KL terms."""

from __future__ import annotations

import numpy as np
import torch

from infsample_rl.config import Config
from infsample_rl.learner.row_plan import runs_within
from infsample_rl.model.frozen_policy import load_frozen_policy
from infsample_rl.model.packing import pack_row
from infsample_rl.model.peak_memory import process_memory
from infsample_rl.observe.phases import phase
from infsample_rl.types import Completion, Prompt, ReferenceReport, ReferenceResult


class ReferenceWorker:
    """Log-probabilities of finished micro-groups under reference.path, or under the policy the run starts from."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.cluster.threads_per_worker)
        self.device = torch.device("cuda" if config.cluster.reference_gpus > 0 else "cpu")
        self.temperature = config.rollout.temperature
        self.max_tokens = config.reference.max_tokens_per_micro_batch
        self.memory = process_memory(self.device.type)
        self.policy = load_frozen_policy(config, self.device)
        self.memory.reset()  # pages of the file that was read, which the system takes back when it wants to

    @phase("reference")
    @torch.inference_mode()
    def logprobs(self, prompt: Prompt, completions: list[Completion]) -> ReferenceResult:
        """Reference log-probabilities of one prompt's completions and, per completion, the sum of policy minus
        reference."""
        logprobs: list[np.ndarray] = []
        for part in self._rows(len(prompt.token_ids), completions):
            row = pack_row([(prompt.token_ids, [completion.token_ids for completion in part])], self.device)
            flat = self.policy(row, self.temperature)[0].cpu().numpy()
            logprobs += np.split(flat, np.cumsum([len(completion.token_ids) for completion in part])[:-1])
        kl_sums = [
            float(np.sum(completion.logprobs - own, dtype=np.float64))
            for completion, own in zip(completions, logprobs, strict=True)
        ]
        return ReferenceResult(logprobs=logprobs, report=ReferenceReport(kl_sums, self.memory.peak_bytes()))

    def _rows(self, prompt_tokens: int, completions: list[Completion]) -> list[list[Completion]]:
        """Cut completions, in order, into rows of at most max_tokens, each with the prompt once."""
        lengths = [len(completion.token_ids) for completion in completions]
        needed = prompt_tokens + max(lengths, default=0)
        if needed > self.max_tokens:
            raise ValueError(
                f"reference.max_tokens_per_micro_batch must be >= {needed} for this prompt and response, got "
                f"{self.max_tokens}"
            )
        return [completions[part] for part in runs_within(lengths, prompt_tokens, self.max_tokens)]
