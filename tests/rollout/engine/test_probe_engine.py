"""The length probe inside the engine, on a policy that counts down from a random number: its lengths can be read off
its states."""

import math
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from infsample_rl.rollout.engine import sampling_engine
from infsample_rl.rollout.engine.decode_loop import DecodeLoop
from infsample_rl.rollout.length_prediction import watch
from infsample_rl.rollout.length_prediction.run_probe import RunProbe
from infsample_rl.types import ProbeFit, PublishedProbe
from tests import engines
from tests.engines import tokens_of

# after it, any other token; after token t comes t - 1, and 0 ends: a response has 1 to 63 tokens, all equally likely
START = 63
PROMPTS = [[5, 9, START], [7, 4, 4, 2, START]]
BUDGET = {"group_size": 24, "max_new_tokens": 64, "page_size": 4, "kv_budget_tokens": 256}
SLOTS = {"group_size": 24, "max_new_tokens": 64, "page_size": 4, "kv_budget_tokens": 400}
SLOTS |= {"slots": 4, "prefix_tokens": 2, "prompts_at_once": 1}
# weights that take few tokens left for many
REVERSED = torch.tensor([(64 - token) / 16 / 8 for token in range(64)] + [0.0] * 66)


make_engine = partial(engines.make_engine, stop={0}, speculate="0")  # steps are those of one token a row


@pytest.fixture(autouse=True)
def predict_often(monkeypatch):
    """Samples this short end before the probe predicts for the second time as users run it."""
    monkeypatch.setattr(watch, "PREDICT_EVERY", 4)


@pytest.fixture(scope="module")
def countdown():
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 32, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=None))
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        model.lm_head.weight.zero_()
        for token in range(START - 1):
            model.lm_head.weight[token, token + 1] = 5.0  # states are 8 at one place, so logits are 40
        model.lm_head.weight[START, START] = -5.0
    return model.eval()


def sample(engine, calls):
    """Completions of several calls, and the running steps of each."""
    groups, steps = [], []
    for call in range(calls):
        groups.append(tokens_of(engine.generate(PROMPTS, seed=3, step=call)))
        steps.append(engine.stats.running_steps)
    return groups, steps


@pytest.mark.parametrize(
    "settings",
    [BUDGET, SLOTS | {"schedule": "lpt"}, SLOTS | {"schedule": "infinite"}, BUDGET | {"preemption": "park"}],
    ids=str,
)
def test_predictions_change_no_sample(countdown, tokenizer, settings):
    plain = make_engine(countdown, tokenizer, **(settings | {"predictor": "none", "prefix_tokens": 0}))
    probed = make_engine(countdown, tokenizer, **settings)
    assert sample(probed, 3)[0] == sample(plain, 3)[0]
    assert probed.lengths.watch.seconds_spent > 0 and plain.lengths.watch is None


def test_it_learns_from_its_own_samples_and_is_right(countdown, tokenizer):
    engine = make_engine(countdown, tokenizer, **BUDGET)
    sample(engine, 1)
    assert engine.lengths.watch.probe.fitted is None and not engine.lengths.watch.is_used
    sample(engine, 2)
    hidden = torch.eye(64)[[41, 21]] * 8
    predicted = engine.lengths.watch.probe.predict(engine.lengths.watch.probe.features(hidden, torch.tensor([5, 5])))
    assert predicted.tolist() == [pytest.approx(41, rel=0.3), pytest.approx(21, rel=0.3)]  # token t: t are left


ONE_PROMPT = BUDGET | {"group_size": 32, "kv_budget_tokens": 512, "prompts_at_once": 1}


