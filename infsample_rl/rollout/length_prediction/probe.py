"""Our length predictor: a ridge regression on the policy's own hidden state, fitted online on every finished sample.

The model is log(remaining tokens) = w . x + normal noise. The features x are made of the policy's last hidden state h
(the input of its head) after n tokens of a response: A h, relu(B h), log n and 1, with fixed random matrices A (the
identity for narrow states) and B. The relu half lets a linear fit bend: on kk_tiny's rollouts it explains 0.62 of the
variance instead of 0.55. What a fit needs are sums over observations, so those of several workers add, and old ones can
be forgotten by a factor. Nothing of it changes a sample: predictions only order what the schedules run.

Letters: n observations, E hidden size of the policy, D = min(E, 256), F = 2 D + 2 features.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from infsample_rl.types import ProbeFit, ProbeStatistics

HALF_DIMENSIONS = 256  # most of A h and of relu(B h): sums of 512^2 float64 are 2 MB a fold, solved in 0.1 s
FOLDS = 2  # the penalty is chosen by what a fit on either fold says of the other
FEWEST_ROWS = 16  # in each fold, for a fit
PENALTIES = tuple(10.0 ** (half / 2) for half in range(2, 13))  # in observations; at 10^6 little but the mean is left
DECAY = 0.9  # from one version of the weights to the next; fewer than ten steps hold too few samples for 512 dimensions
_LOWEST_DEVIATION = 1e-3  # of log lengths; keeps the imputation defined when a fit has no residual

Moments = tuple[torch.Tensor, torch.Tensor, float]  # sums of z z^T [F - 1, F - 1], z y [F - 1] and y^2


class LengthProbe:
    """Predicts how many tokens of a response are left, and learns from responses that have ended."""

    def __init__(self, hidden_size: int, *, max_new_tokens: int, seed: int = 0) -> None:
        """`max_new_tokens`: the cap of a response. `seed`: of the random matrices; equal seeds, equal features."""
        self.max_new_tokens = max_new_tokens
        half = min(hidden_size, HALF_DIMENSIONS)
        self.num_features = 2 * half + 2
        self.statistics = ProbeStatistics.zeros(self.num_features)
        self.fitted: ProbeFit | None = None
        noise = torch.randn(hidden_size, 2 * half, generator=torch.Generator().manual_seed(seed))
        noise /= math.sqrt(hidden_size)
        if half == hidden_size:
            noise[:, :half] = torch.eye(half)
        self._matrices, self._half = noise, half  # A and B side by side [E, 2 D]

    @torch.no_grad()
    def features(self, hidden: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """hidden [n, E] after num_tokens [n] of the response (>= 1) -> [n, F] float32 on the same device."""
        self._matrices = self._matrices.to(hidden.device)  # moved once
        features = torch.ones(len(hidden), self.num_features, device=hidden.device)
        torch.mm(hidden.float(), self._matrices, out=features[:, :-2])
        features[:, self._half : -2].relu_()
        torch.log(num_tokens.to(hidden.device, torch.float32).clamp_(min=1), out=features[:, -2])
        return features

    @torch.no_grad()
    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """features [n, F] float32 -> tokens left [n] float32, between 1 and max_new_tokens less the tokens so far,
        whatever the features hold.

        The median under the model. Before the first fit, and where the features are not finite, a third of the room.
        """
        room = (self.max_new_tokens - features[:, -2].exp().round()).nan_to_num(nan=1.0).clamp(1, self.max_new_tokens)
        if self.fitted is None:
            return (room / 3).clamp(min=1)
        # from_numpy shares no state with the fit: it is only read
        logs = (features.double() @ torch.from_numpy(self.fitted.weights).to(features.device)).float()
        logs = torch.where(logs.isfinite(), logs, (room / 3).log())
        return torch.minimum(logs.clamp(0, math.log(self.max_new_tokens) + 1).exp(), room).clamp(min=1)

    def observe(self, features: torch.Tensor, remaining: torch.Tensor, censored: torch.Tensor, fold: int) -> None:
        """Add responses that have ended: features [n, F], tokens that came after them [n] (>= 1), and censored [n]: cut
        at the cap.

        A cut response would have had more than `remaining` tokens; it enters with the mean and the variance of its log
        length given that, under the current fit (the E step of a censored regression, Buckley and James 1979; a fit is
        the M step, so the next fits converge as observations come in). Before the first fit it enters with what was
        seen. `fold`: 0 or 1, equal for all responses to a prompt, so that the penalty is chosen for prompts not seen.
        Rows that are not finite are left out.
        """
        usable = features.isfinite().all(dim=1)
        x = features[usable].double().cpu()
        targets, spread = self._targets(x, remaining[usable].double().cpu().log(), censored[usable].cpu())
        sums = self.statistics
        sums.xx[fold] += (x.T @ x).numpy()
        sums.xy[fold] += (x.T @ targets).numpy()
        sums.yy[fold] += float(targets @ targets + spread.sum())

    def take_statistics(self) -> ProbeStatistics:
        """The statistics so far; the probe goes on from none."""
        taken, self.statistics = self.statistics, ProbeStatistics.zeros(self.num_features)
        return taken

    def fit(self) -> None:
        """Ridge regression on standardised features, the penalty chosen by two-fold cross-validation; all from the
        sums. All stays as before while there are too few rows in a fold."""
        sums = self.statistics
        if sums.counts.min() < FEWEST_ROWS:
            return
        whole, count = sums.xx.sum(0), sums.counts.sum()
        mean, mean_y = whole[-1, :-1] / count, sums.xy[:, -1].sum() / count
        variance = np.diagonal(whole)[:-1] / count - mean**2
        varies = variance > 1e-8 * (mean**2 + 1e-8)
        scale = np.where(varies, 1 / np.sqrt(np.where(varies, variance, 1.0)), 0.0)
        folds = [_standardised(sums, fold, mean, mean_y, scale) for fold in range(FOLDS)]
        errors: Any = sum(_errors(folds[fold], folds[1 - fold]) for fold in range(FOLDS))
        best = int(errors.argmin())
        products, targets, _ = (sum(parts) for parts in zip(*folds, strict=True))
        products.diagonal().add_(PENALTIES[best])
        solution = torch.cholesky_solve(targets[:, None], torch.linalg.cholesky(products))[:, 0].numpy()
        weights = solution * scale
        deviation = math.sqrt(max(float(errors[best]) / count, _LOWEST_DEVIATION**2))
        self.fitted = ProbeFit(weights=np.append(weights, mean_y - mean @ weights), deviation=deviation)

    def state(self) -> dict[str, np.ndarray]:
        """Statistics and fit as arrays, for numpy's savez."""
        state = {"xx": self.statistics.xx, "xy": self.statistics.xy, "yy": self.statistics.yy}
        if self.fitted is not None:
            state |= {"weights": self.fitted.weights, "scalars": np.array([self.fitted.deviation])}
        return state

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Go on from what `state` returned. Before anything changes: ValueError for a probe of another size, KeyError
        for a missing array."""
        if state["xy"].shape != self.statistics.xy.shape:
            found, wanted = state["xy"].shape[1], self.num_features
            raise ValueError(
                f"the length probe's state has {found} features, this policy's has {wanted}: it belongs to another "
                "model"
            )
        statistics = ProbeStatistics(*(np.array(state[name], np.float64) for name in ("xx", "xy", "yy")))
        fitted = None
        if "weights" in state:
            fitted = ProbeFit(np.array(state["weights"], np.float64), float(state["scalars"][0]))
        self.statistics, self.fitted = statistics, fitted

    def _targets(
        self, x: torch.Tensor, seen: torch.Tensor, censored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance [n] of the log of the tokens left, given that a censored one is above its `seen`."""
        if self.fitted is None or not censored.any():
            return seen, torch.zeros_like(seen)
        mean, deviation = x @ torch.from_numpy(self.fitted.weights), self.fitted.deviation
        above = ((seen - mean) / deviation).clamp(-30, 30)
        # of a standard normal above a: mean h = density / tail, variance 1 - h (h - a); the tail by logs, as it
        # underflows
        hazard = (-0.5 * above.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(-above)).exp()
        imputed = torch.maximum(mean + deviation * hazard, seen)
        spread = deviation**2 * (1 - hazard * (hazard - above)).clamp(0, 1)
        return torch.where(censored, imputed, seen), torch.where(censored, spread, 0.0)


