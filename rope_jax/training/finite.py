"""The guard against numbers that are not finite: it skips their updates, or ends the run."""

import numpy as np

from rope_jax.system.files import warn
from rope_jax.training import seeds
from rope_jax.training.checkpoint import Checkpoints, NonFinite
from rope_jax.training.metrics import MetricsWriter
from rope_jax.training.setup import Setup, State, batch_ids
from rope_jax.training.trees import not_finite

MAX_SKIPPED = 10  # steps in a row that non_finite="skip" skips before it stops the run


class FiniteGuard:
    """Checks the metrics of each step; its errors name the examples and the newest checkpoint."""

    def __init__(self, setup: Setup, checkpoints: Checkpoints, writer: MetricsWriter):
        self._setup, self._checkpoints, self._writer = setup, checkpoints, writer
        self._skipped = dict.fromkeys(setup.config.all_seeds, 0)  # in a row

    def check(self, step: int, values: dict[str, np.ndarray]) -> bool:
        """Whether the metrics of all seeds are finite.

        Raises:
            NonFinite: they are not, and the step may not be skipped.
        """
        config, all_finite = self._setup.config, True
        each = zip(
            self._skipped,
            seeds.row_labels(config.all_seeds),
            np.ravel(values["loss"]),
            np.ravel(values["grad_norm"]),
            strict=True,
        )
        for seed, label, loss, norm in each:
            if np.isfinite(loss) and np.isfinite(norm):
                self._skipped[seed] = 0
                continue
            all_finite = False
            self._skipped[seed] += 1
            count = self._skipped[seed]
            of_seed = f" of seed {seed}" if label else ""
            told = f"step {step}{of_seed}: loss {loss}, gradient norm {norm}"
            if config.non_finite == "stop" or count > MAX_SKIPPED:
                before = f", after {count - 1} skipped steps in a row" if count > 1 else ""
                raise self._lost(step, seed, told + before)
            warn(
                f"WARNING: {told}; its update is skipped ({count} in a row). "
                f"Its examples: {self._examples(step, seed)}"
            )
            self._writer.event(step, "skipped", loss=str(loss), grad_norm=str(norm), **label)
        return all_finite

    def lost_state(self, step: int, state: State, error: NonFinite) -> NonFinite:
        """The error of a state that was not saved, with its first seed that is not finite."""
        config = self._setup.config
        trees = zip(config.all_seeds, seeds.split(state, config.seeds), strict=True)
        seed = next((seed for seed, tree in trees if not_finite(tree)), config.seed)
        of_seed = f" (seed {seed})" if config.seeds > 1 else ""
        return self._lost(step, seed, f"{error}{of_seed}")

    def _lost(self, step: int, seed: int, told: str) -> NonFinite:
        last = self._checkpoints.newest()
        saved = "nothing was saved" if last is None else f"the newest checkpoint is of step {last}"
        return NonFinite(
            f"{told}; {saved}. Lower --config.optim.learning_rate, or look at its examples: "
            f"{self._examples(step, seed)}"
        )

    def _examples(self, step: int, seed: int) -> str:
        return ", ".join(map(str, batch_ids(self._setup, step, seed)[:8])) + ", ..."
