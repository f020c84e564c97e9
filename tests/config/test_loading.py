"""Loads gin files and flags: precedence, includes, search paths, strings, unread parts, and names of tasks."""

import fractions

import gin
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.checkpoints import compatibility
from remixer_t5x.config import gin_files, loading, reference_resolver
from remixer_t5x.config.loading import ConfigSources
from remixer_t5x.errors import UserError
from remixer_tasks import names, vocabularies

ROOT = 'toy_house.run'


def run(*files, partial=False, **sources):
    loading.load_gin_config(ConfigSources(files, **sources), ROOT, partial=partial)
    return reference_resolver.call_configured(ROOT)


HEAD = 'from __gin__ import dynamic_registration\n'


@pytest.mark.parametrize(
    ('second_file', 'flags', 'power', 'colour'),
    [
        ('POWER = 6', [], 6, 'red'),
        ('POWER = 6', [('POWER', '8')], 8, 'red'),
        ('', [('toy_house.run.colour', '/tmp/a b')], 5, '/tmp/a b'),
        ('ENGINE = @Engine()', [('POWER', '9')], 9, 'red'),
        ('toy_house.Engine.power = %fast/POWER\nfast/POWER = 3\nX = %POWER\ntoy_house.run.colour = %X', [], 3, 5),
        (f'{HEAD}import os.path as toy_house', [], 5, 'red'),
        ('import toy_house\nENGINE = @toy_house.Engine()\nPOWER = 4', [], 4, 'red'),
        ('\ufeffPOWER = 3', [], 3, 'red'),
    ],
    ids=[
        *('later file', 'flag', 'string', 'short name', 'scoped macro', 'name of another module'),
        *('no dynamic registration', 'byte order mark'),
    ],
)
def test_later_sources_override_earlier_ones(car_folder, second_file, flags, power, colour):
    (car_folder / 'second.gin').write_text(f'{second_file}\n')
    engine, value = run('car.gin', 'second.gin', flags=flags)
    assert (engine.power, value) == (power, colour)
    # Loading replaces the previous configuration.
    assert run('car.gin') == (type(engine)(5), 'red')


def test_a_flag_may_name_what_no_file_imports(car_folder):
    flags = [('ENGINE', '@fractions.Fraction()'), ('fractions.Fraction.numerator', '3')]
    assert run('car.gin', flags=[*flags, ('Fraction.denominator', '4')])[0] == fractions.Fraction(3, 4)


def test_an_include_overrides_only_earlier_statements(car_folder):
    (car_folder / 'middle.gin').write_text('POWER = 2\n')
    text = (car_folder / 'car.gin').read_text()
    (car_folder / 'before.gin').write_text("include 'middle.gin'\n" + text)
    (car_folder / 'after.gin').write_text(text + "include 'middle.gin'\n")
    assert run('before.gin')[0].power == 5
    assert run('after.gin')[0].power == 2


@pytest.mark.parametrize('value', ['"""\ninclude \'middle.gin\'\n"""', "'a\\\ninclude \\'middle.gin\\''"])
def test_an_include_inside_of_a_text_is_not_read(car_folder, value):
    text = f'toy_house.run.colour = {value}\n'
    (car_folder / 'second.gin').write_text((car_folder / 'car.gin').read_text() + text)
    (car_folder / 'middle.gin').write_text('POWER = 2\n')
    engine, colour = run('second.gin')
    assert engine.power == 5 and 'middle.gin' in colour


def test_search_paths_come_before_the_shipped_configs(car_folder, tmp_path_factory):
    other = tmp_path_factory.mktemp('other')
    (other / 'runs').mkdir()
    (other / 'runs/infer.gin').write_text('POWER = 3\n')
    assert run('car.gin', 'runs/infer.gin', search_paths=[str(other)])[0].power == 3
    for name in ('runs/infer.gin', 'configs/runs/infer.gin'):
        assert gin_files.find_file(name) == gin_files.find_shipped_folder() / 'runs/infer.gin'


