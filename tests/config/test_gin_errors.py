"""Each mistake in a gin file or flag raises an error of one line, with its location and advice."""

import pytest

from remixer_t5x.config import loading, reference_resolver
from remixer_t5x.config.loading import ConfigSources
from remixer_t5x.errors import UserError

IMPORTS = 'from __gin__ import dynamic_registration\nimport toy_house\n'

# Line 3 of `user.gin` or a flag, and two expected parts of the message.
IN_A_FILE = {
    'misspelt parameter': ('toy_house.Engine.pwoer = 3', 'pwoer', ''),
    'misspelt reference': (
        'ENGINE = @toy_house.Turbin()',
        'toy_house has no attribute Turbin',
        'did you mean Turbine?',
    ),
    'module not imported': ('toy_hose.Engine.power = 3', 'toy_hose', 'did you mean toy_house?'),
    'unimportable module': ('import no_such_thing', 'no_such_thing', 'installed'),
    'misspelt macro': ('POWERR = 3', 'POWERR', 'did you mean POWER?'),
    'misspelt macro reference': ('toy_house.Engine.power = %PWOER', '%PWOER', 'did you mean POWER?'),
    'macro never set': ('toy_house.run.colour = %MODEL_DIR', '%MODEL_DIR', 'pass --gin.MODEL_DIR=VALUE'),
    'syntax': ('POWER 3', "'='", 'NAME = value'),
    'bare text': ('toy_house.run.colour = red', "'red'", 'quotes'),
    'include of itself': ("include 'user.gin'", 'user.gin', 'remove'),
}

AS_A_FLAG = {
    'macro of a file that is not read': (('INPUT_FIELD', '3'), 'INPUT_FIELD', 'it is a setting of runs/infer.gin'),
    'macro of a partial file': (('PACK', 'True'), 'PACK', 'it is a setting of runs/finetune.gin, runs/pretrain.gin'),
    'misspelt setting': (('Engine.powr', '3'), 'powr', '; did you mean power?'),
    'module that does not exist': (('ENGINE', '@qqq.Plane()'), "'@qqq.Plane()'; ", 'PYTHONPATH'),
    'name that an importable module lacks': (('ENGINE', '@fractions.Fractoin()'), 'Fractoin', ''),
    'sublayer of a file that is not included': (
        ('ENGINE', '@fnet.Fourier'),
        'fnet.Fourier',
        '--gin_file=sublayers/fnet.gin',
    ),
    'sublayer that only models configure': (('ENGINE', '@gmlp.Gating'), 'gmlp.Gating', 'models/gmlp_mixer.gin'),
    'lower-case truth': (('run.colour', 'true'), 'true', '--gin.run.colour=True'),
    'empty value': (('POWER', ''), 'no value', '--gin.POWER=VALUE'),
}


@pytest.mark.parametrize(('text', 'wrong', 'advice'), IN_A_FILE.values(), ids=IN_A_FILE)
def test_errors_in_files_include_the_location_and_advice(car_folder, text, wrong, advice):
    (car_folder / 'user.gin').write_text(f'{IMPORTS}{text}\n')
    with pytest.raises(UserError, match='^user.gin line 3: ') as caught:
        loading.load_gin_config(ConfigSources(['car.gin', 'user.gin']), 'toy_house.run', partial=False)
    line = str(caught.value)
    assert wrong in line and advice in line and '\n' not in line


def test_a_module_that_only_another_file_imports_must_be_imported_too(car_folder):
    (car_folder / 'user.gin').write_text('from __gin__ import dynamic_registration\ntoy_house.Engine.power = 3\n')
    with pytest.raises(UserError, match='^user.gin line 2: .*add `import toy_house` to this file$'):
        loading.load_gin_config(ConfigSources(['car.gin', 'user.gin']), 'toy_house.run', partial=False)


@pytest.mark.parametrize(('flag', 'wrong', 'advice'), AS_A_FLAG.values(), ids=AS_A_FLAG)
def test_errors_in_flags_include_advice(car_folder, flag, wrong, advice):
    with pytest.raises(UserError, match=f'^--gin.{flag[0]}') as caught:
        loading.load_gin_config(ConfigSources(['car.gin'], [flag]), 'toy_house.run', partial=False)
    line = str(caught.value)
    assert wrong in line and advice in line and '\n' not in line


ADD_CALL, ADD_LIST = (
    r'an object, got {}, .*; add \(\) after its name',
    r'a list, got {}; put references in .*: \(@NAME,\)',
)
REMOVE_CALL = r'a class or function, got {}\(\); remove \(\) after its name'


