"""`info --speed` with compilers for machines that are not present.

Compilers for TPUs and GPUs cannot be unloaded, so each runs in a separate process.
"""

import dataclasses

import jax
import pytest

from remixer_t5x.cli.info import memory
from remixer_t5x.cli.main import main
from remixer_t5x.costs.step_memory import StepMemory
from remixer_t5x.devices.chips import CHIPS
from remixer_t5x.devices.hardware_table import has_compiler
from remixer_t5x.extras.forecast import command as speed
from remixer_t5x.extras.forecast import compiled_program, roofline
from remixer_t5x.extras.forecast.forecast import Forecast
from tests.support import paths
from tests.support.real_processes import Process

# The smallest T5.
SIZES = {
    'EMBED_DIM': 128, 'MLP_DIM': 128, 'NUM_HEADS': 2, 'HEAD_DIM': 64, 'NUM_ENCODER_LAYERS': 2, 'NUM_DECODER_LAYERS': 1,
    'VOCAB_SIZE': 256, 'BATCH_SIZE': 8, 'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 16}",
}  # fmt: skip
MODEL = [
    *('--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', '--gin_file=optimizers/adafactor.gin'),
    *(f'--gin.{name}={size}' for name, size in SIZES.items()),
]
H100 = ['--gin_file=hardware/gpu.gin', '--gin.TOPOLOGY=h100:1']


@pytest.mark.parametrize(('compiler', 'topology'), [('tpu', 'v5e:1x1'), ('gpu', 'h100:1')])
def test_a_step_is_forecast_for_a_machine_that_is_not_present(tmp_path, compiler, topology):
    if not has_compiler(compiler):
        pytest.skip(f"the {compiler} compiler is not installed: pip install -e '.[forecast]' or '.[forecast-gpu]'")
    machine = (f'--gin_file=hardware/{compiler}.gin', f'--gin.TOPOLOGY={topology}')
    argv = ['info', *MODEL, '--speed', *machine, '--price=1.5']
    # The compilers read XLA_FLAGS too, and the tests' flags are for the CPU.
    process = Process(main, argv, output=tmp_path / 'log', environment=paths.environment(XLA_FLAGS=''))
    assert process.wait() == 0, process.output()
    out = process.output()
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert f'compiling with XLA:{compiler.upper()} for {topology}' in out
    # The logits alone need 2 x 64 x 128 x 256 FLOPs per sequence and pass.
    (work,) = [line.split() for line in out.splitlines() if 'products in bf16' in line]
    assert 0.003 * 8 * 0.016 < float(work[3]) < 0.01 and 'TFLOP' in work
    assert 'HBM traffic' in out and '$ per M tokens' in out and 'what limits the step:' in out
    assert any(name.startswith('encoder/run_0/layer/') for name in rows)
    assert ("the TPU compiler's estimate" in out) == (compiler == 'tpu')
    assert 'fits: ' in out


PRODUCT = """HloModule product

ENTRY %main (x: bf16[1024,512], y: bf16[512,256]) -> bf16[1024,256] {
  %x = bf16[1024,512]{1,0} parameter(0)
  %y = bf16[512,256]{1,0} parameter(1)
  ROOT %z = bf16[1024,256]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.fixture
def compiled_steps(monkeypatch):
    """Replaces the compiler: a step becomes one product per million parameters. Returns the compiled steps."""
    steps = []

    def forecast(step, hardware):
        steps.append(step)
        parameters = sum(array.size for array in jax.tree.leaves(step.state_plan.abstract.params))
        program = compiled_program.parse_program(PRODUCT)
        program = dataclasses.replace(program, kernels=program.kernels * (parameters // 10**6))
        bound = roofline.compute_step_time_bound(program, CHIPS['h100'], [0])
        return Forecast(step, bound, StepMemory(0, 0, 0, 0, 2**30, 0, 0, 2**30), 1e12, 1000, 1)

    monkeypatch.setattr(speed, '_build_step_spec', memory.read_step_spec)
    monkeypatch.setattr(speed, '_forecast_step', forecast)
    return steps


def test_models_are_compared_in_one_table(compiled_steps, capsys, clean_environment):
    models = ['--compare=tiny,small', '--models=t5_1_1,gmlp', '--gin_file=optimizers/adafactor.gin']
    assert main(['info', '--speed', *models, *H100, '--gin.BATCH_SIZE=4']) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {tuple(row[:2]): row for row in rows if len(row) > 8 and row[0] in ('t5_1_1', 'gmlp')}
    assert set(table) == {(model, size) for model in ('t5_1_1', 'gmlp') for size in ('tiny', 'small')}
    # 22 and 76 million parameters.
    assert [table['t5_1_1', size][2] for size in ('tiny', 'small')] == ['0.006', '0.020']
    # The ratio is to the first model of the size.
    assert [table['t5_1_1', size][6] for size in ('tiny', 'small')] == ['1.00', '1.00']
    assert [step.batch_size for step in compiled_steps] == [4] * 4
