"""What distillation over a teacher's k likeliest tokens misses of the whole vocabulary: of the KL and of its gradient.

python -m benchmarks.distill_error policy=FOLDER teacher=FOLDER completions=FILE [ks=[1,4,16,64,256]] [samples=64]

`completions`: a run's completions.jsonl; the KL is between the two models at every token of its first samples, by
learner/divergence.likely_kl. Shown are the share of the whole KL that k tokens have, of all places together and of the
place that has least of its own, and |gradient - whole gradient| / |whole gradient| with respect to the policy's logits.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infsample_rl.config.command_line import option, print_table, run_with_options
from infsample_rl.config.loading import load_config
from infsample_rl.learner.divergence import likely_kl
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import check_reference, load_tokenizer
from infsample_rl.observe.records import read_records

KINDS = ("reverse", "forward")
PARTS = ("prompt", "response")
COLUMNS = {
    **{"kl": "KL", "k": "k", "nats": "nats a token", "share": "of the whole", "least": "of the whole, least place"},
    **{"gradient": "gradient's error"},
}
LEAST_NATS = 1e-3  # of a place's whole KL, for its own share to say something


@dataclass(kw_only=True)
class DistillErrorOptions:
    """Arguments of benchmarks.distill_error."""

    policy: str = option("", "folder or hub name of the model that is trained")
    teacher: str = option("", "folder or hub name of its teacher, of the same tokenizer")
    completions: str = option("", "completions.jsonl of a run")
    ks: list[int] = option([1, 4, 16, 64, 256], "likeliest tokens of the teacher", low=1)
    samples: int = option(64, "first samples of the file", low=1)
    temperature: float = option(1.0, "of both", above=0)
    threads: int = option(2, "CPU threads", low=1)

    def __post_init__(self) -> None:
        if not self.policy or not self.teacher:
            raise ValueError("give policy=FOLDER and teacher=FOLDER")
        if not Path(self.completions).is_file():
            raise ValueError(f"completions={self.completions or 'nothing'}: give a run's completions.jsonl")


def main() -> int:
    """Measure, and print a table."""
    return run_with_options(run, DistillErrorOptions, usage=__doc__)


def run(options: DistillErrorOptions) -> int:
    """As main()."""
    torch.set_num_threads(options.threads)
    config = load_config(["objective=distill", f"model.path={options.policy}", f"reference.path={options.teacher}"])
    tokenizer = load_tokenizer(config.model)
    check_reference(config, tokenizer)
    models = [load_model(config.model, path=path, dtype=torch.float32) for path in (options.policy, options.teacher)]
    texts = list(islice(read_records(Path(options.completions)), options.samples))
    if not texts or not all(set(PARTS) <= each.keys() for each in texts):
        raise ValueError(f"completions={options.completions}: has no samples with prompt and response, as a run's has")
    found: dict[tuple[str, int], list[Tensor]] = defaultdict(list)  # by kind and k, of every sample
    for each in texts:
        prompt, response = (tokenizer(each[part], add_special_tokens=False)["input_ids"] for part in PARTS)
        if response:
            policy, of_teacher = (
                logits_of(model, prompt, response)[:, : len(tokenizer)] / options.temperature for model in models
            )  # heads may be padded, each to a size of its own
            teacher, ks = likeliest(of_teacher), [k for k in options.ks if k <= policy.shape[1]]
            for kind in KINDS:
                for k, parts in measure(policy, teacher, kind, ks):
                    found[kind, k].append(parts)
    rows = [row_of(kind, k, torch.cat(parts, 1)) for (kind, k), parts in found.items()]
    print_table(rows, COLUMNS)
    return 0


@torch.no_grad()
def logits_of(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """[T, V] at the places of the response."""
    ids = torch.tensor([prompt + response])
    return model(ids, logits_to_keep=len(response) + 1).logits[0, :-1].float()


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and token ids [T, V], the likeliest first."""
    likely, ids = logits.double().log_softmax(-1).sort(descending=True)
    return likely, ids


def measure(policy: Tensor, teacher: tuple[Tensor, Tensor], kind: str, ks: list[int]) -> Iterable[tuple[int, Tensor]]:
    """For every k, [4, T]: the KL of k tokens and the whole, |gradient - whole gradient|^2 and |whole gradient|^2 with
    respect to the policy's logits [T, V]. `teacher`: its likeliest tokens."""
    likely, ids = teacher
    whole = _kl_and_gradient(policy, likely, ids, kind)
    for k in ks:
        kl, gradient = _kl_and_gradient(policy, likely[:, :k], ids[:, :k], kind)
        squares = [(gradient - whole[1]).square().sum(-1), whole[1].square().sum(-1)]
        yield k, torch.stack([kl, whole[0], *squares])


def _kl_and_gradient(policy: Tensor, likely: Tensor, ids: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    logits = policy.double().requires_grad_()
    kl = likely_kl(logits.log_softmax(-1).gather(-1, ids), likely, kind)
    (gradient,) = torch.autograd.grad(kl.sum(), logits)
    return kl.detach(), gradient


def row_of(kind: str, k: int, found: Tensor) -> dict[str, Any]:
    """Of [4, T] over all samples."""
    kl, whole, distance, length = found
    told = whole > LEAST_NATS
    return {
        "kl": kind,
        "k": k,
        "nats": f"{kl.mean():.5f}",
        "share": f"{kl.sum() / whole.sum():.4f}",
        "least": f"{(kl / whole)[told].min():.3f}" if told.any() else None,
        "gradient": f"{(distance.sum() / length.sum()).sqrt():.4f}",
    }


if __name__ == "__main__":
    sys.exit(main())