@pytest.mark.parametrize(
    ('macro', 'value', 'words'),
    [
        ('SCHEDULE', '@schedules.cosine', ADD_CALL.format('cosine')),
        ('VOCABULARY', '@remixer_tasks.vocabularies.byte', r'an object, got @remixer_tasks.vocabularies.byte; .* @.*'),
        ('VOCABULARY', 'bytes', r'an object, got bytes; .* @remixer_tasks.vocabularies.byte\(\)'),
        ('MODEL', '@seq2seq.Seq2Seq', r'an object, got @seq2seq.Seq2Seq; .* @seq2seq.Seq2Seq\(\)'),
        ('LAYOUT', 'prenorm', "a reference, .*, got 'prenorm'; set LAYOUT = @..."),
        ('PARTITIONER', '@partition.Partitioner', ADD_CALL.format('Partitioner')),
        ('DECODER', '@sampling.Sampling', ADD_CALL.format('Sampling')),
        ('ENCODER_RUNS', '@encoder/layer.alternate', ADD_CALL.format('alternate')),
        ('TRACKERS', '(@trackers.WandB,)', ADD_CALL.format('WandB')),
        ('TRACKERS', '@trackers.WandB()', ADD_LIST.format('WandB')),
        ('ENCODER_SUBLAYERS', '@feed_forward.GatedMLP', ADD_LIST.format('GatedMLP')),
        ('ENCODER_SUBLAYERS', "(%ENCODER_MIXER, 'GatedMLP')", "a reference or None, got 'GatedMLP'; .*"),
        ('ENCODER_RUNS', "((@encoder/layer.make_layer, '2'),)", "a whole number, got '2'; .*"),
        ('ENCODER_RUNS', '((@encoder/layer.make_layer(), 2),)', REMOVE_CALL.format('make_layer')),
        ('FINAL_NORM', '@norms.RMSNorm()', REMOVE_CALL.format('RMSNorm')),
        ('LAYOUT', '@norms.RMSNorm', r'a class or function that creates Layer, got @RMSNorm; use a subclass of Layer'),
        ('NUM_HEADS', '@norms.RMSNorm', 'a whole number, got @RMSNorm'),
    ],
)
def test_a_reference_that_does_not_match_the_annotation_is_rejected(macro, value, words):
    sources = ConfigSources(['experiments/quickstart.gin'], [(macro, value)])
    with pytest.raises(UserError, match=f'{macro} must be {words}$'):
        loading.load_gin_config(sources, 'remixer_t5x.train.settings.Run')


@pytest.mark.parametrize(
    ('name', 'advice'),
    [
        ('configs/runs/infr.gin', 'did you mean runs/infer.gin?'),
        ('models/t5.gin', 'did you mean models/t5_1_0.gin or models/t5_1_1.gin?'),
        ('hyper_mixr.gin', 'did you mean models/hyper_mixer.gin?'),
        ('models/caar.gin', 'did you mean car.gin?'),
        ('run', 'did you mean run/config.gin?'),
        # This resembles models/bert.gin only in the folder and the extension.
        ('models/averge.gin', 'shipped configs are in'),
    ],
)
def test_a_missing_file_names_the_nearest_one(car_folder, name, advice):
    (car_folder / 'run').mkdir()
    (car_folder / 'run/config.gin').write_text('')
    with pytest.raises(UserError, match=name) as caught:
        loading.load_gin_config(ConfigSources([name]))
    assert advice in str(caught.value)


@pytest.mark.parametrize('text', ['POWER = %POWER', 'A = %B\nB = (1, %A)\nPOWER = %A'])
def test_a_macro_that_refers_to_itself_is_rejected(car_folder, text):
    (car_folder / 'user.gin').write_text(f'{text}\n')
    with pytest.raises(UserError, match='a macro must not refer to itself, got %'):
        loading.load_gin_config(ConfigSources(['car.gin', 'user.gin']), 'toy_house.run')


def test_line_numbers_below_an_include_are_correct(car_folder):
    (car_folder / 'nothing.gin').write_text('# empty\n')
    (car_folder / 'user.gin').write_text(f"{IMPORTS}include 'nothing.gin'\n\ntoy_house.Engine.pwoer = 3\n")
    with pytest.raises(UserError, match=r'^user.gin line 5: '):
        loading.load_gin_config(ConfigSources(['car.gin', 'user.gin']))


@pytest.mark.parametrize(
    ('function', 'setting', 'error', 'message'),
    [
        ('crash', '', UserError, 'must configure toy_house.crash'),
        ('refuse', 'toy_house.refuse.power = 3', UserError, '^power is 3; give less$'),
        ('run', 'toy_house.run.engine = @toy_house.Engine()', UserError, '--gin.Engine.power=VALUE'),
        ('crash', 'toy_house.crash.power = 3', KeyError, 'a bug'),
    ],
)
def test_errors_in_calls_name_the_setting(car_folder, function, setting, error, message):
    import toy_house

    (car_folder / 'user.gin').write_text(f'{IMPORTS}{setting}\n')
    loading.load_gin_config(ConfigSources(['user.gin']))
    with pytest.raises(error, match=message):
        reference_resolver.call_configured(getattr(toy_house, function))