@pytest.mark.parametrize(("settings", "saved"), [(SLOTS | {"schedule": "lpt"}, 15), (ONE_PROMPT, 2)], ids=str)
def test_steps_fall_once_lengths_are_known_and_replays_say_by_how_many(countdown, tokenizer, settings, saved):
    engine = make_engine(countdown, tokenizer, **settings)
    reports, report = [], engine.lengths.watch.report
    engine.lengths.watch.report = lambda: reports.append(report()) or reports[-1]
    _, steps = sample(engine, 6)
    engine.learn()
    _, without = sample(make_engine(countdown, tokenizer, **(settings | {"predictor": "none", "prefix_tokens": 0})), 6)
    assert steps[:2] == without[:2]  # nothing known, then nothing tried
    assert engine.lengths.watch.is_used and sum(steps[2:]) <= sum(without[2:]) - saved
    replayed = reports[2:]  # of the second call and those after it
    assert [each.steps_without for each in replayed] == without[1:]
    exact = settings is ONE_PROMPT  # else prefixes and what follows them are replayed one after the other
    assert [each.steps_with for each in replayed[1:]] == (steps[2:] if exact else pytest.approx(steps[2:], rel=0.1))


@pytest.mark.parametrize("settings", [BUDGET, SLOTS | {"schedule": "lpt"}], ids=str)
def test_steps_as_captured_and_launched_ahead_teach_the_same(countdown, tokenizer, monkeypatch, settings):
    """On CUDA states lie in a buffer of the graph, and a step is read when the next one has been launched."""
    plain = make_engine(countdown, tokenizer, **settings)
    wanted, _ = sample(plain, 3)
    monkeypatch.setattr(
        sampling_engine, "DecodeLoop", lambda *args, **options: DecodeLoop(*args, **(options | {"run_ahead": True}))
    )
    static = make_engine(countdown, tokenizer, **settings)
    static.pool.graphs.is_used = True
    found, _ = sample(static, 3)
    assert found == wanted
    assert static.lengths.watch.seconds_spent > 0
    ours, theirs = static.learn().statistics, plain.learn().statistics
    assert ours.counts.sum() == pytest.approx(theirs.counts.sum(), rel=0.2)  # rows come and go a step later
    states, logs = ours.xx[:, -1, :64].sum(0) / 8, [0.0] + [math.log(token) for token in range(1, 64)]
    assert ours.xy[:, -1].sum() == pytest.approx(float(states @ logs), rel=1e-3), (
        "every state goes with the tokens that came after it"
    )


def test_drafted_tokens_teach_what_others_do(countdown, tokenizer):
    engine = make_engine(countdown, tokenizer, **(BUDGET | {"speculate": "3"}))
    found, _ = sample(engine, 3)
    assert found == sample(make_engine(countdown, tokenizer, **BUDGET), 3)[0] and engine.stats.accepted_tokens > 100
    seen = engine.learn().statistics
    states, logs = seen.xx[:, -1, :64].sum(0) / 8, [0.0] + [math.log(token) for token in range(1, 64)]
    assert seen.counts.sum() > 0 and seen.xy[:, -1].sum() == pytest.approx(float(states @ logs), rel=1e-3)


def test_drafts_lead_no_sample_past_the_end_of_its_prefix_where_a_replay_asks_for_its_length(countdown, tokenizer):
    """Until predictions are used nobody waits there."""
    engine = make_engine(countdown, tokenizer, **(SLOTS | {"schedule": "lpt", "speculate": "3"}))
    sample(engine, 2)  # the second is predicted by what the first has taught
    assert engine.stats.accepted_tokens > 100 and not engine.lengths.watch.is_used
    seen = [each for group in engine.lengths.watch._groups.values() for each in group.samples]
    assert len(seen) == 48 and all(2 in each.predicted for each in seen if each.length > 2)


@pytest.mark.parametrize("kind", ["constant", "reversed", "tiny"])
@pytest.mark.parametrize("settings", [BUDGET, SLOTS | {"schedule": "lpt"}, SLOTS | {"schedule": "fptas"}], ids=str)
def test_wrong_predictions_change_no_sample_and_end(countdown, tokenizer, kind, settings):
    weights = {
        "constant": torch.tensor([0.0] * 129 + [3.0]),
        "reversed": REVERSED,
        "tiny": torch.full((130,), -1e6),
    }[kind]
    plain = make_engine(countdown, tokenizer, **(settings | {"predictor": "none", "prefix_tokens": 0}))
    engine = make_engine(countdown, tokenizer, **settings)
    engine.lengths.watch._own = None
    engine.lengths.watch.load(PublishedProbe(fit=ProbeFit(weights.double().numpy(), 0.1), is_used=True))
    assert tokens_of(engine.generate(PROMPTS, seed=3)) == tokens_of(plain.generate(PROMPTS, seed=3))


