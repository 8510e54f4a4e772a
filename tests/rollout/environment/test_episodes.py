"""What a turn asks its environment for, and what is answered where it asks for nothing that can be done."""

import queue
from itertools import count

import pytest

from infsample_rl.config.environment import EnvironmentConfig
from infsample_rl.data.turns import templates_of
from infsample_rl.observe.phases import report_phases
from infsample_rl.rollout.environment import episodes as episodes_module
from infsample_rl.rollout.environment.episodes import Episodes
from infsample_rl.rollout.environment.turn_records import TurnRecords
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample
from infsample_rl.types import EpisodeStart
from tests.conftest import CHATML_CALLS, byte_tokenizer
from tests.data.test_turns import ADD

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'


class Host:
    """Notes what it is asked; replies are put in by the test."""

    def __init__(self, form):
        self.form, self.tools = form, {"": [ADD] if form == "tools" else []}
        self.answers, self.opened, self.asked, self.ended = queue.SimpleQueue(), {}, [], []
        self.before, self.began = [], {}

    def open(self, key, start):
        self.opened[key] = (start.seed, start.columns)

    def ask(self, key, request, before=()):
        self.asked.append((key, *request))
        self.before.append(list(before))
        self.began[key] = episodes_module.time.monotonic()

    def called_at(self, key):
        return self.began[key]

    def reply(self, key, reply):
        self.answers.put((key, reply, episodes_module.time.monotonic()))

    def end(self, key):
        self.ended.append(key)


@pytest.fixture(autouse=True)
def first_keys(monkeypatch):
    monkeypatch.setattr(episodes_module, "KEYS", count())


def make(form="tools", records=None, **settings):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML_CALLS
    host = Host(form)
    templates = templates_of(tokenizer, {}, host.tools, [tokenizer.eos_token_id])
    starts = {4: EpisodeStart(11, {"answer": "5"})}
    config = EnvironmentConfig(factory="a.py:A", **settings)
    return Episodes(host, templates, config, starts, records), host, tokenizer


def sampled(tokenizer, text, sample=None):
    sample = sample or Sample(PromptGroup(4, [1], [0], GroupSettings("token_budget", 1, 1), lambda _: 0), 0, 0, 0)
    sample.tokens.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
    return sample


def answered(episodes, host, reply):
    """What the engine is given once the first trajectory's environment has replied."""
    host.reply(0, reply)
    [answer] = episodes.take(wait_s=0)
    return answer


def test_calls_are_asked_for_and_their_answers_are_observed():
    episodes, host, tokenizer = make()
    sample = sampled(tokenizer, CALL)
    episodes.end(sample, "stop")
    assert host.opened == {0: (11, {"answer": "5"})} and host.asked == [(0, "call", [("add", {"a": 2})])]
    assert episodes.take(wait_s=0) == []
    answer = answered(episodes, host, {"said": ["It is 2."], "failed": 0, "lists": {"0": [2]}})
    behind = "\n<|im_start|>tool\nIt is 2.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(answer.observed) == behind and answer.episode is None
    sample.tokens.extend(answer.observed)
    episodes.end(sampled(tokenizer, "It is 2.<|im_end|>", sample), "stop")
    function = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "name": "add", "content": [2]},  # as the tool gave it
        {"role": "assistant", "content": "It is 2."},
    ]
    assert host.asked[1:] == [(0, "reward", messages)]
    answer = answered(episodes, host, {"reward": 0.5, "functions": {"mine": 0.25}, "reported": {"mine/calls": 1.0}})
    episode = answer.episode
    assert (episode.reward, episode.turns, episode.calls, episode.failure) == (0.5, 2, 1, "")
    assert (episode.messages, episode.function_rewards) == (messages, {"mine": 0.25})
    assert episode.reported == {"mine/calls": 1.0}
    assert host.ended == [0]


def test_a_call_that_cannot_be_made_is_answered_without_the_environment():
    episodes, host, tokenizer = make()
    episodes.end(sampled(tokenizer, CALL.replace("add", "sub")), "stop")
    [answer] = episodes.take(wait_s=0)
    assert "error: there is no tool 'sub'; the tools are add" in tokenizer.decode(answer.observed) and host.asked == []


