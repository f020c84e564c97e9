"""Each macro and each setting belongs to one axis of configs/, so files of different axes may be given in any order."""

import collections
import pathlib
import re

import gin
import jax
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x import build_model
from remixer_t5x.config import gin_files as gin_files
from remixer_t5x.config import loading
from remixer_t5x.data import batch_formats
from remixer_t5x.models import interface

CONFIGS = pathlib.Path(__file__).parent.parent / 'configs'
# Models include files of sublayers/. Each command also reads its own file of runs/, before all other files.
AXES = {
    'models': ('models', 'sublayers'),
    'sizes': ('sizes',),
    'data': ('data',),
    'optimizers': ('optimizers',),
    'hardware': ('hardware',),
    'runs': ('runs/pretrain.gin', 'runs/finetune.gin'),
}
T5X_AXES = {'models': AXES['models'], 'sizes': AXES['sizes'], 'data': AXES['data'], 't5x': ('t5x',)}
# Folders whose files override earlier files, and a word of the header that says so.
OVERRIDES = {'experiments': 'include', 'model_types': 'before', 'objectives': 'before'}
USER_MACROS = {'FILES', 'PAIRS', 'HF_DATASET', 'INPUTS', 'TARGETS', 'TASK', 'TASKS'}


def find_gin_files(names: tuple[str, ...]) -> list[pathlib.Path]:
    matches = [[CONFIGS / name] if name.endswith('.gin') else (CONFIGS / name).rglob('*.gin') for name in names]
    return [path for paths in matches for path in paths]


def find_settings(path: pathlib.Path) -> set[str]:
    """Returns the macros and the fully qualified arguments that a file sets, without its includes."""
    text = gin_files.GinText(path.name, path.read_text())
    names = {f'%{name}' for name in text.assigned_macros}
    for scope, first, rest in re.findall(r'^((?:\w+/)*)(\w+)(\.[\w.]+)\s*=', text.text, re.M):
        names.add(scope + text.imports[first].module + rest)
    return names


@pytest.mark.parametrize('axes', [AXES, T5X_AXES], ids=['ours', 'T5X'])
def test_every_setting_has_one_axis(axes):
    owners = collections.defaultdict(set)
    for axis, names in axes.items():
        for path in find_gin_files(names):
            for setting in find_settings(path):
                owners[setting].add(axis)
    assert len(owners) > 100
    assert {setting: axes for setting, axes in owners.items() if len(axes) > 1} == {}


def test_every_config_folder_is_an_axis_or_declares_overrides():
    folders = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    assert folders == {*AXES, *OVERRIDES, 'sublayers', 't5x'}
    for folder, words in OVERRIDES.items():
        assert all(words in path.read_text() for path in (CONFIGS / folder).glob('*.gin'))


def sample_file(folder: str, *names: str) -> st.SearchStrategy:
    names = names or tuple(path.stem for path in sorted((CONFIGS / folder).glob('[!_]*.gin')))
    return st.sampled_from([f'{folder}/{name}.gin' for name in names])


RUN_FILES = st.tuples(
    sample_file('models'),
    sample_file('sizes', 'tiny', 'small', 'base', 'large'),
    sample_file('data'),
    sample_file('optimizers'),
    sample_file('hardware'),
    sample_file('runs', 'pretrain', 'finetune'),
)


def load_configuration(files: tuple[str, ...] | list[str]) -> str:
    values = [(name, 'given') for name in ('MODEL_DIR', 'INITIAL_CHECKPOINT_PATH')]
    data = next((CONFIGS / file for file in files if file.startswith('data/')), CONFIGS / 'defaults.gin')
    texts = list(gin_files.GinReader((), ()).read(str(data)))
    macros_read = {macro for text in texts for macro in text.referenced_macros}
    macros_set = {macro for text in texts for macro in text.assigned_macros}
    values += [(name, 'given') for name in USER_MACROS & macros_read - macros_set]
    loading.load_gin_config(loading.ConfigSources(files, values), 'remixer_t5x.train.settings.Run', partial=False)
    return gin.config_str()


@settings(max_examples=15, deadline=None)
@given(RUN_FILES, st.data())
def test_any_order_of_the_axes_gives_the_same_configuration(files, data):
    shuffled = data.draw(st.permutations(files))
    assert load_configuration(shuffled) == load_configuration(files)


ONE_FILE_PER_AXIS = ('models/amlp.gin', 'sizes/tiny.gin', 'data/c4.gin', 'optimizers/lion.gin', 'hardware/cpu.gin')


@pytest.mark.parametrize('file', ['sizes/base.gin', 'optimizers/adamw.gin', 'optimizers/muon.gin', 'hardware/gpu.gin'])
def test_a_file_overrides_all_settings_of_earlier_files_of_its_axis(file):
    axis = file.partition('/')[0]
    others = [f'{axis}/{path.name}' for path in sorted((CONFIGS / axis).glob('[!_]*.gin'))]
    rest = [other for other in ONE_FILE_PER_AXIS if not other.startswith(axis)]
    alone, after_others = ([*rest, 'runs/pretrain.gin', *files] for files in ([file], [*others, file]))
    assert load_configuration(after_others) == load_configuration(alone)


def test_a_model_file_keeps_other_settings_of_an_experiment():
    load_configuration(['experiments/own_text.gin', 'data/own_text.gin', 'models/t5_1_1.gin'])
    assert gin.query_parameter('%VOCAB_SIZE') == 8192
    load_configuration(['experiments/cogs_cpu.gin', 'models/remixer.gin'])
    assert gin.query_parameter('%VOCAB_SIZE') == 896
    assert gin.query_parameter('%DROPOUT_RATE') == 0.1
    load_configuration(['experiments/papers/remixer_base_cogs.gin', 'models/remixer.gin'])
    assert gin.query_parameter('%DTYPE') == 'bfloat16'


def test_the_last_model_file_determines_the_model():
    others = [f'models/{path.name}' for path in (CONFIGS / 'models').glob('*.gin')]
    shapes = {'encoder_input_tokens': (1, 8), 'decoder_target_tokens': (1, 4)}
    programs = []
    for files in ([], sorted(others)):
        macros = {'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1, 'DROPOUT_RATE': 0.5}
        built = build_model(*files, 'models/t5_1_1.gin', 'sizes/tiny.gin', **macros)
        params = nn.unbox(interface.compute_param_shapes(built, shapes))
        batch = batch_formats.get_abstract_batch(built.model_type, {'inputs': 8, 'targets': 4})
        programs.append(str(jax.make_jaxpr(built.loss)(params, batch, jax.random.key(0))))
    assert programs[0] == programs[1]
