"""The start of a run: what can be known to be wrong before compiling, and the state to go on from."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.runtime import checkpoint, data, metrics, model_dir, prefetch, saved_params, task_examples, train_state
from remixer_t5x.runtime.settings import Run


@dataclasses.dataclass
class Start:
    """Where a run begins: `state` after `step` updates, the data `position`, and the unfinished log `window`.

    `record` describes the run and goes into each checkpoint; `told` says the same to the user.
    """

    plan: train_state.StatePlan
    state: train_state.TrainState
    record: Mapping[str, Any]
    told: str
    step: int = 0
    position: prefetch.Position = prefetch.Position()
    window: metrics.Window = dataclasses.field(default_factory=metrics.Window)

    def take_state(self) -> train_state.TrainState:
        """The state, which is not kept here: the first step donates its buffers."""
        state = self.state
        del self.state
        return state


def check(run: Run) -> epath.Path:
    """MODEL_DIR, once batch sizes, names and vocabularies are known to fit. Raises UserError."""
    # Here, because nothing before has run a TensorFlow op.
    data.hide_accelerators()
    learner = run.learner
    learner.partitioner.check_batch_size(run.dataset.batch_size, learner.microbatches)
    data.check_vocabulary(run.dataset, learner.model.vocab_size)
    if run.evaluation is not None:
        learner.partitioner.check_batch_size(run.evaluation.dataset.batch_size)
        data.check_vocabulary(run.evaluation.dataset, learner.model.vocab_size)
    if run.tasks is not None:
        learner.partitioner.check_batch_size(run.tasks.decoding.batch_size)
        task_examples.tasks_of(run.tasks.mixture_or_task_name, run.tasks.split, run.tasks.tasks)
    return model_dir.claim(run.folder.model_dir)


def describe(dataset: data.DatasetConfig, config_text: str) -> dict[str, Any]:
    """What a checkpoint says about its run: JSON, compared by `checkpoint.check_compatible`."""
    return {
        'vocabulary': data.vocabulary_record(data.vocabulary(dataset)),
        'task': data.provider(dataset).name,
        'batch_size': dataset.batch_size,
        'pack': dataset.pack,
        'feature_lengths': dict(dataset.task_feature_lengths),
        'seed': dataset.seed,
        'hosts': jax.process_count(),
        'config': config_text,
        'versions': model_dir.package_versions(),
    }


def begin(run: Run, checkpoints: checkpoint.Checkpoints, record: Mapping[str, Any]) -> Start:
    """The newest checkpoint's state if there is one, else a fresh one (with other parameters if asked)."""
    learner = run.learner
    plan = train_state.plan(learner.model, learner.optimizer, data.batch_shapes(run.dataset), learner.partitioner)
    latest = checkpoints.latest_step()
    if latest is not None:
        saved = checkpoints.run(latest)
        checkpoint.check_compatible(saved, record)
        state, position = checkpoints.restore(latest, plan.abstract)
        window = metrics.Window(saved['window'])
        return Start(plan, state, record, f'resuming at step {latest}', latest, position, window)
    path = run.folder.initial_checkpoint_path
    if not path:
        return Start(plan, plan.create(jax.random.key(learner.seed)), record, 'starting at step 0')
    params = saved_params.restore_params(path, plan.abstract.params, record['vocabulary'])
    return Start(plan, plan.begin_with(params), record, f'starting at step 0 with the parameters of {path}')