def test_a_row_is_offered_and_may_call_the_tools_of_its_own_environment():
    _, host, tokenizer = make()
    host.tools = {"sums": [ADD], "else": [{"type": "function", "function": {"name": "sub"}}]}
    templates = templates_of(tokenizer, {}, host.tools, [tokenizer.eos_token_id])
    starts = {4: EpisodeStart(11, {"environment": "else"}), 5: EpisodeStart(12, {"environment": "sums"})}
    episodes = Episodes(host, templates, EnvironmentConfig(factory="a.py:A"), starts)
    for prompt in (4, 5):
        sample = Sample(PromptGroup(prompt, [1], [0], GroupSettings("token_budget", 1, 1), lambda _: 0), 0, 0, 0)
        episodes.end(sampled(tokenizer, CALL, sample), "stop")
    [answer] = episodes.take(wait_s=0)
    assert "error: there is no tool 'add'; the tools are sub" in tokenizer.decode(answer.observed)
    assert [asked[1:] for asked in host.asked] == [("call", [("add", {"a": 2})])]


def test_a_program_is_given_the_calls_of_the_tools_that_it_offers():
    _, host, tokenizer = make("program")
    templates = templates_of(tokenizer, {}, host.tools, [tokenizer.eos_token_id])
    starts = {4: EpisodeStart(11, {}, messages=[], tools=[ADD])}
    episodes = Episodes(host, templates, EnvironmentConfig(factory="a.py:A"), starts)
    sample = sampled(tokenizer, "Let me see." + CALL)
    episodes.end(sample, "stop")
    size, second = len(sample.tokens), CALL.replace("add", "sub")
    assert host.asked == [(0, "act", "Let me see.", False, [("add", {"a": 2})], ([], [], "stop", 1, size))]
    answer = answered(episodes, host, {"said": "", "answers": ["It is 2."], "reward": 0.0, "ended": False})
    assert tokenizer.decode(answer.observed) == "\n<|im_start|>tool\nIt is 2.<|im_end|>\n<|im_start|>assistant\n"
    sample.tokens.extend(answer.observed)
    before = 1 + len(sample.tokens)
    episodes.end(sampled(tokenizer, second, sample), "stop")  # no such tool: text, as it stands
    said = ([], [], "stop", before, 1 + len(sample.tokens) - before)
    assert host.asked[1:] == [(0, "act", second.removesuffix("<|im_end|>"), False, [], said)]
    answer = answered(episodes, host, {"said": "", "reward": 1.0, "ended": True})
    assert (answer.episode.reward, answer.episode.turns, answer.episode.calls) == (1.0, 2, 1)


def by_tokens(**settings):
    _, host, tokenizer = make("program")
    templates = templates_of(tokenizer, {}, host.tools, [tokenizer.eos_token_id])
    starts = {4: EpisodeStart(11, {}, messages=[], token_ids=[1])}
    return Episodes(host, templates, EnvironmentConfig(factory="a.py:A", **settings), starts), host, tokenizer


def test_a_program_that_asks_by_token_ids_is_given_and_gives_them():
    episodes, host, tokenizer = by_tokens()
    sample = sampled(tokenizer, "left")
    sample.logprobs = [-0.5] * 4
    episodes.end(sample, "stop")
    left, right = (tokenizer(text)["input_ids"] for text in ("left", "right"))
    assert host.asked == [(0, "act", "left", False, [], (left, [-0.5] * 4, "stop"))]
    answer = answered(episodes, host, {"said": "", "reward": 0.0, "ended": False, "token_ids": [3, 4]})
    assert answer.observed == [3, 4] and answer.episode is None
    sample.tokens.extend(answer.observed)
    sample.logprobs += [float("nan")] * 2 + [-0.25] * 5
    episodes.end(sampled(tokenizer, "right", sample), "length")
    assert host.asked[1:] == [(0, "act", "right", True, [], (right, [-0.25] * 5, "length"))]
    answer = answered(episodes, host, {"said": "", "reward": 1.0, "ended": True})
    assert (answer.episode.reward, answer.episode.turns) == (1.0, 2)
    assert [each["content"] for each in answer.episode.messages] == ["left", tokenizer.decode([3, 4]), "right"]


