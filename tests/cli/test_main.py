"""The console script: flags, exit codes and one-line errors."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x import lazy_imports
from remixer_t5x.cli import arguments
from remixer_t5x.cli import main as cli
from remixer_t5x.cli.main import COMMANDS
from remixer_t5x.config import user_modules

NAMES = st.from_regex(r'[A-Z_]+(\.[a-z_]+)?', fullmatch=True)
VALUES = st.text(st.characters(blacklist_categories=['Cs', 'Cc']), min_size=1).filter(lambda v: not v.startswith('--'))


@settings(max_examples=30)
@given(st.lists(st.tuples(NAMES, VALUES, st.booleans())))
def test_gin_flags_are_extracted_in_order(flags):
    argv = ['train']
    for name, value, joined in flags:
        argv += [f'--gin.{name}={value}'] if joined else [f'--gin.{name}', value]
    rest, pairs = arguments.split_gin_flags([*argv, '--verbose'])
    assert rest == ['train', '--verbose']
    assert pairs == [(name, value) for name, value, _ in flags]


MISTAKES = {
    'unknown command': (['trian'], "error: 'trian' is not a command; did you mean train?"),
    'setting as a flag': (
        ['info', '--batch_size=8'],
        'error: unrecognized arguments: --batch_size=8; the setting is --gin.BATCH_SIZE=8; see remixer-t5x info --help',
    ),
    'checkpoint of a new run': (
        ['finetune', '--checkpoint=runs/mine'],
        'error: unrecognized arguments: --checkpoint=runs/mine; the setting is '
        '--gin.INITIAL_CHECKPOINT_PATH=runs/mine; see remixer-t5x finetune --help',
    ),
    'folder instead of a flag': (
        ['info', 'runs/mine'],
        'error: unrecognized arguments: runs/mine; pass a gin file as --gin_file=FILE, and a run as '
        '--gin_file=MODEL_DIR/config.gin; see remixer-t5x info --help',
    ),
    'folder instead of a checkpoint': (
        ['eval', 'runs/mine'],
        'error: unrecognized arguments: runs/mine; pass a gin file as --gin_file=FILE, and a run as '
        '--checkpoint=MODEL_DIR; see remixer-t5x eval --help',
    ),
    'checkpoint of a command that reads none': (
        ['info', '--checkpoint=runs/mine'],
        'error: unrecognized arguments: --checkpoint=runs/mine; pass a gin file as --gin_file=FILE, and a run as '
        '--gin_file=MODEL_DIR/config.gin; see remixer-t5x info --help',
    ),
    'flag without value': (['info', '--gin.X'], 'error: --gin.X has no value; pass --gin.X=VALUE'),
    'gin flag of a command without gin files': (
        ['data', 'list', '--gin.X=3'],
        'error: --gin.X is set, but remixer-t5x data list reads no gin files; see remixer-t5x data list --help',
    ),
    'empty model': (['info', '--model='], "error: --model must be one or more names joined by +, got ''"),
    'no checkpoint': (
        ['infer', '--input=a.txt'],
        'error: a gin file must configure the model; pass --checkpoint=MODEL_DIR of a local run, or --gin_file=FILE',
    ),
    'misspelt subcommand': (['data', 'lst'], 'error: unrecognized arguments: lst; did you mean data list?'),
    'missing file': (
        ['info', '--gin_file=sizes/bse.gin'],
        "error: gin file 'sizes/bse.gin' is not in the current folder, --gin_search_paths or shipped configs; "
        'did you mean sizes/base.gin?',
    ),
}


@pytest.mark.parametrize('argv, line', MISTAKES.values(), ids=MISTAKES)
def test_an_invalid_flag_is_one_line_and_exit_code_2(argv, line, capsys, clean_environment, monkeypatch):
    # Importing TensorFlow takes seconds, and none of these errors requires it.
    monkeypatch.setattr(lazy_imports, '_load_library', lambda name: pytest.fail(f'imported {name} before the error'))
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert err.startswith(line)
    assert err.count('\n') == 1 and err.endswith('\n')


def test_a_bug_is_a_line_below_its_traceback(capsys, clean_environment, monkeypatch):
    def fail(*_):
        error = ZeroDivisionError('by\nzero')
        error.add_note('the newest checkpoint is of step 3')
        raise error

    monkeypatch.setattr(cli, '_run_command', fail)
    # An earlier test in this process may have made the modules of `tests` modules of the user.
    monkeypatch.setattr(user_modules, 'importable_modules', set())
    assert cli.main(['info']) == 1
    first, *frames, line = capsys.readouterr().err.splitlines()
    assert first.startswith('Traceback') and any('in fail' in frame for frame in frames)
    assert line == 'error: this is a bug: ZeroDivisionError: by zero; the newest checkpoint is of step 3'


MIXER = """import flax.linen as nn

