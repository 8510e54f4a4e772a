"""The records that cross process borders. Arrays are numpy, which Ray's object store hands over without a copy; no
record has __slots__, since those that have are pickled field by field in Python."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

MaybeNone: TypeAlias = Any  # `X | MaybeNone`: None until it is set up, as its readers know; checked as an X


class EngineFailed(RuntimeError):
    """What computes the tokens of a rollout worker cannot be used any more: the worker is replaced."""


class Phase(NamedTuple):
    """A phase that has ended."""

    name: str
    start: float  # time.time()
    end: float
    thread: int  # of the process, counted from 0 as threads have their first phase; phases of one thread nest


class WorkerPhases(NamedTuple):
    """What one worker has done since it was last asked."""

    role: str
    index: int  # type: ignore[assignment]  # hides the method of tuples, which nobody calls
    node: str
    phases: list[Phase]


Request = tuple[Any, ...]  # to an environment, as reward/environment_process.py has them
Answered = tuple[Request, dict[str, Any]]  # with its reply


class EpisodeStart(NamedTuple):
    """What the environments of a prompt's samples begin with, all alike."""

    seed: int
    columns: dict[str, Any]  # of the row, and its messages as `prompt`
    said: str | None = None  # that the prompt goes on with; None: nothing is known of it
    messages: list[dict[str, Any]] | None = None  # of the prompt, where they are what an environment said in its place
    tools: list[dict[str, Any]] | tuple[()] = ()  # that a program offers its policy
    token_ids: list[int] | None = None  # of the prompt, where a program asks its policy by token ids
    failure: str = ""  # why no episode of this prompt can begin; "": they can


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem of a step, ready to sample."""

    prompt_index: int  # position in the step's batch
    row: int  # row of the data source, for messages to the user
    messages: list[dict[str, Any]]  # chat messages, as given to the template
    text: str  # the rendered prompt
    token_ids: np.ndarray  # [prompt tokens] int32
    columns: dict[str, Any] = field(default_factory=dict)  # every other field of the row, for the reward functions
    source: str = ""  # its name among data.sources
    start: EpisodeStart | None = None  # None: there is no environment

    @property
    def place(self) -> int | str:
        """Its row, "SOURCE:ROW" where there are several sources: one of a kind."""
        return f"{self.source}:{self.row}" if self.source else self.row


class AcceptedSpan(NamedTuple):
    """Running steps that gave a row drafted tokens too; with others between them where there are many."""

    start: int  # running steps of the engine's call before the first of them
    end: int  # with the last of them
    tokens: int  # drafted ones that were kept


class RowStay(NamedTuple):
    """One sample in one decode row of an engine without a pause; a sample that was preempted has several."""

    row: int
    start: int  # running steps of the engine's call before its first token here
    end: int  # running steps when it had left
    started: float  # time.time()
    ended: float
    tokens: int  # sampled in this stay
    accepted: tuple[AcceptedSpan, ...] = ()  # of them, those that were drafted


class Forecast(NamedTuple):
    """The first length that was predicted for a sample."""

    known: int  # tokens the sample had by then
    tokens: float  # its whole length, as predicted


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What an environment says of a trajectory that has ended."""

    reward: float | None  # None: the environment failed, or gives none
    failure: str  # what failed, with its message; "": nothing
    turns: int  # that the policy sampled
    calls: int  # of tools
    waited_s: float  # for the environment, in all
    replayed: int = 0  # of what its environment was asked for, answers that were on record from before a crash
    is_straggler: bool = False  # it waited too long and got no further turn
    unfit_tokens: int = 0  # of the observation that it ended by, since there was no room for it
    turn_rewards: list[float] = field(
        default_factory=list
    )  # of each where turns are actions; they add up to the reward
    messages: list[dict[str, Any]] = field(default_factory=list)  # of the chat, after the prompt
    # of reward functions that take TRL's environments: their values, None is left out, and what they reported
    function_rewards: dict[str, float | None] = field(default_factory=dict)
    reported: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sample of one prompt. The stop token is in token_ids: it was sampled, it is counted and trained. Of
    a trajectory of several turns token_ids has the observations too, which were not sampled."""

    prompt_index: int
    sample_index: int
    token_ids: np.ndarray  # [tokens] int32
    # [tokens] float32, of softmax(logits / temperature) over the whole vocabulary; NaN where nothing was sampled
    logprobs: np.ndarray
    sampling_logprobs: np.ndarray | None  # [tokens] float32 of the truncated distribution (top_p, top_k, min_p)
    finish_reason: str  # "stop": a stop token; "length": cut at max_new_tokens
    policy_version: int  # version of the weights that sampled it
    stays: list[RowStay] = field(default_factory=list)  # when it decoded, and in which row
    forecast: Forecast | None = None
    episode: Episode | None = None  # None: there is no environment

    @property
    def sampled(self) -> np.ndarray:
        """[tokens] bool: the tokens that the policy drew; the others were observed."""
        return ~np.isnan(self.logprobs)

    @property
    def outcome(self) -> Episode | None:
        """Its episode as the driver is told of it: what was said goes to the reward worker alone."""
        return None if self.episode is None else replace(self.episode, messages=[])

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        extra = 0 if self.sampling_logprobs is None else self.sampling_logprobs.nbytes
        return self.token_ids.nbytes + self.logprobs.nbytes + extra


@dataclass(frozen=True, kw_only=True)
class RolloutWork:
    """What the driver deals to one rollout worker: some samples of one prompt."""

    prompt_index: int
    prompt_ids: np.ndarray  # [prompt tokens] int32
    sample_indices: list[int]
    start: EpisodeStart | None = None  # None: there is no environment


class StreamOrder(NamedTuple):
    """What a rollout worker is to decode as one stream. One argument of the call: Ray serializes each by itself."""

    work: list[RolloutWork]
    step: int  # number of the batch, which the samples' noise is made from
    evaluation: bool  # sampled as held-out problems are
    number: int  # of all streams of the run, for halt()


@dataclass(frozen=True, kw_only=True)
class MicroGroupHeader:
    """All the driver reads of a micro-group; the completions themselves stay in the object store."""

    prompt_index: int
    sample_indices: list[int]
    lengths: list[int]  # tokens of each sample
    finish_reasons: list[str]
    policy_version: int
    finished_at: float  # time.time() when its last sample ended
    worker: int = 0  # index of the rollout worker
    forecasts: list[Forecast | None] = field(default_factory=list)  # of each sample; empty: none was made
    stays: list[list[RowStay]] = field(default_factory=list)  # of each sample; empty: not wanted of this prompt
    observed: list[int] = field(default_factory=list)  # tokens of each sample that it did not sample; empty: none
    episodes: list[Episode | None] = field(default_factory=list)  # of each sample; empty: there is no environment
    num_waiting: int = 0  # samples of the same stream that had not started then

    @classmethod
    def of(cls, completions: list[Completion], finished_at: float, **more: Any) -> MicroGroupHeader:
        """Of samples of one prompt; `more`: what they do not say themselves."""
        return cls(
            prompt_index=completions[0].prompt_index,
            sample_indices=[completion.sample_index for completion in completions],
            lengths=[len(completion.token_ids) for completion in completions],
            finish_reasons=[completion.finish_reason for completion in completions],
            policy_version=completions[0].policy_version,
            finished_at=finished_at,
            observed=[int((~completion.sampled).sum()) for completion in completions],
            episodes=[completion.outcome for completion in completions],
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class StreamEnd:
    """What a rollout worker says when its part is done."""

    worker: int
    stats: dict[str, float]  # by metric name
    phases: WorkerPhases  # since it was last asked


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Rewards of one micro-group, in its order. None: failed, timed out, NaN; the sample then trains nothing."""

    rewards: list[float | None]
    components: dict[str, list[float | None]]  # unweighted, by function; "FUNCTION/NAME": what it reported beside
    failures: list[str]  # one line for each failed call
    started_at: float
    finished_at: float


