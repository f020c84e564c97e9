"""Contract tests for a custom sublayer: `check_sublayer(MyMixer)`."""

from remixer_t5x.testing.check import Report as Report
from remixer_t5x.testing.check import check_sublayer as check_sublayer
from remixer_t5x.testing.laws import BrokenLaw as BrokenLaw

__all__ = ['BrokenLaw', 'Report', 'check_sublayer']
