"""The records that cross process borders, each with a worked example.

Arrays are numpy (int32 ids, float32 log-probabilities), so Ray's object store hands them over without a copy. Records
have no __slots__: those that have are pickled field by field in Python. One type per stage: Prompt -> Completion ->
(rewards, reference log-probabilities) -> TrainingSample -> LearnerRow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# `X | MaybeNone`: None until something has set it up, as whoever reads it knows. The type checker takes it as an X.
MaybeNone: TypeAlias = Any


class Phase(NamedTuple):
    """A phase that has ended.

    Example: Phase(name="decode", start=1763630000.25, end=1763630001.5, thread=0)
    """

    name: str
    start: float  # time.time()
    end: float
    # 0 for the first thread of the process that had a phase, 1 for the second, ...: phases of one thread nest
    thread: int


class WorkerPhases(NamedTuple):
    """What one worker has done since it was last asked. Phases that started before `until` are all here, this time or
    before.

    Example: WorkerPhases(role="rollout", index=3, node="10.0.0.7", phases=[], until=1763630002.0)
    """

    role: str
    index: int  # type: ignore[assignment]  # hides the method of tuples, which nobody calls
    node: str
    phases: list[Phase]
    until: float  # time.time()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem of a step, ready to sample.

    Example: Prompt(prompt_index=2, row=17, messages=[{"role": "user", "content": "1 + 1 = ?"}], text="<user>1 + 1 = ?",
    token_ids=np.array([5, 9, 7], np.int32), columns={"answer": "2"})
    """

    prompt_index: int  # position in the step's batch
    row: int  # row of the data source, for messages to the user
    messages: list[dict[str, str]]  # chat messages, as given to the template
    text: str  # the rendered prompt
    token_ids: np.ndarray  # [prompt tokens] int32
    columns: dict[str, Any] = field(default_factory=dict)  # every other field of the row, for the reward functions


class RowStay(NamedTuple):
    """One sample in one decode row of an engine without a pause. A preempted sample, or one that waited with its
    prefix, has several.

    Example: RowStay(row=2, start=40, end=64, started=1763630000.25, ended=1763630001.5, tokens=24)
    """

    row: int
    start: int  # running steps of the engine's call before its first token here
    end: int  # running steps when it had left
    started: float  # time.time()
    ended: float
    tokens: int  # sampled in this stay


class Forecast(NamedTuple):
    """The first length that was predicted for a sample.

    Example: Forecast(known=8, tokens=31.5)
    """

    known: int  # tokens the sample had by then
    tokens: float  # its whole length, as predicted


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sample of one prompt. The stop token is in token_ids: it was sampled, it is counted and trained.

    Example: Completion(prompt_index=0, sample_index=3, token_ids=np.array([11, 4, 2], np.int32),
    logprobs=np.array([-0.1, -2.3, -0.7], np.float32), sampling_logprobs=None, finish_reason="stop", policy_version=7)
    """

    prompt_index: int
    sample_index: int
    token_ids: np.ndarray  # [tokens] int32
    logprobs: np.ndarray  # [tokens] float32, of softmax(logits / temperature) over the whole vocabulary
    # [tokens] float32 of the truncated distribution (top_p, top_k, min_p), else None
    sampling_logprobs: np.ndarray | None
    finish_reason: str  # "stop": a stop token; "length": cut at max_new_tokens
    policy_version: int  # version of the weights that sampled it
    stays: list[RowStay] = field(default_factory=list)  # when it decoded, and in which row
    forecast: Forecast | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        extra = 0 if self.sampling_logprobs is None else self.sampling_logprobs.nbytes
        return self.token_ids.nbytes + self.logprobs.nbytes + extra


@dataclass(frozen=True, kw_only=True)
class RolloutWork:
    """What the driver deals to one rollout worker: some samples of one prompt.

    Example: RolloutWork(prompt_index=1, prompt_ids=np.array([5, 9], np.int32), sample_indices=[16, 17, 18])
    """

    prompt_index: int
    prompt_ids: np.ndarray  # [prompt tokens] int32
    sample_indices: list[int]


class StreamOrder(NamedTuple):
    """What a rollout worker is to decode as one stream. One argument of the call: Ray serializes each by itself.

    Example: StreamOrder(work=[RolloutWork(...)], step=3, evaluation=False, number=17)
    """

    work: list[RolloutWork]
    step: int  # number of the batch, which the samples' noise is made from
    evaluation: bool  # sampled as held-out problems are
    number: int  # of all streams of the run, for halt()


@dataclass(frozen=True, kw_only=True)
class MicroGroupHeader:
    """All the driver reads of a micro-group; the completions themselves stay in the object store.

    Example: MicroGroupHeader(prompt_index=0, sample_indices=[3, 1], lengths=[24, 31], finish_reasons=["stop", "stop"],
    policy_version=7, finished_at=1763630000.25)
    """

    prompt_index: int
    sample_indices: list[int]
    lengths: list[int]  # tokens of each sample
    finish_reasons: list[str]
    policy_version: int
    finished_at: float  # time.time() when its last sample ended
    worker: int = 0  # index of the rollout worker
    forecasts: list[Forecast | None] = field(default_factory=list)  # of each sample; empty: none was made
    stays: list[list[RowStay]] = field(default_factory=list)  # of each sample; empty: not wanted of this prompt
    num_waiting: int = 0  # samples of the same stream that had not started then


@dataclass(frozen=True, kw_only=True)
class StreamEnd:
    """What a rollout worker says when its part is done.

    Example: StreamEnd(worker=3, stats={"running_steps": 812.0, "row_utilisation": 0.97},
    phases=WorkerPhases("rollout", 3, "10.0.0.7", [], 1763630002.0))
    """

    worker: int
    stats: dict[str, float]  # by metric name
    phases: WorkerPhases  # since it was last asked


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Rewards of one micro-group, in its order. None: failed, timed out, NaN; the sample then trains nothing.

    Example: RewardResult(rewards=[1.0, None], components={"gsm8k": [1.0, None]}, failures=["gsm8k: timed out after 10
    s"], started_at=1763630000.30, finished_at=1763630000.31)
    """

    rewards: list[float | None]
    # the unweighted value of every reward function, and "FUNCTION/NAME" of what it reported beside
    components: dict[str, list[float | None]]
    failures: list[str]  # one line for each failed call
    started_at: float
    finished_at: float


