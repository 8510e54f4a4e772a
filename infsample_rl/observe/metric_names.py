"""Every metric a run can log: its name, unit and meaning, once. Standard library only.

docs/reference/metrics.md is written from this table, W&B's sections and the team's workspace are its groups, and tests
hold it against the package's sources and against what real runs log. Names are final: dashboards build on them.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """Unit and meaning of a metric. A metric that a step has no value for (no sample had a reward) is null in
    metrics.jsonl."""

    unit: str
    meaning: str


GROUPS = {
    "reward": "What the reward functions said of the step's samples.",
    "response": "Lengths of the step's samples.",
    "environment": "What environments did, where samples have one.",
    "eval": "Held-out problems, where a step was evaluated (`run.eval_every`); `step` 0 is before training.",
    "learner": "The update. Means are over its tokens; several updates a step are averaged.",
    "rollout": "Sampling. Workers decode side by side: steps and peaks are the largest worker's, counts are added.",
    "predictor": "Length prediction, where a schedule uses it.",
    "memory": "Peaks of memory.",
    "timing": "Where the time went.",
    "weight_sync": "Weights on their way to the engines.",
    "cluster": "Processes of the run.",
    "health": "What is noticed of the run itself.",
}

# <...> stands for any text: a reward function's name, a number.
METRICS = {
    "reward/mean": Metric("reward", "mean over the samples that have a reward"),
    "reward/std": Metric("reward", "standard deviation over these samples, of all prompts together"),
    "reward/failed": Metric(
        "samples", "samples without a reward: the function failed, returned none, or ran longer than reward.timeout_s"
    ),
    "reward/groups_with_signal": Metric(
        "share", "groups whose rewards differ before they are shaped; in the others there is nothing to learn"
    ),
    "reward/mean/<source>": Metric(
        "reward", "reward/mean of one source of several in data.sources, where a step has it"
    ),
    "reward/<function>": Metric(
        "reward", "mean of one function of several in reward.functions, before its weight; or of a number it reported"
    ),
    "response/length_mean": Metric("tokens", "mean length, the stop token included"),
    "response/length_std": Metric("tokens", "standard deviation of the length"),
    "response/length_max": Metric("tokens", "longest response"),
    "response/cut": Metric("share", "samples cut at rollout.max_new_tokens"),
    "response/tokens": Metric("tokens", "all tokens of the step's responses, observations among them"),
    "response/samples": Metric(
        "samples", "all samples of the step; more than it trains with objective.dynamic_sampling"
    ),
    "environment/turns_mean": Metric("turns", "mean of a trajectory's turns that the policy sampled"),
    "environment/calls_mean": Metric("calls", "mean of a trajectory's calls of tools"),
    "environment/failed": Metric("samples", "samples whose environment timed out, died or raised: they have no reward"),
    "environment/replayed": Metric("answers", "answers of environments that were on record from before a crash"),
    "environment/stragglers": Metric(
        "samples", "samples cut because their calls took longer than environment.straggler_s"
    ),
    "environment/waited_s_mean": Metric("s", "mean time that the calls of a trajectory's environment took in all"),
    "environment/observed_tokens": Metric("tokens", "tokens that environments gave: read, and not trained"),
    "eval/accuracy": Metric("reward", "mean over the samples of all held-out problems that have a reward"),
    "eval/accuracy/<source>": Metric("reward", "eval/accuracy of one source of several in data.sources"),
    "eval/<function>": Metric("reward", "reward/<function> of held-out problems: what a judge cost there, as one"),
    "eval/pass@1": Metric("reward", "the same over the first sample of every problem"),
    "eval/mean@<k>": Metric("reward", "eval/accuracy under the number of samples a problem, run.eval_samples"),
    "eval/length_mean": Metric("tokens", "mean length"),
    "eval/failed": Metric("samples", "samples without a reward"),
    "learner/loss": Metric("-", "the objective, of the whole update"),
    "learner/grad_norm": Metric(
        "-", "norm of the gradient before it is clipped at learner.max_grad_norm, mean over the updates made; 0 if none"
    ),
    "learner/lr": Metric("-", "learning rate of the step's last update"),
    "learner/updates": Metric("updates", "optimizer steps of the step: objective.epochs x objective.mini_batches"),
    "learner/skipped_updates": Metric(
        "updates", "updates without a usable sample, or whose gradient was not finite (learner.on_nonfinite=skip)"
    ),
    "learner/kl": Metric(
        "nats",
        "the KL to the reference by objective.kl, to a teacher as objective=distill takes it, else log(policy / "
        "reference); 0 without a reference",
    ),
    "learner/entropy": Metric("nats", "entropy of the policy's distribution at a token"),
    "learner/clip_fraction": Metric("share", "tokens whose gradient the clip removed; 0 with one update a step"),
    "learner/importance_mean": Metric("-", "mean importance weight of objective.importance; 1 without one"),
    "learner/logprob_diff_mean": Metric(
        "nats", "mean absolute difference of engine and learner in a token's log-probability"
    ),
    "learner/logprob_diff_max": Metric("nats", "largest such difference of the step"),
    "learner/logprob_diff_k3": Metric("nats", "KL of engine and learner, estimated by k3"),
    "learner/engine_ess": Metric(
        "share", "effective sample size of the engine's tokens for the learner's policy: 1 when the two agree"
    ),
    "rollout/running_steps": Metric("steps", "decode steps of the slowest worker, rounds of dynamic sampling added"),
    "rollout/of_bound": Metric(
        "ratio",
        "running steps over the least that the longest response, or the KV of all in the pool, takes; what is above 1 "
        "is mostly the step's tail, in which few rows are left; drafts bring it below 1",
    ),
    "rollout/rounds": Metric(
        "rounds", "rounds of sampling; above 1 when objective.dynamic_sampling drew other prompts"
    ),
    "rollout/peak_kv_bytes": Metric("bytes", "most KV that a worker held at a time"),
    "rollout/kv_pool_bytes": Metric("bytes", "KV pool of a worker, allocated once"),
    "rollout/row_utilisation": Metric("share", "rows that decoded, of those there could be, mean over the steps"),
    "rollout/preemptions": Metric("samples", "samples that had to give pages back before their end"),
    "rollout/recomputed_tokens": Metric("tokens", "tokens whose KV was computed again after a preemption"),
    "rollout/parked_tokens": Metric("tokens", "tokens whose KV was copied out of the pool and back instead"),
    "rollout/tokens_per_row_step": Metric("tokens", "tokens that a row got in a step; 1 without drafts"),
    "rollout/drafted_tokens": Metric("tokens", "tokens that were drafted and run (rollout.speculate)"),
    "rollout/accepted_tokens": Metric("tokens", "of them, those that were sampled"),
    "rollout/draft_seconds": Metric("s", "spent on drafting by the worker that spent most"),
    "rollout/prefix_cache_hits": Metric("share", "tokens sent to vLLM whose KV it found in its prefix cache"),
    "rollout/staleness": Metric(
        "updates", "how many updates behind the weights were that drew these samples (run.max_staleness=1)"
    ),
    "predictor/used": Metric("0 or 1", "whether predictions of the probe ordered this step's samples"),
    "predictor/steps_saved": Metric(
        "steps", "decode steps saved by predictions in replays of recent groups; below 0 they are not used"
    ),
    "predictor/seconds": Metric(
        "s", "time the slowest worker spent on predicting and on what is learnt from, while it sampled"
    ),
    "predictor/fit_seconds": Metric("s", "time the driver spent on fitting it after the step"),
    "predictor/log_error": Metric(
        "-", "mean |log(predicted / length)| of first predictions, samples that ended by themselves"
    ),
    "predictor/token_error": Metric("tokens", "mean |predicted - length| of the same"),
    "predictor/tau": Metric("-", "Kendall's tau-b of first predictions and lengths within a prompt, mean over prompts"),
    "memory/learner_peak_bytes": Metric(
        "bytes", "most memory of a learner rank: allocated on CUDA, of the process on a CPU"
    ),
    "memory/rollout_peak_bytes": Metric("bytes", "most memory of a rollout worker, in the same way"),
    "memory/reference_peak_bytes": Metric("bytes", "most memory of a reference worker, where there are any"),
    "timing/step": Metric("s", "the step as a whole, evaluation and checkpoint apart"),
    "timing/rollout": Metric("s", "until the last sample was there"),
    "timing/backward_after_rollout": Metric(
        "s", "from there to the end of the last backward pass: what overlap did not hide"
    ),
    "timing/update": Metric("s", "from there to the end of the optimizer's step"),
    "timing/weight_sync": Metric("s", "publishing the new weights to every engine"),
    "timing/overlap": Metric(
        "s", "time in which a learner rank worked while samples were still drawn, mean over the ranks"
    ),
    "timing/backward_lead": Metric("s", "how long before the last sample the first row was trained"),
    "timing/reward_lead": Metric("s", "how long before a group's last sample its first was scored, largest"),
    "timing/tokens_per_s": Metric("tokens/s", "sampled tokens over timing/rollout, all workers"),
    "timing/eval": Metric("s", "the evaluation after the step"),
    "timing/driver": Metric("s", "what the driver itself worked; the rest of the step it waited"),
    "weight_sync/bytes": Metric("bytes", "bytes of weights sent; 0 where engine and learner share them"),
    "cluster/rollout_workers": Metric("workers", "rollout workers when the step began"),
    "cluster/samples_moved": Metric("samples", "samples that went from a slow rollout worker to an idle one"),
    "cluster/restarts": Metric("workers", "workers started again since this start of the run"),
    "health/warnings": Metric("rules", "rules of docs/warnings.md that hold now"),
}
