"""Stop strings end a sample at the token that completes one, wherever tokens and characters are cut."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from infsample_rl.rollout.engine.stop_strings import StopStrings

TEXT = "It is 42.\n\nSo the answer is: \u00e9t\u00e9 \u4f60\u597d \U0001f600\U0001f680 'ok' </answer> don't , do not ."


@pytest.fixture(scope="module")
def bytes_only(tiny_qwen3):
    return AutoTokenizer.from_pretrained(tiny_qwen3)


@pytest.fixture(scope="module")
def sentencepiece():
    """Words with a leading-space mark, and bytes for everything else, as Llama 2's."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *sorted(set("Itisohewranswerk42.,:'</>d")),
        "\u2581is",
        "he",
        "an",
        "\u2581an",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def first_end(tokenizer, strings, token_ids):
    """Tokens until the decoded text of the whole response first holds a string; None: never."""
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=True)
        if any(string in text for string in strings):
            return count
    return None


def found_end(stop, token_ids):
    return next((count for count in range(1, len(token_ids) + 1) if stop.ends(token_ids[:count])), None)


def fuzz(tokenizer, seed, rounds=250):
    """Responses of text cut at random places, random tokens among them; strings out of that text or its characters."""
    generator = random.Random(seed)
    ends = 0
    for _ in range(rounds):
        ids = []
        for _ in range(generator.randint(1, 4)):
            start = generator.randrange(len(TEXT))
            ids += tokenizer(TEXT[start : start + generator.randint(1, 20)], add_special_tokens=False)["input_ids"]
            ids += [generator.randrange(len(tokenizer)) for _ in range(generator.choice([0, 0, 1, 3]))]
            ids += [tokenizer.eos_token_id] * generator.choice([0, 0, 0, 20])  # without text, within a string
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        strings = []
        for _ in range(generator.randint(1, 3)):
            source = generator.choice([TEXT, decoded or TEXT])
            start = generator.randrange(len(source))
            strings.append(source[start : start + generator.randint(1, 9)].replace("\ufffd", "?"))
        stop = StopStrings(tokenizer, strings)
        expected = first_end(tokenizer, strings, ids)
        assert found_end(stop, ids) == expected, (strings, ids)
        ends += expected is not None
    assert ends > rounds / 3


@pytest.mark.parametrize("kind", ["bytes_only", "sentencepiece"])
def test_samples_end_where_decoding_everything_finds_the_first_string(kind, request):
    fuzz(request.getfixturevalue(kind), seed=1)


def test_a_tokenizer_that_drops_spaces_after_decoding_is_decoded_whole(tiny_qwen3):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3, clean_up_tokenization_spaces=True)
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = tokenizer("x" * 40 + " ." * 20)["input_ids"]
    assert tokenizer.decode(ids) == "x" * 40 + "." * 20
    assert found_end(StopStrings(tokenizer, ["." * 20]), ids) == len(ids)  # 20 bytes in 40 tokens
    fuzz(tokenizer, seed=3, rounds=50)


def test_a_run_of_byte_tokens_is_never_cut_inside_a_character(sentencepiece):
    here, newline = (sentencepiece.convert_tokens_to_ids(piece) for piece in ("he", "<0x0A>"))
    hello = [sentencepiece.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "\u4f60\u597d".encode()]
    stop = StopStrings(sentencepiece, ["\n"])
    for count in range(1, 9):  # 7 to 49 bytes; the tail of 9 tokens alone would begin inside a character
        assert sentencepiece.decode([here] + hello * count + [newline]) == "he" + "\u4f60\u597d" * count + "\n"
        assert stop.ends([here] + hello * count + [newline])
    assert sentencepiece.decode([hello[0], newline]) == "\ufffd\ufffd"  # an invalid run holds no newline
    assert not stop.ends([hello[0]] + [newline] * 30)


def test_only_a_bounded_tail_is_decoded_and_only_for_tokens_that_can_end_a_string(bytes_only, monkeypatch):
    stop = StopStrings(bytes_only, ["</answer>"])
    ids = bytes_only("a > b " * 200, add_special_tokens=False)["input_ids"]
    assert found_end(stop, ids) is None  # every token's text is known now
    decoded, decode = [], bytes_only.decode
    monkeypatch.setattr(
        bytes_only, "decode", lambda tokens, **options: decoded.append(len(tokens)) or decode(tokens, **options)
    )
    assert found_end(stop, ids) is None
    assert len(decoded) == 200 and max(decoded) <= 17  # ">" only; 9 bytes and 8 tokens of slack
