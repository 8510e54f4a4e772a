"""Drawing tokens with hashed two-level Gumbel noise, so that no schedule, slot or worker can change a sample.

The noise of a token is a pure function of (seed, domain, step, prompt_index, sample_index, position). The vocabulary is
cut into blocks: Gumbel-max picks the block by its mass, then the token inside it, which draws exactly from the
distribution at the noise of V / B + B entries instead of V. Letters: R rows, V vocabulary of the model's head, B block
size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from infsample_rl.model.policy_head import masked_index
from infsample_rl.types import MaybeNone

TRAINING, EVALUATION = 0, 1  # noise domains

# splitmix64: its two multipliers and its increment
_C1, _C2, _GOLD = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_TOP_CANDIDATES = 1024  # a sort of 152k entries is 20 times dearer than the top 1,024, which nearly always hold top_p


@dataclass(slots=True)
class DrawnTensors:
    """One token of every row, still on the device, or on its way to host memory."""

    tokens: Tensor  # [R] int64
    probs: Tensor  # [R] float32, of softmax(logits / temperature)
    sampling_probs: Tensor | MaybeNone  # [R] float64, of the truncated distribution; None without truncation
    ready: torch.cuda.Event | None = None  # after which the tensors, in host memory already, hold the step's results

    @classmethod
    def join(cls, parts: Sequence[DrawnTensors]) -> DrawnTensors:
        """Of consecutive rows."""
        sampling = None if parts[0].sampling_probs is None else torch.cat([part.sampling_probs for part in parts])
        tokens, probs = torch.cat([part.tokens for part in parts]), torch.cat([part.probs for part in parts])
        return cls(tokens, probs, sampling)


@dataclass(slots=True)
class Drawn:
    """One token of every row."""

    tokens: list[int]
    logprobs: list[float]  # of softmax(logits / temperature)
    sampling_logprobs: list[float] | None  # of the truncated distribution; None without truncation


class Sampler:
    """Draws from softmax(logits / temperature) over ids below `valid_vocab` but `bad_token_ids`, cut by top_k, then
    top_p, then min_p.

    Ties at a cut are kept. temperature 0 is exact argmax (the lowest of equal ids), with log-probabilities at
    temperature 1 and no truncation.
    """

    def __init__(
        self,
        vocab_size: int,
        valid_vocab: int,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float,
        bad_token_ids: Sequence[int] = (),
        device: torch.device,
    ) -> None:
        """ValueError for a bad id outside 0 to valid_vocab - 1, and when no id is left."""
        self.valid_vocab, self.temperature = valid_vocab, temperature
        self.top_p, self.top_k, self.min_p = top_p, top_k, min_p
        # equal: draws alike
        self.settings = (vocab_size, valid_vocab, temperature, top_p, top_k, min_p, tuple(bad_token_ids))
        self.truncates = truncates_at(temperature, top_p, top_k, min_p, valid_vocab)
        self.num_blocks, self.block_size = split_vocabulary(vocab_size)
        self._padding = self.num_blocks * self.block_size - vocab_size
        entries = [_signed((index + 1) * _GOLD) for index in range(self.num_blocks + self.block_size)]
        self._entries = torch.tensor(entries, dtype=torch.int64, device=device)
        self._masked = masked_index(bad_token_ids, valid_vocab, device)

    @torch.no_grad()  # torch.compile cannot write in place in inference mode
    def draw(self, logits: Tensor, keys: Tensor, positions: Tensor, *, in_triton: bool = False) -> DrawnTensors:
        """One token per row from logits [R, V] (overwritten), keys of `sample_key` and positions in the response (both
        [R] int64). `in_triton`: the cut of top_p by its kernel there.

        On CUDA without a host sync and with the same kernels whatever the values, so a CUDA graph can hold it. Beside
        the logits one float32 [R, V] exists (one more for logits in 16 bits at a temperature other than 1, one for a
        padded vocabulary).
        """
        if self.valid_vocab < logits.shape[1]:
            # rows the head has beyond the tokenizer; the learner leaves them out too
            logits[:, self.valid_vocab :] = -math.inf
        if self._masked is not None:
            logits.index_fill_(1, self._masked, -math.inf)
        if self.temperature == 0:
            tokens = logits.argmax(dim=-1)
            return DrawnTensors(
                tokens, torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, tokens[:, None])[:, 0], None
            )
        if self.temperature != 1:
            logits = logits.float().div_(self.temperature)
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
        keys_of_tokens = _mix((keys ^ positions) + _signed(_GOLD))
        if not self.truncates:
            return DrawnTensors(*self._draw_two_level(probs, keys_of_tokens), None)
        scratch = logits if logits.dtype == torch.float32 else None
        probs.masked_fill_(probs < self._cutoff(probs, scratch, in_triton=in_triton), 0.0)
        tokens, mass = self._draw_two_level(probs, keys_of_tokens)
        return DrawnTensors(tokens, mass, mass.double() / probs.sum(dim=-1))

    @staticmethod
    def to_host(drawn: DrawnTensors) -> Drawn:
        """Lists, by one transfer for all rows. NaN for a probability that is not positive, as of logits that are not
        finite.

        Logarithms are taken on the host: a tensor's rounds differently in a vector and in its tail.
        """
        if drawn.ready is not None:
            drawn.ready.synchronize()
        columns = [drawn.tokens, drawn.probs] + ([] if drawn.sampling_probs is None else [drawn.sampling_probs])
        # float64 holds ids exactly
        host_tokens, *host_probs = torch.stack([column.double() for column in columns]).tolist()
        logprobs = [[math.log(prob) if prob > 0 else math.nan for prob in column] for column in host_probs]
        return Drawn([int(token) for token in host_tokens], logprobs[0], logprobs[1] if len(logprobs) > 1 else None)

    def _draw_two_level(self, probs: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Token and its entry of `probs` [R, V] (need not sum to 1) for every row."""
        num_rows = probs.shape[0]
        if self._padding:
            probs = F.pad(probs, (0, self._padding))
        blocks = probs.view(num_rows * self.num_blocks, self.block_size)
        noise = _gumbel(_mix(keys[:, None] + self._entries))  # [R, V/B + B] float64
        block_mass = blocks.sum(dim=-1).view(num_rows, self.num_blocks)
        block = (block_mass.double().log_() + noise[:, : self.num_blocks]).argmax(dim=-1)
        inside = blocks.index_select(
            0, block + torch.arange(0, num_rows * self.num_blocks, self.num_blocks, device=block.device)
        )
        # noise inside a block need not depend on which block it is: only one block is ever looked into
        index = (inside.double().log_() + noise[:, self.num_blocks :]).argmax(dim=-1)
        return block * self.block_size + index, inside.gather(1, index[:, None])[:, 0]

    def _cutoff(self, probs: Tensor, scratch: Tensor | None = None, *, in_triton: bool = False) -> Tensor:
        """Smallest probability that top_k, top_p and min_p keep: [R, 1]. `scratch`: as in `nucleus_cutoff`."""
        cutoff = self.min_p * probs.amax(dim=-1, keepdim=True)
        top_k = min(self.top_k, self.valid_vocab) or self.valid_vocab
        if top_k == self.valid_vocab and self.top_p == 1:
            return cutoff
        if top_k == self.valid_vocab and in_triton:
            from infsample_rl.rollout.kernels import nucleus_triton  # Triton may be absent

            return torch.maximum(cutoff, nucleus_triton.nucleus_cutoff(probs, self.top_p))
        if top_k == self.valid_vocab and probs.is_cuda:
            return torch.maximum(cutoff, nucleus_cutoff(probs, self.top_p, scratch))
        candidates = min(max(_TOP_CANDIDATES, top_k if self.top_k else 0), self.valid_vocab)
        values = probs.topk(candidates, dim=-1).values
        # on the CPU only: a host sync
        if self.top_p < 1 and candidates < top_k and bool((values.sum(dim=-1) < self.top_p).any()):
            values = probs.sort(dim=-1, descending=True).values[:, : self.valid_vocab]
        values = values[:, :top_k]
        if self.top_p < 1:
            mass = values.sum(dim=-1, keepdim=True) if top_k < self.valid_vocab else 1.0  # top_p of what top_k has left
            num_kept = ((values.cumsum(dim=-1) - values) < self.top_p * mass).sum(dim=-1, keepdim=True).clamp(min=1)
            return torch.maximum(cutoff, values.gather(1, num_kept - 1))
        return torch.maximum(cutoff, values[:, -1:])


