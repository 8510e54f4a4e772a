"""What a peer's setting is called here, from the tables of the conversion."""

from __future__ import annotations

import re

from infsample_rl.commands.convert import openrlhf, trl, verl


def in_our_words(message: str) -> str:
    """An error that speaks of a setting there is not; where a peer has one of that name, it says what it is here.

    Example: "num_generations is not a setting; ..." -> "num_generations is not a setting: TRL's num_generations is
    rollout.group_size here"
    """
    found = re.match(r"(\S+) is not a setting", message)
    if found is None:
        return message
    name = found[1]
    for peer, table in (("verl", verl.ROWS), ("TRL", trl.ROWS), ("OpenRLHF", openrlhf.ROWS)):
        for row in table:
            if row.theirs in (name, name.rpartition(".")[2]) or row.theirs.endswith(f".{name}"):
                where = message[message.rindex(" (in ") :] if " (in " in message else ""
                return f"{name} is not a setting: {peer}'s {row.theirs} is {row.ours} here{where}"
    return message
