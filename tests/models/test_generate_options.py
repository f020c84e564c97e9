"""Generation options against those of transformers' `generate`: a random T5 and GPT-2, greedy and beam search."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.data import task_vocabulary
from remixer_t5x.models import beam_search
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.decoding import Greedy, StopStrings
from remixer_t5x.models.sampling import Sampling
from remixer_tasks import vocabularies
from tests.models.tiny_models import make_t5, t5_params
from tests.support import hf_folders, references

ROWS, LENGTH, BEAMS = 64, 10, 3
ALPHA = 0.6
# GPT-2's tokenizer, as in tests/interop/test_gpt2.py.
PIECES = [*'!abcdefghijklmnopqrstuvwxyz', 'Ġ', 'th', 'the', 'Ġthe', 'Ã', '¤']
MERGES = ['t h', 'th e', 'Ġ the']
GPT2_END = 59


@dataclasses.dataclass(frozen=True, eq=False)
class ModelPair:
    """A model of ours and of transformers. Our token ids are those of transformers plus `shift`."""

    model: object
    params: object
    batch: dict
    eos_id: int
    shift: int
    token_texts: list
    hf_model: object
    hf_inputs: dict
    tokenizer: object

    def expected(self, **options):
        """Returns the tokens of transformers [rows, n, LENGTH] as our ids, with 0 after the end token."""
        import torch

        with torch.no_grad():
            sequences = self.hf_model.generate(
                **self.hf_inputs, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0 if self.shift == 0 else 59,
                tokenizer=self.tokenizer if 'stop_strings' in options else None, **options,
            )  # fmt: skip
        start = 1 if self.shift == 0 else self.hf_inputs['input_ids'].shape[1]
        tokens = sequences[:, start:].numpy() + self.shift
        return self.truncate(np.pad(tokens, ((0, 0), (0, LENGTH - tokens.shape[1]))), options.get('stop_strings', ()))

    def truncate(self, tokens, stop_strings):
        """Replaces tokens after the first end token or stop string by 0; transformers uses end tokens there."""
        tokens = np.array(tokens)
        for row in tokens:
            text = b''
            for position, token in enumerate(row):
                text += self.token_texts[token]
                if token == self.eos_id or any(stop.encode() in text for stop in stop_strings):
                    row[position + 1 :] = 0
                    break
        return tokens.reshape(ROWS, -1, LENGTH)

    def actual(self, decoder, stop_strings=()):
        automaton = StopStrings.compile_automaton(stop_strings, self.token_texts) if stop_strings else None
        generate = jax.jit(
            lambda params, batch: self.model.generate(
                params, batch, LENGTH, self.eos_id, decoder, jax.random.key(0), automaton
            )
        )
        return np.asarray(generate(self.params, self.batch).tokens)


@pytest.fixture(scope='module')
def t5():
    references.require('torch', 'transformers')
    import torch
    import transformers

    from tests.golden import make_t5_tiny

    theirs = make_t5_tiny.generating_model(3)
    weights = {name: weight.numpy() for name, weight in theirs.state_dict().items() if 'embed_tokens' not in name}
    inputs = np.random.default_rng(0).integers(2, 96, (ROWS, 9))
    inputs[::3, 5:] = 0
    ids = {'input_ids': torch.from_numpy(inputs), 'attention_mask': torch.from_numpy((inputs > 0).astype(int))}
    texts = task_vocabulary.get_token_texts(vocabularies.byte(0))
    batch = {'encoder_input_tokens': jnp.asarray(inputs, jnp.int32)}
    tokenizer = transformers.ByT5Tokenizer()
    return ModelPair(make_t5(2), t5_params(weights, 2), batch, 1, 0, texts, theirs, ids, tokenizer)


@pytest.fixture(scope='module')
def gpt2(tmp_path_factory):
    references.require('torch', 'transformers')
    import torch
    import transformers

    folder = hf_folders.write_tiny(tmp_path_factory.mktemp('gpt2') / 'theirs', 'gpt2_tiny')
    names = [*PIECES, *(f'<{index}>' for index in range(len(PIECES), GPT2_END)), '<|endoftext|>']
    hf_folders.write_byte_pairs(folder, names, MERGES, '<|endoftext|>')
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = np.random.default_rng(0).integers(0, GPT2_END, (ROWS, 7))
    ids = torch.from_numpy(np.pad(prompts, ((0, 0), (1, 0)), constant_values=GPT2_END))
    loaded = remixer_t5x.load(str(folder))
    texts = loaded.vocabulary.token_texts
    batch = {'prompt_tokens': jnp.asarray(prompts + 1, jnp.int32)}
    inputs = {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}
    return ModelPair(loaded.model, loaded.params, batch, GPT2_END + 1, 1, texts, theirs, inputs, tokenizer)


@pytest.fixture(params=['t5', 'gpt2'])
def pair(request):
    return request.getfixturevalue(request.param)


def make_beam_search(**options):
    return BeamSearch(BEAMS, PowerPenalty(ALPHA), beam_search.continue_until_unlikely, **options)


BEAM_OPTIONS = {'num_beams': BEAMS, 'num_return_sequences': BEAMS, 'length_penalty': ALPHA}
OPTIONS = {
    'no_repeat_ngram_size': {'no_repeat_ngram_size': 2},
    'repetition_penalty': {'repetition_penalty': 1.7},
    'min_new_tokens': {'min_new_tokens': 8},
    'all': {'no_repeat_ngram_size': 3, 'repetition_penalty': 1.2, 'min_new_tokens': 4},
}


@pytest.mark.parametrize('use_beams', [False, True], ids=['greedy', 'beams'])
@pytest.mark.parametrize('name', [*OPTIONS, 'bad_words_ids'])
def test_tokens_equal_transformers(pair, name, use_beams):
    unconstrained, make_decoder = unconstrained_tokens(pair, use_beams), make_beam_search if use_beams else Greedy
    if name == 'bad_words_ids':
        # Forbids tokens and pairs of tokens that the model generates without the option.
        rows = [row for row in unconstrained[:, 0].tolist() if 0 not in row[:4] and pair.eos_id not in row[:4]]
        theirs = {
            name: [[int(token) - pair.shift for token in row[1 : 2 + index % 2]] for index, row in enumerate(rows[:8])]
        }
        ours = {name: [[token + pair.shift for token in word] for word in theirs[name]]}
    else:
        ours = theirs = OPTIONS[name]
    expected = pair.expected(**theirs, **(BEAM_OPTIONS if use_beams else {}))
    np.testing.assert_array_equal(pair.actual(make_decoder(**ours)), expected)
    # This GPT-2 rarely generates its end token.
    if pair.shift == 0 or name != 'min_new_tokens':
        assert np.mean(np.any(expected != unconstrained, axis=(1, 2))) > 0.2, 'the option changes too few outputs'


@functools.cache
def unconstrained_tokens(pair, use_beams):
    return pair.expected(**(BEAM_OPTIONS if use_beams else {}))


@pytest.mark.parametrize('use_beams', [False, True], ids=['greedy', 'beams'])
def test_stop_strings_equal_transformers(pair, use_beams):
    # Each stop string is two generated characters, of one token or of two.
    texts = [
        b''.join(pair.token_texts[token] for token in row).decode(errors='ignore')
        for row in unconstrained_tokens(pair, False)[:, 0]
    ]
    stop_strings = sorted({text[2:4] for text in texts[:12] if len(text) > 4 and text[2:4].isascii()})
    expected = pair.expected(stop_strings=stop_strings, **(BEAM_OPTIONS if use_beams else {}))
    np.testing.assert_array_equal(pair.actual(make_beam_search() if use_beams else Greedy(), stop_strings), expected)
    assert np.mean(np.any(expected != unconstrained_tokens(pair, use_beams), axis=(1, 2))) > 0.2


@pytest.mark.parametrize('use_beams', [False, True], ids=['greedy', 'beams'])
@pytest.mark.parametrize('kind', ['forced_prefix', 'logits_processor'])
def test_constrained_tokens_equal_transformers(pair, kind, use_beams):
    """Compares with `prefix_allowed_tokens_fn`, which implements both constraints in transformers."""
    vocab, start = 96 if pair.shift == 0 else 60, 1 if pair.shift == 0 else 8
    prefix = (40, 7, 23)

    def allowed(row, ids):
        if kind == 'forced_prefix':
            step = len(ids) - start
            return [prefix[step]] if step < len(prefix) else list(range(vocab))
        return [token for token in range(vocab) if (token + int(ids[-1])) % 3]

    def processor(logits, tokens, step):
        is_forbidden = (jnp.arange(logits.shape[-1]) - pair.shift + tokens[:, -1:] - pair.shift) % 3 == 0
        return jnp.where(is_forbidden, -jnp.inf, logits)

    options = {
        'forced_prefix': {'forced_prefix': [token + pair.shift for token in prefix]},
        'logits_processor': {'logits_processor': (processor,)},
    }[kind]
    expected = pair.expected(prefix_allowed_tokens_fn=allowed, **(BEAM_OPTIONS if use_beams else {}))
    np.testing.assert_array_equal(pair.actual((make_beam_search if use_beams else Greedy)(**options)), expected)


@pytest.mark.parametrize(
    'options',
    [
        {'min_p': 0.2},
        {'temperature': 0.7, 'min_p': 0.1},
        {'temperature': 1.5, 'top_k': 20, 'top_p': 0.8, 'min_p': 0.05},
    ],
)
def test_sampling_distribution_equals_transformers(options):
    references.require('torch', 'transformers')
    import torch
    from transformers.generation import logits_process

    logits = np.random.default_rng(0).normal(0, 2, (128, 50)).astype(np.float32)
    warpers = [
        logits_process.TemperatureLogitsWarper(options.get('temperature', 1.0)),
        logits_process.TopKLogitsWarper(options.get('top_k', 50)),
        logits_process.TopPLogitsWarper(options.get('top_p', 1.0)),
        logits_process.MinPLogitsWarper(options['min_p']),
    ]
    expected = torch.from_numpy(logits)
    for warper in warpers:
        expected = warper(None, expected)
    sampling = Sampling(**options)
    largest, tokens = jax.lax.top_k(logits / sampling.temperature, sampling.top_k or 50)
    actual = np.full(logits.shape, -np.inf, np.float32)
    np.put_along_axis(actual, np.asarray(tokens), np.asarray(sampling.exclude_unlikely_tokens(largest)), axis=1)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-6)
    assert np.any(np.isneginf(actual))