def _standardised(sums: ProbeStatistics, fold: int, mean: np.ndarray, mean_y: float, scale: np.ndarray) -> Moments:
    """One fold's sums of z z^T, z (y - mean_y) and (y - mean_y)^2, where z = (x - mean) scale without the constant."""
    xx, xy, count = sums.xx[fold], sums.xy[fold], sums.counts[fold]
    sum_x, sum_y = xx[-1, :-1], xy[-1]
    products = xx[:-1, :-1] - np.outer(mean, sum_x) - np.outer(sum_x, mean) + count * np.outer(mean, mean)
    targets = xy[:-1] - mean * sum_y - mean_y * sum_x + count * mean_y * mean
    squares = sums.yy[fold] - 2 * mean_y * sum_y + count * mean_y**2
    return torch.from_numpy(products * np.outer(scale, scale)), torch.from_numpy(targets * scale), float(squares)


def _errors(fold: Moments, other: Moments) -> torch.Tensor:
    """Squared errors on the other fold of this fold's fits, one for each of PENALTIES [P]."""
    (products, targets, _), (other_products, other_targets, other_squares) = fold, other
    values, vectors = torch.linalg.eigh(products)
    inverse = 1 / (values.clamp(min=0) + torch.tensor(PENALTIES, dtype=torch.float64)[:, None])
    fits = (inverse * (vectors.T @ targets)) @ vectors.T  # [P, F - 1]
    return other_squares - 2 * fits @ other_targets + ((fits @ other_products) * fits).sum(1)