class ReferenceReport(NamedTuple):
    """What the driver reads of a reference worker's answer. Example: ReferenceReport(kl_sums=[0.1],
    peak_memory_bytes=2_400_000)"""

    # of each completion: sum over tokens of (policy log-probability - reference log-probability), section 3.4
    kl_sums: list[float]
    peak_memory_bytes: int  # most memory of the worker so far


@dataclass(frozen=True, kw_only=True)
class ReferenceResult:
    """Reference log-probabilities of one micro-group, in its order.

    Example: ReferenceResult(logprobs=[np.array([-0.2, -2.0, -0.9], np.float32)], report=ReferenceReport([0.1],
    2_400_000))
    """

    logprobs: list[np.ndarray]  # [tokens] float32 each, of softmax(logits / temperature)
    report: ReferenceReport


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """Where a worker stands.

    Example: WorkerStatus(pid=4711, node="gpu-3", phase="decode", phase_s=61.5,
    last_line="infsample_rl.rollout.engine.sampling_engine: ...", stack="engine.py:160 in _run: ...")
    """

    pid: int
    node: str  # host name
    phase: str  # phases.current()
    phase_s: float  # seconds since it began
    last_line: str  # newest log record
    stack: str  # innermost frames of the threads that run our code


class RowNow(NamedTuple):
    """A sample that decodes.

    Example: RowNow(prompt_index=2, sample_index=7, tokens=120, predicted=181.5)
    """

    prompt_index: int
    sample_index: int
    tokens: int  # sampled so far
    predicted: float | None  # its whole length; None: nobody has predicted it


class RolloutNow(NamedTuple):
    """A rollout worker at one moment.

    Example: RolloutNow(worker=1, rows=[RowNow(2, 7, 120, 181.5)], pages=100, pages_used=81)
    """

    worker: int
    rows: list[RowNow]
    pages: int  # of the KV pool; 0: not allocated yet
    pages_used: int


class ClusterNow(NamedTuple):
    """What is in flight at one moment, for a screen.

    Example: ClusterNow(rollout=[], owed=32, in_flight={"reward": 3, "reference": 0, "learner": 1})
    """

    rollout: list[RolloutNow]  # what the first few rollout workers said last
    owed: int  # samples that were dealt to rollout workers and have not arrived
    in_flight: dict[str, int]  # micro-groups at reward and reference workers, rows at the learner, queued or running


@dataclass(frozen=True, kw_only=True)
class TrainingSample:
    """A completion with its advantage: what a learner row is packed from.

    Example: TrainingSample(prompt_index=0, sample_index=3, prompt_ids=np.array([5, 9, 7], np.int32),
    response_ids=np.array([11, 4, 2], np.int32), advantage=0.75, engine_logprobs=np.array([-0.1, -2.3, -0.7],
    np.float32), reference_logprobs=None)
    """

    prompt_index: int
    sample_index: int
    prompt_ids: np.ndarray  # [prompt tokens] int32
    response_ids: np.ndarray  # [tokens] int32
    advantage: float
    engine_logprobs: np.ndarray  # [tokens] float32
    reference_logprobs: np.ndarray | None  # [tokens] float32, only when the loss has a KL term