def test_a_partial_load_requires_only_macros_that_are_read(car_folder):
    extra = 'toy_house.refuse.power = %MODEL_DIR\nBATCH_SIZE = 3\n'
    (car_folder / 'more.gin').write_text((car_folder / 'car.gin').read_text() + extra)
    with pytest.raises(UserError):
        run('more.gin')
    (car_folder / 'more.gin').write_text((car_folder / 'car.gin').read_text() + extra.splitlines()[0] + '\n')
    assert run('more.gin', partial=True)[0].power == 5


def test_values_require_only_macros_that_they_depend_on(car_folder):
    import toy_house

    (car_folder / 'more.gin').write_text(
        (car_folder / 'car.gin').read_text() + 'toy_house.refuse.power = %NOWHERE\nNOWHERE = 1\n'
    )
    values = loading.load_macro_values(ConfigSources(['more.gin'], defaults={'SEED': 3}), 'ENGINE', 'SEED')
    assert values == [toy_house.Engine(5), 3]
    with pytest.raises(UserError, match='^%SIZE is not set; pass --gin.SIZE=VALUE$'):
        loading.load_macro_values(ConfigSources(['car.gin']), 'SIZE')


def test_an_unset_macro_has_the_default_of_its_argument(car_folder, monkeypatch):
    # Shipped files bind arguments to unset macros; this file is treated as a shipped file.
    text = (car_folder / 'car.gin').read_text() + 'toy_house.Engine.dtype = %DTYPE\nDTYPE = %KIND\n'
    (car_folder / 'named.gin').write_text(text)
    monkeypatch.setattr(gin_files, 'find_shipped_folder', lambda: car_folder)
    (car_folder / 'defaults.gin').write_text('')
    gin_files.read_shipped_files.cache_clear()
    try:
        assert run('named.gin')[0].dtype == 'float32'
        assert "KIND = 'float32'" in loading.get_config_text()
        assert run('named.gin', flags=[('KIND', 'bfloat16')])[0].dtype == 'bfloat16'
    finally:
        gin_files.read_shipped_files.cache_clear()


def test_config_text_reproduces_the_same_objects(car_folder):
    first = run('car.gin', flags=[('POWER', '11')])
    (car_folder / 'operative.gin').write_text(loading.get_config_text())
    assert run('operative.gin') == first


def test_config_text_of_a_run_is_minimal_and_can_be_loaded(tmp_path):
    flags, model = [('MODEL_DIR', str(tmp_path))], ('models/hyper_mixer.gin',)
    run = ConfigSources(['experiments/python_docs.gin'], flags, model=model)
    loading.load_gin_config(run, 'remixer_t5x.train.settings.Run', partial=False)
    text = loading.get_config_text()
    assert 'MESH =' in text and 'DEVICE_MEMORY' not in text and 'REMIXER_DIM' not in text
    (tmp_path / 'config.gin').write_text(text)
    (loaded,) = loading.load_macro_values(ConfigSources([str(tmp_path / 'config.gin')]), 'MODEL')
    assert loaded.vocab_size == 2048


def test_a_setting_of_the_model_flag_that_nothing_reads_is_rejected(tmp_path):
    flags, files = [('MODEL_DIR', str(tmp_path))], ('models/t5_1_1.gin', 'NUM_KV_HEADS=1', 'REMIXER_DIM=8')
    run = ConfigSources(['experiments/python_docs.gin'], flags, model=files)
    with pytest.raises(UserError, match='^--model: REMIXER_DIM is set, but nothing reads it; it is '):
        loading.load_gin_config(run, 'remixer_t5x.train.settings.Run', partial=False)


