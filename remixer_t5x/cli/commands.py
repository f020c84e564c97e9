"""The subcommands of `remixer-t5x`: one entry each. A new one is an entry here and a module with a function `run`.

A flag of a command is a short name for a gin macro, so that everything a command reads can also stand in a gin file.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Flag:
    """`--name VALUE` for the macro `macro`; with `alone`, the value that `--name` has without one.

    A name without dashes is that of a word which the command requires: `data get NAME`; with `many`, of one word or
    several, which the macro gets as a tuple.
    Where `module` is given, the flag asks for another function than the command's: `module`'s `run`, with its own base.
    Where `only_with` names such flags, it is read by their functions alone.
    """

    name: str
    macro: str
    help: str
    alone: str | None = None
    module: str | None = None
    base: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()
    many: bool = False


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: one word, or two for an alternative to the command of the first: `data list`.
        module: where its function `run` is; gin binds that function's arguments.
        base: gin files it adds before the user's.
        partial: it reads only a part of a training configuration (see `config.loading.load`).
        env: environment variables to set before any library is imported.
        tensorflow: it reads data, so TensorFlow will be loaded.
        several: it runs over several processes.
        saves: on SIGTERM it saves first.
        repeats: it starts other commands, and hands the command line on to them unread.
        examples: what to type, for `--help`.
    """

    name: str
    help: str
    module: str
    base: tuple[str, ...] = ()
    partial: bool = True
    env: tuple[tuple[str, str], ...] = ()
    tensorflow: bool = False
    several: bool = False
    saves: bool = False
    repeats: bool = False
    flags: tuple[Flag, ...] = ()
    examples: tuple[str, ...] = ()


# glibc gives large buffers back after every step and pays their page faults again; keeping them is faster.
_KEEP_BUFFERS = (
    ('MALLOC_MMAP_THRESHOLD_', '4294967296'),
    ('MALLOC_TRIM_THRESHOLD_', '17179869184'),
    ('MALLOC_TOP_PAD_', '268435456'),
)
_SPLIT = Flag('--split', 'DATA_SPLIT', "which split to read (default 'train')")
_NUM_EXAMPLES = Flag('--num_examples', 'NUM_EXAMPLES', 'how many examples to show (default 2)')
_MESH = Flag('--mesh', 'MESH', "sizes of the mesh axes, in place of the hardware file's, such as data=2,fsdp=4")
_RESTORE = Flag('--restore', 'RESTORE', 'previous: go on from the checkpoint before where the newest is damaged')
_DESCRIBED = ('--sharding', '--memory')
_CHECKPOINT = Flag('--checkpoint', 'CHECKPOINT_PATH', 'a checkpoint, or a MODEL_DIR (its newest)')
# Directions of `convert`: in some the files say which model it is, in the others the user's gin files do.
_SOURCES = ('--from_hf', '--from_safetensors', '--from_t5x')
_TARGETS = ('--to_hf', '--to_safetensors', '--to_t5x')
_PLACES = 'runs/convert_places.gin'
_OF_ITSELF: dict[str, Any] = {'module': 'remixer_t5x.cli.convert', 'base': (_PLACES, 'runs/convert.gin')}
_OF_A_MODEL: dict[str, Any] = {'module': 'remixer_t5x.cli.convert_model', 'base': (_PLACES, 'runs/convert_model.gin')}

