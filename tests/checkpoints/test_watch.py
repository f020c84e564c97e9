"""Which checkpoints are evaluated: named ones, the nearest to a wrong name, and each in a folder as it fills."""

import pytest

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.errors import UserError


def save(folder, *steps):
    for step in steps:
        (folder / 'checkpoints' / str(step) / 'state').mkdir(parents=True)


def names(found):
    return [path.name for path in found]


def test_paths_name_checkpoints_or_the_newest_of_a_run(tmp_path):
    save(tmp_path / 'a', 5, 100, 20)
    save(tmp_path / 'b', 7)
    given = f'{tmp_path}/a/checkpoints/5, {tmp_path}/a, {tmp_path}/b/checkpoints'
    assert names(saved_params.find_checkpoints(given)) == ['5', '100', '7']


def test_a_checkpoint_that_is_being_written_is_none_yet(tmp_path):
    save(tmp_path, 5)
    (tmp_path / 'checkpoints' / '10').mkdir()
    (tmp_path / 'checkpoints' / '12.orbax-checkpoint-tmp' / 'state').mkdir(parents=True)
    assert names(saved_params.find_checkpoints(str(tmp_path))) == ['5']


@pytest.mark.parametrize(
    ('path', 'line'),
    [
        ('rnn', 'did you mean run?'),
        ('run/checkpoints/90', 'give the MODEL_DIR of a run that saved one'),
        ('', 'CHECKPOINT_PATH must name one or more checkpoints'),
        ('run,run/checkpoints/100', 'of different steps'),
    ],
)
def test_a_wrong_path_is_refused(tmp_path, path, line):
    save(tmp_path / 'run', 5, 100)
    given = ','.join(f'{tmp_path}/{part}' for part in path.split(',')) if path else ''
    with pytest.raises(UserError) as caught:
        saved_params.find_checkpoints(given)
    assert line in str(caught.value)


class Clock:
    """In place of `time`: a caller that sleeps wakes up at once, and `happens` is called meanwhile."""

    def __init__(self, happens=lambda: None):
        self.now, self._happens = 0.0, happens

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self._happens()


def test_following_takes_each_checkpoint_once_as_it_appears(tmp_path, monkeypatch):
    save(tmp_path, 10)
    later = iter((20, 30))
    monkeypatch.setattr(saved_params, 'time', Clock(lambda: save(tmp_path, next(later))))
    assert names(saved_params.follow_checkpoints(str(tmp_path), timeout=20, until=30, poll=0.01)) == ['10', '20', '30']


def test_following_ends_by_itself_and_goes_on_after_what_is_done(tmp_path, monkeypatch):
    save(tmp_path, 10, 20, 30)
    clock = Clock()
    monkeypatch.setattr(saved_params, 'time', clock)
    assert names(saved_params.follow_checkpoints(str(tmp_path), timeout=0.1, done={10, 30}, poll=0.01)) == ['20']
    assert clock.now == pytest.approx(0.1, abs=0.02)


def test_following_a_folder_that_stays_empty_is_an_error(tmp_path):
    save(tmp_path / 'run', 10)
    with pytest.raises(UserError, match='did you mean run?'):
        list(saved_params.follow_checkpoints(str(tmp_path / 'rum'), timeout=0, poll=0.01))
