"""Generates Mini COGS: English sentences and their logical forms, in the style of COGS (Kim and Linzen 2020).

The sentence 'Emma said that the cake was eaten by a fox .' has the logical form `say ( agent Emma , ccomp eat ( agent
fox , theme * cake ) )`; `*` marks a definite noun. The task `mini_cogs_generalization` evaluates sentences of three
types that do not occur in training:

- `new passive`: the subject of a passive is a noun that occurs in training only as the subject of active verbs;
- `new agent`: the agent is a noun that occurs in training only as a direct object;
- `deeper`: two nested clauses or two nested prepositional phrases; training sentences have at most one of each.
"""

# ruff: noqa: SIM905 (strings of words are easier to read than lists)
from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from remixer_tasks import text_pairs, vocabularies
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from remixer_tasks.files import cache

if TYPE_CHECKING:
    from remixer_t5x.lazy_imports import seqio

TRAINING_PAIRS, HELD_OUT_PAIRS, PAIRS_PER_TYPE = 20_000, 500, 100
NEW_PASSIVE, NEW_AGENT, DEEPER = 'new passive', 'new agent', 'deeper'
NAMES = 'Emma Liam Olivia Noah Ava Lucas Mia Leo Zoe Max Ella Sam Ruth Tom Nora Paul Alice Oscar Grace Hugo'.split()
ANIMATE = (
    'girl boy child teacher doctor baker queen king sailor poet farmer painter judge nurse singer tailor '
    'fox dog cat bear horse duck mouse goat'
).split()
THINGS = (
    'cake vase book lamp ball box cup drum coin rose letter ring kite hat key clock pen mirror flute basket'.split()
)
PLACES = {
    'in': 'house garden room boat car tent'.split(),
    'on': 'table bed stage chair boat bench'.split(),
    'beside': 'house tree table lake bed fence'.split(),
}
# Nouns that occur in training in only one role.
ONLY_AGENTS = 'hedgehog pilot dancer lawyer'.split()
ONLY_OBJECTS = 'guest penguin wizard tiger'.split()


def _parse_verbs(text: str) -> dict[str, list[str]]:
    """Maps each verb to its past tense and, for transitive verbs, its participle."""
    return {verb.split()[0]: verb.split()[1:] for verb in text.split(',')}


TRANSITIVE = _parse_verbs(
    'see saw seen, find found found, draw drew drawn, hold held held, help helped helped, '
    'touch touched touched, clean cleaned cleaned, like liked liked, hide hid hidden, lift lifted lifted, '
    'watch watched watched, carry carried carried, paint painted painted, forget forgot forgotten, '
    'choose chose chosen'
)
DATIVE = _parse_verbs(
    'give gave given, send sent sent, show showed shown, sell sold sold, lend lent lent, '
    'bring brought brought, throw threw thrown'
)
# The subject of an unergative verb (`sleep`) acts; the subject of an unaccusative verb (`break`) undergoes a change.
UNERGATIVE = _parse_verbs('sleep slept, laugh laughed, run ran, dance danced, sing sang, wait waited, cry cried')
UNACCUSATIVE = _parse_verbs('break broke, fall fell, burn burned, float floated, vanish vanished')
CLAUSAL = _parse_verbs('say said, think thought, know knew, hope hoped, believe believed, dream dreamed')
VERBS = {**TRANSITIVE, **DATIVE, **UNERGATIVE, **UNACCUSATIVE, **CLAUSAL}
ROLES = ('agent', 'theme', 'recipient', 'ccomp')
ACTIVE, INTRANSITIVE, UNACCUSATIVE_CLAUSE = '{agent} {past} {theme}', '{agent} {past}', '{theme} {past}'
PASSIVE, PASSIVE_WITH_AGENT = '{theme} was {participle}', '{theme} was {participle} by {agent}'
DOUBLE_OBJECT, TO_DATIVE = '{agent} {past} {recipient} {theme}', '{agent} {past} {theme} to {recipient}'
PASSIVE_DATIVE, EMBEDDED = '{theme} was {participle} to {recipient}', '{agent} {past} that {ccomp}'


class SentenceFormPair(NamedTuple):
    """A sentence and its logical form, both with spaces between words; `kind` is a generalization type or ''."""

    sentence: str
    form: str
    kind: str = ''


class Phrase(NamedTuple):
    """The words and the logical form of a noun phrase or clause."""

    words: str
    form: str


