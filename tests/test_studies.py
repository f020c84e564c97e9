"""Studies: the toy task against its description, results that outlive a kill, and the formulas of figure 2."""

import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.models import interface

SCRIPTS = pathlib.Path(__file__).parents[1] / 'scripts'
TINY = types.MappingProxyType({'length': 50, 'width': 4, 'hidden': 4, 'steps': 3, 'batch': 2, 'test_examples': 5})


@pytest.fixture(scope='module')
def studies():
    """The scripts' modules, imported as Python does when one is run."""
    before = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(SCRIPTS / 'studies')]
    import ablations
    import encoders
    import length
    import low_resource
    import objectives
    import optimizers
    import recipes
    import scaling
    import spatial_weights
    import table_1
    import toy_task
    import transfer
    import tuning
    import whole_models
    from library import comparison, damaged_text, label_answers, records, rows, scaling_fit, shapes, small_task

    yield types.SimpleNamespace(
        ablations=ablations, comparison=comparison, damaged_text=damaged_text,
        encoders=encoders, label_answers=label_answers, length=length, low_resource=low_resource,
        objectives=objectives, optimizers=optimizers, recipes=recipes, records=records, rows=rows,
        scaling=scaling,
        scaling_fit=scaling_fit, shapes=shapes, small_task=small_task, spatial_weights=spatial_weights,
        table_1=table_1, toy_task=toy_task,
        transfer=transfer, tuning=tuning, whole_models=whole_models,
    )  # fmt: skip
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if str(SCRIPTS) in str(getattr(sys.modules[name], '__file__', None)):
            sys.modules.pop(name, None)