COMMANDS = (
    Command(
        'train',
        'pretrain a model; the same command again resumes',
        'remixer_t5x.cli.train',
        partial=False,
        env=_KEEP_BUFFERS,
        tensorflow=True,
        several=True,
        saves=True,
        flags=(_MESH, _RESTORE),
        examples=(
            'remixer-t5x train --gin_file=experiments/quickstart.gin',
            'remixer-t5x train --gin_file=experiments/quickstart.gin --gin.MODEL_DIR=/tmp/run --gin.TRAIN_STEPS=1000',
        ),
    ),
    Command(
        'finetune',
        "train a model on tasks, judged by their metrics; keeps each task's best checkpoint",
        'remixer_t5x.cli.finetune',
        partial=False,
        env=_KEEP_BUFFERS,
        tensorflow=True,
        several=True,
        saves=True,
        flags=(_MESH, _RESTORE),
        examples=(
            'remixer-t5x finetune --gin_file=experiments/finetune_super_glue.gin --gin.MODEL_DIR=runs/super_glue '
            '--gin.INITIAL_CHECKPOINT_PATH=runs/pretrained',
        ),
    ),
    Command(
        'compare',
        'one recipe for several models and seeds; ends in a table and a report; the same command again goes on',
        'remixer_t5x.cli.sweep',
        repeats=True,
        flags=(
            Flag('COMMAND', 'COMPARED', 'train or finetune'),
            Flag('--models', 'COMPARE_MODELS', 'files of models/, by comma; remixer+ablations/NAME adds one'),
            Flag('--seeds', 'COMPARE_SEEDS', 'by comma (default 0)'),
            Flag('--folder', 'COMPARE_FOLDER', 'gets a MODEL_DIR for each run, and report.html'),
        ),
        examples=(
            'remixer-t5x compare train --gin_file=experiments/quickstart.gin --models=t5_1_1,remixer,hyper_mixer '
            '--seeds=0,1,2 --folder=runs/compared',
        ),
    ),
    Command(
        'eval',
        "judge checkpoints by tasks' metrics; leaderboard files",
        'remixer_t5x.cli.evaluate',
        base=('runs/eval.gin',),
        env=_KEEP_BUFFERS,
        tensorflow=True,
        several=True,
        flags=(
            dataclasses.replace(_CHECKPOINT, help=f'{_CHECKPOINT.help}, or several by comma'),
            Flag('--task', 'EVAL_TASKS', 'names of some tasks of the mixture, by comma (default: all)'),
            Flag('--split', 'EVAL_SPLIT', "which split (default 'validation')"),
            Flag('--output', 'EVAL_OUTPUT_DIR', "folder for metrics and predictions (default 'eval' in MODEL_DIR)"),
            Flag(
                '--follow',
                'FOLLOW',
                'every checkpoint of a MODEL_DIR as it appears, until TRAIN_STEPS or this many seconds without one '
                '(default 3600)',
                alone='3600',
            ),
            _MESH,
            Flag('--submission', 'SUBMISSION_DIR', 'also write files for the leaderboards of GLUE and SuperGLUE here'),
            Flag(
                '--predictions',
                'PREDICTIONS',
                'judge this file of predictions; needs no model',
                module='remixer_t5x.cli.score_predictions',
                base=('runs/score.gin',),
            ),
        ),
        examples=(
            'remixer-t5x eval --gin_file=experiments/finetune_super_glue.gin --checkpoint=runs/super_glue',
            'remixer-t5x eval --gin_file=data/cogs.gin --predictions=cogs_test.jsonl --split=test',
        ),
    ),
    Command(
        'infer',
        'run a model on texts, to JSON lines; the same command again goes on',
        'remixer_t5x.cli.infer',
        base=('runs/infer.gin',),
        env=_KEEP_BUFFERS,
        tensorflow=True,
        several=True,
        flags=(
            _CHECKPOINT,
            Flag('--input', 'INPUT', 'a file with a text per line, or JSON lines (default: standard input)'),
            Flag('--field', 'INPUT_FIELD', "the field of JSON lines (default 'text')"),
            Flag('--output', 'OUTPUT', 'a file, continued where it ends (default: standard output)'),
            _MESH,
        ),
        examples=(
            'remixer-t5x infer --gin_file=experiments/finetune_cogs.gin --checkpoint=runs/cogs --input=sentences.txt '
            '--output=forms.jsonl',
        ),
    ),
    Command(
        'info',
        'parameters and FLOPs of a model, module by module, without a device',
        'remixer_t5x.cli.info',
        base=('runs/info.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        flags=(
            Flag('--depth', 'INFO_DEPTH', 'how many levels of modules to show (default 3)'),
            Flag(
                '--compare',
                'COMPARE_SIZES',
                'all models at these sizes, by comma (default tiny,small,base), beside the figures of the papers',
                alone='tiny,small,base',
                module='remixer_t5x.cli.compare',
                base=('runs/compare.gin',),
            ),
            Flag(
                '--sharding',
                'SHARDING',
                "where each parameter lies on the mesh of a hardware file; a value such as 'encoder/*' shows some",
                alone='*',
                module='remixer_t5x.cli.sharding',
                base=('runs/sharding.gin',),
            ),
            Flag(
                '--memory',
                'MEMORY_TRIALS',
                "what a training step takes of a device's memory; a number: changes to try where that is too much (8)",
                alone='8',
                module='remixer_t5x.cli.memory',
                base=('runs/memory.gin',),
            ),
            dataclasses.replace(_MESH, only_with=_DESCRIBED),
            Flag('--devices', 'DEVICES', "how many devices, in place of the hardware file's", only_with=_DESCRIBED),
            Flag('--device_memory', 'DEVICE_MEMORY', 'of one device, in GiB', only_with=('--memory',)),
        ),
        examples=(
            'remixer-t5x info --gin_file=models/remixer.gin --gin_file=sizes/base.gin',
            'remixer-t5x info --compare small',
            'remixer-t5x info --sharding --gin_file=models/remixer.gin --gin_file=sizes/base.gin '
            '--gin_file=hardware/tpu_v3_32.gin',
            'remixer-t5x info --memory --gin_file=experiments/t5_1_1_base_c4.gin --gin_file=hardware/h100_8.gin',
        ),
    ),
    Command(
        'data',
        'the first examples of a task, as text and as ids, and how well they pack',
        'remixer_t5x.cli.data',
        base=('runs/data.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        flags=(_SPLIT, _NUM_EXAMPLES),
        examples=('remixer-t5x data --gin_file=data/python_docs.gin --num_examples=1',),
    ),
    Command(
        'data list',
        'every labelled task, its splits, and whether its data is here',
        'remixer_t5x.cli.data_list',
        base=('runs/data_list.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        examples=('remixer-t5x data list',),
    ),
    Command(
        'data get',
        'download the published files of a task, and check them',
        'remixer_t5x.cli.data_get',
        base=('runs/data_get.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        flags=(
            Flag('NAME', 'TASK', 'a task or data set, as `data list` names them'),
            Flag('--from', 'DOWNLOAD_FROM', 'take the published files from this folder, without the network'),
        ),
        examples=('remixer-t5x data get cogs', 'remixer-t5x data get snli --from ~/Downloads'),
    ),
    Command(
        'data show',
        'examples of a task as published, and as text to text',
        'remixer_t5x.cli.data_show',
        base=('runs/data_show.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        flags=(
            Flag('NAME', 'TASK', 'a task, as `data list` names them'),
            dataclasses.replace(_SPLIT, help='which split to read (default: the first that is here)'),
            _NUM_EXAMPLES,
        ),
        examples=('remixer-t5x data show super_glue_cb_v102 --split=validation --num_examples=1',),
    ),
    Command(
        'data cache',
        "write a task's tokenised examples once, with Apache Beam, to train from",
        'remixer_t5x.cli.data_cache',
        base=('runs/data_cache.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        flags=(
            Flag('--output_dir', 'CACHE_DIR', 'the folder of cached tasks, which gets one for each task'),
            Flag('--shards', 'CACHE_SHARDS', 'files of each split (default 64)'),
            Flag(
                '--beam_options',
                'BEAM_OPTIONS',
                "Beam's pipeline options, as in '--runner=DataflowRunner --project=...' (default: this process)",
            ),
        ),
        examples=('remixer-t5x data cache --gin_file=data/c4.gin --output_dir=/data/cached',),
    ),
    Command(
        'vocab',
        'size, special ids and pieces of a vocabulary',
        'remixer_t5x.cli.vocab',
        base=('runs/vocab.gin',),
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        flags=(Flag('--text', 'VOCAB_TEXT', 'the text whose pieces are shown'),),
        examples=("remixer-t5x vocab --gin_file=data/python_docs.gin --text='A list of numbers.'",),
    ),
    Command(
        'fill_in',
        'corrupted examples, and what a trained model puts into the gaps',
        'remixer_t5x.cli.fill_in',
        base=('runs/fill_in.gin',),
        tensorflow=True,
        flags=(Flag('--num_examples', 'NUM_EXAMPLES', 'how many examples to show (default 3)'),),
        examples=('remixer-t5x fill_in --gin_file=experiments/quickstart.gin',),
    ),
    Command(
        'convert',
        'weights of Hugging Face, T5X and plain safetensors to checkpoints, and back; compares both sides',
        'remixer_t5x.cli.convert',
        base=(_PLACES, 'runs/convert.gin'),
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        flags=(
            Flag('--from_hf', 'FROM_HF', 'a folder of a Hugging Face T5, with safetensors', **_OF_ITSELF),
            Flag('--from_safetensors', 'FROM_SAFETENSORS', 'a file that --to_safetensors wrote', **_OF_ITSELF),
            Flag('--from_t5x', 'FROM_T5X', "a checkpoint of T5X's", **_OF_A_MODEL),
            Flag('--to', 'CONVERT_TO', 'a new MODEL_DIR for what is read', only_with=_SOURCES),
            dataclasses.replace(_CHECKPOINT, help=f'{_CHECKPOINT.help}, to be written elsewhere', only_with=_TARGETS),
            Flag('--to_hf', 'TO_HF', 'a new folder, as transformers loads it', **_OF_A_MODEL),
            Flag('--to_safetensors', 'TO_SAFETENSORS', 'a new file with the parameters of any model', **_OF_ITSELF),
            Flag('--to_t5x', 'TO_T5X', "a folder for a checkpoint of T5X's", **_OF_A_MODEL),
            Flag(
                '--dtype',
                'CONVERT_DTYPE',
                'float32 or bfloat16, of the arrays that are written (default float32)',
                only_with=('--to_hf', '--to_safetensors'),
            ),
            Flag(
                '--vocabulary',
                'VOCABULARY_PATH',
                'the SentencePiece model, where the folder has none',
                only_with=('--from_hf',),
            ),
        ),
        examples=(
            'remixer-t5x convert --from_hf=downloads/t5-v1_1-small --to=runs/t5_small',
            'remixer-t5x convert --gin_file=runs/t5_small/model.gin --checkpoint=runs/finetuned --to_hf=exported',
            'remixer-t5x convert --checkpoint=runs/remixer --to_safetensors=remixer.safetensors',
        ),
    ),
    Command(
        'report',
        'one HTML file about runs: curves, tasks, predictions, settings, and pictures of what was learned',
        'remixer_t5x.cli.report',
        base=('runs/report.gin',),
        partial=False,
        # A run that is still training keeps its accelerator.
        env=(('JAX_PLATFORMS', 'cpu'),),
        tensorflow=True,
        flags=(
            Flag('MODEL_DIR', 'MODEL_DIRS', 'folders of runs', many=True),
            Flag('--out', 'REPORT_OUT', "the file to write (default 'report.html')"),
            Flag('--text', 'REPORT_TEXT', 'what the model reads for the pictures (default: a short sentence)'),
            Flag('--pictures', 'REPORT_PICTURES', 'draw what models learned; runs each config.gin', alone='True'),
            Flag('--pictures_dir', 'PICTURES_DIR', 'also write each picture as PNG and SVG into this folder'),
        ),
        examples=(
            'remixer-t5x report runs/quickstart',
            "remixer-t5x report runs/remixer runs/t5 --out=compared.html --pictures --text='What does it look at?'",
        ),
    ),
)
