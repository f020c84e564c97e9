"""Contract tests for a custom sublayer: `check_sublayer(MyMixer)`."""

from remixer_t5x.testing.check import Report as Report
from remixer_t5x.testing.check import check_sublayer as check_sublayer
from remixer_t5x.testing.contract import ContractViolation as ContractViolation

__all__ = ['ContractViolation', 'Report', 'check_sublayer']
