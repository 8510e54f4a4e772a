"""Group-relative advantages, and DAPO's punishment of overlong responses. Pure Python: the driver calls it once a
prompt's last reward is in."""

from __future__ import annotations

import math


def group_advantages(rewards: list[float | None], kind: str) -> list[float]:
    """Advantages of one group. [1, 0, 0, 0] with mean_only -> [0.75, -0.25, -0.25, -0.25].

    std: A_i = (r_i - mean(r)) / (std(r) + 1e-6), the sample std (ddof 1), the paper's equation 2 (GRPO, arXiv
    2402.03300). mean_only: A_i = r_i - mean(r), the paper's section 3.4 (Dr. GRPO, arXiv 2503.20783). rloo: A_i = r_i -
    mean of the others = (r_i - mean(r)) n / (n - 1) (RLOO, arXiv 2402.14740). A reward that is None, NaN or infinite
    gets advantage 0 and is outside mean and std. Equal rewards give exact zeros, and so do fewer than two valid ones.
    """
    valid = [float(reward) for reward in rewards if reward is not None and math.isfinite(reward)]
    # Checked before the mean is formed: the rounded mean of equal rewards can differ from them.
    if len(valid) < 2 or min(valid) == max(valid):
        return [0.0] * len(rewards)
    mean = math.fsum(valid) / len(valid)
    scale = 1.0
    if kind == "std":
        scale = 1.0 / (math.sqrt(math.fsum((reward - mean) ** 2 for reward in valid) / (len(valid) - 1)) + 1e-6)
    elif kind == "rloo":
        scale = len(valid) / (len(valid) - 1)
    return [(reward - mean) * scale if reward is not None and math.isfinite(reward) else 0.0 for reward in rewards]


def turn_advantages(rewards: list[float | None], of_turns: list[list[float]], kind: str) -> list[tuple[float, ...]]:
    """Advantages of every turn of a group's trajectories: turn k's is group_advantages of what each still earned from
    turn k on, among those that have a turn k.

    rewards: of the whole trajectories, as the objective shapes them; of_turns: what each of their turns added. Rewards
    [3, 1] of turns [[1, 2], [1]] with mean_only -> [(1, 0), (-1,)]: both turns k = 0 were worth 3 and 1, and the second
    has nothing to compare with. A trajectory whose reward is None has advantages of 0.
    """
    found: list[list[float]] = [[] for _ in rewards]
    left = list(rewards)
    for turn in range(max(map(len, of_turns), default=0)):
        members = [index for index, own in enumerate(of_turns) if len(own) > turn]
        for index, advantage in zip(members, group_advantages([left[i] for i in members], kind), strict=True):
            found[index].append(advantage)
            if (now := left[index]) is not None:  # rounded: what is left after equal turns is to be equal
                left[index] = round(now - of_turns[index][turn], 12)
    return [tuple(advantages) for advantages in found]


def overlong_penalty(length: int, max_new_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """What is added to the reward of a response of `length` tokens, from 0 down to -penalty (DAPO, arXiv 2503.14476,
    equation 13).

    0 up to max_new_tokens - buffer_tokens, from there a straight line down to -penalty at max_new_tokens. buffer_tokens
    = 0: always 0. Example: of 100 tokens, buffer 20 and penalty 1: 80 -> 0.0, 85 -> -0.25, 100 -> -1.0.
    """
    excess = length - (max_new_tokens - buffer_tokens)
    return -penalty * excess / buffer_tokens if excess > 0 else 0.0
