"""Checkpoints: saved at any number of ranks, loaded at any other; whole or refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from infsample_rl.config import LearnerConfig, ObjectiveConfig
from infsample_rl.learner import checkpoint
from infsample_rl.learner.checkpoint import SavedState, save_pretrained_folder, save_training_state, write_progress
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.model.weight_sync.buckets import shapes_of
from tests.learner_ranks import Scenario, run_ranks

pytestmark = pytest.mark.slow  # checkpoints of one, two and three ranks, written by real processes

OBJECTIVE = ObjectiveConfig(kl_coef=0.1)
LEARNER = LearnerConfig(
    lr=2e-3,
    lr_schedule="cosine",
    warmup_steps=2,
    weight_decay=0.1,
    max_tokens_per_micro_batch=256,
    logprob_chunk_tokens=7,
)


def update(tools, samples, counts, *, lockstep=True):
    totals = tools.totals_of(samples)
    return [*tools.waves(tools.deal(samples, counts), totals, lockstep=lockstep), ("step", (totals,))]


@pytest.fixture(scope="module")
def travels(tools, tied_policy, tmp_path_factory):
    """A policy's journey: two updates on 1 rank, loaded and trained on at 2, at 3 and at 1 again. Results by number of
    ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    history, _ = tools.plain_updates(tied_policy, OBJECTIVE, LEARNER, count=5)
    batches = [samples for samples, _, _ in history]
    places = {ranks: str(folder / f"saved_at_{ranks}") for ranks in (1, 2, 3)}
    one, two, three = (
        tools.make_config(tied_policy, learner=LEARNER, objective=OBJECTIVE, ranks=ranks) for ranks in (1, 2, 3)
    )
    free = tools.make_config(tied_policy, learner=replace(LEARNER, grad_sync="last_row"), objective=OBJECTIVE, ranks=2)
    saved = [("states", ()), ("save", (places[1],))]
    found = {1: tools.run_here(one, [*update(tools, batches[0], (2,)), *update(tools, batches[1], (1,)), *saved])}
    goes_on = [("states", ()), *update(tools, batches[2], (1, 1))]

    def resumed_at(lockstep):
        return [("states", ()), *update(tools, batches[3], (2, 1), lockstep=lockstep), ("states", ())]

    scenarios = {
        "goes on": Scenario(two, [*goes_on, ("save", (places[2],)), *resumed_at(True)], checkpoint=places[1]),
        "resumed": Scenario(two, resumed_at(True), checkpoint=places[2]),
        "last_row": Scenario(free, resumed_at(False), checkpoint=places[2]),
    }
    found[2] = run_ranks(folder, scenarios, 2)[0]
    calls = [("states", ()), *update(tools, batches[3], (1, 0, 1)), ("save", (places[3],)), ("states", ())]
    scenario = Scenario(three, calls, checkpoint=places[2])
    found[3] = run_ranks(folder, {"goes on": scenario}, 3)[0]["goes on"]
    found["back at 1"] = tools.run_here(
        one, [("states", ()), *update(tools, batches[4], (1,)), ("states", ())], checkpoint=places[3]
    )
    return found, places, history


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, state in found.items():
        assert state.keys() == expected[name].keys() == {"master", "exp_avg", "exp_avg_sq"}
        for key, value in state.items():
            assert torch.equal(value, expected[name][key]), (name, key)


def test_masters_and_moments_are_the_same_wherever_they_are_loaded(travels):
    found = travels[0]
    assert_same(found[2]["goes on"][0], found[1][-2])  # 1 rank -> 2
    saved_at_2 = next(result for result in found[2]["goes on"][1:] if result and "model.norm.weight" in result)
    assert_same(found[2]["resumed"][0], saved_at_2)  # 2 -> 2
    assert_same(found[2]["last_row"][0], saved_at_2)
    assert_same(found[3][0], saved_at_2)  # 2 -> 3
    assert_same(found["back at 1"][0], found[3][-1])  # 3 -> 1


def test_the_next_update_is_bitwise_that_of_a_run_that_went_on(travels, tools):
    found = travels[0]
    assert_same(found[2]["resumed"][-1], found[2]["goes on"][-1])
    assert tools.figures(found[2]["resumed"][-2]) == tools.figures(found[2]["goes on"][-2])


def test_five_updates_on_1_1_2_3_and_1_ranks_are_those_of_plain_adamw(tools, travels, tied_policy):
    found, _, history = travels
    _, expected = tools.plain_updates(tied_policy, OBJECTIVE, LEARNER, count=5)
    for name, state in found["back at 1"][-1].items():
        torch.testing.assert_close(state["master"], expected[name], rtol=1e-4, atol=2e-5)
    assert found["back at 1"][-2]["learner/loss"] == pytest.approx(history[-1][1], rel=1e-4)
    for name, state in found[2]["last_row"][-1].items():
        torch.testing.assert_close(state["master"], found[3][-1][name]["master"], rtol=1e-4, atol=2e-5)


