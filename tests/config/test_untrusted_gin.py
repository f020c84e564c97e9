"""Untrusted gin text: only code on the allow-list is accepted."""

import pytest

from remixer_t5x.config import untrusted_gin
from remixer_t5x.errors import UserError

IMPORT = 'from remixer_t5x.models.sublayers import attention\n'
HOSTILE = {
    'another module': 'import os',
    'another module under our name': 'import os as attention\nX = @attention.system()',
    'our configuration': 'from remixer_t5x.config import loading',
    'our package': 'import remixer_t5x',
    'a name that is bound again': f'{IMPORT}import os as attention',
    'a function inside of our import': (
        'import remixer_t5x.models.losses\nX = @remixer_t5x.config.loading.load_gin_config()'
    ),
    'an include': "include 'stranger.gin'",
    'a function in a container': 'X = [(1, {"y": @os.system()})]',
    'a library of our module': f'{IMPORT}X = @attention.jnp.save()',
    'a class that our module imports': f'{IMPORT}X = @attention.UserError()',
    'a private name': f'{IMPORT}X = @attention._merge',
    "gin's own function": 'X = @gin.singleton()',
    'a macro by its setting': "X/gin.macro.value = 'stranger'",
    'a macro that imports': "MIXTURE_OR_TASK_MODULE = 'stranger'",
}


@pytest.mark.parametrize('text', HOSTILE.values(), ids=HOSTILE)
def test_code_outside_of_the_allow_list_is_reported(text):
    assert untrusted_gin.find_disallowed_statement(f'{text}\n', 'model.gin')


@pytest.mark.parametrize(
    'text', ['# a\rimport os', '# a\u2028import os', '# a\x0cimport os', "X = 'a\0b'", 'X = (1,', 'X = ' + '[' * 5000]
)
def test_ambiguous_or_invalid_gin_text_is_rejected(text):
    with pytest.raises(UserError, match='model.gin') as error:
        untrusted_gin.find_disallowed_statement(f'{text}\n', 'model.gin')
    assert str(error.value).isprintable()


def test_models_literals_macros_and_vocabularies_are_allowed():
    text = f"""from __gin__ import dynamic_registration
{IMPORT}from remixer_tasks import vocabularies
X = @decoder/attention.SelfAttention
Y = {{'inputs': %X, 'name': 'import os'}}
VOCABULARY = @vocabularies.sentencepiece()
decoder/attention.SelfAttention.num_heads = \\
    4
"""
    assert untrusted_gin.find_disallowed_statement(text, 'model.gin') == ''
