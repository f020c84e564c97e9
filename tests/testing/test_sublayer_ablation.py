"""Every sublayer of the shipped models has an effect at initialization."""

import re

import numpy as np
import pytest

from remixer_t5x.config import loading
from scripts.studies import sublayer_ablation
from tests.support.paths import CONFIGS

# All sublayers of these models are in the same layouts in t5_1_1, mixer_enc_dec and remixer.
COVERED = {'mixer_enc', 'remixer_scaled'}
MODELS = sorted({path.stem for path in (CONFIGS / 'models').glob('*.gin')} - COVERED)
STACKS = {'bert': {'encoder'}, 'modern_bert': {'encoder'}, 'gpt2': {'decoder'}}
LENGTH, TARGETS, VOCAB = 32, 16, 64
SIZES = dict.fromkeys(re.findall(r'^(\w+_DIM) =', (CONFIGS / 'sizes/mini.gin').read_text(), re.M), 64)
SIZES |= {'EMBED_DIM': 32, 'TIM_EMBED_DIM': 32, 'HEAD_DIM': 8, 'GATE_ATTENTION_DIM': 8}
# BERT and GPT-2 initialize kernels with a standard deviation of 0.02, which is too small for narrower models.
PUBLISHED = {'EMBED_DIM': 768, 'MLP_DIM': 3072, 'NUM_HEADS': 12, 'HEAD_DIM': 64}
SIZES |= {'NUM_ENCODER_LAYERS': 2, 'NUM_DECODER_LAYERS': 2, 'VOCAB_SIZE': VOCAB, 'REMAT_POLICY': None}
# Without TIM's plain layers, which are those of t5_1_1.
TIM_LAYERS = {f'{side}_RUNS': f'((@tim_{side.lower()}/layer.make_layer, 2),)' for side in ('ENCODER', 'DECODER')}


def compute_effects(model: str, **macros: str) -> dict[sublayer_ablation.SublayerKind, float]:
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(1, VOCAB, (2, n)).astype(np.int32) for n in (LENGTH, TARGETS))
    inputs[1, -4:] = 0
    flags = SIZES | (PUBLISHED if model in STACKS else TIM_LAYERS if model == 'tim' else {}) | macros
    sources = loading.ConfigSources([f'models/{model}.gin', 'sizes/tiny.gin'], [(k, str(v)) for k, v in flags.items()])
    (built,) = loading.load_macro_values(sources, 'MODEL')
    return sublayer_ablation.compute_ablation_effects(built, inputs, targets)


def too_small(effects: dict[sublayer_ablation.SublayerKind, float]) -> list[sublayer_ablation.SublayerKind]:
    """Returns the sublayers with an effect below 0.05 or NaN. Rounding to bfloat16 has an effect of 0.01."""
    return [sublayer for sublayer, effect in effects.items() if not effect >= 0.05]


@pytest.mark.parametrize('model', MODELS)
def test_every_sublayer_changes_the_output_of_its_stack(model):
    effects = compute_effects(model)
    assert {stack for stack, _ in effects} == STACKS.get(model, {'encoder', 'decoder'})
    assert too_small(effects) == []


def test_feed_forward_of_fnet_in_pre_norm_layers_is_too_small():
    effects = compute_effects('fnet', ENCODER_LAYOUT='@layer.PreNorm')
    assert too_small(effects) == [('encoder', 'gated_mlp')]