def described(row):
    """Appendix B.4 read off an input row: its shapes, and the row with the mean height of each kind."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row != 0, [0]])))
    shapes = [(start, row[start:end]) for start, end in edges.reshape(-1, 2)]
    kinds = [bool(np.ptp(shape) > 0) for _, shape in shapes]
    expected = np.zeros_like(row)
    for (start, shape), kind in zip(shapes, kinds, strict=True):
        mean = np.mean([other.max() for (_, other), its in zip(shapes, kinds, strict=True) if its == kind])
        expected[start : start + len(shape)] = shape / shape.max() * mean
    return shapes, kinds, expected


@pytest.mark.parametrize('length', [47, 100])
def test_toy_task_is_the_one_described(studies, length):
    inputs, targets, local = studies.shapes.make_rows(np.random.default_rng(0), 200, length)
    starts, first_kinds = [], []
    for row, target, guess in zip(inputs, targets, local, strict=True):
        shapes, kinds, expected = described(row)
        assert len(shapes) == 4 and sum(kinds) == 2
        np.testing.assert_allclose(target, expected, rtol=1e-5)
        assert {len(shape) for _, shape in shapes} <= {5, 7, 9, 11}
        for start, shape in shapes:
            own = shape / shape.max() * (shape.max() + 13) / 2  # heights are from 1 to 25
            np.testing.assert_allclose(guess[start : start + len(shape)], own, rtol=1e-5)
        assert np.all(guess[row == 0] == 0)
        starts.append([start for start, _ in shapes])
        first_kinds.append(kinds[0])
    heights = np.concatenate([[shape.max() for _, shape in described(row)[0]] for row in inputs])
    assert 1 <= heights.min() < 2 and 24 < heights.max() <= 25
    assert 0.35 < np.mean(first_kinds) < 0.65
    if length == 100:  # room to move: the first shape may start at once, the last one may end the row
        assert min(start[0] for start in starts) == 0 and np.any(inputs[:, -1])


def test_too_short_rows_are_refused(studies):
    with pytest.raises(ValueError, match='needs 47 tokens'):
        studies.shapes.make_rows(np.random.default_rng(0), 1, 46)


def test_batches_go_through_all_examples(studies):
    order = studies.toy_task.batches(np.random.default_rng(0), examples=5, batch=2)
    drawn = np.concatenate([next(order) for _ in range(10)])
    for epoch in drawn.reshape(4, 5):
        assert sorted(epoch) == [0, 1, 2, 3, 4]
    few = studies.toy_task.batches(np.random.default_rng(0), examples=2, batch=5)
    assert sorted(np.concatenate([next(few), next(few)])) == [0] * 5 + [1] * 5


def test_records_survive_a_cut_off_line(studies, tmp_path):
    file = tmp_path / 'deeper' / 'results.jsonl'
    records = studies.records.Records(file)
    records.add({'a': 1, 'b': 2}, {'x': 0.5})
    whole = file.read_text()
    for cut in range(1, len(whole)):
        file.write_text(whole + whole[:cut].replace('0.5', '0.7'))
        again = studies.records.Records(file)
        assert again.get({'b': 2, 'a': 1})['x'] in (0.5, 0.7)
        again.add({'a': 2, 'b': 2}, {'x': 1.5})
        last = studies.records.Records(file)
        assert last.get({'a': 2, 'b': 2}) == {'x': 1.5} and last.get({'a': 1, 'b': 2})
        assert last.ignored == (cut < len(whole) - 1)


def run_toy(studies, monkeypatch, out, *more):
    words = [f'--{name}={value}' for name, value in TINY.items()]
    command = ['toy_task.py', *words, f'--out={out}', '--mixers=none,hyper_mixer', '--examples=3,7', *more]
    monkeypatch.setattr(sys, 'argv', command)
    studies.toy_task.main()


def test_toy_study_goes_on_where_it_was_interrupted(studies, tmp_path, monkeypatch, capsys):
    out, figure = tmp_path / 'toy.jsonl', tmp_path / 'toy.png'
    run_toy(studies, monkeypatch, out, '--seeds=2', f'--figure={figure}')
    first = out.read_text().splitlines()
    assert len(first) == 8 and figure.stat().st_size > 0
    table = capsys.readouterr().out
    assert 'not yet run' not in table and table.count('[2]') == 4

    # Three cells and part of a fourth were written when it was killed.
    out.write_text('\n'.join(first[:3]) + '\n' + first[3][:20])
    run_toy(studies, monkeypatch, out, '--seeds=2', '--show')
    assert 'not yet run' in capsys.readouterr().out
    run_toy(studies, monkeypatch, out, '--seeds=2')
    assert '8 cells, 3 done before' in capsys.readouterr().out
    second = out.read_text().splitlines()
    assert second[:3] == first[:3]
    numbers = [json.loads(line)['result']['test_mse'] for line in first[3:]]
    # A cell does not depend on those before it.
    np.testing.assert_allclose([json.loads(line)['result']['test_mse'] for line in second[4:]], numbers, rtol=1e-4)

    run_toy(studies, monkeypatch, out, '--seeds=2', '--learning_rate=0.1', '--show')
    assert 'not yet run' in capsys.readouterr().out.partition('[seeds]')[2]  # other settings are other cells


@pytest.mark.parametrize('words', [['--mixers=fnet'], ['--examples=many'], ['--length=46'], ['--steps=0']])
def test_toy_study_refuses(studies, words, capsys):
    with pytest.raises(SystemExit):
        studies.toy_task.parse_arguments(words)
    assert words[0].partition('=')[2] in capsys.readouterr().err.splitlines()[-1]


def test_flops_of_mixers_are_those_of_their_formulas(studies):
    args = studies.length.parse_arguments(['--embed=32', '--hidden=48', '--heads=4', '--lengths=16'])

    def count(name, n):
        return studies.length.forward_flops(studies.length.make('bidirectional', name, n, args), n, 32, False)

    for n in (16, 64):
        # Matrix products alone: D.1's without GELU; attention with full projections and one for its output.
        assert count('hyper_mixer', n) == 4 * n * 48 * 32 + n * (2 * 32 * 32 + 2 * 32 * 48)
        assert count('attention', n) == 8 * n * 32 * 32 + 4 * n * n * 32
        assert count('mlp_mixer', n) == 4 * n * 48 * 32
        printed = studies.length.attention_operations(n, 32, 4)
        assert printed == 6 * 4 * 8**2 + 4 * n**2 * 2 * 8 + 3 * n + 2 * 32 * n**2


def test_length_study_goes_on(studies, tmp_path, monkeypatch, capsys):
    out, figure = tmp_path / 'length.jsonl', tmp_path / 'length.png'
    monkeypatch.setattr(studies.length, 'names_of', lambda side, args: ['attention', 'fnet'])
    words = ['--embed=8', '--hidden=8', '--heads=2', '--rounds=1', '--sides=bidirectional', f'--out={out}']
    monkeypatch.setattr(sys, 'argv', ['length.py', *words, '--lengths=4'])
    studies.length.main()
    monkeypatch.setattr(sys, 'argv', ['length.py', *words, '--lengths=4,8', f'--figure={figure}'])
    studies.length.main()
    assert '4 cells, 2 done before' in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 4 and figure.stat().st_size > 0


SMALL = types.MappingProxyType(
    {'task': 'toy', 'vocabulary': '', 'model_type': 'encoder_decoder', 'seed': 0, 'percentage': 100.0, 'steps': 30,
     'batch': 8, 'learning_rate': 0.01, 'dropout': 0.0, 'width': 16, 'layers': 1, 'inputs': 6, 'targets': 5,
     'validation_examples': 20}
)  # fmt: skip


def trial(studies, variant='attention', **changed):
    return studies.small_task.Trial(**{**SMALL, 'variant': variant, **changed})


@pytest.fixture
def copying(studies, monkeypatch):
    """A task in place of a real one: up to four tokens, to be said again."""

    def rows(rng, count):
        texts = [[*rng.integers(2, 10, rng.integers(1, 5)), 1] for _ in range(count)]
        tokens = np.asarray([text + [0] * (6 - len(text)) for text in texts], np.int32)
        targets = tokens[:, :5]
        begun = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        return {'encoder_input_tokens': tokens, 'decoder_input_tokens': begun, 'decoder_target_tokens': targets}

    rng = np.random.default_rng(0)
    splits = studies.rows.Splits(rows(rng, 200), rows(rng, 40))
    monkeypatch.setattr(studies.small_task, 'data_of', lambda *_: (splits, 64))
    return splits


def test_exact_match_is_that_of_greedy_decoding(studies, copying):
    small, one = studies.small_task, trial(studies)
    train_rows, rows = copying.train, copying.validation
    program, right = small.program_of(one, 64)
    params, state = program.init(jax.random.key(0))
    for first in range(0, 150, 25):
        chosen = np.random.default_rng(first).integers(0, 200, (25, 8))
        batch = {name: array[chosen] for name, array in train_rows.items()}
        (params, state), _ = program.train((params, state), batch, 0.02, first % 25, jax.random.key(0))
    said = small.model_of(one, 64).predict(params, rows, 5)
    wanted = rows['decoder_target_tokens']
    exact = 100 * np.mean(
        [np.array_equal(a[: b.argmin() or 5], b[: b.argmin() or 5]) for a, b in zip(said, wanted, strict=True)]
    )
    found = small.judge('encoder_decoder', lambda part: right(params, part), rows)['exact_match']
    assert found == exact and 0 < exact < 100, 'some of both, or the test shows nothing'


def test_every_variant_is_a_model_of_its_own(studies):
    """By the program that makes and runs its encoder, which is traced and not run; the decoder is the same in all."""
    programs = {}
    for name in studies.small_task.VARIANTS:
        model = studies.small_task.model_of(trial(studies, name), 64)

        def encode(key, model=model):
            tokens = jnp.ones((1, 6), jnp.int32)
            return model.module.init_with_output(key, tokens, enable_dropout=False, method='encode')

        programs[name] = str(jax.make_jaxpr(encode)(jax.random.key(0)))
    same = [(a, b) for a, b in itertools.combinations(programs, 2) if programs[a] == programs[b]]
    # The recommended form of each is one of table 6 as well.
    assert same == [('attention', 'attention, pre-norm'), ('hyper_mixer', 'HyperMixing, layer norm, pre-norm')]


def test_a_part_of_the_training_split_is_drawn_by_seed(studies, copying):
    results = [studies.small_task.run(trial(studies, percentage=p, steps=2)) for p in (1, 10, 100)]
    assert [result['examples'] for result in results] == [2, 20, 200]
    again = studies.small_task.run(trial(studies, percentage=10, steps=2))
    assert again['loss'] == results[1]['loss'] != results[2]['loss']


def test_results_of_another_vocabulary_are_other_results(studies):
    def asked(*words):
        args = studies.low_resource.parse_arguments([*words])
        return studies.small_task.trial_of(args, 'attention', 0)

    small, large = (asked('--task=glue_sst2_v002', f'--vocabulary={name}.model') for name in ('small', 'large'))
    assert small != large
    assert asked('--vocabulary=small.model') == asked(), 'COGS has words of its own'


def test_expected_bests_are_compared_with_attention_as_far_as_both_go(studies):
    curves = {'attention': np.array([0.0, 40.0, 50.0]), 'fnet': np.array([1.0, 50.0])}
    more = studies.tuning.relative(curves, 'fnet')
    assert np.isnan(more[0]) and more[1] == pytest.approx(25.0) and len(more) == 2
    assert not len(studies.tuning.relative({'fnet': curves['fnet']}, 'fnet'))


def test_random_trials_are_the_same_for_all_models_and_within_bounds(studies):
    drawn = [studies.tuning.drawn(number) for number in range(200)]
    assert drawn[:3] == [studies.tuning.drawn(number) for number in range(3)]
    rates = np.log10([one['learning_rate'] for one in drawn])
    assert -8 <= rates.min() < -7.5 and -1.5 < rates.max() <= -1
    assert min(one['dropout'] for one in drawn) >= 0 and 0.4 < max(one['dropout'] for one in drawn) <= 0.5


# The programs of a trial with these and two steps are compiled once for all tests.
SIZES = ('batch', 'width', 'layers', 'inputs', 'targets', 'validation_examples')


def run_study(monkeypatch, study, out, *words):
    small = [f'--{name}={SMALL[name]}' for name in (*SIZES, 'task')]
    monkeypatch.setattr(sys, 'argv', ['study.py', *small, '--steps=2', f'--out={out}', *words])
    study.main()


def test_studies_of_a_small_task_go_on_and_end_in_tables(studies, copying, tmp_path, monkeypatch, capsys):
    out = tmp_path / 'low.jsonl'
    words = ['--seeds=2', '--percentages=10,100', '--models=attention;fnet', '--metric=token_accuracy']
    run_study(monkeypatch, studies.low_resource, out, *words, f'--figure={tmp_path}/low.png')
    table = capsys.readouterr().out
    assert 'not yet run' not in table and table.count('[2]') == 4 and (tmp_path / 'low.png').stat().st_size > 0
    lines = out.read_text().splitlines()
    accuracy = {}
    for line in map(json.loads, lines):
        key = line['cell']['variant'], line['cell']['percentage']
        accuracy.setdefault(key, []).append(line['result']['token_accuracy'])
    ratio = 100 * (np.mean(accuracy['fnet', 10]) / np.mean(accuracy['attention', 10]) - 1)
    assert f'{ratio:+.1f}%' in table
    out.write_text('\n'.join(lines[:3]) + '\n')
    run_study(monkeypatch, studies.low_resource, out, *words)
    assert '8 trials, 3 done before' in capsys.readouterr().out

    run_study(
        monkeypatch, studies.tuning, tmp_path / 't.jsonl', '--trials=1', '--models=fnet', f'--figure={tmp_path}/t.png'
    )
    assert '1 of 1 trials' in capsys.readouterr().out and (tmp_path / 't.png').exists()

    # Two rows of the four: each is three programs to compile, and the first has been compiled above.
    monkeypatch.setitem(studies.ablations.TABLES, 'remixer', ['attention', 'remixer, gated alpha'])
    run_study(monkeypatch, studies.ablations, tmp_path / 'a.jsonl', '--tables=remixer', '--seeds=1')
    table = capsys.readouterr().out
    assert 'remixer, gated alpha' in table and 'not yet run' not in table


def labelled_rows(rng, count):
    tokens = rng.integers(2, 10, (count, 6)).astype(np.int32)
    labels = np.any(tokens == 5, axis=1).astype(np.float32)
    return {'encoder_input_tokens': tokens, 'labels': labels, 'label_weights': np.ones(count, np.float32)}


def test_studies_of_a_small_task_train_encoders_alone(studies, tmp_path, monkeypatch, capsys):
    """Every variant is a classifier; two are trained, and their results are shared by the studies."""
    small, rng = studies.small_task, np.random.default_rng(0)
    splits = studies.rows.Splits(labelled_rows(rng, 40), labelled_rows(rng, 20), ('no', 'yes'))
    monkeypatch.setattr(small, 'data_of', lambda *_: (splits, 64))
    classifier = {'model_type': 'classifier', 'targets': 0, 'width': 8, 'steps': 2}
    for name in small.VARIANTS:
        assert small.model_of(trial(studies, name, **classifier), 64, splits.labels).model_type == 'classifier'

    monkeypatch.setitem(studies.ablations.TABLES, 'mixers', ['attention', 'fnet'])
    sizes = [f'--{name}={SMALL[name]}' for name in ('batch', 'layers', 'inputs', 'validation_examples')]
    words = ['--task=toy', '--model_type=classifier', *sizes, '--width=8', '--steps=2', f'--out={tmp_path}/c.jsonl']
    monkeypatch.setattr(sys, 'argv', ['ablations.py', *words, '--tables=mixers', '--seeds=2'])
    studies.ablations.main()
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith('| fnet')]
    found = {}
    for line in map(json.loads, (tmp_path / 'c.jsonl').read_text().splitlines()):
        found.setdefault(line['cell']['variant'], []).append(line['result']['accuracy'])
    assert studies.records.paired(found['fnet'], found['attention']) in shown[0]
    words += ['--models=attention;fnet', '--seeds=2', '--percentages=100']
    monkeypatch.setattr(sys, 'argv', ['low_resource.py', *words])
    studies.low_resource.main()
    assert '4 trials, 4 done before' in capsys.readouterr().out
    assert studies.tuning.parse_arguments(['--model_type=classifier']).metric == 'accuracy'

    program, right = small.program_of(trial(studies, **classifier), 64, splits.labels)
    params = program.init(jax.random.key(0))[0]
    sums = small.model_of(trial(studies, **classifier), 64, splits.labels).loss(params, splits.train)[1]
    judged = small.judge('classifier', lambda rows: right(params, rows), splits.train)
    assert judged['accuracy'] == pytest.approx(100 * float(sums['correct']) / 40) and 0 < judged['accuracy'] < 100


def test_layouts_are_compared_with_the_same_layout(studies):
    table = studies.ablations.TABLES['layouts']
    assert studies.ablations.baseline(table, 'HyperMixing, length, ReZero', 'attention') == 'attention, ReZero'
    assert studies.ablations.baseline(['attention', 'fnet, post-norm'], 'fnet, post-norm', 'attention') == 'attention'


def test_differences_between_seeds_have_students_interval(studies):
    paired = studies.records.paired
    # The quantile of 95% is 2.92 for two degrees of freedom.
    assert paired([1, 2, 6], [0, 0, 3]) == f'+2.00 ± {2.91999 / 3**0.5:.2f}'
    assert paired([1], [3]) == '-2.00' and paired([], []) == ''


@pytest.mark.parametrize(
    ('study', 'words'),
    [
        ('low_resource', ['--models=attention;mamba']),
        ('low_resource', ['--percentages=0,10']),
        ('tuning', ['--trials=0']),
        ('ablations', ['--tables=remixer,table_9']),
        ('ablations', ['--width=30']),
        ('ablations', ['--dropout=1']),
        ('ablations', ['--against=mamba']),
        ('ablations', ['--model_type=classifier', '--targets=3']),
        ('tuning', ['--model_type=classifier', '--metric=exact_match']),
    ],
)
def test_studies_of_a_small_task_refuse(studies, study, words, capsys):
    with pytest.raises(SystemExit):
        getattr(studies, study).parse_arguments(words)
    given = words[-1].partition('=')[2].replace(';', ',').split(',')[-1]
    assert given in capsys.readouterr().err.splitlines()[-1]


def test_table_1_sets_ratios_beside_the_papers(studies):
    ours = {key: (paper[0], 2 * paper[1], paper[2] / 10) for key, paper in studies.table_1.PAPER.items()}
    for row in studies.table_1.rows(ours):
        assert row[4] == row[5] and row[7] == row[8]


def test_a_result_is_of_no_other_setting(studies, tmp_path):
    one = trial(studies)
    records = studies.records.Records(tmp_path / 'r.jsonl')
    records.add(dataclasses.asdict(one), {'loss': 1.0})
    again = studies.records.Records(tmp_path / 'r.jsonl')
    for field in dataclasses.fields(one):
        changed = dataclasses.replace(one, **{field.name: 7})
        assert studies.small_task.values_of(again, [one, changed], 'loss') == [1.0], field.name


def test_whole_models_are_timed_or_said_to_be_too_large(studies, tmp_path, monkeypatch, capsys):
    """Encoding, gradients and decoding of a small T5; its FLOPs against a count by hand."""
    whole = studies.whole_models
    small = {
        'EMBED_DIM': 8,
        'MLP_DIM': 12,
        'NUM_HEADS': 2,
        'HEAD_DIM': 4,
        'NUM_ENCODER_LAYERS': 1,
        'NUM_DECODER_LAYERS': 1,
    }
    size, out, figure = (tmp_path / name for name in ('small.gin', 'out.jsonl', 'whole.png'))
    size.write_text(''.join(f'{name} = {value}\n' for name, value in small.items()))
    words = [f'--size={size}', '--lengths=8,16', '--models=t5_1_1', '--outputs=2', '--rounds=1', f'--out={out}']
    monkeypatch.setattr(sys, 'argv', ['whole_models.py', *words, f'--figure={figure}'])
    monkeypatch.setattr(whole, 'peak_of', lambda dtype: 1e9)
    monkeypatch.setattr(whole, 'PROGRAMS', ('encode', 'decode'))
    whole.main()
    results = [json.loads(line) for line in out.read_text().splitlines()]
    encoded = {r['cell']['length']: r['result'] for r in results if r['cell']['program'] == 'encode'}
    # Four projections of 8 x 8, a gated feed-forward of three of 8 x 12, scores and values over all pairs.
    for length in (8, 16):
        assert encoded[length]['flops'] == 2 * length * (4 * 64 + 3 * 96 + 2 * 8 * length)
        assert encoded[length]['seconds'] > 0 and encoded[length]['bytes'] > 0
    assert 'ms, ' in capsys.readouterr().out and figure.stat().st_size
    cell = whole.Cell(**{**results[0]['cell'], 'program': 'train', 'memory_gb': 0.0})
    assert whole.measured(cell)['seconds'] is None


def test_objectives_are_judged_on_each_denoiser(studies, monkeypatch, tmp_path, capsys):
    """Both go through all of a trial on a little text, and get as many FLOPs."""
    import seqio

    from remixer_tasks import vocabularies
    from remixer_tasks.objectives import ul2

    # Two of the seven, which take less time.
    monkeypatch.setattr(ul2, 'SEVEN', ul2.SEVEN[2::4])
    monkeypatch.setattr(vocabularies, 'trained', lambda *_: seqio.ByteVocabulary(extra_ids=100))
    text = tmp_path / 'text.jsonl'
    lines = [' '.join(f'word{(i * j) % 97}' for j in range(60)) for i in range(200)]
    text.write_text(''.join(json.dumps({'text': line}) + '\n' for line in lines))
    objectives = studies.objectives
    # Read once, here and by the trials.
    monkeypatch.setattr(objectives, 'data_of', functools.cache(objectives.data_of))
    trial = objectives.Trial('ul2', 0, str(text), 2e7, 2, 64, 8, 1, 384, 70, 1e-2)
    data = objectives.data_of('ul2', str(text), 64, 384, 70)
    assert set(data.held_out) == {denoiser.name for denoiser in ul2.denoisers()}
    plain = objectives.data_of('span_corruption', str(text), 64, 384, 70)
    # The same text, in front of which only UL2's model sees a prompt.
    prompt = len(ul2.PROMPTS['x'])
    ours, theirs = (one.held_out['x_span64_rate50']['encoder_input_tokens'] for one in (data, plain))
    decoded = [seqio.ByteVocabulary().decode([int(i) for i in rows[0] if 1 < i < 259]) for rows in (ours, theirs)]
    assert decoded[0].startswith(ul2.PROMPTS['x']) and not decoded[1].startswith('[')
    assert decoded[0][prompt : prompt + 8] == decoded[1][:8]
    other = dataclasses.replace(trial, objective='span_corruption')
    known = studies.records.Records(tmp_path / 'objectives.jsonl')
    studies.records.run_missing(known, [trial, other], objectives.run)
    studies.records.run_missing(known, [trial, other], lambda trial: pytest.fail('it was done before'))
    found = {one.objective: [known.get(dataclasses.asdict(one))] for one in (trial, other)}
    assert found['span_corruption'][0]['steps'] > found['ul2'][0]['steps'] > 1
    assert all(0 < found[name][0][denoiser] < 20 for name in found for denoiser in data.held_out)
    objectives.print_table(found)
    assert '| x_span64_rate50 |' in capsys.readouterr().out


def dataset_of(examples):
    """Of examples whose values are lists of ids of any length, or bytes."""
    import tensorflow as tf

    signature = {
        name: tf.TensorSpec((), tf.string) if isinstance(value, bytes) else tf.TensorSpec((None,), tf.int32)
        for name, value in examples[0].items()
    }
    return tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature)


def masked_text(rng, count):
    """Rows of 8 random ids, of which about a third is predicted."""
    tokens = rng.integers(3, 32, (count, 8)).astype(np.int32)
    chosen = rng.random((count, 8)) < 0.3
    targets = np.where(chosen, tokens, 0)
    return {'encoder_input_tokens': tokens, 'encoder_target_tokens': targets, 'encoder_loss_weights': chosen * 1}


@pytest.mark.parametrize('read', ['damaged_text.segments', 'encoders.masked_rows', 'objectives.rows_of'])
def test_the_damage_of_a_text_is_the_same_in_every_process(studies, read):
    """seqio draws other noise each time a dataset is opened without a seed."""
    import seqio
    import tensorflow as tf

    @seqio.map_over_dataset(num_seeds=1)
    def damaged(example, seed):
        ids = tf.random.stateless_uniform((8,), seed, 3, 30, tf.int32)
        return {'inputs': ids, 'targets': ids[:4]}

    source = seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.range(5).map(lambda number: {'number': number}),
        splits=['train'],
    )
    features = {name: seqio.Feature(seqio.PassThroughVocabulary(32), add_eos=False) for name in ('inputs', 'targets')}
    task = seqio.Task('noise', source, features, preprocessors=[damaged])
    module, function = read.split('.')
    first, second = (getattr(getattr(studies, module), function)(task, 'train', 8, 5) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    assert len(np.unique(first['encoder_input_tokens'], axis=0)) == 5


def test_an_encoder_is_trained_on_text_and_then_on_labels(studies, monkeypatch, tmp_path, capsys):
    """Every mixer builds; one of them goes through all of a trial, on random ids."""
    encoders, rng = studies.encoders, np.random.default_rng(0)

    class Task:
        def get_dataset(self, lengths, split, shuffle):
            count, labels = {'train': 9, 'validation': 5}[split], [b'yes', b'no']
            rows = [{'inputs': [5] * (1 + i % 8), 'targets_pretokenized': labels[i % 2]} for i in range(count)]
            return dataset_of(rows)

    task = studies.label_answers.splits_of(Task(), 8)
    assert task.labels == ('no', 'yes') and task.validation['labels'].tolist() == [1, 0, 1, 0, 1]
    assert task.train['encoder_input_tokens'].shape == (9, 8)
    monkeypatch.setattr(encoders, 'data_of', lambda *_: (masked_text(rng, 9), masked_text(rng, 5), {'toy': task}))
    trial = encoders.Trial('hyper_mixer', 0, '', 'toy', 2, 2, 4, 8, 8, 1, 32, 9, 1e-2, 1e-2)
    for mixer in encoders.MIXERS:
        for labels, model_type in (((), 'encoder_only'), (task.labels, 'classifier')):
            assert encoders.model_of(dataclasses.replace(trial, mixer=mixer, layers=3), labels).model_type == model_type
    result = encoders.run(trial)
    accuracies = {result['toy after text'], result['toy from random']}
    assert 0 < result['held-out loss'] < 10 and all(
        round(accuracy, 4) in {0, 20, 40, 60, 80, 100} for accuracy in accuracies
    )
    records = studies.records.Records(tmp_path / 'encoders.jsonl')
    records.add(dataclasses.asdict(trial), result)
    trials = [trial, dataclasses.replace(trial, mixer='attention')]
    found = studies.comparison.results_by(records, trials, 'mixer')
    encoders.print_table(found, 'toy', 1.5)
    encoders.draw(found, 'toy', str(tmp_path / 'encoders.png'), 1.5)
    even = {'encoder_target_tokens': np.array([[3, 4, 0, 5, 6]]), 'encoder_loss_weights': np.array([[1, 1, 0, 1, 1]])}
    assert encoders.constant_loss(even) == pytest.approx(np.log(4))
    assert encoders.metrics_of('') == ['held-out loss', 'masked accuracy']
    rows = capsys.readouterr().out.splitlines()
    assert (
        '| hyper_mixer |' in rows[4]
        and 'not yet run' in rows[5]
        and 'difference from hyper_mixer' in rows[6]
        and (tmp_path / 'encoders.png').stat().st_size
    )


def test_tim_has_as_many_parameters_as_attention(studies):
    trial = studies.encoders.Trial('attention', 0, '', '', 2, 2, 4, 32, 32, 4, 288, 9, 1e-2, 1e-2)

    def parameters(mixer):
        model = studies.encoders.model_of(dataclasses.replace(trial, mixer=mixer))
        shapes = interface.param_shapes(model, {'encoder_input_tokens': (1, 2)})
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    for mixer in studies.encoders.TIM_MIXERS:
        assert parameters(mixer) == pytest.approx(parameters('attention'), rel=0.01)


def test_each_optimizer_gets_its_best_rate_with_all_seeds_and_nothing_is_done_twice(studies, tmp_path, capsys):
    study, asked = studies.optimizers, []

    def run(cell, folder):
        asked.append(cell)
        assert f'--gin_file=optimizers/{cell["optimizer"]}.gin' in study.command(cell, folder)
        # AdamW is best at nine times its rate, which is found in two steps, Muon at its own.
        aim = {'adamw': 9e-3, 'muon': 2e-3}[cell['optimizer']]
        return {study.NUMBER: abs(cell['rate'] - aim) + cell['seed'] + (cell['optimizer'] == 'adamw')}

    args = study.parse_arguments(['--folder', str(tmp_path), '--optimizers=adamw,muon', '--steps=5'])
    found = study.study(args, run)
    assert {name: rate for name, (rate, _) in found.items()} == pytest.approx({'adamw': 9e-3, 'muon': 2e-3})
    assert found['muon'][1] == [0.0, 1.0, 2.0] and len(asked) == 7 + 5
    study.print_table(study.study(args, lambda *_: pytest.fail('it was done before')))
    assert [line.split('`')[1] for line in capsys.readouterr().out.splitlines()[2:]] == ['muon', 'adamw']


def test_every_recipe_traces_and_costs_what_its_header_says(studies):
    """State and step of the size that a paper trains, from shapes alone."""
    names = studies.recipes.names()
    assert len(names) >= 9
    assert {name: studies.recipes.written(name) for name in names} == {
        name: studies.recipes.traced(name).line() for name in names
    }


def test_laws_of_scaling_are_found_again(studies):
    fit, budgets = studies.scaling_fit, [1e9, 1e10, 1e11, 1e12]
    exact = {budget: 7 * budget**-0.08 for budget in budgets}
    # Each size is best at some budgets, where it is on the law.
    small = {budget: loss * (1 if budget < 1e11 else 1.2) for budget, loss in exact.items()}
    large = {budget: loss * (1 if budget > 1e10 else 1.2) for budget, loss in exact.items() if budget > 1e9}
    by_size = {'8x1': [small, small], '16x1': [large, large]}
    assert fit.envelope(by_size, [*budgets, 1e15]) == pytest.approx(exact)
    assert fit.law(budgets, list(exact.values())) == pytest.approx((np.log(7), 0.08))
    np.testing.assert_allclose(fit.bootstrap(by_size, budgets, 20)[:, 1], 0.08, rtol=1e-6)

    def is_in_band(seed):
        rng = np.random.default_rng(seed)
        runs = [{budget: loss * np.exp(rng.normal(0, 0.03)) for budget, loss in exact.items()} for _ in range(2)]
        low, high = np.percentile(fit.bootstrap({'8x1': runs}, budgets, 40)[:, 1], fit.BAND)
        return low < 0.08 < high

    # The band is of 90%.
    assert np.mean([is_in_band(seed) for seed in range(15)]) > 0.7


def test_scaling_takes_losses_of_one_run_at_every_budget(studies, tmp_path, monkeypatch, capsys):
    scaling, rng = studies.scaling, np.random.default_rng(0)

    def text(count):
        tokens = rng.integers(3, 32, (count, 8)).astype(np.int32)
        targets = tokens[:, :4]
        begun = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        return {'encoder_input_tokens': tokens, 'decoder_input_tokens': begun, 'decoder_target_tokens': targets,
                'decoder_loss_weights': np.ones_like(targets)}  # fmt: skip

    data = text(9), text(6)
    monkeypatch.setattr(scaling, 'data_of', lambda *_: data)
    monkeypatch.setattr(scaling, 'target_lengths', lambda length: {'inputs': 8, 'targets': 4})
    small = ['--text=', '--models=t5_1_1', '--sizes=8x1', '--batch=2', '--length=8', '--vocabulary=32', '--warmup=1']
    (trial,) = scaling.trials_of(scaling.parse_arguments([*small, '--seeds=1']))
    for model in scaling.MODELS:
        assert scaling.setup_of(dataclasses.replace(trial, model=model))[0].model_type == 'encoder_decoder'
    with pytest.raises(UserError, match='gpu.gin is for gpu'):
        scaling.setup_of(dataclasses.replace(trial, hardware='hardware/gpu.gin'))
    of_a_step = scaling.compiled(trial)[3]
    assert scaling.steps_of(dataclasses.replace(trial, budgets=(of_a_step, 3 * of_a_step, 9e20)), of_a_step) == {
        3 * of_a_step: 3
    }
    out, budgets = tmp_path / 'scaling.jsonl', [2 * of_a_step, 30 * of_a_step, 31 * of_a_step]
    words = [
        *small,
        '--seeds=2',
        f'--out={out}',
        f'--figure={tmp_path}/s.png',
        f'--budgets={",".join(map(str, budgets))}',
    ]
    monkeypatch.setattr(sys, 'argv', ['scaling.py', *words])
    scaling.main()
    assert '2 runs, 0 done before' in capsys.readouterr().out and (tmp_path / 's.png').stat().st_size > 0
    results = [json.loads(line)['result'] for line in out.read_text().splitlines()]
    assert [result['steps'] for result in results] == [31, 31] and results[0]['points'] != results[1]['points']
    first, *_, last = results[0]['points']
    assert [point[0] for point in results[0]['points']] == budgets and 0 < last[1] < first[1]
    scaling.main()
    assert '2 runs, 2 done before' in capsys.readouterr().out


def test_a_model_is_trained_on_text_and_then_on_tasks_with_their_kinds(studies, tmp_path, monkeypatch, capsys):
    """Every model builds; one goes through all of a trial, on random ids."""
    transfer, rng = studies.transfer, np.random.default_rng(0)

    def rows(count, targets):
        tokens = rng.integers(3, 32, (count, 8 + targets))
        return studies.rows.encoder_decoder(tokens[:, :8], tokens[:, 8:])

    text = rows(9, 4), rows(6, 4)
    monkeypatch.setattr(studies.damaged_text, 'data_of', lambda *_: text)
    kinds = ('subj_to_obj_proper', 'subj_to_obj_proper', 'passive_to_active', 'pp_recursion')
    tasks = {
        transfer.COGS: transfer.Labelled(rows(9, 8), rows(5, 8), rows(4, 8), kinds),
        'toy': transfer.Labelled(rows(9, 8), rows(5, 8)),
    }
    monkeypatch.setattr(transfer, 'labelled', lambda name, *_: tasks[name])
    asked = f'{transfer.COGS}:2,toy:2'
    trial = transfer.Trial('remixer', 0, '', asked, 2, 4, 8, 8, 8, 1, 32, 9, 1e-2, 1e-2, 2)
    for model in transfer.MODELS:
        assert transfer.model_of(dataclasses.replace(trial, model=model)).model_type == 'encoder_decoder'
    records = studies.records.Records(tmp_path / 'transfer.jsonl')
    studies.records.run_missing(records, [trial], transfer.run)
    result = records.get(dataclasses.asdict(trial))
    assert 0 < result['held-out loss'] < 10 and {'toy', transfer.COGS, 'gen lexical', 'gen pp_recursion'} <= set(result)
    # An answer with one wrong token is wrong; most of its tokens may be right.
    assert 0 <= result['gen lexical'] <= result['gen tokens lexical'] <= 100
    tokens, targets = np.array([[True, False, True, True], [True] * 4]), np.array([[5, 6, 7, 0], [5, 6, 0, 0]])
    assert transfer.right_share(tokens).tolist() == [0, 100]
    assert np.allclose(transfer.token_share(tokens, {'decoder_target_tokens': targets}), [200 / 3, 100])
    moved = {path: far for path, far in result.items() if path.startswith('moved ')}
    assert len(moved) == 4 and min(moved.values()) > 0, 'H and alpha of each side'
    transfer.print_tables({'remixer': [result], 'gmlp': []}, asked)
    assert capsys.readouterr().out.count('| pp_recursion |') == 2
    # Where the targets of all structural kinds are too long, no table or figure has them.
    shown = transfer.metrics_of(asked, {'remixer': [{'gen lexical': 1.0, 'gen tokens lexical': 2.0}]})
    assert shown == ['held-out loss', transfer.COGS, 'toy', 'gen lexical', 'gen tokens lexical']
    right = np.array([100.0, 0.0, 100.0, 0.0])
    assert transfer.by_kind('gen', right, kinds) == {
        'gen subj_to_obj_proper': 50, 'gen passive_to_active': 100, 'gen pp_recursion': 0,
        'gen lexical': 75, 'gen structural': 0,
    }  # fmt: skip
    assert studies.comparison.difference([{'x': 3.0}, {}, {'x': 5.0}], [{'x': 1.0}] * 3, 'x') == '+3.00 ± 6.31'


def test_transfer_leaves_out_long_targets_and_takes_a_few_of_a_kind(studies):
    examples = [
        {'inputs': [5] * (1 + i % 8), 'targets': [6] * (1 + i), 'type': b'ab'[i % 2 : i % 2 + 1]} for i in range(20)
    ]
    task = types.SimpleNamespace(name='toy', get_dataset=lambda *_, **__: dataset_of(examples))
    found, kinds, left_out = studies.transfer.rows_of(task, 'gen', 8, 10, of_a_kind=6)
    # Six of each kind, of which a's targets have 1, 3, ... 11 tokens and b's 2, 4, ... 12.
    assert (kinds, left_out) == (('a', 'b') * 5, 2)
    assert found['decoder_target_tokens'].shape == (10, 16) and found['encoder_input_tokens'].shape == (10, 8)
    with pytest.raises(UserError, match='give a larger --targets'):
        studies.transfer.rows_of(task, 'gen', 8, 0)


def test_spatial_weights_are_drawn_with_their_toeplitz_share(studies, monkeypatch, tmp_path, capsys):
    study, rng = studies.spatial_weights, np.random.default_rng(0)
    distances = np.arange(20) - np.arange(20)[:, None]
    assert study.toeplitz_share(np.sin(distances)) == pytest.approx(1)
    assert study.toeplitz_share(rng.normal(size=(200, 200))) == pytest.approx(2 / 200, rel=0.2)

    data = masked_text(rng, 9), masked_text(rng, 5)
    monkeypatch.setattr(study, 'data_of', lambda *_: data)
    out, figure = tmp_path / 'w.jsonl', tmp_path / 'w.png'
    small = ['--text=', '--steps=2', '--batch=4', '--length=8', '--width=8', '--layers=1', '--vocabulary=32']
    monkeypatch.setattr(sys, 'argv', ['spatial_weights.py', *small, f'--out={out}', f'--figure={figure}'])
    study.main()
    assert '| by pair of positions | 0 | 2 |' in capsys.readouterr().out and figure.stat().st_size > 0
    by_mixer = {line['cell']['mixer']: line['result'] for line in map(json.loads, out.read_text().splitlines())}
    assert by_mixer['gmlp']['share after'] == pytest.approx([1], abs=1e-3)
    assert by_mixer['gmlp, free']['share before'][0] < 0.6
