"""Builds train and evaluation steps as pure functions.

The gradients of the summed loss are accumulated over the microbatches and then divided once by the normalizing factor,
so the update does not depend on the number of microbatches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from remixer_t5x import ranges
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.models.interface import Batch, Model, Params
from remixer_t5x.optim import trainable as trainables
from remixer_t5x.optim.schedules import Schedule
from remixer_t5x.optim.train_state import TrainState

Metrics = dict[str, jax.Array]
# Weight of the latest loss in the running mean of the loss, so that it averages about fifty steps.
USUAL_LOSS_SHARE = 0.02
# Value of LOSS_NORMALIZING_FACTOR that divides the loss by the number of target tokens; the name is from T5X.
NUM_REAL_TARGET_TOKENS = 'NUM_REAL_TARGET_TOKENS'
# Name of the evaluation sum that counts the occurrences of each id in the targets.
TARGET_COUNTS = 'target_counts'
# Names of the token id arrays of a batch, with 0 as padding.
TOKEN_ARRAYS = ('encoder_input_tokens', 'positive_input_tokens', 'decoder_target_tokens')
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(
    model: Model,
    tx: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    loss_normalizing_factor: float | str | None = NUM_REAL_TARGET_TOKENS,
    seed: int = 0,
    learning_rate: Schedule | None = None,
    spike_factor: float | None = None,
    trainable: str | None = None,
) -> StepFn:
    """Returns a pure train step `step(state, batch) -> (state, metrics)`.

    `compute_step_metrics` and `update_loss_ema` describe the metrics. If the loss or the gradient is not finite, or the
    loss spikes, the update is skipped and only the step number is incremented.

    Args:
        microbatches: number of microbatches, which are processed sequentially to save memory.
        loss_normalizing_factor: divisor of the loss sum, as in T5X: a number, None for the sum itself, or
            'NUM_REAL_TARGET_TOKENS' for the number of target tokens (the sum of weights). Released T5 checkpoints were
            trained with a constant, batch rows x target length (233472 in T5X's configs).
        seed: seed of the PRNG keys for dropout, which are derived from it, the step and the microbatch.
        learning_rate: schedule to report as the metric `learning_rate`, or None. A skipped step does not advance the
            schedule, because the optimizer counts only its updates.
        spike_factor: a loss per token above this multiple of `state.usual_loss` is a spike; None disables the check.
        trainable: regular expression for the names of the parameters to train; None trains all parameters.
    """
    ranges.check_setting('MICROBATCHES', microbatches, ranges.Count)
    if microbatches > 1 and model.model_type == 'embedding':
        raise UserError(
            'MICROBATCHES must be 1 for MODEL_TYPE = embedding, because the negatives of a text are the other rows of '
            f'its batch, got {microbatches}; use a smaller BATCH_SIZE, or more devices'
        )
    is_mean = loss_normalizing_factor == NUM_REAL_TARGET_TOKENS
    if not is_mean:
        ranges.check_setting('LOSS_NORMALIZING_FACTOR', loss_normalizing_factor, ranges.Positive | None)
    divisor: Any = 1.0 if loss_normalizing_factor is None else loss_normalizing_factor
    gradients = _build_gradient_fn(model, seed)
    tx = optax.with_extra_args_support(tx)

    def step_fn(state, batch):
        trained, frozen = trainables.split_params(state.params, trainable)
        grads, sums = accumulate_gradients(gradients, (trained, frozen), batch, state.step, microbatches)
        normalizer = _count_target_tokens(sums) if is_mean else divisor
        grads = jax.tree.map(lambda grad: grad / normalizer, grads)
        metrics, good = compute_step_metrics(state.params, batch, sums, grads)
        usual_loss, good, spike = update_loss_ema(state.usual_loss, sums, spike_factor, good)
        metrics.update(spike)
        # Transformations such as `optax.contrib.reduce_on_plateau` also read the loss.
        loss = sums['loss'] / _count_target_tokens(sums)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, value=loss)
        updated = TrainState(state.step + 1, optax.apply_updates(trained, updates), opt_state, usual_loss)
        before = state.replace(params=trained)
        new_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), updated, before)
        new_state = new_state.replace(step=state.step + 1, params=trainables.join_params(new_state.params, frozen))
        if learning_rate is not None:
            # Use the number of updates that the optimizer has counted, or the step if the optimizer does not count
            # updates.
            counts = optax.tree.get_all_with_path(state.opt_state, 'count')
            metrics['learning_rate'] = learning_rate(jnp.max(counts[0][1]) if counts else state.step)
        return new_state, metrics

    return step_fn


def _build_gradient_fn(model: Model, seed: int) -> Callable:
    """Returns a function `((trained, frozen), batch, step, index) -> (gradients, sums)`."""

    def compute_gradients(params, batch, step, index):
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), index)
        trained, frozen = params

        def loss(trained):
            return model.loss(trainables.join_params(trained, frozen), batch, rng)

        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(trained)
        return grads, sums

    return compute_gradients


def _count_target_tokens(sums: Metrics) -> jax.Array:
    """Returns the number of target tokens, or 1 for a batch without targets, to avoid division by zero."""
    return jnp.where(sums['weights'] > 0, sums['weights'], 1.0)


def compute_step_metrics(params: Params, batch: Batch, sums: Metrics, grads: Params) -> tuple[Metrics, jax.Array]:
    """Returns the metrics of a step as float32 scalars, and whether the loss and the gradient are finite.

    The metrics are `sums`, `grad_norm` (of the normalized gradient, before clipping), `param_norm` (before the update),
    `non_padding_fraction`, and `nonfinite` (1.0 if the loss or the gradient is not finite).
    `run_folder.metrics` lists the metrics that are not sums over targets, and divides sums by the number of targets.
    """
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums['loss'])
    metrics = dict(
        sums,
        grad_norm=grad_norm,
        param_norm=optax.tree.norm(params),
        nonfinite=1.0 - finite.astype(jnp.float32),
    )
    if (non_padding := compute_non_padding_fraction(batch)) is not None:
        metrics['non_padding_fraction'] = non_padding
    return metrics, finite


def update_loss_ema(
    usual_loss: jax.Array, sums: Metrics, spike_factor: float | None, good: jax.Array
) -> tuple[jax.Array, jax.Array, Metrics]:
    """Updates the running mean of the loss per token and detects loss spikes.

    Returns three values: the updated mean; whether `good` is True and the loss is not a spike; and a dictionary with
    the metric `spike`, which is empty if `spike_factor` is None.
    """
    loss, metrics = sums['loss'] / _count_target_tokens(sums), {}
    if spike_factor is not None:
        spike = good & (usual_loss > 0) & (loss > spike_factor * usual_loss)
        metrics['spike'] = spike.astype(jnp.float32)
        good &= ~spike
    mean = jnp.where(usual_loss > 0, usual_loss + USUAL_LOSS_SHARE * (loss - usual_loss), loss)
    return jnp.where(sums['weights'] > 0, mean, usual_loss), good, metrics


def compute_non_padding_fraction(batch: Batch) -> jax.Array | None:
    """Returns the fraction of input and target positions that are not padding; None if the batch has no token ids."""
    tokens = [batch[name] for name in TOKEN_ARRAYS if name in batch]
    if not tokens:
        return None
    count = sum(jnp.sum(array != 0, dtype=jnp.float32) for array in tokens)
    return count / sum(array.size for array in tokens)


def make_eval_step(
    model: Model, token_bytes: np.ndarray | None = None, count_targets: bool = False
) -> Callable[[Params, Batch], Metrics]:
    """Returns a pure evaluation step `step(params, batch) -> sums`.

    The sums are those of `model.loss` without dropout and label smoothing.

    Args:
        token_bytes: [ids], number of bytes in the text of each id, from which the sum `bytes` over the decoder targets
            is computed; if None, `bytes` is not computed.
        count_targets: whether to add `target_counts` [ids], the number of occurrences of each id in the targets.
    """
    model = model.without_label_smoothing()

    def step_fn(params, batch):
        sums = model.loss(params, batch, None)[1]
        if token_bytes is not None:
            table = jnp.asarray(token_bytes, jnp.float32)
            targets = jnp.take(table, batch['decoder_target_tokens'], mode='clip')
            sums = {**sums, 'bytes': jnp.sum(targets * batch['decoder_loss_weights'])}
        if count_targets:
            side = 'decoder' if 'decoder_target_tokens' in batch else 'encoder'
            targets, weights = batch[f'{side}_target_tokens'], batch[f'{side}_loss_weights']
            counts = jnp.zeros(model.vocab_size, jnp.float32).at[targets].add(weights.astype(jnp.float32))
            sums = {**sums, TARGET_COUNTS: counts}
        return sums

    return step_fn


class CompiledStep:
    """A jitted function that is traced and called with the partitioner's mesh and sharding rules."""

    def __init__(self, jitted: Any, partitioner: Partitioner):
        self._jitted = jitted
        self._partitioner = partitioner

    def __call__(self, *args: Any) -> Any:
        with self._partitioner.activate_mesh():
            return self._jitted(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function, like `jax.jit(...).lower`."""
        with self._partitioner.activate_mesh():
            return self._jitted.lower(*args)


def jit_train_step(
    step_fn: StepFn, shardings: TrainState, partitioner: Partitioner, donate: bool = False
) -> CompiledStep:
    """Returns the train step `step_fn` as a jitted function with shardings for the partitioner's mesh.

    If `donate` is True, the output state reuses the buffers of the input state, which is deleted.
    """
    jitted = jax.jit(
        step_fn,
        donate_argnums=0 if donate else (),
        in_shardings=(shardings, partitioner.batch_sharding),
        out_shardings=(shardings, partitioner.replicated_sharding),
    )
    return CompiledStep(jitted, partitioner)


def jit_eval_step(
    step_fn: Callable[[Params, Batch], Metrics], shardings: TrainState, partitioner: Partitioner
) -> CompiledStep:
    """Returns the evaluation step `step_fn` as a jitted function with shardings for the partitioner's mesh."""
    jitted = jax.jit(
        step_fn,
        in_shardings=(shardings.params, partitioner.batch_sharding),
        out_shardings=partitioner.replicated_sharding,
    )
    return CompiledStep(jitted, partitioner)


def accumulate_gradients(
    gradients: Callable, params: Any, batch: Batch, step: jax.Array, microbatches: int
) -> tuple[Any, Metrics]:
    """Sums the results of `gradients(params, microbatch, step, index) -> (grads, sums)` over the microbatches.

    Microbatch i consists of the batch rows r with r % microbatches == i. Adjacent rows are on the same device, so this
    split requires no transfers between devices.
    """
    if microbatches == 1:
        return gradients(params, batch, step, 0)
    split = {name: _shard_batch_rows(a.reshape(-1, microbatches, *a.shape[1:])) for name, a in batch.items()}

    def add_microbatch(total, index):
        microbatch = {
            name: _shard_batch_rows(jax.lax.dynamic_index_in_dim(a, index, 1, keepdims=False))
            for name, a in split.items()
        }
        return jax.tree.map(jnp.add, total, gradients(params, microbatch, step, index)), None

    microbatch = {name: jax.ShapeDtypeStruct((a.shape[0], *a.shape[2:]), a.dtype) for name, a in split.items()}
    shapes = jax.eval_shape(gradients, params, microbatch, step, 0)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add_microbatch, zeros, jnp.arange(microbatches))[0]


def _shard_batch_rows(array: jax.Array) -> jax.Array:
    return nn.with_logical_constraint(array, ('batch',) + (None,) * (array.ndim - 1))
