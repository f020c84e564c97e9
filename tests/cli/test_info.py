"""`remixer-t5x info` on the shipped models, in this process."""

import pytest

from remixer_t5x.cli.main import main


@pytest.fixture
def info(capsys, clean_environment):
    def run(*argv):
        assert main(['info', *argv]) == 0
        return capsys.readouterr().out

    return run


def test_the_table_shows_modules_and_totals(info):
    out = info('--gin_file=models/t5_1_1.gin', '--gin_file=sizes/small.gin')
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows['total'][0] == '76,961,152'
    # 8 layers of 4 projections 512 x 6 x 64.
    assert rows['self_attention'][0] == f'{8 * 4 * 512 * 384:,}'
    assert '76,961,152 parameters (77.0M), 293.6 MiB in float32' in out


def test_depth_and_lengths_are_obeyed(info):
    arguments = ['--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin']
    shallow = info(*arguments, '--depth', '1', "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 8}")
    deep = info(*arguments, '--depth=4')
    assert 'self_attention' not in shallow and 'query' in deep
    assert 'one example: 32 input and 8 target tokens' in shallow


def test_a_training_configuration_can_be_inspected_as_it_is(info, monkeypatch):
    # MODEL_DIR and the task are missing here, and info needs neither.
    import gin

    arguments = ['--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', '--gin_file=runs/info.gin']
    assert 'total' in info(*arguments, '--gin.BATCH_SIZE=8')
    gin.clear_config()


def test_all_models_are_compared_and_the_papers_figures_stand_beside_ours(info):
    out = info('--compare', 'tiny', "--gin.COMPARE_MODELS=('t5_1_1', 'gmlp')")
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert ['t5_1_1', 'tiny', '22,746,880', '1.000'] in [row[:4] for row in rows]
    assert ['gmlp', 'tiny', '22,834,172', '1.004'] in [row[:4] for row in rows]
    # 130M in the paper's table 5; 129.9M by our count of encoder and embedding.
    assert ['gmlp', 'gmlp_paper_base', '130', 'M', '130', 'M', '1.000'] in [row[:7] for row in rows]
    assert '472,121,344 operations by the formula of its appendix D' in out