def test_predictions_that_cost_steps_are_not_used(countdown, tokenizer):
    engine = make_engine(countdown, tokenizer, **(SLOTS | {"schedule": "lpt"}))
    engine.lengths.watch._own.enter = lambda reports: gate.append(reports[0])
    gate = []
    wrong = PublishedProbe(fit=ProbeFit(REVERSED.double().numpy(), 0.1), is_used=True)
    engine.lengths.watch._own.published = lambda: wrong
    engine.generate(PROMPTS, seed=3)
    report = engine.learn()
    assert report.steps_with == engine.stats.running_steps > report.steps_without > 0
    sentence = RunProbe(64, max_new_tokens=64)
    assert (
        "are not used in the next step, it goes on learning" in sentence.enter([report])
        and not sentence.published().is_used
    )


def test_a_runs_prompt_is_of_one_fold_in_a_step_whoever_decodes_its_samples(countdown, tokenizer):
    engine = make_engine(countdown, tokenizer, **BUDGET)
    engine.lengths.watch._own = None  # as in a run
    for step in (1, 2):
        for samples in ([0, 1, 2], [3]):
            engine.generate(PROMPTS[:1], seed=3, step=step, sample_indices=[samples])
        fold, other = engine.learn().statistics.counts[[step % 2, 1 - step % 2]]
        assert fold > 0 == other


def test_what_a_step_that_was_given_up_has_shown_is_forgotten_when_it_is_done_again(countdown, tokenizer):
    engine = make_engine(countdown, tokenizer, **BUDGET)
    engine.lengths.watch._own = None
    engine.generate(PROMPTS, seed=3)
    engine.lengths.watch.load(PublishedProbe(fit=None, is_used=False))
    report = engine.learn()
    assert report.statistics.counts.tolist() == [0, 0] and report.steps_without == 0


@pytest.mark.parametrize(
    "settings",
    [{"schedule": name} for name in ("arrival", "dynamic_slot", "full_group")],
    ids=str,
)
def test_schedules_that_read_no_prediction_have_no_probe(countdown, tokenizer, settings):
    engine = make_engine(countdown, tokenizer, group_size=8, slots=4, max_new_tokens=64, **settings)
    engine.generate(PROMPTS[:1], seed=0)
    assert engine.lengths.watch is None and engine.config.predictor == "probe"


def test_evaluations_are_neither_predicted_nor_learnt_from(countdown, tokenizer):
    engine = make_engine(countdown, tokenizer, **BUDGET)
    engine.generate(PROMPTS, seed=3, evaluation=True)
    assert engine.learn().statistics.counts.tolist() == [0, 0]


def test_a_model_that_projects_its_last_state_is_predicted_from_what_the_head_takes(tokenizer):
    sizes = {"vocab_size": 64, "hidden_size": 64, "word_embed_proj_dim": 32, "num_hidden_layers": 1, "ffn_dim": 32}
    sizes |= {"num_attention_heads": 4}
    torch.manual_seed(0)
    # as OPT-350M
    model = OPTForCausalLM(OPTConfig(**sizes, max_position_embeddings=256, do_layer_norm_before=False)).eval()
    engine = make_engine(model, tokenizer, **(BUDGET | {"kv_budget_tokens": 1024}))
    prompts = [[5, 9, 7], [7, 4, 4]]
    for step in range(3):
        engine.generate(prompts, seed=3, step=step)
    assert engine.lengths.watch.probe.num_features == 2 * 32 + 2 and engine.lengths.watch.probe.fitted is not None
