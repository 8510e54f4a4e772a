"""A run's length probe in a checkpoint: a damaged file is a sentence and a fresh probe, never an error and never half
of the old one."""

from __future__ import annotations

import numpy as np
import pytest

from infsample_rl.rollout.length_prediction.run_probe import FILE, RunProbe
from infsample_rl.types import ProbeReport, ProbeStatistics

SIZE = 2 * 4 + 2


def probe_with_a_past() -> RunProbe:
    probe = RunProbe(4, max_new_tokens=32)
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.normal(size=(2, 40, SIZE - 1)), np.ones((2, 40, 1))], axis=2)
    y = x[:, :, 0] + 2
    seen = ProbeStatistics(np.einsum("fni,fnj->fij", x, x), np.einsum("fni,fn->fi", x, y), (y**2).sum(1))
    probe.enter([ProbeReport(statistics=seen, steps_with=9, steps_without=10)])
    return probe


def without(name):
    def damage(path):
        with np.load(path) as file:
            kept = {key: array for key, array in file.items() if key != name}
        np.savez(path, **kept)

    return damage


def cut(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(bytes(content))


def reshaped(path):
    with np.load(path) as file:
        kept = dict(file)
    np.savez(path, **(kept | {"replays": np.arange(3)}))


def test_a_saved_probe_is_loaded_whole(tmp_path):
    probe, other = probe_with_a_past(), RunProbe(4, max_new_tokens=32)
    probe.save(tmp_path)
    assert other.load(tmp_path) is None
    assert (
        other.published().is_used and other.published().fit.weights.tobytes() == probe.published().fit.weights.tobytes()
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut(0), "is damaged (EOFError"),
        (cut(0.5), "is damaged (BadZipFile"),
        (flip, "is damaged (BadZipFile"),
        (without("replays"), "is damaged (KeyError: 'replays')"),
        (without("yy"), "is damaged (KeyError: 'yy')"),
        (without("scalars"), "is damaged (KeyError: 'scalars')"),
        (reshaped, "cannot reshape"),
        (lambda path: path.write_text("no archive"), FILE),
    ],
    ids=["empty", "truncated", "a bit", "replays", "yy", "scalars", "replays' shape", "text"],
)
def test_a_damaged_file_is_a_sentence_and_a_fresh_probe(tmp_path, damage, reason):
    probe_with_a_past().save(tmp_path)
    damage(tmp_path / FILE)
    fresh = RunProbe(4, max_new_tokens=32)
    sentence = fresh.load(tmp_path)
    assert (
        sentence.startswith(str(tmp_path / FILE))
        and reason in sentence
        and sentence.endswith("; the length probe starts anew")
    )
    assert (
        fresh.statistics.counts.tolist() == [0, 0] and not fresh.published().is_used and fresh.published().fit is None
    )


def test_another_models_probe_is_a_sentence_and_a_fresh_probe(tmp_path):
    probe_with_a_past().save(tmp_path)
    fresh = RunProbe(8, max_new_tokens=32)
    assert (
        "has 10 features, this policy's has 18: it belongs to another model; the length probe starts anew"
        in fresh.load(tmp_path)
    )
    assert not fresh.published().is_used
