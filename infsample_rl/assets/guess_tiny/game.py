"""The environment of the experiment guess_tiny: a number is guessed in a few turns; what comes of a guess is said."""

from __future__ import annotations

from typing import Any

TURNS = 5
LARGEST = 63


class Guess:
    """In gymnasium's form; the row's column `answer` is the number. The reward is 1 for the guess that finds it."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin; the prompt has said all."""
        self.number, self.turns = int((options or {})["answer"]), 0
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """What comes of a guess."""
        self.turns += 1
        is_found = action.strip() == str(self.number)
        return self.say(action.strip()), float(is_found), is_found, self.turns == TURNS, {}

    def say(self, guess: str) -> str:
        """Where the number is."""
        if not guess.isdigit():
            return "a number"
        return "higher" if int(guess) < self.number else "lower"


class Blind(Guess):
    """Says nothing that helps: a policy that learns all the same has not learned from what it observes."""

    def say(self, guess: str) -> str:
        """The same, whatever was guessed."""
        return "no"
