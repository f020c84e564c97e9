"""Settings of a T5 without attention, for tests that train but do not test the model."""

SETTINGS = {
    'ENCODER_SUBLAYERS': '(%ENCODER_FEED_FORWARD,)',
    'DECODER_SUBLAYERS': '(%DECODER_FEED_FORWARD,)',
    'ENCODER_POSITION_BIAS': None,
    'DECODER_POSITION_BIAS': None,
}
FLAGS = tuple(f'--gin.{name}={value}' for name, value in SETTINGS.items())
