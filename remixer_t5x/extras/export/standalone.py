"""Runs an exported model.

`export` copies this file into the model's folder as run.py, so it must not import remixer_t5x.

    python run.py generate < texts.txt        an answer for each line, with escaped line breaks
    python run.py score < pairs.tsv           log p(target | input) for each line INPUT<tab>TARGET
    python run.py encode < texts.txt          one vector for each line, as JSON
    python run.py classify < texts.txt        the most likely label for each line

The script requires jax, numpy and safetensors, and sentencepiece for a model with a SentencePiece vocabulary. Usage in
Python: `Model('folder').generate(['a text'])`.
"""

import collections
import functools
import json
import pathlib
import re
import sys

import numpy as np
from jax import export
from safetensors.numpy import load_file

MAX_BATCH_SIZE = 16
# The outputs of a function that is called with an empty list of texts.
EMPTY_OUTPUTS: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(0, np.float32))


class Model:
    """An exported model, loaded from `folder` (default: the folder of this file)."""

    def __init__(self, folder=pathlib.Path(__file__).parent):
        self.folder = pathlib.Path(folder)
        self.contents = json.loads((self.folder / 'contents.json').read_text())
        self.vocabulary, self.lengths = self.contents['vocabulary'], self.contents['lengths']
        self.weights = load_file(self.folder / 'weights.safetensors')

    def generate(self, texts, seed=0):
        """Returns a list of (answer, score) for each text, best first; only sampling uses `seed`."""
        # Draw a random seed for each row, so that calls with consecutive values of `seed` do not share samples.
        seeds = np.random.default_rng(seed % 2**32).integers(2**31, size=len(texts), dtype=np.int32)
        outputs = self._run_function('generate', self._tokenize(texts, 'inputs'), seeds)
        return [
            [(self.decode(ids), float(score)) for ids, score in zip(tokens, scores, strict=True)]
            for tokens, scores in zip(outputs['tokens'], outputs['scores'], strict=True)
        ]

    def score(self, inputs, targets):
        """Returns log p(target | input) for each pair of texts."""
        tokens = self._tokenize(inputs, 'inputs'), self._tokenize(targets, 'targets')
        return self._run_function('score', *tokens)['scores']

    def encode(self, texts):
        """Returns the vector of each text, [texts, width]: its embedding, or the mean encoder output."""
        return self._run_function('encode', self._tokenize(texts, 'inputs'))['sentence']

    def classify(self, texts):
        """Returns the most likely label of each text, or the predicted number for a regression model."""
        scores = self._run_function('classify', self._tokenize(texts, 'inputs'))['scores']
        labels = self.contents['labels']
        return [labels[int(np.argmax(row))] if labels else float(row[0]) for row in scores]

    def tokenize_text(self, text):
        """Tokenizes a text without adding an end token; <extra_id_N> is parsed as a sentinel."""
        pattern = self.vocabulary['sentinel_pattern']
        if self.vocabulary['kind'] != 'bytes':
            return self._tokenizer.EncodeAsIds(re.sub(pattern, r' <extra_id_\1> ', text) if pattern else text)
        # `re.split` returns captured sentinel numbers at the odd positions.
        first, *parts = re.split(pattern, text) if pattern else [text]
        ids = [byte + 3 for byte in first.encode()]
        for number, part in zip(parts[::2], parts[1::2], strict=True):
            ids += [self.vocabulary['ids'] - 1 - int(number), *(byte + 3 for byte in part.encode())]
        return ids

    def decode(self, ids):
        """Decodes token ids up to the first end token."""
        ids, eos = [int(index) for index in ids], self.vocabulary['eos_id']
        ids = ids[: ids.index(eos) + 1] if eos in ids else ids
        while ids and not ids[-1]:
            ids.pop()
        if self.vocabulary['kind'] == 'bytes':
            return bytes(index - 3 for index in ids if 3 <= index < 259).decode(errors='ignore')
        unknown, count = self._tokenizer.unk_id(), self._tokenizer.GetPieceSize()
        return self._tokenizer.DecodeIds([index if index < count else unknown for index in ids])

    @functools.cached_property
    def _tokenizer(self):
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_file=str(self.folder / 'vocabulary.model'))

    @functools.cache  # noqa: B019 (a model lives as long as the program)
    def _load_function(self, name):
        if name not in self.contents['functions']:
            raise SystemExit(f'the model has no function {name}; it has {", ".join(self.contents["functions"])}')
        return export.deserialize(bytearray((self.folder / f'{name}.stablehlo').read_bytes()))

    def _tokenize(self, texts, side):
        if self.vocabulary['kind'] == 'ids':
            raise SystemExit(
                'the model was exported without a vocabulary; call the functions in *.stablehlo with token ids'
            )
        length, eos = self.lengths[side], self.vocabulary['eos_id']
        ends = eos is not None and (self.vocabulary['ends_inputs'] or side == 'targets')
        rows = np.zeros((len(texts), length), np.int32)
        for row, text in zip(rows, texts, strict=True):
            ids = self.tokenize_text(text)[: length - ends] + [eos] * ends
            row[: len(ids)] = ids
        return rows

    def _run_function(self, name, *inputs):
        """Runs a function in batches padded to power-of-two sizes, because each batch size is compiled separately."""
        call, parts = self._load_function(name).call, []
        for first in range(0, len(inputs[0]), MAX_BATCH_SIZE):
            rows = [array[first : first + MAX_BATCH_SIZE] for array in inputs]
            count = len(rows[0])
            size = min(MAX_BATCH_SIZE, 1 << (count - 1).bit_length())
            filled = [np.concatenate([array, np.repeat(array[-1:], size - count, 0)]) for array in rows]
            parts.append({key: np.asarray(value)[:count] for key, value in call(self.weights, *filled).items()})
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if parts else EMPTY_OUTPUTS


def main():
    name, model = sys.argv[1] if len(sys.argv) == 2 else '', Model()
    if name not in ('generate', 'score', 'encode', 'classify'):
        raise SystemExit(__doc__)
    try:
        # As in `infer`, a line ends with LF or CRLF, and a byte order mark is not part of the first line.
        sys.stdin.reconfigure(encoding='utf-8-sig', newline='\n')  # type: ignore[union-attr]
        lines = [line.rstrip('\r\n') for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise SystemExit(f'the input must be UTF-8, got {error}') from None
    if name == 'score':
        pairs = [line.split('\t', 1) for line in lines]
        if short := [number for number, pair in enumerate(pairs, 1) if len(pair) < 2]:
            raise SystemExit(f'line {short[0]} must be INPUT<tab>TARGET, but it has no tab')
        scores = model.score([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        lines = [f'{score:.6f}' for score in scores]
    elif name == 'generate':
        lines = [answers[0][0].replace('\r', '\\r').replace('\n', '\\n') for answers in model.generate(lines)]
    elif name == 'encode':
        lines = [json.dumps([round(float(x), 6) for x in row]) for row in model.encode(lines)]
    else:
        lines = model.classify(lines)
    for line in lines:
        print(line)


if __name__ == '__main__':
    main()
