"""The training loop."""

import contextlib

import jax

from rope_jax.system.sharding import put_batch
from rope_jax.training.folder import Run
from rope_jax.training.report import Reporter
from rope_jax.training.setup import Setup, State, training_batches
from rope_jax.training.signals import Interrupted, Signals
from rope_jax.training.step import make_step


def train_loop(setup: Setup, state: State, run: Run, signals: Signals) -> State:
    """Runs the remaining steps, if any, and returns the final state, which is saved.

    The metrics of a step are fetched while the next one runs, and checkpoints are written in the
    background. A signal ends the run after the current step, or while a batch is awaited; before
    the first step of this process there is nothing new to save, so it ends the run at once.

    Raises:
        Interrupted: a signal stopped the run; its state is saved.
        NonFinite: the loss, a gradient or a weight is not finite.
        SaveFailed: the last checkpoint could not be written, or the workdir is not this run's.
    """
    first, last = int(state["step"]), setup.total_steps
    if first >= last:
        return state
    train_step = make_step(setup)
    with Reporter(setup, first, run, signals) as reporter, contextlib.ExitStack() as stack:
        batches, resident = training_batches(setup, first, waiting=signals.waiting)
        stack.callback(batches.close)
        done = first
        pending = None  # the step whose metrics are still on the device
        try:
            for step in range(first + 1, last + 1):
                with reporter.waiting_for_batch(step):
                    batch = put_batch(next(batches), setup.mesh) | resident
                # Compiling may move constants to the device; later steps may not.
                guard = "allow" if step == first + 1 else "disallow"
                with jax.transfer_guard_host_to_device(guard):
                    state, metrics = train_step(state, batch)
                done, signals.at_once = step, False
                if pending is not None:
                    reporter.report(*pending)
                pending = (step, metrics, len(batches.skipped))
                reporter.after_dispatch(step, metrics)
                signals()
                if step % setup.config.checkpoint_every == 0 or step == last:
                    reporter.report(*pending)
                    pending = None
                    reporter.save(step, state)
        except Interrupted as error:
            if done > first and not error.alone:
                if pending is not None:
                    reporter.report(*pending)
                reporter.save(done, state)
                run.checkpoints.wait()
            raise
        run.checkpoints.wait()
    signals.at_once = True
    signals()  # a signal may have arrived in the meantime
    return state
