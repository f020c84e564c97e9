"""What to write here for the macros, settings and flags of T5X's scripts that have no meaning, or another one, here."""

from remixer_t5x.config.bindings import Bindings
from remixer_t5x.errors import UserError

_EXPORT = 'nothing is exported for serving; `remixer-t5x convert` writes T5X, Hugging Face and safetensors'
_EXAMPLES = 'here infer reads lines or JSON lines: INPUT, or --input=FILE'
_MESH = 'here it is MESH, as in --mesh=data=2,tensor=4'
INSTEAD = {
    'RANDOM_SEED': 'here it is SEED, which also seeds the order of the data',
    'TRAIN_STEPS_RELATIVE': 'here `train` counts TRAIN_STEPS from 0, and `finetune` takes TRAIN_STEPS_RELATIVE',
    'BASE_LEARNING_RATE': 'here it is LEARNING_RATE, the rate itself: T5X divides by the square root of the step',
    'EVALUATOR_NUM_EXAMPLES': 'here it is EVAL_EXAMPLES',
    'EVALUATOR_USE_MEMORY_CACHE': 'remove it: examples are read once',
    'INFER_OUTPUT_DIR': 'here infer writes one file, OUTPUT, or --output=FILE',
    'INFER_MODE': 'here infer predicts, and eval --gin.RANK_CHOICES=True scores labels',
    'JSON_WRITE_N_RESULTS': 'remove it: eval writes every prediction, and EVAL_EXAMPLES bounds them',
    'USE_HARDWARE_RNG': 'remove it: a run has the same random numbers on every device',
    'ACTIVATION_DTYPE': 'here it is DTYPE',
    'NUM_MODEL_PARTITIONS': _MESH,
    'MODEL_PARALLEL_SUBMESH': _MESH,
    'NUM_PARTITIONS': _MESH,
    'NUM_EXPERTS': 'this package has no mixture of experts; remove it',
    'NUM_EXPERT_PARTITIONS': 'this package has no mixture of experts; remove it',
    'EXPERT_DROPOUT_RATE': 'this package has no mixture of experts; DROPOUT_RATE is for all layers',
    'TRAIN_EVAL_MIXTURE_OR_TASK_NAME': 'here it is EVAL_MIXTURE_OR_TASK_NAME of `finetune`',
    'USE_CACHED_TASKS_TRAIN_EVAL': 'here it is USE_CACHED_TASKS, for training and held-out loss',
    'OUTPUT_FEATURES': f'remove it: the task has its features; {_EXPORT}',
    'MODEL_OUTPUT_DIR': _EXPORT,
    'MODEL_NAME': _EXPORT,
    'BEAM_SIZE': 'here it is --gin.DECODER=@beam_search.BeamSearch() with --gin.beam_search.BeamSearch.beams=4',
    'NUM_DECODES': 'here it is --gin.DECODER=@beam_search.BeamSearch() with --gin.beam_search.BeamSearch.beams=4',
    'TF_EXAMPLE_FILE_PATHS': _EXAMPLES,
    'TF_EXAMPLE_FILE_TYPE': _EXAMPLES,
    'FEATURE_LENGTHS': 'here it is TASK_FEATURE_LENGTHS',
}
# Settings of T5X's functions and classes, by the end of their names.
SETTINGS = {
    'train.total_steps': 'TRAIN_STEPS, or TRAIN_STEPS_RELATIVE of finetune',
    'train.relative_steps': 'TRAIN_STEPS_RELATIVE of finetune',
    'train.eval_period': 'EVAL_PERIOD',
    'train.eval_steps': 'EVAL_STEPS',
    'train.stats_period': 'LOG_PERIOD',
    'train.random_seed': 'SEED',
    'infer.mode': '--gin.RANK_CHOICES=True of eval, where labels are scored',
    'DatasetConfig.batch_size': 'BATCH_SIZE, EVAL_BATCH_SIZE of eval, INFER_BATCH_SIZE of infer',
    'DatasetConfig.pack': 'PACK',
    'DatasetConfig.seed': 'SEED',
    'DatasetConfig.shuffle': 'SHUFFLE_TRAIN_EXAMPLES',
    'DatasetConfig.split': 'TRAIN_SPLIT and EVAL_SPLIT',
    'DatasetConfig.use_cached': 'USE_CACHED_TASKS',
    'SaveCheckpointConfig.keep': 'KEEP_CHECKPOINTS',
    'SaveCheckpointConfig.period': 'CHECKPOINT_PERIOD',
    'SaveCheckpointConfig.save_dataset': 'SAVE_DATA_POSITION, which is True by default',
    'RestoreCheckpointConfig.path': 'INITIAL_CHECKPOINT_PATH to train, CHECKPOINT_PATH to eval and infer',
    'PjitPartitioner.num_partitions': 'MESH, as in --mesh=data=2,tensor=4',
    'PjitPartitioner.model_parallel_submesh': 'MESH, as in --mesh=data=2,tensor=4',
    'Trainer.num_microbatches': 'MICROBATCHES',
    'create_learning_rate_scheduler.base_learning_rate': 'LEARNING_RATE, the rate itself',
    'create_learning_rate_scheduler.warmup_steps': 'CONSTANT_STEPS of optimizers/adafactor.gin',
    'Evaluator.num_examples': 'EVAL_EXAMPLES',
}
FLAGS = {
    'gin_bindings': '--gin.NAME=VALUE, once for each',
    'seqio_additional_cache_dirs': '--gin.USE_CACHED_TASKS=True --gin.CACHE_DIR=FOLDER',
    'run_mode': 'the command itself: train, finetune, eval or infer',
    'dry_run': '`remixer-t5x info` with the same gin files, which builds the model and counts it',
    'multiprocess_gpu': '--coordinator_address, --process_count and --process_index alone',
    'shard_id': 'nothing: infer splits its input among the processes of one run',
}


def check_steps(bindings: Bindings) -> None:
    """Refuses TRAIN_STEPS in finetuning from a checkpoint: T5X counts the steps of the checkpoint, and a run here does
    not.
    """
    macros = bindings.macros
    steps, start = macros.get('TRAIN_STEPS'), macros.get('INITIAL_CHECKPOINT_PATH')
    if 'TRAIN_STEPS_RELATIVE' not in macros or steps is None or start is None or start.value is None:
        return
    if isinstance(steps.value, int):
        raise UserError(
            f'{steps.place}: TRAIN_STEPS is {steps.value} and INITIAL_CHECKPOINT_PATH is given; in T5X TRAIN_STEPS '
            'includes the steps of that checkpoint, and a run here counts its own; give TRAIN_STEPS_RELATIVE, the '
            'steps of this run, as in --gin.TRAIN_STEPS_RELATIVE=10000'
        )


def setting_here(name: str) -> str:
    """What to give for a setting of T5X's such as `utils.SaveCheckpointConfig.keep`; empty for other names."""
    known = SETTINGS.get('.'.join(name.rpartition('/')[2].split('.')[-2:]))
    return f'that is a setting of T5X; here it is {known}' if known else ''


def flag_here(name: str) -> str:
    """`; here it is ...` for a flag of T5X's without its dashes; empty for other names."""
    return f'; that is a flag of T5X, and here it is {FLAGS[name]}' if name in FLAGS else ''
