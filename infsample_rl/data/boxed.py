"""The answer in a LaTeX box: what gold answers and responses are read by alike."""

from __future__ import annotations

import re

# the column of a row's own `answer`, where the gold answer cut from it has taken its name
RAW_ANSWER = "answer_as_given"


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...}, braces balanced; None without one.
    last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"."""
    matches = list(re.finditer(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{$]+))", text))
    if not matches:
        return None
    last = matches[-1]
    if last["bare"]:  # \boxed 5
        return last["bare"].rstrip(".,")
    depth = 1
    for position in range(last.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0) if text[position - 1] != "\\" else 0
        if depth == 0:
            return text[last.end() : position].strip()
    return None
