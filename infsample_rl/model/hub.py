"""Whether the Hugging Face hub can be asked, without whose answer from_pretrained and load_dataset retry for minutes;
and the line on what could not be had. Standard library only."""

from __future__ import annotations

import http.client
import os
import re
import textwrap
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

HUB_TIMEOUT_S = 3.0  # of the one request that asks whether the hub can be reached


def cached_only(name: str) -> bool:
    """from_pretrained's local_files_only for a folder or hub name: true for what is no folder here when the hub does
    not answer."""
    path = Path(name)
    return not path.is_dir() and (path.is_absolute() or not hub_reachable(name))


def hub_reachable(repository: str, kind: str = "models") -> bool:
    """Whether the hub, of `kind` models or datasets, answers at all in HUB_TIMEOUT_S; a refusal (404, 401) is an
    answer."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    answers: list[bool] = []
    url = f"{endpoint}/api/{kind}/{urllib.parse.quote(repository)}"
    # a thread, since the time-out is of each address of the host, and none at all of looking its name up
    asking = threading.Thread(target=lambda: answers.append(_answers(url)), daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return answers == [True]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=HUB_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True
    # URLError and time-outs are OSErrors; an endpoint that is no URL: ValueError
    except (OSError, ValueError, http.client.HTTPException):
        return False


def not_found(setting: str, path: str, what: str, error: Exception) -> str:
    """The line on a model, config or tokenizer that could not be loaded from `path`."""
    first = re.split(r"(?<!:)\n", str(error).strip())[0]  # line, with what it announces
    reason = textwrap.shorten(first, 160, placeholder=" ...")
    kind = (
        "folder"
        if Path(path).is_absolute() or os.path.isdir(path)
        else "hub name (a local folder of that name does not exist)"
    )
    return (
        f"{setting}={path}: no {what} could be loaded from this {kind}; give the path of a Hugging Face folder "
        f"({type(error).__name__}: {reason})"
    )