def truncates_at(temperature: float, top_p: float, top_k: int, min_p: float, valid_vocab: int) -> bool:
    """Whether some ids are cut off, so that samples come from another distribution than the policy's."""
    return temperature > 0 and (top_p < 1 or 0 < top_k < valid_vocab or min_p > 0)


def nucleus_cutoff(probs: Tensor, top_p: float, scratch: Tensor | None = None) -> Tensor:
    """Largest t with sum(probs >= t) >= top_p, 0 where rounding lets none reach it: [R, 1], from probs [R, V] float32.

    t is the smallest probability of the nucleus, found exactly and without a sort: float32 numbers >= 0 are ordered
    like the integers of the same bits, so the answer's bits are set from the highest down, each kept if the sum still
    reaches top_p (rounded sums in a fixed order never rise with t). 30 sums over the row: bit 30 is set from 2.0 on, no
    probability has it; nucleus_triton.py reads the row half as often. `scratch` [R, V] float32 is overwritten.
    """
    scratch = torch.empty_like(probs) if scratch is None else scratch
    bits = torch.zeros(probs.shape[0], 1, dtype=torch.int32, device=probs.device)
    for bit in range(29, -1, -1):
        trial = bits | (1 << bit)
        mass = torch.mul(probs, probs >= trial.view(torch.float32), out=scratch).sum(dim=-1, keepdim=True)
        bits = torch.where(mass >= top_p, trial, bits)
    return bits.view(torch.float32)


def split_vocabulary(vocab_size: int) -> tuple[int, int]:
    """(blocks, block size) near the square root: the nearest divisor at or above it, else with the last block padded.

    split_vocabulary(151936) -> (128, 1187); split_vocabulary(101) -> (10, 11)
    """
    root = math.isqrt(vocab_size - 1) + 1
    for block_size in range(root, 4 * root):
        if vocab_size % block_size == 0:
            return vocab_size // block_size, block_size
    return -(-vocab_size // root), root


def sample_key(seed: int, domain: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The 64-bit noise key of one sample, as a signed int; positions are mixed in by the sampler."""
    key = 0
    for word in (seed, domain, step, prompt_index, sample_index):
        key = ((key ^ (word & _MASK)) + _GOLD) & _MASK
        key = ((key ^ (key >> 30)) * _C1) & _MASK
        key = ((key ^ (key >> 27)) * _C2) & _MASK
        key ^= key >> 31
    return _signed(key)


def _signed(value: int) -> int:
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


def _shift_right(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)  # >> of int64 keeps the sign, so mask it off


def _mix(bits: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, which wraps as uint64 does."""
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_C1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_C2)
    return bits ^ _shift_right(bits, 31)


def _gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, always finite: 52 bits and a half, in float64, are never 0 and never 1."""
    uniform = (_shift_right(bits, 12).double() + 0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()
