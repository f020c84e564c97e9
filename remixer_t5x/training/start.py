"""The start of a run: what can be known to be wrong before compiling, and the state to go on from."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from remixer_t5x.checkpoints import config_changes, durable, manager, saved_params
from remixer_t5x.data import cached_tasks, fingerprint, pipeline
from remixer_t5x.data.position import Position
from remixer_t5x.devices import collectives
from remixer_t5x.errors import UserError
from remixer_t5x.evaluation import task_examples
from remixer_t5x.optimization import train_state
from remixer_t5x.run_folder import metrics, model_dir
from remixer_t5x.training.settings import PREVIOUS, Run


@dataclasses.dataclass
class Start:
    """Where a run begins: `state` after `step` updates, the data `position`, and the unfinished log `window`.

    `record` describes the run and goes into each checkpoint; `told` and `notes` say to the user what was found. `saved`
    is the checkpoint that holds this state, None where none does.
    """

    plan: train_state.StatePlan
    state: train_state.TrainState
    record: Mapping[str, Any]
    told: str
    notes: tuple[str, ...] = ()
    step: int = 0
    saved: int | None = None
    position: Position = dataclasses.field(default_factory=Position)
    window: metrics.Window = dataclasses.field(default_factory=metrics.Window)

    def take_state(self) -> train_state.TrainState:
        """The state, which is not kept here: the first step donates its buffers."""
        state = self.state
        del self.state
        return state


def check(run: Run) -> epath.Path:
    """MODEL_DIR, once batch sizes, names and vocabularies are known to fit. Raises UserError."""
    # Here, because nothing before has run a TensorFlow op.
    pipeline.hide_accelerators()
    learner = run.learner
    learner.partitioner.check_batch_size(run.dataset.batch_size, learner.microbatches)
    pipeline.check_vocabulary(run.dataset, learner.model.vocab_size)
    if run.evaluation is not None:
        learner.partitioner.check_batch_size(run.evaluation.dataset.batch_size)
        pipeline.check_vocabulary(run.evaluation.dataset, learner.model.vocab_size)
    if run.tasks is not None:
        learner.partitioner.check_batch_size(run.tasks.decoding.batch_size)
        task_examples.tasks_of(run.tasks.mixture_or_task_name, run.tasks.split, run.tasks.tasks)
    return _claim(run.folder.model_dir)


def _claim(path: str) -> epath.Path:
    """MODEL_DIR, which the first process makes. Raises UserError where another one does not see it."""
    # Names the run in a file that nobody has seen before, since an old folder may be on every disk.
    token = collectives.broadcast(secrets.token_hex(8))
    first = jax.process_index() == 0
    folder = model_dir.claim(path) if first else model_dir.absolute(path)
    if jax.process_count() > 1:
        seen = folder / f'.{token}'
        if first:
            seen.write_text('')
        collectives.broadcast('the folder is there')
        found = seen.exists()
        collectives.barrier()
        if first:
            seen.unlink()
        if not found:
            raise UserError(
                f'MODEL_DIR {folder} is another folder here than on the machine of process 0; give one that all '
                'machines share, on NFS or gs://'
            )
    return folder


def describe(dataset: pipeline.DatasetConfig, config_text: str) -> dict[str, Any]:
    """What a checkpoint says about its run: JSON, compared by `checkpoint.check_compatible`."""
    return {
        'vocabulary': pipeline.vocabulary_record(pipeline.vocabulary(dataset)),
        'task': pipeline.provider(dataset).name,
        'batch_size': dataset.batch_size,
        'pack': dataset.pack,
        'feature_lengths': dict(dataset.task_feature_lengths),
        'seed': dataset.seed,
        'data': collectives.broadcast(_data_identity(dataset) if jax.process_index() == 0 else None),
        'hosts': jax.process_count(),
        'config': config_text,
        'versions': model_dir.package_versions(),
    }


def _data_identity(dataset: pipeline.DatasetConfig) -> dict[str, Any]:
    provider = pipeline.provider(dataset)
    if dataset.use_cached:
        # Which tells seqio where the cache is.
        cached_tasks.require(provider, dataset.cache_dir, pipeline.vocabulary_record(pipeline.vocabulary(dataset)))
    return fingerprint.data_fingerprint(provider, dataset.split, use_cached=dataset.use_cached)


def begin(run: Run, checkpoints: manager.Checkpoints, record: Mapping[str, Any]) -> Start:
    """The newest checkpoint's state if there is one, else a fresh one (with other parameters if asked).

    Raises UserError for a damaged checkpoint, unless `run.recovery` asks for the one before.
    """
    learner = run.learner
    plan = train_state.plan(learner.model, learner.optimizer, pipeline.batch_shapes(run.dataset), learner.partitioner)
    notes: list[str] = []
    while (latest := collectives.broadcast(checkpoints.latest_step())) is not None:
        try:
            return _resume(checkpoints, latest, plan, record, notes)
        except durable.Damaged as error:
            notes.append(_set_aside(run, checkpoints, latest, error))
    path = run.folder.initial_checkpoint_path
    # Each host reads its own part; whoever resumes the run keeps the number of parts.
    position = Position.start(learner.partitioner.data_shard()[1])
    if not path:
        state, told = plan.create(jax.random.key(learner.seed)), 'starting at step 0'
    else:
        params = saved_params.restore_params(path, plan.abstract.params, record['vocabulary'])
        state, told = plan.init_from_params(params), f'starting at step 0 with the parameters of {path}'
    return Start(plan, state, record, told, tuple(notes), position=position)


def _resume(checkpoints, step: int, plan: train_state.StatePlan, record: Mapping[str, Any], notes: list[str]) -> Start:
    manager.verify(checkpoints.folder / str(step), listed=True)
    saved = checkpoints.run(step)
    manager.check_compatible(saved, record)
    state, position = checkpoints.restore(step, plan.abstract)
    changed = config_changes.describe_changes(saved.get('config', ''), record['config'])
    notes = [*notes, f'changed since the checkpoint: {changed}'] if changed else notes
    window = metrics.Window(saved['window'])
    return Start(plan, state, record, f'resuming at step {step}', tuple(notes), step, step, position, window)


def _set_aside(run: Run, checkpoints: manager.Checkpoints, step: int, error: durable.Damaged) -> str:
    """Moves the checkpoint away where the one before is asked for, and says so; raises what to do otherwise."""
    if run.recovery.restore != PREVIOUS:
        others = [other for other in checkpoints.steps() if other != step]
        advice = (
            f'type --restore previous to go on from step {others[-1]}'
            if others
            else 'there is no other: give a new MODEL_DIR, or type --restore previous to begin again'
        )
        raise UserError(f'{error}; {advice}') from error
    place = collectives.broadcast(str(checkpoints.set_aside(step)) if jax.process_index() == 0 else None)
    checkpoints.reopen()
    return f'{error}; it lies in {place} now'
