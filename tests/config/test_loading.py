"""gin files and flags become calls: lookup, precedence, includes, text values, and only what is reached counts."""

import fractions

import gin
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.config import files, loading, resolved
from remixer_t5x.config.loading import ConfigSources
from remixer_t5x.errors import UserError

ROOT = 'toy_house.run'


def run(*files, partial=False, **given):
    loading.load(ConfigSources(files, **given), ROOT, partial=partial)
    return resolved.call_configured(ROOT)


def test_a_file_is_built_and_called(house):
    engine, colour = run('car.gin')
    assert (engine.power, colour) == (5, 'red')


def test_flags_win_over_files_and_later_files_over_earlier(house):
    (house / 'fast.gin').write_text('POWER = 6\n')
    assert run('car.gin', 'fast.gin')[0].power == 6
    assert run('car.gin', 'fast.gin', flags=[('POWER', '8')])[0].power == 8


def test_a_flag_binds_a_setting_and_takes_bare_text(house):
    # The whole name: `run.colour` is ambiguous once a test in this process has imported a command's `run`.
    assert run('car.gin', flags=[('toy_house.run.colour', '/tmp/a b')])[1] == '/tmp/a b'


def test_a_flag_may_name_what_a_file_only_imports(house):
    import toy_house

    engine, _ = run('car.gin', flags=[('ENGINE', '@toy_house.Turbine()'), ('Turbine.power', '9')])
    assert engine == toy_house.Turbine(9)


def test_a_flag_may_name_what_no_file_imports(house):
    flags = [('ENGINE', '@fractions.Fraction()'), ('fractions.Fraction.numerator', '3')]
    assert run('car.gin', flags=[*flags, ('Fraction.denominator', '4')])[0] == fractions.Fraction(3, 4)


def test_a_macro_may_have_a_scope(house):
    (house / 'scoped.gin').write_text((house / 'car.gin').read_text().replace('POWER', 'fast/POWER'))
    assert run('scoped.gin')[0].power == 5


def test_two_files_may_give_one_name_to_two_modules(house):
    (house / 'other.gin').write_text('from __gin__ import dynamic_registration\nimport os.path as toy_house\n')
    assert run('other.gin', 'car.gin')[0].power == 5


def test_includes_keep_their_place_in_the_order(house):
    (house / 'middle.gin').write_text('POWER = 2\n')
    text = (house / 'car.gin').read_text()
    (house / 'before.gin').write_text("include 'middle.gin'\n" + text)
    (house / 'after.gin').write_text(text + "include 'middle.gin'\n")
    assert run('before.gin')[0].power == 5
    assert run('after.gin')[0].power == 2


def test_what_is_imported_above_an_include_holds_below_it(house):
    # No other test names Trailer, so gin cannot know it from an earlier one.
    (house / 'nothing.gin').write_text('# nothing\n')
    text = (house / 'car.gin').read_text()
    (house / 'below.gin').write_text(text + "include 'nothing.gin'\nENGINE = @toy_house.Trailer()\n")
    assert run('below.gin')[0].wheels == 2


def test_search_paths_come_before_the_shipped_configs(house, tmp_path_factory):
    other = tmp_path_factory.mktemp('other')
    (other / 'runs').mkdir()
    (other / 'runs/infer.gin').write_text('POWER = 3\n')
    assert run('car.gin', 'runs/infer.gin', search_paths=[str(other)])[0].power == 3


@pytest.mark.parametrize('name', ['runs/infer.gin', 'configs/runs/infer.gin'])
def test_shipped_configs_are_found_from_any_folder(house, name):
    path = files.find_file(name)
    assert path == files.shipped_folder() / 'runs/infer.gin'


def test_a_partial_command_needs_only_what_it_reaches(house):
    extra = 'toy_house.refuse.power = %MODEL_DIR\nBATCH_SIZE = 3\n'
    (house / 'more.gin').write_text((house / 'car.gin').read_text() + extra)
    with pytest.raises(UserError):
        run('more.gin')
    (house / 'more.gin').write_text((house / 'car.gin').read_text() + extra.splitlines()[0] + '\n')
    assert run('more.gin', partial=True)[0].power == 5


