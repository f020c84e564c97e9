"""Mini COGS: sentences, logical forms, disjoint splits, and generalization types that training lacks."""

import hashlib
import re

import pytest

from remixer_tasks import mini_cogs
from remixer_tasks.mini_cogs import DEEPER, NEW_AGENT, NEW_PASSIVE


@pytest.fixture(scope='module')
def splits():
    return (
        mini_cogs.generate_training_pairs(),
        mini_cogs.generate_held_out_pairs(),
        mini_cogs.generate_generalization_pairs(),
    )


def test_no_sentence_is_in_two_splits(splits):
    training, held_out, generalization = ({pair.sentence for pair in split} for split in splits)
    assert [len(split) for split in splits] == [len(training), len(held_out), len(generalization)] == [20_000, 500, 300]
    assert not training & held_out and not training & generalization and not held_out & generalization
    assert not {pair.form for pair in splits[0]} & {pair.form for pair in splits[1]}


def test_generated_words_are_known_and_fit_the_configured_lengths(splits):
    words = [{word for pair in split for word in f'{pair.sentence} {pair.form}'.split()} for split in splits]
    # Padding, the end token and the unknown word have ids too.
    assert words[1] | words[2] <= words[0] and len(words[0]) + 3 <= 224
    pairs = [pair for split in splits for pair in split]
    assert max(len(pair.sentence.split()) for pair in pairs) < 24 and max(len(pair.form.split()) for pair in pairs) < 28


def roles(form):
    """Returns the (noun, role) pairs in the text of a logical form."""
    return [(name, role) for role, name in re.findall(r'\b(agent|theme|recipient|in|on|beside) (?:\* )?(\w+)', form)]


def depths(form):
    """Returns the maximum nesting of clauses and of prepositional phrases in a logical form."""
    open_brackets, maximum = [], {'clause': 0, 'phrase': 0}
    words = form.split()
    for index, word in enumerate(words):
        if word == '(':
            open_brackets.append('phrase' if words[index + 1] in ('in', 'on', 'beside') else 'clause')
            maximum = {kind: max(depth, open_brackets.count(kind)) for kind, depth in maximum.items()}
        elif word == ')':
            open_brackets.pop()
    return maximum


def test_generalization_types_are_not_in_training(splits):
    training, _, generalization = splits
    seen = {role for pair in training for role in roles(pair.form)}
    counts = dict.fromkeys((NEW_PASSIVE, NEW_AGENT, DEEPER), 0)
    training_depths = [depths(pair.form) for pair in training]
    assert max(depth['clause'] for depth in training_depths) == 2
    assert max(depth['phrase'] for depth in training_depths) == 1
    for pair in generalization:
        counts[pair.kind] += 1
        new_roles, depth = set(roles(pair.form)) - seen, depths(pair.form)
        if pair.kind == NEW_PASSIVE:
            subject = pair.sentence.split()[1]
            assert pair.sentence.split()[2] == 'was' and new_roles == {(subject, 'theme')}
            assert (subject, 'agent') in seen
        elif pair.kind == NEW_AGENT:
            subject = pair.sentence.split()[1]
            assert new_roles == {(subject, 'agent')} and (subject, 'theme') in seen
        else:
            assert not new_roles and (depth['clause'] == 3 or depth['phrase'] == 2)
        assert pair.kind == DEEPER or depth == {'clause': 1, 'phrase': 0}
    assert set(counts.values()) == {100}


def test_pairs_depend_only_on_the_seed(splits):
    """The hash of all sentences and logical forms also detects changes of the grammar."""
    text = '\n'.join(f'{pair.sentence}\t{pair.form}' for split in splits for pair in split)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == 'c951cc1811a8d384'
    assert mini_cogs.generate_training_pairs(1) != splits[0]


def test_tasks_contain_the_pairs(monkeypatch):
    monkeypatch.setattr(mini_cogs, 'TRAINING_PAIRS', 2000)
    held_out, generalization = mini_cogs.evaluation_tasks(mini_cogs.words())
    for task, pairs in (
        (held_out, mini_cogs.generate_held_out_pairs()),
        (generalization, mini_cogs.generate_generalization_pairs()),
    ):
        rows = task.get_dataset({'inputs': 24, 'targets': 28}, split='validation', shuffle=False)
        rows = [*rows.as_numpy_iterator()]
        texts = [(row['inputs_pretokenized'], row['targets_pretokenized']) for row in rows]
        assert texts == [(pair.sentence.encode(), pair.form.encode()) for pair in pairs]
        assert all(row['targets'][-1] == 1 and 2 not in row['targets'] for row in rows)