def test_a_run_that_continues_from_its_config_has_no_changed_settings(tmp_path):
    flags, texts = [('MODEL_DIR', str(tmp_path))], []
    for file in ('experiments/quickstart.gin', str(tmp_path / 'config.gin')):
        loading.load_gin_config(ConfigSources([file], flags), 'remixer_t5x.train.settings.Run', partial=False)
        texts.append(loading.get_config_text())
        (tmp_path / 'config.gin').write_text(texts[-1])
    assert 'MAX_INPUT_LENGTH = ' in texts[0] and compatibility.describe_config_changes(*texts) == ''


def test_a_partial_load_ignores_macros_of_other_commands(tmp_path):
    (tmp_path / 'mine.gin').write_text("include 'hardware/gpu.gin'\nDEVICE_MEMORY = 40\n")
    assert loading.load_macro_values(ConfigSources([str(tmp_path / 'mine.gin')]), 'MESH') == ['fsdp=-1']


def value_of(name, text):
    loading.load_gin_config(ConfigSources(flags=[(name, text)]), f'%{name}')
    return gin.query_parameter(f'%{name}')


@given(st.text(st.characters(blacklist_categories=['Cs']), min_size=1) | st.sampled_from(['[\n', '(1,\n2)']))
def test_any_flag_text_is_a_value_or_a_one_line_error(text):
    try:
        value = value_of('X', text)
    except UserError as error:
        assert '\n' not in str(error)
        return
    # The value is either the text itself or gin's value of the text.
    if value != text:
        assert gin.config.parse_value(text.strip()) == value


@pytest.mark.parametrize('text', ['{a} {b}', '100%', '"{a}" or {b}'])
def test_templates_are_strings(text):
    assert value_of('INPUTS', text) == text


GIN_LITERALS = ('true', 'false', 'none', 'null')


@given(st.from_regex(r'/?[a-zA-Z_][\w./-]*', fullmatch=True).filter(lambda text: text.lower() not in GIN_LITERALS))
def test_paths_need_no_quotes(path):
    assert value_of('MODEL_DIR', path) == path


TASK, EVALUATED, VOCABULARY = 'MIXTURE_OR_TASK_NAME', 'EVAL_MIXTURE_OR_TASK_NAME', 'VOCABULARY'
BYTES = (VOCABULARY, '@remixer_tasks.vocabularies.byte()')


def load_task(*flags, macro=TASK):
    loading.load_gin_config(ConfigSources(flags=flags), f'%{macro}')


def test_a_task_name_is_replaced_by_the_task(tmp_path):
    load_task((TASK, 'en_mix'), BYTES, ('DATA_DIR', str(tmp_path)))
    mixture = reference_resolver.evaluate_macro(TASK)
    assert mixture.name == 'en_mix'
    assert mixture.output_features['targets'].vocabulary == vocabularies.byte()


def test_several_task_names_become_a_list_of_tasks():
    load_task((EVALUATED, 'en_mix, cogs_v001'), (TASK, 'en_mix'), BYTES, macro=EVALUATED)
    assert [task.name for task in reference_resolver.evaluate_macro(EVALUATED)] == ['en_mix', 'cogs_v001']


def test_the_default_vocabulary_equals_that_of_the_task():
    load_task((TASK, 'cogs_v001'), macro=VOCABULARY)
    assert repr(gin.query_parameter('%VOCABULARY')) == '@names.vocabulary_of()'
    task = gin.get_bindings(names.vocabulary_of, resolve_references=False)['task']
    assert repr(task) == '%MIXTURE_OR_TASK_NAME'


def test_a_module_of_tasks_is_imported(tmp_path, monkeypatch):
    (tmp_path / 'my_registered_tasks.py').write_text('imported = True\n')
    monkeypatch.syspath_prepend(tmp_path)
    load_task(('MIXTURE_OR_TASK_MODULE', 'my_registered_tasks'), (TASK, 'en_mix'))
    assert 'import my_registered_tasks' in loading.get_config_text()
    load_task(('MIXTURE_OR_TASK_MODULE', 'None'), (TASK, 'en_mix'))
    assert 'my_registered_tasks' not in loading.get_config_text()
