"""seqio postprocess functions, as T5 has them: map texts to the values that metrics compare.

Each is called as f(text, example=..., is_target=...), for the target with is_target=True, and for every prediction.
`example` is the preprocessed example as NumPy values (texts are bytes).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

INVALID = -1
# fmt: off
_DETERMINERS = frozenset([
    'a', 'an', 'few', 'her', 'his', 'each', 'every', 'many', 'much', 'my', 'our', 'some', 'that', 'the', 'their',
    'these', 'this', 'those', 'which', 'whose', 'your',
])
# fmt: on
Example = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ClassId:
    """The index of the text in `labels`, INVALID if `labels` lack it."""

    labels: tuple[str, ...]

    def __call__(self, text: str, **_: Any) -> int:
        """`_`: the example, which has no effect."""
        return self.labels.index(text) if text in self.labels else INVALID


_NUMBER = re.compile(r'\s*[-+]?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\s*')


def number(text: str, default: float = INVALID, **_: Any) -> float:
    """STS-B: the finite number that `text` spells in decimal digits, `default` if none. `_`: the example.

    float() also reads 'nan', 'infinity' and '1_000'.
    """
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else float(default)


class MultiRC:
    """MultiRC: `value`, 0 or 1 or INVALID; targets also have `group`, the number of their question."""

    labels = ('False', 'True')

    def __call__(self, text: str, example: Example | None = None, is_target: bool = False) -> dict[str, Any]:
        answer = {'value': ClassId(self.labels)(text)}
        return {**answer, 'group': int(example['idx/question'])} if is_target and example is not None else answer


def record(text: str, example: Example | None = None, is_target: bool = False) -> dict[str, Any]:
    """`value`: the text, for targets every right answer; targets also have `group`, their passage and query."""
    if not is_target or example is None:
        return {'value': text}
    group = (int(example['idx/passage']), int(example['idx/query']))
    return {'value': _texts(example['answers']), 'group': group}


def any_answer(text: str, example: Example | None = None, is_target: bool = False) -> str | list[str]:
    """SQuAD: the text, for targets every right answer."""
    return _texts(example['answers']) if is_target and example is not None else text


def refers(text: str, example: Example | None = None, is_target: bool = False) -> int:
    """WSC: 1 if the prediction names the candidate of the example, 0 if another, INVALID if empty; for targets the
    label.

    Case and determiners do not count, and either may have more words than the other: 'bunny' is 'the fuzzy bunny'.
    A possessive on one side only does not match.
    """
    if example is None:
        raise ValueError('WSC predictions are judged by their example')
    if is_target:
        return int(example['label'])
    predicted, candidate = _bare(text), _bare(_text(example['targets_pretokenized']))
    if not predicted:
        return INVALID
    if ("'" in predicted) != ("'" in candidate):
        return 0
    words, candidate_words = set(predicted.split(' ')), set(candidate.split(' '))
    return int(words <= candidate_words or candidate_words <= words)


def _bare(text: str) -> str:
    words = text.strip().lower().split(' ')
    return ' '.join(word for word in words if word not in _DETERMINERS)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _texts(values: Any) -> list[str]:
    return [_text(value) for value in values]
