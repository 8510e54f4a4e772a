"""Stop strings: whether a sample's newest token completes one. Standard library and the tokenizer only."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from infsample_rl.model.tokenizer import response_text

_UNDECODED = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no whole character decode to
_SLACK_TOKENS = 8


class StopStrings:
    """Finds stop strings in the text of a response, wherever its tokens end; the prompt is never looked at.

    `ends` is asked for every new token, and is nearly always one look into a dict: only a token whose own text holds
    the last character of a string, or which ends or begins inside a character, can complete one. Then a tail of the
    response is decoded, and only if that holds a string the whole, whose text decides.

    The tail is long enough: a string of b UTF-8 bytes lies in at most b tokens with text. `_SLACK_TOKENS` more cover a
    character begun up to 3 tokens earlier, and the first token's leading space, which sentencepiece drops. A run of
    byte-fallback tokens (<0x0A>) decodes as a whole or not at all, so a tail never begins in one. Where a tokenizer
    cleans up spaces after decoding, texts of any number of tokens may join: there the tail is the response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        """ValueError for a string that the text of a response can never hold: one with a special token in it."""
        self.strings = list(strings)
        special = sorted(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        for string in self.strings:
            inside = [token for token in special if token in string]
            if inside:
                token_id = tokenizer.convert_tokens_to_ids(inside[0])
                raise ValueError(
                    f"rollout.stop_strings must not hold special tokens, which texts leave out, got {string!r}; "
                    f"the nearest that works is rollout.stop_token_ids=[{token_id}]"
                )
        self._tokenizer = tokenizer
        self._last_characters = {string[-1] for string in self.strings}
        longest = max((len(string.encode()) for string in self.strings), default=0)
        self._tail_tokens = None if tokenizer.clean_up_tokenization_spaces else longest + _SLACK_TOKENS
        vocabulary = tokenizer.get_vocab() if self.strings else {}
        self._byte_ids = {vocabulary[name] for name in (f"<0x{byte:02X}>" for byte in range(256)) if name in vocabulary}
        self._texts: dict[int, str] = {}  # of tokens seen so far
        self._may_end: dict[int, bool] = {}

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether the response's text holds a stop string now; to be asked after every token of a response."""
        if not self.strings or not token_ids:
            return False
        newest = token_ids[-1]
        may_end = self._may_end.get(newest)
        if may_end is None:
            text = self._text(newest)
            may_end = self._may_end[newest] = _UNDECODED in text or not self._last_characters.isdisjoint(text)
        return may_end and self._holds(self._tail(token_ids)) and self._holds(token_ids)

    def _holds(self, token_ids: Sequence[int]) -> bool:
        text = response_text(self._tokenizer, list(token_ids))
        return any(string in text for string in self.strings)

    def _text(self, token_id: int) -> str:
        """A token's text, "" for a special one. Twice over, since the first token of a text may lose its leading
        space."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = response_text(self._tokenizer, [token_id, token_id])
        return text

    def _tail(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self._tail_tokens is None:
            return token_ids
        start, found = len(token_ids), 0
        while start > 0 and (found < self._tail_tokens or token_ids[start] in self._byte_ids):
            start -= 1
            found += self._text(token_ids[start]) != ""
        return token_ids[start:]
