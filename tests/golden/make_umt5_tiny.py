"""Writes umt5_tiny.npz: a tiny random umT5 of Hugging Face's transformers, a padded batch, its logits, and what
`generate` makes of it greedily.

Needs torch and transformers: `python tests/golden/make_umt5_tiny.py`.
"""

import pathlib

import numpy as np
import torch
import transformers

PAD, EOS, LENGTH = 0, 1, 8


def make_arrays(seed: int) -> dict[str, np.ndarray]:
    """Weights under `weights/NAME`, the batch, and logits, all float32; greedy tokens without the start token."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = transformers.UMT5Config(
        vocab_size=80, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_decoder_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=PAD,
    )  # fmt: skip
    model = transformers.UMT5ForConditionalGeneration(config).eval()
    # Version 5 of transformers ties and scales every umT5, also those whose config.json says otherwise.
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if 'layer_norm' in name:
                weight.uniform_(0.5, 1.5)
            if 'relative_attention_bias' in name:
                weight.normal_()
            if name.endswith('.wo.weight') or name.endswith('.o.weight'):
                weight.mul_(8.0)  # Else the last token alone would settle the next one.
    inputs, targets = rng.integers(2, 80, (3, 24)), rng.integers(2, 80, (3, 11))
    for row, (input_length, target_length) in enumerate([(24, 11), (17, 5), (1, 2)]):
        inputs[row, input_length:] = PAD
        targets[row, target_length:] = PAD
    read = {'input_ids': torch.from_numpy(inputs), 'attention_mask': torch.from_numpy((inputs != PAD).astype(int))}
    with torch.no_grad():
        logits = model(labels=torch.from_numpy(np.where(targets == PAD, -100, targets)), **read).logits
        greedy = model.generate(**read, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    greedy = greedy[:, 1:].numpy().astype(np.int32)
    is_after_end = np.cumsum(greedy == EOS, axis=-1) - (greedy == EOS) > 0
    weights = {name: weight for name, weight in model.state_dict().items() if 'embed_tokens' not in name}
    return {
        **{f'weights/{name}': weight.numpy() for name, weight in weights.items()},
        'inputs': inputs.astype(np.int32),
        'targets': targets.astype(np.int32),
        'logits': logits.numpy(),
        'greedy': np.where(is_after_end, PAD, greedy),
    }


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('umt5_tiny.npz')
    np.savez_compressed(path, **make_arrays(seed=0))
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
