"""The page of a recorded run: everything is on it, nothing leaves it, and what a model wrote is inert."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from infsample_rl.observe.report.page import write_report

HOSTILE = '</script><img src=x onerror="alert(1)"><!--<script>\u2028]]>&lt;\ud800\x00\u202e'


@pytest.fixture
def page(recorded_run, page_in):
    assert write_report([recorded_run], recorded_run / "report.html") == []
    return page_in(recorded_run / "report.html")


def titles(charts):
    return [chart["title"] for chart in charts]


def test_everything_a_run_recorded_is_on_its_page(page):
    assert page["notes"] == [] and page["title"] == "kk_tiny"
    assert titles(page["learning"]) == ["Reward", "Held-out accuracy", "Response length", "Signal"]
    assert {"Entropy", "KL to the reference", "Mismatch of engine and learner"} <= set(titles(page["policy"]))
    assert titles(page["predictor"])[:3] == ["Error", "Order within a prompt", "Decode steps that predictions save"]
    assert titles(page["memory"])[0] == "KV cache of a rollout worker"
    assert page["phases"]["stack"] and "trace.json" in page["phases"]["note"]
    assert len(page["timelines"]["groups"]) == 4 and len(page["completions"]["rows"]) == 12
    assert ["rollout.group_size", "32", "8"] in page["settings"] and ["python", "3.11.7"] in page["versions"]


def test_curves_are_the_values_of_metrics_jsonl(page, recorded_run):
    steps = [json.loads(line) for line in (recorded_run / "metrics.jsonl").read_text().splitlines()]
    (line,) = page["learning"][0]["lines"]
    assert line["x"] == [1, 2, 3] and line["y"] == pytest.approx(
        [step["reward/mean"] for step in steps if step["step"]], rel=1e-4
    )
    assert line["high"][0] == pytest.approx(steps[1]["reward/mean"] + steps[1]["reward/std"], rel=1e-4)
    assert page["metrics"]["timing/driver"]["lines"][0]["y"] == pytest.approx(
        [step["timing/driver"] for step in steps if step["step"]], rel=1e-4
    )


def test_the_timeline_of_a_prompt_has_every_stay_and_every_text(page):
    samples = page["timelines"]["groups"][-1]["samples"]
    for sample in samples:
        assert sum(stay[5] for stay in sample["stays"]) == sample["length"] and sample["text"]
    assert any(len(sample["stays"]) > 1 for sample in samples)  # a preempted one


def test_what_a_model_wrote_cannot_leave_its_place(recorded_run, page_in):
    path = recorded_run / "completions.jsonl"
    record = json.loads(path.read_text().splitlines()[0]) | {
        "prompt": HOSTILE,
        "response": HOSTILE,
        "finish_reason": HOSTILE,
    }
    record["components"] = {HOSTILE: 1.0}
    path.write_text(json.dumps(record) + "\n")
    group = json.loads((recorded_run / "samples.jsonl").read_text().splitlines()[0]) | {"prompt": HOSTILE}
    group["samples"][0]["text"] = HOSTILE
    (recorded_run / "samples.jsonl").write_text(json.dumps(group) + "\n")
    (recorded_run / "warnings.jsonl").write_text(json.dumps({"step": 1, "rule": None, "text": HOSTILE}) + "\n")
    (recorded_run / "config.yaml").write_text(json.dumps({"run": {"name": HOSTILE.replace("\ud800", "")}}))
    write_report([recorded_run], recorded_run / "report.html")

    class Tags(HTMLParser):
        found: list[str] = []

        def handle_starttag(self, tag, attributes):
            self.found.append(tag)
            assert not any(name.startswith("on") for name, _ in attributes)

    parser = Tags()
    parser.feed((recorded_run / "report.html").read_text(encoding="utf-8"))
    assert "img" not in parser.found and parser.found.count("script") == 2
    page = page_in(recorded_run / "report.html")
    assert page["completions"]["rows"][0]["response"] == HOSTILE and page["completions"]["prompts"] == [HOSTILE]
    assert page["timelines"]["groups"][0]["samples"][0]["text"] == HOSTILE


def test_the_page_loads_nothing_and_runs_nothing_but_its_own(recorded_run):
    write_report([recorded_run], recorded_run / "report.html")
    text = (recorded_run / "report.html").read_text(encoding="utf-8")
    shell = re.sub(r'<script type="application/json" id="page">.*?</script>', "", text, flags=re.DOTALL)
    # SVG's name, which nobody fetches
    assert set(re.findall(r"\b(?:https?|wss?|ftp)://[^\s'\"`)]+", shell)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|import|eval|innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b\s*[(=]", shell
    )
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', shell)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    for element in ("script", "style"):
        body = re.findall(rf"<{element}>(.*?)</{element}>", shell, re.DOTALL)[0]
        assert base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() in policy
