"""Which role a free text finally gives to each inhabitant of a knights-and-knaves puzzle. Standard library only.

    final_roles("Suppose Zoey is a knave... no.\\n**Answer:** Zoey and Ethan are knights", ["Zoey", "Ethan"])
    -> {"Zoey": True, "Ethan": True}

The text becomes a string of letters, one for each name, role, "is", "not", "both", ..., in which regular expressions
find clauses. What is only supposed or reported ("if Zoey is a knight", "Zoey says Ethan is a knave") gives no pair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KNIGHT = r"knights?|truth[- ]?tell(?:ers?|ing)|truthful|honest|(?:always )?(?:tells?|telling|speaks?) (?:the )?truth"
KNAVE = r"knaves?|liars?|lying|dishonest|(?:always )?lies?"
_LABEL = re.compile(
    r"\b(?:answers?|conclusion|solution)\b[ \t]*(?:is|are)?[ \t]*[:=\n]|\banswers? (?:is|are)\b|\bin "
    r"conclusion\b|<answer>",
    re.IGNORECASE,
)
# A token is one letter, so that clauses can be found by regular expressions over the text's letters.
_KINDS = {
    "K": rf"\b(?:{KNIGHT})\b",
    "V": rf"\b(?:{KNAVE})\b",
    # supposed: mutes the rest of its sentence
    "h": r"\b(?:suppos\w*|assum\w*|whether|either|would|could|might|may|were|case|imagine|consider\w*|possib\w*"
    r"|hypothe\w*|impossible|try)\b",
    # condition: undoes its whole sentence, "Zoey is a knight or a knave"
    "c": r"\b(?:if|iff|or|unless)\b",
    # reported: mutes what follows, to a verdict, a consequence or the sentence's end
    "r": r"\b(?:says?|said|saying|claim\w*|stat(?:es?|ed|ing|ements?)|declar\w*|remark\w*|mention\w*|assert\w*|told"
    r"|tells (?:us|you|me)|(?:true|false|untrue) that)\b",
    "v": r"\b(?:is|are|must be) (?:true|false|untrue)\b",
    "q": r"\b(?:so(?! is| are)|therefore|thus|hence|meaning|which means|making|makes|but|because|since|while"
    r"|whereas)\b",
    "S": r"\b(?:so|as) (?:is|are)\b",
    "T": r"\b(?:too|as well)\b",
    "Z": r"\b(?:neither|none|nobody|no one)\b",
    "O": r"\b(?:others?|rest|remaining|everyone else|everybody else)\b",
    "P": r"\bboth\b",
    "B": r"\b(?:all|everyone|everybody|each)\b",
    "n": r"\b(?:not|never|cannot|\w+n't)\b",
    "a": r"\b(?:and|nor)\b|[,&+]",
    "L": r"\b(?:is|are|was)\b|->|=>|[:=(>|-]",
    "f": r"\b(?:an?|the|be|being|must|has|have|to|does|do|did|can|also|indeed|definitely|certainly|clearly|in fact"
    r"|actually|really|truly|one|of|them|they|these|turns? out|as|role|identity|type|in turn|on the other hand|however"
    r"|meanwhile|respectively|only|two|three|four|five|inhabitants?|islanders?|people|persons?|s)\b"
    r"|\(?\b\d+[.)]|[\[\]{}\"')]",  # filler: left out
    "Q": r"\?",
    "s": r"[.!;]",
    "e": r"\n",
    "w": r"\w+",
}
_MUTED = re.compile(r"[^seQ]*Q|[^seQ]*c[^seQ]*|h[^seQ]*|r[^qvseQ]*")
_WHO = r"(?P<who>P?N(?:a+N)*|(?<!n)[PBO]|Z)"
# from a name to its role, which may stand on the line below; bounded, so that no text takes cubic time
_TO_ROLE = r"(?:Le?|[PB]){0,8}(?:n[LPB]{0,4})?"
_LISTED = rf"N(?!{_TO_ROLE}[KV])"
_CLAUSES = (
    re.compile(rf"Z?{_WHO}a*{_TO_ROLE}(?P<roles>[KV](?:a+[KV])*)"),  # "Zoey and Ethan are not knights"
    re.compile(
        rf"(?P<roles>[KV])L{{1,4}}e*[LaPB]{{0,4}}(?P<who>{_LISTED}(?:[aeL]*{_LISTED})*)"
    ),  # "Knights: Zoey, Ethan"
    re.compile(rf"Z?{_WHO}L+n?T?(?=[asqe]|$)"),  # "Ethan is not", after another's role
    re.compile(r"S(?P<who>N(?:a+N)*)"),  # "and so is Ethan"
)


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
        pairs = _read(part, names)
        if pairs:
            return _agreed(pairs, names, {pair.sentence for pair in pairs})
        bare = _letters(part, names)
        if re.fullmatch("[KVasLe]*", bare) and len(_roles(bare)) == len(names):  # "knight, knave"
            return dict(zip(names, _roles(bare), strict=True))
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
    reported = rf"(?:{_KINDS['r']}|{_KINDS['v']})"
    for match in reversed(list(re.finditer(r'"[^"\n]*\s[^"\n]*"', text))):
        around = (
            text[max(0, match.start() - 40) : match.start()].rpartition("\n")[2]
            + " "
            + text[match.end() : match.end() + 40].partition("\n")[0]
        )
        if re.search(rf"\b(?:{KNIGHT}|{KNAVE})\b", match[0], re.IGNORECASE) and re.search(
            rf"\b{reported}", around, re.IGNORECASE
        ):
            text = f"{text[: match.start()]} quotation {text[match.end() :]}"
    return text


def _letters(text: str, names: list[str], found: list[str] | None = None) -> str:
    """The text as letters of _KINDS, N for a name; the names are put into `found`. What is muted gives w and, for a
    name, m. A name is matched in its own case where that occurs at all ("Will", not "will")."""
    longest_first = [re.escape(name) for name in sorted(names, key=len, reverse=True)]
    spellings = [name if re.search(rf"\b{name}\b", text) else f"(?i:{name})" for name in longest_first]
    kinds = "|".join(rf"(?P<{kind}>(?i:{pattern}))" for kind, pattern in _KINDS.items())
    tokens = list(re.finditer(rf"(?P<N>\b(?:{'|'.join(spellings)})\b)|{kinds}", text))
    named = {name.lower(): name for name in names}
    if found is not None:
        found += [named[token[0].lower()] for token in tokens if token.lastgroup == "N"]
    letters = "".join(token.lastgroup or "" for token in tokens).replace("f", "")
    letters = re.sub("(?<=L)[qv]", "", letters)  # "Zoey is therefore a knight"
    return _MUTED.sub(lambda match: re.sub("[^NQ]", "w", match[0]).replace("N", "m"), letters)


def _roles(letters: str) -> list[bool]:
    return [letter == "K" for letter in re.findall("[KV]", letters)]


def _read(text: str, names: list[str]) -> list[_Pair]:
    """Every (name, role) pair a text states, in order."""
    found: list[str] = []
    letters, pairs = _letters(text, names, found), list[_Pair]()
    position, sentence, last_role = 0, 0, None
    while position < len(letters):
        match = next(filter(None, (clause.match(letters, position) for clause in _CLAUSES)), None)
        if match is None:
            ends = letters[position] in "seQ"
            position, sentence, last_role = position + 1, sentence + ends, None if ends else last_role
            continue
        who, roles = match["who"], _roles(match.groupdict().get("roles") or "")
        first = len(re.findall("[Nm]", letters[: match.start("who")]))
        subjects = found[first : first + who.count("N")] or _meant(who, names, pairs)
        negated = ("n" in match[0]) != ("Z" in match[0])
        position = match.end()
        if len(roles) > 1 and len(roles) != len(subjects):
            position, roles = match.start("roles") + 1, roles[:1]
        if not roles and last_role is not None and (negated or match[0][0] == "S" or match[0][-1] == "T"):
            roles = [last_role]
        if roles and subjects and not re.search("n[PB]", match[0]):  # "not both" says too little
            stated = [role != negated for role in roles] * (len(subjects) if len(roles) == 1 else 1)
            pairs += [_Pair(name, knight, sentence) for name, knight in zip(subjects, stated, strict=True)]
            last_role = stated[-1]
    return pairs


def _meant(who: str, names: list[str], pairs: list[_Pair]) -> list[str]:
    """Whom "both", "all", "nobody" or "the others" is about."""
    if who == "P" and len(names) != 2:
        return []
    assigned = {pair.name for pair in pairs} if who == "O" else set()
    return [name for name in names if name not in assigned]
