"""What one packed row holds while it is run: the learner's own forward and backward, on the meta device.

No weights are loaded and nothing is computed, yet every tensor that the real row allocates is counted when it comes and
when it goes. The layers of a model are alike, and so are the chunks of logits: two shallow models and one more chunk
are traced and the rest follows, since every count is a straight line in the number of either.

A row of several passes is as large as its prompt and one pass behind it. A row's fullest moment is one of: its forward
pass; the head's backward pass, where all activations and a chunk of logits are there; the backward pass of a layer; the
embedding's gradient at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from infsample_rl.config import LearnerConfig
from infsample_rl.learner.divergence import likely_kl
from infsample_rl.learner.unsharded_backend import gradient_sum, move_gradient
from infsample_rl.model.loading import build_outline
from infsample_rl.model.logprobs import PackedPolicy, checkpoint_every
from infsample_rl.model.lora import add_adapters
from infsample_rl.model.packed_attention import exchange_prompt
from infsample_rl.model.packing import PackedRow, pack_prompt, pack_row
from infsample_rl.model.policy_head import sliced_as_on
from infsample_rl.model.row_cuts import RowCuts
from infsample_rl.model.shared_prompt import SharedPrompt
from infsample_rl.plan.memory_trace import MemoryTrace
from infsample_rl.plan.model_outline import ModelOutline

FLEX_ATTENTION = "infsample_plan_flex"
LINES = {  # moment in which memory was made -> line of the plan
    "forward": "activations",
    "head": "logits and the head's gradient",
    "layer": "backward pass of a layer",
    "embedding": "embedding's gradient",
}
RowGroups = Sequence[tuple[int, Sequence[int]]]  # (prompt tokens, tokens of its responses in the row), group by group


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """What decides how much memory a row takes, beside its tokens."""

    model: ModelOutline
    dtype: torch.dtype
    learner: LearnerConfig
    masters: bool  # float32 masters beside 16-bit parameters, which take every gradient as soon as it is there
    on_gpu: bool
    flex_attention: bool  # false: SDPA, as on the CPU
    head_fp32: bool = False
    with_gradient: bool = True  # false: a reference's row
    top_k: int = 0  # ids that are scored beside every label
    adds_head_gradient: bool = False  # to the sum, as UnshardedBackend does, not through autograd

    def decisive(self) -> tuple[Any, ...]:
        """All that decides, beside the model and the row: what two plans share their traces by."""
        learner = self.learner
        read = (learner.activation_checkpointing, learner.recompute_granularity, learner.logprob_chunk_tokens)
        adapters = str([value for name, value in sorted(vars(learner).items()) if name.startswith("lora_")])
        flags = (self.masters, self.on_gpu, self.flex_attention, self.head_fp32, self.with_gradient)
        return (*read, adapters, self.dtype, *flags, self.adds_head_gradient, self.top_k)


def fullest_moment(settings: RowSettings, groups: RowGroups, *, in_passes: bool = False) -> dict[str, int]:
    """Bytes by LINES at the fullest moment of a row of these `groups`, beside weights, summed gradients and the
    optimizer's state.

    Gradients of an earlier row are there already: they are added to, not made. `in_passes`: the one group is a pass of
    a longer row. Raises ValueError for a model that cannot be traced.
    """
    layers, total = settings.model.architecture.num_hidden_layers, sum(sum(lengths) for _, lengths in groups)
    every, chunk = max(1, settings.learner.activation_checkpointing), settings.learner.logprob_chunk_tokens
    key = (*settings.decisive(), str(groups), in_passes)
    found = settings.model.traces.get(key)
    if found is None:
        low = every + layers % every
        depth = layers if layers <= low + every else low
        scored = _fewest_scored(settings, total)
        near = _trace(settings, depth, groups, in_passes, scored)
        found = {moment: bytes_made.copy() for moment, bytes_made in near.items()}
        if depth < layers:
            deeper = _trace(settings, depth + every, groups, in_passes, scored)
            _extend(found, near, deeper, (layers - depth) / every)
        if scored < total:
            longer = _trace(settings, depth, groups, in_passes, scored + chunk)
            _extend(found, near, longer, (total - scored) / chunk)
        settings.model.traces[key] = found
    fullest = max(found.values(), key=Counter.total)
    return {name: round(fullest[moment]) for moment, name in LINES.items() if fullest[moment] > 0}


def _fewest_scored(settings: RowSettings, total: int) -> int:
    """Of a row's `total` response tokens, those that are given logits while it is traced: chunks of logits are alike
    but for the last, so two whole ones and the rest are enough, and what each more adds is a straight line.

    All of them where the hidden states of all outweigh a chunk's logits, since then the fullest moment may be after the
    last chunk.
    """
    learner, model = settings.learner, settings.model
    of_chunk = 4 * learner.logprob_chunk_tokens * model.valid_vocab
    few = total % learner.logprob_chunk_tokens + 2 * learner.logprob_chunk_tokens
    return few if few < total and of_chunk >= 4 * total * model.architecture.hidden_size else total


def _extend(
    found: dict[str, Counter[str]], near: dict[str, Counter[str]], far: dict[str, Counter[str]], steps: float
) -> None:
    """Add to `found` what `steps` times the way from `near` to `far` adds."""
    for moment, counts in found.items():
        for name in near[moment].keys() | far[moment].keys():
            counts[name] += round(steps * (far[moment][name] - near[moment][name]))


def _pack(groups: RowGroups, shared: SharedPrompt | None = None) -> PackedRow:
    return pack_row(
        [
            (np.zeros(prompt, np.int32), [np.zeros(length, np.int32) for length in lengths])
            for prompt, lengths in groups
        ],
        "cpu",
        shared,
    )


def _on_meta(row: PackedRow) -> PackedRow:
    folds = [replace(fold, index=fold.index.to("meta")) for fold in row.cuts.folds]
    tensors = {name: value.to("meta") for name, value in vars(row).items() if isinstance(value, Tensor)}
    return replace(row, **tensors, cuts=replace(row.cuts, folds=folds, order=row.cuts.order.to("meta")))


def _trace(
    settings: RowSettings, layers: int, groups: RowGroups, in_passes: bool, scored: int | None = None
) -> dict[str, Counter[str]]:
    """The fullest state of every moment, for a model of so many layers; logits of the row's first `scored` response
    tokens, by default of all."""
    policy = _build_policy(settings, layers)
    kept = _keep_gradients(settings, policy)
    with (
        sliced_as_on("cuda" if settings.on_gpu else "cpu"),
        MemoryTrace([*policy.parameters(), *policy.buffers(), *kept]) as trace,
        torch.set_grad_enabled(settings.with_gradient),
    ):
        _follow(policy, trace)
        if in_passes:
            _run_passes(policy, groups, trace, scored, settings.top_k)
        else:
            _run(policy, _on_meta(_pack(groups)), trace, scored, settings.top_k)
    return trace.fullest


def _run(policy: PackedPolicy, row: PackedRow, trace: MemoryTrace, scored: int | None, top_k: int) -> None:
    labels = row.labels[:scored]
    others = labels.new_empty(len(labels), top_k) if torch.is_grad_enabled() else top_k
    trace.moment = "forward"
    logprobs, _, _, likely = policy(
        replace(row, predictor_index=row.predictor_index[:scored], labels=labels, others=others), 1.0
    )
    if logprobs.requires_grad:
        trace.moment = "head"
        loss = logprobs.sum()
        if top_k > 0:
            loss = loss + likely_kl(likely, torch.empty_like(likely), "reverse").sum()
        loss.backward()


def _run_passes(policy: PackedPolicy, groups: RowGroups, trace: MemoryTrace, scored: int | None, top_k: int) -> None:
    ((prompt_tokens, _),) = groups
    prompt = _on_meta(pack_prompt(np.zeros(prompt_tokens, np.int32), "cpu"))
    policy(prompt, 1.0)
    for _ in range(2):  # the second finds the gradient that the first has left with the prompt
        _run(policy, _on_meta(_pack(groups, prompt.cuts.shared)), trace, scored, top_k)
    trace.moment = "layer"
    prompt.cuts.shared.gradient_carrier().backward()


def _build_policy(settings: RowSettings, layers: int) -> PackedPolicy:
    learner, model = settings.learner, settings.model
    lm = build_outline(model.architecture, settings.dtype, layers=layers, trust_remote_code=model.trust_remote_code)
    if learner.lora_rank > 0 and settings.with_gradient:
        add_adapters(lm, learner, seed=0, path="")
        lm.to("meta")  # type: ignore[arg-type]  # transformers' to() hides what it takes
        for parameter in lm.parameters():  # adapters too are run in it
            parameter.data = parameter.data.to(settings.dtype)
    policy = PackedPolicy(
        lm, valid_vocab=model.valid_vocab, chunk_tokens=learner.logprob_chunk_tokens, head_fp32=settings.head_fp32
    )
    if policy.masked is not None:  # of an outline it is on the CPU
        policy.masked = policy.masked.to("meta")
    if settings.flex_attention:
        lm.set_attn_implementation(FLEX_ATTENTION)
    if learner.activation_checkpointing and settings.with_gradient:
        checkpoint_every(lm, learner.activation_checkpointing, granularity=learner.recompute_granularity)
    return policy


def _keep_gradients(settings: RowSettings, policy: PackedPolicy) -> list[Tensor]:
    """Give every trained parameter the gradient of an earlier row; those and the masters, which are not counted
    here."""
    kept: list[Tensor] = []
    for parameter in (parameter for parameter in policy.parameters() if parameter.requires_grad):
        master = parameter
        if settings.masters and settings.with_gradient:
            master = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32))
            parameter.register_post_accumulate_grad_hook(lambda given, master=master: move_gradient(given, master))
            kept.append(master)
        master.grad = torch.empty_like(master)
        kept.append(master.grad)
        if parameter is policy.lm.get_output_embeddings().weight and settings.adds_head_gradient:
            policy.head_gradient = partial(gradient_sum, master)
    return kept


def _follow(policy: PackedPolicy, trace: MemoryTrace) -> None:
    """Let `trace` know which moment of the row it is."""

    def enter(moment: str) -> None:
        trace.moment = moment

    def after_embedding(_module: nn.Module, _inputs: object, hidden: Tensor) -> None:
        if hidden.requires_grad:
            hidden.register_hook(lambda _: enter("embedding"))

    def after_layers(_module: nn.Module, _inputs: object, output: Any) -> None:
        enter("head")
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(lambda _: enter("layer"))

    policy.lm.get_input_embeddings().register_forward_hook(after_embedding)
    policy.lm.base_model.register_forward_hook(after_layers)


class _FlexAttention(torch.autograd.Function):
    """The tensors of compiled FlexAttention: it keeps query, key, value, output and a float32 log-sum-exp, and expands
    no kv head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, lse = torch.empty_like(query), torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, lse = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        torch.empty_like(lse)  # delta, the row sums of output x gradient
        return tuple(gradients)


def _flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, cuts: RowCuts, **_: object
) -> tuple[Tensor, None]:
    prompt = exchange_prompt(module, key, value, cuts)
    if prompt is not None:
        key, value = (torch.cat(pair, 2) for pair in zip(prompt, (key, value), strict=True))
    return _FlexAttention.apply(query, key, value).transpose(1, 2), None


AttentionInterface.register(FLEX_ATTENTION, _flex_attention)
