"""`remixer-t5x data show NAME`: examples of a task as its data set has them, and as the text that a model sees."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from remixer_t5x.errors import UserError


class Shown(Protocol):
    """raw: the fields of the data set. texts: (inputs, targets) pairs made of them."""

    raw: Mapping[str, Any]
    texts: Sequence[tuple[str, str]]


def run(
    examples: Callable[[str, str | None, int, str | None], tuple[str, Sequence[Shown]]],
    name: str,
    split: str | None = None,
    num_examples: int = 2,
    data_dir: str | None = None,
) -> None:
    """Prints the first examples of a split, in the order of the data; gin binds the arguments in `runs/data_show.gin`.

    Args:
        examples: called with the other arguments, returns the split's name and its examples.
        name: a task.
        split: None takes the first that is here.

    Raises:
        UserError: a number of examples that is none; from `examples`, an unknown name or split, or missing data.
    """
    if not isinstance(num_examples, int) or num_examples < 1:
        raise UserError(f'NUM_EXAMPLES is {num_examples!r}; type a whole number from 1, as in --num_examples=2')
    split, shown = examples(name, split, num_examples, data_dir)
    lines = [f'{name}, split {split}']
    for number, example in enumerate(shown, 1):
        lines += ['', f'example {number}', *_lines(example)]
    sys.stdout.write('\n'.join(lines) + '\n')


def _lines(example: Shown) -> list[str]:
    width = max(len(field) for field in (*example.raw, 'targets'))
    lines = [f'  {field:<{width}}  {json.dumps(value, ensure_ascii=False)}' for field, value in example.raw.items()]
    for inputs, targets in example.texts:
        lines += [f'  {"inputs":<{width}}→ {inputs}', f'  {"targets":<{width}}→ {targets}']
    return lines if example.texts else [*lines, '  the task leaves this example out']
