"""The settings of sampling: schedule, prediction, stopping, KV memory. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from infsample_rl.config.fields import check_bounds, check_temperature, parse_bytes, setting
from infsample_rl.config.pairs import check_pairs

SCHEDULES = (
    "token_budget",
    "full_group",
    "naive",
    "fixed_slot",
    "dynamic_slot",
    "arrival",
    "fptas",
    "sjf",
    "infinite",
    "lpt",
)
ENGINES = ("native", "vllm")
PREDICTORS = ("none", "bert", "probe")
PREDICTED_SCHEDULES = ("fptas", "sjf", "infinite", "lpt")  # orders that need predicted lengths
PAPER_PREFIX_TOKENS = 16  # k of the paper
KV_DTYPES = ("auto", "int8")
PREEMPTIONS = ("auto", "recompute", "park")
DEFAULT_SLOTS = 4  # of fixed-slot schedules, the paper's
MOST_DRAFTS = 7  # tokens drafted for one row of a step
MOST_QUERIES = 64  # rows and drafted tokens of a step with drafts
MOST_ROWS = 256  # of token_budget, where rollout.max_rows does not say
VLLM_CPU_BLOCK = 32  # tokens; its attention on the CPU takes multiples of it
PLANNED_PROMPTS = 2  # whose KV the default budget adds to its full responses with rollout.prompts_at_once=auto

_PREDICTED = f"rollout.schedule={'|'.join(PREDICTED_SCHEDULES)}"
PAIRS = (  # (when, needs, why): see pairs.py
    ("rollout.kv_budget_tokens>0", "rollout.kv_budget_bytes=none", "give one of them"),
    ("rollout.max_rows>0", "rollout.schedule=token_budget", "the others take rollout.slots"),
    ("rollout.schedule=dynamic_slot", "rollout.slots<=rollout.group_size", ""),
    ("rollout.predictor=bert", _PREDICTED, "no other waits for it; take predictor=probe or schedule=infinite"),
    ("rollout.predictor=none", "rollout.prefix_tokens<=0", ""),
    ("rollout.prefix_tokens>0", _PREDICTED, "no other waits for predictions; leave prefix_tokens out"),
    ("", "rollout.prefix_tokens<rollout.max_new_tokens", ""),
    ("rollout.predictor=bert", "rollout.prefix_tokens>0", "the paper takes 16"),
    (
        f"rollout.engine=vllm {_PREDICTED}",
        "rollout.predictor=none|bert",
        "the probe reads hidden states, which vLLM keeps to itself",
    ),
    ("rollout.engine=vllm", "rollout.kv_dtype=auto", "only the native engine has 8-bit KV"),
    ("rollout.engine=vllm", "rollout.speculate=auto|0", "only the native engine drafts"),
    ("rollout.engine=vllm", "rollout.preemption=auto|recompute", "vLLM computes KV that gave way again"),
    ("rollout.engine=vllm", "rollout.schedule=" + "|".join(name for name in SCHEDULES if name != "dynamic_slot"), ""),
    ("rollout.tensor_parallel>1", "rollout.engine=vllm", "the native engine has one device"),
    (
        f"rollout.predictor=probe {_PREDICTED}",
        "rollout.prefix_tokens>1",
        "the state before the first token is the same for all samples; leave it out",
    ),
)


@dataclass(kw_only=True)
class RolloutConfig:
    """Sampling: G completions of every prompt through a fixed KV pool."""

    group_size: int = setting(8, "G, completions of every prompt", low=1)
    slots: int | None = setting(
        None,
        "rows of a fixed-slot schedule (none: as many as the KV budget holds full responses, without one "
        f"{DEFAULT_SLOTS}; full_group: G); token_budget: the memory of how many full responses (none: all that is "
        "free)",
        low=1,
    )
    engine: str = setting(
        "native",
        "what computes the tokens: this package's own engine, or vLLM in an interpreter of its own",
        choices=ENGINES,
    )
    vllm_python: str | None = setting(
        None,
        "interpreter that has vLLM, on every rollout machine; none: the one that `make vllm` makes",
        read_if=lambda c: c.rollout.engine == "vllm",
    )
    tensor_parallel: int = setting(1, "GPUs of one rollout worker over which vLLM splits the model", low=1)
    schedule: str = setting("token_budget", "which sample decodes next (docs/engine.md)", choices=SCHEDULES)
    predictor: str = setting(
        "probe", "length predictor: probe learns while the run samples; bert is the paper's, frozen", choices=PREDICTORS
    )
    predictor_path: str | None = setting(
        None,
        "folder of a trained bert predictor; none: a small one trains on the run's first 64 groups",
        read_if=lambda c: c.rollout.predictor == "bert",
    )
    prefix_tokens: int | None = setting(
        None,
        "k, tokens of every sample decoded before fptas, sjf, infinite and lpt start; none: 16 with a predictor",
        low=0,
    )
    epsilon: float = setting(
        0.1,
        "rounding of fptas and infinite (Algorithm 2)",
        above=0,
        read_if=lambda c: c.rollout.schedule in ("fptas", "infinite"),
    )
    max_new_tokens: int = setting(256, "longest response in tokens", low=1)
    temperature: float = setting(1.0, "0 is exact argmax", low=0, high=10)
    top_p: float = setting(1.0, "nucleus mass kept; 1: all", above=0, high=1)
    top_k: int = setting(0, "most probable tokens kept; 0: all", low=0)
    min_p: float = setting(0.0, "tokens below min_p x the largest probability are dropped", low=0, high=1)
    stop_token_ids: list[int] = setting([], "stop ids beside those of the generation config and the tokenizer")
    stop_strings: list[str] = setting(
        [], "texts that end a sample at the token that completes one; rewards get the text before it"
    )
    bad_token_ids: list[int] = setting(
        [], "ids never sampled; the policy is the softmax over the others, in engine, learner and reference", low=0
    )
    prompts_at_once: str = setting(
        "auto",
        "prompts resident in one worker at a time; auto: another one whenever rows and pages that the samples of the "
        "resident ones cannot fill are idle, within the KV budget",
    )
    page_size: int = setting(
        16,
        f"tokens of a KV page; with vLLM on the CPU the next multiple of {VLLM_CPU_BLOCK}",
        low=1,
        high=1024,
    )
    kv_budget_tokens: int | None = setting(None, "all KV tokens of a worker, prompts included, instead of slots", low=1)
    kv_budget_bytes: str | None = setting(
        None,
        "the same in bytes, as 24GB or 512MiB; auto: of what is free after the weights and, colocated, the learner's "
        "planned peak, 0.9 on a GPU, half on the CPU among its workers",
    )
    kv_dtype: str = setting(
        "auto",
        "dtype of KV pages; auto: the model's; int8: 8 bits with scales",
        choices=KV_DTYPES,
    )
    speculate: str = setting(
        "auto",
        "tokens drafted for every row of a step, 0 to 7, from what samples said before; they change no "
        "sample; auto: as many as pay, with a C++ compiler: in float32 on the CPU, or on a GPU",
    )
    max_rows: int | None = setting(None, f"most rows of token_budget at a time; none: {MOST_ROWS}", low=1)
    preemption: str = setting(
        "auto",
        "KV of a preempted sample: recompute, or park outside the pool (with GPUs in host memory, else in a file of "
        "the temporary folder); auto: park if there is a place; a path: park in a file there, on a disk of each "
        "rollout machine",
    )
    micro_group_size: int | None = setting(None, "samples of one prompt streamed together; none: slots, or 4", low=1)

    def __post_init__(self) -> None:
        if isinstance(self.kv_budget_bytes, int):
            self.kv_budget_bytes = str(self.kv_budget_bytes)
        if isinstance(self.prompts_at_once, int):
            self.prompts_at_once = str(self.prompts_at_once)
        self.speculate = str(self.speculate)
        check_bounds("rollout", self)
        check_temperature("rollout.temperature", self.temperature)
        check_pairs(PAIRS, rollout=self)
        if self.prompts_at_once != "auto" and not re.fullmatch("0*[1-9][0-9]*", self.prompts_at_once):
            raise ValueError(
                f"rollout.prompts_at_once must be auto or a whole number >= 1, got {self.prompts_at_once!r}"
            )
        if self.speculate != "auto" and self.speculate not in map(str, range(MOST_DRAFTS + 1)):
            raise ValueError(
                f"rollout.speculate must be auto or a whole number from 0 to {MOST_DRAFTS}, got {self.speculate!r}"
            )
        if self.speculate not in ("auto", "0") and not self.speculates:
            other = "schedule" if self.schedule == "dynamic_slot" else "kv_dtype"
            raise ValueError(
                f"rollout.speculate={self.speculate} does not go with rollout.{other}={getattr(self, other)}; take "
                "rollout.speculate=auto"
            )
        if "" in self.stop_strings:
            raise ValueError(
                f"rollout.stop_strings must not hold an empty string, got {self.stop_strings}; take it out"
            )
        if any("\N{REPLACEMENT CHARACTER}" in string for string in self.stop_strings):
            raise ValueError(
                "rollout.stop_strings must not hold U+FFFD, which incomplete characters decode to, got "
                f"{self.stop_strings}"
            )
        if self.kv_budget_bytes not in (None, "auto"):
            parse_bytes(self.kv_budget_bytes)
        if self.preemption not in PREEMPTIONS and self.park_folder is None:
            raise ValueError(
                f"rollout.preemption must be one of {', '.join(PREEMPTIONS)}, or the path of a folder (with a /), got "
                f"{self.preemption!r}"
            )

    @property
    def park_folder(self) -> str | None:
        """The folder for a file of parked KV that rollout.preemption names, if any."""
        return self.preemption if "/" in self.preemption else None

    @property
    def parks(self) -> bool:
        """Whether KV that gives way may be parked outside the pool."""
        return self.schedule == "token_budget" and self.preemption != "recompute" and self.engine == "native"

    @property
    def num_prefix_tokens(self) -> int:
        """k: tokens every sample decodes before a schedule that waits for predicted lengths starts; 0: there is no such
        phase."""
        if self.prefix_tokens is not None:
            return self.prefix_tokens
        if self.schedule not in PREDICTED_SCHEDULES or self.predictor == "none":
            return 0
        fewest = 2 if self.predictor == "probe" else 1  # the state before the first token is the same for all samples
        return min(PAPER_PREFIX_TOKENS, self.max_new_tokens - 1) if self.max_new_tokens > fewest else 0

    @property
    def probes(self) -> bool:
        """Whether the probe is asked: by a schedule that reads predictions, of an engine that shows hidden states."""
        reads = self.schedule == "token_budget" or self.schedule in PREDICTED_SCHEDULES
        return self.predictor == "probe" and reads and self.engine == "native"

    @property
    def speculates(self) -> bool:
        """Whether tokens may be drafted: not where when a sample ends decides whether it is kept, nor where a drafted
        token's KV would change that of others."""
        native = self.engine == "native" and self.kv_dtype == "auto"
        return self.speculate != "0" and self.schedule != "dynamic_slot" and native

    @property
    def trains_bert(self) -> bool:
        """Whether a bert predictor is trained on the run's own first groups: no folder has one."""
        return self.predictor == "bert" and self.predictor_path is None and self.num_prefix_tokens > 0

    @property
    def num_slots(self) -> int | None:
        """Full responses that the default KV budget holds, and rows of a fixed-slot schedule: slots, or G for
        `full_group`. None: as many as the budget given holds (kv_budget.rows_in)."""
        if self.schedule == "full_group":
            return self.group_size
        return None if self.has_budget and self.slots is None else self._filled(self.slots or DEFAULT_SLOTS)

    @property
    def has_budget(self) -> bool:
        """Whether the KV budget is one of its own, not that of slots."""
        return self.takes_free_memory or self.kv_budget_tokens is not None or self.kv_budget_bytes is not None

    @property
    def takes_free_memory(self) -> bool:
        """Whether the KV pool has all the memory that is free: as kv_budget_bytes=auto says, or token_budget where
        nothing says how much."""
        given = (self.slots, self.kv_budget_tokens, self.kv_budget_bytes)
        return self.kv_budget_bytes == "auto" or (self.schedule == "token_budget" and given == (None, None, None))

    @property
    def most_rows(self) -> int:
        """Most rows that decode at a time, in a pool however large."""
        most = self._filled(self.max_rows or MOST_ROWS)
        if self.schedule == "dynamic_slot":
            most = min(most, self.group_size)
        return most if self.schedule == "token_budget" else self.num_slots or most

    def _filled(self, rows: int) -> int:
        """Of so many rows those that the samples of the resident prompts can fill."""
        return rows if self.prompts_at_once == "auto" else min(rows, self.group_size * int(self.prompts_at_once))

    @property
    def most_prompts(self) -> int:
        """Most prompts resident together: those of prompts_at_once; auto: one a row."""
        return self.most_rows if self.prompts_at_once == "auto" else int(self.prompts_at_once)

    @property
    def planned_prompts(self) -> int:
        """Prompts whose KV the default budget adds to that of its full responses. With auto more of them may be
        resident, in pages that no response needs."""
        return PLANNED_PROMPTS if self.prompts_at_once == "auto" else int(self.prompts_at_once)

    @property
    def micro_group(self) -> int:
        """Samples streamed together."""
        return self.micro_group_size or min(self.slots or DEFAULT_SLOTS, self.group_size)
