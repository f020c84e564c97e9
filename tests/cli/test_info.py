"""`remixer-t5x info` on the shipped models, in this process."""

import pytest

from remixer_t5x.cli import main as cli
from remixer_t5x.cli.info import memory, model
from tests.support import feed_forward

MODEL = ('--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin')


@pytest.fixture
def info(capsys, clean_environment):
    def run(*argv):
        assert cli.main(['info', *argv]) == 0
        return capsys.readouterr().out

    return run


def test_the_table_shows_modules_and_totals(info):
    out = info('--gin_file=models/t5_1_1.gin', '--gin_file=sizes/small.gin')
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows['total'][0] == '76,961,152'
    # 8 layers of 4 projections 512 x 6 x 64.
    assert rows['self_attention'][0] == f'{8 * 4 * 512 * 384:,}'
    assert '76,961,152 parameters (77.0M), 293.6 MiB in float32' in out and 'Fourier transforms' in out


@pytest.mark.parametrize(
    ('model_type', 'text'),
    [
        ('encoder_decoder', '8 input and 4 target tokens'),
        ('span', '8 input tokens'),
        ('encoder_only', '8 input tokens'),
    ],
)
def test_only_lengths_that_the_model_reads_are_described(model_type, text):
    assert model.describe_feature_lengths(model_type, {'inputs': 8, 'targets': 4}) == text


def test_settings_lists_macros_that_contain_a_word(info, capsys):
    out = info('--settings', 'lora')
    assert 'LORA_RANK' in out and 'models.lora.with_adapters' in out and 'BATCH_SIZE' not in out
    assert cli.main(['info', '--settings=no_such_word']) == 2
    assert 'no_such_word' in capsys.readouterr().err


def test_all_models_are_compared_with_the_papers_figures(info):
    lengths = "--gin.TASK_FEATURE_LENGTHS={'inputs': 1024, 'targets': 114}"
    out = info('--compare', 'tiny', '--models=t5_1_1,gmlp', lengths)
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert ['t5_1_1', 'tiny', '22,746,880', '1.000'] in [row[:4] for row in rows]
    # 22,834,172 with 512 positions in both stacks. The 4 encoder layers have 1,024 biases and 2,047 spatial weights
    # each, and the 4 decoder layers have 114 of both.
    parameters = 22_834_172 + 4 * (1024 + 2047 - 512 - 1023) + 4 * 2 * (114 - 512)
    assert ['gmlp', 'tiny', f'{parameters:,}', '1.004'] in [row[:4] for row in rows]
    # 130M in the paper's table 5; 129.9M by our count of encoder and embedding.
    assert ['gmlp', 'gmlp_paper_base', '130', 'M', '130', 'M', '1.000'] in [row[:7] for row in rows]


def test_shardings_of_a_described_slice_are_printed_without_its_devices(info):
    out = info(
        '--sharding', *MODEL, '--gin_file=hardware/tpu.gin', '--gin.TOPOLOGY=v3:4x4', '--mesh=data=-1,fsdp=4,tensor=8'
    )
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert out.startswith('32 devices, data=1, fsdp=4, tensor=8')
    assert rows['token_embedder/embedding'].endswith(' 1/32  ') and 'tensor, fsdp' in rows['token_embedder/embedding']
    # 22,746,880 parameters; heads do not divide by 8.
    assert 'of 86.8 MiB in all' in out and 'heads=4 is not divisible by 8: replicated' in out


# The smallest T5 without attention.
MINIATURE = [
    *feed_forward.FLAGS,
    *(
        f'--gin.{name}={size}'
        for name, size in {
            'EMBED_DIM': 128, 'MLP_DIM': 128, 'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 1, 'VOCAB_SIZE': 128,
            'BATCH_SIZE': 8, 'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 16}",
        }.items()
    ),
]  # fmt: skip


def test_info_prints_the_memory_of_a_step_and_advice(info):
    hardware = ('--gin_file=optimizers/adafactor.gin', '--gin_file=hardware/cpu.gin')
    out = info('--memory', *MODEL, *hardware, *MINIATURE, '--device_memory=0.0001')
    lines = [line.split() for line in out.splitlines()]
    # Matrices of 128 x 128: two embedding tables, and the 3 of each gated MLP; norms of both sublayers and stacks.
    parameters = (2 + 2 * 3) * 128 * 128 + 4 * 128
    assert ['parameters', f'{4 * parameters:,}'] in [line[:2] for line in lines]
    assert 'does not fit' in out and 'to save memory: --gin.MICROBATCHES=2' in out
    assert 'adafactor' not in out, 'the run uses it already'


H100 = ('--gin_file=hardware/gpu.gin', '--gin.TOPOLOGY=h100:8')


@pytest.mark.parametrize(
    ('arguments', 'advice'),
    [
        (['--speed', *MODEL, '--gin_file=optimizers/adafactor.gin', '--gin_file=hardware/cpu.gin'], 'TOPOLOGY=v5e:2x4'),
        (['--sharding', *MODEL, *H100, '--mesh=fsdp=3'], 'product is the number of devices, 8'),
        ([*MODEL, '--gin.UNGATED_MLP_DIM=9'], 'nothing reads it; it is a setting of models/bert.gin'),
        ([*MODEL, '--models=fnet'], '--models requires --compare'),
        ([*MODEL, '--devices=4'], '--devices requires --sharding or --memory or --speed'),
        (['--memory', *MODEL, '--price=0'], '--price requires --speed'),
        (['--settings', 'learnign_rate'], 'did you mean LEARNING_RATE?'),
        (['--compare', '--settings'], 'cannot be combined with --settings'),
        (['--compare', *MODEL], 'got --gin_file=models/t5_1_1.gin'),
        (['--compare', '--gin.EMBED_DIM=8'], 'got --gin.EMBED_DIM'),
    ],
)
def test_invalid_arguments_raise_a_one_line_error(arguments, advice, capsys, clean_environment):
    assert cli.main(['info', *arguments]) == 2
    error = capsys.readouterr().err
    assert advice in error and error.count('\n') == 1


def test_kernels_of_both_accelerators_are_compared_on_a_cpu(info):
    sizes = ('--gin.NUM_HEADS=1', "--gin.TASK_FEATURE_LENGTHS={'inputs': 16, 'targets': 8}", "--gin.DTYPE='bfloat16'")
    out = info('--self_check', *MODEL, *sizes, '--gin.PACK=True')
    rows = [line for line in out.splitlines() if 'tokens, 1 heads of 64' in line]
    assert [sum(f'{kernel} ' in row for row in rows) for kernel in ('tpu_kernel', 'cudnn')] == [3, 3]
    assert all(row.split()[-1] == 'passed' and 'packed' in row for row in rows)
    assert 'jax ' in out and 'cpu' in out


def test_a_step_is_timed(clean_environment):
    """Runs on any device; `info --self_check` times steps on accelerators whose speed is known."""
    from remixer_t5x.extras.forecast import command

    files = (*MODEL, '--gin_file=optimizers/adafactor.gin', '--gin_file=hardware/cpu.gin')
    args = cli._build_parser().parse_args(['info', '--memory', '--verbose', *files])
    args.gin_flags = [tuple(flag.removeprefix('--gin.').split('=', 1)) for flag in (*MINIATURE, '--gin.PACK=True')]
    step, _ = memory.read_step_spec(args)
    assert 0 < command.measure_step(step) < 60
