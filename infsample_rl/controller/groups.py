"""The driver's book of one step: which samples of which prompt are in, what they earned, when a group is complete.

No tensors and no Ray here: micro-groups are keys, which the cluster can turn into object references.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, field
from operator import attrgetter

from infsample_rl.config import Config
from infsample_rl.learner.advantage import group_advantages, overlong_penalty, turn_advantages
from infsample_rl.types import (
    Episode,
    Forecast,
    LossTotals,
    MaybeNone,
    MicroGroupHeader,
    Prompt,
    ReferenceReport,
    RewardResult,
    RowStay,
    SampleSpec,
)


@dataclass(kw_only=True, slots=True)
class SampleRecord:
    """One sample as the driver knows it."""

    sample_index: int
    length: int  # tokens of its response
    finish_reason: str
    micro_group: int  # key of the micro-group that holds its tokens
    position: int  # place in that micro-group
    reward: float | None = None
    components: dict[str, float | None] = field(default_factory=dict)
    kl_sum: float = 0.0
    rewarded: bool = False  # the reward worker has answered
    referenced: bool = False
    advantages: tuple[float, ...] = (0.0,)  # of each of its turns, or one of all its tokens
    observed: int = 0  # tokens of its response that it did not sample
    episode: Episode | None = None  # None: there is no environment
    worker: int = 0  # rollout worker that sampled it
    forecast: Forecast | MaybeNone = None
    stays: list[RowStay] = field(default_factory=list)

    @property
    def advantage(self) -> float:
        """Of its first turn, which is credited with the whole reward either way."""
        return self.advantages[0]


@dataclass(kw_only=True, slots=True)
class Group:
    """All samples of one prompt."""

    prompt: Prompt
    size: int  # G
    needs_rewards: bool = True  # else they train nothing
    # those that have arrived; once it is complete by index, whatever order they ended in
    samples: list[SampleRecord] = field(default_factory=list)
    rewarded: int = 0
    referenced: int = 0
    last_sample_at: float = 0.0  # time.time() when its last sample ended
    first_reward_at: float = math.inf  # time.time() when its first micro-group was taken up by the reward worker
    has_signal: bool = False  # once it is complete: whether its rewards differ, before they are shaped

    def trained_samples(self) -> list[SampleRecord]:
        """Samples with a reward, or all where rewards train nothing: the others are outside mean, std and every
        denominator."""
        return [sample for sample in self.samples if sample.reward is not None or not self.needs_rewards]


class StepGroups:
    """Collects a step's micro-groups, rewards and reference results; hands out each group once, when it is complete.

    In a deterministic run groups are handed out in prompt order, never by arrival.
    """

    def __init__(self, prompts: list[Prompt], config: Config, *, group_size: int, step: int, with_reference: bool):
        self.groups: list[Group] = []
        self.started_at = time.time()
        self.failures: list[str] = []
        self.reference_peak_bytes = 0  # most memory of a reference worker
        self._config = config
        self.step = step  # version of the weights that sample it
        self._group_size = group_size
        self.with_reference = with_reference
        self._by_micro_group: dict[int, tuple[Group, list[SampleRecord]]] = {}
        self._handed_out: set[int] = set()
        self._ready: list[int] = []  # a heap: prompt_index of groups that are complete and not handed out
        self.extend(prompts)

    def extend(self, prompts: list[Prompt]) -> None:
        """Sample these prompts too; their prompt_index goes on from those that are there."""
        needs_rewards = self._config.objective.reward_coef > 0
        self.groups += [Group(prompt=prompt, size=self._group_size, needs_rewards=needs_rewards) for prompt in prompts]

    @property
    def micro_groups(self) -> list[int]:
        """Keys of all micro-groups that have arrived."""
        return list(self._by_micro_group)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all groups."""
        return [group.prompt for group in self.groups]

    def lengths_by_row(self) -> dict[int | str, list[int]]:
        """Tokens of the samples that are in, by Prompt.place."""
        return {group.prompt.place: [sample.length for sample in group.samples] for group in self.groups}

    def trains(self, group: Group) -> bool:
        """Whether a complete group is trained: each, or with objective.dynamic_sampling those that have a signal."""
        return group.has_signal or not self._config.objective.dynamic_sampling

    def trained(self) -> list[Group]:
        """Complete groups that are trained."""
        return [group for group in self.groups if group.prompt.prompt_index in self._handed_out and self.trains(group)]

    def add_micro_group(self, key: int, header: MicroGroupHeader) -> Group:
        """Enter the samples of a micro-group that has arrived; returns its group. RuntimeError for those of other
        weights, and for more samples than the group has."""
        if header.policy_version != self.step:
            raise RuntimeError(
                f"a micro-group was sampled by weights version {header.policy_version}, not by version {self.step}"
            )
        group = self.groups[header.prompt_index]
        records = [
            SampleRecord(sample_index=index, length=length, finish_reason=reason, micro_group=key, position=position)
            for position, (index, length, reason) in enumerate(
                zip(header.sample_indices, header.lengths, header.finish_reasons, strict=True)
            )
        ]
        for record, observed in zip(records, header.observed, strict=False):
            record.observed = observed
        for record, episode in zip(records, header.episodes, strict=False):
            record.episode = episode
        for record, forecast in zip(records, header.forecasts, strict=False):
            record.forecast = forecast
        for record, stays in zip(records, header.stays, strict=False):
            record.worker, record.stays = header.worker, stays
        group.samples += records
        group.last_sample_at = max(group.last_sample_at, header.finished_at)
        if len(group.samples) > group.size:
            raise RuntimeError(
                f"prompt {header.prompt_index} got {len(group.samples)} samples, its group has {group.size}"
            )
        self._by_micro_group[key] = (group, records)
        return group

    def add_rewards(self, key: int, result: RewardResult) -> None:
        """Enter the rewards of a micro-group."""
        group, records = self._by_micro_group[key]
        for position, (record, reward) in enumerate(zip(records, result.rewards, strict=True)):
            record.reward, record.rewarded = reward, True
            record.components = {name: values[position] for name, values in result.components.items()}
        group.rewarded += len(records)
        group.first_reward_at = min(group.first_reward_at, result.started_at)
        self.failures += result.failures
        self._note_if_complete(group)

    def add_reference(self, key: int, report: ReferenceReport) -> None:
        """Enter the summed log-ratios of a micro-group to the reference."""
        group, records = self._by_micro_group[key]
        for record, kl_sum in zip(records, report.kl_sums, strict=True):
            record.kl_sum, record.referenced = kl_sum, True
        group.referenced += len(records)
        self.reference_peak_bytes = max(self.reference_peak_bytes, report.peak_memory_bytes)
        self._note_if_complete(group)

    def forget(self, key: int) -> None:
        """A micro-group is gone: its samples will arrive anew."""
        group, records = self._by_micro_group.pop(key)
        group.samples = [sample for sample in group.samples if sample.micro_group != key]
        group.rewarded -= sum(sample.rewarded for sample in records)
        group.referenced -= sum(sample.referenced for sample in records)

    def take_complete(self) -> list[Group]:
        """Groups completed since the last call, with their advantages, in prompt order."""
        complete = []
        while self._ready and (not self._config.is_deterministic or self._ready[0] == len(self._handed_out)):
            group = self.groups[heapq.heappop(self._ready)]
            self._handed_out.add(group.prompt.prompt_index)
            self._set_advantages(group)
            complete.append(group)
        return complete

    def all_complete(self) -> bool:
        """Whether every group has been handed out."""
        return len(self._handed_out) == len(self.groups)

    def reward_kl(self) -> float | None:
        """Mean of log(policy / reference) over the tokens sampled, where it is in the reward and the loss has none."""
        objective = self._config.objective
        if not objective.kl_in_reward or objective.reference_in_loss:
            return None
        samples = [sample for group in self.groups for sample in group.samples]
        return math.fsum(sample.kl_sum for sample in samples) / sum(each.length - each.observed for each in samples)

    def _note_if_complete(self, group: Group) -> None:
        """Called with what a group got, of which one thing is the last: no other group is looked at, there may be
        thousands."""
        if group.rewarded == group.size and (not self.with_reference or group.referenced == group.size):
            group.samples.sort(key=attrgetter("sample_index"))
            heapq.heappush(self._ready, group.prompt.prompt_index)

    def _set_advantages(self, group: Group) -> None:
        """Group-wide advantages, of rewards as the objective shapes them.

        A signal is what there is without that: a punished length or a KL alone is none (DAPO filters on accuracy).
        """
        samples = group.samples
        group.has_signal = any(map(any, self._advantages(samples, [sample.reward for sample in samples])))
        shaped = [self._shaped_reward(sample) for sample in samples]
        for sample, own in zip(samples, self._advantages(samples, shaped), strict=True):
            sample.advantages = own

    def _advantages(self, samples: list[SampleRecord], rewards: list[float | None]) -> list[tuple[float, ...]]:
        """Of each sample's turns, or one of all its tokens."""
        objective = self._config.objective
        if objective.turn_credit == "turn":
            of_turns = [self._turn_rewards(sample) for sample in samples]
            return turn_advantages(rewards, of_turns, objective.advantage)
        return [(own,) for own in group_advantages(rewards, objective.advantage)]

    def _turn_rewards(self, sample: SampleRecord) -> list[float]:
        """What each turn added to the reward; one of nothing where its environment failed at the first."""
        given = [] if sample.episode is None else sample.episode.turn_rewards
        return [self._config.environment_weight * reward for reward in given] or [0.0]

    def _shaped_reward(self, sample: SampleRecord) -> float | None:
        """r_i - beta log(pi / pi_ref) where the KL is in the reward (the paper's section 3.4), and DAPO's punishment
        of overlong responses."""
        if sample.reward is None:
            return None
        objective, reward = self._config.objective, sample.reward
        if objective.kl_in_reward:
            reward -= objective.kl_reward_coef * sample.kl_sum
        if objective.overlong_buffer_tokens > 0:
            longest = self._config.rollout.max_new_tokens
            reward += overlong_penalty(
                sample.length, longest, objective.overlong_buffer_tokens, objective.overlong_penalty
            )
        return reward


