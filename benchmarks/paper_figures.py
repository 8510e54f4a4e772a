"""Figures printed in the paper: tables 1 (ablation) and 2 (scheduler choice), running steps and mean lengths on
Qwen3-1.7B and Qwen3-8B."""

MODELS = ("Qwen3-1.7B", "Qwen3-8B")
PAPER_NAMES = {"gsm8k": "GSM8K", "math500": "MATH", "kk": "KK"}  # our data set -> the paper's

# data set: method: ((steps, mean length) of Qwen3-1.7B, the same of Qwen3-8B)
ABLATION = {
    "GSM8K": {
        "naive": ((3250, 186), (3250, 186)),
        "fixed_slot": ((2467, 186), (2467, 186)),
        "dynamic_slot": ((748, 72), (360, 21)),
        "infinite *": ((1739, 186), (1739, 186)),
        "infinite": ((1770, 186), (1769, 186)),
    },
    "MATH": {
        "naive": ((7005, 602), (5051, 395)),
        "fixed_slot": ((6098, 602), (4190, 395)),
        "dynamic_slot": ((1395, 143), (1626, 172)),
        "infinite *": ((5126, 602), (3492, 395)),
        "infinite": ((5203, 602), (3533, 395)),
    },
    "KK": {
        "naive": ((7037, 591), (4682, 282)),
        "fixed_slot": ((6129, 591), (3550, 282)),
        "dynamic_slot": ((1104, 102), (696, 38)),
        "infinite *": ((5089, 591), (2586, 282)),
        "infinite": ((5200, 591), (2599, 282)),
    },
}

# data set: method: steps of Qwen3-1.7B, of Qwen3-8B; the methods of both tables stand above
SCHEDULER_CHOICE = {
    "GSM8K": {"fptas": (2100, 2100), "sjf": (1775, 1774)},
    "MATH": {"fptas": (6021, 4154), "sjf": (5380, 3624)},
    "KK": {"fptas": (6014, 3531), "sjf": (5219, 2695)},
}
for _name, _methods in ABLATION.items():
    for _method in ("fixed_slot", "infinite *", "infinite"):
        SCHEDULER_CHOICE[_name][_method] = tuple(steps for steps, _ in _methods[_method])

GROUP_SIZE, SLOTS, CAP = 32, 4, 1024  # of the paper's experiments


def least_kept_mean(true_mean: float, group_size: int = GROUP_SIZE, slots: int = SLOTS, cap: int = CAP) -> float:
    """Least expected mean length of the first `group_size` samples to finish on `slots` slots that are refilled at
    once.

    When the G-th sample finishes, G + g - 1 have been started, in the order drawn, so their expected sum is (G + g - 1)
    x true mean; the g - 1 dropped ones are at most `cap` tokens each. least_kept_mean(186) -> 107.4, where the paper
    prints 72 and 21
    """
    return ((group_size + slots - 1) * true_mean - (slots - 1) * cap) / group_size