class ReferenceReport(NamedTuple):
    """What the driver reads of a reference worker's answer."""

    kl_sums: list[float]  # of each completion, over its tokens: policy less reference log-probability (section 3.4)
    peak_memory_bytes: int  # most memory of the worker so far


class ReferenceTokens(NamedTuple):
    """What the reference says of a completion's sampled tokens S, of softmax(logits / temperature)."""

    logprobs: np.ndarray  # [S] float32
    ids: np.ndarray  # [S, K] int32, its likeliest ids; K = objective.distill_top_k
    likely: np.ndarray  # [S, K] float32, their log-probabilities


@dataclass(frozen=True, kw_only=True)
class ReferenceResult:
    """The reference's word on one micro-group, in its order."""

    tokens: list[ReferenceTokens]
    report: ReferenceReport


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """Where a worker stands."""

    pid: int
    node: str  # host name
    phase: str  # phases.current()
    phase_s: float  # seconds since it began
    last_line: str  # newest log record
    stack: str  # innermost frames of the threads that run our code


class RowNow(NamedTuple):
    """A sample that decodes."""

    prompt_index: int
    sample_index: int
    tokens: int  # sampled so far
    predicted: float | None  # its whole length; None: nobody has predicted it


class RolloutNow(NamedTuple):
    """A rollout worker at one moment."""

    worker: int
    rows: list[RowNow]
    pages: int  # of the KV pool; 0: not allocated yet
    pages_used: int