@pytest.fixture
def saved(travels, tmp_path):
    """A copy of a checkpoint of two ranks that a test may break."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(travels[1][2], folder)
    return folder


def test_a_checkpoint_that_is_not_whole_is_refused(saved):
    of_rank_1, progress = (saved / "training_state" / name for name in ("rank_1_0.safetensors", "progress.json"))
    tensor, value = next(iter(load_file(of_rank_1).items()))
    of_rank_1.unlink()
    with pytest.raises(ValueError, match="it has none"):
        SavedState(saved).read(tensor.rpartition("/")[0], value.shape)
    progress.unlink()
    with pytest.raises(ValueError, match="has no training_state/progress.json: it was not saved to its end"):
        SavedState(saved)


def test_a_state_of_another_model_is_refused(saved):
    state = SavedState(saved)
    assert (state.num_updates, state.optimizer_steps) == (3, 3)
    for name, said in (("lm_head.weight", "none"), ("model.norm.weight", r"\[32\]")):
        with pytest.raises(ValueError, match=rf"of another model or .* {name}/master must be \[64\], it has {said}"):
            state.read(name, torch.Size([64]))


def test_files_are_written_when_they_are_large_enough_and_no_more_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1000)
    states = [
        (f"p{number}", {kind: torch.full((100,), float(number)) for kind in ("master", "exp_avg", "exp_avg_sq")})
        for number in range(5)
    ]
    one_by_one = [(f"{name}/{kind}", value) for name, state in states for kind, value in state.items()]
    save_training_state(tmp_path, shapes_of(one_by_one), iter(one_by_one), rank=0, world_size=1)
    write_progress(tmp_path, num_steps=4, num_updates=4, optimizer_steps=3)
    sizes = {path.name: len(load_file(path)) for path in (tmp_path / "training_state").glob("*.safetensors")}
    # 1,200 bytes a parameter
    assert sizes == {f"rank_0_{number}.safetensors": 3 for number in range(5)}
    saved = SavedState(tmp_path)
    for name, state in states:
        read = saved.read(name, torch.Size([100]))
        assert read.keys() == state.keys() and all(torch.equal(read[key], state[key]) for key in state)


@pytest.mark.parametrize("file_bytes", [50 * 10**9, 30_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_written_a_tensor_at_a_time_is_the_one_of_save_pretrained(
    tools, tied_policy, tmp_path, monkeypatch, dtype, file_bytes
):
    monkeypatch.setattr(checkpoint, "WEIGHT_FILE_BYTES", file_bytes)
    lm, tokenizer = tools.load_plain(tied_policy).to(dtype), load_tokenizer(tools.make_config(tied_policy).model)
    tensors = list(lm.named_parameters())
    save_pretrained_folder(tmp_path / "ours", lm, shapes_of(tensors), iter(tensors), tokenizer, rank=0)
    lm.save_pretrained(tmp_path / "theirs", max_shard_size=file_bytes)
    tokenizer.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys() and (len(ours) > 6) == (file_bytes == 30_000)
    index = "model.safetensors.index.json"
    if index in ours:
        assert json.loads(ours.pop(index))["weight_map"] == json.loads(theirs.pop(index))["weight_map"]
    assert ours == theirs


# by rank
OCCUPIED = [(0, "model.safetensors"), (1, "training_state/rank_1_0.safetensors"), (0, "training_state/progress.json")]


@pytest.mark.parametrize("learner", [{}, {"backend": "deepspeed", "zero_stage": 2}])
def test_a_rank_that_cannot_write_fails_on_all_and_leaves_them_in_step(tools, tied_policy, tmp_path, learner):
    if learner:
        pytest.importorskip("deepspeed")
    # the second update has the first policy's samples
    objective = replace(OBJECTIVE, mismatch_stop=100.0, mismatch_stop_float32=100.0)
    config = tools.make_config(tied_policy, learner=replace(LEARNER, **learner), objective=objective, ranks=2)
    samples = tools.make_samples(tools.load_plain(tied_policy), seed=3)
    first, second = update(tools, samples, (2, 1)), update(tools, samples, (1, 2))
    scenarios = {"without": Scenario(config, [*first, *second, ("parameters", ())])}
    for _, name in OCCUPIED:
        (tmp_path / name.replace("/", "_") / name).mkdir(parents=True)  # where a file is to be
        saves = ("failing_save", (str(tmp_path / name.replace("/", "_")),))
        scenarios[name] = Scenario(config, [*first, saves, *second, ("parameters", ())])
    found = run_ranks(tmp_path, scenarios, 2)
    for rank, name in OCCUPIED:
        said = [next(result for result in of_rank[name] if isinstance(result, str)) for of_rank in found]
        assert said[0] == said[1] and f"could not be written by rank {rank}: " in said[0]
        for key, tensor in found[0]["without"][-1].items():
            assert torch.equal(tensor, found[0][name][-1][key])
        with pytest.raises(ValueError, match="has no training_state/progress.json"):
            SavedState(tmp_path / name.replace("/", "_"))


@pytest.mark.parametrize("learner", [{}, {"backend": "deepspeed", "zero_stage": 3}])
def test_a_disk_slower_than_a_collective_may_be_does_not_end_the_ranks(tools, tied_policy, tmp_path, learner):
    """Writing is no collective: `cluster.progress_timeout_s` bounds it, as the driver's waiting for it."""
    if learner:
        pytest.importorskip("deepspeed")
    config = tools.make_config(tied_policy, learner=replace(LEARNER, **learner), objective=OBJECTIVE, ranks=2)
    config = replace(config, cluster=replace(config.cluster, progress_timeout_s=30.0))
    samples = tools.make_samples(tools.load_plain(tied_policy), seed=3)
    saves = ("slow_save", (str(tmp_path / "saved"), 25.0))
    found = run_ranks(
        tmp_path, {"slow": Scenario(config, [saves, *update(tools, samples, (2, 1)), ("parameters", ())])}, 2
    )
    assert all(torch.equal(tensor, found[1]["slow"][-1][name]) for name, tensor in found[0]["slow"][-1].items())
    assert SavedState(tmp_path / "saved").num_updates == 0