@pytest.mark.parametrize("ids", [[], [3, 259]])
def test_token_ids_that_the_tokenizer_does_not_have_fail_their_trajectory(ids):
    episodes, host, tokenizer = by_tokens()
    sample = sampled(tokenizer, "left")
    sample.logprobs = [-0.5] * 4
    episodes.end(sample, "stop")
    answer = answered(episodes, host, {"said": "", "reward": 0.0, "ended": False, "token_ids": ids})
    assert answer.episode.reward is None and answer.episode.failure.startswith("token_ids must be from 0 to 258, got ")


def test_of_too_many_token_ids_the_middle_is_left_out():
    episodes, host, tokenizer = by_tokens(max_observation_tokens=16)
    sample = sampled(tokenizer, "left")
    sample.logprobs = [-0.5] * 4
    episodes.end(sample, "stop")
    answer = answered(episodes, host, {"said": "", "reward": 0.0, "ended": False, "token_ids": [*range(1, 30)]})
    assert answer.observed == [*range(1, 9), *tokenizer(episodes_module.CUT)["input_ids"], *range(22, 30)]


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_the_last_turn_calls_nothing_any_more(reason):
    episodes, host, tokenizer = make(max_turns=5 if reason == "length" else 1)
    episodes.end(sampled(tokenizer, CALL), reason)
    [(key, what, [message])] = host.asked
    assert (key, what, message["content"]) == (0, "reward", CALL.removesuffix("<|im_end|>"))


def test_what_fails_ends_the_episode_without_a_reward():
    episodes, host, tokenizer = make()
    episodes.end(sampled(tokenizer, CALL), "stop")
    answer = answered(episodes, host, {"failed": "its process ended"})
    assert (answer.episode.reward, answer.episode.failure) == (None, "its process ended") and host.ended == [0]


@pytest.mark.parametrize("form", ["tools", "actions", "program"])
def test_an_episode_that_cannot_begin_fails_without_a_process(form):
    episodes, host, tokenizer = make(form)
    episodes._starts[4] = EpisodeStart(11, {}, failure="timed out after 30 s")
    episodes.end(sampled(tokenizer, CALL), "stop")
    [answer] = episodes.take(wait_s=0)
    assert (answer.episode.reward, answer.episode.failure) == (None, "timed out after 30 s")
    assert host.opened == {} and host.asked == host.ended == []


def test_where_nothing_decodes_the_timeline_shows_that_it_waits():
    episodes, host, tokenizer = make("actions")
    episodes.end(sampled(tokenizer, "left<|im_end|>"), "stop")
    report_phases("rollout", 0, "here")  # what came before
    assert episodes.take(wait_s=0) == [] and report_phases("rollout", 0, "here").phases == []
    assert episodes.take(wait_s=0.05) == []
    [waited] = report_phases("rollout", 0, "here").phases
    assert waited.name == "wait" and waited.end - waited.start >= 0.05


def test_an_observation_that_cannot_be_shown_fails_its_trajectory_alone():
    episodes, host, tokenizer = make("actions")
    episodes.end(sampled(tokenizer, "left<|im_end|>"), "stop")
    said = "infsample-rl-stands-for-what-was-sampled"  # the template is asked by it
    answer = answered(episodes, host, {"said": said, "reward": 0.5, "ended": False})
    assert answer.observed == [] and answer.episode.reward is None and host.ended == [0]
    assert "does not show an assistant's turn as it was sampled" in answer.episode.failure


def test_of_gymnasiums_form_every_turn_is_an_action_and_rewards_add_up():
    episodes, host, tokenizer = make("actions")
    sample = sampled(tokenizer, "left<|im_end|>")
    episodes.end(sample, "stop")
    assert host.asked == [(0, "act", "left", False)]
    answer = answered(episodes, host, {"said": "a wall", "reward": 0.25, "ended": False})
    assert tokenizer.decode(answer.observed) == "\n<|im_start|>user\na wall<|im_end|>\n<|im_start|>assistant\n"
    sample.tokens.extend(answer.observed)
    episodes.end(sampled(tokenizer, "right<|im_end|>", sample), "stop")
    episode = answered(episodes, host, {"said": "out", "reward": 1.0, "ended": True}).episode
    assert (episode.reward, episode.unfit_tokens) == (1.25, 0)


