"""Writes bert_tiny.npz and gpt2_tiny.npz: a tiny random BertForMaskedLM and GPT2LMHeadModel of Hugging Face's
transformers, a batch of each, their outputs, and GPT-2's greedy continuations.

Needs torch and transformers: `python -m tests.golden.make_bert_gpt2_tiny NAME`, such as bert_tiny.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

from tests.support.hf_folders import BERT, GPT2

PAD, END = 0, GPT2['eos_token_id']


@torch.no_grad()
def randomize(model, rng):
    """Changes biases and norms, so that the parity tests detect a missing one, and returns the weights."""
    for name, weight in model.named_parameters():
        if name.endswith('bias'):
            weight.copy_(torch.from_numpy(rng.normal(0, 0.5, weight.shape)).float())
        else:
            weight.copy_(weight * 4 + torch.from_numpy(rng.normal(0, 0.1, weight.shape)).float())
    # The state dict contains BERT's output matrix and bias twice.
    return {f'weights/{name}': weight.numpy() for name, weight in model.named_parameters()}


@torch.no_grad()
def make_bert(seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).eval()
    weights = randomize(model, rng)
    inputs = rng.integers(3, BERT['vocab_size'], (3, 14))
    types = np.zeros_like(inputs)
    for row, (length, first) in enumerate([(14, 5), (9, 9), (1, 1)]):
        inputs[row, length:] = PAD
        types[row, first:length] = 1
    ids, mask = torch.from_numpy(inputs), torch.from_numpy((inputs != PAD).astype(int))
    out = model(ids, attention_mask=mask, token_type_ids=torch.from_numpy(types), output_hidden_states=True)
    return {
        **weights,
        'inputs': inputs.astype(np.int32),
        'token_types': types.astype(np.int32),
        'hidden': out.hidden_states[-1].numpy(),
        'logits': out.logits.numpy(),
    }


@torch.no_grad()
def make_gpt2(seed):
    """Returns weights, `tokens` [rows, length], `logits` and `continued` [rows, 4], with the ids of transformers."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, bos_token_id=END)).eval()
    weights = randomize(model, rng)
    tokens = rng.integers(0, END, (3, 12))
    prompts = torch.from_numpy(np.pad(tokens, ((0, 0), (1, 0)), constant_values=END))
    logits = model(input_ids=prompts).logits
    continued = logits[:, -1:].argmax(-1)
    for _ in range(3):
        next_tokens = model(input_ids=torch.cat([prompts, continued], dim=1)).logits[:, -1:].argmax(-1)
        continued = torch.cat([continued, next_tokens], dim=1)
    return {
        **weights,
        'tokens': tokens.astype(np.int32),
        'logits': logits.numpy(),
        'continued': continued.numpy().astype(np.int32),
    }


FILES = {'bert_tiny': make_bert, 'gpt2_tiny': make_gpt2}

if __name__ == '__main__':
    name = sys.argv[1]
    np.savez_compressed(pathlib.Path(__file__).with_name(f'{name}.npz'), **FILES[name](seed=0))