def test_values_of_macros_need_only_what_these_macros_reach(house):
    import toy_house

    (house / 'more.gin').write_text(
        (house / 'car.gin').read_text() + 'toy_house.refuse.power = %NOWHERE\nNOWHERE = 1\n'
    )
    values = loading.values(ConfigSources(['more.gin'], defaults={'SEED': 3}), 'ENGINE', 'SEED')
    assert values == [toy_house.Engine(5), 3]
    with pytest.raises(UserError, match='^%SIZE is not set; type --gin.SIZE=VALUE$'):
        loading.values(ConfigSources(['car.gin']), 'SIZE')


def test_a_macro_that_is_not_set_has_the_default_of_its_argument(house, monkeypatch):
    # A shipped file names a macro for a setting; here this file counts as one.
    text = (house / 'car.gin').read_text() + 'toy_house.Engine.dtype = %DTYPE\nDTYPE = %KIND\n'
    (house / 'named.gin').write_text(text)
    monkeypatch.setattr(files, 'shipped_folder', lambda: house)
    (house / 'defaults.gin').write_text('')
    files.shipped.cache_clear()
    try:
        assert run('named.gin')[0].dtype == 'float32'
        assert "KIND = 'float32'" in loading.config_text()
        assert run('named.gin', flags=[('KIND', 'bfloat16')])[0].dtype == 'bfloat16'
    finally:
        files.shipped.cache_clear()


def test_a_file_may_shorten_a_name_that_an_earlier_file_imports(house):
    (house / 'short.gin').write_text('ENGINE = @Engine()\n')
    assert run('car.gin', 'short.gin', flags=[('POWER', '9')])[0].power == 9


def test_the_operative_config_rebuilds_the_same(house):
    first = run('car.gin', flags=[('POWER', '11')])
    (house / 'operative.gin').write_text(loading.config_text())
    assert run('operative.gin') == first


def test_the_operative_config_is_whole_before_anything_is_called(house):
    (house / 'lazy.gin').write_text((house / 'car.gin').read_text().replace('@toy_house.Engine()', '@toy_house.Engine'))
    loading.load(ConfigSources(['lazy.gin']), ROOT)
    assert 'Engine.power = %POWER' in loading.config_text()


@pytest.mark.parametrize('model', [(), ('models/hyper_mixer.gin',)], ids=['its model', '--model'])
def test_the_configuration_of_a_run_has_only_what_it_reads_and_loads_again(tmp_path, model):
    run = ConfigSources(['experiments/python_docs.gin'], [('MODEL_DIR', str(tmp_path))], model=model)
    loading.load(run, 'remixer_t5x.train.settings.Run', partial=False)
    text = loading.config_text()
    assert 'MESH =' in text and 'DEVICE_MEMORY' not in text and ('REMIXER_DIM' in text) == (not model)
    (tmp_path / 'config.gin').write_text(text)
    (loaded,) = loading.values(ConfigSources([str(tmp_path / 'config.gin')]), 'MODEL')
    assert loaded.vocab_size == 2048


def test_a_partial_command_leaves_a_setting_of_another_command_unread(tmp_path):
    (tmp_path / 'mine.gin').write_text("include 'hardware/gpu.gin'\nDEVICE_MEMORY = 40\n")
    assert loading.values(ConfigSources([str(tmp_path / 'mine.gin')]), 'MESH') == ['fsdp=-1']


def test_loading_forgets_the_configuration_before(house):
    run('car.gin', flags=[('toy_house.run.colour', 'blue')])
    assert run('car.gin')[1] == 'red'


def value_of(name, text):
    loading.load(ConfigSources(flags=[(name, text)]), f'%{name}')
    return gin.query_parameter(f'%{name}')


@given(st.text(st.characters(blacklist_categories=['Cs', 'Cc']), min_size=1))
def test_any_text_is_a_value_or_a_one_line_error(text):
    try:
        value = value_of('X', text)
    except UserError as error:
        assert '\n' not in str(error)
        return
    # Either the value is the text itself, or gin reads the text as it is.
    if value != text:
        assert gin.config.parse_value(text) == value


@pytest.mark.parametrize('text', ['{review}', '{a} {b}', 'question: {question}', '100%'])
def test_a_template_is_a_text(text):
    assert value_of('INPUTS', text) == text


NO_WORDS = ('true', 'false', 'none', 'null')


@given(st.from_regex(r'/?[a-zA-Z_][\w./-]*', fullmatch=True).filter(lambda text: text.lower() not in NO_WORDS))
def test_paths_need_no_quotes(path):
    assert value_of('MODEL_DIR', path) == path