def test_a_program_that_waits_for_a_turn_without_room_is_told_and_gives_its_reward():
    episodes, host, tokenizer = make("program")
    sample = sampled(tokenizer, "left<|im_end|>")
    episodes.end(sample, "stop")
    host.reply(0, {"said": "a wall", "reward": 0.0, "ended": False})
    episodes.take(wait_s=0)
    episodes.end(sample, "length")
    none = ([], [], "length", 1 + len(sample.tokens), 0)
    assert host.asked == [(0, "act", "left", False, [], ([], [], "stop", 1, 5)), (0, "act", None, True, [], none)]
    episode = answered(episodes, host, {"said": "", "reward": 0.5, "ended": True}).episode
    assert (episode.reward, episode.turns, episode.turn_rewards) == (0.5, 1, [0.5])


@pytest.mark.parametrize(("settings", "reason"), [({}, "length"), ({"max_turns": 1}, "stop")])
def test_a_program_is_told_that_a_turn_is_cut_or_the_last(settings, reason):
    episodes, host, tokenizer = make("program", **settings)
    episodes.end(sampled(tokenizer, "left"), reason)
    assert host.asked == [(0, "act", "left", True, [], ([], [], "length", 1, 4))]


@pytest.mark.parametrize("form", ["actions", "tools", "program"])
def test_a_trajectory_that_has_waited_too_long_gets_no_further_turn(form, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(episodes_module.time, "monotonic", lambda: clock[0])
    episodes, host, tokenizer = make(form, straggler_s=5.0)
    acts = form != "tools"
    sample = sampled(tokenizer, "left<|im_end|>" if acts else CALL)
    reply = {"said": "a wall", "reward": 0.25, "ended": False} if acts else {"said": ["2"], "failed": 0}
    if form == "program":
        reply |= {"reward": 0.0}
    for seconds in (3.0, 3.0):
        episodes.end(sample, "stop")
        clock[0] += seconds
        host.reply(0, reply)
        found = episodes.take(wait_s=0)
        for answer in found:
            sample.tokens.extend(answer.observed)
        sampled(tokenizer, "right<|im_end|>" if acts else CALL, sample)
    if not acts:
        assert found == [] and host.asked[-1][:2] == (0, "reward")
        host.reply(0, {"reward": 0.5})
        found = episodes.take(wait_s=0)
    if form == "program":  # whose reward comes with its end
        assert found == [] and host.asked[-1] == (0, "act", None, True)
        host.reply(0, {"said": "", "reward": 0.5, "ended": True})
        found = episodes.take(wait_s=0)
        assert found[0].episode.turn_rewards == [0.0, 0.5]
    [answer] = found
    assert answer.episode.is_straggler and answer.episode.reward == 0.5 and answer.episode.waited_s >= 6


@pytest.mark.parametrize(("form", "reward"), [("actions", 0.25), ("tools", None), ("program", None)])
def test_a_call_that_goes_on_for_too_long_is_cut_and_one_that_waits_for_its_turn_is_not(form, reward, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(episodes_module.time, "monotonic", lambda: clock[0])
    episodes, host, tokenizer = make(form, straggler_s=5.0)
    acts = form != "tools"
    said = "left<|im_end|>" if acts else CALL
    sample = sampled(tokenizer, said)
    episodes.end(sample, "stop")
    clock[0] += 4.0
    answer = answered(
        episodes, host, {"said": "", "reward": 0.25, "ended": False} if acts else {"said": ["2"], "failed": 0}
    )
    clock[0] += 50.0  # its policy's turn
    assert episodes.take(wait_s=0) == []
    sample.tokens.extend(answer.observed)
    episodes.end(sampled(tokenizer, said, sample), "stop")
    host.began[0] = None  # the call is not begun
    clock[0] += 50.0
    assert episodes.take(wait_s=0) == []
    host.began[0] = clock[0]
    clock[0] += 2.0
    [answer] = episodes.take(wait_s=0)
    episode = answer.episode
    assert episode.is_straggler and (episode.reward, episode.waited_s) == (reward, 6.0) and host.ended == [0]
    cut = "its call was cut after 2 s (environment.straggler_s=5)"
    assert episode.failure == ("" if form == "actions" else cut)
    assert form != "actions" or episode.turn_rewards == [0.25, 0.0]


def test_that_a_reply_waits_for_the_engine_is_not_its_environments_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(episodes_module.time, "monotonic", lambda: clock[0])
    episodes, host, tokenizer = make("actions", straggler_s=5.0)
    sample = sampled(tokenizer, "left<|im_end|>")
    episodes.end(sample, "stop")
    clock[0] += 1.0
    host.reply(0, {"said": "a wall", "reward": 0.25, "ended": False})
    clock[0] += 60.0  # a learner's row has the device
    [answer] = episodes.take(wait_s=0)
    sample.tokens.extend(answer.observed)
    episodes.end(sampled(tokenizer, "right<|im_end|>", sample), "stop")
    clock[0] += 2.0
    episode = answered(episodes, host, {"said": "out", "reward": 1.0, "ended": True}).episode
    assert (episode.waited_s, episode.reward, episode.is_straggler) == (3.0, 1.25, False)


def test_an_observation_that_had_no_room_is_no_turn():
    episodes, host, tokenizer = make("actions")
    sample = sampled(tokenizer, "left<|im_end|>")
    episodes.end(sample, "stop")
    host.reply(0, {"said": "a wall", "reward": 0.25, "ended": False})
    [unfit] = episodes.take(wait_s=0)
    episodes.end(sample, "length")
    [answer] = episodes.take(wait_s=0)
    assert (answer.episode.turns, answer.episode.reward) == (1, 0.25) and len(host.asked) == 1
    assert answer.episode.unfit_tokens == len(unfit.observed) > 0


def test_a_long_observation_loses_its_middle():
    episodes, host, tokenizer = make("actions", max_observation_tokens=16)
    episodes.end(sampled(tokenizer, "go<|im_end|>"), "stop")
    answer = answered(episodes, host, {"said": "first " + "x" * 100 + " last", "reward": 0, "ended": False})
    assert "user\nfirst xx\n[...]\nxxx last<|im_end|>" in tokenizer.decode(answer.observed)


def test_the_next_call_does_not_take_an_answer_to_one_before():
    before, host, tokenizer = make()
    before.end(sampled(tokenizer, CALL), "stop")
    [(key, *_)] = host.asked
    host.reply(key, {"said": ["late"], "failed": 0})  # and the call is halted before it is read
    before.close()
    after = Episodes(host, before._templates, before._config, before._starts)
    after.end(sampled(tokenizer, CALL), "stop")
    assert host.asked[1][0] != key and after.take(wait_s=0) == []


def test_an_answer_to_a_call_that_is_over_is_not_wanted():
    episodes, host, tokenizer = make()
    episodes.end(sampled(tokenizer, CALL), "stop")
    episodes.close()
    host.reply(0, {"said": ["late"], "failed": 0})
    assert host.ended == [0] and episodes.take(wait_s=0) == []


def test_a_trajectory_that_is_sampled_again_takes_its_answers_from_the_records_and_asks_for_the_rest(tmp_path):
    replies = [{"said": f"room {number}", "reward": 0.25, "ended": number == 2} for number in range(3)]
    texts, seen = ("left<|im_end|>", "right<|im_end|>", "up<|im_end|>"), []
    for lost_after in (2, 3, 3):  # turns that are answered before the worker is lost; the last time nothing is asked
        episodes, host, tokenizer = make("actions", TurnRecords(tmp_path, step=2, evaluation=False, made_by="one"))
        sample = None
        for turn in range(lost_after):
            sample = sampled(tokenizer, texts[turn], sample)
            before = len(host.asked)
            episodes.end(sample, "stop")
            for key, *_ in host.asked[before:]:
                host.reply(key, replies[turn])
            [answer] = episodes.take(wait_s=0)
            sample.tokens.extend(answer.observed)
        episodes.close()
        seen.append((host, sample.tokens, answer.episode))
    (first, *_), (second, tokens, whole), (third, again, replayed) = seen
    assert [request[1:] for request in first.asked] == [("act", "left", False), ("act", "right", False)]
    assert first.before == [[], []]
    assert [request[1:] for request in second.asked] == [("act", "up", False)]
    # its process is brought to where it was
    acts = [("act", "left", False), ("act", "right", False)]
    assert second.before == [list(zip(acts, replies, strict=False))]
    assert third.asked == third.ended == [] and third.opened == {}
    assert tokens == again and whole.turn_rewards == replayed.turn_rewards == [0.25] * 3
    assert (whole.replayed, replayed.replayed) == (2, 3)
