"""Flags that set macros for decoding and batch sizes."""

import gin
import pytest

from remixer_t5x.cli import arguments, evaluate, infer, main
from remixer_t5x.config import reference_resolver
from remixer_t5x.errors import UserError
from remixer_t5x.extras import export
from remixer_t5x.models.beam_search import BeamSearch
from remixer_t5x.models.decoding import Greedy
from remixer_t5x.models.sampling import Sampling

MODEL = [
    *(f'--gin_file={file}.gin' for file in ('models/t5_1_1', 'sizes/tiny', 'data/mini_cogs')),
    '--gin.CHECKPOINT_PATH=missing',
]


def parse(*argv):
    rest, flags = arguments.split_gin_flags(argv)
    args = main._build_parser().parse_args([*rest, '--verbose'])
    args.gin_flags = [*flags, *args.macros]
    return args


@pytest.mark.parametrize(
    ('command', 'flags', 'decoder'),
    [(infer, (), Greedy()), (infer, ('--beams=3',), BeamSearch(beams=3)),
     (evaluate, ('--sampling=0.5', '--min_p=0.1'), Sampling(temperature=0.5, min_p=0.1)),
     (evaluate, ('--gin.DECODER=@sampling.Sampling()', '--gin.TOP_K=3'), Sampling(top_k=3)),
     (infer, ('--gin.DECODER=@sampling.Sampling()', '--min_p=0.1'), Sampling(min_p=0.1)),
     (infer, ('--no_repeat_ngram_size=2', '--repetition_penalty=1.5', '--min_new_tokens=3'),
      Greedy(no_repeat_ngram_size=2, repetition_penalty=1.5, min_new_tokens=3)),
     (infer, ('--beams=3', '--bad_words_ids=[[5, 6], [7]]', '--forced_prefix=[4]'),
      BeamSearch(beams=3, bad_words_ids=[[5, 6], [7]], forced_prefix=[4]))],
)  # fmt: skip
def test_flags_choose_the_decoder_and_the_batch_size(command, flags, decoder):
    """The files of the finetuned run, which set another batch size and seed, are read after those of the command."""
    values = ('--batch_size=7', '--gin.DECODER_SEED=3', '--gin.CHECKPOINT_PATH=missing')
    args = parse(command.COMMAND.name, '--gin_file=experiments/quickstart.gin', *flags, *values)
    arguments.apply_decoder_flags(args)
    defaults = infer.DEFAULTS if command is infer else {}
    arguments.load_config(args, command.ROOT, base=command.BASE, defaults=defaults)
    settings = reference_resolver.call_configured(command.ROOT)
    decoding = settings.decoding if command is infer else settings.tasks.decoding
    assert (decoding.decoder, decoding.batch_size, decoding.seed) == (decoder, 7, 3)
    gin.clear_config()


def test_two_decoders_are_rejected():
    for flags in (['--beams=2', '--sampling'], ['--beams=2', '--embed'], ['--beams=1']):
        with pytest.raises(UserError, match='--beams'):
            parse('infer', *flags)
    for temperature in ('hot', '0'):
        with pytest.raises(UserError, match=f'TEMPERATURE must be .*{temperature}'):
            infer.run(parse('infer', f'--sampling={temperature}', *MODEL))


@pytest.mark.parametrize(
    ('flags', 'macro', 'reader'),
    [(('--min_p=0.1',), 'MIN_P', 'sampling.Sampling.min_p'), (('--gin.TOP_K=3',), 'TOP_K', 'sampling.Sampling.top_k'),
     (('--beams=3', '--min_p=0.1'), 'MIN_P', 'sampling.Sampling.min_p'),
     (('--sampling', '--gin.BEAMS=3'), 'BEAMS', 'beam_search.BeamSearch.beams')],
)  # fmt: skip
@pytest.mark.parametrize('command', [infer, evaluate])
@pytest.mark.usefixtures('clean_gin')
def test_options_of_another_decoder_are_rejected(command, flags, macro, reader):
    with pytest.raises(UserError, match=f'{macro} is set, but nothing reads it; it is the value of {reader}, which'):
        command.run(parse(command.COMMAND.name, *MODEL, *flags))


@pytest.mark.usefixtures('clean_gin')
def test_export_rejects_options_of_another_decoder(tmp_path):
    with pytest.raises(UserError, match='BEAMS is set, but nothing reads it; it is the value of '):
        export.run(parse('export', f'--to={tmp_path}/out', '--gin.BEAMS=3', *MODEL))


@pytest.mark.parametrize(
    ('command', 'flag'),
    [('score M F', '--output'), ('export', '--to'), ('report R', '--out'), ('report R', '--pictures_dir'),
     ('compare train', '--folder'), ('reproduce gmlp/table_3', '--folder'), ('convert --checkpoint=R', '--to_hf'),
     ('convert --checkpoint=R', '--to_safetensors'), ('convert --checkpoint=R', '--to_shared')],
)  # fmt: skip
def test_output_flags_reject_urls(command, flag):
    with pytest.raises(UserError, match=f'{flag}.* must be a local path.*, got .gs://bucket/x'):
        parse(*command.split(), f'{flag}=gs://bucket/x')


@pytest.mark.parametrize('flag', ['--follow', '--checkpoint=a,b'])
@pytest.mark.usefixtures('clean_gin')
def test_a_submission_of_several_checkpoints_is_rejected(flag, capsys):
    assert main.main(['eval', '--submission=files', *MODEL, flag]) == 2
    assert 'SUBMISSION_DIR requires a single checkpoint' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('command', 'flag', 'name'), [(infer, '--output', 'OUTPUT'), (evaluate, '--submission', 'SUBMISSION_DIR')]
)
@pytest.mark.usefixtures('clean_gin')
def test_output_macros_reject_urls(command, flag, name):
    args = parse(command.COMMAND.name, f'{flag}=gs://bucket/x', *MODEL)
    with pytest.raises(UserError, match=f'{name} must be a local path.*, got .gs://bucket/x'):
        command.run(args)
