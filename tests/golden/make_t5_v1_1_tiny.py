"""Writes t5_v1_1_tiny.npz: a tiny random T5 v1.1 of Hugging Face's transformers, a padded batch, and its outputs.

Needs torch and transformers: `python tests/golden/make_t5_v1_1_tiny.py`.
"""

import pathlib

import numpy as np
import torch
import transformers

PAD = 0


def make_arrays(seed: int) -> dict[str, np.ndarray]:
    """Weights under `weights/NAME`, the batch, and encoder output, logits and mean loss, all float32."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4,
        feed_forward_proj='gated-gelu', tie_word_embeddings=False, dropout_rate=0.0, decoder_start_token_id=PAD,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    # Version 5 of transformers ties every T5 that it makes, the untied ones too.
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if 'layer_norm' in name:  # Ones at initialisation, which would hide a norm that is left out.
                weight.copy_(torch.from_numpy(rng.uniform(0.5, 1.5, weight.shape)).float())
            if 'relative_attention_bias' in name:
                weight.copy_(torch.from_numpy(rng.normal(0, 1, weight.shape)).float())
    inputs = rng.integers(2, 96, (3, 24))
    targets = rng.integers(2, 96, (3, 11))
    for row, (input_length, target_length) in enumerate([(24, 11), (17, 5), (1, 2)]):
        inputs[row, input_length:] = PAD
        targets[row, target_length:] = PAD
    labels = torch.from_numpy(np.where(targets == PAD, -100, targets))
    with torch.no_grad():
        out = model(
            input_ids=torch.from_numpy(inputs),
            attention_mask=torch.from_numpy((inputs != PAD).astype(int)),
            labels=labels,
        )
    # The stacks' embed_tokens are the shared embedding once more.
    state = {name: weight for name, weight in model.state_dict().items() if 'embed_tokens' not in name}
    weights = {f'weights/{name}': weight.numpy() for name, weight in state.items()}
    return {
        **weights,
        'inputs': inputs.astype(np.int32),
        'targets': targets.astype(np.int32),
        'encoded': out.encoder_last_hidden_state.numpy(),
        'logits': out.logits.numpy(),
        'loss': out.loss.numpy(),
    }


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('t5_v1_1_tiny.npz')
    np.savez_compressed(path, **make_arrays(seed=0))
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