class ClusterNow(NamedTuple):
    """What is in flight at one moment, for a screen."""

    rollout: list[RolloutNow]  # what the first few rollout workers said last
    owed: int  # samples that were dealt to rollout workers and have not arrived
    in_flight: dict[str, int]  # micro-groups at reward and reference workers, rows at the learner, queued or running


@dataclass(frozen=True, kw_only=True)
class TrainingSample:
    """A completion with its advantage: what a learner row is packed from."""

    prompt_index: int
    sample_index: int
    prompt_ids: np.ndarray  # [prompt tokens] int32
    response_ids: np.ndarray  # [tokens] int32
    advantages: tuple[float, ...]  # of each of its turns, or one of all its tokens
    engine_logprobs: np.ndarray  # [tokens] float32, NaN where a token was observed, not sampled: it is not trained
    reference: ReferenceTokens | None  # of the sampled tokens, only when the loss has a KL term or a teacher

    @property
    def sampled(self) -> np.ndarray:
        """[tokens] bool, as Completion's."""
        return ~np.isnan(self.engine_logprobs)

    @property
    def token_advantages(self) -> np.ndarray:
        """[sampled tokens] float32. A turn is what was sampled without a break."""
        sampled = self.sampled
        if len(self.advantages) == 1:
            return np.full(int(sampled.sum()), self.advantages[0], np.float32)
        begins = sampled & ~np.concatenate([[False], sampled[:-1]])
        return np.array(self.advantages, np.float32)[np.cumsum(begins)[sampled] - 1]


class SampleSpec(NamedTuple):
    """A training sample before its tokens are fetched: what the driver plans learner rows with."""

    prompt_index: int
    sample_index: int
    length: int  # response tokens
    advantages: tuple[float, ...]  # of each of its turns, or one of all its tokens


@dataclass(frozen=True, kw_only=True)
class LossTotals:
    """Denominators of the loss, of the whole update, so that any split into rows and ranks sums to the same loss."""

    num_sequences: int  # samples with a reward
    num_tokens: int  # their sampled tokens
    length_normalizer: int  # dr_grpo's constant: max_new_tokens


@dataclass(frozen=True, kw_only=True)
class RowWork:
    """What the driver deals to one learner rank: a row of a wave, its tokens still in the micro-groups."""

    row: list[SampleSpec] | None  # None: a row of weight zero
    prompt_ids: dict[int, np.ndarray]  # by prompt_index: [prompt tokens] int32
    totals: LossTotals | None  # None: its log-probabilities are kept for later updates, nothing is learned yet
    row_id: int | MaybeNone  # under which log-probabilities are kept from update to update


@dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """What a set of flat weight buckets holds. Tied parameters appear once."""

    version: int
    entries: list[tuple[str, str, tuple[int, ...], int, int]]  # name, dtype, shape, bucket, byte offset
    num_bytes: int
    bucket_bytes: int  # of every bucket but the last


@dataclass(frozen=True, kw_only=True)
class WeightSyncReport:
    """One transfer of the weights."""

    version: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class ProbeStatistics:
    """What the length probe has seen: sums over observations of features x and targets y, for each of two folds."""

    xx: np.ndarray  # [2, F, F] float64; the last feature is 1, so the last row holds the sums of x and the count
    xy: np.ndarray  # [2, F] float64
    yy: np.ndarray  # [2] float64

    @classmethod
    def zeros(cls, num_features: int) -> ProbeStatistics:
        """Of no observation."""
        return cls(np.zeros((2, num_features, num_features)), np.zeros((2, num_features)), np.zeros(2))

    def __add__(self, other: ProbeStatistics) -> ProbeStatistics:
        return ProbeStatistics(self.xx + other.xx, self.xy + other.xy, self.yy + other.yy)

    @property
    def counts(self) -> np.ndarray:
        """[2] float64: observations in each fold, as they count."""
        return self.xx[:, -1, -1]


@dataclass(frozen=True)
class ProbeFit:
    """The length probe's regression."""

    weights: np.ndarray  # [F] float64, of the features as they are
    deviation: float  # of log(tokens left) around the prediction, out of fold


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What one rollout worker's finished samples say of lengths, since its last report."""

    statistics: ProbeStatistics
    steps_with: int  # running steps of replayed groups with the predictions made for them; 0: nothing was replayed
    steps_without: int  # of the same groups without


@dataclass(frozen=True, kw_only=True)
class PublishedProbe:
    """What the driver tells every rollout worker of the length probe, beside the weights."""

    fit: ProbeFit | None  # None: nothing was fitted yet
    is_used: bool  # whether predictions order the samples; they are made in any case