def trainable_specs(group: Group, config: Config) -> list[SampleSpec]:
    """What the learner must see of a group: nothing when its gradient is exactly zero (no advantage, KL, teacher or
    entropy in the loss)."""
    samples, objective = group.trained_samples(), config.objective
    has_advantage = any(any(sample.advantages) for sample in samples)
    if not objective.reference_in_loss and objective.entropy_coef == 0 and not has_advantage:
        return []
    return [
        SampleSpec(
            prompt_index=group.prompt.prompt_index,
            sample_index=sample.sample_index,
            length=sample.length,
            advantages=sample.advantages,
        )
        for sample in samples
    ]


def mini_batches(groups: list[Group], count: int) -> list[list[Group]]:
    """The groups of each of a step's updates, in prompt order and as equal in number as can be."""
    ordered = sorted(groups, key=lambda group: group.prompt.prompt_index)
    return [ordered[len(ordered) * part // count : len(ordered) * (part + 1) // count] for part in range(count)]


def loss_totals(groups: list[Group], config: Config) -> LossTotals:
    """Denominators of an update on these groups: their samples that are trained."""
    samples = [sample for group in groups for sample in group.trained_samples()]
    return LossTotals(
        num_sequences=len(samples),
        num_tokens=sum(sample.length - sample.observed for sample in samples),
        length_normalizer=config.rollout.max_new_tokens,
    )


def provisional_totals(config: Config) -> LossTotals:
    """Denominators for gradients accumulated before the step's real totals are known; rescaled once at the end."""
    num_sequences = config.samples_per_step
    return LossTotals(
        num_sequences=num_sequences,
        num_tokens=num_sequences * config.rollout.max_new_tokens,
        length_normalizer=config.rollout.max_new_tokens,
    )
