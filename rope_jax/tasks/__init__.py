"""Training tasks, one module each; today there is one, `classification`.

The training step and the evaluation call a task through three functions:

- `prepare_batch(batch, config, *, seed, key)`: augments and normalises a batch of the loader in the
  step, and adds the targets of the loss. The result has `image`, float32 [B, H, W, 3].
- `loss_and_accuracy(outputs, batch, config)`: the loss, and a metric for the progress line, from
  the outputs of the model for a prepared batch.
- `count_correct(outputs, label, mask)`: int32 counts of an evaluation batch, which are summed over
  batches: correct in top 1, correct in top 5, total. `mask` is False for padding.

A module also documents the fields of its batches.
"""
