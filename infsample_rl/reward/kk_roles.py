"""Which role a free text finally gives to each inhabitant of a knights-and-knaves puzzle. Standard library only.

    final_roles("Suppose Zoey is a knave... no.\\n**Answer:** Zoey and Ethan are knights", ["Zoey", "Ethan"])
    -> {"Zoey": True, "Ethan": True}

One pass over the text's tokens (names, roles, "is", "not", "both", ...) collects (name, role) pairs. What is only
supposed or reported ("if Zoey is a knight", "Zoey says Ethan is a knave") gives no pair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

KNIGHT = r"knights?|truth[- ]?tell(?:ers?|ing)|truthful|honest|(?:always )?(?:tells?|telling|speaks?) (?:the )?truth"
KNAVE = r"knaves?|liars?|lying|dishonest|(?:always )?lies?"
_LABEL = re.compile(
    r"\b(?:answers?|conclusion|solution)\b[ \t]*(?:is|are)?[ \t]*[:=\n]|\banswers? (?:is|are)\b|\bin "
    r"conclusion\b|<answer>",
    re.IGNORECASE,
)
_KINDS = {
    "knight": rf"\b(?:{KNIGHT})\b",
    "knave": rf"\b(?:{KNAVE})\b",
    "supposed": r"\b(?:suppos\w*|assum\w*|whether|either|would|could|might|may|were|case|imagine|"
    r"consider\w*|possib\w*|hypothe\w*|impossible|try)\b",
    # these also undo what their sentence said before: "Zoey is a knight or a knave"
    "condition": r"\b(?:if|iff|or|unless)\b",
    "reported": r"\b(?:says?|said|saying|claim\w*|stat(?:es?|ed|ing|ements?)|"
    r"declar\w*|remark\w*|mention\w*|assert\w*|told|tells (?:us|you|me)"
    r"|(?:true|false|untrue) that)\b",
    "verdict": r"\b(?:is|are|must be) (?:true|false|untrue)\b",
    "consequence": r"\b(?:so(?! is| are)|therefore|thus|hence|meaning|which "
    r"means|making|makes|but|because|since|while|whereas)\b",
    "same": r"\b(?:so|as) (?:is|are)\b",
    "too": r"\b(?:too|as well)\b",
    "nobody": r"\b(?:neither|none|nobody|no one)\b",
    "others": r"\b(?:others?|rest|remaining|everyone else|everybody else)\b",
    "pair": r"\bboth\b",
    "all": r"\b(?:all|everyone|everybody|each)\b",
    "not": r"\b(?:not|never|cannot|\w+n't)\b",
    "and": r"\b(?:and|nor)\b|[,&+]",
    "link": r"\b(?:is|are|was)\b|->|=>|[:=(>-]",
    "bar": r"\|",
    "filler": r"\b(?:an?|the|be|being|must|has|have|to|does|do|did|can|also|indeed|definitely|certainly|clearly|in "
    r"fact|actually|really|truly|one|of"
    r"|them|they|these|turns? out|as|role|identity|type|in turn|on the other "
    r"hand|however|meanwhile|respectively|only|two|three|four|five"
    r"|inhabitants?|islanders?|people|persons?|s)\b|\(?\b\d+[.)]|[\[\]{}\"')]",
    "question": r"\?",
    "stop": r"[.!;]",
    "newline": r"\n",
    "word": r"\w+",
}


def final_roles(text: str, names: list[str]) -> dict[str, bool] | None:
    """The role (True: knight) a response finally gives to each of `names`; None when one is missing or contradictory.

    The part after the last "Answer:" (or <answer>, "the answer is", "Conclusion:") counts where it names any role;
    without such a part the last role of every name counts, and only one sentence that contradicts itself is refused.
    """
    plain = _plain(text)
    thought, end_of_thought, rest = plain.rpartition("</think>")
    if end_of_thought and _read(rest, names):
        plain = rest
    # the last few: a text that loops on "Answer:" stays cheap
    for label in reversed(list(_LABEL.finditer(plain))[-8:]):
        part = plain[label.end() :]
        part = part.split("</answer>")[0] if label[0].lower() == "<answer>" else part
        if pairs := _read(part, names):
            return _agreed(pairs, names, {pair.sentence for pair in pairs})
        bare = _only_roles(part)
        if len(bare) == len(names):
            return dict(zip(names, bare, strict=True))
    return _agreed(_read(plain, names), names, set())


@dataclass(frozen=True)
class _Pair:
    name: str
    knight: bool
    sentence: int


def _agreed(pairs: list[_Pair], names: list[str], strict_sentences: set[int]) -> dict[str, bool] | None:
    """The last role of every name; None if one is missing, or another role stands in its sentence or a strict one."""
    last = {pair.name: pair for pair in pairs}
    if set(last) != set(names):
        return None
    for pair in pairs:
        final = last[pair.name]
        if pair.knight != final.knight and (pair.sentence == final.sentence or pair.sentence in strict_sentences):
            return None
    return {name: last[name].knight for name in names}


def _plain(text: str) -> str:
    """The text without markdown and LaTeX marks, with plain quotes and dashes, and without quoted statements."""
    text = re.sub(r"[\u2018\u2019]", "'", re.sub(r"[\u201c\u201d]", '"', text))
    text = re.sub(r"[\u2013\u2014]", "-", re.sub(r"[\u2192\u21d2]", "->", text))
    text = re.sub(r"\\\\", "\n", text)
    text = re.sub(r"\\(?:boxed|fbox|text\w*|math\w*|quad|[,;!: ])|[*`#~$]|(?<!\w)_+|_+(?!\w)|(?<=\w)'s\b", " ", text)
    reported = rf"(?:{_KINDS['reported']}|{_KINDS['verdict']})"
    for match in reversed(list(re.finditer(r'"[^"\n]*\s[^"\n]*"', text))):
        before = text[max(0, match.start() - 40) : match.start()].rpartition("\n")[2]
        after = text[match.end() : match.end() + 40].partition("\n")[0]
        about_roles = re.search(rf"\b(?:{KNIGHT}|{KNAVE})\b", match[0], re.IGNORECASE)
        if about_roles and re.search(rf"\b{reported}", f"{before} {after}", re.IGNORECASE):
            text = f"{text[: match.start()]} quotation {text[match.end() :]}"
    return text


def _tokens(text: str, names: list[str]) -> list[tuple[str, str]]:
    """(kind, text) of every token. A name is matched in its own case where that occurs at all ("Will", not "will")."""
    longest_first = [re.escape(name) for name in sorted(names, key=len, reverse=True)]
    spellings = [name if re.search(rf"\b{name}\b", text) else f"(?i:{name})" for name in longest_first]
    kinds = "|".join(rf"(?P<{kind}>(?i:{pattern}))" for kind, pattern in _KINDS.items())
    pattern = re.compile(rf"(?P<name>\b(?:{'|'.join(spellings)})\b)|{kinds}")
    return [(str(match.lastgroup), match[0]) for match in pattern.finditer(text)]


def _only_roles(text: str) -> list[bool]:
    """The roles of an answer that lists nothing else ("knight, knave"); empty for any other text."""
    left_out = ("and", "filler", "newline", "stop", "bar", "link")
    tokens = [kind for kind, _ in _tokens(text, ["\0"]) if kind not in left_out]
    return [kind == "knight" for kind in tokens] if set(tokens) <= {"knight", "knave"} else []


def _read(text: str, names: list[str]) -> list[_Pair]:
    """Every (name, role) pair a text states, in order."""
    reader = _Reader(names, _tokens(text, names))
    for position, (kind, token) in enumerate(reader.tokens):
        reader.position = position
        reader.take(kind, token)
    reader.end_clause()
    return reader.pairs


@dataclass
class _Reader:
    """One pass over the tokens. A clause is "SUBJECTS is [not] ROLE" or "ROLE: NAMES"."""

    names: list[str]
    tokens: list[tuple[str, str]]
    position: int = 0
    pairs: list[_Pair] = field(default_factory=list)
    sentence: int = 0
    muted: str = ""  # "supposed" to the sentence's end, "reported" to its end, a verdict or a consequence
    subjects: list[str] = field(default_factory=list)
    linked: bool = False  # "is" came after the subjects (or after the leading role)
    plural: bool = False
    negated: bool = False
    leading_role: bool | None = None  # of "Knights: Zoey, Ethan"
    listed: list[str] = field(default_factory=list)  # names after a leading role
    last_role: bool | None = None  # for "and so is Ethan", "Ethan is not"
    same: bool = False

    def take(self, kind: str, token: str) -> None:
        """Advance by one token."""
        if kind in ("name", "knight", "knave", "not", "and", "newline", "link"):
            {"name": self._name, "not": self._not, "and": self._and, "newline": self._newline, "link": self._link}.get(
                kind, self._role
            )(token)
        elif kind in ("nobody", "others", "pair", "all"):
            self._group(kind)
        elif kind in ("supposed", "condition", "reported"):
            self._mute(kind)
        elif kind in ("stop", "question"):
            self._end_sentence(drop=kind == "question")
        elif kind in ("consequence", "verdict") and self._previous(1) != "link":  # not in "Zoey is therefore a knight"
            self.end_clause()
            self.muted = "" if self.muted == "reported" else self.muted
        elif kind == "same":
            self.end_clause()
            self.same = True
        elif kind == "too" and self.subjects and self.linked and self.last_role is not None:
            self._state(self.subjects, self.last_role)
        elif kind == "bar":
            self.linked = True
        elif kind == "word":
            self.listed = (
                self.listed[:-1]
                if self._previous(1) == "name" and self._previous(2) in ("newline", "link")
                else self.listed
            )
            self.end_clause(trailing_negation=False)

    def end_clause(self, trailing_negation: bool = True) -> None:
        """Forget the clause, keeping what it stated: its list of names, and "Ethan is not" after another's role."""
        if trailing_negation and self.subjects and self.linked and self.negated and self.last_role is not None:
            self._state(self.subjects, not self.last_role)
        if self.leading_role is not None and self.listed:
            self._state(self.listed, self.leading_role)
        self.subjects, self.listed, self.leading_role = [], [], None
        self.linked = self.plural = self.negated = self.same = False

    def _state(self, names: list[str], knight: bool) -> None:
        if not self.muted:
            self.pairs += [_Pair(name, knight, self.sentence) for name in names]
        self.last_role = knight

    def _end_sentence(self, drop: bool = False) -> None:
        self.end_clause()
        if drop:
            self.pairs = [pair for pair in self.pairs if pair.sentence != self.sentence]
        self.sentence += 1
        self.muted, self.last_role = "", None

    def _previous(self, distance: int) -> str:
        return self.tokens[self.position - distance][0] if self.position >= distance else ""

    def _before_fillers(self) -> str:
        return next((kind for kind, _ in reversed(self.tokens[: self.position]) if kind != "filler"), "")

    def _name(self, token: str) -> None:
        name = next(name for name in self.names if name.lower() == token.lower())
        if self.same and self.last_role is not None:
            self._state([name], self.last_role)
        elif self.leading_role is not None and self.linked:
            self.listed.append(name)
        elif self.subjects and not self.linked and self._previous(1) == "and":
            self.subjects.append(name)
        else:
            keep_negation = self.negated and self._previous(1) == "nobody"
            self.end_clause(trailing_negation=not keep_negation)
            self.subjects, self.negated, self.plural = [name], keep_negation, keep_negation

    def _role(self, token: str) -> None:
        knight = self.tokens[self.position][0] == "knight"
        if self.listed and self._before_fillers() == "name":  # "The knight is Zoey, Ethan a knave"
            self._last_listed_is_subject()
        if not self.subjects:
            if self._previous(1) != "link" or self.leading_role is None:
                self.end_clause()
            self.leading_role, self.linked, self.listed = knight, False, []
            return
        roles = self._roles_from_here()
        if len(self.subjects) > 1 and len(roles) == len(self.subjects):  # "Zoey and Ethan are a knight and a knave"
            for name, role in zip(self.subjects, roles, strict=True):
                self._state([name], role != self.negated)
        else:
            together = self.plural or token.lower().endswith("s") or len(self.subjects) == 1
            self._state(self.subjects if together else self.subjects[-1:], knight != self.negated)
        self.subjects, self.negated = [], False
        self.end_clause()

    def _roles_from_here(self) -> list[bool]:
        roles: list[bool] = []
        for kind, _ in self.tokens[self.position :]:
            if kind in ("knight", "knave"):
                roles.append(kind == "knight")
            elif kind not in ("and", "filler"):
                break
        return roles

    def _last_listed_is_subject(self) -> None:
        name = self.listed.pop()
        self.end_clause()
        self.subjects = [name]

    def _group(self, kind: str) -> None:
        if self.subjects:  # "Zoey and Ethan are both knights"; "not both" says too little
            if self.negated and kind in ("pair", "all"):
                self.subjects, self.negated = [], False
            return
        negated = self._previous(1) == "not"
        self.end_clause()
        if negated or (kind == "pair" and len(self.names) != 2):
            return
        assigned = {pair.name for pair in self.pairs}
        self.subjects = [name for name in self.names if kind != "others" or name not in assigned]
        self.plural, self.negated = True, kind == "nobody"

    def _mute(self, kind: str) -> None:
        if kind == "condition":
            self.pairs = [pair for pair in self.pairs if pair.sentence != self.sentence]
        self.end_clause(trailing_negation=False)
        self.muted = "reported" if kind == "reported" and self.muted != "supposed" else "supposed"

    def _not(self, token: str) -> None:
        self.negated = not self.negated
        self.linked = self.linked or token.lower().endswith("n't")

    def _and(self, token: str) -> None:
        if self.subjects and self.linked and self.negated and self.last_role is not None:
            self.end_clause()

    def _link(self, token: str) -> None:
        if self.listed and self._previous(1) == "name" and token != "(":
            self._last_listed_is_subject()
        self.linked = True
        self.plural = self.plural or token.lower() == "are"

    def _newline(self, token: str) -> None:
        if self.leading_role is not None and self.linked:  # names may be listed below "Knights:"
            return
        if self.subjects and self._previous(1) in ("link", "filler") and self.linked:
            return  # the role may stand on the line below "Zoey:"
        self._end_sentence()
