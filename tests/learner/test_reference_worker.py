"""The reference: the frozen policy's log-probabilities, whatever the rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infsample_rl.learner.reference import ReferenceWorker
from tests.configs import run_config
from tests.tiny_models import TINY_SIZES, finished, prompt_of, save_words


def save_policy(folder, seed, vocab_size=64):
    torch.manual_seed(seed)
    sizes = TINY_SIZES | {"vocab_size": vocab_size}
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2)).save_pretrained(folder)
    save_words(folder)
    return str(folder)


def make_config(path, max_tokens, reference_path=None, top_k=0):
    distills = {"kl_coef": 0.0, "distill_coef": 1.0, "distill_top_k": top_k} if top_k else {}
    return run_config(
        objective=distills,
        model={"path": path},
        data={"max_prompt_tokens": 8},
        rollout={"max_new_tokens": 8, "temperature": 0.8},
        reference={"path": reference_path, "max_tokens_per_micro_batch": max_tokens},
    )


PROMPT = prompt_of(0, [5, 9, 7])
COMPLETIONS = [
    finished(0, 3, [11, 4, 2], -1.0),
    finished(0, 1, [6], -2.0),
    finished(0, 0, [1, 2, 3, 4, 5, 6, 7, 8], -3.0),
    finished(0, 2, [9, 9], -0.5),
]


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize(("max_tokens", "rows"), [(16, [15, 5]), (17, [17]), (100, [17])])
def test_logprobs_equal_the_frozen_model_for_any_row_size(tmp_path, max_tokens, rows, top_k):
    policy, frozen = save_policy(tmp_path / "policy", 0), save_policy(tmp_path / "frozen", 1)
    worker, seen = ReferenceWorker(make_config(policy, max_tokens, frozen, top_k)), []
    worker.policy.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].input_ids.shape[1]))
    worker.memory = SimpleNamespace(peak_bytes=lambda: 123)
    result = worker.logprobs(PROMPT, COMPLETIONS)
    assert seen == rows  # tokens of each row, the prompt of 3 in every one
    assert result.report.peak_memory_bytes == 123
    lm = LlamaForCausalLM.from_pretrained(frozen)
    for own, kl_sum, sampled in zip(result.tokens, result.report.kl_sums, COMPLETIONS, strict=True):
        ids = torch.from_numpy(np.concatenate([PROMPT.token_ids, sampled.token_ids]).astype(np.int64))
        with torch.no_grad():
            table = (lm(input_ids=ids[None]).logits[0, 2:-1, :60] / 0.8).log_softmax(-1)
        expected = table.gather(-1, ids[3:, None])[:, 0].numpy()
        assert own.logprobs.dtype == own.likely.dtype == np.float32 and own.ids.dtype == np.int32
        np.testing.assert_allclose(own.logprobs, expected, atol=1e-5)
        likely, likeliest = table.topk(top_k)
        assert own.ids.tolist() == likeliest.tolist()
        np.testing.assert_allclose(own.likely, likely.numpy(), atol=1e-5)
        assert kl_sum == pytest.approx(float((sampled.logprobs - expected).sum()), abs=1e-4)


def test_bad_ids_have_no_probability_in_the_reference_either(tmp_path):
    policy = save_policy(tmp_path, 0)
    config = make_config(policy, 100)
    config.rollout.bad_token_ids = [0, 20, 59]
    config.objective.distill_coef, config.objective.distill_top_k = 1.0, 57
    (own,) = ReferenceWorker(config).logprobs(PROMPT, COMPLETIONS[:1]).tokens
    lm = LlamaForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([[5, 9, 7, 11, 4, 2]])).logits[0, 2:-1, :60] / 0.8
    table = logits.index_fill(-1, torch.tensor([0, 20, 59]), -torch.inf).log_softmax(-1)
    np.testing.assert_allclose(own.logprobs, table[[0, 1, 2], [11, 4, 2]].numpy(), atol=1e-5)
    assert [sorted(ids) for ids in own.ids.tolist()] == [[each for each in range(60) if each not in (0, 20, 59)]] * 3
    np.testing.assert_allclose(np.exp(own.likely).sum(1), 1, rtol=1e-5)


def test_without_a_path_of_its_own_the_reference_is_the_policy_at_the_start(tmp_path):
    policy = save_policy(tmp_path, 0)
    own = ReferenceWorker(make_config(policy, 100)).logprobs(PROMPT, COMPLETIONS)
    named = ReferenceWorker(make_config(policy, 100, policy)).logprobs(PROMPT, COMPLETIONS)
    assert [tokens.logprobs.tolist() for tokens in own.tokens] == [tokens.logprobs.tolist() for tokens in named.tokens]


def test_a_smaller_vocabulary_is_refused(tmp_path):
    policy, small = save_policy(tmp_path / "policy", 0), save_policy(tmp_path / "small", 1, vocab_size=50)
    with pytest.raises(ValueError, match="has a vocabulary of 50 ids, the policy's tokenizer has 60"):
        ReferenceWorker(make_config(policy, 16, small))


@pytest.mark.parametrize("setting", ["reference.path", "model.path"])
def test_damaged_weights_name_the_setting_of_their_folder(tmp_path, setting):
    policy, frozen = save_policy(tmp_path / "policy", 0), save_policy(tmp_path / "frozen", 1)
    (tmp_path / ("frozen" if setting == "reference.path" else "policy") / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match=f"^{setting}=.*: no causal language model could be loaded"):
        ReferenceWorker(make_config(policy, 16, frozen if setting == "reference.path" else None))