class SampleSpec(NamedTuple):
    """A training sample before its tokens are fetched: what the driver plans learner rows with.

    Example: SampleSpec(prompt_index=0, sample_index=3, length=3, advantage=0.75)
    """

    prompt_index: int
    sample_index: int
    length: int  # response tokens
    advantage: float


@dataclass(frozen=True, kw_only=True)
class LossTotals:
    """Denominators of the loss, of the whole update, so that any split into rows and ranks sums to the same loss.

    Example: LossTotals(num_sequences=256, num_tokens=18230, length_normalizer=256)
    """

    num_sequences: int  # samples with a reward
    num_tokens: int  # their response tokens
    length_normalizer: int  # dr_grpo's constant: max_new_tokens


@dataclass(frozen=True, kw_only=True)
class RowWork:
    """What the driver deals to one learner rank: a row of a wave, its tokens still in the micro-groups.

    Example: RowWork(row=[spec], prompt_ids={0: np.array([5, 9, 7], np.int32)}, totals=totals, row_id=None)
    """

    row: list[SampleSpec] | None  # None: a row of weight zero
    prompt_ids: dict[int, np.ndarray]  # by prompt_index: [prompt tokens] int32
    totals: LossTotals | None  # None: its log-probabilities are kept for later updates, nothing is learned yet
    row_id: int | MaybeNone  # under which log-probabilities are kept from update to update


@dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """What a set of flat weight buckets holds. Tied parameters appear once.

    Example: WeightManifest(version=7, entries=[("model.norm.weight", "float32", (64,), 0, 0)], num_bytes=256)
    """

    version: int
    entries: list[tuple[str, str, tuple[int, ...], int, int]]  # name, dtype, shape, bucket, byte offset
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class WeightSyncReport:
    """One transfer. Example: WeightSyncReport(version=7, num_bytes=269_030_016, seconds=0.31,
    checksum="9f0c5e1b22d4a871")"""

    version: int
    num_bytes: int
    seconds: float
    checksum: str | None  # of all parameters, equal on both sides; None where cluster.weight_checksum is off


@dataclass(frozen=True)
class ProbeStatistics:
    """What the length probe has seen: sums over observations of features x and targets y, for each of two folds.

    Sums of parts add up to the sum of the whole: ProbeStatistics.zeros(3) + parts[0] + parts[1]
    """

    # [2, F, F] float64, sums of x x^T; the last feature is 1, so the last row holds the sums of x and the count
    xx: np.ndarray
    xy: np.ndarray  # [2, F] float64
    yy: np.ndarray  # [2] float64

    @classmethod
    def zeros(cls, num_features: int) -> ProbeStatistics:
        """Of no observation."""
        return cls(np.zeros((2, num_features, num_features)), np.zeros((2, num_features)), np.zeros(2))

    def __add__(self, other: ProbeStatistics) -> ProbeStatistics:
        return ProbeStatistics(self.xx + other.xx, self.xy + other.xy, self.yy + other.yy)

    def decayed(self, factor: float) -> ProbeStatistics:
        """Every observation counting `factor` times as much."""
        return ProbeStatistics(self.xx * factor, self.xy * factor, self.yy * factor)

    @property
    def counts(self) -> np.ndarray:
        """[2] float64: observations in each fold, as they count."""
        return self.xx[:, -1, -1]


@dataclass(frozen=True)
class ProbeFit:
    """The length probe's regression.

    Example: ProbeFit(weights=np.array([0.3, -0.1, 4.2]), deviation=0.4, explained=0.6, penalty=100.0)
    """

    weights: np.ndarray  # [F] float64, of the features as they are
    deviation: float  # of log(tokens left) around the prediction, out of fold
    # share of the variance of log(tokens left) that is predicted, out of fold; <= 0: no better than the mean
    explained: float
    penalty: float


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What one rollout worker's finished samples say of lengths, since its last report.

    Example: ProbeReport(statistics=ProbeStatistics.zeros(66), steps_with=208, steps_without=231)
    """

    statistics: ProbeStatistics
    steps_with: int  # running steps of replayed groups with the predictions made for them; 0: nothing was replayed
    steps_without: int  # of the same groups without


@dataclass(frozen=True, kw_only=True)
class PublishedProbe:
    """What the driver tells every rollout worker of the length probe, beside the weights.

    Example: PublishedProbe(fit=None, is_used=False)
    """

    fit: ProbeFit | None  # None: nothing was fitted yet
    is_used: bool  # whether predictions order the samples; they are made in any case