def make_clause(template: str, verb: str, **roles: Phrase) -> Phrase:
    """Builds a clause such as 'Emma gave the boy a cake'. The logical form lists the roles in the order of ROLES."""
    past, participle = (*VERBS[verb], '')[:2]
    words = template.format(past=past, participle=participle, **{role: phrase.words for role, phrase in roles.items()})
    arguments = ' , '.join(f'{role} {roles[role].form}' for role in ROLES if role in roles)
    return Phrase(words, f'{verb} ( {arguments} )')


def make_pair(clause: Phrase, kind: str = '') -> SentenceFormPair:
    """Converts a clause to a sentence and its logical form."""
    return SentenceFormPair(f'{clause.words[0].upper()}{clause.words[1:]} .', clause.form, kind)


class _Sampler:
    """Samples phrases and sentences with a seeded random generator."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def choose_word(self, options: Iterable[str]) -> str:
        return self._random.choice(tuple(options))

    def sample_noun(self, *options: str) -> Phrase:
        """Samples a noun with an article, or a proper name such as 'Emma'."""
        name, is_definite = self.choose_word(options), self._random.random() < 0.5
        if name[0].isupper():
            return Phrase(name, name)
        return Phrase(f'the {name}', f'* {name}') if is_definite else Phrase(f'a {name}', name)

    def sample_agent(self) -> Phrase:
        return self.sample_noun(*NAMES, *ANIMATE, *ONLY_AGENTS)

    def sample_theme(self) -> Phrase:
        return self.sample_noun(*NAMES, *ANIMATE, *THINGS)

    def sample_person(self) -> Phrase:
        return self.sample_noun(*NAMES, *ANIMATE)

    def sample_object(self) -> Phrase:
        """Samples a direct object; unless it is a name, adds a prepositional phrase with probability 1/3."""
        head = self.sample_noun(*NAMES, *ANIMATE, *THINGS, *ONLY_OBJECTS * 4)
        return self.add_location(head) if head.form not in NAMES and self._random.random() < 1 / 3 else head

    def add_location(self, head: Phrase, depth: int = 1) -> Phrase:
        """Adds `depth` nested prepositional phrases to a noun."""
        if depth == 0:
            return head
        preposition = self.choose_word(PLACES)
        place = self.add_location(self.sample_noun(*PLACES[preposition]), depth - 1)
        return Phrase(f'{head.words} {preposition} {place.words}', f'{head.form} ( {preposition} {place.form} )')

    def sample_clause(self) -> Phrase:
        """Samples a clause that contains no other clause."""
        verb, dative_verb = self.choose_word(TRANSITIVE), self.choose_word(DATIVE)
        return self._random.choice(
            [
                lambda: make_clause(ACTIVE, verb, agent=self.sample_agent(), theme=self.sample_object()),
                lambda: make_clause(ACTIVE, verb, agent=self.sample_agent(), theme=self.sample_object()),
                lambda: make_clause(PASSIVE_WITH_AGENT, verb, theme=self.sample_theme(), agent=self.sample_person()),
                lambda: make_clause(PASSIVE, verb, theme=self.sample_theme()),
                lambda: make_clause(
                    DOUBLE_OBJECT,
                    dative_verb,
                    agent=self.sample_agent(),
                    recipient=self.sample_person(),
                    theme=self.sample_noun(*THINGS),
                ),
                lambda: make_clause(
                    TO_DATIVE,
                    dative_verb,
                    agent=self.sample_agent(),
                    theme=self.sample_noun(*THINGS),
                    recipient=self.sample_person(),
                ),
                lambda: make_clause(
                    PASSIVE_DATIVE, dative_verb, theme=self.sample_noun(*THINGS), recipient=self.sample_person()
                ),
                lambda: make_clause(INTRANSITIVE, self.choose_word(UNERGATIVE), agent=self.sample_agent()),
                lambda: make_clause(UNACCUSATIVE_CLAUSE, self.choose_word(UNACCUSATIVE), theme=self.sample_theme()),
            ]
        )()

    def sample_sentence(self) -> SentenceFormPair:
        """Samples a training sentence, which has a nested clause with probability 1/3."""
        clause = self.sample_clause()
        if self._random.random() < 1 / 3:
            clause = make_clause(EMBEDDED, self.choose_word(CLAUSAL), agent=self.sample_agent(), ccomp=clause)
        return make_pair(clause)

    def sample_new_passive(self) -> SentenceFormPair:
        verb, theme = self.choose_word(TRANSITIVE), self.sample_noun(*ONLY_AGENTS)
        if self._random.random() < 0.5:
            return make_pair(
                make_clause(PASSIVE_WITH_AGENT, verb, theme=theme, agent=self.sample_person()), NEW_PASSIVE
            )
        return make_pair(make_clause(PASSIVE, verb, theme=theme), NEW_PASSIVE)

    def sample_new_agent(self) -> SentenceFormPair:
        verb = self.choose_word(TRANSITIVE)
        return make_pair(
            make_clause(ACTIVE, verb, agent=self.sample_noun(*ONLY_OBJECTS), theme=self.sample_theme()), NEW_AGENT
        )

    def sample_deeper_nesting(self) -> SentenceFormPair:
        verb = self.choose_word(TRANSITIVE)
        if self._random.random() < 0.5:
            agent, theme = self.sample_agent(), self.add_location(self.sample_noun(*THINGS), depth=2)
            return make_pair(make_clause(ACTIVE, verb, agent=agent, theme=theme), DEEPER)
        clause = make_clause(ACTIVE, verb, agent=self.sample_agent(), theme=self.sample_theme())
        for _ in range(2):
            clause = make_clause(EMBEDDED, self.choose_word(CLAUSAL), agent=self.sample_agent(), ccomp=clause)
        return make_pair(clause, DEEPER)


def generate_training_pairs(seed: int = 0) -> list[SentenceFormPair]:
    return _draw_distinct_pairs(_Sampler(seed).sample_sentence, TRAINING_PAIRS, frozenset())


def generate_held_out_pairs(seed: int = 0) -> list[SentenceFormPair]:
    """Samples pairs from the training distribution, excluding sentences and logical forms that occur in training."""
    known = frozenset(text for pair in generate_training_pairs(seed) for text in (pair.sentence, pair.form))
    return _draw_distinct_pairs(_Sampler(seed + 1).sample_sentence, HELD_OUT_PAIRS, known)


def generate_generalization_pairs(seed: int = 0) -> list[SentenceFormPair]:
    """Samples pairs that alternate between the three generalization types."""
    sampler = _Sampler(seed + 2)
    draws = (sampler.sample_new_passive, sampler.sample_new_agent, sampler.sample_deeper_nesting)
    types = [_draw_distinct_pairs(draw, PAIRS_PER_TYPE, frozenset()) for draw in draws]
    return [pair for group in zip(*types, strict=True) for pair in group]


def _draw_distinct_pairs(
    draw: Callable[[], SentenceFormPair], count: int, excluded: frozenset[str]
) -> list[SentenceFormPair]:
    pairs: dict[str, SentenceFormPair] = {}
    while len(pairs) < count:
        drawn = draw()
        if drawn.sentence not in excluded and drawn.form not in excluded:
            pairs[drawn.sentence] = drawn
    return list(pairs.values())


def corpus(generalization: bool = False, seed: int = 0) -> ParsedCorpus:
    """Returns a corpus of the training pairs; its split `validation` contains the held-out or generalization pairs."""
    held_out = generate_generalization_pairs if generalization else generate_held_out_pairs
    return ParsedCorpus(
        name='mini COGS' + (' (generalization)' if generalization else ''),
        identity=cache.hash_cache_key('mini cogs 1', generalization, seed),
        read=lambda malformed: _encode_pairs(generate_training_pairs(seed)),
        read_validation=lambda malformed: _encode_pairs(held_out(seed)),
    )


def _encode_pairs(pairs: list[SentenceFormPair]) -> Iterator[str]:
    return (text_pairs.encode_pair(pair.sentence, pair.form, columns=(pair.kind,)) for pair in pairs)


def words(seed: int = 0) -> seqio.Vocabulary:
    """Returns a vocabulary of the words in the training pairs."""
    return vocabularies.words(text_pairs.PairTexts(corpus(seed=seed)))


def task(vocabulary: seqio.Vocabulary, seed: int = 0) -> seqio.Task:
    return text_pairs.task(corpus(seed=seed), vocabulary, 'mini_cogs', ('exact_match', 'best_constant_prediction'))


def evaluation_tasks(vocabulary: seqio.Vocabulary, seed: int = 0) -> list[seqio.Task]:
    """Returns the tasks `mini_cogs` and `mini_cogs_generalization` (with metrics for each generalization type)."""
    generalization = text_pairs.task(
        corpus(generalization=True, seed=seed),
        vocabulary,
        'mini_cogs_generalization',
        ('exact_match', 'best_constant_prediction'),
        metrics_by='type',
    )
    return [task(vocabulary, seed), generalization]
