"""Flags that set macros for decoding and batch sizes."""

import gin
import pytest

from remixer_t5x.cli import arguments, evaluate, infer, main
from remixer_t5x.errors import UserError
from remixer_t5x.extras import export
from remixer_t5x.models.beam_search import BeamSearch
from remixer_t5x.models.decoding import Greedy
from remixer_t5x.models.sampling import Sampling


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
    args = parse(command.COMMAND.name, *flags, '--batch_size=7')
    arguments.apply_decoder_flags(args, command.BASE)
    macro = {'infer': 'INFER_BATCH_SIZE', 'eval': 'EVAL_BATCH_SIZE'}[command.COMMAND.name]
    assert arguments.load_macro_values(args, 'DECODER', macro, base=command.BASE) == [decoder, 7]
    gin.clear_config()


def test_two_decoders_are_rejected():
    for flags in (['--beams=2', '--sampling'], ['--beams=2', '--embed'], ['--beams=1']):
        with pytest.raises(UserError, match='--beams'):
            parse('infer', *flags)
    for temperature in ('hot', '0'):
        args = parse('infer', f'--sampling={temperature}')
        with pytest.raises(UserError, match=f'TEMPERATURE must be .*{temperature}'):
            arguments.apply_decoder_flags(args, infer.BASE)


@pytest.mark.parametrize(
    ('flags', 'message'),
    [(('--min_p=0.1',), 'MIN_P requires --sampling, got Greedy; pass --sampling, or omit MIN_P'),
     (('--beams=3', '--min_p=0.1'), 'MIN_P requires --sampling, got BeamSearch'),
     (('--gin.TEMPERATURE=0.5',), 'TEMPERATURE requires --sampling'), (('--gin.TOP_K=3',), 'TOP_K requires --sampling'),
     (('--gin.TOP_P=0.9',), 'TOP_P requires --sampling'), (('--gin.SAMPLES=2',), 'SAMPLES requires --sampling'),
     (('--sampling', '--gin.BEAMS=3'), 'BEAMS requires --beams, got Sampling')],
)  # fmt: skip
@pytest.mark.parametrize('command', [infer, evaluate])
@pytest.mark.usefixtures('clean_gin')
def test_options_of_another_decoder_are_rejected(command, flags, message):
    with pytest.raises(UserError, match=message):
        command.run(parse(command.COMMAND.name, *flags))


@pytest.mark.parametrize(
    ('flag', 'name', 'model_type'),
    [('--beams=3', '--beams', 'classifier'), ('--sampling', '--sampling', 'token_labels'),
     ('--stop_strings=.', 'STOP_STRINGS', 'span'), ('--gin.DECODER=@sampling.Sampling()', 'DECODER', 'embedding')],
)  # fmt: skip
@pytest.mark.parametrize('command', [infer, evaluate])
@pytest.mark.usefixtures('clean_gin')
def test_decoder_flags_of_a_model_with_a_head_are_rejected(command, flag, name, model_type):
    with pytest.raises(UserError, match=f"^{name} requires a model that generates text, got .* = '{model_type}'"):
        command.run(parse(command.COMMAND.name, f'--gin.MODEL_TYPE={model_type}', flag))


@pytest.mark.usefixtures('clean_gin')
def test_decoder_options_with_embeddings_are_rejected():
    with pytest.raises(UserError, match='NO_REPEAT_NGRAM_SIZE must be omitted with --embed'):
        infer.run(parse('infer', '--embed', '--no_repeat_ngram_size=2'))


@pytest.mark.parametrize(
    ('macro', 'decoder'),
    [('MIN_P', 'sampling.Sampling'), ('TOP_K', 'sampling.Sampling'), ('BEAMS', 'beam_search.BeamSearch')],
)
@pytest.mark.usefixtures('clean_gin')
def test_export_rejects_options_of_another_decoder(macro, decoder, tmp_path):
    with pytest.raises(UserError, match=rf"{macro} requires --gin.DECODER='@{decoder}\(\)', got Greedy"):
        export.run(parse('export', f'--to={tmp_path}/out', f'--gin.{macro}=1'))


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
    files = [f'--gin_file={file}.gin' for file in ('models/t5_1_1', 'sizes/tiny', 'data/mini_cogs')]
    assert main.main(['eval', '--checkpoint=missing', '--submission=files', *files, flag]) == 2
    assert 'SUBMISSION_DIR requires a single checkpoint' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('command', 'flag', 'name'), [(infer, '--output', 'OUTPUT'), (evaluate, '--submission', 'SUBMISSION_DIR')]
)
@pytest.mark.usefixtures('clean_gin')
def test_output_macros_reject_urls(command, flag, name):
    files = [f'--gin_file={file}.gin' for file in ('models/t5_1_1', 'sizes/tiny', 'data/mini_cogs')]
    args = parse(command.COMMAND.name, f'{flag}=gs://bucket/x', *files, '--gin.CHECKPOINT_PATH=missing')
    with pytest.raises(UserError, match=f'{name} must be a local path.*, got .gs://bucket/x'):
        command.run(args)
