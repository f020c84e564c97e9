"""Writes t5gemma_tiny.npz: a tiny random T5Gemma of Hugging Face's transformers, a padded batch, its logits, and what
`generate` makes of it greedily. The configuration is that of `tests/interop/test_t5gemma.py`.

Needs torch and transformers: `python tests/golden/make_t5gemma_tiny.py`.
"""

import pathlib

import numpy as np
import torch
import transformers

PAD, EOS, BOS, LENGTH = 0, 1, 2, 8


def make_arrays(seed: int) -> dict[str, np.ndarray]:
    """Weights under `weights/NAME`, the batch, and logits, all float32; greedy tokens without the start token."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    sizes = {
        'vocab_size': 48, 'hidden_size': 16, 'intermediate_size': 20, 'num_attention_heads': 2, 'head_dim': 16,
        'num_key_value_heads': 1, 'query_pre_attn_scalar': 16, 'sliding_window': 4, 'attn_logit_softcapping': 1.0,
        'final_logit_softcapping': 3.0,
    }  # fmt: skip
    stacks = {'encoder': {**sizes, 'num_hidden_layers': 3}, 'decoder': {**sizes, 'num_hidden_layers': 2}}
    config = transformers.T5GemmaConfig(**stacks, vocab_size=48, attn_implementation='eager')
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    inputs, targets = rng.integers(3, 48, (3, 14)), rng.integers(3, 48, (3, 9))
    for row, (input_length, target_length) in enumerate([(14, 9), (10, 5), (1, 2)]):
        inputs[row, input_length:] = PAD
        targets[row, target_length:] = PAD
    read = {'input_ids': torch.from_numpy(inputs), 'attention_mask': torch.from_numpy((inputs != PAD).astype(int))}
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
    with torch.no_grad():
        logits = model(decoder_input_ids=torch.from_numpy(shifted), **read).logits
        greedy = model.generate(
            **read, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=PAD,
            decoder_start_token_id=BOS,
        )  # fmt: skip
    greedy = greedy[:, 1:].numpy().astype(np.int32)
    is_after_end = np.cumsum(greedy == EOS, axis=-1) - (greedy == EOS) > 0
    weights = {name: weight for name, weight in model.state_dict().items() if 'lm_head' not in name}
    return {
        **{f'weights/{name}': weight.numpy() for name, weight in weights.items()},
        'inputs': inputs.astype(np.int32),
        'targets': targets.astype(np.int32),
        'logits': logits.numpy(),
        'greedy': np.where(is_after_end, PAD, greedy),
    }


if __name__ == '__main__':
    path = pathlib.Path(__file__).with_name('t5gemma_tiny.npz')
    np.savez_compressed(path, **make_arrays(seed=0))
    print(f'wrote {path}, {path.stat().st_size:,} bytes')