class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return x + undefined_name
"""


@pytest.mark.parametrize(
    ('module', 'text', 'line', 'message'),
    [
        ('fails_when_called', MIXER, 6, 'undefined_name'),
        ('lacks_a_package', 'import flax\nimport no_such_package\n', 2, 'no_such_package'),
        ('is_invalid', 'import flax\ndef broken(:\n', 2, 'SyntaxError'),
    ],
)
def test_an_error_in_a_module_of_the_user_names_its_line(
    module, text, line, message, capsys, clean_environment, monkeypatch, tmp_path
):
    path = tmp_path / f'{module}.py'
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ['--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', f'--gin.ENCODER_MIXER=@{module}.Mixer']
    assert cli.main(['info', *flags]) == 2
    *_, code, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f'error: {path} line {line}: ') and message in error and 'a bug' not in error
    assert code.strip() == text.splitlines()[line - 1].strip()


def test_modules_of_the_current_folder_are_found_after_libraries(capsys, clean_environment, monkeypatch, tmp_path):
    (tmp_path / 'mixer_of_this_folder.py').write_text('from remixer_t5x.models.sublayers.fnet import FNet as Mine\n')
    (tmp_path / 'flax.py').write_text('raise AssertionError("a file shadowed a library")\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    flags = ['models/t5_1_1.gin', 'sizes/tiny.gin']
    mixer = '--gin.ENCODER_MIXER=@mixer_of_this_folder.Mine'
    monkeypatch.setattr(sys, 'argv', ['remixer-t5x', 'info', *(f'--gin_file={file}' for file in flags), mixer])
    assert cli.main() == 0, capsys.readouterr().err
    assert 'f_net' in capsys.readouterr().out


@pytest.mark.parametrize(('error', 'code'), [(KeyboardInterrupt(), 130), (MemoryError(), 2)])
def test_an_interrupt_and_a_lack_of_memory_are_one_line(error, code, capsys, clean_environment, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli, '_run_command', fail)
    assert cli.main(['info']) == code
    assert capsys.readouterr().err.count('\n') == 1


def test_help_imports_no_library():
    code = (
        'import sys\n'
        'from remixer_t5x.cli.main import main\n'
        'try:\n    main(["--help"])\nexcept SystemExit:\n    pass\n'
        'heavy = {"jax", "flax", "tensorflow", "seqio", "gin", "numpy", "rich"} & set(sys.modules)\n'
        'assert not heavy, heavy\n'
    )
    done = run_python(['-c', code])
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command.name in done.stdout and all(example in done.stdout for example in command.examples)


def test_freed_buffers_are_reused_without_page_faults():
    """Allocates a buffer of 64 MiB repeatedly, which glibc returns to the system by default."""
    code = (
        'import resource\n'
        'from remixer_t5x.cli import main\n'
        'main.keep_freed_buffers()\n'
        'for _ in range(3):\n'
        '    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n'
        '    bytearray(b"1") * 2**26\n'
        'print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n'
    )
    reused, returned = (
        int(run_python(['-c', text]).stdout) for text in (code, code.replace('main.keep_freed_buffers()\n', ''))
    )
    assert reused < 100 < 10_000 < returned


def run_python(argv):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True)
